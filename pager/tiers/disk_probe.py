"""How many requests a disk wants at a time: a short measurement on the blocks that were just reserved.

One request at a time leaves most disks idle half of the time; too many cost threads and page-locked memory. So extents
are read and written in turn, as the update does it, with one, two, four and eight threads, some hundredths of a second
each, and the smallest number is taken that reaches ``ENOUGH`` of the best. Under ``LEAST_BYTES`` of file there is
nothing to gain, and nothing is measured. What is measured hangs on the machine; nothing but speed follows from it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pager.errors import TierError
from pager.tiers.host_arena import map_memory

if TYPE_CHECKING:
    from pager.tiers.disk_file import DiskFile

logger = logging.getLogger("pager.tiers.disk_probe")

# Of the extents tried (docs/benchmarks.md: 1, 4 and 16 MiB) the one that reaches the disk's rate with the fewest bytes
# of ring.
EXTENT_BYTES = 4 * 2**20
DEPTHS = (1, 2, 4, 8)
DEFAULT_DEPTH = 4
ENOUGH = 0.95
LEAST_BYTES = 2**30
SECONDS_EACH = 0.06


class RingShape(NamedTuple):
    """``num_slots`` buffers of ``slot_bytes``, and the threads that work on them."""

    slot_bytes: int
    num_slots: int
    num_threads: int

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self.slot_bytes * self.num_slots


def shape_of(depth: int) -> RingShape:
    """A ring for ``depth`` requests at a time: as many slots again are in the link's hands or wait, and a few more."""
    return RingShape(EXTENT_BYTES, 2 * depth + 4, depth)


def measured_shape(disk: DiskFile | None) -> RingShape:
    """The ring for this disk, measured where that is worth it."""
    if disk is None or disk.num_frames * disk.page_size < LEAST_BYTES:
        return shape_of(DEFAULT_DEPTH)
    rates = {depth: measure_rate(disk, depth) for depth in DEPTHS}
    best = max(rates.values())
    depth = next((depth for depth, rate in rates.items() if rate >= ENOUGH * best > 0), DEFAULT_DEPTH)
    logger.info(
        "disk: %s; %d at a time",
        ", ".join(f"{rate / 1e9:.2f} GB/s with {depth}" for depth, rate in rates.items()),
        depth,
    )
    return shape_of(depth)


def measure_rate(disk: DiskFile, num_threads: int, *, seconds: float = SECONDS_EACH) -> float:
    """Bytes per second of ``num_threads`` threads that read and write extents in turn, for about ``seconds``; 0.0 where
    the disk fails, which it will say again when it matters. Uses free frames, and gives them back.
    """
    frames = EXTENT_BYTES // disk.page_size
    try:
        first = disk.allocate(num_threads * frames)
    except TierError:
        return 0.0
    # Noise: of zeros nothing would be left to move where the file, or the disk itself, compresses.
    buffers = [map_memory(EXTENT_BYTES) for _ in range(num_threads)]
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, EXTENT_BYTES, dtype=np.uint8))
    for buffer in buffers:
        buffer.copy_(noise)
    deadline = time.perf_counter() + seconds
    moved = [0] * num_threads
    failed: list[TierError] = []

    def work(index: int) -> None:
        buffer = buffers[index]
        frame = first + index * frames
        try:
            while time.perf_counter() < deadline:
                disk.write(frame, buffer)
                disk.read(frame, buffer)
                moved[index] += 2 * EXTENT_BYTES
        except TierError as error:
            failed.append(error)

    threads = [
        threading.Thread(target=work, args=(index,), name="pager-probe") for index in range(num_threads)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    disk.free(first, num_threads * frames)
    return 0.0 if failed else sum(moved) / elapsed
