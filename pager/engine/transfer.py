"""Moving a run's bytes between the device and its home. Bytes only: no page changes its state here.

Every copy is put on the stream of its direction and ordered by events alone:

page in  (stream h2d)   waits for the frames' fence (their former users) and the last write of the home copy
page out (stream d2h)   waits for the last uses of the run, and for a page in that still reads the home frames

A home on disk goes through a bounce buffer in host memory; there the host waits for the file, and counts it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from pager.device.base import Region
from pager.interrupts import uninterrupted
from pager.page_table import Home
from pager.tiers.device_arena import merge_fence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pager.address_space import Segment
    from pager.device.base import Device, Event
    from pager.engine.run import Run
    from pager.page_table import PageTable
    from pager.statistics import Counters
    from pager.tiers.device_arena import DeviceArena, Fence
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
        self.page_in_all([run], stalls=stalls)

    def page_in_all(self, runs: Sequence[Run], *, stalls: bool = True) -> None:
        """The same for several runs at once: they have one event, and h2d waits once for each stream."""
        with self._whole(runs):
            self._page_in_all(runs, stalls=stalls)

    def _page_in_all(self, runs: Sequence[Run], *, stalls: bool) -> None:
        h2d = self._device.h2d
        before: Fence = {}
        for run in runs:
            merge_fence(before, run.fence)
            written = self._home_written.get(run.segment.index)
            if written is not None:
                merge_fence(before, {written.stream.index: written})
        for event in before.values():
            h2d.wait(event)
        num_bytes = 0
        for run in runs:
            num_bytes += run.num_bytes
            home, home_frame = self._home(run)
            if home == Home.HOST:
                # In one piece: both ends are contiguous, and the engine of the link takes any length at full speed.
                source, reads = self._host_side(home_frame, run.num_bytes)
                target, writes = self._device_side(run.frame, run.num_bytes)
                h2d.copy(target, source, reads=reads, writes=writes)
            else:
                self._read_disk_run(run, home_frame, stalls=stalls)
        ready = h2d.record()
        for run in runs:
            run.ready = self._home_read[run.segment.index] = ready
        self._counters.add(page_in_bytes=num_bytes)

    def _whole(self, runs: Sequence[Run]) -> AbstractContextManager[Any]:
        """A copy between device and host memory and the event that tells of it are one act for a signal's handler.

        Not so where a disk is waited for: its pages are in nobody's way meanwhile.
        """
        at_home = all(int(self._table.home[run.begin]) == Home.HOST for run in runs)
        return uninterrupted() if at_home else contextlib.nullcontext()

    def _read_disk_run(self, run: Run, home_frame: int, *, stalls: bool) -> None:
        for offset, num_bytes in _extents(run.num_bytes):
            num_frames = offset // self._arena.page_size
            target, writes = self._device_side(run.frame + num_frames, num_bytes)
            self._read_disk(home_frame + num_frames, num_bytes, target, writes, stalls=stalls)

    def _read_disk(
        self, home_frame: int, num_bytes: int, target: torch.Tensor, writes: Region | None, *, stalls: bool
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
        return self.page_out_all([run], stalls=stalls)[0]

    def page_out_all(self, runs: Sequence[Run], *, stalls: bool = True) -> list[Event | None]:
        """The same for several runs at once: they share one event, and d2h waits once for each stream."""
        with self._whole(runs):
            return self._page_out_all(runs, stalls=stalls)

    def _page_out_all(self, runs: Sequence[Run], *, stalls: bool) -> list[Event | None]:
        d2h = self._device.d2h
        before: Fence = {}
        for run in runs:
            merge_fence(before, run.last_events())
            read = self._home_read.get(run.segment.index)
            if read is not None:
                merge_fence(before, {read.stream.index: read})
        for event in before.values():
            d2h.wait(event)
        num_bytes = 0
        at_home: list[bool] = []
        for run in runs:
            num_bytes += run.num_bytes
            home, home_frame = self._home(run)
            at_home.append(home == Home.HOST)
            if at_home[-1]:
                source, reads = self._device_side(run.frame, run.num_bytes)
                target, writes = self._host_side(home_frame, run.num_bytes)
                d2h.copy(target, source, reads=reads, writes=writes)
            else:
                self._write_disk_run(run, home_frame, stalls=stalls)
        event = d2h.record()
        for run, is_host in zip(runs, at_home, strict=True):
            if is_host:
                self._home_written[run.segment.index] = event
        self._counters.add(page_out_bytes=num_bytes)
        return [event if is_host else None for is_host in at_home]

    def _write_disk_run(self, run: Run, home_frame: int, *, stalls: bool) -> None:
        for offset, num_bytes in _extents(run.num_bytes):
            num_frames = offset // self._arena.page_size
            source, reads = self._device_side(run.frame + num_frames, num_bytes)
            self._write_disk(home_frame + num_frames, num_bytes, source, reads, stalls=stalls)

    def _write_disk(
        self, home_frame: int, num_bytes: int, source: torch.Tensor, reads: Region | None, *, stalls: bool
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
        target, writes = self._host_side(home_frame, segment.num_bytes)
        d2h.copy(target, raw, reads=None, writes=writes)
        self._counters.add(page_out_bytes=segment.num_bytes)
        event = self._home_written[segment.index] = d2h.record()
        self._sent.append((event, source))

    def forget_sent(self) -> None:
        """Let go of sources whose copies are over."""
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()

    def send_to_device(self, run: Run) -> Event:
        """Enqueue the copy of a home that the host has written into a run on the device; the event after which the run
        may be used.
        """
        h2d = self._device.h2d
        for before in run.last_events().values():
            h2d.wait(before)
        home, home_frame = self._home(run)
        assert home == Home.HOST
        source, reads = self._host_side(home_frame, run.num_bytes)
        target, writes = self._device_side(run.frame, run.num_bytes)
        h2d.copy(target, source, reads=reads, writes=writes)
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
            event = events.get(segment.index)
            if event is not None:
                event.synchronize()  # first: an interrupted wait must be known to whoever asks again
                events.pop(segment.index, None)

    def _home(self, run: Run) -> tuple[int, int]:
        """The tier of a run's home, and its first frame there; a segment's home frames lie side by side."""
        return int(self._table.home[run.begin]), int(self._table.home_frame[run.begin])

    def _device_side(self, frame: int, num_bytes: int) -> tuple[torch.Tensor, Region | None]:
        """The memory of frames, and what the checker is told of it."""
        memory = self._arena.bytes_of(frame, num_bytes)
        if self._device.checker is None:
            return memory, None
        return memory, Region("device", frame, frame + -(-num_bytes // self._arena.page_size))

    def _host_side(self, frame: int, num_bytes: int) -> tuple[torch.Tensor, Region | None]:
        memory = self._host.view(frame, num_bytes)
        if self._device.checker is None:
            return memory, None
        return memory, Region("host", frame, frame + -(-num_bytes // self._arena.page_size))


def _extents(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the extents of a run, each a multiple of every page size but the last."""
    return [(offset, min(EXTENT_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, EXTENT_BYTES)]
