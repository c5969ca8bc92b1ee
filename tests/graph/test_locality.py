"""Miss-ratio curves and working sets against oracles that look at single pages, lists and sets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec
from pager.graph.locality import lru_miss_ratios, replayed_miss_ratios, working_set
from pager.graph.reuse_distance import (
    AtomAccesses,
    Atoms,
    expand_accesses,
    reuse_distances,
    split_into_atoms,
)
from pager.policies.belady import Belady
from pager.policies.clock import Clock
from pager.policies.lru import Lru
from pager.policies.protocol import (
    EVICTION_POLICY_NAMES,
    EvictionPolicy,
    IntArray,
    make_eviction_policy,
)
from tests.graph.trace_builders import make_training_step, steps

PAGE = 4


class Asked:
    """A policy without its queue, so that every miss asks for a ranking."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.name = policy.name
        self.resize = policy.resize
        self.record_access = policy.record_access
        self.record_evict = policy.record_evict
        self.eviction_order = policy.eviction_order


class MostRecent(Lru):
    """Another ranking than that of the queue it inherits."""

    name = "mru"

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        return super().eviction_order(candidates, next_use)[::-1]


def string_of(segments: list[SegmentSpec], trace: AccessTrace) -> tuple[AtomAccesses, Atoms, IntArray]:
    atoms = split_into_atoms(trace, segments)
    return expand_accesses(trace, atoms, segments), atoms, atoms.num_pages * PAGE


def make_accesses(keys: list[int]) -> AtomAccesses:
    return AtomAccesses(np.arange(len(keys), dtype=np.int64), np.array(keys, dtype=np.int64))


def pages_in_order(accesses: AtomAccesses, atoms: Atoms) -> list[int]:
    """The step as a string of single pages."""
    return [
        page
        for atom in accesses.atom.tolist()
        for page in range(
            int(atoms.first_page[atom]), int(atoms.first_page[atom]) + int(atoms.num_pages[atom])
        )
    ]


def oracle_lru_misses(pages: list[int], num_frames: int) -> int:
    """Pages missed in the second step: a list in order of use."""
    held: list[int] = []
    misses = 0
    for turn, page in itertools.product(range(2), pages):
        if page in held:
            held.remove(page)
        else:
            misses += turn
        held.append(page)
        del held[: max(len(held) - num_frames, 0)]
    return misses


def oracle_order(name: str, history: list[int], future: list[int]) -> list[int]:
    """The keys used so far, first to go first, by the textbook; for CLOCK see the policies' own tests."""
    keys = list(dict.fromkeys(history))
    if name == "lru":
        return sorted(keys, key=lambda key: history[::-1].index(key), reverse=True)
    return sorted(keys, key=future.index, reverse=True)


def oracle_whole_atoms(name: str, keys: list[int], sizes: list[int], capacity: int) -> int:
    """Bytes missed in the second step where atoms come and go as wholes."""
    held: list[int] = []
    missed = 0
    string = keys * 4
    for now in range(2 * len(keys)):
        key = string[now]
        if key in held:
            continue
        missed += sizes[key] * (now >= len(keys))
        for victim in oracle_order(name, string[:now], string[now:]):
            if sum(sizes[other] for other in held) <= max(capacity - sizes[key], 0):
                break
            if victim in held:
                held.remove(victim)
        if sizes[key] <= capacity:
            held.append(key)
    return missed


@st.composite
def strings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Keys as they are accessed in a step, and the bytes of each."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    return draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=24)), sizes


# -- miss ratios ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(steps())
def test_lru_by_distances_is_what_a_cache_of_pages_misses(
    step: tuple[list[SegmentSpec], AccessTrace],
) -> None:
    accesses, atoms, sizes = string_of(*step)
    pages = pages_in_order(accesses, atoms)
    frames = list(range(sum(spec.num_pages for spec in step[0]) + 2))
    curve = lru_miss_ratios(accesses, sizes, [PAGE * count for count in frames])
    expected = [oracle_lru_misses(pages, count) for count in frames]
    assert np.round(curve * max(len(pages), 1), 9).tolist() == (expected if pages else [1.0] * len(frames))


@settings(max_examples=150, deadline=None)
@given(steps())
def test_a_replay_of_lru_equals_the_curve_at_every_size(step: tuple[list[SegmentSpec], AccessTrace]) -> None:
    accesses, _, sizes = string_of(*step)
    capacities = np.arange(int(sizes.sum()) + 2)
    curve = lru_miss_ratios(accesses, sizes, capacities)
    assert replayed_miss_ratios(accesses, sizes, capacities, Lru()).tolist() == curve.tolist()
    assert replayed_miss_ratios(accesses, sizes, capacities, Asked(Lru())).tolist() == curve.tolist()


