"""The engine: brings pages to the device when they are used, and keeps the promise that none is ever lost.

Three layers, each standing on the one beneath: `pager.engine.leases` (runs, uses, the lock),
`pager.engine.faults` (accesses, prefetches), and here the values of whole segments: storing, dropping,
writing home. Beside them `reclaim` evicts, `transfer` moves bytes, `timeline` knows what comes next and
`pagerd` acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pager.engine.faults import Faults, NoRoom
from pager.engine.run import Run
from pager.interrupts import whole
from pager.page_table import Home, PageState

if TYPE_CHECKING:
    from pager.address_space import Segment

__all__ = ["Engine", "NoRoom"]


class Engine(Faults):
    """The whole engine of one managed model. Safe to call from several threads."""

    @whole
    def store(self, segment: Segment, source: torch.Tensor) -> None:
        """Give the segment the bytes of ``source`` (uint8, on any device), at its home. No device copy may
        exist.
        """
        self.staging.forget(segment)
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

    def is_empty(self, segment: Segment) -> bool:
        """Whether nothing of the segment has a value, is on the device or on its way."""
        with self.lock:
            states = self.table.state[segment.first_page : segment.last_page]
            return not self._runs[segment.index] and not states.any()

    @whole
    def discard(self, segment: Segment) -> None:
        """The segment has no value any more; its pages become EMPTY.

        Views of the old value stay good: their run becomes an orphan, whose frames go when the last view
        does.
        """
        self.staging.forget(segment)
        self.drain()
        with self.lock:
            while any(run.leaving or not run.issued for run in self._runs[segment.index]):
                self.wait_for_change(stalls=False)
            for run in list(self._runs[segment.index]):
                self._orphan(run)
            states = self.table.state[segment.first_page : segment.last_page]
            if (states != PageState.EMPTY).any():
                self.table.discard(segment.first_page, segment.last_page)

    @whole
    def replace(self, segment: Segment, source: torch.Tensor, settle: Callable[[], None]) -> None:
        """Give the segment the bytes of ``source`` as another value: views of the old one keep that, as after
        :meth:`discard`. ``settle`` is called when there is no value, and may name another home.

        Raises TierError, and BudgetError: then a segment whose home is the device keeps the old value.
        """
        if int(self.table.home[segment.first_page]) != Home.DEVICE:
            self.discard(segment)
            settle()
            self.store(segment, source)
            return
        if not self.in_use(segment):
            self.store(segment, source)
            return
        (run,) = self.runs_of(segment)
        self.hold(run)  # the old value must be there to go back to
        try:
            with self.lock:
                self._orphan(run)
            done = False
            try:
                self.store(segment, source)
                done = True
            finally:
                if not done:
                    self._take_back(run)
        finally:
            self.release(run)

    def _take_back(self, run: Run) -> None:
        """Undo :meth:`_orphan` of a run that is leased, where nothing has taken its place."""
        with self.lock:
            for other in list(self._runs[run.segment.index]):
                self._orphan(other)
            self.table.materialize(run.begin, run.end, run.frame)
            for _ in range(run.pins):
                self.table.pin(run.begin, run.end)
            run.orphan = False
            self._runs[run.segment.index].append(run)

    def _orphan(self, run: Run) -> None:
        """Cut a run off its segment (locked). With no lease left it is freed at once."""
        for _ in range(run.pins):
            self.table.unpin(run.begin, run.end)
        if int(self.table.state[run.begin]) == PageState.ARRIVING:
            self.table.end_page_in(run.begin, run.end, success=True)
        self.table.discard(run.begin, run.end)
        run.orphan = True
        run.rank = None  # no reclaim looks at it any more
        if not run.pins:
            self.forget_run(run)
        else:
            self._runs[run.segment.index].remove(run)

    def in_use(self, segment: Segment) -> bool:
        """Whether a lease on any of the segment's pages is alive."""
        self.drain()
        with self.lock:
            return any(run.pins for run in self._runs[segment.index])

    @whole
    def flush(self, segments: Sequence[Segment]) -> None:
        """Write back what is dirty of these segments. Who reads their homes waits for the link, or finds in the ring
        what the disk has not got yet.
        """
        self.drain()
        with self.lock:
            runs = [run for segment in segments for run in self._runs[segment.index]]
            self._note_writes(runs)
        self.reclaimer.write_back(runs)

    def takes_at_home(self, segment: Segment) -> bool:
        """Whether a value for the segment may go straight to its home in host memory: it has none, nowhere."""
        self.drain()
        with self.lock:
            return (
                int(self.table.home[segment.first_page]) == Home.HOST
                and not self._runs[segment.index]
                and not self.table.has_value(segment.first_page, segment.last_page)
            )

    def send_home(self, segment: Segment, source: torch.Tensor, *, at_most_bytes: int) -> None:
        """Give the segment, of which `takes_at_home` holds, the value of ``source``: see `Transfers.send_home`."""
        self.transfers.send_home(segment, source, at_most_bytes=at_most_bytes)
        with self.lock:
            self.table.store_home(segment.first_page, segment.last_page)

    def is_dirty(self, segment: Segment) -> bool:
        """Whether the device may be newer than the home, also by a write under a lease that is still alive."""
        self.drain()
        with self.lock:
            self._note_writes(self._runs[segment.index])
            return self.table.is_dirty(segment.first_page, segment.last_page)

    @whole
    def evict_segments(self, segments: Sequence[Segment]) -> None:
        """Send these segments home and free their frames, except what is wired or in use."""
        self.drain()
        with self.lock:
            runs = [run for segment in segments for run in self._runs[segment.index]]
        self.reclaimer.evict([run for run in runs if run.issued and not run.is_kept and not run.pins])

    def has_value(self, segment: Segment) -> bool:
        """Whether the segment holds a value (a gradient may be None)."""
        with self.lock:
            return self.table.has_value(segment.first_page, segment.last_page)

    def wire(self, segment: Segment) -> None:
        """The segment's one run, of a device home, stays for good."""
        with self.lock:
            for run in self._runs[segment.index]:
                run.wired = True
