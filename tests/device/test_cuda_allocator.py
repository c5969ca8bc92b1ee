"""torch's allocator as pager sets it. What it does on a GPU is tested in `test_cuda.py`."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from pager.device import cuda, cuda_allocator
from pager.device.cuda_allocator import AllocatorCaps


class FakeAllocator:
    """torch's fraction per GPU, as far as caps ask for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
        self.fraction = fraction
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", self._get, raising=False)
        monkeypatch.setattr(cuda, "_ALLOCATOR_CAPS", AllocatorCaps())
        monkeypatch.setattr(cuda.CudaDevice, "total_bytes", lambda device: 1000)

    def _set(self, fraction: float, device: int) -> None:
        assert device == 0
        self.fraction = fraction

    def _get(self, device: int) -> float:
        assert device == 0
        return self.fraction


def make_capped(limit_bytes: int) -> cuda.CudaDevice:
    """A device without streams, for its cap alone."""
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    device.torch_device = torch.device("cuda", 0)
    device._holder = next(cuda._HOLDERS)
    device._lift_cap = None
    device.limit_allocator(limit_bytes)
    return device


def test_the_smallest_open_cap_is_in_force_and_the_users_own_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = FakeAllocator(monkeypatch, 0.8)
    first = make_capped(500)
    second = make_capped(300)
    assert allocator.fraction == 0.3
    first.limit_allocator(400)  # another limit of the same holder
    second.limit_allocator(None)
    assert allocator.fraction == 0.4
    second.limit_allocator(None)  # again, as close() may
    first.limit_allocator(None)
    assert allocator.fraction == 0.8


def test_a_cap_never_raises_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 0.25)
    device = make_capped(900)
    assert allocator.fraction == 0.25
    device.limit_allocator(None)
    assert allocator.fraction == 0.25


def test_a_dropped_device_takes_its_cap_along(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 1.0)
    other = make_capped(600)
    dropped = make_capped(200)
    assert allocator.fraction == 0.2
    del dropped
    gc.collect()
    assert allocator.fraction == 0.6
    other.limit_allocator(None)
    assert allocator.fraction == 1.0


def test_where_torch_cannot_tell_its_fraction_it_was_all(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch, 0.5)
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    device = make_capped(200)
    device.limit_allocator(None)
    assert allocator.fraction == 1.0


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator was told, on a GPU that can map memory by the page."""
    told: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append, raising=False)
    monkeypatch.setattr(cuda_allocator, "_maps_virtual_memory", lambda index: index != 1)
    cuda_allocator.use_expandable_segments.cache_clear()
    return told


def test_segments_may_grow_where_the_gpu_can(settings: list[str]) -> None:
    cuda_allocator.use_expandable_segments(1)
    assert settings == []
    for _ in range(2):
        cuda_allocator.use_expandable_segments(0)
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    cuda_allocator.use_expandable_segments(0)
    assert settings == []


def test_an_older_torch_has_another_name_for_it(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    older: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    cuda_allocator.use_expandable_segments(0)  # one that cannot be asked at all
    cuda_allocator.use_expandable_segments.cache_clear()
    monkeypatch.setattr(
        torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", older.append, raising=False
    )
    cuda_allocator.use_expandable_segments(0)
    assert (settings, older) == ([], ["expandable_segments:True"])


class FakeDriver:
    """libcuda of a machine with one GPU, which supports virtual memory or not."""

    def __init__(self, *, supports: int) -> None:
        self.supports = supports

    def cuDeviceGet(self, handle: Any, index: int) -> int:
        return 0 if index == 0 else 101

    def cuDeviceGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        assert attribute == 102
        value._obj.value = self.supports
        return 0


@pytest.mark.parametrize(("index", "supports", "maps"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_the_driver_says_what_the_gpu_can(
    monkeypatch: pytest.MonkeyPatch, index: int, supports: int, maps: bool
) -> None:
    monkeypatch.setattr(cuda_allocator.ctypes, "CDLL", lambda name: FakeDriver(supports=supports))
    assert cuda_allocator._maps_virtual_memory(index) is maps


def test_without_a_driver_nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_allocator.ctypes, "CDLL", missing)
    assert cuda_allocator._maps_virtual_memory(0) is False
