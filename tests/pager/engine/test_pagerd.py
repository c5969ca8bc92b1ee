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


def test_a_gradient_that_is_added_to_is_brought_and_what_has_no_value_is_not() -> None:
    """The gradient of a later micro-batch: its rows look the same in the trace as those of the first."""
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
    assert brought(rig) == {1, 3}
    rig.close()


class Listener:
    """A prefetch policy that wants nothing and notes what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[float], list[bool]]] = []

    def select(
        self,
        num_bytes: np.ndarray,
        seconds_until_use: np.ndarray,
        issued: np.ndarray,
        bandwidth_bytes_per_second: float,
    ) -> np.ndarray:
        self.told.append((num_bytes.tolist(), seconds_until_use.tolist(), issued.tolist()))
        return np.zeros(0, np.int64)


def test_the_policy_is_told_real_bytes_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pagerd", "leases", "faults"):
        monkeypatch.setattr(__import__(f"pager.engine.{name}", fromlist=["x"]), "EXTENT_BYTES", 2 * PAGE)
    rig, _ = make_filled([PAGE, 10, 3 * PAGE + 5, PAGE], arena_frames=8)
    pagerd = make_pagerd(rig, 0, 1, 2, 3, distance=1)
    trace = rig.engine.timeline.trace
    assert trace is not None
    rig.engine.timeline.follow(trace.with_seconds([1.0, 2.0, 4.0, 8.0]))
    access(rig, 0)
    assert brought(rig) == {1}
    pagerd.set_distance(4)
    pagerd._policy = listener = Listener()
    rig.read(0)
    assert listener.told == [
        ([10, 2 * PAGE, PAGE + 5, PAGE], [0.0, 2.0, 2.0, 6.0], [True, False, False, False])
    ]
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


def make_failing(folder: Path, *, threaded: bool) -> tuple[Rig, Pagerd]:
    """Three segments on disk, the first one on the device, and a pagerd that is about to bring the second."""
    rig, values = make_filled([PAGE] * 3, arena_frames=3, homes=[Home.DISK] * 3, disk_folder=folder)
    np.testing.assert_array_equal(access(rig, 0), values[0])
    rows = [AccessRow(tick, tick, 0, 1, False, Phase.FORWARD) for tick in range(3)]
    rig.engine.timeline.follow(AccessTrace.from_rows(rows))
    return rig, Pagerd(rig.engine, 1, threaded=threaded)


def fail_once(rig: Rig, pagerd: Pagerd) -> None:
    """A step whose prefetch fails, and the error that the user gets."""
    assert rig.disk is not None
    rig.engine.timeline.end_step()
    rig.evict(1, 2)
    rig.disk.faults = (Fault(operation="read", at=rig.disk.calls["read"] + 1),)
    access(rig, 0)
    if pagerd._thread is not None:
        pagerd._thread.join(20)
    with pytest.raises(TierIOError, match="injected"):
        access(rig, 0)


@pytest.mark.parametrize("threaded", [False, True])
def test_after_one_failure_it_starts_again_with_the_next_step(
    threaded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig, pagerd = make_failing(tmp_path, threaded=threaded)
    fail_once(rig, pagerd)
    access(rig, 0)
    assert brought(rig) == set(), "not within the step"
    pagerd.end_step()
    warnings = [record.getMessage() for record in caplog.records if record.name == "pager.engine.pagerd"]
    assert len(warnings) == 1
    assert "TierIOError" in warnings[0]
    rig.engine.timeline.end_step()
    assert pagerd._thread is None or pagerd._thread.is_alive()
    pagerd.pause()
    access(rig, 0)
    pagerd.pump()
    assert brought(rig) == {1}
    pagerd.resume()
    pagerd.close()
    rig.close()


def test_a_failure_that_nobody_has_seen_yet_does_not_start_it_again(tmp_path: Path) -> None:
    rig, pagerd = make_failing(tmp_path, threaded=False)
    assert rig.disk is not None
    rig.disk.faults = (Fault(operation="read", at=rig.disk.calls["read"] + 1),)
    access(rig, 0)
    pagerd.end_step()
    closed_before = pagerd.is_closed
    with pytest.raises(TierIOError, match="injected"):
        access(rig, 0)
    pagerd.end_step()
    assert (closed_before, pagerd.is_closed) == (True, False)
    rig.close()


def test_three_steps_in_a_row_with_a_failure_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig, pagerd = make_failing(tmp_path, threaded=False)
    for _ in range(2):
        fail_once(rig, pagerd)
        pagerd.end_step()
    pagerd.end_step()  # a good step between: the failures before it are forgiven
    for number in range(3):
        assert not pagerd.is_closed, number
        fail_once(rig, pagerd)
        pagerd.end_step()
    assert pagerd.is_closed
    pagerd.end_step()
    messages = [record.getMessage() for record in caplog.records if record.name == "pager.engine.pagerd"]
    assert len(messages) == 5
    assert "the compute waits for every page" in messages[-1]
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


def test_where_all_is_there_it_hardly_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look of the thread takes the GIL from the training."""
    rig, _ = make_filled([PAGE] * 8, arena_frames=8)
    pagerd = make_pagerd(rig, *range(8), distance=2)
    looks: list[int] = []
    look = pagerd.pump

    def counted() -> None:
        looks.append(len(looks))
        look()

    monkeypatch.setattr(pagerd, "pump", counted)
    for number in range(16):
        access(rig, number % 8)
    looks.clear()
    for number in range(4 * pagerd_module.ROWS_AHEAD):
        access(rig, number % 8)
    assert len(looks) == 8  # each time that half of what it saw lies behind
    rig.close()


@pytest.mark.parametrize("change", ["eviction", "jump", "distance"])
def test_it_looks_at_once_where_something_changed(change: str) -> None:
    rig, _ = make_filled([PAGE] * 8, arena_frames=8)
    pagerd = make_pagerd(rig, *range(8), distance=2)
    for number in range(17):
        access(rig, number % 8)
    assert not brought(rig)
    if change == "eviction":
        rig.engine.evict_segments([rig.segments[index] for index in (2, 5)])
        access(rig, 1)
        assert brought(rig) == {2, 5}
    elif change == "jump":
        rig.engine.evict_segments([rig.segments[7]])
        access(rig, 1)
        assert brought(rig) == {7}
        rig.engine.evict_segments([rig.segments[4]])
        access(rig, 3)  # out of turn: 2 is left out
        assert 4 in brought(rig)
    else:
        pagerd.set_distance(0)
        rig.engine.evict_segments([rig.segments[index] for index in (2, 5, 6)])
        access(rig, 1)
        assert not brought(rig)
        pagerd.set_distance(2)
        access(rig, 2)
        assert brought(rig) == {5, 6}
    rig.close()
