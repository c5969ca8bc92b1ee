"""What this machine can do, measured in the same run: the terms of the bound.

Ceilings are the best of several tries, since a bound must not be beaten by a lucky step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pager.config import Config
from pager.device.base import Device, LinkDirection
from pager.host_limit import host_budget_bytes, host_limit_bytes, process_bytes
from pager.tools.bench.job import EPS, StepJob
from pager.tools.bench.peers import update_states
from pager.tools.bench.system import make_filled_model
from pager.tools.doctor.disk import measure_disk

__all__ = ["measure_ceilings"]

COPY_BYTES = 2**26
TRIES = 5
# The disk's rate is taken of as much as may be there, but no more than tells what its own cache hides.
STATE_BYTES = 12
MOST_DISK_BYTES = 16 * 2**30

# AdamW in fp32 reads weight, gradient and two moments, and writes all but the gradient.
UPDATE_BYTES = 28


def measure_ceilings(job: StepJob, device: torch.device, machine: Device) -> list[dict[str, float]]:
    """For each batch, rates and seconds by the names of `pager.graph.bound.StepCeilings`, and the bytes that come off
    the cap.
    """
    is_gpu = device.type == "cuda"
    # What can be multiplied without a GPU is small, and the memory of a CPU is shared with others.
    big, small = (2**26, 2**20) if is_gpu else (2**22, 2**18)
    # A GiB each: of 256 MiB a server's last cache holds enough to show more than its memory gives (238 GB/s once).
    many = 2**28 if is_gpu else 2**22
    directions: tuple[tuple[str, LinkDirection], ...] = (("in", "h2d"), ("out", "d2h"), ("both", "both"))
    link = {
        f"link_{name}_bytes_per_second": max(
            machine.measure_bandwidth(COPY_BYTES, direction=direction) for _ in range(TRIES)
        )
        for name, direction in directions
    }
    streaming = _update_rate(big, torch.device("cpu"))
    # In cache the arithmetic alone is the limit; the DRAM's is a ceiling of its own.
    cpu_rate = max(streaming, _update_rate(small, torch.device("cpu")))
    dram = max(_dram_rate(many), streaming * UPDATE_BYTES)
    device_rate = _update_rate(big, device)
    machine.release_cached_memory()
    context = machine.process_bytes() - machine.allocator_bytes()
    computes = list(_compute(job, device, machine))
    machine.release_cached_memory()
    # Host memory is shared with whoever else is on the machine: seen once at two thirds of what it gave a minute later.
    dram = max(dram, _dram_rate(many))
    common = {
        **link,
        "device_update_parameters_per_second": device_rate,
        "cpu_update_parameters_per_second": cpu_rate,
        "cpu_update_streaming_parameters_per_second": streaming,
        "host_dram_bytes_per_second": dram,
        "workspace_bytes": float(max(context, 0)),
        "num_threads": float(torch.get_num_threads()),
        **_disk(job),
    }
    return [{"batch": batch, **common, **compute} for batch, compute in computes]


def _disk(job: StepJob) -> dict[str, float]:
    """The rate of the job's disk, and the host memory that homes may take before it is needed: the budget without what
    this process takes, which has run the model and holds nothing of it; nothing where there is no disk.
    """
    folder = job.knobs.get("disk")
    if folder is None:
        return {}
    facts = measure_disk(str(folder), sustained_bytes=min(job.num_parameters * STATE_BYTES, MOST_DISK_BYTES))
    budget = host_budget_bytes(job.knobs.get("host_budget", Config().host_budget), host_limit_bytes())
    return {
        "disk_bytes_per_second": facts.sustained_rate or max(facts.rates.values(), default=0.0),
        "host_budget_bytes": float(max(budget - process_bytes(), 0)),
    }


def _best_seconds(run: Callable[[], Any], device: torch.device, *, calls: int = 1) -> float:
    """Seconds of one of ``calls`` in a row, in the fastest of the tries."""
    best = float("inf")
    for _ in range(TRIES):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        best = min(best, (time.perf_counter() - began) / calls)
    return best


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _update_rate(num_parameters: int, device: torch.device) -> float:
    """Parameters per second of torch's fused AdamW in fp32."""
    states = torch.full((3, num_parameters), EPS, device=device)
    gradient = torch.full((num_parameters,), EPS, device=device)
    step = torch.zeros((), device=device)
    update_states(states, gradient, step)
    return num_parameters / _best_seconds(lambda: update_states(states, gradient, step), device, calls=4)


