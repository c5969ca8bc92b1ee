"""Two threads in the engine, made to meet at one place by events: fault, eviction, write, discard, close.

Nothing sleeps: a gate stops one thread inside a copy or a write to the disk, the other does its part, and the gate opens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pager
from pager.config import Checks
from pager.device.simulated import SimulatedDevice
from pager.engine.pagerd import Pagerd
from pager.errors import TierIOError
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.page_table import Home, PageState
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Rig, make_filled

PATIENCE_SECONDS = 20.0


class Gate:
    """A thread that comes through stops and says so; another lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def stop(self) -> None:
        """Called by the thread that is to stop; only the first call stops."""
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS), "the gate was never opened"

    def wait_until_reached(self) -> None:
        """Called by the other thread."""
        assert self.reached.wait(PATIENCE_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        """Let the stopped thread go on."""
        self.opened.set()


class Worker:
    """Runs a function in a thread; ``result`` gives what it returned, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        """Whether the function has not come back."""
        return self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the end."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the worker does not come back"
        if self._error is not None:
            raise self._error
        return self._value


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Gate:
    """A gate in front of a method of one object."""
    gate = Gate()
    original = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        gate.stop()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, stopping)
    return gate


def waiters(rig: Rig) -> int:
    """Threads that wait for a change of the engine."""
    return len(rig.engine.changed._waiters)  # type: ignore[attr-defined]


def let_it_wait(rig: Rig, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return when the worker stands in the engine's condition: it has nothing else left to do."""
    for _ in range(10**7):
        with rig.engine.lock:
            if waiters(rig):
                return
        if not worker.is_running:
            return
    raise AssertionError("the worker neither waits nor ends")


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[tuple[Rig, list[np.ndarray]]]:
    """Three one-page segments at home on disk, two frames on the device."""
    rig, values = make_filled([PAGE] * 3, arena_frames=2, homes=[Home.DISK] * 3, disk_folder=tmp_path)
    yield rig, values
    rig.close()


DiskRig = tuple[Rig, list[np.ndarray]]


def test_an_access_waits_for_a_page_in_under_way(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = disk_rig
    gate = stop_at(monkeypatch, rig.transfers, "page_in")
    daemon = Worker(lambda: rig.prefetch(0))
    gate.wait_until_reached()
    reader = Worker(lambda: rig.read(0))
    let_it_wait(rig, reader, monkeypatch)
    assert reader.is_running
    gate.open()
    assert daemon.result() is True
    np.testing.assert_array_equal(reader.result(), values[0])
    assert rig.counters.major_faults == 0


def test_an_access_waits_for_a_write_back_under_way(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = disk_rig
    rig.write(0, ~values[0])
    gate = stop_at(monkeypatch, rig.transfers, "page_out")
    evictor = Worker(lambda: rig.evict(0))
    gate.wait_until_reached()
    writer = Worker(lambda: rig.write(0, values[1]))
    let_it_wait(rig, writer, monkeypatch)
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
    let_it_wait(rig, second, monkeypatch)
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
    let_it_wait(rig, reader, monkeypatch)
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
    let_it_wait(rig, dropper, monkeypatch)
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
    rig, values = disk_rig
    gate = stop_at(monkeypatch, rig.transfers, "page_in")
    daemon = Worker(lambda: rig.prefetch(0))
    gate.wait_until_reached()
    dropper = Worker(lambda: rig.engine.discard(rig.segments[0]))
    let_it_wait(rig, dropper, monkeypatch)
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

    def write_back_then_use(runs: list[Any]) -> None:
        write_back(runs)
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
    let_it_wait(rig, reader, monkeypatch)
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


def test_a_prefetch_does_not_wait_for_a_write_back(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_failed_write_back_of_two_leaves_both_dirty(disk_rig: DiskRig) -> None:
    rig, values = disk_rig
    assert rig.disk is not None
    for index in (0, 1):
        rig.write(index, ~values[index])
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1),)
    with pytest.raises(TierIOError):
        rig.evict(0, 1)
    assert [rig.state(0), rig.state(1)] == [[PageState.DIRTY], [PageState.DIRTY]]
    assert rig.engine.moves == 0
    for index in (0, 1):
        np.testing.assert_array_equal(rig.home_value(index), ~values[index])


# -- pagerd ----------------------------------------------------------------------------------------------------


def make_threaded(rig: Rig, order: list[int], distance: int = 1) -> Pagerd:
    """A pagerd thread that follows this order of accesses."""
    rows = [AccessRow(tick, index, 0, 1, False, Phase.FORWARD) for tick, index in enumerate(order)]
    rig.engine.timeline.follow(AccessTrace.from_rows(rows))
    return Pagerd(rig.engine, distance, threaded=True)


def access(rig: Rig, index: int) -> np.ndarray:
    """An access as the MMU makes it."""
    rig.engine.timeline.access(index, 0, 1, write=False, phase=Phase.FORWARD)
    return rig.read(index)


def test_pagerds_failure_is_raised_at_the_next_access(disk_rig: DiskRig) -> None:
    rig, values = disk_rig
    assert rig.disk is not None
    access(rig, 0)
    pagerd = make_threaded(rig, [0, 1])
    rig.disk.faults = (Fault(operation="read", at=rig.disk.calls["read"] + 1),)
    access(rig, 0)
    assert pagerd._thread is not None
    pagerd._thread.join(PATIENCE_SECONDS)
    with pytest.raises(TierIOError, match="injected"):
        access(rig, 0)
    np.testing.assert_array_equal(access(rig, 1), values[1])
    pagerd.close()
    assert rig.state(1) == [PageState.CLEAN]


def test_closing_waits_for_a_busy_pagerd(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = disk_rig
    pagerd = make_threaded(rig, [0, 1])
    gate = stop_at(monkeypatch, rig.disk, "read")
    pagerd.notify()
    gate.wait_until_reached()
    closer = Worker(pagerd.close)
    assert closer.is_running
    gate.open()
    closer.result()
    assert pagerd._thread is None
    assert rig.engine.moves == 0
    np.testing.assert_array_equal(rig.read(0), values[0])


def test_a_pause_waits_for_what_is_being_issued_and_holds(disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _ = disk_rig
    pagerd = make_threaded(rig, [0, 1, 2])
    gate = stop_at(monkeypatch, rig.disk, "read")
    pagerd.notify()
    gate.wait_until_reached()
    pauser = Worker(pagerd.pause)
    assert pauser.is_running
    gate.open()
    pauser.result()
    calls = rig.counters.disk_read_bytes
    pagerd.notify()
    assert not pagerd._busy
    assert rig.counters.disk_read_bytes == calls
    pagerd.resume()
    pagerd.close()
    assert rig.engine.moves == 0


# -- the lock --------------------------------------------------------------------------------------------------


class LockWatch(SimulatedDevice):
    """Notes whether the thread that copies holds the engine's lock."""

    def __init__(self) -> None:
        super().__init__("late")
        self.rig: Rig | None = None
        self.num_copies = 0
        for stream in (self.compute, self.h2d, self.d2h):
            stream._copy = self._watched(stream._copy)  # type: ignore[method-assign]

    def _watched(self, copy: Callable[..., None]) -> Callable[..., None]:
        def watched(dst: torch.Tensor, src: torch.Tensor) -> None:
            if self.rig is not None:
                assert not self.rig.engine.lock._is_owned(), "the engine's lock is held over a copy"  # type: ignore[attr-defined]
                self.num_copies += 1
            copy(dst, src)

        return watched


def test_the_engines_lock_is_not_held_over_a_copy_or_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LockWatch()
    rig, values = make_filled(
        [PAGE, 2 * PAGE, PAGE, PAGE],
        arena_frames=2,
        homes=[Home.HOST, Home.HOST, Home.DISK, Home.DISK],
        disk_folder=tmp_path,
        device=device,
    )
    assert rig.disk is not None
    device.rig = rig
    disk_calls = []
    for name in ("read", "write"):
        original = getattr(rig.disk, name)

        def watched(*args: Any, original: Any = original) -> None:
            assert not rig.engine.lock._is_owned(), "the engine's lock is held over the disk"  # type: ignore[attr-defined]
            disk_calls.append(original)
            original(*args)

        monkeypatch.setattr(rig.disk, name, watched)
    for index, value in enumerate(values):
        rig.write(index, ~value)
        rig.overwrite((index + 1) % 4, values[(index + 1) % 4])
        rig.home_value(index)
        rig.prefetch((index + 2) % 4, ticks_ahead=1)
        rig.store(index, value)
    for index, value in enumerate(values):
        np.testing.assert_array_equal(rig.read(index), value)
    assert device.num_copies > 8
    assert len(disk_calls) > 8
    rig.close()


# -- closing ---------------------------------------------------------------------------------------------------


def test_a_model_is_closed_while_its_pagerd_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(streams="late", happens_before=True, poison=True, daemon="thread")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4)))
    before = [param.detach().clone() for param in model.parameters()]
    pager.manage(model, device="cpu", page_size="16KiB", device_budget="144KiB", checks=checks)
    runtime = model.pager._runtime
    with torch.no_grad():
        model(torch.ones(1, 96))
    gate = stop_at(monkeypatch, runtime.engine.transfers, "page_in")
    order = [runtime.engine.space.segments[index] for index in range(4)]
    rows = [
        AccessRow(tick, segment.index, 0, segment.num_pages, False, Phase.FORWARD) for tick, segment in enumerate(order)
    ]
    with runtime.engine.lock:
        runtime.engine.timeline.follow(AccessTrace.from_rows(rows))
        runtime.engine.horizon = 0
    runtime.pagerd.notify()
    gate.wait_until_reached()
    closer = Worker(model.pager.close)
    assert closer.is_running
    gate.open()
    closer.result()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
