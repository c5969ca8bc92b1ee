"""The optimizer step, paged like everything else.

The problem: a step reads and writes parameters, gradients and states, together several times the device. And
it is the one place where half of the work is worse than none of it.

The protocol. A step is a list of *units*, ordered by when the next forward needs their parameters. A unit is
a slice of a parameter with the same slice of its gradient and states (or whole tensors, where the optimizer
cannot be cut; or all the small tensors together). Each unit goes through

1. acquire    its pages, by the same engine as any access; pagerd has them on the way
2. stage      copies of parameter and states
3. compute    the user's optimizer class steps on the copies (`pager.optim.shadow`)
4. commit     the results are copied into the pages, which are dirty from then on
5. done

What the user's class raises is raised from ``step()``. With nothing committed the step is then as if never begun;
else the rest is tried once more, at the next access, and then given up (`pager.optim.torn`). Any other exception or
interrupt before 4 leaves the unit as if it never began; in 4 the staged results are
committed again. So a step that was interrupted is finished later from where it stood, with the gradients and
group values it began with, and never repeated. The copies cost device bandwidth (terabytes a second) where
the link (tens of gigabytes) is the wall.

Per-parameter values that are not shaped like the parameter (Adam's ``step``) start from the same value in
each slice; the parameter's state dict is replaced when its last unit is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pager.errors import PagerError
from pager.graph.access_trace import Phase
from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding, strided_view
from pager.optim.schedule import Slice, cut, unit_ranges
from pager.optim.shadow import make_shadow, raw_step, snapshot_attributes, snapshot_group

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.engine.run import Run
    from pager.optim.adopted import AdoptedOptimizer


class Update:
    """One step of one optimizer: the values it began with, and the units still to do."""

    def __init__(self, adopted: AdoptedOptimizer) -> None:
        optimizer = adopted.optimizer
        self.adopted = adopted
        # Not to be lost in mid-step, though its user may drop it.
        self._keeps_alive: Optimizer | None = optimizer
        # Whether values of this step are in pages; whether, and how often, it was the user's class that raised.
        self.committed = False
        self.refused = False
        self.num_refusals = 0
        self.optimizer_class: type[Optimizer] = type(optimizer)
        self.step = raw_step(optimizer)
        self.attributes = snapshot_attributes(optimizer)
        self.groups = [snapshot_group(group) for group in optimizer.param_groups]
        # GradScaler hands its scale to a fused step, which then divides the gradients in place, and some classes
        # write to them too: then the copies that were stepped go back into the gradients.
        self.writes_gradients = self.attributes.get("grad_scale") is not None
        adopted.page_existing_state()
        self._num_states = len(optimizer.state)
        self.todo: deque[_SmallUnit | _PagedUnit] = deque(self._units())

    def _units(self) -> list[_SmallUnit | _PagedUnit]:
        adopted = self.adopted
        small = _SmallUnit()
        paged: list[tuple[int, int, Binding]] = []
        for group_index, group in enumerate(adopted.optimizer.param_groups):
            for param in group["params"]:
                binding = adopted.binding_of(param)
                if binding is None:
                    if param.grad is not None:
                        small.members.append((group_index, param, param.grad))
                    continue
                binding.mmu.gradients.take_from_graph(binding)
                slot = binding.gradient
                if slot is not None and adopted.engine.has_value(slot.segment):
                    paged.append((adopted.next_use(binding), group_index, binding))
        units: list[_SmallUnit | _PagedUnit] = [small] if small.members else []
        for _, group_index, binding in sorted(paged, key=lambda item: item[0]):
            units.extend(self._cut(group_index, binding))
        return units

    def _cut(self, group_index: int, binding: Binding) -> list[_PagedUnit]:
        group = self.groups[group_index]
        self.writes_gradients |= self.adopted.probed(group, binding).writes_gradients
        self.adopted.fit_states(binding, self.adopted.probed(group, binding))
        pieces = cut(self.adopted, group, binding)
        progress = _Progress(binding, group_index, num_units=len(pieces))
        return [_PagedUnit(progress, piece) for piece in pieces]

    def keep_gradients(self) -> None:
        """After an interrupt: copies of ordinary gradients, which no door keeps users from zeroing."""
        for unit in self.todo:
            if isinstance(unit, _SmallUnit):
                unit.members = [(index, param, grad.clone()) for index, param, grad in unit.members]

    def finish(self) -> None:
        """Do what is left to do. May be called again after an exception."""
        self.refused = False
        with torch.no_grad():
            while self.todo:
                self.todo[0].run(self)
                self.todo.popleft()
        self._order_states()
        self._keeps_alive = None

    def _order_states(self) -> None:
        """Parameters that got a state in this step stand in the order of their groups, as torch makes them."""
        states = self.adopted.optimizer.state
        if len(states) == self._num_states:
            return
        new = {id(param) for param in list(states)[self._num_states :]}
        params = (param for group in self.adopted.optimizer.param_groups for param in group["params"])
        with uninterrupted():
            for param in [param for param in params if id(param) in new]:
                states[param] = states.pop(param)
            self._num_states = len(states)

    def run_class(
        self, group_index: int, params: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Step the user's class on these tensors (their ``.grad`` set); the state dicts it leaves."""
        shadow = make_shadow(
            self.optimizer_class,
            self.attributes,
            [(snapshot_group(self.groups[group_index]), params)],
            dict(zip(params, states, strict=True)),
        )
        try:
            self.step(shadow)
        except Exception as error:
            # Short of memory, it can be done later.
            self.refused = not isinstance(error, (PagerError, torch.OutOfMemoryError, MemoryError))
            self.num_refusals += self.refused
            raise
        return [shadow.state[param] for param in params]


