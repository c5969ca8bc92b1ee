"""The prefetcher, inline: what it brings, how far ahead, when it stands back. Its thread: see tests/races."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pager.engine import pagerd as pagerd_module
from pager.engine.pagerd import Pagerd
from pager.errors import TierIOError
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.page_table import Home
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Rig, make_filled


def make_pagerd(rig: Rig, *segments: int, distance: int = 2, phase: Phase = Phase.FORWARD) -> Pagerd:
    """An inline pagerd that expects these accesses in a cycle."""
    rows = [
        AccessRow(tick, index, 0, rig.segments[index].num_pages, False, phase)
        for tick, index in enumerate(segments)
    ]
    rig.engine.timeline.follow(AccessTrace.from_rows(rows))
    return Pagerd(rig.engine, distance, threaded=False)


def access(rig: Rig, index: int) -> np.ndarray:
    """An access as the MMU makes it: noted, then served."""
    rig.engine.timeline.access(index, 0, rig.segments[index].num_pages, write=False, phase=Phase.FORWARD)
    return rig.read(index)


def brought(rig: Rig) -> set[int]:
    """Segments that were prefetched and not used yet."""
    return {run.segment.index for run in rig.engine.resident_runs() if run.prefetched}


def test_after_an_access_the_next_ones_are_on_their_way() -> None:
    rig, values = make_filled([PAGE] * 5, arena_frames=5)
    make_pagerd(rig, 0, 1, 2, 3, 4, distance=2)
    access(rig, 0)
    assert brought(rig) == {1, 2}
    np.testing.assert_array_equal(access(rig, 1), values[1])
    assert brought(rig) == {2, 3}
    assert rig.counters.major_faults == 1
    rig.close()


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_with_room_only_the_first_access_of_a_step_is_a_major_fault(distance: int) -> None:
    rig, values = make_filled([PAGE] * 8, arena_frames=2 + distance, eviction="belady")
    make_pagerd(rig, *range(8), distance=distance)
    for number in range(24):
        np.testing.assert_array_equal(access(rig, number % 8), values[number % 8])
    assert rig.counters.major_faults == 1
    assert rig.counters.prefetch_unused == 0
    rig.close()


def test_distance_zero_switches_it_off() -> None:
    rig, _ = make_filled([PAGE] * 3, arena_frames=3)
    pagerd = make_pagerd(rig, 0, 1, 2, distance=0)
    access(rig, 0)
    assert brought(rig) == set()
    pagerd.set_distance(2)
    access(rig, 1)
    assert brought(rig) == {2}
    rig.close()


def test_a_large_segment_counts_as_its_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        pagerd_module,
        __import__("pager.engine.leases", fromlist=["x"]),
        __import__("pager.engine.faults", fromlist=["x"]),
    ):
        monkeypatch.setattr(module, "EXTENT_BYTES", PAGE)
    rig, _ = make_filled([PAGE, 3 * PAGE, PAGE, PAGE], arena_frames=6)
    make_pagerd(rig, 0, 1, 2, 3, distance=3)
    access(rig, 0)
    assert brought(rig) == {1}
    access(rig, 1)
    assert brought(rig) == {2, 3}
    rig.close()


def test_what_is_to_be_overwritten_or_has_no_value_is_not_brought() -> None:
    rig, _ = make_filled([PAGE] * 4, arena_frames=4)
    rows = [
        AccessRow(0, 0, 0, 1, False, Phase.FORWARD),
        AccessRow(1, 1, 0, 1, True, Phase.GRADIENT),
        AccessRow(2, 2, 0, 1, False, Phase.BACKWARD),
        AccessRow(3, 3, 0, 1, False, Phase.BACKWARD),
    ]
    rig.engine.timeline.follow(AccessTrace.from_rows(rows))
    rig.engine.discard(rig.segments[2])
    Pagerd(rig.engine, 3, threaded=False)
    access(rig, 0)
    assert brought(rig) == {3}
    rig.close()


def test_it_brings_nothing_that_evicts_what_is_needed_sooner() -> None:
    rig, values = make_filled([PAGE] * 3, arena_frames=2, eviction="belady")
    make_pagerd(rig, 0, 0, 1, 2, distance=2)
    access(rig, 0)
    assert brought(rig) == {1}
    np.testing.assert_array_equal(access(rig, 0), values[0])
    assert brought(rig) == {1}, "2 would have to take the place of 1, which is needed sooner"
    np.testing.assert_array_equal(access(rig, 1), values[1])
    assert brought(rig) == {2}, "0 is used again only after 2"
    rig.close()


def test_after_a_jump_in_the_trace_it_looks_from_there() -> None:
    """A forward without its backward, as in evaluation: the second one is brought like the first."""
    rig, _ = make_filled([PAGE] * 6, arena_frames=3, eviction="belady")
    make_pagerd(rig, 0, 1, 2, 3, 4, 5, distance=1)
    for _ in range(3):
        for index in (0, 1, 2, 3):
            access(rig, index)
    majors = rig.counters.major_faults
    for _ in range(3):
        for index in (0, 1, 2, 3):
            access(rig, index)
    assert rig.counters.major_faults - majors <= 3, "at most the first access of each round"
    rig.close()


def test_while_it_is_paused_nothing_is_brought() -> None:
    rig, _ = make_filled([PAGE] * 3, arena_frames=3)
    pagerd = make_pagerd(rig, 0, 1, 2, distance=1)
    pagerd.pause()
    pagerd.pause()
    access(rig, 0)
    pagerd.resume()
    assert brought(rig) == set()
    pagerd.resume()
    access(rig, 1)
    assert brought(rig) == {2}
    rig.close()


def test_its_failure_stops_it_and_is_raised_at_the_next_access(tmp_path: Path) -> None:
    rig, values = make_filled([PAGE] * 3, arena_frames=3, homes=[Home.DISK] * 3, disk_folder=tmp_path)
    assert rig.disk is not None
    make_pagerd(rig, 0, 1, 2, distance=1)
    rig.disk.faults = (Fault(operation="read", at=2),)
    np.testing.assert_array_equal(access(rig, 0), values[0])
    with pytest.raises(TierIOError, match="injected"):
        access(rig, 1)
    np.testing.assert_array_equal(access(rig, 1), values[1])
    assert brought(rig) == set(), "it has stopped"
    assert not rig.table.pins.any()
    rig.close()


def test_closing_twice_is_closing_once() -> None:
    rig, _ = make_filled([PAGE] * 2, arena_frames=2)
    pagerd = make_pagerd(rig, 0, 1)
    pagerd.close()
    pagerd.close()
    access(rig, 0)
    assert brought(rig) == set()
    rig.close()


def test_a_failure_that_is_kept_for_later_keeps_nobodys_lease_alive(tmp_path: Path) -> None:
    rig, values = make_filled([PAGE] * 2, arena_frames=2, homes=[Home.DISK] * 2, disk_folder=tmp_path)
    assert rig.disk is not None
    make_pagerd(rig, 0, 1, distance=1)
    rig.disk.faults = (Fault(operation="read", at=2),)

    def use() -> None:
        lease = rig.lease(0)[1]
        np.testing.assert_array_equal(lease.numpy(), values[0])

    rig.engine.timeline.access(0, 0, 1, write=False, phase=Phase.FORWARD)
    use()
    rig.engine.drain()
    assert rig.engine.failure is not None
    assert not rig.table.pins.any()
    rig.close()
