"""pagerd: carries the plan out ahead of the compute.

After each access it looks at what the trace expects next and pages in what is absent, nearest use first, as
many extents as the prefetch policy says. It never evicts something that is needed sooner than what it brings,
and stands back while a demand fault looks for frames.

As a thread (the default) it also hides the disk's latency; it sleeps on a condition until an access changes something
of what it found, since each time that it wakes up the training waits for the GIL. Inline it does the same work on the
caller's thread, which makes tests repeatable.

If it fails it stops, and the error is raised at the next fault, step or close: once. It starts again at the
boundary of the next step, since a disk or a network file system may well have recovered; after
``MAX_FAILURES`` steps in a row with a failure it stays off, and every page is fetched when it is needed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pager.engine.transfer import EXTENT_BYTES
from pager.exiting import end_at_exit
from pager.policies.prefetch import FixedDistance, PrefetchPolicy
from pager.units import ceil_div

if TYPE_CHECKING:
    from pager.engine.engine import Engine
    from pager.engine.timeline import Upcoming

logger = logging.getLogger("pager.engine.pagerd")

# How far ahead of the compute pages are brought; enough for 64 extents between resident ones.
ROWS_AHEAD = 128
# Failures in a row, one a step at most, after which prefetch stays off.
MAX_FAILURES = 3


class _Look(NamedTuple):
    """What pagerd found when there was nothing to bring; it looks again when one of these has changed."""

    horizon: int
    num_jumps: int
    num_extents: int
    # Of the timeline: half of what was seen to be there is left before it.
    position: int

    def is_out_of_date(self, engine: Engine) -> bool:
        """Whether a look now may find something. An eviction moves the horizon back."""
        timeline = engine.timeline
        return (
            timeline.position >= self.position
            or engine.horizon != self.horizon
            or engine.num_prefetched_extents < self.num_extents
            or timeline.num_jumps != self.num_jumps
        )


class Pagerd:
    """The prefetch daemon of one engine."""

    def __init__(self, engine: Engine, distance: int, *, threaded: bool) -> None:
        self._engine = engine
        self._policy: PrefetchPolicy | None = None
        self.bandwidth_bytes_per_second = 1e9
        self.set_distance(distance)
        self._wake = threading.Condition()
        self._num_jumps_seen = 0
        # None: look at each access.
        self._last_look: _Look | None = None
        self._pending = False
        self._busy = False
        self._paused = 0
        self._closed = False
        self._stopped = False
        self._num_failures = 0
        self._reason = ""
        self._inside = threading.local()
        self._thread: threading.Thread | None = None
        if threaded:
            weakref.finalize(self, _wake_up, self._wake)
            end_at_exit(self.close)
            self._start_thread()
        engine.on_access = self.notify
        engine.on_late_failure = self._stop

    def _start_thread(self) -> None:
        # The thread must not keep a model alive that nobody closed, so it holds us weakly while it waits.
        self._thread = threading.Thread(
            target=_loop, args=(weakref.ref(self), self._wake), name="pagerd", daemon=True
        )
        self._thread.start()

    def set_distance(self, num_extents: int) -> None:
        """Keep this many upcoming extents in flight from now on; 0 switches prefetch off."""
        self.distance = num_extents
        self._last_look = None
        self._policy = FixedDistance(num_extents) if num_extents > 0 else None

    def notify(self) -> None:
        """An access happened: there may be something to bring."""
        if self._policy is None or self.is_closed:
            return
        look = self._last_look
        if look is not None and not look.is_out_of_date(self._engine):
            return
        if self._thread is None:
            if not self._paused and not getattr(self._inside, "pumping", False):
                self._inside.pumping = True
                try:
                    self._pump_or_stop()
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
        self._last_look = None
        while not self.is_closed:
            with self._engine.lock:
                issued = self._engine.num_prefetched_extents
                issued_bytes = self._engine.num_prefetched_bytes
                rows = self._next_absent(self.distance - issued)
                if not rows:
                    self._last_look = self._look(issued)
            if not rows:
                return
            extents = [_extent_bytes(self._num_bytes(row)) for row in rows]
            owner = np.repeat(np.arange(len(rows)), [len(sizes) for sizes in extents])
            flags = np.zeros(issued + len(owner), bool)
            flags[:issued] = True
            # Of what was issued only the sum is known, and needed.
            sizes = np.full(len(flags), issued_bytes // max(issued, 1), np.int64)
            sizes[issued:] = np.concatenate(extents)
            seconds = np.zeros(len(flags))
            seconds[issued:] = np.array([row.seconds_ahead for row in rows])[owner]
            chosen = policy.select(sizes, seconds, flags, self.bandwidth_bytes_per_second)
            wanted = dict.fromkeys(owner[chosen - issued].tolist())
            if not wanted or not all(self._issue(rows[index]) for index in wanted):
                return

    def _issue(self, row: Upcoming) -> bool:
        engine = self._engine
        segment = engine.space.segments[row.segment]
        if engine.prefetch(segment, row.first_page, row.num_pages, ticks_ahead=row.rows_ahead):
            return True
        with engine.lock:
            # No room for it yet: look at it again next time.
            engine.horizon = min(engine.horizon, engine.timeline.position + row.rows_ahead)
        return False

    def _num_bytes(self, row: Upcoming) -> int:
        segment = self._engine.space.segments[row.segment]
        left = segment.num_bytes - row.first_page * segment.page_size
        return max(min(left, row.num_pages * segment.page_size), 1)

    def _next_absent(self, num_extents: int) -> list[Upcoming]:
        """The next expected accesses beyond the horizon whose pages are absent, up to that many extents
        (locked).

        Everything before the horizon is on the device or on its way; an eviction moves the horizon back.
        """
        engine = self._engine
        timeline = engine.timeline
        if timeline.num_jumps != self._num_jumps_seen:
            self._num_jumps_seen = timeline.num_jumps
            engine.horizon = timeline.position
            engine.settle_prefetched()
        engine.horizon = max(engine.horizon, timeline.position)
        rows: list[Upcoming] = []
        last = timeline.position + ROWS_AHEAD
        while num_extents > 0 and engine.horizon < last:
            row = timeline.expected(engine.horizon)
            if row is None:
                break
            engine.horizon += 1
            segment = engine.space.segments[row.segment]
            if row.segment in engine.streamed or row.segment in engine.being_written:
                continue
            if engine.runs_over(segment, row.first_page, row.num_pages):
                continue
            begin = segment.first_page + row.first_page
            if not engine.table.has_value(begin, begin + row.num_pages):
                continue
            rows.append(row)
            num_extents -= ceil_div(self._num_bytes(row), EXTENT_BYTES)
        return rows

    def _look(self, num_issued: int) -> _Look | None:
        """What stands now that nothing is to be brought (locked)."""
        engine = self._engine
        timeline = engine.timeline
        if timeline.trace is None:
            return None  # nobody knows yet what comes
        return _Look(engine.horizon, timeline.num_jumps, num_issued, timeline.position + ROWS_AHEAD // 2)

    # -- the thread --------------------------------------------------------------------------------

    def _take_work(self) -> bool:
        """Whether there is something to do (with the condition's lock); it counts as taken."""
        if not self._pending or self._paused:
            return False
        self._pending = False
        self._busy = True
        return True

    def _work(self) -> None:
        self._pump_or_stop()
        with self._wake:
            self._busy = False
            self._wake.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether nothing is brought any more, or not before the next step."""
        return self._closed or self._stopped

    def _pump_or_stop(self) -> None:
        try:
            self.pump()
        except BaseException as error:  # handed to the next fault, step or close, which raise it
            if self._thread is None:
                _drop_frames(error)
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        """Bring nothing more in this step; also called by a thread of the disk."""
        self._reason = f"{type(error).__name__}: {error}"
        self._stopped = True
        self._engine.fail(error)
        with self._wake:
            self._wake.notify_all()

    def end_step(self) -> None:
        """A step is over: start again after a failure that was raised to the user, unless it is one too many."""
        if not self._stopped:
            self._num_failures = 0
            return
        if self._closed or self._num_failures >= MAX_FAILURES or self._engine.failure is not None:
            return
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            logger.warning(
                "prefetch failed in %d steps in a row, the last time with %s. It stays off until the model is managed "
                "again: training goes on exactly, but the compute waits for every page that is not on the device",
                MAX_FAILURES,
                self._reason,
            )
            return
        logger.warning("prefetch had stopped after %s; it starts again with this step", self._reason)
        threaded = self._thread is not None
        if self._thread is not None:
            self._thread.join()
        self._stopped = False
        if threaded:
            self._start_thread()

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
        # A handle that nobody refers to may be collected, and closed, on this very thread.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._thread = None


def _extent_bytes(num_bytes: int) -> list[int]:
    """The sizes of the extents that so many bytes go in."""
    full, rest = divmod(num_bytes, EXTENT_BYTES)
    return [EXTENT_BYTES] * full + ([rest] if rest else [])


def _loop(ref: weakref.ref[Pagerd], changed: threading.Condition) -> None:
    while True:
        with changed:
            while True:
                pagerd = ref()
                if pagerd is None or pagerd.is_closed:
                    return
                if pagerd._take_work():
                    break
                del pagerd
                changed.wait()
        pagerd._work()
        del pagerd


def _wake_up(changed: threading.Condition) -> None:
    with changed:
        changed.notify_all()


def _drop_frames(error: BaseException) -> None:
    """Inline, a traceback leads back to the caller's variables, and kept for later would keep its leases alive."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
