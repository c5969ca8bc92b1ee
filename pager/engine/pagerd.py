"""pagerd: carries the plan out ahead of the compute.

After each access it looks at what the trace expects next and pages in what is absent, nearest use first, as
many extents as the prefetch policy says. It never evicts something that is needed sooner than what it brings,
and stands back while a demand fault looks for frames.

As a thread (the default) it also hides the disk's latency; it sleeps on a condition between accesses, so it
costs nothing while the model computes. Inline it does the same work on the caller's thread, which makes tests
repeatable. If it fails it stops, and the error is raised at the next fault, step or close.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from pager.engine.transfer import EXTENT_BYTES
from pager.policies.prefetch import FixedDistance, PrefetchPolicy
from pager.units import ceil_div

if TYPE_CHECKING:
    from pager.engine.engine import Engine
    from pager.engine.timeline import Upcoming

logger = logging.getLogger("pager.engine.pagerd")

# How far the trace is searched for absent pages; enough for 64 extents between resident ones.
ROWS_AHEAD = 128


class Pagerd:
    """The prefetch daemon of one engine."""

    def __init__(self, engine: Engine, distance: int, *, threaded: bool) -> None:
        self._engine = engine
        self._policy: PrefetchPolicy | None = None
        self.bandwidth_bytes_per_second = 1e9
        self.set_distance(distance)
        self._wake = threading.Condition()
        self._pending = False
        self._busy = False
        self._paused = 0
        self._closed = False
        self._inside = threading.local()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="pagerd", daemon=True)
            self._thread.start()
        engine.on_access = self.notify

    def set_distance(self, num_extents: int) -> None:
        """Keep this many upcoming extents in flight from now on; 0 switches prefetch off."""
        self.distance = num_extents
        self._policy = FixedDistance(num_extents) if num_extents > 0 else None

    def notify(self) -> None:
        """An access happened: there may be something to bring."""
        if self._policy is None or self._closed:
            return
        if self._thread is None:
            if not self._paused and not getattr(self._inside, "pumping", False):
                self._inside.pumping = True
                try:
                    self.pump()
                finally:
                    self._inside.pumping = False
            return
        with self._wake:
            self._pending = True
            self._wake.notify()

    def pump(self) -> None:
        """Issue what the policy wants now."""
        policy = self._policy
        if policy is None:
            return
        engine = self._engine
        with engine.lock:
            wanted = [item for item in engine.timeline.upcoming(ROWS_AHEAD) if not item.overwrite]
            rows, issued = self._absent(wanted)
        if not rows:
            return
        extents = [ceil_div(row.num_pages * engine.arena.page_size, EXTENT_BYTES) for row in rows]
        owner = np.repeat(np.arange(len(rows)), extents)
        chosen = policy.select(
            np.full(len(owner), EXTENT_BYTES, np.int64),
            np.zeros(len(owner)),
            np.repeat(np.array(issued, bool), extents),
            self.bandwidth_bytes_per_second,
        )
        for index in dict.fromkeys(owner[chosen].tolist()):
            row = rows[index]
            segment = engine.space.segments[row.segment]
            if self._closed or not engine.prefetch(
                segment, row.first_page, row.num_pages, ticks_ahead=row.rows_ahead
            ):
                return

    def _absent(self, wanted: list[Upcoming]) -> tuple[list[Upcoming], list[bool]]:
        """Of the upcoming accesses those whose pages are not there for good: absent, or brought and not used yet."""
        engine = self._engine
        rows: list[Upcoming] = []
        issued: list[bool] = []
        seen: set[tuple[int, int]] = set()
        limit = 2 * self.distance
        for item in wanted:
            if (item.segment, item.first_page) in seen:
                continue
            seen.add((item.segment, item.first_page))
            segment = engine.space.segments[item.segment]
            runs = engine.runs_over(segment, item.first_page, item.num_pages)
            if runs and not runs[0].prefetched:
                continue
            begin = segment.first_page + item.first_page
            if not runs and not engine.table.has_value(begin, begin + item.num_pages):
                continue
            rows.append(item)
            issued.append(bool(runs))
            if len(rows) >= limit:
                break
        return rows, issued

    # -- the thread
    # --------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._closed and (not self._pending or self._paused):
                    self._wake.wait()
                if self._closed:
                    return
                self._pending = False
                self._busy = True
            try:
                self.pump()
            except BaseException as error:  # handed to the next fault, step or close, which raise it
                self._engine.fail(error)
                with self._wake:
                    self._busy = False
                    self._closed = True
                    self._wake.notify_all()
                return
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def pause(self) -> None:
        """Stop prefetching and wait until nothing is being issued. Nests; see :meth:`resume`."""
        with self._wake:
            self._paused += 1
            while self._busy:
                self._wake.wait()

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        with self._wake:
            self._paused -= 1
            self._wake.notify_all()

    def close(self) -> None:
        """Stop the thread and wait for it. Idempotent."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
