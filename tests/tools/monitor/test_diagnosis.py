"""The verdict on waveforms that are made up, one for each shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pager.tools.monitor.diagnosis import Traffic, diagnose, turning_points

GiB, MiB, KiB = 2**30, 2**20, 2**10
PEAK = 4 * GiB
STEPS = 6
SAMPLES = 200  # of a step


def make_samples(course: Callable[[float], float], *, steps: int = STEPS) -> list[tuple[float, int]]:
    """Start-up, then ``course(phase)`` as a share of the peak for each step; phase is in [0, 1)."""
    ramp = [(place / 100, PEAK * place // 100) for place in range(101)]
    body = [
        (1 + place / SAMPLES, int(PEAK * course(place % SAMPLES / SAMPLES)))
        for place in range(steps * SAMPLES)
    ]
    return ramp + body


def sawtooth(valley: float) -> Callable[[float], float]:
    """Full at the start of a step, down to ``valley`` in its middle, full again."""
    return lambda phase: valley + (1 - valley) * abs(1 - 2 * phase)


def comb(height: float, teeth: int = 50) -> Callable[[float], float]:
    return lambda phase: 1 - height * (int(phase * 2 * teeth) % 2)


def make_traffic(**changes: Any) -> Traffic:
    known: dict[str, Any] = {
        "num_steps": STEPS,
        "seconds": 6.0,
        "page_in_bytes": 10 * GiB,
        "page_out_bytes": 10 * GiB,
        "num_accesses": 1000,
        "page_size": 128 * KiB,
        "budget_bytes": 5 * GiB,
    }
    return Traffic(**{**known, **changes})


@pytest.mark.parametrize(
    ("values", "threshold", "turns"),
    [
        ([], 1, []),
        ([5], 1, []),
        ([1, 2, 3], 1, []),
        ([1, 3, 1, 3, 1], 2, [3, 1, 3]),
        ([3, 1, 3, 1], 2, [1, 3]),
        ([1, 3, 2, 3, 1], 2, [3]),
        ([0, 10, 9, 10, 0, 1, 0, 10], 5, [10, 0]),
        ([4, 4, 4], 1, []),
    ],
)
def test_turning_points(values: Sequence[int], threshold: int, turns: list[int]) -> None:
    assert turning_points(values, threshold) == turns


def test_a_step_of_forward_and_backward_is_healthy() -> None:
    found = diagnose(make_samples(sawtooth(0.6)), make_traffic())
    assert found.kind == "healthy"
    assert found.text == "Healthy: stable peaks of 4.00 GiB, valleys at 60% of them."
    assert found.peak_bytes == PEAK
    assert found.valley_bytes == pytest.approx(0.6 * PEAK, rel=1e-6)
    assert found.teeth_per_step == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    ("valley", "kind"),
    [(0.2, "uneven"), (0.4, "uneven"), (0.5, "healthy"), (0.7, "healthy"), (0.78, "full"), (0.9, "full")],
)
def test_how_deep_a_healthy_valley_is(valley: float, kind: str) -> None:
    found = diagnose(make_samples(sawtooth(valley)), make_traffic())
    assert found.kind == kind
    assert (f"{valley:.0%}" in found.text) == (kind in ("healthy", "full", "uneven"))


def test_a_sawtooth_with_layers_on_it_stays_healthy() -> None:
    def course(phase: float) -> float:
        return sawtooth(0.6)(phase) - 0.03 * (int(phase * 100) % 2)

    assert diagnose(make_samples(course), make_traffic(stall_seconds=0.1)).kind == "healthy"


def test_peaks_that_differ_are_uneven() -> None:
    samples = make_samples(sawtooth(0.5))
    third = [(when, size * 3 // 4 if 3 <= when < 4 else size) for when, size in samples]
    found = diagnose(third, make_traffic())
    assert found.kind == "healthy", (
        "a step that is lower between peaks at both ends is seen at its peaks alone"
    )
    lower = [(when, size * 3 // 4 if 3.5 <= when < 4.5 else size) for when, size in samples]
    found = diagnose(lower, make_traffic())
    assert found.kind == "uneven"
    assert "between 3.00 GiB and 4.00 GiB" in found.text


def test_flat_where_all_of_it_fits() -> None:
    traffic = make_traffic(
        page_out_bytes=0,
        wired_bytes=PEAK,
        managed_bytes=PEAK,
        wired={"parameter": GiB, "gradient": GiB // 2, "state": 2 * GiB},
    )
    found = diagnose([(0.1, PEAK), (0.2, PEAK)], traffic)
    assert found.kind == "flat"
    assert "Wired are 4.00 GiB (state 2.00 GiB, parameter 1.00 GiB, gradient 512.00 MiB)" in found.text
    assert "all there is: it fits the budget of 5.00 GiB" in found.text


def test_flat_where_a_part_is_wired_and_the_rest_never_leaves() -> None:
    traffic = make_traffic(page_out_bytes=0, wired_bytes=GiB, managed_bytes=8 * GiB, wired={"parameter": GiB})
    found = diagnose(make_samples(lambda phase: 1.0), traffic)
    assert found.kind == "flat"
    assert "Wired are 1.00 GiB (parameter 1.00 GiB), because their home is the device" in found.text
    assert "frozen or unused" in found.text
    assert "all there is" not in found.text


def test_flat_without_knowledge_of_the_traffic() -> None:
    found = diagnose(make_samples(lambda phase: 1.0), Traffic())
    assert found.kind == "flat"
    assert "Wired" not in found.text


def test_a_level_course_with_traffic_is_full_not_flat() -> None:
    found = diagnose(make_samples(lambda phase: 1.0), make_traffic())
    assert found.kind == "full"


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({}, "full", "It waits 0.0% of the time, so there is nothing to mend"),
        ({"stall_seconds": 0.2}, "full", "It waits 3.3% of the time"),
        ({"refaults": 50}, "jagged", "5% of the accesses miss what was there before: eviction is too eager"),
        ({"stall_seconds": 0.4, "refaults": 49}, "jagged", "waits 7% of the time, with pages of a good size"),
    ],
)
def test_small_teeth_are_jagged_where_they_cost(changes: dict[str, Any], kind: str, text: str) -> None:
    found = diagnose(make_samples(comb(0.1)), make_traffic(**changes))
    assert found.kind == kind
    assert text in found.text
    assert found.teeth_per_step == pytest.approx(50, rel=0.05)
    assert found.tooth_bytes == pytest.approx(0.1 * PEAK, rel=0.01)


def test_small_pages_are_named_with_their_size() -> None:
    samples = [(when, size // 1024) for when, size in make_samples(comb(0.1))]
    found = diagnose(samples, make_traffic(stall_seconds=3.0))
    assert found.kind == "jagged"
    assert "waits 50% of the time: pages are too small for the link" in found.text
    assert "(now 128.00 KiB)" in found.text


def test_small_teeth_of_which_nothing_is_known_name_both_causes() -> None:
    found = diagnose(make_samples(comb(0.1)), Traffic(num_steps=STEPS))
    assert found.kind == "jagged"
    assert "Either pages are too small" in found.text
    assert "Or eviction is too eager" in found.text


def test_few_or_large_teeth_are_not_jagged() -> None:
    costly = make_traffic(stall_seconds=3.0)
    few = diagnose(make_samples(comb(0.1, teeth=5)), costly)
    assert few.kind == "full"
    assert "a longer --prefetch-distance" in few.text
    assert diagnose(make_samples(comb(0.4)), costly).kind == "healthy"


@pytest.mark.parametrize("samples", [[], [(0.0, GiB)], [(0.0, GiB), (0.5, 2 * GiB), (0.6, GiB)]])
def test_too_few_samples(samples: list[tuple[float, int]]) -> None:
    assert diagnose(samples, make_traffic()).kind == "too short"
