"""The buffers between disk and link: whose they are, and what page-locking costs when it is refused."""

from __future__ import annotations

import gc

import pytest
import torch

from pager.device.simulated import SimulatedDevice
from pager.engine.ring import Ring
from pager.tiers.disk_file import BLOCK_BYTES

SLOT = 4 * BLOCK_BYTES


def test_slots_are_aligned_apart_and_locked_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice("early")
    locked: dict[int, int] = {}
    monkeypatch.setattr(
        device, "register_host", lambda address, num_bytes: locked.update({address: num_bytes})
    )
    monkeypatch.setattr(device, "unregister_host", locked.pop)
    ring = Ring(device, SLOT, 3)
    slots = [ring.take() for _ in range(3)]
    assert ring.take() is None
    assert not ring.has_free
    begins = [slot.memory.data_ptr() for slot in slots if slot is not None]
    assert [begin - begins[0] for begin in begins] == [0, SLOT, 2 * SLOT]
    assert begins[0] % BLOCK_BYTES == 0
    assert locked == {begins[0]: 3 * SLOT}
    ring.close()
    ring.close()
    assert locked == {}


def test_a_slot_that_the_link_is_done_with_is_taken_first() -> None:
    device = SimulatedDevice("late")
    ring = Ring(device, SLOT, 2)
    one, other = ring.take(), ring.take()
    assert one is not None
    assert other is not None
    source = torch.zeros(SLOT, dtype=torch.uint8)
    device.h2d.copy(source, one.memory, reads=None, writes=None)
    ring.give(one, device.h2d.record())
    ring.give(other, None)
    assert ring.take() is other
    last = ring.take()
    assert last is one
    busy = last.busy
    assert busy is not None
    assert not busy.query()
    last.settle()
    assert busy.query()
    ring.close()
    device.close()


def test_where_locking_is_refused_it_is_warned_of_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 3."""
    device = SimulatedDevice("early")

    def refuse(address: int, num_bytes: int) -> None:
        raise OSError("no locking here")

    monkeypatch.setattr(device, "register_host", refuse)
    monkeypatch.setattr(device, "unregister_host", refuse)  # what was not locked is not unlocked
    ring = Ring(device, SLOT, 2)
    slot = ring.take()
    assert slot is not None
    slot.memory.fill_(1)
    assert "could not be page-locked (no locking here)" in caplog.text
    ring.close()


def test_a_ring_that_nobody_closed_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice("early")
    unlocked: list[int] = []
    monkeypatch.setattr(device, "unregister_host", unlocked.append)
    ring = Ring(device, SLOT, 2)
    del ring
    gc.collect()
    assert len(unlocked) == 1


def test_spare_slots_are_counted_while_they_are_out() -> None:
    ring = Ring(SimulatedDevice("early"), SLOT, 2)
    spares = [ring.make_spare(BLOCK_BYTES), ring.make_spare(SLOT)]
    assert ring.spare_bytes == BLOCK_BYTES + SLOT
    assert len({slot.index for slot in spares} | {0, 1}) == 4
    for slot in spares:
        ring.give(slot, None)
    assert ring.spare_bytes == 0
    first, second = ring.take(), ring.take()
    assert {slot.index for slot in (first, second) if slot is not None} == {0, 1}, (
        "a spare slot does not come back"
    )
    ring.close()
