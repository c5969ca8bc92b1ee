"""The CUDA device: what can be known of it without a GPU, and (marker ``gpu``) the same promises on one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pager.device import cuda
from pager.device.base import Device, Region, make_device
from pager.errors import PagerClosed, RaceError, TierError
from pager.tiers.host_arena import HostArena

PAGE = 16384


class FakeNvml(SimpleNamespace):
    """Answers as NVML does for one GPU with these (process id, bytes)."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: list[tuple[int, int | None]], *, is_broken: bool = False) -> None:
        super().__init__(open=0, uuids=[])
        self.processes = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
        self.is_broken = is_broken

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuids.append(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return self.processes


OURS = os.getpid()


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(OURS, 7), (OURS + 1, 9)], 7),
        ([(OURS + 1, 9), (OURS, 7)], 7),
        ([(OURS + 1, 9)], 9),  # a container: the only process is ours, whatever its number
        ([(OURS + 1, 9), (OURS + 2, 8)], None),
        ([(OURS, None)], None),
        ([], None),
    ],
)
def test_process_bytes_by_nvml(
    monkeypatch: pytest.MonkeyPatch, processes: list[tuple[int, int | None]], expected: int | None
) -> None:
    nvml = FakeNvml(processes)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert cuda._nvml_process_bytes("12-34") == expected
    assert (nvml.uuids, nvml.open) == (["GPU-12-34"], 0)


def test_without_nvml_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([(OURS, 7)], is_broken=True))
    assert cuda._nvml_process_bytes("GPU-1") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert cuda._nvml_process_bytes("GPU-1") is None


@pytest.fixture
def device() -> Iterator[Device]:
    made = make_device("cuda")
    yield made
    made.close()


def keep_busy(device: Device) -> torch.Tensor:
    """Some hundred milliseconds of work on the compute stream."""
    square = torch.ones(8192, 8192, device=device.torch_device)
    for _ in range(20):
        square = (square @ square).clamp_(max=1.0)
    return square


@pytest.mark.gpu
def test_a_page_goes_in_and_out(device: Device) -> None:
    num_bytes = 1024 * PAGE
    arena = HostArena(PAGE, device, 2 * num_bytes)
    arena.grow(2048)
    assert arena.locked_bytes == 2 * num_bytes
    source, result = arena.view(arena.allocate(1024), num_bytes), arena.view(arena.allocate(1024), num_bytes)
    source.copy_(torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8))
    slab = device.allocate_slab(num_bytes)
    keep_busy(device)
    device.h2d.wait(device.current_stream().record())
    device.h2d.copy(slab, source, reads=None, writes=None)
    device.current_stream().wait(device.h2d.record())
    slab.add_(1)
    device.d2h.wait(device.current_stream().record())
    device.d2h.copy(result, slab, reads=None, writes=None)
    done = device.d2h.record()
    assert not done.query()  # nothing of all that has blocked the host
    done.synchronize()
    assert torch.equal(result, source + 1)
    arena.close()


@pytest.mark.gpu
def test_a_wrap_is_released_once_after_its_last_view(device: Device) -> None:
    slab = device.allocate_slab(4096)
    released: list[int] = []
    wrap = device.wrap(slab, 1024, 1024, lambda: released.append(1))
    assert wrap.data_ptr() == slab.data_ptr() + 1024
    assert wrap.untyped_storage().nbytes() == 1024
    deeper = wrap.view(torch.float32).view(16, 16).t()[1:].detach()
    del wrap
    slab.fill_(0)
    assert float(deeper.sum()) == 0
    assert released == []
    del deeper
    gc.collect()
    assert released == [1]


@pytest.mark.gpu
def test_streams_are_known_by_what_they_are(device: Device) -> None:
    compute = device.current_stream()
    assert device.current_stream() is compute
    assert sorted([compute.index, device.h2d.index, device.d2h.index]) == [0, 1, 2]
    assert [compute.record().number for _ in range(3)] == [1, 2, 3]


@pytest.mark.gpu
def test_a_refused_registration_leaves_no_error_behind(device: Device) -> None:
    arena = HostArena(PAGE, device, 4 * PAGE)
    arena.grow(4)
    address = arena.view(0, 1).data_ptr()
    with pytest.raises(TierError, match="cudaHostRegister refused"):
        device.register_host(address, PAGE)
    assert float(torch.ones(4, device=device.torch_device).sum()) == 4
    arena.close()


@pytest.mark.gpu
def test_a_timed_wait_measures_how_long_the_stream_stood_still(device: Device) -> None:
    keep_busy(device)
    event = device.current_stream().record()
    device.h2d.wait(event, timed=True)
    assert device.drain_stall_seconds() == 0  # not over yet, and asking does not wait for it
    device.h2d.synchronize()
    assert device.drain_stall_seconds() > 0.001
    assert device.drain_stall_seconds() == 0


@pytest.mark.gpu
def test_the_checker_works_on_cuda() -> None:
    device = make_device("cuda", check_races=True)
    slab, host = device.allocate_slab(512), torch.zeros(512, dtype=torch.uint8)
    device.h2d.copy(slab, host, reads=None, writes=Region("device", 0, 1))
    with pytest.raises(RaceError, match="on compute 0"):
        device.current_stream().touch(Region("device", 0, 1), write=False)
    device.current_stream().wait(device.h2d.record())
    device.current_stream().touch(Region("device", 0, 1), write=False)
    device.close()
    with pytest.raises(PagerClosed):
        device.h2d.fill(slab, 0, writes=None)


@pytest.mark.gpu
def test_figures_of_memory(device: Device) -> None:
    device.reset_allocator_peak()
    before = device.process_bytes()
    slab = device.allocate_slab(1 << 30)
    assert device.process_bytes() >= max(before, 1 << 30)
    assert device.allocator_peak_bytes() >= 1 << 30
    assert 0 < device.free_bytes() < device.total_bytes()
    free = device.free_bytes()
    del slab
    device.release_cached_memory()
    assert device.free_bytes() >= free + (1 << 30)
    assert device.num_out_of_memory() >= 0
    for direction in ("h2d", "d2h", "both"):
        assert device.measure_bandwidth(1 << 26, direction=direction) > 1e9


@pytest.mark.gpu
def test_segments_of_the_allocator_can_grow(device: Device) -> None:
    slab = device.allocate_slab(64 * PAGE)
    segments = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["address"] <= slab.data_ptr() < segment["address"] + segment["total_size"]
    ]
    assert [segment["is_expandable"] for segment in segments] == [True]
