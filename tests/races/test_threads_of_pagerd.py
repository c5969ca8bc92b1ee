"""pagerd's thread: its failure, its end while it is busy, its pauses; and the engine's lock, free over every copy."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.races.gates import PATIENCE_SECONDS, DiskRig, Worker, stop_at
from tests.races.scenarios import handle_of


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


def test_a_pause_waits_for_what_is_being_issued_and_holds(
    disk_rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_engines_lock_is_not_held_over_a_copy_or_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

        def watched(*args: Any, original: Any = original) -> Any:
            assert not rig.engine.lock._is_owned(), "the engine's lock is held over the disk"  # type: ignore[attr-defined]
            disk_calls.append(original)
            return original(*args)

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
    runtime = handle_of(model)._runtime
    with torch.no_grad():
        model(torch.ones(1, 96))
    gate = stop_at(monkeypatch, runtime.engine.transfers, "page_in")
    order = [runtime.engine.space.segments[index] for index in range(4)]
    rows = [
        AccessRow(tick, segment.index, 0, segment.num_pages, False, Phase.FORWARD)
        for tick, segment in enumerate(order)
    ]
    with runtime.engine.lock:
        runtime.engine.timeline.follow(AccessTrace.from_rows(rows))
        runtime.engine.horizon = 0
    runtime.pagerd.notify()
    gate.wait_until_reached()
    closer = Worker(handle_of(model).close)
    assert closer.is_running
    gate.open()
    closer.result()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))
