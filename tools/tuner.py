"""Which knob to turn next, from measurements: one at a time, until nothing gains more than the noise. No torch here.

The rule book:

1. The device waits for copies (busy less than 70 % of a step): a longer prefetch distance, then another page size.
2. It is busy that much: the computation is the wall, and no knob of these two would help.
3. But where the peak is near the limit and what was brought ahead is thrown out before its use: a shorter distance
   first. The peak alone says nothing: the arena is a cache, and so is always full.

What the rules do not name first is still tried last, since a rule is a guess and a run is an answer. What gained is
gone on with. A gain counts only beyond the noise: the spread of both runs' steps, and what repeating the first gave.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pager.config import MAX_PAGE_BYTES, MIN_PAGE_BYTES

__all__ = ["Measurement", "Move", "Setting", "Trial", "Tuning", "moves_of", "spread_of", "tune"]

BUSY_SHARE = 0.7
NEAR_LIMIT = 0.95
WASTED_SHARE = 0.01
# Below this a gain is not worth a knob, however exact the clock (the simulator's has no noise).
LEAST_GAIN = 0.005
MAX_DISTANCE = 64
MAX_RUNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The knobs that are turned: ``page_bytes`` and ``prefetch_distance`` (extents)."""

    page_bytes: int
    prefetch_distance: int

    def __str__(self) -> str:
        return f"page_size={self.page_bytes // 1024}KiB, prefetch_distance={self.prefetch_distance}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A run in its steady state. ``seconds``: of the median step; ``noise``: its uncertainty, as a share of it;
    ``busy_share``: of a step, in which the device did not wait for copies; ``peak_share``: of the device budget;
    ``wasted_share``: of accesses, what was brought ahead and thrown out unused. ``reason``: why there was no run.
    """

    seconds: float = float("inf")
    noise: float = 0.0
    busy_share: float = 0.0
    peak_share: float = 0.0
    wasted_share: float = 0.0
    reason: str | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether more is brought ahead than there is room for."""
        return self.peak_share >= NEAR_LIMIT and self.wasted_share >= WASTED_SHARE

    @property
    def is_busy(self) -> bool:
        """Whether the computation is the wall."""
        return self.busy_share >= BUSY_SHARE


