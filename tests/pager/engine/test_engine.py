"""Faults, leases and values: what is counted, what is kept, what is given back."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from pager.errors import BudgetError, PagerInternalError
from pager.page_table import Home, PageState
from tests.engine_rig import PAGE, Rig, make_filled, make_values

CLEAN, DIRTY, ABSENT, EMPTY = PageState.CLEAN, PageState.DIRTY, PageState.ABSENT, PageState.EMPTY


def faults(rig: Rig) -> tuple[int, int, int, int]:
    """Hits, minor, major, again."""
    counters = rig.counters
    return counters.hits, counters.minor_faults, counters.major_faults, counters.refaults


def test_each_access_is_a_hit_or_one_kind_of_fault() -> None:
    rig, _ = make_filled([PAGE] * 2, arena_frames=1)
    rig.read(0)
    assert faults(rig) == (0, 0, 1, 0)
    rig.read(0)
    assert faults(rig) == (1, 0, 1, 0)
    rig.evict(0)
    rig.prefetch(0)
    rig.read(0)
    assert faults(rig) == (1, 1, 1, 0), "late streams: the copy has not arrived"
    assert rig.counters.prefetch_late == 1
    rig.evict(0)
    rig.read(0)
    assert faults(rig) == (1, 1, 2, 1), "it was there before"
    rig.close()


def test_on_early_streams_a_prefetch_makes_a_hit() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1, streams="early")
    rig.prefetch(0)
    rig.read(0)
    assert faults(rig) == (1, 0, 0, 0)
    assert rig.counters.prefetch_late == 0
    rig.close()


def test_overwriting_brings_nothing() -> None:
    rig, values = make_filled([PAGE], arena_frames=1)
    rig.overwrite(0, ~values[0])
    assert rig.counters.page_in_bytes == 0
    assert rig.state(0) == [DIRTY]
    np.testing.assert_array_equal(rig.home_value(0), ~values[0])
    rig.close()


def test_freed_frames_are_poisoned() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1)
    rig.read(0)
    rig.evict(0)
    rig.device.poison.synchronize()
    assert rig.arena.bytes_of(0, PAGE).tolist() == [0xFF] * PAGE
    rig.close()


# -- leases ----------------------------------------------------------------------------------------------------


def test_a_view_of_a_view_pins_until_it_dies() -> None:
    rig, values = make_filled([2 * PAGE], arena_frames=2)
    run, lease = rig.lease(0)
    view = lease[5:].view(torch.uint8)[3:]
    del lease
    rig.engine.drain()
    assert run.pins == 1
    rig.evict(0)
    np.testing.assert_array_equal(view.numpy(), values[0][8:])
    del view
    rig.engine.drain()
    assert run.pins == 0
    rig.evict(0)
    assert rig.state(0) == [ABSENT] * 2
    rig.close()


def test_leases_of_one_run_count() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1)
    leases = [rig.lease(0)[1] for _ in range(3)]
    run = rig.engine.runs_of(rig.segments[0])[0]
    assert (run.pins, rig.table.pins.tolist()) == (3, [3])
    while leases:
        leases.pop()
        rig.engine.drain()
        assert run.pins == len(leases)
    assert rig.engine.in_use(rig.segments[0]) is False
    rig.close()


def test_leases_share_the_storage_that_the_user_holds() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1)
    run, first = rig.lease(0)
    rig.engine.share(run, first)
    view = first[8:]
    del first
    second = rig.lease(0)[1]
    assert second.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert second.untyped_storage()._cdata == view.untyped_storage()._cdata
    rig.engine.drain()
    assert run.pins == 1
    del view
    rig.engine.drain()
    assert run.pins == 1, "the lease has the storage alone now"
    del second
    rig.engine.drain()
    assert run.pins == 0
    third = rig.lease(0)[1]
    rig.engine.drain()
    assert (run.pins, third.numel()) == (1, PAGE)
    del third
    rig.close()


def test_a_lease_in_a_cycle_is_collected_before_anybody_is_refused() -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=1)

    class Holder:
        """Refers to itself."""

    holder = Holder()
    holder.me = holder  # type: ignore[attr-defined]
    holder.lease = rig.lease(0)[1]  # type: ignore[attr-defined]
    gc.disable()
    try:
        del holder
        np.testing.assert_array_equal(rig.read(1), values[1])
    finally:
        gc.enable()
    rig.close()


def test_an_escaped_run_is_dirty_until_nobody_uses_it() -> None:
    rig, values = make_filled([PAGE], arena_frames=1)
    run, lease = rig.lease(0)
    run.escaped = True
    lease.copy_(torch.from_numpy(~values[0]))
    assert rig.engine.is_dirty(rig.segments[0])
    del lease
    np.testing.assert_array_equal(rig.home_value(0), ~values[0])
    written = rig.counters.page_out_bytes
    rig.read(0)
    rig.evict(0)
    assert rig.counters.page_out_bytes == written
    rig.close()


def test_a_write_under_a_live_lease_is_seen_by_a_flush() -> None:
    rig, values = make_filled([PAGE], arena_frames=1)
    _, lease = rig.lease(0)
    rig.write_through(0, lease, ~values[0])
    np.testing.assert_array_equal(rig.home_value(0), ~values[0])
    rig.write_through(0, lease, values[0])
    assert rig.engine.is_dirty(rig.segments[0])
    np.testing.assert_array_equal(rig.home_value(0), values[0])
    del lease
    rig.close()


# -- many at once ----------------------------------------------------------------------------------------------


def test_all_of_an_operation_or_nothing() -> None:
    rig, _ = make_filled([PAGE] * 3, arena_frames=2)
    wanted = [(segment, 0, 1, False) for segment in rig.segments]
    with pytest.raises(BudgetError) as caught:
        rig.engine.acquire_all(wanted, "addmm")
    message = str(caught.value)
    assert "addmm needs 12.00 KiB on the device at once (s0, s1, s2)" in message
    assert "Raise device_budget by at least 4.00 KiB" in message
    assert not rig.table.pins.any()
    rig.close()


def test_pieces_in_the_wrong_places_are_moved_out_of_the_way() -> None:
    rig, values = make_filled([PAGE, PAGE, 2 * PAGE], arena_frames=3)
    rig.read(0)
    _, held = rig.lease(1)
    rig.evict(0)
    del held
    np.testing.assert_array_equal(rig.read(2), values[2])
    rig.close()


def test_what_is_brought_ahead_does_not_break_up_the_room_of_an_operation() -> None:
    """One page that comes ahead between the pages of an operation leaves no two neighbours."""
    rig, values = make_filled([PAGE, PAGE, 2 * PAGE, PAGE], arena_frames=4)

    def bring_ahead() -> None:
        rig.prefetch(3)

    rig.engine.on_access = bring_ahead
    wanted = [(segment, 0, segment.num_pages, False) for segment in rig.segments[:3]]
    runs = rig.engine.acquire_all(wanted, "addmm")
    for run, value in zip(runs, values, strict=False):
        np.testing.assert_array_equal(rig.engine.lease(run).numpy(), value)
    rig.engine.on_access = lambda: None
    rig.engine.drain()
    rig.close()


def test_a_part_then_the_whole_then_a_part() -> None:
    rig, values = make_filled([4 * PAGE], arena_frames=4)
    for pages in ((1, 2), (3, 1), (0, 4), (2, 1)):
        run, lease = rig.lease(0, pages=pages)
        first = pages[0] - run.first
        expected = values[0][pages[0] * PAGE : (pages[0] + pages[1]) * PAGE]
        np.testing.assert_array_equal(lease[first * PAGE : (first + pages[1]) * PAGE].numpy(), expected)
        del lease
        rig.engine.drain()
    rig.close()


def test_a_range_that_overlaps_one_in_use_is_a_bug() -> None:
    rig, _ = make_filled([3 * PAGE], arena_frames=4)
    _, held = rig.lease(0, pages=(0, 2))
    with pytest.raises(PagerInternalError, match="s0: pages 0..2 are in use while an operation asks"):
        rig.lease(0, pages=(1, 2))
    del held
    rig.engine.drain()
    assert not rig.table.pins.any()
    rig.close()


# -- values ----------------------------------------------------------------------------------------------------


def test_discarding_frees_the_frames_and_the_value() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1)
    rig.read(0)
    rig.engine.discard(rig.segments[0])
    assert rig.state(0) == [EMPTY]
    assert not rig.engine.has_value(rig.segments[0])
    assert rig.arena.resident_bytes == 0
    rig.engine.discard(rig.segments[0])
    assert rig.state(0) == [EMPTY]
    rig.close()


def test_views_of_a_discarded_value_keep_it_and_a_new_one_stands_beside_it() -> None:
    rig, values = make_filled([PAGE], arena_frames=2)
    _, old = rig.lease(0)
    rig.store(0, ~values[0])
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    np.testing.assert_array_equal(old.numpy(), values[0])
    assert rig.arena.resident_bytes == 2 * PAGE
    rig.write_through(0, old, make_values(PAGE, 9))
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    del old
    rig.engine.drain()
    assert rig.arena.resident_bytes == PAGE
    rig.close()


def test_a_wired_segment_takes_new_values_where_it_is(tmp_path: Path) -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=2, homes=[Home.DEVICE, Home.HOST])
    rig.engine.wire(rig.segments[0])
    rig.store(0, ~values[0])
    rig.evict(0, 1)
    assert rig.state(0) == [DIRTY]
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    assert rig.counters.page_in_bytes == rig.counters.page_out_bytes == 0
    rig.close()


@pytest.mark.parametrize("home", [Home.HOST, Home.DEVICE])
def test_another_value_stands_beside_the_one_that_is_leased(home: Home) -> None:
    rig, values = make_filled([PAGE], arena_frames=2, homes=[home])
    _, old = rig.lease(0)
    rig.write_through(0, old, make_values(PAGE, 9))
    states: list[list[int]] = []
    rig.engine.replace(rig.segments[0], torch.from_numpy(~values[0]), lambda: states.append(rig.state(0)))
    np.testing.assert_array_equal(old.numpy(), make_values(PAGE, 9))
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    assert states == ([[EMPTY]] if home is Home.HOST else [])
    del old
    rig.engine.drain()
    assert rig.arena.resident_bytes == PAGE
    rig.close()


def test_a_wired_value_that_is_leased_stays_where_there_is_no_room_for_another() -> None:
    rig, values = make_filled([PAGE], arena_frames=1, homes=[Home.DEVICE])
    run, old = rig.lease(0)
    with pytest.raises(BudgetError, match="s0"):
        rig.engine.replace(rig.segments[0], torch.from_numpy(~values[0]), lambda: None)
    rig.engine.drain()
    assert (rig.state(0), rig.engine.runs_of(rig.segments[0]), run.pins) == ([DIRTY], [run], 1)
    np.testing.assert_array_equal(rig.read(0), values[0])
    del old
    rig.engine.replace(rig.segments[0], torch.from_numpy(~values[0]), lambda: None)
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    rig.close()


def test_frames_of_a_value_that_is_gone_are_no_victim() -> None:
    """Reclaim ranked the run when it was nobody's; chosen for ever, it would never go."""
    rig, _ = make_filled([PAGE] * 3, arena_frames=2)
    for index in (0, 1, 2):
        rig.read(index)
    (run,) = rig.engine.runs_of(rig.segments[1])
    assert run.rank is not None
    leases = [rig.lease(index)[1] for index in (1, 2)]
    rig.engine.discard(rig.segments[1])
    with pytest.raises(BudgetError, match=r"8\.00 KiB are in use"):
        rig.read(0)
    leases.clear()
    rig.engine.drain()
    rig.close()


