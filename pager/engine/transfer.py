"""Moving a run's bytes between the device and its home. Bytes only: no page changes its state here.

Every copy is put on the stream of its direction and ordered by events alone:

page in  (stream h2d)   waits for the frames' fence (their former users) and the last write of the home copy
page out (stream d2h)   waits for the last uses of the run, and for a page in that still reads the home frames

A home on disk goes through a bounce buffer in host memory; there the host waits for the file, and counts it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import torch

from pager.device.base import Region
from pager.page_table import Home

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.device.base import Device, Event
    from pager.engine.run import Run
    from pager.page_table import PageTable
    from pager.statistics import Counters
    from pager.tiers.device_arena import DeviceArena
    from pager.tiers.disk_file import DiskFile
    from pager.tiers.host_arena import HostArena

# One copy of 16 MiB reaches 54.6 of 55.1 GB/s (DESIGN, section 5); larger ones only delay the first event.
EXTENT_BYTES = 16 * 2**20


class _Bounce:
    """One host buffer between the disk and the link, and the event after which it may be used again."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.busy: Event | None = None
        self.lock = threading.Lock()

    def acquire(self) -> None:
        self.lock.acquire()
        if self.busy is not None:
            self.busy.synchronize()
            self.busy = None

    def release(self, busy: Event | None = None) -> None:
        self.busy = busy
        self.lock.release()


