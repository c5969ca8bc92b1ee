"""The queue of the disk: reads and writes on threads of their own, through the ring.

The problem: a disk is twenty times slower than the link and fast only with several requests under way; so nobody may
wait for one that is not needed now, reads and writes have to overlap with each other and with everything else, and all
of it has to stay exact while pages are written, read again and thrown away out of order.

The protocol. Requests are extents, numbered as they come.

write   the caller takes a slot (and waits for one only where writes have used up theirs), has the link fill it,
        and goes on: from here the slot is the page's good copy. A thread waits for the link, writes, and frees the
        slot.
read    a thread takes a slot, fills it, hands it to ``Job.use``, which puts the copy to the device on the link, and
        frees it behind that copy's event. When all reads of a job are done ``Job.finish`` is called, on the thread.

Order among requests of the same frames:

1. A read sees the newest write before it. What is still in a slot is copied from there: it waits for no disk, and no
   read meets a write on the disk.
2. A write waits for the earlier writes and reads of its frames. So the last write is what stays.

A write that fails keeps its slot, and with it the page's only copy: reads are served from there. The error is raised
once, at the next fault or step (``take_failure``), and again when the disk has been well in between. Meanwhile further
writes are kept in host memory beyond the ring, as far as there is room for that: so a model can still be saved. Each of
them has one of the failed tried again; when that succeeds, all are. Without room a write is refused, with its page
where it was.

Reads come first while somebody stands still for them, else the two alternate. Writes leave one slot to reads, whose
slots always come back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pager.engine.disk_requests import (
    Job,
    Piece,
    Read,
    Request,
    Write,
    blocks_of,
    next_write,
    pieces_of,
    stripped,
)
from pager.engine.disk_workers import Workers
from pager.errors import TierError
from pager.units import ceil_div

if TYPE_CHECKING:
    from pager.device.base import Device, Event
    from pager.engine.disk_requests import Extent, Fill
    from pager.engine.ring import Ring, Slot
    from pager.statistics import Counters
    from pager.tiers.base import BackingTier

logger = logging.getLogger("pager.engine.disk_queue")


class DiskQueue(Workers):
    """Requests to one disk. Safe to call from any thread; ``changed`` guards everything."""

    def __init__(
        self,
        disk: BackingTier,
        ring: Ring,
        device: Device,
        counters: Counters,
        *,
        num_threads: int,
        spare_room: Callable[[], int],
        inline: str | None = None,
    ) -> None:
        """``spare_room``: bytes of host memory that slots beyond the ring may take, once writes fail."""
        super().__init__(num_threads, inline)
        self.ring = ring
        self._disk = disk
        self._device = device
        self._counters = counters
        self._spare_room = spare_room
        self._number = 0
        self._reads: deque[Read] = deque()
        self._moving_reads: list[Read] = []
        # All writes whose slot is the good copy, in order: waiting, moving or failed.
        self._held: list[Write] = []
        self._moving_writes: list[Write] = []
        self._num_taken_for_writes = 0
        self._failure: BaseException | None = None
        self._is_told = False

    # -- reads -------------------------------------------------------------------------------------

    def read(self, job: Job, extents: Sequence[Extent]) -> None:
        """Begin to read; see :class:`Job` and the head of this file."""
        with self.changed:
            self._check_open()
            job.num_left = len(extents)
            reads = [
                Read(*self._numbered(extent.frame, extent.num_bytes), job, extent.offset)
                for extent in extents
            ]
            if job.is_urgent:
                self._reads.extendleft(reversed(reads))
            else:
                self._reads.extend(reads)
            self._start()
        self._run_early()

    def hurry(self, job: Job) -> None:
        """Somebody stands still for this job: it comes first from now on."""
        with self.changed:
            if not job.is_urgent:
                job.is_urgent = True
                self._reads = deque(sorted(self._reads, key=lambda read: read.job is not job))

    def join(self, job: Job) -> None:
        """Wait until a job is done. Raises what it failed with."""
        self.hurry(job)
        self._wait_until(lambda: job.is_done)
        if job.error is not None:
            raise job.error

    def _finish(self, job: Job) -> None:
        with job.lock:
            if not job.is_cancelled and job.finish is not None:
                try:
                    job.finish(job)
                except BaseException as error:
                    job.error = job.error or stripped(error)
        with self.changed:
            job.is_done = True
            self.changed.notify_all()

    # -- writes ------------------------------------------------------------------------------------

    def write(self, frame: int, num_bytes: int, fill: Fill, *, must: bool = False) -> Write:
        """Write what ``fill`` puts into a slot.

        Waits where writes have all their slots. Raises what an earlier write fails with again, if there is no room to
        keep this one in host memory meanwhile; then nothing is done. If it ``must`` be, room is taken all the same.
        """
        slot = self._take_for_write(blocks_of(num_bytes), must=must)
        try:
            filled = fill(slot.memory[:num_bytes], slot.region)
        except BaseException:
            with self.changed:
                self._give_back(slot, None)
            raise
        with self.changed:
            write = Write(*self._numbered(frame, num_bytes), slot, filled)
            self._held.append(write)
            self._supersede_by(write)
            self._start()
        self._run_early()
        return write

    def _take_for_write(self, num_bytes: int, *, must: bool) -> Slot:
        taken: list[Slot] = []

        def take() -> bool:
            self._check_open()
            slot = self.ring.take() if self._num_taken_for_writes < self.ring.num_slots - 1 else None
            failed = next((write for write in self._held if write.error is not None), None)
            if failed is not None:
                is_refused = not must and not self._may_spare(num_bytes)
                if slot is None and not is_refused:
                    slot = self.ring.make_spare(num_bytes)
                if is_refused and slot is not None:
                    self.ring.give(slot, slot.busy)
                    slot = None
                if slot is None:
                    return True
                self._repeat(failed)
            if slot is not None:
                self._num_taken_for_writes += 1
                taken.append(slot)
            return bool(taken)

        self._wait_until(take)
        while not taken:
            self.check_writes()
            self._wait_until(take)
        taken[0].settle()
        return taken[0]

    def _may_spare(self, num_bytes: int) -> bool:
        return self.ring.spare_bytes + num_bytes <= self._spare_room()

    def _repeat(self, write: Write) -> None:
        """A write that failed is tried again (locked)."""
        write.error, write.is_repeated = None, True
        self.changed.notify_all()

    def has_room(self, num_bytes: int) -> bool:
        """Whether no write has failed, or as much as ``num_bytes`` that cannot be written can be kept."""
        with self.changed:
            # In this order: what may be kept is asked of the system, and nearly always no write has failed.
            return all(write.error is None for write in self._held) or self._may_spare(num_bytes)

    def check_writes(self) -> None:
        """Try failed writes again; raises the first's error if one fails again, which so counts as told.

        What is no failure of the disk is a bug, and would not get better.
        """
        with self.changed:
            failed = [write for write in self._held if write.error is not None]
            for write in failed:
                if write.error is not None and not isinstance(write.error, TierError):
                    raise write.error
            for write in failed:
                self._repeat(write)
        if not failed:
            return
        self._wait_until(lambda: all(write.is_done or write.error is not None for write in failed))
        with self.changed:
            errors = [write.error for write in failed if write.error is not None]
            self._failure, self._is_told = None, bool(errors)
        if errors:
            raise errors[0]
        logger.warning("%d writes to the disk failed, and succeeded when they were tried again", len(failed))

    def wait_for_writes(self, writes: Sequence[Write]) -> None:
        """Wait until these are on the disk. Raises what one fails with; then none of them is held any more."""
        errors: list[BaseException] = []

        def are_over() -> bool:
            if not all(write.is_done or write.error is not None for write in writes):
                return False
            for write in writes:
                if write.error is not None:
                    errors.append(write.error)
                    self._failure = None
                    self._let_go(write)
            return True

        self._wait_until(are_over)
        if errors:
            raise errors[0]

    def settle(self) -> None:
        """Wait until everything is on the disk. Raises what a write fails with, twice; its bytes stay in the ring."""
        while True:
            self.check_writes()
            self._wait_until(lambda: not self._held or any(write.error is not None for write in self._held))
            with self.changed:
                if not self._held:
                    return

    def drop(self, first_frame: int, num_frames: int) -> None:
        """Nobody wants what these frames hold: forget writes, and wait for what is under way."""
        dropped = Request(0, first_frame, first_frame + num_frames, 0)

        def is_still() -> bool:
            for write in [write for write in self._held if write.overlaps(dropped)]:
                if write not in self._moving_writes:
                    self._let_go(write)
            busy = (*self._moving_reads, *self._reads, *self._moving_writes)
            return not any(request.overlaps(dropped) for request in busy)

        self._wait_until(is_still)

    def take_failure(self) -> BaseException | None:
        """What a write failed with since nobody asked."""
        if self._failure is None:
            return None
        with self.changed:
            error, self._failure = self._failure, None
        return error

    def _supersede_by(self, write: Write) -> None:
        """Let go of writes that nobody needs any more (locked): their frames have a newer value, and no read waits.

        Else a disk that takes nothing for a while would keep every value that its pages have had meanwhile.
        """
        for older in [held for held in self._held if held is not write]:
            is_covered = write.begin <= older.begin and older.end <= write.end
            if not is_covered or older in self._moving_writes or older.num_readers:
                continue
            if not any(read.overlaps(older) for read in (*self._reads, *self._moving_reads)):
                self._let_go(older)

    def _let_go(self, write: Write) -> None:
        """A write is done, or not wanted (locked)."""
        write.is_done = True
        self._held.remove(write)
        if not write.num_readers:
            self._give_back(write.slot, write.filled)
        self.changed.notify_all()

    def _give_back(self, slot: Slot, busy: Event | None) -> None:
        self._num_taken_for_writes -= 1
        self.ring.give(slot, busy)
        self.changed.notify_all()

    # -- choosing ----------------------------------------------------------------------------------

    def _pick(self) -> Callable[[], None] | None:
        """The next thing to do (locked), begun; None if there is nothing that can be done now."""
        if self.closed.is_set():
            return None
        read = self._reads[0] if self._reads else None
        if read is not None and (read.job.is_cancelled or read.job.error is not None):
            self._reads.popleft()
            return lambda: self._end_read(read, None, None, None)
        write = next_write(self._held, self._moving_writes, (*self._moving_reads, *self._reads))
        can_read = read is not None and self.ring.has_free
        if read is not None and can_read:
            alternate = len(self._moving_reads) <= len(self._moving_writes)
            if write is None or read.job.is_urgent or alternate:
                return self._begin_read(read)
        if write is not None:
            self._moving_writes.append(write)
            chosen = write
            return lambda: self._run_write(chosen)
        return None

    def _begin_read(self, read: Read) -> Callable[[], None]:
        slot = self.ring.take()
        assert slot is not None
        self._reads.popleft()
        self._moving_reads.append(read)
        pieces = pieces_of(read, self._held)
        for piece in pieces:
            if piece.write is not None:
                piece.write.num_readers += 1
        return lambda: self._run_read(read, slot, pieces)

    # -- doing -------------------------------------------------------------------------------------

    def _run_read(self, read: Read, slot: Slot, pieces: list[Piece]) -> None:
        job = read.job
        busy: Event | None = None
        failure: BaseException | None = None
        try:
            slot.settle()
            self._device.host_touch(slot.region, write=True)
            for piece in pieces:
                self._fill(read, slot, piece)
            with job.lock:
                if not job.is_cancelled:
                    busy = job.use(read.offset, slot.memory[: read.num_bytes], slot.region)
        except BaseException as error:
            failure = stripped(error)
        self._end_read(read, slot, busy, failure, pieces)

    def _fill(self, read: Read, slot: Slot, piece: Piece) -> None:
        page_size = self._disk.page_size
        offset = (piece.begin - read.begin) * page_size
        num_bytes = min((piece.end - piece.begin) * page_size, read.block_bytes - offset)
        target = slot.memory[offset : offset + num_bytes]
        if piece.write is None:
            moved = self._disk.read(piece.begin, target)
            plain = min(num_bytes, read.num_bytes - offset)
            self._counters.add(disk_read_bytes=min(moved, plain), disk_saved_bytes=max(plain - moved, 0))
            return
        write = piece.write
        if write.filled is not None:
            write.filled.synchronize()
        self._device.host_touch(write.slot.region, write=False)
        begin = (piece.begin - write.begin) * page_size
        target.copy_(write.slot.memory[begin : begin + num_bytes])

    def _end_read(
        self,
        read: Read,
        slot: Slot | None,
        busy: Event | None,
        failure: BaseException | None,
        pieces: Sequence[Piece] = (),
    ) -> None:
        job = read.job
        with self.changed:
            if slot is not None:
                self._moving_reads.remove(read)
                self.ring.give(slot, busy)
            for piece in pieces:
                if piece.write is not None:
                    piece.write.num_readers -= 1
                    if piece.write.is_done and not piece.write.num_readers:
                        self._give_back(piece.write.slot, piece.write.filled)
            job.error = job.error or failure
            job.num_left -= 1
            is_last = job.num_left == 0
            self.changed.notify_all()
        if is_last:
            self._finish(job)

    def _run_write(self, write: Write) -> None:
        failure: BaseException | None = None
        try:
            if write.filled is not None:
                write.filled.synchronize()
            self._device.host_touch(write.slot.region, write=False)
            moved = self._disk.write(write.begin, write.slot.memory[: write.block_bytes])
            self._counters.add(
                disk_write_bytes=min(moved, write.num_bytes),
                disk_saved_bytes=max(write.num_bytes - moved, 0),
            )
        except BaseException as error:
            failure = stripped(error)
        with self.changed:
            self._moving_writes.remove(write)
            if failure is None:
                self._let_go(write)
                self._is_told = False
                for other in self._held if write.is_repeated else ():
                    if isinstance(other.error, TierError):
                        self._repeat(other)
            else:
                write.error = failure
                if not self._is_told and not write.is_repeated:
                    self._failure, self._is_told = failure, True
                self.changed.notify_all()

    def _numbered(self, frame: int, num_bytes: int) -> tuple[int, int, int, int]:
        self._number += 1
        return self._number, frame, frame + ceil_div(num_bytes, self._disk.page_size), num_bytes
