"""What a run's folder tells: of one that trains now, of one that is over, of one that was killed."""

from __future__ import annotations

import csv
import json
from collections import deque
from pathlib import Path
from typing import Any

import yaml

from pager.statistics import Statistics
from pager.tools.errors import InputError
from pager.tools.monitor.diagnosis import Diagnosis, Traffic, diagnose
from pager.tools.step_log import LOG_NAME, Sample, StepLine, StepReader
from pager.units import parse_size

__all__ = ["RecordedRun", "open_run"]

# Of a run that trains: the last steps, whose shape is the present one.
RECENT_STEPS = 16


class RecordedRun:
    """A run as its folder tells it; ``update`` looks again."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.model = str(config.get("model", path.name))
        self.steps_asked = int(config.get("steps") or 0)
        self.tokens_per_step = int(config.get("batch") or 0) * int(config.get("seq") or 0)
        self.page_size = parse_size((config.get("knobs") or {}).get("page_size", 0), name="page_size")
        self.status = "starting"
        self.first: StepLine | None = None
        # One more than is looked at: counters are told as differences.
        self.recent: deque[StepLine] = deque(maxlen=RECENT_STEPS + 1)
        self._reader = StepReader(path)
        self._wired: tuple[dict[str, int], int] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.status not in ("starting", "running")

    @property
    def last(self) -> StepLine | None:
        """The step that was finished last."""
        return self.recent[-1] if self.recent else None

    def update(self) -> None:
        """Read what is new. Raises InputError for files that no run wrote."""
        # The state first: what a run writes before it ends is then read below.
        status = self._read_status()
        for line in self._reader.read():
            if self.first is None:
                self.first = line
            self.recent.append(line)
        self.status = status if self.recent or status != "running" else "starting"

    def samples(self) -> list[Sample]:
        """The waveform: all of it once the run has left it, before that the last steps'."""
        table = self.path / "resident.csv"
        try:
            with table.open(encoding="utf-8", newline="") as file:
                rows = list(csv.reader(file))[1:]
            return [(float(when), int(size)) for when, size in rows]
        except FileNotFoundError:
            return [sample for line in list(self.recent)[1:] or self.recent for sample in line.resident]
        except OSError as error:
            raise InputError(f"cannot read {table}: {error.strerror or error}") from error
        except ValueError as error:
            raise InputError(f"{table}: not a table of `pager train`: {error}") from error

    def statistics(self) -> Statistics:
        """The counters at the last step."""
        return Statistics() if self.last is None else self.last.statistics

    def traffic(self) -> Traffic:
        """What moved in the steps that :meth:`samples` shows."""
        whole = (self.path / "resident.csv").exists()
        lines = list(self.recent)
        last = self.last
        if last is None:
            return Traffic(page_size=self.page_size)
        # Of a whole run the first step is the start.
        before = self.first if whole or len(lines) < 2 else lines[0]
        if before is None or before.step >= last.step:
            before = StepLine(0, 0.0, None, Statistics(), ())
        seconds = self._seconds_between(before, last)
        a, b = before.statistics, last.statistics
        wired, managed = self._read_wired()
        return Traffic(
            num_steps=last.step - before.step,
            seconds=seconds,
            stall_seconds=b.stall_seconds - a.stall_seconds,
            page_in_bytes=b.page_in_bytes - a.page_in_bytes,
            page_out_bytes=b.page_out_bytes - a.page_out_bytes,
            num_accesses=b.num_accesses - a.num_accesses,
            refaults=b.refaults - a.refaults,
            page_size=self.page_size,
            budget_bytes=b.device_budget_bytes,
            wired_bytes=b.wired_bytes,
            managed_bytes=managed,
            wired=wired,
        )

    def diagnosis(self) -> Diagnosis:
        """What the waveform says."""
        return diagnose(self.samples(), self.traffic())

    def _seconds_between(self, before: StepLine, last: StepLine) -> float:
        """Of the steps after ``before``; those that are no longer kept count as the kept ones do."""
        kept = [line.seconds for line in self.recent if line.step > before.step]
        return sum(kept) / len(kept) * (last.step - before.step) if kept else 0.0

    def _read_status(self) -> str:
        # None, where it cannot be told, is a run that has not begun to log, or a file system without locks.
        lives = self._reader.is_being_written()
        # Looked at after the lock: a run writes its results before it lets go.
        losses = self.path / "losses.json"
        try:
            return str(json.loads(losses.read_text(encoding="utf-8"))["status"])
        except FileNotFoundError:
            return "killed" if lives is False else "running"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{losses}: cannot be read: {error}") from error

    def _read_wired(self) -> tuple[dict[str, int], int]:
        """Bytes by kind whose home is the device, and the bytes of all segments; nothing without a plan."""
        if self._wired is None:
            wired: dict[str, int] = {}
            managed = 0
            try:
                plan = json.loads((self.path / "plan.json").read_text(encoding="utf-8"))
                page_size = int(plan["page_size"])
                for segment in plan["segments"]:
                    size = int(segment["num_pages"]) * page_size
                    managed += size
                    if segment["home"] == "device":
                        wired[segment["kind"]] = wired.get(segment["kind"], 0) + size
            except (OSError, ValueError, KeyError, TypeError):
                return {}, 0  # a run that is just being started, or one that could not be planned
            self._wired = wired, managed
        return self._wired


def open_run(folder: str) -> RecordedRun:
    """The run in ``folder``. Raises InputError for what is no run's folder, naming the newest run in it if there is
    one.
    """
    path = Path(folder)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "there is no such folder"
        raise InputError(f"{folder}: {what}; name the folder that `pager train` said its results are in")
    config = path / "config.yaml"
    if not config.exists() and not (path / LOG_NAME).exists():
        runs = sorted(path.glob("*/config.yaml"), key=lambda found: found.stat().st_mtime)
        hint = f"; the newest run in it is {runs[-1].parent}" if runs else ""
        raise InputError(f"{folder}: no run of `pager train` (it has no config.yaml){hint}")
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
        if not isinstance(content, dict):
            raise ValueError(f"holds {type(content).__name__}")
        return RecordedRun(path, content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{config}: cannot be read: {error}") from error
