"""Two threads in the engine, made to meet at one place by gates: fault, eviction, write, discard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pager.errors import TierIOError
from pager.page_table import PageState
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, make_filled
from tests.races.gates import DiskRig, Worker, let_it_wait, stop_at


def test_an_access_waits_for_a_page_in_under_way(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = disk_rig
    gate = stop_at(monkeypatch, rig.transfers, "begin_page_in")
    daemon = Worker(lambda: rig.prefetch(0))
    gate.wait_until_reached()
    reader = Worker(lambda: rig.read(0))
    let_it_wait(rig, reader)
    assert reader.is_running
    gate.open()
    assert daemon.result() is True
    np.testing.assert_array_equal(reader.result(), values[0])
    assert (rig.counters.major_faults, rig.counters.minor_faults, rig.counters.prefetch_late) == (0, 1, 1)
    assert rig.counters.hits == 0
    assert rig.counters.stall_seconds > 0, "the host waited for pagerd"


def test_waiting_for_pagerd_counts_though_the_copy_is_over_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = make_filled([PAGE], arena_frames=1, streams="early")
    gate = stop_at(monkeypatch, rig.transfers, "page_in")
    daemon = Worker(lambda: rig.prefetch(0))
    gate.wait_until_reached()
    reader = Worker(lambda: rig.read(0))
    let_it_wait(rig, reader)
    gate.open()
    assert daemon.result() is True
    np.testing.assert_array_equal(reader.result(), values[0])
    assert (rig.counters.hits, rig.counters.minor_faults, rig.counters.prefetch_late) == (0, 1, 1)
    assert rig.counters.stall_seconds > 0
    np.testing.assert_array_equal(rig.read(0), values[0])
    assert (rig.counters.hits, rig.counters.minor_faults) == (1, 1)
    rig.close()


def test_a_disk_read_is_a_stall_only_for_who_waits_for_it(disk_rig: DiskRig) -> None:
    rig, values = disk_rig
    assert rig.prefetch(0)
    assert rig.counters.disk_read_bytes == rig.segments[0].num_bytes
    assert rig.counters.stall_seconds == 0, "the prefetch runs beside the training"
    np.testing.assert_array_equal(rig.read(1), values[1])
    assert rig.counters.stall_seconds > 0


def test_a_write_back_for_a_prefetch_is_no_stall(disk_rig: DiskRig) -> None:
    rig, values = disk_rig
    rig.overwrite(0, ~values[0])
    rig.overwrite(1, ~values[1])
    written = rig.counters.disk_write_bytes
    assert rig.prefetch(2)
    assert rig.counters.disk_write_bytes > written
    assert rig.counters.stall_seconds == 0


def test_an_access_waits_for_a_write_back_under_way(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    writer = Worker(lambda: rig.write(0, values[1]))
    let_it_wait(rig, writer)
    assert writer.is_running
    gate.open()
    evictor.result()
    writer.result()
    np.testing.assert_array_equal(rig.home_value(0), values[1])


def test_a_write_under_a_live_lease_during_its_write_back_stays_dirty(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    rig.write(0, ~values[0])
    _, lease = rig.lease(0)
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    flusher = Worker(lambda: rig.engine.flush(rig.segments[:1]))
    gate.wait_until_reached()
    assert rig.state(0) == [PageState.LEAVING]
    rig.versions[0] += 1
    rig.engine.mark_dirty(rig.engine.runs_of(rig.segments[0])[0])
    assert rig.state(0) == [PageState.DIRTY]
    gate.open()
    flusher.result()
    assert rig.state(0) == [PageState.DIRTY]
    lease.copy_(torch.from_numpy(values[2]))
    del lease
    np.testing.assert_array_equal(rig.home_value(0), values[2])


def test_two_flushes_of_one_run_take_turns(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the run dirty again while the first is still writing the older bytes."""
    rig, values = disk_rig
    rig.write(0, ~values[0])
    run, lease = rig.lease(0)
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    first = Worker(lambda: rig.engine.flush(rig.segments[:1]))
    gate.wait_until_reached()
    rig.engine.mark_dirty(run)
    second = Worker(lambda: rig.engine.flush(rig.segments[:1]))
    let_it_wait(rig, second)
    assert second.is_running
    gate.open()
    first.result()
    second.result()
    assert rig.state(0) == [PageState.CLEAN]
    del lease
    np.testing.assert_array_equal(rig.home_value(0), ~values[0])


