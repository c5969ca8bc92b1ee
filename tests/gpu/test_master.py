"""The split master on a GPU: the same bits as on the CPU, in as few kernels as promised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pager.optim.master import join, split

# Torch says at its first profile what only those of several cycles need to know.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")]

NUM_ELEMENTS = 1 << 20


def make_master() -> torch.Tensor:
    bits = np.random.default_rng(0).integers(0, 2**32, NUM_ELEMENTS, dtype=np.uint32)
    bits[: 1 << 16] = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    return torch.from_numpy(bits.view(np.float32))


def make_halves(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(NUM_ELEMENTS, dtype=torch.bfloat16, device=device)
    return weight, torch.empty(NUM_ELEMENTS, dtype=torch.int16, device=device)


def test_same_bits_as_on_the_cpu() -> None:
    master = make_master()
    weight, low = make_halves("cpu")
    split(master, weight, low)
    gpu_weight, gpu_low = make_halves("cuda")
    gpu_master = master.cuda()
    split(gpu_master, gpu_weight, gpu_low, torch.empty_like(gpu_master))
    back = join(gpu_weight, gpu_low, torch.empty_like(gpu_master)).cpu()

    number = ~torch.isnan(master)
    assert torch.equal(torch.isnan(back), torch.isnan(master))
    assert torch.equal(gpu_weight.cpu()[number], weight[number])
    assert torch.equal(gpu_low.cpu()[number], low[number])
    expected = join(weight, low, torch.empty_like(master))
    assert torch.equal(back.view(torch.int32)[number], expected.view(torch.int32)[number])


def test_kernels_and_allocations() -> None:
    master = make_master().cuda()
    weight, low = make_halves("cuda")
    scratch, out = torch.empty_like(master), torch.empty_like(master)
    split(master, weight, low, scratch)
    join(weight, low, out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        join(weight, low, out)
        split(master, weight, low, scratch)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    kernels = [event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 5, [kernel.name for kernel in kernels]
