"""The split of the update between CPU and link, and how many threads it has."""

from __future__ import annotations

import numpy as np
import pytest

from pager.policies.update_split import (
    CPU_SPAN,
    FIRST_SHARE,
    MAX_SHARE,
    balanced_share,
    cpu_part,
    num_threads_beside_link,
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


def test_a_cpu_that_was_not_measured_gets_a_little() -> None:
    assert share(elements_per_second=0.0) == FIRST_SHARE
    assert share(elements_per_second=0.0, streamed_share=0.04) == 0.04


def test_never_more_than_streams_nor_than_may_be() -> None:
    assert share(elements_per_second=1e12, streamed_share=0.2) == 0.2
    assert share(elements_per_second=1e12) == MAX_SHARE


@pytest.mark.parametrize(("all_threads", "beside"), [(1, 1), (2, 1), (3, 1), (7, 2), (15, 5), (63, 21)])
def test_a_third_of_the_threads_beside_the_link(all_threads: int, beside: int) -> None:
    assert num_threads_beside_link(all_threads) == beside


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


@pytest.mark.parametrize("share", [0.05, 0.2, 0.3, 0.45, 0.7])
def test_an_even_part_is_in_every_stretch(share: float) -> None:
    sizes = np.random.default_rng(1).integers(5, 20, 300)
    chosen = cpu_part(sizes, share * sizes.sum(), evenly=True)
    assert sizes[chosen].sum() == pytest.approx(share * sizes.sum(), abs=20)
    ahead = np.cumsum(np.where(chosen, sizes, 0)) - share * np.cumsum(sizes)
    assert np.abs(ahead).max() <= sizes.max()
