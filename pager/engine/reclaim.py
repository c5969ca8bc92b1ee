"""Making room on the device.

The problem: frames must come free while other threads use, pin and write to what stands in them, and no lock
may be held while bytes move. So reclaim works in phases, and every later phase may drop what an earlier one
chose:

1. choose (locked)    the policy ranks the runs that may go, the arena finds the cheapest window
2. begin (locked)     DIRTY victims become LEAVING: from now on a write to them is seen
3. write back         their copies to the home are enqueued
4. end (locked)       LEAVING becomes CLEAN, or DIRTY again if the write failed: then the error is raised and
                      nothing is lost
5. evict (locked)     victims that nobody pinned or wrote meanwhile leave; else the caller looks again from 1

Between 2 and 4 a run is marked ``leaving``: it is written back once at a time, and neither goes nor is
dropped.

A run that was prefetched and not used yet may be evicted for a demand fault only: among prefetches it would
be thrown out for something needed later. Why not one lock over it all: a write to disk takes milliseconds,
and the compute thread would stand still for pages it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pager.errors import ConfigError
from pager.page_table import PageState
from pager.spans import span

if TYPE_CHECKING:
    from pager.device.base import Stream
    from pager.engine.leases import Leases
    from pager.engine.run import Run

# Reclaim frees a sixteenth of the arena at a time: looking for victims costs the host half a millisecond, and
# what goes early would nearly always have gone before its next use (docs/decisions.md, 8).
BATCH_SHARE = 16


class Reclaimer:
    """Evicts runs for the engine. All public methods are called without the engine's lock."""

    def __init__(self, engine: Leases) -> None:
        self._engine = engine

    def make_room(self, num_frames: int, *, sooner_than: int | None) -> bool:
        """Try once to free ``num_frames`` neighbouring frames. False if no window exists.

        ``sooner_than`` is for prefetch: victims must be needed later than that many ticks from now.
        True means progress, not a promise: another thread may take the frames first.
        """
        engine = self._engine
        with engine.lock:
            victims = self._choose(num_frames, sooner_than)
        if victims is None:
            return False
        self.evict(victims, stalls=sooner_than is None)
        return True

    def _choose(self, num_frames: int, sooner_than: int | None) -> list[Run] | None:
        engine = self._engine
        prefetching = sooner_than is not None
        candidates: list[Run] = []
        for run in engine.resident_runs():
            run.rank = None
            if self._may_go(run) and not (prefetching and run.prefetched):
                candidates.append(run)
        if candidates:
            # Slices of one segment are next used together, as far as the policy is concerned.
            keys = np.array(list(dict.fromkeys(run.segment.index for run in candidates)), np.int64)
            until = engine.timeline.ticks_until_use(keys)
            if sooner_than is not None:
                late = until > sooner_than
                keys, until = keys[late], until[late]
            try:
                order = engine.policy.eviction_order(keys, until)
            except ConfigError as error:
                if not prefetching:
                    raise
                engine.policy.failure = error  # raised where the training thread can see it
                return None
            rank = {key: place for place, key in enumerate(np.asarray(order).tolist())}
            for run in candidates:
                run.rank = rank.get(run.segment.index)
        window = engine.arena.cheapest_window(num_frames)
        return window if window is None else self._batch(window, candidates)

    def _batch(self, window: list[Run], candidates: list[Run]) -> list[Run]:
        """The window's victims, and with them the next in the order until a batch is full."""
        arena = self._engine.arena
        batch_frames = arena.capacity_bytes // arena.page_size // BATCH_SHARE
        freed = sum(run.num_pages for run in window)
        victims = dict.fromkeys(window)
        ranked = [run for run in candidates if run.rank is not None and run not in victims]
        for run in sorted(ranked, key=lambda run: run.rank or 0):
            if freed + run.num_pages > batch_frames:
                break
            victims[run] = None
            freed += run.num_pages
        return list(victims)

    def _may_go(self, run: Run) -> bool:
        return run.issued and not run.leaving and not run.is_kept and run.pins == 0

    def evict(self, runs: list[Run], *, stalls: bool = True) -> bool:
        """Phases 2 to 5 for these runs. True if all of them left. Raises TierError if a write failed.

        ``stalls``: it is not pagerd that waits, so waiting counts as a stall of the training.
        """
        with span("evict"):
            self.write_back(runs, stalls=stalls)
        engine = self._engine
        gone = True
        with engine.lock:
            for run in runs:
                if run.frame < 0:
                    continue
                state = int(engine.table.state[run.begin])
                if state == PageState.ARRIVING:
                    # Nobody used it; the copy may still be under way, and h2d runs in order, so its frames
                    # and the home it reads are ordered against whatever comes next by the events kept here.
                    engine.table.end_page_in(run.begin, run.end, success=True)
                    state = PageState.CLEAN
                if not self._may_go(run) or state != PageState.CLEAN:
                    gone = False
                    continue
                self._leave(run)
        return gone

    def write_back(self, runs: list[Run], *, stalls: bool = True) -> None:
        """Phases 2 to 4: clean the dirty ones among ``runs``. ``stalls`` as for :meth:`evict`."""
        engine = self._engine
        leaving: list[Run] = []
        with engine.lock:
            # All of them first, so that nobody waits for a run while others wait for his.
            while any(run.leaving for run in runs):
                engine.wait_for_change(stalls=stalls)
            for run in runs:
                if run.frame >= 0 and run.issued and not run.wired and self._is_dirty(run):
                    engine.table.begin_page_out(run.begin, run.end)
                    run.leaving = True
                    engine.moves += 1
                    leaving.append(run)
        for position, run in enumerate(leaving):
            success = False
            event: Any = None
            users: list[Stream] = []
            try:
                engine.note_uses(run)
                event = engine.transfers.page_out(run, stalls=stalls)
                success = True
            finally:
                rest = [] if success else leaving[position + 1 :]
                with engine.lock:
                    for other in [run, *rest]:
                        engine.table.end_page_out(other.begin, other.end, success=success)
                        other.leaving = False
                        engine.moves -= 1
                    if event is not None:
                        # Who writes next must not do so under the copy; the copy itself waited for the rest.
                        run.ready = event
                        run.waited.clear()
                        users = list(run.users.values()) if run.pins else []
                    engine.changed.notify_all()
            for stream in users:
                # A view that is alive is written to without another fault.
                stream.wait(event)

    def _is_dirty(self, run: Run) -> bool:
        return not run.orphan and int(self._engine.table.state[run.begin]) == PageState.DIRTY

    def _leave(self, run: Run) -> None:
        engine = self._engine
        engine.table.evict(run.begin, run.end)
        engine.counters.prefetch_unused += int(run.prefetched)
        engine.forget_run(run)
