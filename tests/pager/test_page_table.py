"""Every verb from every state: it does what the table at the head of the file says, or refuses and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pager.errors import PagerInternalError
from pager.page_table import Home, PageState, PageTable

EMPTY, ABSENT, ARRIVING, CLEAN, DIRTY, LEAVING = PageState
Verb = Callable[[PageTable], None]

# verb -> (what it does to pages 2..4, {state it starts from: state it ends in})
VERBS: dict[str, tuple[Verb, dict[PageState, PageState]]] = {
    "store_home": (lambda table: table.store_home(2, 4), {EMPTY: ABSENT, ABSENT: ABSENT}),
    "begin_page_in": (lambda table: table.begin_page_in(2, 4, 7), {ABSENT: ARRIVING}),
    "end_page_in": (lambda table: table.end_page_in(2, 4, success=True), {ARRIVING: CLEAN}),
    "fail_page_in": (lambda table: table.end_page_in(2, 4, success=False), {ARRIVING: ABSENT}),
    "materialize": (lambda table: table.materialize(2, 4, 7), {EMPTY: DIRTY, ABSENT: DIRTY}),
    "mark_dirty": (lambda table: table.mark_dirty(2, 4), {CLEAN: DIRTY, LEAVING: DIRTY, DIRTY: DIRTY}),
    "begin_page_out": (lambda table: table.begin_page_out(2, 4), {DIRTY: LEAVING}),
    "end_page_out": (lambda table: table.end_page_out(2, 4, success=True), {LEAVING: CLEAN, DIRTY: DIRTY}),
    "fail_page_out": (lambda table: table.end_page_out(2, 4, success=False), {LEAVING: DIRTY, DIRTY: DIRTY}),
    "evict": (lambda table: table.evict(2, 4), {CLEAN: ABSENT}),
    "discard": (
        lambda table: table.discard(2, 4),
        {EMPTY: EMPTY, ABSENT: EMPTY, ARRIVING: EMPTY, CLEAN: EMPTY, DIRTY: EMPTY},
    ),
    "pin": (
        lambda table: table.pin(2, 4),
        {ARRIVING: ARRIVING, CLEAN: CLEAN, DIRTY: DIRTY, LEAVING: LEAVING},
    ),
}
RESIDENT = (ARRIVING, CLEAN, DIRTY, LEAVING)


def make_table(state: PageState, num_pages: int = 6) -> PageTable:
    """A table whose pages are all in one state, at home on the host from frame 10 on."""
    table = PageTable()
    table.grow(num_pages)
    table.settle(0, num_pages, Home.HOST, 10)
    table.state[:] = state
    if state in RESIDENT:
        table.frame[:] = np.arange(len(table.frame))
    return table


def columns(table: PageTable) -> list[list[int]]:
    """Everything the table knows."""
    return [
        column.tolist() for column in (table.state, table.home, table.home_frame, table.frame, table.pins)
    ]


@pytest.mark.parametrize("state", PageState, ids=lambda state: state.name)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_from_a_state(verb: str, state: PageState) -> None:
    apply, ends = VERBS[verb]
    table = make_table(state)
    before = columns(table)
    if state not in ends:
        with pytest.raises(PagerInternalError, match=f"{verb.replace('fail_', 'end_')}: page"):
            apply(table)
        assert columns(table) == before
        return
    apply(table)
    assert table.state[2:4].tolist() == [ends[state]] * 2
    assert table.state[[0, 1, 4, 5]].tolist() == [state] * 4
    assert [column[:2] for column in columns(table)] == [column[:2] for column in before]
    assert ((table.frame[2:4] >= 0) == (ends[state] in RESIDENT)).all()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("pin", "discard")])
def test_a_verb_refuses_a_range_of_which_one_page_is_in_another_state(verb: str) -> None:
    apply, ends = VERBS[verb]
    table = make_table(next(iter(ends)))
    table.state[3] = next(state for state in PageState if state not in ends)
    before = columns(table)
    with pytest.raises(PagerInternalError, match="page 3 of 2..4 is"):
        apply(table)
    assert columns(table) == before


@pytest.mark.parametrize("verb", ["evict", "discard"])
def test_pinned_pages_do_not_go(verb: str) -> None:
    table = make_table(CLEAN)
    table.pin(3, 4)
    before = columns(table)
    with pytest.raises(PagerInternalError, match="page 3 of 2..4 has 1 pins"):
        VERBS[verb][0](table)
    assert columns(table) == before
    table.unpin(3, 4)
    VERBS[verb][0](table)
    assert not table.pins.any()


def test_pins_nest_and_never_go_below_zero() -> None:
    table = make_table(CLEAN)
    table.pin(2, 4)
    table.pin(3, 5)
    table.unpin(2, 4)
    assert table.pins.tolist() == [0, 0, 0, 1, 1, 0]
    with pytest.raises(PagerInternalError, match="not all pinned"):
        table.unpin(2, 4)
    assert table.pins.tolist() == [0, 0, 0, 1, 1, 0]


def test_pages_at_home_on_the_device_have_nowhere_to_go() -> None:
    table = make_table(DIRTY)
    table.settle(3, 4, Home.DEVICE, -1)
    with pytest.raises(PagerInternalError, match="home on the device"):
        table.begin_page_out(2, 4)
    assert table.state.tolist() == [DIRTY] * 6


def test_written_again_while_leaving_stays_dirty() -> None:
    table = make_table(DIRTY)
    table.begin_page_out(0, 6)
    table.mark_dirty(2, 4)
    table.end_page_out(0, 6, success=True)
    assert table.state.tolist() == [CLEAN, CLEAN, DIRTY, DIRTY, CLEAN, CLEAN]


def test_frames_and_homes_are_numbered_in_order() -> None:
    table = make_table(ABSENT)
    table.begin_page_in(1, 4, 20)
    assert table.frame.tolist() == [-1, 20, 21, 22, -1, -1]
    assert table.home_frame.tolist() == [10, 11, 12, 13, 14, 15]
    assert table.num_resident() == 3
    table.settle(4, 6, Home.DEVICE, -1)
    assert table.home_frame.tolist() == [10, 11, 12, 13, -1, -1]


def test_a_value_is_there_only_if_every_page_has_one() -> None:
    table = make_table(CLEAN)
    assert table.has_value(0, 6)
    table.discard(5, 6)
    assert table.has_value(0, 5)
    assert not table.has_value(0, 6)


def test_growing_keeps_what_is_known_and_adds_empty_pages() -> None:
    table = make_table(CLEAN, num_pages=3)
    table.pin(0, 2)
    for num_pages in (4, 5, 100):
        table.grow(num_pages)
    assert table.num_pages == 100
    assert table.state[:4].tolist() == [CLEAN, CLEAN, CLEAN, EMPTY]
    assert table.pins[:4].tolist() == [1, 1, 0, 0]
    assert table.home[99] == Home.HOST
    assert table.frame[99] == -1
    assert table.num_resident() == 3


def test_a_table_cannot_shrink() -> None:
    with pytest.raises(PagerInternalError, match="shrink from 6 to 5"):
        make_table(EMPTY).grow(5)