@dataclass(slots=True, eq=False)
class _Progress:
    """What the units of one parameter share."""

    binding: Binding
    group_index: int
    num_units: int = 0
    done: set[int] = field(default_factory=set)
    state: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class _SmallUnit:
    """All tensors under a page: ordinary tensors, stepped in one call per group as torch would."""

    members: list[tuple[int, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )  # group, tensor, gradient
    staged: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] | None = None

    def run(self, update: Update) -> None:
        if self.staged is None:
            self.staged = self._compute(update)
        update.committed = True
        for param, result, state in self.staged:
            param.copy_(result)
            if update.writes_gradients and param.grad is not None and result.grad is not None:
                param.grad.copy_(result.grad)
            states = update.adopted.optimizer.state
            if state or param in states:  # torch makes no entry for an optimizer that keeps nothing
                _commit_small_state(states[param], state)

    def _compute(self, update: Update) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        staged = []
        for group_index in dict.fromkeys(index for index, *_ in self.members):
            params, copies = [], []
            for param, grad in [(param, grad) for index, param, grad in self.members if index == group_index]:
                params.append(param)
                copy = param.detach().clone().requires_grad_(True)
                copy.grad = grad.clone() if update.writes_gradients else grad
                copies.append(copy)
            states = [_cloned(update.adopted.optimizer.state.get(param, {})) for param in params]
            new_states = update.run_class(group_index, copies, states)
            staged += list(zip(params, copies, new_states, strict=True))
        return staged


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _commit_small_state(live: dict[str, Any], new: dict[str, Any]) -> None:
    """Write results into the user's state tensors where they exist: torch updates them in place."""
    for key, value in new.items():
        old = live.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            live[key] = value


