"""Runs and segments between the device and homes on disk, as requests to the disk's queue.

A page in is a job of reads whose bytes go up the link one by one, as they come; ``run.ready`` exists when the last is
on its way, so until then nobody else may use the run. A page out is a copy down the link into the ring, from where the
queue writes it: for the device it is over with that copy's event, as one to host memory is.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pager.device.base import Region
from pager.engine.disk_queue import DiskQueue
from pager.engine.disk_requests import Extent, Job
from pager.engine.disk_workers import abandon
from pager.engine.ring import Ring

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.device.base import Device, Event
    from pager.engine.disk_requests import Write
    from pager.engine.run import Run
    from pager.statistics import Counters
    from pager.tiers.base import BackingTier
    from pager.tiers.device_arena import DeviceArena
    from pager.tiers.disk_probe import RingShape


class DiskTransfers:
    """Moves bytes to and from one disk. Safe to call from any thread. Ring and threads are made at first use."""

    def __init__(
        self,
        *,
        device: Device,
        arena: DeviceArena,
        disk: BackingTier,
        counters: Counters,
        shape: RingShape,
        spare_room: Callable[[], int],
        inline: str | None,
    ) -> None:
        self._device = device
        self._arena = arena
        self._disk = disk
        self._counters = counters
        self._shape = shape
        self._spare_room = spare_room
        self._inline = inline
        self._lock = threading.Lock()
        self._queue: DiskQueue | None = None

    @property
    def queue(self) -> DiskQueue:
        """The queue; the first call makes it."""
        if self._queue is None:
            with self._lock:
                if self._queue is None:
                    page_size = self._disk.page_size
                    slot_bytes = max(self._shape.slot_bytes // page_size, 1) * page_size
                    ring = Ring(self._device, slot_bytes, self._shape.num_slots)
                    self._queue = DiskQueue(
                        self._disk,
                        ring,
                        self._device,
                        self._counters,
                        num_threads=self._shape.num_threads,
                        spare_room=self._spare_room,
                        inline=self._inline,
                    )
                    # The threads must not keep a model alive that nobody closed: they know the queue alone.
                    leave = weakref.finalize(self, abandon, self._queue.changed, self._queue.closed)
                    leave.atexit = False
        return self._queue

    # -- runs --------------------------------------------------------------------------------------

    def begin_page_in(
        self, run: Run, home_frame: int, *, urgent: bool, then: Callable[[BaseException | None], None] | None
    ) -> Job:
        """Begin to fill ``run``. When it has ended ``run.ready`` is set, and ``then`` called, on another thread, with
        what it failed with.
        """
        h2d = self._device.h2d
        page_size = self._arena.page_size
        fence = dict(run.fence)

        def use(offset: int, buffer: torch.Tensor, region: Region) -> Event:
            while fence:
                h2d.wait(fence.popitem()[1])
            frame = run.frame + offset // page_size
            target = self._arena.bytes_of(frame, buffer.numel())
            writes = Region("device", frame, frame + -(-buffer.numel() // page_size))
            h2d.copy(target, buffer, reads=region, writes=writes)
            return h2d.record()

        def finish(job: Job) -> None:
            if job.error is None:
                run.ready = h2d.record()
            if then is not None:
                then(job.error)

        job = run.arrival = Job(use, finish, is_urgent=urgent)
        self.queue.read(job, self._extents(home_frame, run.num_bytes))
        return job

    def join(self, job: Job, *, stalls: bool) -> None:
        """Wait for the end of a page in. Raises what it failed with; struck by an interrupt, it is cancelled."""
        started = time.perf_counter()
        done = False
        try:
            self.queue.join(job)
            done = True
        finally:
            if not done:
                job.cancel()
            if stalls:
                self._counters.add(stall_seconds=time.perf_counter() - started)

    def page_out(self, run: Run, home_frame: int, *, stalls: bool, must: bool) -> Event:
        """Enqueue the copies of ``run`` into the ring, from where they are written; the event after which its frames
        are not read any more. Raises TierError where earlier writes have failed for good: the run is as it was. If it
        ``must`` go, it is kept in host memory instead.
        """
        d2h = self._device.d2h
        page_size = self._arena.page_size
        for frame, num_bytes, offset in self._extents(home_frame, run.num_bytes):
            first = run.frame + offset // page_size
            source = self._arena.bytes_of(first, num_bytes)
            reads = Region("device", first, first + -(-num_bytes // page_size))

            def fill(
                buffer: torch.Tensor, region: Region, source: torch.Tensor = source, reads: Region = reads
            ) -> Event:
                d2h.copy(buffer, source, reads=reads, writes=region)
                return d2h.record()

            started = time.perf_counter()
            done = False
            try:
                self.queue.write(frame, num_bytes, fill, must=must)
                done = True
            finally:
                if stalls:
                    self._counters.add(stall_seconds=time.perf_counter() - started)
                if not done and offset:
                    # Extents before this one are on their way out of the run, which will be written to again.
                    d2h.record().synchronize()
        return d2h.record()

    # -- whole segments, past the device -----------------------------------------------------------

    def read_home(self, segment: Segment, home_frame: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of a segment, uint8 on the CPU, in ``out`` if given. Raises TierError."""
        out = torch.empty(segment.num_bytes, dtype=torch.uint8) if out is None else out

        def use(offset: int, buffer: torch.Tensor, region: Region) -> None:
            self._device.host_touch(region, write=False)
            out[offset : offset + buffer.numel()].copy_(buffer)

        job = Job(use, is_urgent=True)
        self.queue.read(job, self._extents(home_frame, segment.num_bytes))
        self.join(job, stalls=False)
        return out

    def write_home(self, segment: Segment, home_frame: int, source: torch.Tensor) -> None:
        """Write all of a segment (uint8 on the CPU). Raises TierError; the home is undefined then."""
        # What was on its way there is old now; and one that had failed would be waited for in vain.
        self.queue.drop(home_frame, segment.num_pages)
        self.write_all([(home_frame, source)])

    def write_all(self, homes: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Write what is in host memory (uint8 on the CPU) to frames that nobody uses, and wait for it: ``(first frame,
        bytes)`` each. Raises TierError; then what these frames hold is undefined, and nothing is under way to them.
        """
        writes: list[Write] = []
        try:
            for home_frame, source in homes:
                for frame, num_bytes, offset in self._extents(home_frame, source.numel()):
                    part = source[offset : offset + num_bytes]

                    def fill(buffer: torch.Tensor, region: Region, part: torch.Tensor = part) -> None:
                        self._device.host_touch(region, write=True)
                        buffer.copy_(part)

                    writes.append(self.queue.write(frame, num_bytes, fill))
        finally:
            self.queue.wait_for_writes(writes)

    def forget(self, segment: Segment, home_frame: int) -> None:
        """The segment's home frames belong to nobody from now on."""
        if self._queue is not None:
            self._queue.drop(home_frame, segment.num_pages)

    @property
    def bytes_to_come(self) -> int:
        """Host memory that the ring takes once it is used."""
        return self._shape.num_bytes if self._queue is None else 0

    # -- the queue ---------------------------------------------------------------------------------

    def check_writes(self, num_bytes: int) -> None:
        """Try writes to the disk again that have failed, if so much more could not be kept. Raises TierError if one
        fails again; its bytes are safe.
        """
        if self._queue is not None and not self._queue.has_room(num_bytes):
            self._queue.check_writes()

    def take_failure(self) -> BaseException | None:
        """What a write in the background failed with, once."""
        return None if self._queue is None else self._queue.take_failure()

    def advance(self) -> bool:
        """See `DiskQueue.advance`."""
        return self._queue is not None and self._queue.advance()

    def settle(self) -> None:
        """Wait until everything is on the disk. Raises TierError."""
        if self._queue is not None:
            self._queue.settle()

    def stop(self) -> None:
        """No request is carried out any more. Idempotent."""
        if self._queue is not None:
            self._queue.stop()

    def close(self) -> None:
        """Give the ring back, after ``stop`` and after the copies that use it. Idempotent."""
        self.stop()
        if self._queue is not None:
            self._queue.ring.close()

    def _extents(self, home_frame: int, num_bytes: int) -> list[Extent]:
        """A home in extents, each a whole number of frames but the last."""
        step = self.queue.ring.slot_bytes
        return [
            Extent(home_frame + offset // self._disk.page_size, min(step, num_bytes - offset), offset)
            for offset in range(0, num_bytes, step)
        ]
