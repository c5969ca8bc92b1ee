"""What the waveform of resident device memory says about a run, in words.

The problem. A run that pages has a waveform: pages come in until the device is full, and leave when they are not needed
for long. Its shape tells more than its average. *Flat*: nothing leaves, and either all of it fits or what should stream
is wired. *Jagged*: many small teeth a step, since pages are too small for the link, or since eviction throws out what
is missed at once. *Healthy*: stable peaks, valleys near 60 % of them.

Two shapes beside these are common. A device that stays *full* replaces each page that leaves at once: that is what
eviction by next use does where a tensor is a small part of the arena, and its small teeth cost nothing unless the run
waits. And an *uneven* one has big swings that differ, or that nearly empty the device. So small teeth are called jagged
only where the run is known to pay for them (it waits, or misses what it threw out), or where nothing is known.

The method. What comes before the device is first nearly full is start-up and left out. Turning points are found with a
threshold, so that whatever is smaller than it is no turn: a low one finds the teeth, a high one the swings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import Literal

from pager.units import format_bytes

__all__ = ["Diagnosis", "Traffic", "diagnose", "turning_points"]

Kind = Literal["too short", "flat", "jagged", "full", "healthy", "uneven"]

# Shares of the peak.
NEARLY_FULL = 0.9
FLAT = 0.02
TOOTH = 0.02
SMALL_TOOTH = 0.15
SWING = 0.2
STABLE = 0.1
LOW_VALLEY, HIGH_VALLEY = 0.45, 0.75

MANY_TEETH = 8
LEAST_SAMPLES = 8
# A run that waits for a twentieth of its time, or misses a twentieth of its accesses again, pays.
COSTLY = 0.05
# A copy of this size reaches 96 % of the link (docs/benchmarks.md).
GOOD_COPY_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is known of the recorded steps beside the samples; zeros where nothing is. ``wired``: bytes that stay on the
    device, by kind of tensor.
    """

    num_steps: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    page_in_bytes: int = 0
    page_out_bytes: int = 0
    num_accesses: int = 0
    refaults: int = 0
    page_size: int = 0
    budget_bytes: int = 0
    wired_bytes: int = 0
    managed_bytes: int = 0
    wired: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """``kind`` and, in ``text``, what it means and what to do. ``tooth_bytes``: the median height of a tooth."""

    kind: Kind
    text: str
    peak_bytes: int = 0
    valley_bytes: int = 0
    teeth_per_step: float = 0.0
    tooth_bytes: int = 0


def turning_points(values: Sequence[int], threshold: float) -> list[int]:
    """The values at which the course turns, peaks and valleys in turn, by moves of at least ``threshold``. The first
    and the last value are none of them.
    """
    if not values:
        return []
    turns: list[int] = []
    low = high = values[0]
    direction = 0
    for value in values:
        if direction >= 0:
            high = max(high, value)
        if direction <= 0:
            low = min(low, value)
        if direction >= 0 and high - value >= threshold:
            if direction:
                turns.append(high)
            direction, low = -1, value
        elif direction <= 0 and value - low >= threshold:
            if direction:
                turns.append(low)
            direction, high = 1, value
    return turns


def diagnose(samples: Sequence[tuple[float, int]], traffic: Traffic) -> Diagnosis:
    """The verdict on the ``samples`` (seconds, resident bytes), oldest first."""
    peak = max((size for _, size in samples), default=0)
    start = next((place for place, (_, size) in enumerate(samples) if size >= NEARLY_FULL * peak), 0)
    values = [size for _, size in samples[start:]]
    valley = min(values, default=0)
    drop = max((high - size for high, size in zip(accumulate(values, max), values, strict=True)), default=0)
    if peak and drop <= FLAT * peak and not traffic.page_out_bytes:
        return Diagnosis(kind="flat", text=_flat(peak, traffic), peak_bytes=peak, valley_bytes=valley)
    if len(values) < LEAST_SAMPLES:
        text = (
            f"Too short: {len(values)} samples since the device was first nearly full do not make a waveform."
        )
        return Diagnosis(kind="too short", text=text, peak_bytes=peak, valley_bytes=valley)
    teeth = turning_points(values, TOOTH * peak)
    heights = [abs(after - before) for before, after in pairwise(teeth)]
    tooth = int(median(heights)) if heights else 0
    per_step = len(teeth) / 2 / max(traffic.num_steps, 1)
    swings = turning_points(values, SWING * peak)
    peaks, valleys = _apart(swings)
    kind: Kind
    if per_step >= MANY_TEETH and tooth < SMALL_TOOTH * peak and _is_costly(traffic):
        kind, text = "jagged", _jagged(per_step, tooth, traffic)
    elif not valleys:
        kind, text = "full", _full(peak, valley, traffic)
    else:
        valley = int(median(valleys))
        kind, text = _swinging(peaks or [peak], valley, peak)
    return Diagnosis(
        kind=kind, text=text, peak_bytes=peak, valley_bytes=valley, teeth_per_step=per_step, tooth_bytes=tooth
    )


