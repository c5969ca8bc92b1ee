"""Reuse distances and next uses against oracles that look at single pages and sets of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec
from pager.graph.cost_model import simulate_step
from pager.graph.reuse_distance import (
    NEVER,
    AtomAccesses,
    expand_accesses,
    miss_ratio_curve,
    next_uses,
    reuse_distance_bytes,
    reuse_distances,
    split_into_atoms,
)
from pager.policies.lru import Lru
from tests.graph.trace_builders import make_segments, steps

PAGE = 4


def pages_of_rows(segments: list[SegmentSpec], trace: AccessTrace) -> list[frozenset[int]]:
    """The set of pages that each row touches."""
    sets = []
    for row in range(len(trace)):
        begin = segments[int(trace.segment[row])].first_page + int(trace.first_page[row])
        sets.append(frozenset(range(begin, begin + int(trace.num_pages[row]))))
    return sets


def oracle_distances(
    sets: list[frozenset[int]], trace: AccessTrace
) -> dict[tuple[int, int], tuple[int, int, float]]:
    """(row, page) -> ticks, bytes, seconds since the last row with the page: O(n^2), over unrolled steps."""
    num = len(sets)
    ticks = trace.tick.tolist()
    starts = trace.tick_start_seconds.tolist()
    result = {}
    for row in range(num):
        for page in sets[row]:
            before = next(at for at in range(row + num - 1, row - 1, -1) if page in sets[at % num])
            between: set[int] = set()
            for at in range(before + 1, row + num):
                between |= sets[at % num]
            wrapped = int(before < num)
            then = ticks[before % num]
            result[row, page] = (
                ticks[row] - then + wrapped * trace.num_ticks,
                PAGE * len(between),
                starts[ticks[row]] - starts[then] + wrapped * trace.step_seconds,
            )
    return result


@settings(max_examples=300, deadline=None)
@given(steps())
def test_distances_equal_the_oracle_for_every_page(step: tuple[list[SegmentSpec], AccessTrace]) -> None:
    segments, trace = step
    atoms = split_into_atoms(trace, segments)
    accesses = expand_accesses(trace, atoms, segments)
    found = reuse_distances(trace, accesses, atoms.num_pages * PAGE)
    expected = oracle_distances(pages_of_rows(segments, trace), trace)
    seen = {}
    for index in range(len(accesses)):
        atom = accesses.atom[index]
        first = int(atoms.first_page[atom])
        for page in range(first, first + int(atoms.num_pages[atom])):
            seen[int(accesses.row[index]), page] = (
                int(found.ticks[index]),
                int(found.bytes[index]),
                float(found.seconds[index]),
            )
    assert seen == expected


@settings(max_examples=200, deadline=None)
@given(steps())
def test_atoms_are_the_coarsest_partition(step: tuple[list[SegmentSpec], AccessTrace]) -> None:
    segments, trace = step
    atoms = split_into_atoms(trace, segments)
    covered = [
        page
        for first, count in zip(atoms.first_page.tolist(), atoms.num_pages.tolist(), strict=True)
        for page in range(first, first + count)
    ]
    assert covered == [
        page for spec in segments for page in range(spec.first_page, spec.first_page + spec.num_pages)
    ]
    assert np.all(atoms.num_pages > 0)
    sets = pages_of_rows(segments, trace)
    for atom in range(len(atoms)):
        spec = segments[int(atoms.segment[atom])]
        first, count = int(atoms.first_page[atom]), int(atoms.num_pages[atom])
        assert spec.first_page <= first
        assert first + count <= spec.first_page + spec.num_pages
        for touched in sets:
            assert len(touched & set(range(first, first + count))) in (0, count)
        # Between two atoms of a segment some access begins or ends.
        if first > spec.first_page:
            assert any((first - 1 in touched) != (first in touched) for touched in sets)


@settings(max_examples=200, deadline=None)
@given(steps())
def test_next_use_is_the_first_row_of_the_step(step: tuple[list[SegmentSpec], AccessTrace]) -> None:
    segments, trace = step
    atoms = split_into_atoms(trace, segments)
    accesses = expand_accesses(trace, atoms, segments)
    found, _ = next_uses(trace, accesses, atoms.num_pages * PAGE, len(atoms))
    sets = pages_of_rows(segments, trace)
    starts = trace.tick_start_seconds
    for atom, page in enumerate(atoms.first_page.tolist()):
        row = next((at for at, touched in enumerate(sets) if page in touched), None)
        if row is None:
            assert (found.ticks[atom], found.bytes[atom]) == (NEVER, NEVER)
            assert np.isnan(found.seconds[atom])
        else:
            assert found.ticks[atom] == trace.tick[row]
            assert found.bytes[atom] == PAGE * sum(len(touched) for touched in sets[:row])
            assert found.seconds[atom] == starts[trace.tick[row]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_miss_ratio_curve_is_what_lru_misses(keys: list[int]) -> None:
    segments = make_segments([1] * 10)
    trace = AccessTrace.from_rows(
        [AccessRow(tick, key, 0, 1, False, Phase.FORWARD) for tick, key in enumerate(keys)]
    )
    atoms = split_into_atoms(trace, segments)
    accesses = expand_accesses(trace, atoms, segments)
    distance = reuse_distances(trace, accesses, atoms.num_pages).bytes
    budgets = list(range(1, 11))
    curve = miss_ratio_curve(distance, np.ones(len(keys), dtype=np.int64), budgets)
    simulated = [
        simulate_step(
            key=keys, tick=range(len(keys)), key_bytes=[1] * 10, budget_bytes=budget, policy=Lru()
        ).misses
        for budget in budgets
    ]
    assert np.round(curve * len(keys)).astype(int).tolist() == simulated


def test_curve_counts_bytes_not_accesses() -> None:
    curve = miss_ratio_curve(np.array([0, 90]), np.array([10, 30]), [0, 9, 10, 119, 120])
    assert curve.tolist() == [1.0, 1.0, 0.75, 0.75, 0.0]
    assert miss_ratio_curve(np.array([], dtype=np.int64), np.array([], dtype=np.int64), [5]).tolist() == [1.0]


def test_a_long_trace_needs_no_loop() -> None:
    """A scan over more accesses than a quadratic method could do here: each distance is all the others."""
    num_keys, rounds = 50_000, 3
    row = np.arange(num_keys * rounds)
    distance = reuse_distance_bytes(AtomAccesses(row, row % num_keys), np.full(num_keys, 7), len(row))
    assert np.all(distance == 7 * (num_keys - 1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 2, 0, 1, 0, 0), "names segment 2 of 2 segments"),
        ((0, 1, 2, 2, 0, 0), r"takes pages 2 .. 4 of 'layers.1.parameter', which has 3 pages"),
    ],
)
def test_rows_outside_their_segment_are_refused(row: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_into_atoms(AccessTrace.from_rows([row]), make_segments([2, 3]))


def test_overlapping_segments_are_refused() -> None:
    first, second = make_segments([4, 4])
    shifted = SegmentSpec(index=1, name="b", kind="state", num_bytes=4, first_page=3, num_pages=4)
    with pytest.raises(ValueError, match="overlap"):
        split_into_atoms(AccessTrace.from_rows([]), [first, shifted])
    assert len(split_into_atoms(AccessTrace.from_rows([]), [first, second])) == 2
