"""Slabs and what is wrapped from them: alignment, lifetime, and release exactly once."""

from __future__ import annotations

import gc

import pytest
import torch

from pager.device import base
from pager.device.simulated import SimulatedDevice


def test_a_slab_is_aligned_and_forgotten_when_its_last_view_dies() -> None:
    device = SimulatedDevice("late")
    for num_bytes in (1, 511, 512, 100_000):
        slab = device.allocate_slab(num_bytes)
        assert (slab.data_ptr() % 512, slab.numel(), slab.dtype) == (0, num_bytes, torch.uint8)
    view = slab[10:20]
    del slab
    assert device.memory_of(view)._storage is None
    assert len(device._slabs._begins) == 1
    del view
    device._slabs.find(0, 1)
    assert len(device._slabs._begins) == 0


def test_a_wrap_keeps_its_slab() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(4096)
    slab.copy_(torch.arange(4096) % 251)
    wrap = device.wrap(slab, 1024, 512, lambda: None)
    del slab
    gc.collect()
    assert wrap.tolist() == [number % 251 for number in range(1024, 1536)]


def test_a_wrap_of_a_view_of_a_slab_begins_at_the_view() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(4096)
    wrap = device.wrap(slab[512:], 512, 100, lambda: None)
    assert wrap.data_ptr() == slab.data_ptr() + 1024
    assert wrap.untyped_storage().data_ptr() == wrap.data_ptr()
    assert wrap.untyped_storage().nbytes() == 100


def test_a_wrap_is_released_once_after_its_last_view() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(4096)
    released: list[str] = []
    wrap = device.wrap(slab, 0, 1024, lambda: released.append("wrap"))
    other = device.wrap(slab, 0, 1024, lambda: released.append("other"))  # the same frames, another storage
    view = wrap.view(torch.float32).view(16, 16)
    deeper = view.t()[1:].detach()
    del wrap
    del view
    assert released == []
    other.fill_(1)
    assert deeper.view(torch.int32)[0, 0].item() == 0x01010101
    del deeper
    assert released == ["wrap"]
    del other
    gc.collect()
    assert released == ["wrap", "other"]


def test_a_wrap_saved_by_autograd_is_released_with_the_graph() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(4 * 64)
    slab.fill_(0)
    released: list[int] = []
    weight = device.wrap(slab, 0, 256, lambda: released.append(1)).view(torch.float32).view(8, 8)
    x = torch.ones(2, 8, requires_grad=True)
    y = x @ weight.t()
    del weight
    assert released == []
    y.sum().backward()
    del y
    assert released == [1]


def test_a_wrap_in_a_cycle_is_released_by_the_collector() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(4096)
    released: list[int] = []
    holder: dict[str, object] = {"wrap": device.wrap(slab, 0, 512, lambda: released.append(1))}
    holder["self"] = holder
    gc.collect()
    assert released == []
    del holder
    gc.collect()
    assert released == [1]


def test_a_wrap_outlives_its_device() -> None:
    released: list[int] = []
    device = SimulatedDevice("late")
    wrap = device.wrap(device.allocate_slab(512), 0, 512, lambda: released.append(1))
    device.close()
    del device
    gc.collect()
    wrap.fill_(1)
    assert released == []
    del wrap
    assert released == [1]
    assert not base._watches or all(watch() is not None for watch in base._watches.values())


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 10), (0, 0), (0, 1025), (1000, 100)])
def test_a_wrap_lies_inside_its_slab(offset: int, num_bytes: int) -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(1024)
    with pytest.raises(ValueError, match="slab of 1024 bytes"):
        device.wrap(slab, offset, num_bytes, lambda: None)
    with pytest.raises(ValueError, match="allocate_slab"):
        device.wrap(torch.zeros(1024, dtype=torch.uint8), 0, 10, lambda: None)
