"""Checks of the link between host memory and the device, from copies that are timed here.

The runtime registers memory that is already there, which may be taken and yet do nothing. So the same memory is copied
before and after it is registered: a real lock makes copies faster, lets the host go on while they run, and is known to
CUDA when it is asked about the address.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from pager.device.base import Device, Stream
from pager.errors import TierError
from pager.tiers.host_arena import map_memory
from pager.tools.doctor.result import CheckResult
from pager.units import format_bytes

__all__ = [
    "LinkRates",
    "check_both_ways",
    "check_gpu_lock",
    "check_pageable",
    "check_registered",
    "measure_link",
]

T = TypeVar("T")

COPY_BYTES = 2**26
TRIES = 3
COPIES = 8
# How long the link is kept busy while NVML is asked: links come up within milliseconds.
LOAD_SECONDS = 0.3

# Registered memory is 7 times as fast where it was measured (docs/benchmarks.md).
ENOUGH_GAIN = 1.5
# Issuing asynchronous copies of 64 MiB takes a hundredth of their time; where the host waits for them, all of it.
BLOCKED_SHARE = 0.5
# Measured: 87 % of what PCIe 5 x16 carries.
ENOUGH_OF_LINK = 0.75
BROKEN_OF_LINK = 0.25
# Without a figure of the link: what generation 3 x16 gives.
ENOUGH_BYTES_PER_SECOND = 10e9
# Measured: 91 % of one direction alone.
ENOUGH_BOTH_WAYS = 0.7
LEAST_PAGEABLE = 1e9


class LinkRates(NamedTuple):
    """Bytes per second of copies; ``both_ways`` of each direction while both run.

    ``refused``: why the memory could not be registered, or ""; ``is_known``: whether the driver says of the address
    that it is page-locked; ``issue_share``: of the time of copies, what the host was held up.
    """

    num_bytes: int
    pageable_in: float
    pageable_out: float
    registered_in: float
    registered_out: float
    both_ways: float
    refused: str
    is_known: bool
    issue_share: float


def measure_link(
    device: Device, read: Callable[[], T], *, num_bytes: int = COPY_BYTES, load_seconds: float = LOAD_SECONDS
) -> tuple[LinkRates, list[T]]:
    """The rates, and what ``read`` answered again and again while the link was busy. Blocks for half a second."""
    host = [map_memory(num_bytes) for _ in range(2)]
    slabs = [device.allocate_slab(num_bytes) for _ in range(2)]
    for memory in host:
        memory.fill_(1)
    both = [(device.h2d, slabs[0], host[0]), (device.d2h, host[1], slabs[1])]
    pageable = [_rate([copy])[0] for copy in both]
    refused = ""
    registered: list[int] = []
    try:
        for memory in host:
            device.register_host(memory.data_ptr(), num_bytes)
            registered.append(memory.data_ptr())
    except TierError as error:
        refused = str(error)
    try:
        is_known = not refused and all(memory.is_pinned() for memory in host)
        there, issue_share = _rate([both[0]])
        back = _rate([both[1]])[0]
        both_ways = _rate(both)[0]
        answers = _read_under_load(both[0], read, load_seconds)
    finally:
        for address in registered:
            device.unregister_host(address)
    rates = LinkRates(
        num_bytes=2 * num_bytes,
        pageable_in=pageable[0],
        pageable_out=pageable[1],
        registered_in=0.0 if refused else there,
        registered_out=0.0 if refused else back,
        both_ways=0.0 if refused else both_ways,
        refused=refused,
        is_known=is_known,
        issue_share=issue_share,
    )
    return rates, answers


Copy = tuple[Stream, torch.Tensor, torch.Tensor]


def _rate(copies: list[Copy]) -> tuple[float, float]:
    """Bytes per second of each of the ``copies``, run together, and the share of the time that the host was held up;
    of the fastest of some tries.
    """
    best, share = float("inf"), 1.0
    for _ in range(1 + TRIES):  # the first is slower
        began = time.perf_counter()
        for _ in range(COPIES):
            for stream, target, source in copies:
                stream.copy(target, source, reads=None, writes=None)
        issued = time.perf_counter()
        for stream, _, _ in copies:
            stream.synchronize()
        seconds = time.perf_counter() - began
        if seconds < best:
            best, share = seconds, (issued - began) / seconds
    return COPIES * copies[0][1].numel() / best, share


def _read_under_load(copy: Copy, read: Callable[[], T], seconds: float) -> list[T]:
    stream, target, source = copy
    is_busy, stop = threading.Event(), threading.Event()
    failed: list[Exception] = []

    def keep_busy() -> None:
        try:
            while not stop.is_set():
                stream.copy(target, source, reads=None, writes=None)
                stream.synchronize()
                is_busy.set()
        except Exception as error:
            failed.append(error)
        finally:
            is_busy.set()

    thread = threading.Thread(target=keep_busy, name="pager-doctor-load")
    thread.start()
    answers: list[T] = []
    try:
        is_busy.wait()
        deadline = time.perf_counter() + seconds
        while not answers or time.perf_counter() < deadline:
            answers.append(read())
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]
    return answers


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"


def check_gpu_lock(rates: LinkRates | None) -> CheckResult:
    """Whether registered host memory is page-locked in truth."""
    name = "page-locking, GPU"
    if rates is None:
        return CheckResult(name=name, verdict="not here", found="no GPU")
    size = format_bytes(rates.num_bytes)
    if rates.refused:
        return CheckResult(
            name=name,
            verdict="broken",
            found=f"refused: {rates.refused}",
            advice="raise the locked-memory limit (`ulimit -l unlimited`, `--ulimit memlock=-1`) and the memory limit "
            "of the container; without it copies block the host",
        )
    gain = rates.registered_in / rates.pageable_in
    held_up = rates.issue_share > BLOCKED_SHARE
    values = {"is_known": rates.is_known, "gain": gain, "issue_share": rates.issue_share}
    about = f"copies {gain:.1f} times as fast, the host held up for {rates.issue_share:.0%} of them"
    if not rates.is_known or (held_up and gain < ENOUGH_GAIN):
        why = "" if rates.is_known else "the driver does not know the memory as locked; "
        return CheckResult(
            name=name,
            verdict="broken",
            found=f"registering {size} was accepted and did nothing: {why}{about}",
            advice="it fails silently in some containers and virtual machines: run on the host, or with "
            "`--cap-add IPC_LOCK --ulimit memlock=-1`, and update the driver",
            values=values,
        )
    if held_up:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{size} registered; {about}",
            advice="copies should not hold up the host: look for CUDA_LAUNCH_BLOCKING and for a debugger or profiler",
            values=values,
        )
    return CheckResult(name=name, verdict="ok", found=f"{size} registered; {about}", values=values)


def check_pageable(rates: LinkRates | None) -> CheckResult:
    """Copies from memory that is not locked: what pager does without."""
    name = "link, pageable"
    if rates is None:
        return CheckResult(name=name, verdict="not here", found="no GPU")
    there, back = rates.pageable_in, rates.pageable_out
    values = {"in_bytes_per_second": there, "out_bytes_per_second": back}
    found = f"{_gb(there)} in, {_gb(back)} out"
    if min(there, back) >= LEAST_PAGEABLE:
        return CheckResult(name=name, verdict="ok", found=f"{found}, for comparison", values=values)
    return CheckResult(
        name=name,
        verdict="slow",
        found=found,
        advice="something else uses the link or the host's memory: look at `nvidia-smi` and `top`",
        values=values,
    )


def check_registered(rates: LinkRates | None, carries: float | None) -> CheckResult:
    """Copies as pager does them, against what the link ``carries`` by its generation and width (None: unknown)."""
    name = "link, registered"
    if rates is None or rates.refused:
        found = "no GPU" if rates is None else "nothing could be registered"
        return CheckResult(name=name, verdict="not here", found=found)
    rate = min(rates.registered_in, rates.registered_out)
    values = {
        "in_bytes_per_second": rates.registered_in,
        "out_bytes_per_second": rates.registered_out,
        "link_bytes_per_second": carries,
    }
    found = f"{_gb(rates.registered_in)} in, {_gb(rates.registered_out)} out"
    if carries is not None:
        found += f", {rate / carries:.0%} of what the link carries ({_gb(carries)})"
    advice = (
        "copies should reach three quarters of the link: look at NUMA affinity, at other users of the link, and at "
        "ACS or an IOMMU in the BIOS (`iommu=pt`)"
    )
    if carries is not None and rate < BROKEN_OF_LINK * carries:
        return CheckResult(name=name, verdict="broken", found=found, advice=advice, values=values)
    if rate < (ENOUGH_BYTES_PER_SECOND if carries is None else ENOUGH_OF_LINK * carries):
        return CheckResult(name=name, verdict="slow", found=found, advice=advice, values=values)
    return CheckResult(name=name, verdict="ok", found=found, values=values)


def check_both_ways(rates: LinkRates | None) -> CheckResult:
    """Both directions at once, as in a step, against one alone."""
    name = "link, both ways"
    if rates is None or rates.refused:
        found = "no GPU" if rates is None else "nothing could be registered"
        return CheckResult(name=name, verdict="not here", found=found)
    share = rates.both_ways / min(rates.registered_in, rates.registered_out)
    values = {"each_bytes_per_second": rates.both_ways, "of_one_way": share}
    found = f"{_gb(rates.both_ways)} each way at once, {share:.0%} of one way alone"
    if share >= ENOUGH_BOTH_WAYS:
        return CheckResult(name=name, verdict="ok", found=found, values=values)
    return CheckResult(
        name=name,
        verdict="slow",
        found=found,
        advice="the two directions share something: the host's memory (see DRAM), or a switch or bridge on the way",
        values=values,
    )