class Move(NamedTuple):
    """A setting to try, what is turned and in which direction, and why."""

    setting: Setting
    what: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run: ``why`` it was made, and whether it was the best so far (``better``)."""

    setting: Setting
    measurement: Measurement
    why: str
    better: bool


@dataclass(kw_only=True, slots=True)
class Tuning:
    """All trials, in order; ``best`` of them, None where none could be run; ``stopped``: why there were no more.

    ``noise``: between two runs of the first setting, whose step is then the mean of both (``first_seconds``).
    """

    trials: list[Trial] = field(default_factory=list)
    best: Trial | None = None
    noise: float = 0.0
    first_seconds: float = float("inf")
    stopped: str = ""

    @property
    def gain(self) -> float:
        """How much shorter the best step is than the first, as a share of the first; 0 where that was refused."""
        if self.best is None or self.first_seconds == float("inf"):
            return 0.0
        return 1 - self.best.measurement.seconds / self.first_seconds


def spread_of(seconds: Sequence[float]) -> float:
    """The uncertainty of the median of step times, as a share of it: the median distance from it, as a standard
    deviation, over the root of their number.
    """
    middle = _median(seconds)
    deviation = _median([abs(value - middle) for value in seconds])
    # 1.48: a normal distribution's standard deviation; 1.25: a median is that much less certain than a mean.
    return 1.25 * 1.48 * deviation / len(seconds) ** 0.5 / middle


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def moves_of(setting: Setting, measurement: Measurement) -> Iterator[Move]:
    """What to try from here, and why, in the rule book's order; nothing where no knob would help."""
    distance, page = setting.prefetch_distance, setting.page_bytes
    longer = (_distance(setting, max(2 * distance, 1)), "longer prefetch distance")
    shorter = (_distance(setting, distance // 2), "shorter prefetch distance")
    larger = (_page(setting, 4 * page), "larger pages")
    smaller = (_page(setting, page // 4), "smaller pages")
    busy = f"the device is busy {measurement.busy_share:.0%} of a step"
    order: tuple[tuple[Setting | None, str], ...]
    if measurement.is_crowded:
        order = (shorter, larger, smaller)
        busy = f"the peak is {measurement.peak_share:.0%} of the budget, and what came ahead left unused"
    elif measurement.is_busy:
        order = ()
    else:
        order = (longer, larger, smaller, shorter)
    for target, what in order:
        if target is not None:
            yield Move(target, what, f"{busy}: {what}")


def _distance(setting: Setting, distance: int) -> Setting | None:
    # 0 would switch prefetch off, which is another knob.
    if not 1 <= distance <= MAX_DISTANCE:
        return None
    return dataclasses.replace(setting, prefetch_distance=distance)


def _page(setting: Setting, page_bytes: int) -> Setting | None:
    if not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
        return None
    return dataclasses.replace(setting, page_bytes=page_bytes)


def tune(
    start: Setting,
    measure: Callable[[Setting], Measurement],
    *,
    candidates: Sequence[tuple[Setting, str]] = (),
    on_trial: Callable[[Trial], None] = lambda trial: None,
    repeat: bool = True,
) -> Tuning:
    """Search from ``start`` by the rule book. ``measure`` makes a run, and answers with a reason where it cannot.

    ``candidates``: settings to try first, and why (the simulator's choice). ``repeat``: run ``start`` twice, for the
    noise between runs. At most `MAX_RUNS` runs.
    """
    tuning = Tuning()
    known: set[Setting] = set()

    def attempt(setting: Setting, why: str) -> Trial:
        found = measure(setting)
        better = setting not in known and _is_better(found, tuning)
        known.add(setting)
        trial = Trial(setting=setting, measurement=found, why=why, better=better)
        tuning.trials.append(trial)
        if trial.better:
            tuning.best = trial
        on_trial(trial)
        return trial

    first = attempt(start, "as given")
    tuning.first_seconds = first.measurement.seconds
    if repeat and first.better:
        again = attempt(start, "the same again, for the noise").measurement
        one, two = first.measurement.seconds, again.seconds
        if again.reason is None:
            tuning.noise = abs(one - two) / min(one, two)
            tuning.first_seconds = (one + two) / 2
            both = dataclasses.replace(first.measurement, seconds=tuning.first_seconds)
            tuning.best = dataclasses.replace(first, measurement=both)
    for setting, why in candidates:
        if setting not in known:
            attempt(setting, why)
    tuning.stopped = _search(tuning, known, attempt)
    return tuning


def _is_better(found: Measurement, tuning: Tuning) -> bool:
    if found.reason is not None:
        return False
    if tuning.best is None:
        return True
    best = tuning.best.measurement
    return found.seconds < best.seconds * (1 - _threshold(tuning, found, best))


def _threshold(tuning: Tuning, one: Measurement, two: Measurement) -> float:
    """The least gain that counts."""
    return max(tuning.noise, (one.noise**2 + two.noise**2) ** 0.5, LEAST_GAIN)


def _search(tuning: Tuning, known: set[Setting], attempt: Callable[[Setting, str], Trial]) -> str:
    """Try the moves from the best until none is better; why it ended."""
    gained = ""
    # A page size that cannot be, cannot be at another distance either.
    refused = {trial.setting.page_bytes for trial in tuning.trials if trial.measurement.reason is not None}
    while (best := tuning.best) is not None:
        moves = sorted(moves_of(best.setting, best.measurement), key=lambda move: move.what != gained)
        if not moves:
            return (
                f"the device is busy {best.measurement.busy_share:.0%} of a step: the computation is the wall"
            )
        for move in moves:
            if move.setting in known or move.setting.page_bytes in refused:
                continue
            if len(tuning.trials) >= MAX_RUNS:
                return f"{MAX_RUNS} runs were made"
            trial = attempt(move.setting, move.why)
            if trial.better:
                gained = move.what
                break
            if trial.measurement.reason is not None and "page" in move.what:
                refused.add(move.setting.page_bytes)
        else:
            noise = _threshold(tuning, best.measurement, best.measurement)
            return f"nothing else gains more than the noise ({noise:.1%})"
    return "no run could be made"
