"""Staging: device memory that optimizer state passes through.

The problem: a step touches every byte of optimizer state once, in an order that is known, and needs it for
microseconds. In the arena at large it would push out what is used many times, each unit of the update would look
for victims among hundreds of runs, and pieces of all sizes would leave holes.

So a few *slots* of one size are set aside. A slot holds the state pages of one unit of the update, each range a run
of its own that nobody else sees: to the page table these pages never left their home. Per unit

1. fetch       the slot's runs are filled from their homes (stream slots_in); several units ahead of the compute
2. take        the compute waits for the copies, by event
3. the unit is computed in the slot
4. write back  the slot's runs go home (stream slots_out); from here the slot is free: whoever fetches into it next
               waits, on its stream, for the events of 3 and 4

The host waits for none of this, except at 2 for what a disk has not brought yet. Until 4 the home is the truth, so a
unit that fails or is interrupted is fetched again as if it had never begun. 4 itself cannot be refused: what a disk
cannot take is kept in host memory, and no further unit is taken before it has. A home that is written by somebody
else in between (a state dict is loaded, a user writes to a state) makes what was fetched stale: ``forget`` drops it.

Why not the same memory as everything else: first in, first out needs no policy, no search and no holes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pager.engine.run import Run
from pager.interrupts import uninterrupted
from pager.tiers.device_arena import Fence, merge_fence

if TYPE_CHECKING:
    import torch

    from pager.address_space import Segment
    from pager.device.base import Device, Stream
    from pager.engine.disk_requests import Job
    from pager.engine.transfer import Transfers
    from pager.tiers.device_arena import DeviceArena


class Range(NamedTuple):
    """Pages of one segment; ``is_new``: they have no value yet, so nothing is to be read."""

    segment: Segment
    first: int
    num_pages: int
    is_new: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    """Neighbouring frames; to the arena a block whose owner never moves."""

    frame: int
    num_frames: int
    fence: Fence = field(default_factory=dict)
    holder: Any = None
    # Whether the holder is being computed: then the slot is not dropped.
    taken: bool = False
    runs: list[Run] = field(default_factory=list)
    # The page ins from a disk that fill some of the runs.
    jobs: list[Job] = field(default_factory=list)
    # What the arena and reclaim ask of the owner of a block.
    rank: None = None
    is_kept: bool = True
    pins: int = 1


class Staging:
    """The slots of one engine. Safe to call from several threads; an interrupt comes before a call or after it."""

    def __init__(
        self,
        device: Device,
        arena: DeviceArena,
        transfers: Transfers,
        *,
        arena_lock: AbstractContextManager[Any],
        poison: bool,
    ) -> None:
        """``arena_lock``: the engine's, which guards the arena; taken under this object's own, never the reverse."""
        self._device = device
        self._arena = arena
        self._transfers = transfers
        self._arena_lock = arena_lock
        self._poison = poison
        self._slots: list[_Slot] = []
        self._held: dict[int, _Slot] = {}
        self._lock = threading.RLock()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 where nothing is set aside."""
        return self._slots[0].num_frames * self._arena.page_size if self._slots else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slot_bytes * len(self._slots)

    def reserve(self, num_slots: int, slot_frames: int) -> int:
        """Set up to ``num_slots`` slots aside, from what is free in the arena; how many there are now."""
        with uninterrupted(), self._lock:
            while len(self._slots) < num_slots:
                slot = _Slot(-1, slot_frames)
                with self._arena_lock:
                    taken = self._arena.take_free(slot_frames, slot)
                if taken is None:
                    break
                slot.frame, slot.fence = taken
                self._slots.append(slot)
            return len(self._slots)

    def release(self) -> bool:
        """Give all slots back to the arena; whether there were any. Not while a unit is computed in one."""
        with uninterrupted(), self._lock:
            if not self._slots or any(slot.taken for slot in self._slots):
                return False
            for slot in self._slots:
                self._drop(slot)
                with self._arena_lock:
                    self._arena.free(slot.frame, slot.fence)
            self._slots.clear()
            return True

    # -- one unit ----------------------------------------------------------------------------------

    @property
    def has_free_slot(self) -> bool:
        """Whether ``fetch`` would find a slot."""
        return any(slot.holder is None for slot in self._slots)

    def holds(self, holder: object) -> bool:
        """Whether a unit's pages are in a slot."""
        return id(holder) in self._held

    def fetch(self, holder: object, ranges: Sequence[Range]) -> bool:
        """Begin to bring these pages into a free slot. False, and nothing, if there is none."""
        with uninterrupted(), self._lock:
            slot = next((slot for slot in self._slots if slot.holder is None), None)
            if slot is None:
                return False
            frame = slot.frame
            for wanted in ranges:
                run = Run(wanted.segment, wanted.first, wanted.num_pages, frame)
                run.fence = slot.fence  # each run's: of some, the compute is the first user, of others h2d
                frame += wanted.num_pages
                slot.runs.append(run)
            assert frame <= slot.frame + slot.num_frames, "a unit is larger than its slot"
            slot.holder = holder
            self._held[id(holder)] = slot
            done = False
            try:
                read = [run for run, wanted in zip(slot.runs, ranges, strict=True) if not wanted.is_new]
                if read:
                    slot.jobs = self._transfers.begin_page_in(read, stream=self._device.slots_in)
                done = True
            finally:
                if not done:
                    # Copies may be under way into the slot.
                    for stream in (self._device.slots_in, self._device.h2d):
                        event = stream.record()
                        merge_fence(slot.fence, {event.stream.index: event})
                    self._drop(slot)
            # A ring: the slot that was free longest is taken next, when its last copies are most likely over.
            self._slots.remove(slot)
            self._slots.append(slot)
            return True

    def take(self, holder: object, ranges: Sequence[Range]) -> list[Run] | None:
        """A unit's runs, in the order of ``ranges``, once the current stream waits for their bytes.

        None if no slot can be had: others compute in all of them, or there is none. Raises TierError if a disk cannot
        be read, or has not taken what was written before: then the unit has not begun.
        """
        self._transfers.check_writes(self.slot_bytes)
        while True:
            with uninterrupted(), self._lock:
                slot = self._find_or_fetch(holder, ranges)
                if slot is None:
                    return None
                jobs = [job for job in slot.jobs if not job.is_done or job.error is not None]
                if not jobs:
                    self._begin_use(slot)
                    return slot.runs
            for job in jobs:
                self._transfers.join(job)

    def _find_or_fetch(self, holder: object, ranges: Sequence[Range]) -> _Slot | None:
        held = self._held.get(id(holder))
        if held is not None and [run.segment for run in held.runs] != [r.segment for r in ranges]:
            self._drop(held)  # fetched of other states than the unit has now
        if not self.holds(holder):
            if not self.has_free_slot:
                # The one fetched last is needed last.
                last = next((slot for slot in reversed(self._slots) if not slot.taken), None)
                if last is None:
                    return None
                self._drop(last)
            self.fetch(holder, ranges)
        return self._held[id(holder)]

    def _begin_use(self, slot: _Slot) -> None:
        slot.taken = True
        stream = self._device.current_stream()
        before: Fence = {}
        for run in slot.runs:
            merge_fence(before, run.fence if run.ready is None else {run.ready.stream.index: run.ready})
            run.users[stream.index] = stream
        for event in before.values():
            stream.wait(event, timed=True)

    def bytes_of(self, run: Run) -> torch.Tensor:
        """The run's bytes, uint8; good until ``write_back`` or ``give_back``."""
        return self._arena.bytes_of(run.frame, run.num_bytes)

    def write_back(self, holder: object, written: Sequence[Run]) -> None:
        """The current stream has written these runs: send them home, and free the slot.

        Waits where the disk has not done what it was given before. It is not refused: see the head of this file.
        """
        with uninterrupted():
            with self._lock:
                slot = self._held[id(holder)]
                self._note_use(slot, self._device.current_stream(), written)
                for run in written:
                    self._drop_copies(run, slot)
            # The slot is taken, so that nobody else has a hand in it meanwhile.
            event = None
            if written:
                stream = self._device.slots_out
                event = self._transfers.page_out_all(written, must=True, stream=stream)
            with self._lock:
                if event is not None:
                    # It comes after all use of the slot, and so stands for it.
                    slot.fence = {event.stream.index: event}
                self._free(slot)

    def give_back(self, holder: object) -> None:
        """The unit is not done: what its slot holds is worth nothing."""
        if not self.holds(holder):
            return
        with uninterrupted(), self._lock:
            slot = self._held.get(id(holder))
            if slot is not None:
                self._drop(slot)

    def forget(self, segment: Segment) -> None:
        """The home of ``segment`` is about to change: drop what was fetched of it."""
        if not self._held:
            return
        with uninterrupted(), self._lock:
            for slot in list(self._held.values()):
                if not slot.taken and any(run.segment is segment for run in slot.runs):
                    self._drop(slot)

    def _drop_copies(self, written: Run, slot: _Slot) -> None:
        """What other slots were fetched of the pages of a run is old now."""
        for other in list(self._held.values()):
            if other is not slot and any(
                run.segment is written.segment and run.overlaps(written.first, written.num_pages)
                for run in other.runs
            ):
                self._drop(other)

    def _note_use(self, slot: _Slot, stream: Stream, written: Sequence[Run]) -> None:
        for run in slot.runs if self._device.checker is not None else ():
            stream.touch(run.region, write=run in written)
        event = stream.record()
        for run in slot.runs:
            # What the stream waited for before is behind this event.
            run.ready, run.fence, run.uses = None, {}, {event.stream.index: event}
        slot.fence = {event.stream.index: event}

    def _drop(self, slot: _Slot) -> None:
        users = {index: stream for run in slot.runs for index, stream in run.users.items()}
        for stream in users.values():
            event = stream.record()
            merge_fence(slot.fence, {event.stream.index: event})
        for run in slot.runs:
            if run.ready is not None:
                merge_fence(slot.fence, {run.ready.stream.index: run.ready})
        for job in slot.jobs:
            if not job.is_done:
                job.cancel()
                event = self._device.h2d.record()  # of what it has sent until now
                merge_fence(slot.fence, {event.stream.index: event})
        self._free(slot)

    def _free(self, slot: _Slot) -> None:
        if slot.holder is None:
            return
        del self._held[id(slot.holder)]
        slot.holder = None
        slot.taken = False
        slot.runs = []
        slot.jobs = []
        if self._poison:
            slot.fence = self._arena.poison(slot.frame, slot.num_frames, slot.fence)