def test_a_home_is_read_after_the_write_back_that_another_thread_began(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    reader = Worker(lambda: rig.home_value(0))
    let_it_wait(rig, reader)
    gate.open()
    evictor.result()
    np.testing.assert_array_equal(reader.result(), ~values[0])


def test_a_discard_waits_for_a_write_back_even_if_the_run_is_dirty_again(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    rig.write(0, ~values[0])
    run, lease = rig.lease(0)
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    flusher = Worker(lambda: rig.engine.flush(rig.segments[:1]))
    gate.wait_until_reached()
    rig.engine.mark_dirty(run)
    dropper = Worker(lambda: rig.engine.discard(rig.segments[0]))
    let_it_wait(rig, dropper)
    assert dropper.is_running
    gate.open()
    flusher.result()
    dropper.result()
    assert rig.state(0) == [PageState.EMPTY]
    np.testing.assert_array_equal(lease.numpy(), ~values[0])
    del lease
    rig.engine.drain()
    assert rig.arena.resident_bytes == 0


def test_a_discard_waits_for_a_page_in(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _values = disk_rig
    gate = stop_at(monkeypatch, rig.transfers, "begin_page_in")
    daemon = Worker(lambda: rig.prefetch(0))
    gate.wait_until_reached()
    dropper = Worker(lambda: rig.engine.discard(rig.segments[0]))
    let_it_wait(rig, dropper)
    assert dropper.is_running
    gate.open()
    assert daemon.result() is True
    dropper.result()
    assert rig.state(0) == [PageState.EMPTY]
    assert rig.arena.resident_bytes == 0


def test_an_eviction_gives_up_a_run_that_was_pinned_meanwhile(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the write back and the end of its eviction somebody uses the run: it stays, and nothing is lost."""
    rig, values = disk_rig
    rig.write(0, ~values[0])
    leases: list[torch.Tensor] = []
    write_back = rig.engine.reclaimer.write_back

    def write_back_then_use(runs: list[Any], **knobs: Any) -> None:
        write_back(runs, **knobs)
        leases.append(rig.lease(0)[1])

    monkeypatch.setattr(rig.engine.reclaimer, "write_back", write_back_then_use)
    assert rig.engine.reclaimer.evict(rig.engine.runs_of(rig.segments[0])) is False
    np.testing.assert_array_equal(leases[0].numpy(), ~values[0])
    assert rig.state(0) == [PageState.CLEAN]
    leases.clear()


def test_a_fault_waits_for_frames_that_another_thread_is_emptying(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    _, held = rig.lease(2)
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    reader = Worker(lambda: rig.read(1))
    let_it_wait(rig, reader)
    assert reader.is_running
    gate.open()
    evictor.result()
    np.testing.assert_array_equal(reader.result(), values[1])
    del held


def test_a_fault_looks_again_when_the_emptying_ended_while_it_looked(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    _, held = rig.lease(2)
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    make_room = rig.engine.reclaimer.make_room

    def make_room_too_early(*args: Any, **kwargs: Any) -> bool:
        found = make_room(*args, **kwargs)
        gate.open()
        evictor.result()
        return found

    monkeypatch.setattr(rig.engine.reclaimer, "make_room", make_room_too_early)
    run = rig.engine.acquire(rig.segments[1], 0, 1)
    rig.engine.release(run)
    np.testing.assert_array_equal(rig.read(1), values[1])
    del held


def test_a_prefetch_does_not_wait_for_a_write_back(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, values = disk_rig
    _, held = rig.lease(2)
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    assert rig.prefetch(1) is False
    gate.open()
    evictor.result()
    del held


def test_a_refused_write_back_of_two_leaves_both_dirty(disk_rig: DiskRig) -> None:
    """The ring holds what an earlier write failed with, and it fails again: nothing more goes there."""
    rig, values = disk_rig
    assert rig.disk is not None
    rig.overwrite(2, ~values[2])
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1, lasting=True),)
    rig.evict(2)
    with pytest.raises(TierIOError, match="injected: cannot write"):
        rig.read(0)  # told, once
    for index in (0, 1):
        rig.write(index, ~values[index])
    with pytest.raises(TierIOError, match="injected: cannot write"):
        rig.evict(0, 1)
    assert [rig.state(0), rig.state(1)] == [[PageState.DIRTY], [PageState.DIRTY]]
    assert rig.engine.moves == 0
    rig.disk.faults = ()
    for index in (0, 1, 2):
        np.testing.assert_array_equal(rig.home_value(index), ~values[index])
