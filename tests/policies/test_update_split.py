"""The split of the update between CPU and link, and how many threads it has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.policies.update_split import (
    CPU_SPAN,
    FIRST_SHARE,
    LEAD,
    MAX_LATE,
    MAX_SHARE,
    Diffusion,
    balanced_share,
    cpu_part,
    late_elements,
    less_share,
    num_slices,
    num_threads_beside_link,
    rate_beside_link,
)

LINK = 50e9


def share(**changed: float) -> float:
    values = {
        "streamed_share": 1.0,
        "state_bytes": 10.0,
        "sent_bytes": 2.0,
        "link_bytes_per_second": LINK,
        "elements_per_second": 1.5e9,
        **changed,
    }
    return balanced_share(**values)


@pytest.mark.parametrize("rest", [0.0, 0.05e-9])
@pytest.mark.parametrize("streamed", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("rate", [0.2e9, 1.5e9])
def test_both_end_together(rate: float, streamed: float, rest: float) -> None:
    found = share(elements_per_second=rate, streamed_share=streamed, rest_seconds=rest)
    assert 0 < found < streamed
    link_seconds = (streamed * 10 - found * (10 - 2)) / LINK
    assert found / rate == pytest.approx(CPU_SPAN * (link_seconds + rest))


@pytest.mark.parametrize("rest", [0.0, 0.05e-9, 0.2e-9])
@pytest.mark.parametrize("beside", [0.0, 0.3e9])
def test_beside_the_link_it_is_slower_than_alone(beside: float, rest: float) -> None:
    found = share(elements_per_second=beside, alone_per_second=3e9, rest_seconds=rest)
    link_seconds = (10 - found * (10 - 2)) / LINK
    assert found == pytest.approx(CPU_SPAN * (beside * link_seconds + 3e9 * rest))


@pytest.mark.parametrize("waiting", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("beside", [0.1e9, 0.5e9, 2e9])
def test_no_more_waits_than_there_is_room_for(beside: float, waiting: float) -> None:
    """All are given to the CPU in the first part of the backward, at an even rate; it goes on at its own."""
    rest = 0.5e-9
    found = share(elements_per_second=beside, alone_per_second=3e9, rest_seconds=rest, waiting_share=waiting)
    without = share(elements_per_second=beside, alone_per_second=3e9, rest_seconds=rest)
    done_beside = CPU_SPAN * beside * (10 - found * (10 - 2)) / LINK
    assert found <= without
    assert found - LEAD * done_beside == pytest.approx(waiting) or found == without
    assert (found == without) == (without - LEAD * CPU_SPAN * beside * (10 - without * 8) / LINK <= waiting)


def test_beside_the_link_there_is_what_it_leaves_of_host_memory() -> None:
    """110 GB/s, of which a link that is busy both ways takes 90."""
    alone = 110e9 / 30
    found = rate_beside_link(alone, element_bytes=30, link_bytes_per_second=45e9)
    assert found == pytest.approx(20e9 / 30)
    assert rate_beside_link(alone, element_bytes=30, link_bytes_per_second=60e9) == 0


@pytest.mark.parametrize(("beside_share", "threads"), [(0.0, 1), (0.09, 1), (0.5, 8), (1.0, 15)])
def test_as_few_threads_as_that_takes(beside_share: float, threads: int) -> None:
    assert num_threads_beside_link(15, beside_share) == threads


def test_a_cpu_that_was_not_measured_gets_a_little() -> None:
    assert share(elements_per_second=0.0) == FIRST_SHARE
    assert share(elements_per_second=0.0, streamed_share=0.04) == 0.04


def test_never_more_than_streams_nor_than_may_be() -> None:
    assert share(elements_per_second=1e12, streamed_share=0.2) == 0.2
    assert share(elements_per_second=1e12) == MAX_SHARE


@pytest.mark.parametrize(("all_threads", "beside"), [(1, 1), (2, 1), (3, 1), (7, 2), (15, 5), (63, 21)])
def test_a_third_of_the_threads_beside_the_link(all_threads: int, beside: int) -> None:
    assert num_threads_beside_link(all_threads) == beside


def chosen(sizes: list[int], share: float, refused: frozenset[int] = frozenset()) -> list[int]:
    """The positions that are chosen."""
    diffusion = Diffusion(share, sum(sizes))
    found = []
    for position, size in enumerate(sizes):
        if diffusion.is_due(size) and position not in refused:
            diffusion.take(size)
            found.append(position)
    return found


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    share=st.floats(0.0, 1.0),
)
def test_what_the_cpu_updates_is_spread_along_the_backward(sizes: list[int], share: float) -> None:
    total, largest = sum(sizes), max(sizes)
    taken = 0
    picks = set(chosen(sizes, share))
    density = share / max(LEAD, share)
    for position, size in enumerate(sizes):
        taken += size if position in picks else 0
        done = sum(sizes[: position + 1])
        if done <= LEAD * total:
            assert abs(taken - density * done) <= largest / 2 + 1e-6 * total
    assert abs(taken - share * total) <= largest / 2 + 1e-6 * total


def test_the_whole_share_is_everything_and_none_is_nothing() -> None:
    assert chosen([5, 1, 9, 3], 1.0) == [0, 1, 2, 3]
    assert chosen([5, 1, 9, 3], 0.0) == []


def test_the_last_ones_are_the_devices() -> None:
    assert max(chosen([1] * 100, 0.4)) < 100 * LEAD < 100
    assert len(chosen([1] * 100, 0.4)) == 40


def test_what_cannot_be_taken_is_made_up_for_by_the_next() -> None:
    assert chosen([1] * 10, 0.4, refused=frozenset({0, 1, 2, 3})) == [4, 5, 6, 7]


def test_a_cpu_that_is_late_gets_less_until_it_is_not() -> None:
    """Its rate and what it is late by are known; a machine on which a share of 0.3 is in time, however it is found."""
    rate, num_elements, in_time = 2e9, 7_000_000_000, 0.3
    less, shares = 0.0, []
    for _ in range(60):
        asked = 0.5 - less
        shares.append(asked)
        late = max(asked - in_time, 0.0) * num_elements / rate
        less = less_share(less, late_seconds=late, elements_per_second=rate, num_elements=num_elements)
    assert all(in_time <= share < in_time + 0.015 for share in shares[20:])
    for _ in range(100):
        less = less_share(less, late_seconds=0.0, elements_per_second=rate, num_elements=num_elements)
    assert less < 0.01
    # One that the device had to do counts as one that the training waited for.
    late = less_share(0.0, late_seconds=1.0, elements_per_second=3.0, num_elements=100)
    assert late == less_share(
        0.0, late_seconds=0.0, elements_per_second=3.0, num_elements=100, num_refused_elements=3
    )
    assert late == pytest.approx(0.015)
    assert 0 < less_share(0.0, late_seconds=1e9, elements_per_second=rate, num_elements=num_elements) < 0.1
    assert less_share(MAX_SHARE, late_seconds=1e9, elements_per_second=rate, num_elements=9) == MAX_SHARE


@pytest.mark.parametrize(
    ("wanted", "first"),
    [(0, []), (4, []), (10, [0]), (14, [0]), (16, [0, 1]), (50, [0, 1, 2, 3, 4]), (99, None)],
)
def test_the_cpus_part_is_those_that_come_first(wanted: float, first: list[int] | None) -> None:
    expected = list(range(10)) if first is None else first
    assert np.flatnonzero(cpu_part([10] * 10, wanted, evenly=False)).tolist() == expected


def test_the_first_that_is_too_large_ends_the_cpus_part() -> None:
    assert cpu_part([10, 100, 10], 30, evenly=False).tolist() == [True, False, False]
    assert cpu_part([10, 100, 10], 60, evenly=False).tolist() == [True, True, False]


def test_an_even_part_is_what_diffusion_chooses() -> None:
    sizes = np.random.default_rng(1).integers(5, 20, 300).tolist()
    chosen_evenly = cpu_part(sizes, 0.3 * sum(sizes), evenly=True)
    assert np.flatnonzero(chosen_evenly).tolist() == chosen(sizes, 0.3)


@pytest.mark.parametrize(
    ("num_elements", "num_step_elements", "num_threads", "expected"),
    [(100, 100, 15, 15), (25, 1000, 15, 2), (1, 1000, 15, 1), (100, 1000, 15, 6), (0, 0, 3, 1), (9, 9, 1, 1)],
)
def test_a_parameter_is_cut_by_its_part_of_the_whole(
    num_elements: int, num_step_elements: int, num_threads: int, expected: int
) -> None:
    assert num_slices(num_elements, num_step_elements, num_threads) == expected


@pytest.mark.parametrize(
    ("rest", "stall", "elements"),
    [(0.01, 1.0, 5e7), (1.0, 0.01, 5e7), (0.01, 0.0, 0.0), (0.0, 1.0, 0.0), (10.0, 10.0, MAX_LATE * 1e9)],
)
def test_late_are_as_many_as_the_link_brings_in_the_shorter_time(
    rest: float, stall: float, elements: float
) -> None:
    """10 ms at 50 GB/s bring ten bytes of 50 million elements."""
    found = late_elements(
        rest_seconds=rest, stall_seconds=stall, link_bytes_per_second=LINK, state_bytes=10, num_elements=10**9
    )
    assert found == pytest.approx(elements)
