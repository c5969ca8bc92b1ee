"""Units of the update whose optimizer state streams through staging slots.

A unit is a slice of a parameter. Its states are brought into a slot (`pager.engine.staging`) several units ahead, its
gradient too where that is not on the device; the user's class steps on a copy of the parameter's slice and on the
slot itself; then the slice is written to the parameter and the slot goes home. Until that moment nothing but the
copy and the slot has changed, so a unit that is interrupted, or whose class raises, begins anew.

A state that somebody holds on the device, or that stays there, is stepped as a copy and written in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pager.engine.staging import Range
from pager.interrupts import uninterrupted
from pager.mmu.binding import strided_view
from pager.mmu.clipping import scaled
from pager.optim.master import join, split
from pager.optim.masters import LOW
from pager.optim.schedule import note_accesses, unit_ranges
from pager.page_table import Home
from pager.spans import span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pager.engine.engine import Engine
    from pager.engine.run import Run
    from pager.mmu.binding import Binding
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.schedule import Slice
    from pager.optim.units import Progress
    from pager.optim.update import Update


# Among a unit's views: the parameter's own slice.
_OWN = ""


def can_stream(adopted: AdoptedOptimizer, binding: Binding, keys: Iterable[str]) -> bool:
    """Whether a parameter's sliceable update can go through staging: its states (``keys``) are there, or none is yet,
    and have homes that staging works from.
    """
    engine = adopted.engine
    states = adopted.paged_states(binding)
    live = adopted.optimizer.state.get(binding.tensor, {})
    paged = {key for key, state in states.items() if key == LOW or live.get(key) is state.tensor}
    wanted = {*keys, LOW} if adopted.masters.has(binding) else set(keys)
    if binding.gradient is None or wanted != set(states) or (live and wanted != paged):
        return False
    if not adopted.stages(binding):
        return False
    return not live or all(engine.has_value(state.segment) for state in states.values())


class StreamedUnit:
    """A slice of a paged parameter whose states pass through a staging slot."""

    __slots__ = (
        "_brings_gradient",
        "_gradient_tensor",
        "_is_done",
        "_keys",
        "_stages_gradient",
        "is_noted",
        "piece",
        "progress",
    )

    def __init__(self, progress: Progress, piece: Slice) -> None:
        self.progress = progress
        self.piece = piece
        self.is_noted = False
        # Set together with the commit: an interrupt that was held back comes right after it, and must not repeat it.
        self._is_done = False
        # In backward: the gradient comes from autograd, so it is not fetched, and may never be in its segment.
        self._brings_gradient = False
        self._gradient_tensor: torch.Tensor | None = None
        # Decided when the unit is fetched: the states in its slot, and whether the gradient's slice is there too.
        self._keys: list[str] = []
        self._stages_gradient = False

    def begin_again(self) -> None:
        """The same slice, in another step."""
        self._is_done = self._brings_gradient = self.is_noted = False

    def comes_with(self, gradient: torch.Tensor | None) -> None:
        """The unit runs inside backward: with this whole gradient, or with what the segment has by then."""
        self._brings_gradient = True
        self._gradient_tensor = gradient

    # -- ahead of the compute ----------------------------------------------------------------------

    def fetch(self, adopted: AdoptedOptimizer) -> bool:
        """Begin to bring what the unit needs. False if there is no slot for it now."""
        engine = adopted.engine
        staging = engine.staging
        if staging.holds(self):
            return True
        if not staging.has_free_slot or self._is_written_at_home(adopted):
            return False
        ranges = self._choose(adopted)
        return bool(ranges) and staging.fetch(self, ranges)

    def _is_written_at_home(self, adopted: AdoptedOptimizer) -> bool:
        """Whether the CPU is still at the last update: then what is at home is neither old nor new."""
        written = adopted.engine.being_written
        states = adopted.paged_states(self.progress.binding)
        return bool(written) and any(state.segment.index in written for state in states.values())

    def _choose(self, adopted: AdoptedOptimizer) -> list[Range]:
        engine = adopted.engine
        states = adopted.paged_states(self.progress.binding)
        for state in states.values():
            if state.keep and state.fixed is None and not self.progress.is_fresh:
                state.mmu.fix([state])
        self._keys = [key for key, state in states.items() if _leaves_the_arena(engine, state)]
        slot = self.progress.binding.gradient
        assert slot is not None
        gradient = (slot.segment, *self.piece.pages(slot.segment))
        at_home = int(engine.table.home[slot.segment.first_page]) != Home.DEVICE
        self._stages_gradient = at_home and not self._brings_gradient and not engine.runs_over(*gradient)
        ranges = self._ranges(adopted)
        room = engine.staging.slot_bytes // slot.segment.page_size
        excess = sum(wanted.num_pages for wanted in ranges) - room
        if excess > 0 and self._stages_gradient:
            # It waited under accumulate(), and slots inside backward are made for states.
            self._stages_gradient = False
            excess -= ranges.pop().num_pages
        if excess > 0:
            # Memory was short since the step was made, and the slots are gone, or smaller.
            self._keys = []
            return []
        return ranges

    # -- the update --------------------------------------------------------------------------------

    def run(self, update: Update) -> None:
        """Step the slice; all of it, or nothing."""
        if self._is_done:
            return
        adopted = update.adopted
        self.note(adopted)
        staging = adopted.engine.staging
        ranges = self._choose(adopted) if not staging.holds(self) else self._ranges(adopted)
        done = False
        try:
            staged = staging.take(self, ranges) if ranges else []
            if staged is None:
                self._keys, self._stages_gradient, staged = [], False, []
            with span("update"):
                self._run(update, staged)
            done = True
        finally:
            if not done:
                staging.give_back(self)

    def note(self, adopted: AdoptedOptimizer) -> None:
        """Tell the timeline of the unit's accesses: once, when the step is made, however late it runs."""
        if not self.is_noted:
            self.is_noted = True
            note_accesses(adopted.engine, unit_ranges(adopted, self.progress.binding, self.piece))

    def _is_new(self, key: str) -> bool:
        """Whether nothing of this state is read. Low bits outlive a class that keeps no state, and one that lost it."""
        return not self.progress.low_is_valid if key == LOW else self.progress.is_fresh

    def _ranges(self, adopted: AdoptedOptimizer) -> list[Range]:
        """What the unit has in its slot: states, then the gradient."""
        states = adopted.paged_states(self.progress.binding)
        ranges = [
            Range(states[key].segment, *self.piece.pages(states[key].segment), self._is_new(key))
            for key in self._keys
        ]
        slot = self.progress.binding.gradient
        if self._stages_gradient and slot is not None:
            ranges.append(Range(slot.segment, *self.piece.pages(slot.segment)))
        return ranges

    def _run(self, update: Update, staged: list[Run]) -> None:
        adopted = update.adopted
        engine = adopted.engine
        binding = self.progress.binding
        # A traceback keeps this call's variables alive, and must not keep pages pinned: all views are in here.
        views: dict[str, torch.Tensor] = {}
        runs: dict[str, Run] = {}
        leases: list[torch.Tensor] = []
        try:
            whole = adopted.keeps_whole(binding.segment)
            views[_OWN], runs[_OWN] = self._resident(engine, binding, leases, whole=whole)
            states: dict[str, torch.Tensor] = {}
            for key, state in adopted.paged_states(binding).items():
                if key in self._keys:
                    states[key] = views[key] = self._staged(engine, staged[self._keys.index(key)])
                else:
                    is_new = self._is_new(key)
                    views[key], runs[key] = self._resident(engine, state, leases, is_new=is_new)
                    states[key] = views[key].clone()
                if self.progress.is_fresh and key != LOW:
                    del states[key]  # the class makes it
            gradient = scaled(self._gradient(engine, binding, staged, leases), self.progress.scale)
            if self.progress.has_master:
                low = states.pop(LOW)
                copy = self._master(views[_OWN], low).requires_grad_(True)
                copy.grad = gradient.float()
            else:
                copy = views[_OWN].clone().requires_grad_(True)
                copy.grad = gradient
            del gradient
            new = update.run_class(self.progress.group_index, [copy], [self.progress.state_of(states)])[0]
            scratch: torch.Tensor | None = copy.grad
            copy.grad = None
            if self.progress.has_master:
                new[LOW] = low
                if scratch is None:  # the class dropped it
                    scratch = torch.empty_like(copy)
            with uninterrupted():
                self._commit(update, staged, copy, scratch, new, views, runs)
        finally:
            leases.clear()
            views.clear()

    def _master(self, own: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The master of the slice, a tensor of its own."""
        if not self.progress.low_is_valid:
            return own.float()
        return join(own, low, torch.empty_like(own, dtype=torch.float32))

    def _commit(
        self,
        update: Update,
        staged: list[Run],
        copy: torch.Tensor,
        scratch: torch.Tensor | None,
        new: dict[str, Any],
        views: dict[str, torch.Tensor],
        runs: dict[str, Run],
    ) -> None:
        engine = update.adopted.engine
        binding = self.progress.binding
        update.committed = True
        if self.progress.has_master:
            split(copy.detach(), views[_OWN], new[LOW], scratch)
        else:
            views[_OWN].copy_(copy)
        if binding.pending is None:  # else it was counted when the step returned
            binding.bump_version()
        written = []
        for key, view in views.items():
            if key == _OWN or key not in new:
                continue
            if new[key] is not view:
                view.copy_(new[key])
            if key in self._keys:
                written.append(staged[self._keys.index(key)])
        for run in runs.values():
            engine.wrote(run)
        if staged:
            engine.staging.write_back(self, written)
        if self.progress.is_fresh:
            with engine.lock:
                for run in written:
                    engine.table.store_home(run.begin, run.end)
        self.progress.finish_one(update, self.piece, new)
        self._is_done = True

    def _gradient(
        self, engine: Engine, binding: Binding, staged: list[Run], leases: list[torch.Tensor]
    ) -> torch.Tensor:
        if self._gradient_tensor is not None:
            whole, self._gradient_tensor = self._gradient_tensor.detach(), None
            begin, end, _ = self.piece
            return whole.as_strided((end - begin,), (1,), int(whole.storage_offset()) + begin)
        if self._stages_gradient:
            return self._staged(engine, staged[-1])
        assert binding.gradient is not None
        return self._resident(engine, binding.gradient, leases)[0]

    def _staged(self, engine: Engine, run: Run) -> torch.Tensor:
        count = self.piece.end - self.piece.begin
        return engine.staging.bytes_of(run).view(run.segment.dtype)[:count]

    def _resident(
        self,
        engine: Engine,
        binding: Binding,
        leases: list[torch.Tensor],
        *,
        whole: bool = False,
        is_new: bool = False,
    ) -> tuple[torch.Tensor, Run]:
        """The slice of a tensor on the device, as an ordinary tensor, and the run it lies in."""
        segment = binding.segment
        lease, run = binding.fixed, binding.run
        if lease is None or run is None:
            first, num_pages = (0, segment.num_pages) if whole else self.piece.pages(segment)
            with uninterrupted():
                run = engine.acquire_all(
                    [(segment, first, num_pages, is_new)], f"the update of {self.progress.binding.name}"
                )[0]
                lease = engine.lease(run)
        else:
            engine.use_again(run)
        leases.append(lease)
        begin, end, _ = self.piece
        offset = begin - run.first * segment.page_size // segment.dtype.itemsize
        view = strided_view(lease.untyped_storage(), segment.dtype, torch.Size((end - begin,)), (1,), offset)
        return view, run


def _leaves_the_arena(engine: Engine, state: Binding) -> bool:
    """Send what the arena holds of a state home, so that its home can be read; False if it has to stay."""
    segment = state.segment
    if state.fixed is not None or int(engine.table.home[segment.first_page]) == Home.DEVICE:
        return False
    if engine.runs_of(segment):
        engine.evict_segments([segment])
    return not engine.runs_of(segment)
