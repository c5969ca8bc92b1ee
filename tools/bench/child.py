"""One system, in a process of its own: ``python -m pager.tools.bench.child JOB SYSTEM RESULT``.

Writes RESULT (JSON) after each part, so that what was measured before a crash or the time limit is kept:
``{"setup_seconds", "runs": [one per batch and clip], "error"?}``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from pager.device.base import Device, make_device
from pager.tools.bench.ceilings import measure_ceilings, synchronize
from pager.tools.bench.job import CEILINGS, SYSTEMS, StepJob
from pager.tools.bench.managed import make_managed
from pager.tools.bench.peers import PEERS
from pager.tools.bench.system import Refused, System, Traffic

__all__ = ["main"]

# NVML lets go of the interpreter while it looks; the files under /proc cost 0.1 ms of it each.
SAMPLE_SECONDS = 0.02
SAMPLES_PER_HOST_SAMPLE = 10


class MemorySampler(threading.Thread):
    """The most this process was seen to take: on the device (NVML), of torch's allocator there, resident, and of the
    machine's memory.
    """

    def __init__(self, machine: Device) -> None:
        super().__init__(name="bench-memory", daemon=True)
        self.device_bytes = self.allocator_bytes = self.resident_bytes = self.used_bytes = 0
        self._machine = machine
        self._stopped = threading.Event()
        self._process = psutil.Process()
        self._available = psutil.virtual_memory().available

    def run(self) -> None:
        """Sample until stopped."""
        sample_device = None if self._machine.is_simulated else _open_nvml()
        number = 0
        while not self._stopped.wait(SAMPLE_SECONDS):
            number += 1
            if sample_device is not None:
                self.device_bytes = max(self.device_bytes, sample_device())
            if number % SAMPLES_PER_HOST_SAMPLE == 0:
                self.sample()

    def sample(self) -> None:
        """Look once at what costs more to ask."""
        # The peak too: a system may reset it (pager does, at every step).
        self.allocator_bytes = max(self.allocator_bytes, self._machine.allocator_peak_bytes())
        self.resident_bytes = max(self.resident_bytes, self._process.memory_info().rss)
        self.used_bytes = max(self.used_bytes, self._available - psutil.virtual_memory().available)

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join()


def _open_nvml() -> Any:
    """A function that gives the largest process's bytes on the first GPU (systems run one at a time)."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError:
        return None

    def sample() -> int:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return max((process.usedGpuMemory or 0 for process in processes), default=0)

    return sample


def main(arguments: list[str]) -> int:
    """Run one system (or measure the ceilings) and write what came of it; 1 if it failed."""
    job = StepJob.read(Path(arguments[0]))
    name, path = arguments[1], Path(arguments[2])
    result: dict[str, Any] = {"runs": [], "torch": str(torch.__version__)}
    try:
        _measure(job, name, path, result)
    # Whatever a peer raises is its row's reason, and the traceback is in its log.
    except Exception as error:
        traceback.print_exc()
        result["error"] = _in_words(error)
        result["refused"] = isinstance(error, (Refused, ImportError))
        _write(path, result)
        return 1
    return 0


def _in_words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: no module {error.name}"
    if isinstance(error, Refused):
        return str(error)
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _write(path: Path, result: dict[str, Any]) -> None:
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(result), encoding="utf-8")
    fresh.replace(path)


def _measure(job: StepJob, name: str, path: Path, result: dict[str, Any]) -> None:
    if job.deterministic:
        torch.use_deterministic_algorithms(True)
    machine = make_device(job.device)
    device = machine.torch_device
    if name == CEILINGS:
        result["ceilings"] = measure_ceilings(job, device, machine)
        _write(path, result)
        return
    result["threads"] = torch.get_num_threads()
    if SYSTEMS[name].cap_on == "allocator":
        machine.limit_allocator(job.cap_bytes)
    with contextlib.closing(MemorySampler(machine)) as sampler:
        sampler.start()
        began = time.perf_counter()
        system = _make_system(job, name, device, machine)
        with contextlib.closing(system):
            synchronize(device)
            result |= {"setup_seconds": time.perf_counter() - began, "state": system.state}
            _write(path, result)
            for batch, clip in itertools.product(job.batches, job.clips):
                run = _run(system, _tokens(job, batch), clip, device, job.num_dropped)
                sampler.sample()
                result["runs"].append({"batch": batch, "clip": clip, **run, **_memory(sampler, machine)})
                _write(path, result)
            result["facts"] = system.facts()
            _write(path, result)


def _make_system(job: StepJob, name: str, device: torch.device, machine: Device) -> System:
    knobs = job.knobs_of(name)
    return PEERS[name](job, device, machine) if knobs is None else make_managed(job, device, knobs)


def _tokens(job: StepJob, batch: int) -> Tensor:
    """(steps, 2, batch, seq) int64: tokens and targets, the same for every system."""
    generator = torch.Generator().manual_seed(job.seed)
    return torch.randint(job.sizes.vocabulary, (job.steps, 2, batch, job.seq), generator=generator)


def _run(
    system: System, batches: Tensor, clip: float | None, device: torch.device, num_dropped: int
) -> dict[str, Any]:
    """Train on ``batches``; seconds of each step, from one loss to the next, as a user's loop sees them.

    The device is not synchronized beyond the reading of the loss, so that work may reach over the border of two
    steps; over the kept steps as much reaches in as reaches out.
    """
    losses: list[float] = []
    seconds: list[float] = []
    before = Traffic()
    synchronize(device)
    for number, batch in enumerate(batches):
        if number == num_dropped:
            before = system.traffic()
        began = time.perf_counter()
        tokens, targets = batch.to(device)
        try:
            losses.append(system.step(tokens, targets, clip).item())
        except Refused as error:
            return {"refused": str(error)}
        seconds.append(time.perf_counter() - began)
    after = system.traffic()
    num_kept = len(seconds) - num_dropped
    moved = [
        None if end is None or begin is None else (end - begin) / num_kept
        for begin, end in zip(before, after, strict=True)
    ]
    synchronize(device)
    return {
        "losses": losses,
        "seconds": seconds,
        "h2d_bytes_per_step": moved[0],
        "d2h_bytes_per_step": moved[1],
        "stall_seconds_per_step": moved[2],
    }


def _memory(sampler: MemorySampler, machine: Device) -> dict[str, Any]:
    on_gpu = not machine.is_simulated
    return {
        "allocator_peak_bytes": sampler.allocator_bytes if on_gpu else None,
        "process_peak_bytes": (sampler.device_bytes or None) if on_gpu else None,
        # Memory that the driver allocates for page-locking need not be in the resident set.
        "host_bytes": max(sampler.resident_bytes, sampler.used_bytes),
        "host_resident_bytes": sampler.resident_bytes,
    }


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads and process groups have kept processes alive that were done.
    os._exit(code)