def test_a_failure_in_the_background_is_raised_once_at_the_next_access() -> None:
    rig, values = make_filled([PAGE], arena_frames=1)
    rig.engine.fail(OSError("first"))
    rig.engine.fail(OSError("second"))
    with pytest.raises(OSError, match="first"):
        rig.read(0)
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()


def test_what_goes_wrong_after_the_pin_gives_it_back() -> None:
    rig, values = make_filled([PAGE], arena_frames=1)

    def fail() -> None:
        raise OSError("on access")

    rig.engine.on_access = fail
    with pytest.raises(OSError, match="on access"):
        rig.read(0)
    rig.engine.on_access = lambda: None
    rig.engine.drain()
    assert not rig.table.pins.any()
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()


def test_the_history_of_resident_bytes_is_a_sawtooth() -> None:
    rig, _ = make_filled([PAGE] * 2, arena_frames=1)
    for index in (0, 1, 0):
        rig.read(index)
    assert [resident // PAGE for _, resident in rig.counters.resident_history()] == [1, 0, 1, 0, 1]
    rig.close()


def test_a_raised_failure_keeps_nobodys_lease_alive() -> None:
    """An error that referred to the frame it was raised in would keep all callers' variables until a collection."""
    rig, values = make_filled([PAGE] * 2, arena_frames=1)

    def use_two() -> None:
        lease = rig.lease(0)[1]
        rig.engine.fail(OSError("in the background"))
        rig.read(1)
        del lease

    gc.disable()
    try:
        with contextlib.suppress(OSError):
            use_two()
        rig.engine.drain()
        assert not rig.table.pins.any()
    finally:
        gc.enable()
    np.testing.assert_array_equal(rig.read(1), values[1])
    rig.close()
