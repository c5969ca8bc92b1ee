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
    from collections.abc import Callable, Sequence

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

    A disk with a cache of its own is slower at more than that holds: see :func:`measure_sustained_rate`.
    """

    def work(index: int, frame_of: Callable[[int], int], buffer: torch.Tensor) -> int:
        deadline = time.perf_counter() + seconds
        moved = 0
        while time.perf_counter() < deadline:
            disk.write(frame_of(index), buffer)
            disk.read(frame_of(index), buffer)
            moved += 2 * EXTENT_BYTES
        return moved

    return _rate_of(disk, num_threads, num_threads, [work])


def measure_sustained_rate(disk: DiskFile, num_threads: int) -> float:
    """Bytes per second of threads that read each extent of the free frames and write it back, as the update does with
    states: once, after all of them were written. 0.0 where the disk fails.
    """
    num_extents = (disk.num_frames - disk.used_bytes // disk.page_size) // (EXTENT_BYTES // disk.page_size)

    def fill(index: int, frame_of: Callable[[int], int], buffer: torch.Tensor) -> int:
        for extent in range(index, num_extents, num_threads):
            disk.write(frame_of(extent), buffer)
        return 0

    def update(index: int, frame_of: Callable[[int], int], buffer: torch.Tensor) -> int:
        extents = range(index, num_extents, num_threads)
        for extent in extents:
            disk.read(frame_of(extent), buffer)
            disk.write(frame_of(extent), buffer)
        return 2 * EXTENT_BYTES * len(extents)

    return _rate_of(disk, num_threads, num_extents, [fill, update])


def _rate_of(
    disk: DiskFile,
    num_threads: int,
    num_extents: int,
    rounds: Sequence[Callable[[int, Callable[[int], int], torch.Tensor], int]],
) -> float:
    """Each of ``rounds`` in ``num_threads`` threads, which return the bytes they moved: those of the last, by its
    seconds. They get their number, where an extent begins, and a buffer.
    """
    frames = EXTENT_BYTES // disk.page_size
    try:
        first = disk.allocate(num_extents * frames)
    except TierError:
        return 0.0
    # Noise: of zeros nothing would be left to move where the file, or the disk itself, compresses.
    buffers = [map_memory(EXTENT_BYTES) for _ in range(num_threads)]
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, EXTENT_BYTES, dtype=np.uint8))
    for buffer in buffers:
        buffer.copy_(noise)
    moved = [0] * num_threads
    failed: list[TierError] = []
    rate = 0.0
    for work in rounds:

        def run(index: int, work: Callable[..., int] = work) -> None:
            try:
                moved[index] = work(index, lambda extent: first + extent * frames, buffers[index])
            except TierError as error:
                failed.append(error)

        threads = [
            threading.Thread(target=run, args=(index,), name="pager-probe") for index in range(num_threads)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = sum(moved) / (time.perf_counter() - began)
    disk.free(first, num_extents * frames)
    return 0.0 if failed else rate