@settings(max_examples=100, deadline=None)
@given(strings())
@pytest.mark.parametrize("name", EVICTION_POLICY_NAMES)
def test_a_queue_gives_what_the_ranking_gives(name: str, string: tuple[list[int], list[int]]) -> None:
    keys, sizes = string
    capacities = np.arange(sum(sizes) + 2)
    accesses, num_bytes = make_accesses(keys), np.array(sizes)
    queued = replayed_miss_ratios(accesses, num_bytes, capacities, make_eviction_policy(name))
    asked = replayed_miss_ratios(accesses, num_bytes, capacities, Asked(make_eviction_policy(name)))
    assert queued.tolist() == asked.tolist()


@settings(max_examples=80, deadline=None)
@given(strings())
@pytest.mark.parametrize("name", ["belady", "lru"])
def test_a_replay_misses_what_the_textbook_misses(name: str, string: tuple[list[int], list[int]]) -> None:
    keys, sizes = string
    capacities = list(range(sum(sizes) + 2))
    found = replayed_miss_ratios(make_accesses(keys), np.array(sizes), capacities, make_eviction_policy(name))
    expected = [oracle_whole_atoms(name, keys, sizes, capacity) for capacity in capacities]
    assert np.round(found * sum(sizes[key] for key in keys), 9).tolist() == expected


# The best over all steps need not be the best in the second: these examples are always the same.
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=32))
def test_belady_is_never_above_the_others_where_sizes_are_one(keys: list[int]) -> None:
    accesses, sizes, capacities = make_accesses(keys), np.full(8, PAGE), np.arange(9) * PAGE
    best = replayed_miss_ratios(accesses, sizes, capacities, Belady())
    assert np.all(best <= lru_miss_ratios(accesses, sizes, capacities))
    assert np.all(best <= replayed_miss_ratios(accesses, sizes, capacities, Clock()))


@settings(max_examples=150, deadline=None)
@given(strings())
def test_belady_is_never_above_lru_whatever_the_sizes(string: tuple[list[int], list[int]]) -> None:
    keys, sizes = string
    accesses, num_bytes, capacities = make_accesses(keys), np.array(sizes), np.arange(sum(sizes) + 1)
    best = replayed_miss_ratios(accesses, num_bytes, capacities, Belady())
    assert np.all(best <= lru_miss_ratios(accesses, num_bytes, capacities))


def test_where_sizes_differ_belady_is_not_the_best() -> None:
    """The large atom is used latest of all, but comes back at five times the bytes of a small one."""
    keys, sizes = [4, 3, 0, 0, 1, 4, 4, 2, 1, 0], np.array([1, 1, 1, 1, 5])
    total = int(sizes[keys].sum())
    found = [
        replayed_miss_ratios(make_accesses(keys), sizes, 7, policy).item() * total
        for policy in (Belady(), Clock())
    ]
    assert np.round(found, 9).tolist() == [12.0, 9.0]


def test_a_scan_is_where_the_policies_differ() -> None:
    """Ten atoms in turn in the room of five: LRU evicts each just before its turn, Belady keeps half."""
    accesses, sizes = make_accesses(list(range(10))), np.full(10, 7)
    assert lru_miss_ratios(accesses, sizes, [35, 69, 70]).tolist() == [1.0, 1.0, 0.0]
    assert replayed_miss_ratios(accesses, sizes, [[35], [70]], Belady()).tolist() == [[0.5], [0.0]]
    assert replayed_miss_ratios(accesses, sizes, 35, Clock()).shape == ()


@pytest.mark.parametrize("ratios", [lru_miss_ratios, replayed_miss_ratios])
def test_sizes_are_bytes(ratios: Any) -> None:
    more = () if ratios is lru_miss_ratios else (Belady(),)
    accesses, sizes = make_accesses([0, 1]), np.array([3, 3])
    for wrong in ([-1], [float("nan")], ["1GiB"]):
        with pytest.raises(ValueError, match="sizes must be"):
            ratios(accesses, sizes, wrong, *more)
    assert ratios(make_accesses([]), np.array([], dtype=np.int64), [5], *more).tolist() == [1.0]
    assert ratios(accesses, sizes, [], *more).tolist() == []
    assert ratios(accesses, sizes, [5.9, 6.0, float("inf")], *more).tolist()[1:] == [0.0, 0.0]


def test_a_policy_is_left_as_it_was_and_a_changed_ranking_is_asked() -> None:
    policy = Asked(Lru())
    accesses, sizes = make_accesses([0, 1, 2]), np.ones(3, dtype=np.int64)
    assert replayed_miss_ratios(accesses, sizes, [2, 2], policy).tolist() == [1.0, 1.0]
    assert policy.policy.__dict__["_now"] == 0
    # The most recently used goes: the loop's first keys stay, as under Belady.
    assert replayed_miss_ratios(accesses, sizes, 2, MostRecent()).item() < 1.0


def test_an_order_that_leaves_candidates_out_is_noticed() -> None:
    class Stingy(Lru):
        name = "stingy"

        def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
            return candidates[:0]

    with pytest.raises(ValueError, match="'stingy' finds 0 bytes to evict where 2 are needed"):
        replayed_miss_ratios(make_accesses([0, 1]), np.array([2, 2]), 2, Stingy())


# -- working sets ------------------------------------------------------------------------------------------


