"""Faults: what an access finds, and how absent pages get to the device.

``acquire`` serves one access in numbered phases:

1. look up (locked)   a run that covers the pages: pin it and go on; one whose move is being issued: wait
2. place (locked)     take frames, evicting by next use where there are none (`pager.engine.reclaim`)
3. move               enqueue the copies; nobody else may use the run yet
4. publish (locked)   pin it for who faulted; others may use it too; streams wait for the copies by event

The lock is held for microseconds and never over a copy, an I/O, a callback or a log call.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pager.engine.leases import Leases
from pager.engine.run import Run
from pager.engine.transfer import EXTENT_BYTES
from pager.errors import BudgetError, PagerInternalError
from pager.interrupts import uninterrupted
from pager.page_table import Home, PageState
from pager.spans import span
from pager.tiers.device_arena import merge_fence
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.device.base import Event, Stream


class NoRoom(Exception):
    """No window of frames can be freed for a run now. Internal: users see BudgetError."""


class Faults(Leases):
    """Accesses and prefetches. Safe to call from several threads."""

    def acquire(self, segment: Segment, first: int, num_pages: int, *, overwrite: bool = False) -> Run:
        """Pin pages on the device and make the current stream wait for them.

        ``overwrite``: the caller writes every byte, so nothing is read from the home.
        Raises NoRoom, TierError, and whatever pagerd failed with meanwhile.
        """
        self.raise_failure()
        self.drain()
        if segment.kind == "state":
            self.staging.forget(segment)  # who uses a state may write to it
        stream = self.device.current_stream()
        counted = on_its_way = False
        while True:
            with self.lock:
                run = self._find(segment, first, num_pages)
                if run is not None:
                    if run.leaving or not run.issued:
                        if not run.issued:
                            on_its_way = True
                            self.transfers.hurry(run)
                        self.wait_for_change()
                        continue
                    self._pin(run)
                    break
                if int(self.table.home[segment.first_page]) == Home.DEVICE:
                    # Its frames are the only place of these pages: they are made in one run, for good.
                    first, num_pages = 0, segment.num_pages
                others = self.runs_over(segment, first, num_pages)
            if others:
                self._withdraw(segment, others)
                continue
            if not counted:
                counted = True
                with self.lock:
                    self._count_fault(segment, overwrite)
            with span("fault"):
                run = self._page_in(segment, first, num_pages, overwrite=overwrite, sooner_than=None)
            if run is not None:
                break
        try:
            self._begin_use(run, stream, overwrite=overwrite, faulted=counted, on_its_way=on_its_way)
            self.on_access()
        except BaseException:
            self.release(run)
            raise
        return run

    def _begin_use(
        self, run: Run, stream: Stream, *, overwrite: bool, faulted: bool, on_its_way: bool
    ) -> None:
        with self.lock:
            self._count_use(run, faulted=faulted, on_its_way=on_its_way)
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

    def use_again(self, run: Run) -> None:
        """A use of a run that the caller has pinned: count it, and order the current stream behind it."""
        stream = self.device.current_stream()
        self.raise_failure()
        self.counters.hits += 1
        if stream.index not in run.waited or stream.index not in run.users:
            self._begin_use(run, stream, overwrite=False, faulted=True, on_its_way=False)
        elif self.device.checker is not None:
            stream.touch(run.region, write=False)

    def _find(self, segment: Segment, first: int, num_pages: int) -> Run | None:
        for run in self._runs[segment.index]:
            if run.covers(first, num_pages):
                return run
        return None

    def _count_fault(self, segment: Segment, overwrite: bool) -> None:
        if overwrite:
            self.counters.hits += 1
            return
        self.counters.major_faults += 1
        if segment.index in self._evicted_once:
            self.counters.refaults += 1

    def _count_use(self, run: Run, *, faulted: bool, on_its_way: bool) -> None:
        """``faulted``: counted as a fault already; ``on_its_way``: the host waited for its copy to be issued."""
        arriving = int(self.table.state[run.begin]) == PageState.ARRIVING
        if not faulted:
            late = arriving and run.ready is not None and not run.ready.query()
            if late or on_its_way:
                self.counters.minor_faults += 1
                self.counters.prefetch_late += int(run.prefetched)
            else:
                self.counters.hits += 1
        self._no_longer_prefetched(run)
        if arriving:
            self.table.end_page_in(run.begin, run.end, success=True)

    def _withdraw(self, segment: Segment, others: list[Run]) -> None:
        """The pages stand in pieces, or only some are there: send all home, so that they can come in one run."""
        for collect in (False, True):
            if collect:
                gc.collect()  # garbage may hold leases
            self.drain()
            with self.lock:
                while self.moves:
                    self.wait_for_change()
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
            with span("prefetch"):
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
        with self._as_demand() if demand else contextlib.nullcontext():
            run = self._place(segment, first, num_pages, overwrite=overwrite, sooner_than=sooner_than)
        if run is None:
            return None
        if not demand and int(self.table.home[run.begin]) == Home.DISK:
            self._begin_prefetch(run)
            return run
        done = False
        try:
            if not overwrite:
                self.transfers.page_in(run, stalls=demand)
            done = True
        finally:
            with self.lock:
                if done and not demand:
                    self._count_prefetched(run)
                if done and demand:
                    # Pinned before anybody can see it: what is to be overwritten must not be written back.
                    self._pin(run)
                self._end_page_in(run, success=done)
        return run

    def _begin_prefetch(self, run: Run) -> None:
        """A page in from a disk that nobody waits for: it is published when its last copy is on the link."""

        def arrived(error: BaseException | None) -> None:
            with self.lock:
                self._end_page_in(run, success=error is None)
            if error is not None:
                self.on_late_failure(error)

        with self.lock:
            self._count_prefetched(run)
        done = False
        with uninterrupted():
            try:
                self.transfers.begin_page_in([run], then=arrived)
                done = True
            finally:
                if not done:
                    with self.lock:
                        self._end_page_in(run, success=False)

    def _count_prefetched(self, run: Run) -> None:
        run.prefetched = True
        self.num_prefetched_extents += ceil_div(run.num_bytes, EXTENT_BYTES)
        self.num_prefetched_bytes += run.num_bytes

    def _end_page_in(self, run: Run, *, success: bool) -> None:
        """Phase 4 (locked): others may use the run; or it failed, and is as if it had never begun."""
        self.moves -= 1
        run.issued = True
        if not success:
            self.table.end_page_in(run.begin, run.end, success=False)
            # Copies may be under way into the frames; h2d's own order protects their next user.
            event = self.device.h2d.record()
            merge_fence(run.uses, {event.stream.index: event})
            self.forget_run(run)
        self.changed.notify_all()

    @contextlib.contextmanager
    def _as_demand(self) -> Iterator[None]:
        """While this lasts pagerd takes no frames."""
        with self.lock:
            self.demand += 1
        try:
            yield
        finally:
            with self.lock:
                self.demand -= 1

    def _place(
        self, segment: Segment, first: int, num_pages: int, *, overwrite: bool, sooner_than: int | None
    ) -> Run | None:
        """Frames for a new run, registered, its pages ARRIVING or DIRTY. None if another thread was faster."""
        while True:
            with self.lock:
                if sooner_than is None and segment.index in self.being_written:
                    self.wait_for_change()
                    continue
                if self.runs_over(segment, first, num_pages):
                    return None
                run = Run(segment, first, num_pages)
                if sooner_than is not None:
                    if segment.index in self.being_written or not self.table.has_value(run.begin, run.end):
                        return None  # taken by an update on the CPU, or set to None, since pagerd looked
                    if self.demand:
                        raise NoRoom
                taken = self.arena.take_free(num_pages, run)
                if taken is not None:
                    run.frame, run.fence = taken
                    run.version = self._versions[segment.index]()
                    run.wired = int(self.table.home[run.begin]) == Home.DEVICE
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
                    self.wait_for_change()

    # -- many at once ------------------------------------------------------------------------------

    def acquire_all(self, wanted: Sequence[tuple[Segment, int, int, bool]], what: str) -> list[Run]:
        """Acquire several ranges (segment, first page, pages, overwrite) for one operation, all or none.

        Raises BudgetError naming the operation ``what`` and the bytes, if they do not fit together.
        """
        try:
            return self._acquire_in_turn(wanted)
        except NoRoom:
            pass
        # Pieces in the wrong places: garbage may hold pins, and an empty arena can be filled from one end, unless
        # pagerd puts something between.
        gc.collect()
        self.drain()
        with self._as_demand():
            with self.lock:
                while self.moves:
                    self.wait_for_change()
                runs = list(self.resident_runs())
                movable = [run for run in runs if run.issued and not run.is_kept and not run.pins]
            self.reclaimer.evict(movable)
            try:
                return self._acquire_in_turn(wanted)
            except NoRoom:
                pass
        if self.give_up_kept():
            self.drain()
            return self.acquire_all(wanted, what)
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
            largest = self.arena.largest_free_frames(lambda run: not run.is_kept and not run.pins) * page_size
            arena = self.arena
            owners = [owner for slab in range(arena.num_slabs) for owner in arena.slab_owners(slab)]
            # Old values that somebody holds are among them.
            runs = [owner for owner in owners if isinstance(owner, Run)]
            pinned = sum(run.num_pages for run in runs if run.pins or run.is_kept) * page_size
        names = ", ".join(segment.name for segment, *_ in wanted[:4]) + (", ..." if len(wanted) > 4 else "")
        return BudgetError(
            f"pager: {what} needs {format_bytes(need)} on the device at once ({names}), but of "
            f"{format_bytes(self.arena.capacity_bytes)} for pages the largest stretch that can be emptied is "
            f"{format_bytes(largest)} ({format_bytes(pinned)} are in use). Raise device_budget by at least "
            f"{format_bytes(max(need - largest, page_size))}, or drop views of managed tensors that you keep "
            "(a torch.autograd.Function that saves a view keeps it until backward). Of many parameters keep "
            "p.data.clone() or .cpu(), or model.state_dict(), not p.data or p.detach(), which stay on the device."
        )