class _PagedUnit:
    """A slice of a paged parameter, in the order of its storage; or all of it, in its shape."""

    __slots__ = ("piece", "progress", "staged")

    def __init__(self, progress: _Progress, piece: Slice) -> None:
        self.progress = progress
        self.piece = piece
        self.staged: tuple[torch.Tensor, dict[str, Any]] | None = None  # the stepped copy, its state

    def run(self, update: Update) -> None:
        adopted = update.adopted
        engine = adopted.engine
        binding = self.progress.binding
        states = adopted.paged_states(binding)
        ranges = unit_ranges(adopted, binding, self.piece)
        wanted = [
            (segment, first, num_pages, place >= 2 and self._is_new(engine, segment, first, num_pages))
            for place, (segment, first, num_pages) in enumerate(ranges)
        ]
        with engine.lock:
            engine.timeline.new_tick()
            for segment, first, num_pages in ranges:
                engine.timeline.access(segment.index, first, num_pages, write=True, phase=Phase.UPDATE)
        with uninterrupted():
            runs = engine.acquire_all(wanted, f"the update of {binding.name}")
            leases = [engine.lease(run) for run in runs]
        views: list[torch.Tensor] = []
        try:
            views += [
                self._view(lease, run, segment)
                for lease, run, (segment, *_) in zip(leases, runs, ranges, strict=True)
            ]
            if self.staged is None:
                self.staged = self._compute(update, views)
            update.committed = True
            self._commit(update, runs, views, dict(zip(states, range(2, len(runs)), strict=True)))
        finally:
            # A traceback keeps this call's variables alive, and must not keep pages pinned.
            leases.clear()
            views.clear()
        self._done(update)

    @staticmethod
    def _is_new(engine: Engine, segment: Segment, first: int, num_pages: int) -> bool:
        """Whether these pages of a state have no value yet, so that nothing is to be read."""
        begin = segment.first_page + first
        return not engine.table.has_value(begin, begin + num_pages)

    def _view(self, lease: torch.Tensor, run: Run, segment: Segment) -> torch.Tensor:
        storage = lease.untyped_storage()
        if self.piece.whole:
            return strided_view(storage, segment.dtype, segment.size, segment.stride)
        begin, end, _ = self.piece
        offset = begin - run.first * segment.page_size // segment.dtype.itemsize
        return strided_view(storage, segment.dtype, torch.Size((end - begin,)), (1,), offset)

    def _compute(self, update: Update, views: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Step copies of the views (parameter, gradient, paged states). The user's class sees nothing but copies."""
        binding = self.progress.binding
        copy = views[0].clone().requires_grad_(True)
        copy.grad = views[1].clone()
        places = {key: place for place, key in enumerate(update.adopted.paged_states(binding), start=2)}
        state: dict[str, Any] = {}
        for key, value in update.adopted.optimizer.state.get(binding.tensor, {}).items():
            if key in places:
                state[key] = views[places[key]].clone()
            else:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        new_state = update.run_class(self.progress.group_index, [copy], [state])[0]
        if not update.writes_gradients:
            copy.grad = None
        return copy, new_state

    def _commit(
        self, update: Update, runs: list[Run], views: list[torch.Tensor], places: dict[str, int]
    ) -> None:
        assert self.staged is not None
        adopted = update.adopted
        engine = adopted.engine
        binding = self.progress.binding
        result, new_state = self.staged
        views[0].copy_(result)
        binding.bump_version()
        if result.grad is not None:
            views[1].copy_(result.grad)
            engine.mark_dirty(runs[1])
        for key, value in new_state.items():
            if not isinstance(value, torch.Tensor) or value.shape != result.shape or value.dim() == 0:
                continue
            if key in places and views[places[key]].dtype == value.dtype:
                view, run = views[places[key]], runs[places[key]]
            else:
                state = adopted.make_state(binding, key, value.dtype)
                wanted = (state.segment, *self.piece.pages(state.segment), True)
                with uninterrupted():
                    run = engine.acquire_all([wanted], f"the update of {binding.name}")[0]
                    view = self._view(engine.lease(run), run, state.segment)
            view.copy_(value)
            engine.mark_dirty(run)  # states have no version: nobody saves them for backward

    def _done(self, update: Update) -> None:
        """Count the unit; with the last one the parameter's state dict becomes the new one."""
        assert self.staged is not None
        progress = self.progress
        result, new_state = self.staged
        if progress.state is None:
            paged = update.adopted.paged_states(progress.binding)
            progress.state = {
                key: paged[key].tensor
                if isinstance(value, torch.Tensor) and value.shape == result.shape and value.dim()
                else value
                for key, value in new_state.items()
            }
        progress.done.add(self.piece.begin)
        if len(progress.done) == progress.num_units:
            states = update.adopted.optimizer.state
            if progress.state or progress.binding.tensor in states:
                _commit_state(states[progress.binding.tensor], progress.state)


def _commit_state(live: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        old = live.get(key)
        if old is value:
            continue
        if type(old) is torch.Tensor and isinstance(value, torch.Tensor) and _alike(old, value):
            # Adam's step is updated in place; a scheduler or logger may hold the tensor.
            old.copy_(value)
        else:
            live[key] = value


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
