"""The split of the update between CPU and link, and the search for the number of threads."""

from __future__ import annotations

import pytest

from pager.policies.update_split import (
    CPU_SPAN,
    FIRST_SHARE,
    MAX_SHARE,
    STEPS_PER_TRIAL,
    ThreadSearch,
    balanced_share,
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


def search(most: int, seconds: dict[int, float]) -> tuple[list[int], ThreadSearch]:
    """The numbers tried, where a step with so many threads takes so long; and the search, over."""
    found = ThreadSearch(most)
    tried: list[int] = []
    for _ in range(100):
        if found.is_over:
            break
        if not tried or tried[-1] != found.num_threads:
            tried.append(found.num_threads)
        found.step_took(seconds[found.num_threads])
    return tried, found


@pytest.mark.parametrize("best", [15, 8, 5, 3])
def test_the_fastest_number_stays(best: int) -> None:
    tried, found = search(15, {number: 1.0 - 0.1 * (number == best) for number in (15, 8, 5, 3)})
    assert tried[:4] == [15, 8, 5, 3]
    assert found.num_threads == best
    found.step_took(99.0)
    assert found.num_threads == best


@pytest.mark.parametrize(("most", "tried"), [(1, [1]), (2, [2, 1]), (3, [3, 2, 1]), (7, [7, 4, 2, 1])])
def test_each_number_is_tried_once(most: int, tried: list[int]) -> None:
    found = search(most, dict.fromkeys(range(1, 8), 1.0))
    assert found[0][: len(tried)] == tried
    assert found[1].num_threads == most


def test_steps_in_which_the_share_settles_do_not_count() -> None:
    found = ThreadSearch(2)
    for number in (2, 1):
        assert found.num_threads == number
        for step in range(STEPS_PER_TRIAL):
            # The first steps with two threads are slow, and one of the others is disturbed.
            found.step_took((9.0, 9.0, 9.0, 1.0)[step] if number == 2 else 2.0)
    assert found.is_over
    assert found.num_threads == 2
