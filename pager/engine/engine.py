"""The engine: brings pages to the device when they are used, and keeps the promise that none is ever lost.

``acquire`` serves one access in numbered phases:

1. look up (locked)   a run that covers the pages: pin it and go on; one whose move is being issued: wait
2. place (locked)     take frames, evicting by next use where there are none (`pager.engine.reclaim`)
3. move               enqueue the copies; nobody else may use the run yet
4. publish (locked)   pin it for who faulted; others may use it too; streams wait for the copies by event

Every use is a *lease*: a fresh tensor over the frames whose storage has an owner of ours. Its death puts a
note on a `SimpleQueue` (it may die inside garbage collection, under any lock), and the next entry of the
engine works the notes off: records one event on the stream that used the frames, sees whether the tensor's
version moved (then the pages are dirty), unpins.

One lock guards all metadata; it is held for microseconds and never over a copy, an I/O, a callback or a log
call.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pager.device.base import Region
from pager.engine.reclaim import Reclaimer
from pager.engine.run import Run
from pager.engine.timeline import Timeline
from pager.engine.transfer import EXTENT_BYTES
from pager.errors import BudgetError, PagerInternalError
from pager.page_table import Home, PageState
from pager.tiers.device_arena import merge_fence
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from pager.address_space import AddressSpace, Segment
    from pager.device.base import Device, Event, Stream
    from pager.engine.transfer import Transfers
    from pager.page_table import PageTable
    from pager.policies.protocol import EvictionPolicy
    from pager.statistics import Counters
    from pager.tiers.device_arena import DeviceArena


class NoRoom(Exception):
    """No window of frames can be freed for a run now. Internal: users see BudgetError."""


class Engine:
    """Faults, leases, eviction. Safe to call from several threads."""

    def __init__(
        self,
        *,
        device: Device,
        space: AddressSpace,
        table: PageTable,
        arena: DeviceArena,
        transfers: Transfers,
        policy: EvictionPolicy,
        counters: Counters,
        poison: bool,
    ) -> None:
        self.device = device
        self.space = space
        self.table = table
        self.arena = arena
        self.transfers = transfers
        self.policy = policy
        self.counters = counters
        self.timeline = Timeline()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.reclaimer = Reclaimer(self)
        self.failure: BaseException | None = None
        self.demand = 0
        self.moves = 0
        # Up to this position of the timeline pagerd has seen to it that pages are there; evictions move it
        # back.
        self.horizon = 0
        self.num_prefetched_extents = 0
        self.on_access: Callable[[], None] = _nothing
        self._poison = poison
        self._runs: dict[int, list[Run]] = {}
        self._versions: dict[int, Callable[[], int]] = {}
        self._released: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._evicted_once: set[int] = set()

    # -- segments ----------------------------------------------------------------------------------

    def register(self, segment: Segment, version: Callable[[], int]) -> None:
        """Make a segment known; ``version`` answers the version counter of its tensor."""
        with self.lock:
            self._versions[segment.index] = version
            self._runs[segment.index] = []
            self.timeline.resize(len(self.space.segments))
            self.policy.resize(len(self.space.segments))

    def unregister(self, segment: Segment) -> None:
        """Forget a segment without a value; its index is never used again."""
        self.transfers.forget(segment)
        with self.lock:
            # Notes of leases on its orphans may still come; they ask for its runs, but never for its version.
            self._versions.pop(segment.index, None)

    def resident_runs(self) -> Iterator[Run]:
        """All runs on the device."""
        for runs in self._runs.values():
            yield from runs

    def runs_of(self, segment: Segment) -> list[Run]:
        """The segment's runs on the device."""
        return list(self._runs[segment.index])

    def runs_over(self, segment: Segment, first: int, num_pages: int) -> list[Run]:
        """The segment's runs that hold any of these pages."""
        return [run for run in self._runs[segment.index] if run.overlaps(first, num_pages)]

    def forget_run(self, run: Run) -> None:
        """A run left the device (locked): free its frames behind a fence."""
        if run in self._runs[run.segment.index]:
            self._runs[run.segment.index].remove(run)
        fence = run.last_events()
        frame, num_pages = run.frame, run.num_pages
        run.frame = -1
        if self._poison:
            fence = self._poison_frames(frame, num_pages, fence)
        self.arena.free(frame, fence)
        self._evicted_once.add(run.segment.index)
        self._no_longer_prefetched(run)
        self.horizon = min(self.horizon, self.timeline.next_use(run.segment.index))
        self.policy.record_evict(np.array([run.segment.index], np.int64))
        self.counters.sample_resident(self.arena.resident_bytes)
        self.changed.notify_all()

    def _poison_frames(self, frame: int, num_pages: int, fence: dict) -> dict:
        h2d = self.device.h2d
        for event in fence.values():
            h2d.wait(event)
        memory = self.arena.bytes_of(frame, num_pages * self.arena.page_size)
        h2d.fill(memory, 0xFF, writes=Region("device", frame, frame + num_pages))
        event = h2d.record()
        return {event.stream.index: event}

    # -- faults ------------------------------------------------------------------------------------

    def acquire(self, segment: Segment, first: int, num_pages: int, *, overwrite: bool = False) -> Run:
        """Pin pages on the device and make the current stream wait for them.

        ``overwrite``: the caller writes every byte, so nothing is read from the home.
        Raises NoRoom, TierError, and whatever pagerd failed with meanwhile.
        """
        self.raise_failure()
        self.drain()
        stream = self.device.current_stream()
        counted = False
        while True:
            with self.lock:
                run = self._find(segment, first, num_pages)
                if run is not None:
                    if run.leaving or not run.issued:
                        self.changed.wait()
                        continue
                    self._pin(run)
                    break
                others = self.runs_over(segment, first, num_pages)
            if others:
                self._withdraw(segment, others)
                continue
            if not counted:
                counted = True
                with self.lock:
                    self._count_fault(segment, overwrite)
            run = self._page_in(segment, first, num_pages, overwrite=overwrite, sooner_than=None)
            if run is not None:
                break
        try:
            self._begin_use(run, stream, overwrite=overwrite, faulted=counted)
            self.on_access()
        except BaseException:
            self.release(run)
            raise
        return run

    def _begin_use(self, run: Run, stream: Stream, *, overwrite: bool, faulted: bool) -> None:
        with self.lock:
            self._count_use(run, faulted)
            self.policy.record_access(run.segment.index, self.timeline.position)
            waits: list[Event] = []
            if stream.index not in run.waited:
                waits += run.fence.values() if run.ready is None else [run.ready]
        for event in waits:
            stream.wait(event, timed=True)
        with self.lock:
            run.waited.add(stream.index)
            run.users[stream.index] = stream
        stream.touch(run.region, write=overwrite)
        if overwrite:
            self.mark_dirty(run)

    def _find(self, segment: Segment, first: int, num_pages: int) -> Run | None:
        for run in self._runs[segment.index]:
            if run.covers(first, num_pages):
                return run
        return None

    def _pin(self, run: Run) -> None:
        run.pins += 1
        self.table.pin(run.begin, run.end)

    def _unpin(self, run: Run) -> None:
        run.pins -= 1
        if not run.orphan:
            self.table.unpin(run.begin, run.end)

    def _count_fault(self, segment: Segment, overwrite: bool) -> None:
        if overwrite:
            self.counters.hits += 1
            return
        self.counters.major_faults += 1
        if segment.index in self._evicted_once:
            self.counters.refaults += 1

    def _count_use(self, run: Run, faulted: bool) -> None:
        arriving = int(self.table.state[run.begin]) == PageState.ARRIVING
        if not faulted:
            late = arriving and run.ready is not None and not run.ready.query()
            if late:
                self.counters.minor_faults += 1
                self.counters.prefetch_late += int(run.prefetched)
            else:
                self.counters.hits += 1
        self._no_longer_prefetched(run)
        if arriving:
            self.table.end_page_in(run.begin, run.end, success=True)

    def _no_longer_prefetched(self, run: Run) -> None:
        if run.prefetched:
            run.prefetched = False
            self.num_prefetched_extents -= ceil_div(run.num_bytes, EXTENT_BYTES)

    def _withdraw(self, segment: Segment, others: list[Run]) -> None:
        """The pages stand in pieces, or only some are there: send all home, so that they can come in one run."""
        for collect in (False, True):
            if collect:
                gc.collect()  # garbage may hold leases
            self.drain()
            with self.lock:
                while self.moves:
                    self.changed.wait()
                pinned = [run for run in others if run.frame >= 0 and run.pins]
            if not pinned:
                self.reclaimer.evict(others)
                return
        raise PagerInternalError(
            f"{segment.name}: pages {pinned[0].first}..{pinned[0].first + pinned[0].num_pages} are in use while "
            "an operation asks for a range that overlaps them"
        )

    def prefetch(self, segment: Segment, first: int, num_pages: int, *, ticks_ahead: int) -> bool:
        """Start paging in, if that evicts nothing needed sooner. False if there is no such room."""
        try:
            self._page_in(segment, first, num_pages, overwrite=False, sooner_than=ticks_ahead)
        except NoRoom:
            return False
        return True

    def _page_in(
        self, segment: Segment, first: int, num_pages: int, *, overwrite: bool, sooner_than: int | None
    ) -> Run | None:
        """Phases 2 to 4: frames, copies, publication; for a demand fault the run comes back pinned.

        None if another thread was faster. Raises NoRoom.
        """
        demand = sooner_than is None
        if demand:
            with self.lock:
                self.demand += 1
        try:
            run = self._place(segment, first, num_pages, overwrite=overwrite, sooner_than=sooner_than)
        finally:
            if demand:
                with self.lock:
                    self.demand -= 1
        if run is None:
            return None
        done = False
        try:
            if not overwrite:
                self.transfers.page_in(run)
            done = True
        finally:
            with self.lock:
                self.moves -= 1
                run.issued = True
                if done and not demand:
                    run.prefetched = True
                    self.num_prefetched_extents += ceil_div(run.num_bytes, EXTENT_BYTES)
                if done and demand:
                    # Pinned before anybody can see it: what is to be overwritten must not be written back.
                    self._pin(run)
                if not done:
                    self.table.end_page_in(run.begin, run.end, success=False)
                    # Copies may be under way into the frames; h2d's own order protects their next user.
                    event = self.device.h2d.record()
                    merge_fence(run.uses, {event.stream.index: event})
                    self.forget_run(run)
                self.changed.notify_all()
        return run

    def _place(
        self, segment: Segment, first: int, num_pages: int, *, overwrite: bool, sooner_than: int | None
    ) -> Run | None:
        """Frames for a new run, registered, its pages ARRIVING or DIRTY. None if another thread was faster."""
        while True:
            with self.lock:
                if self.runs_over(segment, first, num_pages):
                    return None
                run = Run(segment, first, num_pages)
                if sooner_than is not None:
                    if not self.table.has_value(run.begin, run.end):
                        return None  # set to None since pagerd looked
                    if self.demand:
                        raise NoRoom
                taken = self.arena.take_free(num_pages, run)
                if taken is not None:
                    run.frame, run.fence = taken
                    run.version = self._versions[segment.index]()
                    if overwrite:
                        self.table.materialize(run.begin, run.end, run.frame)
                    else:
                        self.table.begin_page_in(run.begin, run.end, run.frame)
                    self.moves += 1
                    self._runs[segment.index].append(run)
                    self.counters.sample_resident(self.arena.resident_bytes)
                    return run
                moves = self.moves
            self.drain()
            if self.reclaimer.make_room(num_pages, sooner_than=sooner_than):
                continue
            with self.lock:
                if sooner_than is not None or not moves:
                    raise NoRoom
                # Another thread was moving runs, which cannot go meanwhile; what it leaves behind may do.
                if self.moves:
                    self.changed.wait()

    # -- leases ------------------------------------------------------------------------------------

    def lease(self, run: Run) -> torch.Tensor:
        """The pinned run as a fresh uint8 tensor; takes over one pin, given back when its last view dies."""
        release = self._released.put
        return self.arena.lease(run.frame, run.num_bytes, lambda: release(run))

    def release(self, run: Run) -> None:
        """Give back a pin that no lease took over."""
        self._released.put(run)

    def drain(self) -> None:
        """Work off the notes of dead leases: uses become events, moved versions become dirty pages."""
        if self._released.empty():
            return
        released: list[Run] = []
        while True:
            try:
                released.append(self._released.get_nowait())
            except queue.Empty:
                break
        with self.lock:
            for run in dict.fromkeys(released):
                if not run.orphan:
                    self._note_write(run)
                self._record_uses(run)
            for run in released:
                self._unpin(run)
                if not run.pins:
                    run.escaped = False
                    if run.orphan:
                        self.forget_run(run)
            self.changed.notify_all()

    def _note_write(self, run: Run) -> None:
        version = self._versions[run.segment.index]()
        if version != run.version or run.escaped:
            run.version = version
            self.mark_dirty(run)

    def _note_writes(self, runs: list[Run]) -> None:
        for run in runs:
            if run.issued:
                self._note_write(run)

    def _record_uses(self, run: Run) -> None:
        dirty = run.orphan or int(self.table.state[run.begin]) == PageState.DIRTY
        for stream in run.users.values():
            stream.touch(run.region, write=dirty)
            event = stream.record()
            merge_fence(run.uses, {event.stream.index: event})

    def note_uses(self, run: Run) -> None:
        """Make ``run.uses`` cover everything its users did so far, also under leases that are still alive."""
        with self.lock:
            self._record_uses(run)

    def mark_dirty(self, run: Run) -> None:
        """The run was, or may be, written to."""
        with self.lock:
            if int(self.table.state[run.begin]) == PageState.ARRIVING:
                self.table.end_page_in(run.begin, run.end, success=True)
            self.table.mark_dirty(run.begin, run.end)
            run.version = self._versions[run.segment.index]()

    # -- many at once ------------------------------------------------------------------------------

    def acquire_all(self, wanted: Sequence[tuple[Segment, int, int, bool]], what: str) -> list[Run]:
        """Acquire several ranges (segment, first page, pages, overwrite) for one operation, all or none.

        Raises BudgetError naming the operation ``what`` and the bytes, if they do not fit together.
        """
        try:
            return self._acquire_in_turn(wanted)
        except NoRoom:
            pass
        # Pieces in the wrong places: garbage may hold pins, and an empty arena can be filled from one end.
        gc.collect()
        self.drain()
        with self.lock:
            movable = [run for run in self.resident_runs() if run.issued and not run.wired and not run.pins]
        self.reclaimer.evict(movable)
        try:
            return self._acquire_in_turn(wanted)
        except NoRoom:
            raise self._does_not_fit(wanted, what) from None

    def _acquire_in_turn(self, wanted: Sequence[tuple[Segment, int, int, bool]]) -> list[Run]:
        runs: list[Run] = []
        try:
            for segment, first, num_pages, overwrite in wanted:
                runs.append(self.acquire(segment, first, num_pages, overwrite=overwrite))
        except BaseException:
            for run in runs:
                self.release(run)
            self.drain()
            raise
        return runs

    def _does_not_fit(self, wanted: Sequence[tuple[Segment, int, int, bool]], what: str) -> BudgetError:
        page_size = self.arena.page_size
        need = sum(num_pages for _, _, num_pages, _ in wanted) * page_size
        with self.lock:
            largest = self.arena.largest_free_frames(lambda run: not run.wired and not run.pins) * page_size
            pinned = sum(run.num_pages for run in self.resident_runs() if run.pins or run.wired) * page_size
        names = ", ".join(segment.name for segment, *_ in wanted[:4]) + (", ..." if len(wanted) > 4 else "")
        return BudgetError(
            f"pager: {what} needs {format_bytes(need)} on the device at once ({names}), but of "
            f"{format_bytes(self.arena.capacity_bytes)} for pages the largest stretch that can be emptied is "
            f"{format_bytes(largest)} ({format_bytes(pinned)} are in use). Raise device_budget by at least "
            f"{format_bytes(max(need - largest, page_size))}, or drop views of managed tensors that you keep."
        )

    # -- values ------------------------------------------------------------------------------------

    def store(self, segment: Segment, source: torch.Tensor) -> None:
        """Give the segment the bytes of ``source`` (uint8, on any device), at its home. No device copy may
        exist.
        """
        if int(self.table.home[segment.first_page]) == Home.DEVICE:
            run = self.acquire_all([(segment, 0, segment.num_pages, True)], segment.name)[0]
            self.arena.bytes_of(run.frame, run.num_bytes).copy_(source)
            self.release(run)
            self.drain()
            return
        home = self.transfers.home_bytes(segment, write=True)
        if home is not None:
            home.copy_(source)
        else:
            self.transfers.write_disk_home(segment, source.cpu())
        with self.lock:
            self.table.store_home(segment.first_page, segment.last_page)

    def discard(self, segment: Segment) -> None:
        """The segment has no value any more; its pages become EMPTY.

        Views of the old value stay good: their run becomes an orphan, whose frames go when the last view
        does.
        """
        self.drain()
        with self.lock:
            while any(run.leaving or not run.issued for run in self._runs[segment.index]):
                self.changed.wait()
            for run in list(self._runs[segment.index]):
                self._orphan(run)
            states = self.table.state[segment.first_page : segment.last_page]
            if (states != PageState.EMPTY).any():
                self.table.discard(segment.first_page, segment.last_page)

    def _orphan(self, run: Run) -> None:
        """Cut a run off its segment (locked). With no lease left it is freed at once."""
        for _ in range(run.pins):
            self.table.unpin(run.begin, run.end)
        if int(self.table.state[run.begin]) == PageState.ARRIVING:
            self.table.end_page_in(run.begin, run.end, success=True)
        self.table.discard(run.begin, run.end)
        run.orphan = True
        if not run.pins:
            self.forget_run(run)
        else:
            self._runs[run.segment.index].remove(run)

    def in_use(self, segment: Segment) -> bool:
        """Whether a lease on any of the segment's pages is alive."""
        self.drain()
        with self.lock:
            return any(run.pins for run in self._runs[segment.index])

    def flush(self, segments: Sequence[Segment]) -> None:
        """Write back what is dirty of these segments. A disk has it then; who reads host homes waits for the
        link.
        """
        self.drain()
        with self.lock:
            runs = [run for segment in segments for run in self._runs[segment.index]]
            self._note_writes(runs)
        self.reclaimer.write_back(runs)

    def is_dirty(self, segment: Segment) -> bool:
        """Whether the device may be newer than the home, also by a write under a lease that is still alive."""
        self.drain()
        with self.lock:
            self._note_writes(self._runs[segment.index])
            states = self.table.state[segment.first_page : segment.last_page]
            return bool(np.isin(states, (PageState.DIRTY, PageState.LEAVING)).any())

    def evict_segments(self, segments: Sequence[Segment]) -> None:
        """Send these segments home and free their frames, except what is wired or in use."""
        self.drain()
        with self.lock:
            runs = [run for segment in segments for run in self._runs[segment.index]]
        self.reclaimer.evict([run for run in runs if run.issued and not run.wired and not run.pins])

    def has_value(self, segment: Segment) -> bool:
        """Whether the segment holds a value (a gradient may be None)."""
        with self.lock:
            return self.table.has_value(segment.first_page, segment.last_page)

    def wire(self, segment: Segment) -> None:
        """The segment's one run, of a device home, stays for good."""
        with self.lock:
            for run in self._runs[segment.index]:
                run.wired = True

    # -- background --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """pagerd could not go on; the next access, step or close raises ``error``."""
        with self.lock:
            self.failure = self.failure or error
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raise, once, what pagerd failed with."""
        if self.failure is not None:
            with self.lock:
                error, self.failure = self.failure, None
            if error is not None:
                raise error


def _nothing() -> None:
    return
