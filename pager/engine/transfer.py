"""Moving a run's bytes between the device and its home. Bytes only: no page changes its state here.

Every copy is put on the stream of its direction and ordered by events alone:

page in  (stream h2d)   waits for the frames' fence (their former users) and the last write of the home copy
page out (stream d2h)   waits for the last uses of the run, for a page in that still reads the home frames, and for the
                        last write of them

Slots of the update (`pager.engine.staging`) have a stream of their own in each direction: their copies wait for
updates, and what the compute needs next must not stand behind them.

A home on disk goes through the ring, in the background (`pager.engine.disk_transfer`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from pager.device.base import Region
from pager.engine.disk_transfer import DiskTransfers
from pager.interrupts import uninterrupted, whole
from pager.page_table import Home
from pager.tiers.device_arena import merge_fence
from pager.tiers.disk_probe import DEFAULT_DEPTH, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pager.address_space import Segment
    from pager.device.base import Device, Event, Stream
    from pager.engine.disk_requests import Job
    from pager.engine.run import Run
    from pager.page_table import PageTable
    from pager.statistics import Counters
    from pager.tiers.base import BackingTier
    from pager.tiers.device_arena import DeviceArena, Fence
    from pager.tiers.disk_probe import RingShape
    from pager.tiers.host_arena import HostArena

# One copy of 16 MiB reaches 54.6 of 55.1 GB/s (DESIGN, section 5); larger ones only delay the first event.
EXTENT_BYTES = 16 * 2**20
_NO_EVENTS: Fence = {}


class _Sent(NamedTuple):
    """A tensor that is read until ``event``; its memory is torch's, and used again on the stream ``owner``."""

    event: Event
    owner: Stream
    source: torch.Tensor
    num_bytes: int


