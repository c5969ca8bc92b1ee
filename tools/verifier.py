"""Runs with pager beside one without: who owns both, and finds what makes a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pager.config import Checks
from pager.device.base import make_device
from pager.errors import BudgetError
from pager.statistics import Statistics
from pager.tools.errors import CommandFailed, InputError
from pager.tools.model_source import show
from pager.tools.verify_run import Comparison, Observer, Record, TensorRow, Work, train_managed, train_plainly
from pager.tools.verify_switches import PAGING, Trial, explain, switches_of, try_without_each
from pager.units import parse_size

__all__ = ["Verdict", "Verifier"]

# Of the training state, for pages, where no budget is given: the least of these that pager accepts.
ARENA_SHARES = (0.25, 0.5, 0.75, 1.0, 2.0)
STATE_PER_WEIGHT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """``rows``: every tensor; ``text``: a few sentences; ``trials``: what was switched off to find the cause."""

    rows: list[TensorRow]
    equal: bool
    text: list[str]
    trials: list[Trial]
    statistics: Statistics


class Verifier:
    """Runs with knobs, each compared with the plain run of the same work. Knobs are those of pager.Config, and
    ``paging``.
    """

    def __init__(self, work: Work, device: str, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._work = work
        self._device = make_device(device)
        self._spec = device
        self._plain: dict[Any, Record] = {}
        self._statistics: Statistics | None = None

    @property
    def torch_device(self) -> torch.device:
        """Where both compute."""
        return self._device.torch_device

    def close(self) -> None:
        """Let go of the device."""
        self._device.close()

    def verify(self, knobs: dict[str, Any]) -> Verdict:
        """Run with ``knobs``; where bits differ, find what makes the difference."""
        self._say("with pager ...")
        rows = self.compare(knobs)
        statistics = self._statistics
        assert statistics is not None
        if all(row.equal for row in rows):
            return Verdict(rows=rows, equal=True, text=[], trials=[], statistics=statistics)
        if not self.plain_repeats(knobs):
            text = ["two runs without pager differ from each other too: the model is not deterministic"]
            return Verdict(rows=rows, equal=False, text=text, trials=[], statistics=statistics)

        def bit_equal(other: dict[str, Any]) -> bool:
            return all(row.equal for row in self.compare(other))

        switches = switches_of(knobs)
        self._say(f"something differs; once more without each of {', '.join(map(str, switches))} ...")
        trials = try_without_each(switches, bit_equal, knobs)
        return Verdict(rows=rows, equal=False, text=explain(trials), trials=trials, statistics=statistics)

    def compare(self, knobs: dict[str, Any]) -> list[TensorRow]:
        """A row for each tensor of a run with ``knobs`` and the plain one."""
        plain = self._plain_of(knobs)
        given = {name: value for name, value in knobs.items() if name != PAGING} | {"device": self._spec}
        if given.get("disk") is None:
            given = {name: value for name, value in given.items() if not name.startswith("disk_")}
        if not knobs[PAGING]:
            given["device_budget"] = None
        arenas: Sequence[int | None] = (None,)
        if knobs[PAGING] and given["device_budget"] is None:
            state = STATE_PER_WEIGHT * sum(p.nbytes for p in self._work.source.model.parameters())
            arenas = [int(share * state) for share in ARENA_SHARES]
        for arena in arenas:
            comparison = Comparison(plain)
            # A budget that the user gives is taken at its word: what fits in it is not paged.
            if arena is not None:
                given["checks"] = Checks(arena_bytes=arena, page_all=True)
            try:
                self._statistics = train_managed(self._work, given, comparison)
            except BudgetError:
                self._device.release_cached_memory()
                if arena == arenas[-1]:
                    raise
            else:
                break
        self._device.release_cached_memory()
        return comparison.rows()

    def plain_repeats(self, knobs: dict[str, Any]) -> bool:
        """Whether a second plain run has the bits of the first."""
        again = Comparison(self._plain_of(knobs))
        self._run_plainly(knobs, again)
        return all(row.equal for row in again.rows())

    def _plain_of(self, knobs: dict[str, Any]) -> Record:
        master = knobs.get("master")
        if master not in self._plain:
            self._say("without pager ...")
            record = Record()
            self._run_plainly(knobs, record)
            self._plain[master] = record
        return self._plain[master]

    def _run_plainly(self, knobs: dict[str, Any], observer: Observer) -> None:
        name = self._work.source.name
        from_bytes = parse_size(knobs["page_size"]) if knobs.get("master") else None
        try:
            train_plainly(self._work, self.torch_device, observer, master_from_bytes=from_bytes)
        except torch.OutOfMemoryError as error:
            raise CommandFailed(
                f"{name} without pager does not fit on {self.torch_device}, so there is nothing to compare with; "
                "verify a smaller model, --batch or --seq, or --device cpu"
            ) from error
        except InputError:
            raise
        except Exception as error:
            show(error)
            raise InputError(
                f"{name}: its step without pager raised {type(error).__name__}; see the traceback above"
            ) from error
        self._device.release_cached_memory()