class Transfers:
    """Copies runs in and out. Thread-safe: the streams are, and each bounce buffer has one user at a time."""

    def __init__(
        self,
        *,
        device: Device,
        table: PageTable,
        arena: DeviceArena,
        host: HostArena,
        disk: DiskFile | None,
        counters: Counters,
    ) -> None:
        self._device = device
        self._table = table
        self._arena = arena
        self._host = host
        self._disk = disk
        self._counters = counters
        self._home_written: dict[int, Event] = {}
        self._home_read: dict[int, Event] = {}
        self._sent: deque[tuple[Event, torch.Tensor]] = deque()
        self._bounce = _Bounce(EXTENT_BYTES) if disk is not None else None

    # -- device <- home ----------------------------------------------------------------------------

    def page_in(self, run: Run, *, stalls: bool = True) -> None:
        """Enqueue the copies that fill ``run``; sets ``run.ready``. Raises TierIOError if the disk fails.

        ``stalls``: the training stands still meanwhile, so that waiting for a disk counts as a stall.
        """
        h2d = self._device.h2d
        for event in run.fence.values():
            h2d.wait(event)
        written = self._home_written.get(run.segment.index)
        if written is not None:
            h2d.wait(written)
        home, home_frame = self._home(run)
        if home == Home.HOST:
            # In one piece: both ends are contiguous, and the engine of the link takes any length at full speed.
            num_bytes = run.num_bytes
            source = self._host.view(home_frame, num_bytes)
            target = self._arena.bytes_of(run.frame, num_bytes)
            reads = self._host_region(home_frame, num_bytes)
            h2d.copy(target, source, reads=reads, writes=self._device_region(run.frame, num_bytes))
        else:
            for offset, num_bytes in _extents(run.num_bytes):
                num_frames = offset // self._arena.page_size
                frame = run.frame + num_frames
                target = self._arena.bytes_of(frame, num_bytes)
                writes = self._device_region(frame, num_bytes)
                self._read_disk(home_frame + num_frames, num_bytes, target, writes, stalls=stalls)
        run.ready = h2d.record()
        self._home_read[run.segment.index] = run.ready
        self._counters.add(page_in_bytes=run.num_bytes)

    def _read_disk(
        self, home_frame: int, num_bytes: int, target: torch.Tensor, writes: Region, *, stalls: bool
    ) -> None:
        assert self._disk is not None
        assert self._bounce is not None
        bounce = self._bounce
        started = time.perf_counter()
        bounce.acquire()
        event: Event | None = None
        try:
            buffer = bounce.memory[:num_bytes]
            self._disk.read(home_frame, buffer)
            waited = time.perf_counter() - started if stalls else 0.0
            self._counters.add(stall_seconds=waited, disk_read_bytes=num_bytes)
            self._device.h2d.copy(target, buffer, reads=None, writes=writes)
            event = self._device.h2d.record()
        finally:
            bounce.release(event)

    # -- device -> home ----------------------------------------------------------------------------

    def page_out(self, run: Run, *, stalls: bool = True) -> Event | None:
        """Enqueue the copies of ``run`` to its home; the event after which the home is good.

        None where the home is the disk: the bytes are in the file when this returns. ``stalls`` as for
        :meth:`page_in`. Raises TierIOError.
        """
        d2h = self._device.d2h
        for event in run.last_events().values():
            d2h.wait(event)
        pending_read = self._home_read.get(run.segment.index)
        if pending_read is not None:
            d2h.wait(pending_read)
        home, home_frame = self._home(run)
        on_disk = home == Home.DISK
        if not on_disk:
            num_bytes = run.num_bytes
            source = self._arena.bytes_of(run.frame, num_bytes)
            target = self._host.view(home_frame, num_bytes)
            writes = self._host_region(home_frame, num_bytes)
            d2h.copy(target, source, reads=self._device_region(run.frame, num_bytes), writes=writes)
        else:
            for offset, num_bytes in _extents(run.num_bytes):
                num_frames = offset // self._arena.page_size
                frame = run.frame + num_frames
                source = self._arena.bytes_of(frame, num_bytes)
                regions = self._device_region(frame, num_bytes)
                self._write_disk(home_frame + num_frames, num_bytes, source, regions, stalls=stalls)
        self._counters.add(page_out_bytes=run.num_bytes)
        event = d2h.record()
        if not on_disk:
            self._home_written[run.segment.index] = event
        return event

    def _write_disk(
        self, home_frame: int, num_bytes: int, source: torch.Tensor, reads: Region, *, stalls: bool
    ) -> None:
        assert self._disk is not None
        assert self._bounce is not None
        bounce = self._bounce
        started = time.perf_counter()
        bounce.acquire()
        try:
            buffer = bounce.memory[:num_bytes]
            self._device.d2h.copy(buffer, source, reads=reads, writes=None)
            self._device.d2h.record().synchronize()
            self._disk.write(home_frame, buffer)
            waited = time.perf_counter() - started if stalls else 0.0
            self._counters.add(stall_seconds=waited, disk_write_bytes=num_bytes)
        finally:
            bounce.release()

    # -- the host's own access to homes ------------------------------------------------------------

    def home_bytes(self, segment: Segment, *, write: bool) -> torch.Tensor | None:
        """The segment's home in host memory as uint8, after waiting for copies under way; None if it is
        elsewhere.
        """
        if int(self._table.home[segment.first_page]) != Home.HOST:
            return None
        written = self._home_written.get(segment.index)
        if written is not None:
            written.synchronize()
        if write:
            read = self._home_read.get(segment.index)
            if read is not None:
                read.synchronize()
        home_frame = int(self._table.home_frame[segment.first_page])
        self._device.host_touch(Region("host", home_frame, home_frame + segment.num_pages), write=write)
        return self._host.view(home_frame, segment.num_bytes)

    def home_view(self, segment: Segment) -> torch.Tensor:
        """The segment's home in host memory as uint8, without waiting for anything: see :meth:`home_bytes`."""
        return self._host.view(int(self._table.home_frame[segment.first_page]), segment.num_bytes)

    def send_home(self, segment: Segment, source: torch.Tensor) -> None:
        """Enqueue the copy of ``source``, a dense tensor on the device that is no frame of ours, into the segment's
        home in host memory, behind what is on the current stream. ``source`` is kept alive as long as needed.
        """
        self.forget_sent()
        d2h = self._device.d2h
        d2h.wait(self._device.current_stream().record())
        read = self._home_read.get(segment.index)
        if read is not None:
            d2h.wait(read)
        raw = torch.empty(0, dtype=torch.uint8, device=source.device)
        offset = int(source.storage_offset()) * source.element_size()
        raw.set_(source.untyped_storage(), offset, (segment.num_bytes,), (1,))
        home_frame = int(self._table.home_frame[segment.first_page])
        d2h.copy(
            self.home_view(segment), raw, reads=None, writes=self._host_region(home_frame, segment.num_bytes)
        )
        self._counters.add(page_out_bytes=segment.num_bytes)
        event = self._home_written[segment.index] = d2h.record()
        self._sent.append((event, source))

    def forget_sent(self) -> None:
        """Let go of sources whose copies are over."""
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()

    def send_to_device(self, run: Run) -> Event:
        """Enqueue the copy of a home that the host has written into a run on the device; the event after which the run
        may be used. The host has waited for its last use.
        """
        h2d = self._device.h2d
        home, home_frame = self._home(run)
        assert home == Home.HOST
        reads = self._host_region(home_frame, run.num_bytes)
        target = self._arena.bytes_of(run.frame, run.num_bytes)
        h2d.copy(target, self._host.view(home_frame, run.num_bytes), reads=reads, writes=run.region)
        self._counters.add(page_in_bytes=run.num_bytes)
        event = self._home_read[run.segment.index] = h2d.record()
        return event

    def read_disk_home(self, segment: Segment) -> torch.Tensor:
        """A copy of a segment whose home is the disk, uint8 on the CPU. Raises TierIOError."""
        assert self._disk is not None
        out = torch.empty(segment.num_bytes, dtype=torch.uint8)
        home_frame = int(self._table.home_frame[segment.first_page])
        for offset, num_bytes in _extents(segment.num_bytes):
            self._disk.read(home_frame + offset // segment.page_size, out[offset : offset + num_bytes])
            self._counters.add(disk_read_bytes=num_bytes)
        return out

    def write_disk_home(self, segment: Segment, source: torch.Tensor) -> None:
        """Write all of a segment (uint8 on the CPU) to its home on disk. Raises TierIOError."""
        assert self._disk is not None
        home_frame = int(self._table.home_frame[segment.first_page])
        for offset, num_bytes in _extents(segment.num_bytes):
            self._disk.write(home_frame + offset // segment.page_size, source[offset : offset + num_bytes])
            self._counters.add(disk_write_bytes=num_bytes)

    def forget(self, segment: Segment) -> None:
        """Drop the events of a segment that is no more, after they have passed."""
        for events in (self._home_written, self._home_read):
            event = events.pop(segment.index, None)
            if event is not None:
                event.synchronize()

    def _home(self, run: Run) -> tuple[int, int]:
        """The tier of a run's home, and its first frame there; a segment's home frames lie side by side."""
        return int(self._table.home[run.begin]), int(self._table.home_frame[run.begin])

    def _device_region(self, frame: int, num_bytes: int) -> Region:
        return Region("device", frame, frame + -(-num_bytes // self._arena.page_size))

    def _host_region(self, frame: int, num_bytes: int) -> Region:
        return Region("host", frame, frame + -(-num_bytes // self._arena.page_size))


def _extents(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the extents of a run, each a multiple of every page size but the last."""
    return [(offset, min(EXTENT_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, EXTENT_BYTES)]