def _dram_rate(num_elements: int) -> float:
    return max(_copy_rate(num_elements), _triad_rate(num_elements), _scale_rate(num_elements))


def _scale_rate(num_elements: int) -> float:
    """Bytes per second, read and written, of x = 0.5 x in host memory: no line is fetched only to be overwritten, which
    copies do and do not count.
    """
    x = torch.ones(num_elements)
    return 2 * x.nbytes / _best_seconds(lambda: x.mul_(0.5), torch.device("cpu"))


def _copy_rate(num_elements: int) -> float:
    """Bytes per second, read and written, of a copy in host memory."""
    source, target = torch.ones(num_elements), torch.ones(num_elements)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), torch.device("cpu"))


def _triad_rate(num_elements: int) -> float:
    """Bytes per second, read and written, of c = a + 2 b in host memory."""
    a, b, c = torch.ones(num_elements), torch.ones(num_elements), torch.ones(num_elements)
    return 3 * a.nbytes / _best_seconds(lambda: torch.add(a, b, alpha=2.0, out=c), torch.device("cpu"))


def _compute(job: StepJob, device: torch.device, machine: Device) -> Iterator[tuple[int, dict[str, float]]]:
    """Seconds of forward and backward of the workload alone, no cap, each gradient dropped when it is final; by batch.

    Where weights or activations do not fit: from a large matrix product, which nothing of this size beats.
    """
    model: nn.Module | None
    try:
        model = make_filled_model(job.sizes, seed=job.seed, device=device)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(_drop_gradient)
    except torch.OutOfMemoryError:
        model = None
    for batch in job.batches:
        if model is not None:
            try:
                yield batch, _compute_of_model(model, batch, job, device, machine)
                continue
            except torch.OutOfMemoryError:
                model = None
        machine.release_cached_memory()
        yield batch, _compute_of_products(batch, job, device)


def _compute_of_model(
    model: nn.Module, batch: int, job: StepJob, device: torch.device, machine: Device
) -> dict[str, float]:
    tokens = torch.randint(job.sizes.vocabulary, (2, batch, job.seq), device=device)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    machine.release_cached_memory()
    machine.reset_allocator_peak()
    forward, backward = [], []
    for _ in range(1 + TRIES):
        synchronize(device)
        times = [time.perf_counter()]
        loss = model(tokens[0], tokens[1])
        synchronize(device)
        times.append(time.perf_counter())
        loss.backward()
        synchronize(device)
        times.append(time.perf_counter())
        forward.append(times[1] - times[0])
        backward.append(times[2] - times[1])
        del loss
    largest = max(weight.nbytes for weight in model.parameters())
    # A gradient's worth of the peak is not an activation; what the allocator rounds up is, for whoever uses it.
    activations = max(machine.allocator_peak_bytes() - weight_bytes - largest, 0)
    return {
        "forward_seconds": min(forward[1:]),
        "backward_seconds": min(backward[1:]),
        "activation_bytes": float(activations),
    }


def _drop_gradient(weight: nn.Parameter) -> None:
    weight.grad = None


def _compute_of_products(batch: int, job: StepJob, device: torch.device) -> dict[str, float]:
    side = 8192
    a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, job.sizes.dtype)) for _ in range(2))
    torch.mm(a, b)
    seconds = _best_seconds(lambda: torch.mm(a, b), device, calls=4)
    per_pass = 2 * job.num_parameters * batch * job.seq / (2 * side**3 / seconds)
    return {
        "forward_seconds": per_pass,
        "backward_seconds": (3 if job.sizes.checkpoint else 2) * per_pass,
        "activation_bytes": float(job.sizes.layers * batch * job.seq * job.sizes.hidden * 2),
    }