def oracle_windows(
    segments: list[SegmentSpec], trace: AccessTrace, length: float, *, in_seconds: bool
) -> list[int]:
    """Per tick: the bytes of the pages touched in the window that begins with it, as sets."""
    pages: list[set[int]] = [set() for _ in range(trace.num_ticks)]
    for row in range(len(trace)):
        begin = segments[int(trace.segment[row])].first_page + int(trace.first_page[row])
        pages[int(trace.tick[row])] |= set(range(begin, begin + int(trace.num_pages[row])))
    series = []
    for first in range(trace.num_ticks):
        touched, elapsed = set(pages[first]), 0.0
        for offset in range(1, trace.num_ticks):
            elapsed += float(trace.seconds[(first + offset - 1) % trace.num_ticks]) if in_seconds else 1
            if elapsed >= length and length < (trace.step_seconds if in_seconds else trace.num_ticks):
                break
            touched |= pages[(first + offset) % trace.num_ticks]
        series.append(PAGE * len(touched))
    return series


@settings(max_examples=300, deadline=None)
@given(steps(), st.integers(1, 20), st.booleans())
def test_working_sets_equal_the_oracle(
    step: tuple[list[SegmentSpec], AccessTrace], length: int, in_seconds: bool
) -> None:
    segments, trace = step
    if in_seconds and trace.num_ticks and trace.step_seconds == 0:
        in_seconds = False
    accesses, _, sizes = string_of(segments, trace)
    distances = reuse_distances(trace, accesses, sizes)
    window: dict[str, Any] = {"seconds": float(length)} if in_seconds else {"ticks": length}
    found = working_set(trace, accesses, sizes, distances, **window)
    expected = oracle_windows(segments, trace, length, in_seconds=in_seconds)
    assert found.bytes.tolist() == expected
    assert found.max_bytes == max(expected, default=0)
    weights = trace.seconds if in_seconds else np.ones(trace.num_ticks)
    mean = float(np.dot(expected, weights) / weights.sum()) if expected else 0.0
    assert found.mean_bytes == pytest.approx(mean)


def test_a_window_of_a_step_touches_all_and_reaches_around_its_end() -> None:
    rows = [(0, 0, 0, 1), (1, 1, 0, 2), (2, 0, 0, 1)]
    trace = AccessTrace.from_rows([AccessRow(*row, False, Phase.FORWARD) for row in rows])
    atom, sizes = make_accesses([0, 1, 0]), np.array([10, 50])
    distances = reuse_distances(trace, atom, sizes)
    assert working_set(trace, atom, sizes, distances, ticks=1).bytes.tolist() == [10, 50, 10]
    assert working_set(trace, atom, sizes, distances, ticks=2).bytes.tolist() == [60, 60, 10]
    whole = working_set(trace, atom, sizes, distances, ticks=10**12)
    assert (whole.bytes.tolist(), whole.max_bytes, whole.mean_bytes) == ([60, 60, 60], 60, 60.0)


def test_ticks_without_a_length_belong_to_windows_too() -> None:
    """As the update's, whose seconds a captured plan does not know."""
    trace = AccessTrace.from_rows(
        [AccessRow(tick, tick, 0, 1, False, Phase.FORWARD) for tick in range(3)], seconds=[1.0, 0.0, 0.0]
    )
    accesses, sizes = make_accesses([0, 1, 2]), np.array([1, 10, 100])
    distances = reuse_distances(trace, accesses, sizes)
    assert working_set(trace, accesses, sizes, distances, seconds=1.0).bytes.tolist() == [111] * 3
    half = working_set(trace, accesses, sizes, distances, seconds=0.5)
    assert (half.bytes.tolist(), half.mean_bytes) == ([1, 111, 101], 1.0)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        ({}, ValueError, "in ticks or in seconds, one of them"),
        ({"ticks": 1, "seconds": 1.0}, ValueError, "one of them"),
        ({"ticks": 0}, ValueError, "a window of 0 ticks; expected at least 1"),
        ({"ticks": 1.5}, TypeError, "a window of 1.5 ticks; expected a whole number"),
        ({"ticks": float("inf")}, TypeError, "a window of inf ticks"),
        ({"seconds": 0.0}, ValueError, r"a window of 0.0 seconds; expected more than 0"),
        ({"seconds": float("nan")}, ValueError, "a window of nan seconds"),
    ],
)
def test_a_window_has_one_length(window: dict[str, Any], error: type[Exception], message: str) -> None:
    segments, trace = make_training_step(2)
    accesses, _, sizes = string_of(segments, trace)
    distances = reuse_distances(trace, accesses, sizes)
    with pytest.raises(error, match=message):
        working_set(trace, accesses, sizes, distances, **window)


def test_seconds_need_times() -> None:
    segments, trace = make_training_step(1)
    trace = trace.with_seconds(np.zeros(trace.num_ticks))
    accesses, _, sizes = string_of(segments, trace)
    distances = reuse_distances(trace, accesses, sizes)
    with pytest.raises(ValueError, match="the trace has no times; give the window's length in ticks"):
        working_set(trace, accesses, sizes, distances, seconds=1.0)
