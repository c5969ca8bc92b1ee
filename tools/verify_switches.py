"""Which of the things that were switched on makes a difference: each is switched off alone, and the run repeated.

No torch here: a run is a function from knobs to whether it was bit-equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pager.errors import PagerError

__all__ = ["PAGING", "Switch", "Trial", "explain", "switches_of", "try_without_each"]

# What `verify` adds to the knobs: whether the model is paged at all.
PAGING = "paging"

_EXPECTED = {
    "update_on": "the CPU's update may differ in the last bits: expected, see the table in README.md",
}
# In the order of suspicion: the knob, and its value when it is off.
_OFF: tuple[tuple[str, Any], ...] = (
    ("update_on", "device"),
    ("update_at", "step"),
    ("master", None),
    ("disk_compression", None),
    ("disk", None),
    ("eviction", "belady"),
    ("page_size", "128KiB"),
    ("prefetch_distance", 0),
    (PAGING, False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A knob that is on. ``off``: its value when it is off; ``expected``: why it may make a difference, else None."""

    knob: str
    value: Any
    off: Any
    expected: str | None = None

    def __str__(self) -> str:
        return "paging" if self.knob == PAGING else f"{self.knob}={self.value}"

    @property
    def without(self) -> str:
        """The same when it is off, in words."""
        return "nothing paged" if self.knob == PAGING else f"{self.knob}={self.off}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A run without ``switch``: whether it was bit-equal; None where it could not be run, for ``reason``."""

    switch: Switch
    equal: bool | None
    reason: str = ""


def switches_of(knobs: Mapping[str, Any]) -> list[Switch]:
    """What is switched on in ``knobs``, the likeliest to make a difference first."""
    return [
        Switch(knob=knob, value=knobs[knob], off=off, expected=_EXPECTED.get(knob))
        for knob, off in _OFF
        if knob in knobs and knobs[knob] != off
    ]


def try_without_each(
    switches: Sequence[Switch], run: Callable[[dict[str, Any]], bool], knobs: Mapping[str, Any]
) -> list[Trial]:
    """Run ``knobs`` with each of ``switches`` off, one at a time. A run that pager refuses is no answer.

    Without paging all the others are off too, so that is tried only where none of them makes the difference.
    """
    trials: list[Trial] = []
    for switch in switches:
        if switch.knob == PAGING and any(trial.equal for trial in trials):
            continue
        try:
            equal = run({**knobs, switch.knob: switch.off})
        except PagerError as error:
            trials.append(Trial(switch=switch, equal=None, reason=str(error).removeprefix("pager: ")))
        else:
            trials.append(Trial(switch=switch, equal=equal))
    return trials


def explain(trials: Sequence[Trial]) -> list[str]:
    """What the trials say, a sentence each."""
    makers = [trial.switch for trial in trials if trial.equal]
    lines = [f"with {switch.without} bit-equal: {switch} makes the difference" for switch in makers]
    known = [switch for switch in makers if switch.expected]
    lines += [f"{switch}: {switch.expected}" for switch in known]
    lines += [
        f"with {trial.switch.without} it could not be run ({trial.reason})"
        for trial in trials
        if trial.equal is None
    ]
    if not makers:
        tried = [trial.switch for trial in trials if trial.equal is False]
        if any(switch.knob == PAGING for switch in tried):
            lines.append(
                "it differs with nothing paged too; what is left on then makes a difference of its own"
            )
        else:
            lines.append("no one of them makes the difference alone")
    if not known:
        lines.append("this is not expected: the table in README.md promises the same bits; please report it")
    return lines
