"""Checks of the folder for the third tier, with the file and the probe that a run uses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pager.errors import TierError
from pager.tools.doctor.result import CheckResult

__all__ = ["DiskFacts", "check_disk", "check_disk_direct", "measure_disk"]

SECONDS_EACH = 0.25
# Measured: 2.0 GB/s on a virtual disk; a SATA drive has 0.5.
ENOUGH_BYTES_PER_SECOND = 1e9
BROKEN_BYTES_PER_SECOND = 50e6


class DiskFacts(NamedTuple):
    """``rates``: bytes per second, read and written in turn, by requests at a time. ``refused``: why there are none.
    ``sustained_rate``: of more than a disk's own cache holds, with the best number of requests; 0 if not measured.
    """

    is_direct: bool
    rates: Mapping[int, float]
    refused: str
    sustained_rate: float = 0.0


def measure_disk(
    path: str,
    *,
    seconds: float = SECONDS_EACH,
    sustained_bytes: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> DiskFacts:
    """Make a run's file in ``path``, measure it, and let it go. ``sustained_bytes``: of which the sustained rate is to
    be measured, three times as many move. ``tick`` is called after each measurement.
    """
    from pager.tiers.disk_file import DiskFile
    from pager.tiers.disk_probe import DEPTHS, EXTENT_BYTES, measure_rate, measure_sustained_rate

    page_size = 128 * 2**10
    rates: dict[int, float] = {}
    sustained_rate = 0.0
    # Its warning that there is no direct way is a line of the report.
    log = logging.getLogger("pager.tiers.disk_file")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        disk = DiskFile(path, page_size, max(max(DEPTHS) * EXTENT_BYTES, sustained_bytes) // page_size)
        try:
            for depth in DEPTHS:
                rates[depth] = measure_rate(disk, depth, seconds=seconds)
                tick()
            if sustained_bytes:
                sustained_rate = measure_sustained_rate(disk, max(rates, key=lambda depth: rates[depth]))
        finally:
            disk.close()
    except TierError as error:
        return DiskFacts(False, {}, str(error))
    finally:
        log.setLevel(level)
    return DiskFacts(disk.is_direct, rates, "", sustained_rate)


def check_disk_direct(facts: DiskFacts | None) -> CheckResult:
    """Whether pages go past the page cache."""
    name = "disk, O_DIRECT"
    if facts is None:
        return CheckResult(
            name=name, verdict="not here", found="no folder given", advice="name one: --disk PATH"
        )
    if facts.refused:
        return CheckResult(name=name, verdict="not here", found="nothing could be measured")
    if facts.is_direct:
        return CheckResult(name=name, verdict="ok", found="pages go past the page cache")
    return CheckResult(
        name=name,
        verdict="slow",
        found="the file system has none: pages take a copy, and host memory that no budget counts",
        advice="name a folder on a local disk with ext4 or xfs, not tmpfs, overlayfs or a network",
    )


def check_disk(facts: DiskFacts | None) -> CheckResult:
    """The speed of reads and writes in turn, as an update does them."""
    name = "disk, speed"
    if facts is None:
        return CheckResult(
            name=name, verdict="not here", found="no folder given", advice="name one: --disk PATH"
        )
    if facts.refused or not any(facts.rates.values()):
        return CheckResult(
            name=name,
            verdict="broken",
            found=facts.refused or "reads or writes fail",
            advice="name a folder of your own, that can be written to and has room",
        )
    best = max(facts.rates.values())
    shown = ", ".join(f"{rate / 1e9:.2f} with {depth}" for depth, rate in facts.rates.items())
    found = f"GB/s read and written in turn, by requests at a time: {shown}"
    values = {"bytes_per_second": {str(depth): rate for depth, rate in facts.rates.items()}}
    if not facts.is_direct:
        found += " (of the page cache, in part)"
    if best < BROKEN_BYTES_PER_SECOND:
        return CheckResult(
            name=name,
            verdict="broken",
            found=found,
            advice="far too slow for pages; take a local NVMe drive, or train without a disk",
            values=values,
        )
    if best < ENOUGH_BYTES_PER_SECOND:
        return CheckResult(
            name=name,
            verdict="slow",
            found=found,
            advice="take a local NVMe drive; the disk is the slowest part of a step that uses it",
            values=values,
        )
    return CheckResult(name=name, verdict="ok", found=found, values=values)
