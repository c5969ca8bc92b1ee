"""Check what of this machine makes paging fast or slow: whether page-locking is real, PCIe, copies, NUMA, DRAM, huge
pages, limits, and a disk. Each line has a verdict (ok, slow, broken, not here) and what to do.

It takes a few seconds and wants an idle machine. Without a GPU the rest is checked; CUDA_VISIBLE_DEVICES chooses among
several. Exit code 0 if nothing is broken, 1 if something is, 2 for wrong use.

    pager doctor --disk /mnt/nvme
    pager doctor --json"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pager.errors import PagerError, PagerInternalError
from pager.tools.doctor.result import CheckResult, as_dict, as_text, worst

if TYPE_CHECKING:
    from pager.tools.doctor.gpu import GpuFacts, PcieLink
    from pager.tools.doctor.link import LinkRates

__all__ = ["add_arguments", "run"]

Tick = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager doctor``."""
    parser.add_argument("--disk", metavar="PATH", help="also check this folder for the third tier")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """``pager doctor``; 1 if anything is broken."""
    from pager.core_limit import core_limit
    from pager.tools.doctor.memory import thread_counts
    from pager.tools.report import make_bar
    from pager.tools.train import check_disk_folder

    if arguments.disk is not None:
        check_disk_folder(arguments.disk)
    counts = list(thread_counts(core_limit()))
    num_parts = 3 + len(counts) + (4 if arguments.disk is not None else 0)
    bar = make_bar(total=num_parts, title="doctor", unit="check")

    def tick(what: str) -> None:
        bar.set_postfix_str(what, refresh=False)
        bar.update()

    try:
        results = examine(Path("/"), counts, arguments.disk, tick)
    finally:
        bar.close()
    print(json.dumps(as_dict(results)) if arguments.json else as_text(results))
    return 1 if worst(results) == "broken" else 0


def examine(root: Path, counts: list[int], disk: str | None, tick: Tick) -> list[CheckResult]:
    """All checks, in the order in which they are shown."""
    results: list[CheckResult] = []
    lines, gpu, rates = guarded("GPU", lambda: _examine_gpu(tick), results) or ([], None, None)
    results += lines
    results += guarded("host", lambda: _examine_host(root, gpu, rates), results) or []
    tick("host")
    results += guarded("DRAM", lambda: _examine_dram(counts, tick), results) or []
    results += guarded("disk", lambda: _examine_disk(disk, tick), results) or []
    return results


def guarded(name: str, check: Callable[[], Any], results: list[CheckResult]) -> Any:
    """What ``check`` answers. Where it fails, a line that says so joins the ``results``, and the others go on."""
    try:
        return check()
    except PagerInternalError:
        raise
    except (PagerError, RuntimeError, OSError, MemoryError) as error:
        results.append(
            CheckResult(
                name=name,
                verdict="broken",
                found=f"the check itself failed: {str(error).splitlines()[0] if str(error) else repr(error)}",
                advice="end what else uses the machine or the GPU and try again",
            )
        )
        return None


def _examine_gpu(tick: Tick) -> tuple[list[CheckResult], GpuFacts | None, LinkRates | None]:
    """Lines about GPU, page-locking by it, and link."""
    import torch

    from pager.device.base import make_device
    from pager.device.cuda import current_index, device_uuid, num_devices
    from pager.tools.doctor import gpu, link

    num_torch = num_devices()
    facts: GpuFacts | None = None
    rates: LinkRates | None = None
    idle: PcieLink | None = None
    loaded: list[PcieLink | None] = []
    with gpu.open_nvml(nvml_module()) as nvml:
        tick("GPU")
        num_driver = gpu.num_driver_gpus(nvml)
        if num_torch:
            uuid = device_uuid(current_index())
            facts, idle = gpu.read_gpu(nvml, uuid), gpu.read_pcie(nvml, uuid)
            device = make_device("cuda")
            try:
                rates, loaded = link.measure_link(device, lambda: gpu.read_pcie(nvml, uuid))
            finally:
                device.close()
    tick("link")
    busiest = max(
        filter(None, loaded), key=lambda seen: (seen.generation or 0, seen.width or 0), default=None
    )
    measured = None if rates is None else max(rates.registered_in, rates.registered_out)
    carries = (
        busiest.bytes_per_second if busiest is not None and gpu.is_believable(busiest, measured) else None
    )
    lines = [
        gpu.check_gpu(facts, num_torch, num_driver, str(torch.__version__)),
        link.check_gpu_lock(rates),
        _pcie_line(num_torch, idle, busiest, measured),
        link.check_pageable(rates),
        link.check_registered(rates, carries),
        link.check_both_ways(rates),
    ]
    return lines, facts, rates


def _pcie_line(
    num_gpus: int, idle: PcieLink | None, loaded: PcieLink | None, measured: float | None
) -> CheckResult:
    from pager.tools.doctor.gpu import check_pcie

    if not num_gpus:
        return CheckResult(name="PCIe link", verdict="not here", found="no GPU")
    return check_pcie(idle, loaded, measured)


def nvml_module() -> Any:
    """``pynvml``, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _examine_host(root: Path, gpu: GpuFacts | None, rates: LinkRates | None) -> list[CheckResult]:
    """Lines about cores, nodes, pages and limits."""
    import psutil

    from pager.core_limit import core_limit
    from pager.host_limit import free_host_bytes, host_limit_bytes
    from pager.tools.doctor import host

    allowed = os.sched_getaffinity(0)
    limit = host_limit_bytes()
    registered = 0 if rates is None or rates.refused or not rates.is_known else rates.num_bytes
    return [
        host.check_lock(host.try_lock(root)),
        host.check_locked_limit(root, limit, registered),
        host.check_host_memory(int(psutil.virtual_memory().total), limit, free_host_bytes()),
        host.check_huge_pages(root),
        host.check_cores(core_limit(), len(allowed), os.cpu_count() or len(allowed)),
        host.check_affinity(root, allowed, None if gpu is None else gpu.bus_id),
    ]


def _examine_dram(counts: list[int], tick: Tick) -> list[CheckResult]:
    from pager.tools.doctor.memory import check_dram, measure_dram

    rates = {}
    for count in counts:
        rates[count] = measure_dram(count)
        tick(f"DRAM, {count} threads")
    return [check_dram(rates)]


def _examine_disk(path: str | None, tick: Tick) -> list[CheckResult]:
    from pager.tools.doctor.disk import check_disk, check_disk_direct, measure_disk

    facts = None if path is None else measure_disk(path, tick=lambda: tick("disk"))
    return [check_disk(facts), check_disk_direct(facts)]
