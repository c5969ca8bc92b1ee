"""What prefetch puts on the link: distance, deadlines, and the distance derived from rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.policies.prefetch import Deadline, FixedDistance, auto_distance

NO = np.zeros(5, dtype=bool)
ONE_MB = np.full(5, 10**6)
EVERY_MS = np.array([1e-3, 2e-3, 3e-3, 4e-3, 5e-3])


@pytest.mark.parametrize(
    ("num_extents", "issued", "expected"),
    [
        (1, [0, 0, 0, 0, 0], [0]),
        (3, [0, 0, 0, 0, 0], [0, 1, 2]),
        (3, [1, 1, 0, 0, 0], [2]),
        (3, [0, 1, 0, 1, 0], [0]),  # an evicted one in front is asked for again first
        (2, [1, 1, 1, 0, 0], []),  # the distance was lowered
        (9, [1, 0, 0, 0, 0], [1, 2, 3, 4]),
    ],
)
def test_fixed_distance_keeps_that_many_issued(
    num_extents: int, issued: list[int], expected: list[int]
) -> None:
    rows = FixedDistance(num_extents).select(ONE_MB, EVERY_MS, np.array(issued, dtype=bool), 1e9)
    assert rows.tolist() == expected


@pytest.mark.parametrize("num_extents", [0, -1])
def test_fixed_distance_must_be_positive(num_extents: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        FixedDistance(num_extents)


@pytest.mark.parametrize(
    ("case", "seconds", "issued", "bandwidth", "margin", "expected"),
    [
        ("each takes 1 ms and is used at k ms: all due", EVERY_MS, NO, 1e9, 0.0, [0, 1, 2, 3, 4]),
        ("twice the rate: none is due", EVERY_MS, NO, 2e9, 0.0, []),
        ("a margin of 0.6 ms makes the first due", EVERY_MS, NO, 2e9, 0.6e-3, [0]),
        (
            "late last one pulls all before it",
            np.array([9, 9, 9, 9, 5]) * 1e-3,
            NO,
            1e9,
            0.0,
            [0, 1, 2, 3, 4],
        ),
        ("bytes on the link delay the rest", EVERY_MS * 4, np.array([1, 1, 1, 0, 0], bool), 2e8, 0.0, [3, 4]),
        ("nothing waits", EVERY_MS, ~NO, 1e9, 1.0, []),
    ],
)
def test_deadline_issues_at_the_last_safe_start(
    case: str, seconds: np.ndarray, issued: np.ndarray, bandwidth: float, margin: float, expected: list[int]
) -> None:
    rows = Deadline(margin_seconds=margin).select(ONE_MB, seconds, issued, bandwidth)
    assert rows.tolist() == expected, case


def test_deadline_holds_its_limit() -> None:
    policy = Deadline(margin_seconds=1.0, max_extents=3)
    assert policy.select(ONE_MB, EVERY_MS, NO, 1e9).tolist() == [0, 1, 2]
    assert policy.select(ONE_MB, EVERY_MS, np.array([1, 1, 0, 0, 0], bool), 1e9).tolist() == [2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_deadline_is_never_later_than_it_can_be(rows: list[tuple[int, int]], margin: int) -> None:
    """Whatever is left waiting for a tick of one second still arrives in time, in order, at the full rate."""
    sizes = np.array([size for size, _ in rows])
    until = np.cumsum([gap for _, gap in rows]).astype(np.float64)
    chosen = Deadline(margin_seconds=margin, max_extents=99).select(
        sizes, until, np.zeros(len(rows), bool), 10.0
    )
    assert chosen.tolist() == list(range(len(chosen)))
    finish = np.cumsum(sizes) / 10.0
    assert np.all(finish[len(chosen) :] + margin < until[len(chosen) :])
    assert len(chosen) == 0 or finish[len(chosen) - 1] + margin >= until[len(chosen) - 1]


def test_deadline_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Deadline(margin_seconds=-1.0)
    with pytest.raises(ValueError, match="max_extents is 0"):
        Deadline(max_extents=0)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        Deadline().select(ONE_MB, EVERY_MS, NO, 0.0)


@pytest.mark.parametrize(
    ("bandwidth", "compute", "extent", "more", "expected"),
    [
        (50e9, 10e-3, 50e6, {}, 2),  # a transfer of 1 ms under a compute of 10 ms: one ahead, one in use
        (50e9, 1e-3, 50e6, {}, 2),
        (50e9, 0.25e-3, 50e6, {}, 5),
        (50e9, 0.25e-3, 50e6, {"latency_seconds": 0.5e-3}, 7),
        (50e9, 0.0, 50e6, {}, 64),  # bound by the link: as deep as allowed
        (50e9, 1e-6, 50e6, {"maximum": 16}, 16),
        (50e9, 0.25e-3, 50e6, {"spare_bytes": 170 * 10**6}, 3),
        (50e9, 0.25e-3, 50e6, {"spare_bytes": 10}, 1),
    ],
)
def test_auto_distance(bandwidth: float, compute: float, extent: float, more: dict, expected: int) -> None:
    assert auto_distance(bandwidth, compute, extent, **more) == expected


def test_auto_distance_checks_its_numbers() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        auto_distance(0, 1.0, 1.0)
    with pytest.raises(ValueError, match="minimum=5, maximum=4"):
        auto_distance(1.0, 1.0, 1.0, minimum=5, maximum=4)
