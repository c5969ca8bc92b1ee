"""Making room: who goes, in which order, and who may not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pager.errors import BudgetError, TierIOError
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.page_table import Home, PageState
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Rig, make_filled


def follow(rig: Rig, *segments: int) -> None:
    """Expect these accesses, in a cycle."""
    rows = [
        AccessRow(tick, index, 0, rig.segments[index].num_pages, False, Phase.FORWARD)
        for tick, index in enumerate(segments)
    ]
    rig.engine.timeline.follow(AccessTrace.from_rows(rows))


def on_device(rig: Rig) -> set[int]:
    """Segments with a run."""
    return {run.segment.index for run in rig.engine.resident_runs()}


def test_belady_sends_the_farthest_next_use() -> None:
    rig, values = make_filled([PAGE] * 4, arena_frames=3, eviction="belady")
    follow(rig, 0, 2, 1, 3)
    for index in (0, 1, 2):
        rig.read(index)
    # Nothing was told to the timeline, so 3 is used in three rows, and 1 in two.
    np.testing.assert_array_equal(rig.read(3), values[3])
    assert on_device(rig) == {0, 2, 3}
    rig.close()


def test_lru_sends_the_longest_unused() -> None:
    rig, _ = make_filled([PAGE] * 4, arena_frames=3, eviction="lru")
    for index in (0, 1, 2):
        rig.read(index)
        rig.engine.timeline.access(index, 0, 1, write=False, phase=Phase.FORWARD)
    rig.read(0)
    rig.read(3)
    assert on_device(rig) == {0, 2, 3}
    rig.close()


def test_only_as_many_go_as_are_needed() -> None:
    rig, _ = make_filled([PAGE, PAGE, 2 * PAGE, 3 * PAGE], arena_frames=6, eviction="lru")
    for index in (0, 1, 2):
        rig.read(index)
    rig.read(3)
    assert on_device(rig) == {2, 3} or len(on_device(rig)) == 3
    assert rig.arena.resident_bytes <= 6 * PAGE
    rig.close()


def test_a_large_arena_is_emptied_a_sixteenth_at_a_time() -> None:
    rig, _ = make_filled([PAGE] * 64, arena_frames=48, eviction="lru")
    for index in range(48):
        rig.read(index)
        rig.engine.timeline.access(index, 0, 1, write=False, phase=Phase.FORWARD)
    rig.read(48)
    assert on_device(rig) == set(range(3, 49))
    rig.close()


def test_pinned_and_wired_runs_stay() -> None:
    rig, values = make_filled([PAGE] * 3, arena_frames=2, homes=[Home.DEVICE, Home.HOST, Home.HOST])
    rig.engine.wire(rig.segments[0])
    _, held = rig.lease(1)
    with pytest.raises(
        BudgetError, match=r"using s2 needs 4.00 KiB .* the largest stretch that can be emptied is 0 B"
    ):
        rig.read(2)
    np.testing.assert_array_equal(held.numpy(), values[1])
    del held
    np.testing.assert_array_equal(rig.read(2), values[2])
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()


def test_a_prefetch_takes_nothing_that_is_needed_sooner() -> None:
    rig, _ = make_filled([PAGE] * 3, arena_frames=1, eviction="belady")
    follow(rig, 1, 2, 0)
    rig.read(0)
    assert rig.prefetch(1, ticks_ahead=2) is False, "0 is used in two rows, as soon as that"
    assert rig.prefetch(1, ticks_ahead=1) is True
    assert on_device(rig) == {1}
    rig.close()


def test_a_prefetched_run_goes_for_a_fault_but_not_for_a_prefetch() -> None:
    rig, values = make_filled([PAGE] * 3, arena_frames=1, eviction="belady")
    follow(rig, 1, 2, 0)
    assert rig.prefetch(0, ticks_ahead=0)
    assert rig.prefetch(1, ticks_ahead=0) is False
    np.testing.assert_array_equal(rig.read(2), values[2])
    assert rig.counters.prefetch_unused == 1
    rig.close()


def test_clean_pages_leave_without_a_copy() -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=1)
    rig.read(0)
    rig.read(1)
    assert rig.counters.page_out_bytes == 0
    rig.write(1, values[0])
    rig.read(0)
    assert rig.counters.page_out_bytes == PAGE
    rig.close()


def test_a_write_back_cleans_and_stays(tmp_path: Path) -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=2, homes=[Home.HOST, Home.DISK], disk_folder=tmp_path)
    for index in (0, 1):
        rig.write(index, ~values[index])
    rig.engine.flush(rig.segments)
    assert [rig.state(0), rig.state(1)] == [[PageState.CLEAN]] * 2
    written = rig.counters.page_out_bytes
    rig.engine.flush(rig.segments)
    assert rig.counters.page_out_bytes == written
    for index in (0, 1):
        np.testing.assert_array_equal(rig.home_value(index), ~values[index])
    rig.close()


def test_a_fault_whose_victim_cannot_be_written_fails_and_loses_nothing(tmp_path: Path) -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=1, homes=[Home.DISK] * 2, disk_folder=tmp_path)
    assert rig.disk is not None
    rig.write(0, ~values[0])
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1, lasting=True),)
    np.testing.assert_array_equal(rig.read(1), values[1])  # the victim's bytes are in the ring
    with pytest.raises(TierIOError):  # the background says so, once
        rig.read(0)
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    rig.write(1, ~values[1])
    for _ in range(2):
        with pytest.raises(TierIOError):
            rig.read(0)
    assert rig.state(1) == [PageState.DIRTY]
    np.testing.assert_array_equal(rig.read(1), ~values[1])
    rig.disk.faults = ()
    for _ in range(2):
        np.testing.assert_array_equal(rig.read(0), ~values[0])
        np.testing.assert_array_equal(rig.read(1), ~values[1])
    rig.transfers.settle()
    rig.close()