class Transfers:
    """Copies runs in and out. Thread-safe: the streams and the disk's queue are."""

    def __init__(
        self,
        *,
        device: Device,
        table: PageTable,
        arena: DeviceArena,
        host: HostArena,
        disk: BackingTier | None,
        counters: Counters,
        ring_shape: RingShape | None = None,
        spare_room: Callable[[], int] = int,
        disk_inline: str | None = None,
    ) -> None:
        """``spare_room``, ``disk_inline``: see `pager.engine.disk_queue`."""
        self._device = device
        self._table = table
        self._arena = arena
        self._host = host
        self._counters = counters
        # Of each segment, the last event of each stream. Other threads read them without a lock: a fence that stands
        # here is replaced, never changed.
        self._lock = threading.Lock()
        self._home_written: dict[int, Fence] = {}
        self._home_read: dict[int, Fence] = {}
        self._sent: deque[_Sent] = deque()
        self._sent_bytes = 0
        self._disk: DiskTransfers | None = None
        if disk is not None:
            self._disk = DiskTransfers(
                device=device,
                arena=arena,
                disk=disk,
                counters=counters,
                shape=ring_shape or shape_of(DEFAULT_DEPTH),
                spare_room=spare_room,
                inline=disk_inline,
            )

    # -- device <- home ----------------------------------------------------------------------------

    def page_in(self, run: Run, *, stalls: bool = True) -> None:
        """Enqueue the copies that fill ``run``; sets ``run.ready``. Raises TierIOError if the disk fails.

        ``stalls``: the training stands still meanwhile, so that waiting for a disk counts as a stall.
        """
        self.page_in_all([run], stalls=stalls)

    def page_in_all(self, runs: Sequence[Run], *, stalls: bool = True) -> None:
        """The same for several runs at once: those from host memory have one event, and h2d waits once for each
        stream. Waits for those from a disk.
        """
        jobs: list[Job] = []
        done = False
        try:
            with uninterrupted():  # a job that nobody knows of would fill frames that were given up
                jobs += self.begin_page_in(runs, urgent=stalls)
            for job in jobs:
                self.join(job, stalls=stalls)
            done = True
        finally:
            for job in jobs if not done else ():
                job.cancel()

    def begin_page_in(
        self,
        runs: Sequence[Run],
        *,
        urgent: bool = False,
        then: Callable[[BaseException | None], None] | None = None,
        stream: Stream | None = None,
    ) -> list[Job]:
        """Begin :meth:`page_in_all`: the jobs of those from a disk, whose ``ready`` is set when their job is done.

        ``stream``: for those from host memory, instead of h2d. ``then`` is called at the end of each job, on another
        thread, with what it failed with.
        """
        homes = [self._home(run) for run in runs]
        jobs: list[Job] = []
        done = False
        try:
            for run, (home, frame) in zip(runs, homes, strict=True):
                if home == Home.DISK:
                    assert self._disk is not None
                    jobs.append(self._disk.begin_page_in(run, frame, urgent=urgent, then=then))
            self._page_in_from_host(
                [(run, frame) for run, (home, frame) in zip(runs, homes, strict=True) if home == Home.HOST],
                stream or self._device.h2d,
            )
            done = True
        finally:
            for job in jobs if not done else ():
                job.cancel()
        self._counters.add(page_in_bytes=sum(run.num_bytes for run in runs))
        return jobs

    def join(self, job: Job, *, stalls: bool = True) -> None:
        """Wait for a page in from a disk. Raises what it failed with."""
        assert self._disk is not None
        self._disk.join(job, stalls=stalls)

    @whole
    def _page_in_from_host(self, found: Sequence[tuple[Run, int]], stream: Stream) -> None:
        """Runs, each with the first frame of its home. The copies and the event that tells of them are one act for a
        signal's handler.
        """
        if not found:
            return
        before: Fence = {}
        for run, _ in found:
            merge_fence(before, run.fence)
            merge_fence(before, self._home_written.get(run.segment.index, _NO_EVENTS))
        for event in before.values():
            stream.wait(event)
        for frame, home_frame, num_bytes in self._copies(found):
            source, reads = self._host_side(home_frame, num_bytes)
            target, writes = self._device_side(frame, num_bytes)
            stream.copy(target, source, reads=reads, writes=writes)
        ready = stream.record()
        for run, _ in found:
            run.ready = ready
        self._note(self._home_read, [run.segment for run, _ in found], ready)

    def _copies(self, found: Iterable[tuple[Run, int]]) -> list[tuple[int, int, int]]:
        """First frame, first frame at home, and bytes of each copy between runs and their homes in host memory.

        A run is one copy, since the engine of the link takes any length at full speed; and so are runs that lie side by
        side at both ends, as the states of a parameter do: each costs the host as much as a kernel.
        """
        page_size = self._arena.page_size
        copies: list[tuple[int, int, int]] = []
        for run, home in found:
            num_bytes = run.num_bytes
            if copies:
                frame, first, before = copies[-1]
                num_pages = before // page_size  # where the last one is partly used, nothing follows
                if (
                    run.frame == frame + num_pages
                    and home == first + num_pages
                    and self._arena.is_one_slab(frame, num_pages + run.num_pages)
                    and self._host.is_one_piece(first, num_pages + run.num_pages)
                ):
                    copies[-1] = (frame, first, before + num_bytes)
                    continue
            copies.append((run.frame, home, num_bytes))
        return copies

    def _note(self, events: dict[int, Fence], segments: Iterable[Segment], event: Event) -> None:
        """One more access to homes. What another thread noted meanwhile, of other pages on another stream, stays."""
        newest = {event.stream.index: event}
        with self._lock:
            for segment in segments:
                fence = dict(events.get(segment.index, _NO_EVENTS))
                merge_fence(fence, newest)
                events[segment.index] = fence

    # -- device -> home ----------------------------------------------------------------------------

    def page_out(self, run: Run, *, stalls: bool = True) -> Event:
        """Enqueue the copies of ``run`` towards its home; the event after which its frames are not read any more.

        A home in host memory is good then; one on disk is written in the background, and until then the ring holds
        its value. ``stalls`` as for :meth:`page_in`. Raises TierError; then the run is as it was.
        """
        return self.page_out_all([run], stalls=stalls)

    @whole
    def page_out_all(
        self, runs: Sequence[Run], *, stalls: bool = True, must: bool = False, stream: Stream | None = None
    ) -> Event:
        """The same for several runs at once, with one event for all. ``must``: a disk that fails refuses nothing.
        ``stream``: where all homes are in host memory, instead of d2h.

        A copy and the event that tells of it are one act for a signal's handler.
        """
        homes = [self._home(run) for run in runs]
        if stream is None or any(home != Home.HOST for home, _ in homes):
            stream = self._device.d2h
        before: Fence = {}
        for run in runs:
            merge_fence(before, run.last_events())
            merge_fence(before, self._home_accesses(run.segment))
        for event in before.values():
            stream.wait(event)
        to_host: list[tuple[Run, int]] = []
        for run, (home, home_frame) in zip(runs, homes, strict=True):
            if home == Home.HOST:
                to_host.append((run, home_frame))
            else:
                assert self._disk is not None
                self._disk.page_out(run, home_frame, stalls=stalls, must=must)
        for frame, home_frame, num_bytes in self._copies(to_host):
            source, reads = self._device_side(frame, num_bytes)
            target, writes = self._host_side(home_frame, num_bytes)
            stream.copy(target, source, reads=reads, writes=writes)
        event = stream.record()
        self._note(self._home_written, [run.segment for run, _ in to_host], event)
        self._counters.add(page_out_bytes=sum(run.num_bytes for run in runs))
        return event

    def _home_accesses(self, segment: Segment) -> Fence:
        """The last copies from and to a home in host memory: who writes it waits for them."""
        fence = dict(self._home_written.get(segment.index, _NO_EVENTS))
        merge_fence(fence, self._home_read.get(segment.index, _NO_EVENTS))
        return fence

    # -- the host's own access to homes ------------------------------------------------------------

    def home_bytes(self, segment: Segment, *, write: bool) -> torch.Tensor | None:
        """The segment's home in host memory as uint8, after waiting for copies under way; None if it is
        elsewhere.
        """
        if int(self._table.home[segment.first_page]) != Home.HOST:
            return None
        for event in list(self._home_written.get(segment.index, {}).values()):
            event.synchronize()
        for event in list(self._home_read.get(segment.index, {}).values()) if write else ():
            event.synchronize()
        home_frame = int(self._table.home_frame[segment.first_page])
        self._device.host_touch(Region("host", home_frame, home_frame + segment.num_pages), write=write)
        return self._host.view(home_frame, segment.num_bytes)

    def home_view(self, segment: Segment) -> torch.Tensor:
        """The segment's home in host memory as uint8, without waiting for anything: see :meth:`home_bytes`."""
        return self._host.view(int(self._table.home_frame[segment.first_page]), segment.num_bytes)

    def send_home(self, segment: Segment, source: torch.Tensor, *, at_most_bytes: int) -> None:
        """Enqueue the copy of ``source``, a dense tensor on the device that is no frame of ours, into the segment's
        home in host memory, behind what is on the current stream. ``source`` is kept alive as long as needed.

        Where more than ``at_most_bytes`` are kept so, the streams that made the oldest wait for their copies: the host
        may be far ahead of the device, and back-pressure takes less memory than storage.
        """
        self.forget_sent()
        d2h, owner = self._device.d2h, self._device.current_stream()
        d2h.wait(owner.record())
        for before in self._home_accesses(segment).values():
            d2h.wait(before)
        raw = torch.empty(0, dtype=torch.uint8, device=source.device)
        offset = int(source.storage_offset()) * source.element_size()
        raw.set_(source.untyped_storage(), offset, (segment.num_bytes,), (1,))
        home_frame = int(self._table.home_frame[segment.first_page])
        target, writes = self._host_side(home_frame, segment.num_bytes)
        d2h.copy(target, raw, reads=None, writes=writes)
        self._counters.add(page_out_bytes=segment.num_bytes)
        event = d2h.record()
        self._note(self._home_written, [segment], event)
        # Kept until the lock is free again: what dies with them may come back here.
        dropped: list[_Sent] = []
        with self._lock:
            self._sent.append(_Sent(event, owner, source, segment.num_bytes))
            self._sent_bytes += segment.num_bytes
            while len(self._sent) > 1 and self._sent_bytes > at_most_bytes:
                oldest = self._sent[0]
                oldest.owner.wait(oldest.event, timed=True)
                dropped.append(self._drop_oldest_sent())

    @property
    def has_sent(self) -> bool:
        """Whether sources of copies are kept alive."""
        return bool(self._sent)

    def forget_sent(self) -> None:
        """Let go of sources whose copies are over."""
        dropped: list[_Sent] = []
        with uninterrupted(), self._lock:
            while self._sent and self._sent[0].event.query():
                dropped.append(self._drop_oldest_sent())

    def _drop_oldest_sent(self) -> _Sent:
        oldest = self._sent.popleft()
        self._sent_bytes -= oldest.num_bytes
        return oldest

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
        event = h2d.record()
        self._note(self._home_read, [run.segment], event)
        return event

    def read_disk_home(self, segment: Segment) -> torch.Tensor:
        """A copy of a segment whose home is the disk, uint8 on the CPU. Raises TierError."""
        assert self._disk is not None
        return self._disk.read_home(segment, int(self._table.home_frame[segment.first_page]))

    def write_disk_home(self, segment: Segment, source: torch.Tensor) -> None:
        """Write all of a segment (uint8 on the CPU) to its home on disk, and wait for it. Raises TierError."""
        assert self._disk is not None
        self._disk.write_home(segment, int(self._table.home_frame[segment.first_page]), source)

    # -- homes that move ---------------------------------------------------------------------------

    def write_to_disk(self, segments: Sequence[Segment], frames: Sequence[int]) -> None:
        """Write the values of homes in host memory to frames of the disk that nobody uses, and wait for it. Raises
        TierError: then what the frames hold is undefined, and nothing is under way to them.
        """
        assert self._disk is not None
        homes = [self.home_bytes(segment, write=False) for segment in segments]
        self._disk.write_all(
            [(frame, home) for frame, home in zip(frames, homes, strict=True) if home is not None]
        )

    def read_from_disk(self, segments: Sequence[Segment], frames: Sequence[int]) -> None:
        """Read the values of homes on disk into frames of host memory that nobody uses. Raises TierError."""
        assert self._disk is not None
        for segment, frame in zip(segments, frames, strict=True):
            self._device.host_touch(Region("host", frame, frame + segment.num_pages), write=True)
            home_frame = int(self._table.home_frame[segment.first_page])
            self._disk.read_home(segment, home_frame, self._host.view(frame, segment.num_bytes))

    @property
    def bytes_to_come(self) -> int:
        """Host memory that is not taken yet, and will be with the first byte to or from a disk."""
        return 0 if self._disk is None else self._disk.bytes_to_come

    def forget(self, segment: Segment) -> None:
        """Drop the events of a segment that is no more, after they have passed, and what the disk is to do for it."""
        for events in (self._home_written, self._home_read):
            for event in list(events.get(segment.index, {}).values()):
                event.synchronize()  # first: an interrupted wait must be known to whoever asks again
            events.pop(segment.index, None)
        home_frame = int(self._table.home_frame[segment.first_page])
        if int(self._table.home[segment.first_page]) == Home.DISK and home_frame >= 0:
            assert self._disk is not None
            self._disk.forget(segment, home_frame)

    # -- the disk's background ---------------------------------------------------------------------

    def check_writes(self, num_bytes: int) -> None:
        """Try writes to the disk again that have failed, if so much more could not be kept. Raises TierError if one
        fails again; its bytes are safe.
        """
        if self._disk is not None:
            self._disk.check_writes(num_bytes)

    def hurry(self, run: Run) -> None:
        """Somebody stands still for a run that is on its way from a disk."""
        if self._disk is not None and run.arrival is not None:
            self._disk.queue.hurry(run.arrival)

    def take_failure(self) -> BaseException | None:
        """What a write to the disk failed with in the background: once."""
        return None if self._disk is None else self._disk.take_failure()

    def advance(self) -> bool:
        """Where the disk has no threads: do one thing for it; whether there was one."""
        return self._disk is not None and self._disk.advance()

    def settle(self) -> None:
        """Wait until the disk has all that is to be written. Raises TierError; nothing is lost then."""
        if self._disk is not None:
            self._disk.settle()

    def stop(self) -> None:
        """Nothing is moved from or to the disk any more; what was to be written and has not been is dropped."""
        if self._disk is not None:
            self._disk.stop()

    def close(self) -> None:
        """Give the buffers back, after the copies that use them are over. Idempotent."""
        if self._disk is not None:
            self._disk.close()

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