def _apart(turns: Sequence[int]) -> tuple[list[int], list[int]]:
    """Peaks and valleys of turning points, which come in turn."""
    first, second = list(turns[::2]), list(turns[1::2])
    if len(turns) < 2:
        # One turn alone is a valley: the device was nearly full when the record began.
        return [], first
    return (first, second) if first[0] > second[0] else (second, first)


def _is_costly(traffic: Traffic) -> bool:
    if not traffic.num_accesses and not traffic.seconds:
        return True
    return _refault_share(traffic) >= COSTLY or _stall_share(traffic) >= COSTLY


def _refault_share(traffic: Traffic) -> float:
    return traffic.refaults / traffic.num_accesses if traffic.num_accesses else 0.0


def _stall_share(traffic: Traffic) -> float:
    return traffic.stall_seconds / traffic.seconds if traffic.seconds else 0.0


def _flat(peak: int, traffic: Traffic) -> str:
    text = f"Flat: nothing is paged out, {format_bytes(peak)} stay on the device."
    if traffic.wired_bytes:
        kinds = ", ".join(
            f"{kind} {format_bytes(size)}"
            for kind, size in sorted(traffic.wired.items(), key=lambda item: -item[1])
        )
        text += f" Wired are {format_bytes(traffic.wired_bytes)}{f' ({kinds})' if kinds else ''}"
        if traffic.managed_bytes and traffic.wired_bytes >= traffic.managed_bytes:
            text += (
                f", which is all there is: it fits the budget of {format_bytes(traffic.budget_bytes)}. "
                "There is nothing to page; do not use pager for this, or lower --device-budget to see it page."
            )
            return text
        text += ", because their home is the device."
    return (
        text
        + " What is not wired moves neither: no operation needs it (a frozen or unused part of the model), "
        "or it came in once and there was never a need for its room."
    )


def _jagged(per_step: float, tooth: int, traffic: Traffic) -> str:
    text = f"Jagged: {per_step:.0f} teeth a step, of {format_bytes(tooth)} each"
    eager = (
        "eviction is too eager: what is thrown out is missed soon after. Take --eviction belady, a shorter "
        "--prefetch-distance or a larger --device-budget"
    )
    size = f" (now {format_bytes(traffic.page_size)})" if traffic.page_size else ""
    small = f"pages are too small for the link. Take a larger --page-size{size}; copies of 4 MiB fill it"
    if not traffic.num_accesses:
        return f"{text}. Either {small}. Or {eager}."
    if _refault_share(traffic) >= COSTLY:
        return f"{text}; {_refault_share(traffic):.0%} of the accesses miss what was there before: {eager}."
    waits = f"{text}; it waits {_stall_share(traffic):.0%} of the time"
    if tooth < GOOD_COPY_BYTES:
        return f"{waits}: {small}."
    return (
        f"{waits}, with pages of a good size: take a longer --prefetch-distance, so that they come in time."
    )


def _full(peak: int, valley: int, traffic: Traffic) -> str:
    text = (
        f"Full: the device stays between {format_bytes(valley)} and {format_bytes(peak)} "
        f"({valley / peak:.0%} of the peak), and what leaves is replaced at once"
    )
    if not traffic.seconds:
        return f"{text}."
    waits = _stall_share(traffic)
    if waits < COSTLY:
        return f"{text}. It waits {waits:.1%} of the time, so there is nothing to mend."
    return (
        f"{text}. It waits {waits:.0%} of the time: a longer --prefetch-distance, if copies come late, else a larger "
        "--device-budget or more tokens a step."
    )


def _swinging(peaks: Sequence[int], valley: int, peak: int) -> tuple[Kind, str]:
    spread, level = (max(peaks) - min(peaks)) / peak, valley / peak
    if spread > STABLE:
        return "uneven", (
            f"Uneven: the peaks lie between {format_bytes(min(peaks))} and {format_bytes(max(peaks))}. Steps differ "
            "(batches of different lengths, a branch of the model), or something else takes room now and then."
        )
    if level < LOW_VALLEY:
        return "uneven", (
            f"Uneven: the valleys are at {level:.0%} of the peak, so the device is nearly empty now and then. Take a "
            "longer --prefetch-distance; if it does not wait there, a smaller --device-budget would do."
        )
    if level > HIGH_VALLEY:
        return "full", f"Full: stable peaks of {format_bytes(peak)}, valleys at {level:.0%} of them."
    return "healthy", f"Healthy: stable peaks of {format_bytes(peak)}, valleys at {level:.0%} of them."
