"""Moving homes between host memory and the disk, while the model is managed.

The problem: a page's home is where its bytes are found when nothing else has them, and everybody reads the page table
to know where that is. So while a home moves nobody may bring its pages to the device or send them home, and at no
moment, whatever fails, may the table name a place that has not got the bytes.

The protocol, for a batch of segments:

1. keep at home   their pages go home and none comes (`Leases.being_written`, as for updates on the CPU). A segment that
                  somebody uses on the device stays out of it
2. place          frames at the other tier, which nobody knows of yet
3. copy           the bytes go there, and the host waits until all of them are there
4. settle         the table names the new frames; the old ones are free for others

What fails before 4, at whichever byte, leaves the homes as they were, and the new frames are given back; 4 cannot fail.
An interrupt comes before a batch or after it, which is why batches are small.

Where a page has no value there is nothing to copy; where some pages of a segment have one, all are copied.

Why not on a thread of its own, beside the training: it moves gigabytes once, when a budget changes, and the step that
follows needs the disk for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pager.errors import DiskFull, TierFull
from pager.interrupts import whole
from pager.page_table import Home

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.homes import Homes

# Several requests to the disk are under way at a time, and a disk that takes a gigabyte a second needs this for a
# sixteenth of it: so long an interrupt waits.
BATCH_BYTES = 64 * 2**20


class HomeMover:
    """Moves homes of one engine's segments. Used by one thread, while pagerd is paused; others may use the model."""

    def __init__(self, engine: Engine, homes: Homes) -> None:
        self._engine = engine
        self._homes = homes

    def move(
        self,
        segments: Sequence[Segment],
        target: Home,
        *,
        is_held: Callable[[Segment], bool] = lambda segment: False,
    ) -> list[Segment]:
        """Let the homes of these segments be ``target``, host memory or the disk; which have moved. Of the others
        somebody uses the pages, or the tier has no room for them in one piece.

        ``is_held``: somebody looks at a home in host memory, whose frames are free once he does not.
        Raises TierError; batches before that have moved.
        """
        moved: list[Segment] = []
        batch: list[Segment] = []
        num_bytes = 0
        for segment in segments:
            if batch and num_bytes + segment.num_bytes > BATCH_BYTES:
                moved += self._move(batch, target, is_held)
                batch, num_bytes = [], 0
            batch.append(segment)
            num_bytes += segment.num_bytes
        return moved + self._move(batch, target, is_held)

    @whole
    def _move(
        self, batch: Sequence[Segment], target: Home, is_held: Callable[[Segment], bool]
    ) -> list[Segment]:
        engine, transfers = self._engine, self._engine.transfers
        with self._kept_at_home(batch) as at_home:
            placed: list[tuple[Segment, int]] = []
            done = False
            try:
                for segment in at_home:
                    frame = self._place(segment, target)
                    if frame is not None:
                        placed.append((segment, frame))
                full = [(segment, frame) for segment, frame in placed if not engine.is_empty(segment)]
                copy = transfers.write_to_disk if target == Home.DISK else transfers.read_from_disk
                if full:
                    copy([segment for segment, _ in full], [frame for _, frame in full])
                done = True
            finally:
                for segment, frame in placed if not done else ():
                    self._homes.give_back(target, frame, segment.num_pages)
            for segment, frame in placed:
                transfers.forget(segment)
                with engine.lock:
                    self._homes.move(segment, target, frame, is_held=partial(is_held, segment))
        return [segment for segment, _ in placed]

    def _place(self, segment: Segment, target: Home) -> int | None:
        """Frames for a segment; None where there is no room for it in one piece."""
        try:
            return self._homes.take(target, segment.num_pages)
        except DiskFull:  # others have filled it: the user has to know
            raise
        except TierFull:
            return None

    @contextlib.contextmanager
    def _kept_at_home(self, segments: Sequence[Segment]) -> Iterator[list[Segment]]:
        """Those of the segments that are nowhere but at home, and stay there."""
        engine = self._engine
        with engine.lock:
            mine = [segment for segment in segments if segment.index not in engine.being_written]
            engine.being_written.update(segment.index for segment in mine)
        try:
            for segment in mine:
                engine.staging.forget(segment)
            engine.drain()
            with engine.lock:
                # A page in from a disk is published, and its run can go, when its last copy is on the link.
                while any(run.leaving or not run.issued for s in mine for run in engine.runs_of(s)):
                    engine.wait_for_change(stalls=False)
            engine.evict_segments([segment for segment in mine if engine.runs_of(segment)])
            yield [segment for segment in mine if not engine.runs_of(segment)]
        finally:
            with engine.lock:
                for segment in mine:
                    engine.being_written.discard(segment.index)
                    engine.horizon = min(engine.horizon, engine.timeline.next_use(segment.index))
                engine.changed.notify_all()
