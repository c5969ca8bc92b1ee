"""The log of a run's steps: one line of JSON a step, flushed, so that others can watch while it is written.

The writer holds a lock on the file for as long as it lives, by which a reader tells a run that goes on from one that
was killed.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fcntl
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pager.statistics import Statistics
from pager.tools.errors import InputError

__all__ = ["LOG_NAME", "Sample", "StepLine", "StepLog", "StepReader", "thin"]

LOG_NAME = "steps.jsonl"

# (seconds since manage(), resident bytes)
Sample = tuple[float, int]

# Of one step: enough for its shape, in about a kilobyte.
SAMPLES_PER_STEP = 64
LOCK_TRIES = 100


class StepLine(NamedTuple):
    """One step: ``statistics`` are those since the start, ``resident`` the samples of this step alone."""

    step: int
    seconds: float
    loss: float | None
    statistics: Statistics
    resident: tuple[Sample, ...]


def thin(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most ``most`` (at least 2) of the samples, the least and the largest of each part among them."""
    if len(samples) <= most:
        return list(samples)
    num_parts = most // 2
    kept = []
    for part in range(num_parts):
        begin, end = (len(samples) * edge // num_parts for edge in (part, part + 1))
        places = range(begin, end)
        low = min(places, key=lambda place: samples[place][1])
        high = max(places, key=lambda place: samples[place][1])
        kept += [samples[place] for place in sorted({low, high})]
    return kept


class StepLog:
    """Writes the log. Training goes on without it where the disk refuses."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where the file cannot be made."""
        self.path = folder / LOG_NAME
        self._file: Any = self.path.open("a", encoding="utf-8")
        self._seen_seconds = -1.0
        # Without locks in the file system readers cannot tell whether the run lives.
        with contextlib.suppress(OSError):
            _lock(self._file)

    def write(
        self, step: int, *, loss: float, seconds: float, statistics: Statistics, history: Sequence[Sample]
    ) -> str | None:
        """Add a step. ``history``: all samples so far, of which the new ones are taken. None, or in words why there
        will be no more lines.
        """
        if self._file is None:
            return None
        begin = bisect.bisect_right(history, self._seen_seconds, key=lambda sample: sample[0])
        samples = history[begin:]
        if samples:
            self._seen_seconds = samples[-1][0]
        line = {
            "step": step,
            "seconds": seconds,
            "loss": loss if math.isfinite(loss) else None,
            "statistics": dataclasses.asdict(statistics),
            "resident": [(round(when, 6), size) for when, size in thin(samples, SAMPLES_PER_STEP)],
        }
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            self.close()
            return f"no more lines in {self.path}: {error.strerror or error}"
        return None

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written was told by write()
                file.close()


def _lock(file: Any) -> None:
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a reader looks, for some microseconds
            time.sleep(0.001)
        else:
            return


class StepReader:
    """Reads the log as it grows."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_NAME
        self._offset = 0
        self._num_lines = 0

    def read(self) -> list[StepLine]:
        """The steps that were finished since the last call. Raises InputError for a file that is no such log."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror or error}") from error
        # The last line may be half written.
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        lines = []
        for text in whole.splitlines():
            self._num_lines += 1
            try:
                lines.append(_parse(json.loads(text)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise InputError(
                    f"{self.path}, line {self._num_lines}: not a step of `pager train`"
                ) from error
        return lines

    def is_being_written(self) -> bool | None:
        """Whether the run that writes it lives; None where that cannot be told."""
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        return False


_FIELDS = frozenset(field.name for field in dataclasses.fields(Statistics))


def _parse(line: Any) -> StepLine:
    # A log of another version may know other counters.
    known = {name: value for name, value in line["statistics"].items() if name in _FIELDS}
    loss = line["loss"]
    return StepLine(
        step=int(line["step"]),
        seconds=float(line["seconds"]),
        loss=None if loss is None else float(loss),
        statistics=Statistics(**known),
        resident=tuple((float(when), int(size)) for when, size in line["resident"]),
    )
