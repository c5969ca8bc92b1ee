"""Leases: how the device's frames are handed to torch, and how the engine learns that it is done with them.

Every use of a run is a fresh tensor over its frames whose storage has an owner of ours. A weak reference to
the tensor would not do: a view of it outlives it. When the last view dies the owner does, and puts a note on
a `SimpleQueue`. That may happen inside garbage collection and under any lock, so it does nothing else. The
next entry of the engine works the notes off:

1. the tensor's version counter moved (or the use could write unseen): the pages are dirty;
2. one event per stream that used the run: who takes the frames, or copies them home, waits for it;
3. the pin is given back.

Also the base of the engine: the runs that are on the device, and the lock over all metadata.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pager.device.base import Note
from pager.engine.checked_policy import CheckedPolicy
from pager.engine.reclaim import Reclaimer
from pager.engine.run import Run
from pager.engine.staging import Staging
from pager.engine.timeline import Timeline
from pager.engine.transfer import EXTENT_BYTES
from pager.interrupts import uninterrupted
from pager.page_table import PageState
from pager.tiers.device_arena import merge_fence
from pager.units import ceil_div

if TYPE_CHECKING:
    from pager.address_space import AddressSpace, Segment
    from pager.device.base import Device
    from pager.engine.transfer import Transfers
    from pager.page_table import PageTable
    from pager.policies.protocol import EvictionPolicy
    from pager.statistics import Counters
    from pager.tiers.device_arena import DeviceArena


class Leases:
    """Runs on the device and their uses. Safe to call from several threads."""

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
        self.policy = CheckedPolicy(policy)
        self.counters = counters
        self.timeline = Timeline()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.reclaimer = Reclaimer(self)
        self.staging = Staging(device, arena, transfers, arena_lock=self.lock, poison=poison)
        self.failure: BaseException | None = None
        self.demand = 0
        self.moves = 0
        # Up to this position of the timeline pagerd has seen to it that pages are there; evictions move it
        # back.
        self.horizon = 0
        self.num_prefetched_extents = 0
        self.num_prefetched_bytes = 0
        self.on_access: Callable[[], None] = _nothing
        # Told what a prefetch from a disk failed with, on the disk's thread.
        self.on_late_failure: Callable[[BaseException], None] = self.fail
        # Segments whose pages the update brings through staging, or needs at home: nothing for pagerd.
        self.streamed: set[int] = set()
        # Segments whose homes the CPU is writing: their pages stay where they are until then.
        self.being_written: set[int] = set()
        # Asked when an operation has no room: let go of what stays here for speed only; whether there was any.
        self.give_up_kept: Callable[[], bool] = bool
        self._poison = poison
        self._runs: dict[int, list[Run]] = {}
        self._versions: dict[int, Callable[[], int]] = {}
        # Runs, and references to dead owners of leases on runs.
        self._released: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._noted: dict[int, Any] = {}
        self._evicted_once: set[int] = set()

    # -- runs --------------------------------------------------------------------------------------

    def register(self, segment: Segment, version: Callable[[], int]) -> None:
        """Make a segment known; ``version`` answers the version counter of its tensor."""
        with self.lock:
            self._versions[segment.index] = version
            self._runs[segment.index] = []
            self.timeline.resize(len(self.space.segments))
            self.policy.resize(len(self.space.segments))

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Another policy decides from now on; what the old one failed with is no concern any more."""
        with self.lock:
            checked = CheckedPolicy(policy)
            checked.resize(len(self.space.segments))
            self.policy = checked

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
        try:
            if self._poison:
                fence = self.arena.poison(frame, num_pages, fence)
        finally:
            # Frames whose owner is gone would be chosen as victims for ever.
            self.arena.free(frame, fence)
        self._evicted_once.add(run.segment.index)
        self._no_longer_prefetched(run)
        self.horizon = min(self.horizon, self.timeline.next_use(run.segment.index))
        self.policy.record_evict(np.array([run.segment.index], np.int64))
        self.counters.sample_resident(self.arena.resident_bytes)
        self.changed.notify_all()

    def _pin(self, run: Run) -> None:
        run.pins += 1
        self.table.pin(run.begin, run.end)

    def _unpin(self, run: Run) -> None:
        run.pins -= 1
        if not run.orphan:
            self.table.unpin(run.begin, run.end)

    def settle_prefetched(self) -> None:
        """What was prefetched for a future that did not come stays as an ordinary resident (locked)."""
        for run in self.resident_runs():
            self._no_longer_prefetched(run)

    def _no_longer_prefetched(self, run: Run) -> None:
        if run.prefetched:
            run.prefetched = False
            self.num_prefetched_extents -= ceil_div(run.num_bytes, EXTENT_BYTES)
            self.num_prefetched_bytes -= run.num_bytes

    # -- leases ------------------------------------------------------------------------------------

    def lease(self, run: Run) -> torch.Tensor:
        """The pinned run as a uint8 tensor; takes over one pin, given back when its last view dies.

        Its storage is a fresh one, or that of a tensor which the user holds (:meth:`share`): by that torch knows
        operands that overlap.
        """
        if run.shared is not None:
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(run.shared.cdata)
            if storage is not None:
                self.release(run)  # the tensor that is held has a pin for both
                lease = torch.empty(0, dtype=torch.uint8, device=storage.device)
                return lease.set_(storage, 0, (run.num_bytes,), (1,))
            run.shared = None
        note = Note(self._released, run, self._noted)
        return self.arena.lease(run.frame, run.num_bytes, note)

    def share(self, run: Run, tensor: torch.Tensor) -> None:
        """The user gets ``tensor``, over a lease of the run: while its storage lives all leases share that."""
        if run.shared is None or run.shared.expired():
            run.shared = StorageWeakRef(tensor.untyped_storage())

    def hold(self, run: Run) -> None:
        """Pin a run that is on the device, until ``release``."""
        with self.lock:
            self._pin(run)

    def release(self, run: Run) -> None:
        """Give back a pin that no lease took over."""
        self._released.put(run)

    def drain(self) -> None:
        """Work off the notes of dead leases: uses become events, moved versions become dirty pages."""
        if self._released.empty():
            return
        with uninterrupted():  # a note that was taken and not worked off would keep its frames for ever
            self._work_off()

    def _work_off(self) -> None:
        released: list[Run] = []
        while True:
            try:
                released.append(Note.take(self._released.get_nowait()))
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
        dirty = run.orphan or (int(self.table.state[run.begin]) == PageState.DIRTY and not run.settled)
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
            run.settled = False
            run.version = self._versions[run.segment.index]()

    def wrote(self, run: Run) -> None:
        """The current stream has put a write to the pinned run; other streams wait for it before they use it.

        If it is the stream beside the compute, this was its last use of the run, and no other lease is alive.
        """
        stream = self.device.current_stream()
        with self.lock:
            self.mark_dirty(run)
            stream.touch(run.region, write=True)
            run.ready = stream.record()
            run.waited = {stream.index}
            if stream is self.device.beside:
                # Recorded now: the compute may use the run long before the notes of dead leases are worked off.
                for user in run.users.values():
                    event = run.ready if user is stream else user.record()
                    merge_fence(run.uses, {event.stream.index: event})
                run.users = {}

    def hand_over(self, segment: Segment) -> None:
        """The current stream has written the pages for the last time, and no lease is alive: whoever is next, on
        whatever stream, waits for it, and reads.
        """
        stream = self.device.current_stream()
        self.drain()
        with self.lock:
            for run in self._runs[segment.index]:
                if stream.index not in run.users:
                    continue  # it came back from its home since
                self._record_uses(run)
                run.ready, run.waited, run.users = stream.record(), {stream.index}, {}
                run.settled = True

    def wait_for_change(self, *, stalls: bool = True) -> None:
        """Wait until a move ends (locked; the lock is free meanwhile). ``stalls``: count it as a stall."""
        started = time.perf_counter()
        if not self.transfers.advance():
            self.changed.wait()
        if stalls:
            self.counters.add(stall_seconds=time.perf_counter() - started)

    # -- background --------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """pagerd could not go on; the next access, step or close raises ``error``."""
        with self.lock:
            self.failure = self.failure or error
            self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raise, once, what pagerd, a write to the disk or the eviction policy failed with."""
        self.policy.raise_failure()
        late = self.transfers.take_failure()
        if late is not None:
            self.fail(late)
        if self.failure is not None:
            with self.lock:
                error, self.failure = self.failure, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # else it and its traceback keep each other, and every lease on the way, alive


def _nothing() -> None:
    return
