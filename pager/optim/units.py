"""Units of the update: what is stepped at a time, and how its results are committed.

A unit's class step works on copies; committing them is the only part that changes anything, and can be done again.
`pager.optim.streamed` has the units whose states pass through staging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding, strided_view
from pager.mmu.clipping import Scale, scaled, scaled_copy
from pager.optim.master import join, split
from pager.optim.masters import LOW
from pager.optim.schedule import Slice, note_accesses, unit_ranges
from pager.optim.together import clone_all, copy_all, single_ones
from pager.spans import span

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.engine.run import Run
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.update import Update


@dataclass(slots=True, eq=False)
class Progress:
    """What the units of one parameter share.

    keys: those of its state, in the user's order.
    depends_on: what the cut into units follows from.
    is_fresh: it has no state yet; the step makes it.
    has_master: the parameter is stepped in fp32; low_is_valid: its low bits are those of its present value.
    scalars: the values of its state that are not paged, as they were when the step began; each unit starts from them.
    new_scalars: what the step makes of them, where the user has to see that before the units have run.
    scale: what clipping owed the gradient when the step began.
    """

    binding: Binding
    group_index: int
    num_units: int = 0
    done: set[int] = field(default_factory=set)
    state: dict[str, Any] | None = None
    depends_on: tuple[Any, ...] = ()
    is_fresh: bool = False
    has_master: bool = False
    low_is_valid: bool = False
    scalars: dict[str, Any] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    new_scalars: dict[str, Any] | None = None
    scale: Scale | None = None

    def look_again(self, adopted: AdoptedOptimizer) -> None:
        """Another step: what of the states there is to be fetched."""
        self.is_fresh = not adopted.optimizer.state.get(self.binding.tensor, {})
        self.low_is_valid = adopted.masters.are_valid(self.binding)

    def keep_scalars(self, adopted: AdoptedOptimizer, *, copied: bool = True) -> None:
        """Remember the state's values that are not paged. ``copied``: they may change before the units have run."""
        paged = adopted.paged_states(self.binding)
        live = adopted.optimizer.state.get(self.binding.tensor, {})
        self.is_fresh = not live
        self.keys = [key for key in live if key != LOW]
        scalars = {key: live[key] for key in self.keys if key not in paged}
        self.scalars = _cloned(scalars) if copied else scalars

    def state_of(self, paged: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A state dict to be stepped: these tensors, and copies of what is not paged, in the user's order."""
        return {key: paged[key] if key in paged else _copy_of(self.scalars[key]) for key in self.keys}

    def commit_state(self, update: Update, new: dict[str, Any]) -> None:
        """The parameter's entry in the user's state dict becomes ``new``."""
        live = update.adopted.optimizer.state[self.binding.tensor]
        step, version = _step_of(live)
        for old, value in _commit_state(live, new):
            old.copy_(value)
        if not update.may_skip:
            update.adopted.step_counts.add_one(self.binding, step, version)

    def finish_one(self, update: Update, piece: Slice, new: dict[str, Any]) -> None:
        """A unit is done that left the state dict ``new``; with the last one the scalars become the new ones."""
        self.done.add(piece.begin)
        if self.new_scalars is not None:
            return  # they were shown when the step returned
        if self.state is None:
            # All slices agree in what is not paged.
            paged = update.adopted.paged_states(self.binding)
            self.state = {
                key: paged[key].tensor if key in paged else value for key, value in new.items() if key != LOW
            }
        if len(self.done) == self.num_units:
            states = update.adopted.optimizer.state
            if self.state or self.binding.tensor in states:
                self.commit_state(update, self.state)
            # Units that are kept for the next step must not look like a user who holds the states.
            self.state = None
            update.adopted.masters.written(self.binding)


def keep_copies(members: Sequence[Progress]) -> None:
    """Copies of what these hold of the user's scalars, which may change before the units have run."""
    for progress, scalars in zip(members, _all_cloned([known.scalars for known in members]), strict=True):
        progress.scalars = scalars


def show_scalars(update: Update, members: Sequence[Progress]) -> None:
    """Write what the step makes of the scalars into the user's state dicts, in few launches."""
    states = update.adopted.optimizer.state
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    steps = []
    for progress in members:
        new = progress.new_scalars
        assert new is not None
        if new or progress.binding.tensor in states:
            live = states[progress.binding.tensor]
            steps.append((progress.binding, *_step_of(live)))
            written += _commit_state(live, new)
    copy_all(written)
    for binding, step, version in steps if not update.may_skip else ():
        update.adopted.step_counts.add_one(binding, step, version)


def make_stand_ins(
    update: Update, members: Sequence[Progress]
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """For each parameter one of a single element, with gradient, and its state, which the class steps as it would the
    whole. In few launches, since a model has hundreds.
    """
    adopted = update.adopted
    states = [adopted.paged_states(progress.binding) for progress in members]
    stepped = [adopted.stepped_dtype(progress.binding) for progress in members]
    dtypes = [state.segment.dtype for paged in states for state in paged.values()]
    ones = iter(single_ones([*stepped, *stepped, *dtypes], adopted.engine.device.torch_device))
    params = [next(ones).requires_grad_(True) for _ in members]
    for param in params:
        param.grad = next(ones)
    single = [{key: next(ones) for key in paged} for paged in states]
    scalars = _all_cloned([progress.scalars for progress in members])
    return params, [
        {key: one[key] if key in one else own[key] for key in progress.keys}
        for progress, one, own in zip(members, single, scalars, strict=True)
    ]


@dataclass(slots=True, eq=False)
class SmallUnit:
    """All tensors under a page: ordinary tensors, stepped in one call per group as torch would."""

    members: list[tuple[int, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )  # group, tensor, gradient
    staged: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] | None = None

    def run(self, update: Update) -> None:
        if self.staged is None:
            self.staged = self._compute(update)
        update.committed = True
        masters = update.adopted.masters
        written = []
        for param, result, state in self.staged:
            written.append((param, result.detach()))
            if update.writes_gradients and param.grad is not None and result.grad is not None:
                written.append((param.grad, result.grad))
            states = update.adopted.optimizer.state
            if state or param in states:  # torch makes no entry for an optimizer that keeps nothing
                written += _commit_small_state(states[param], state)
        copy_all(written)
        for param, result, _ in self.staged:
            if masters.has_small(param):
                masters.keep_small(param, result.detach())

    def _compute(self, update: Update) -> list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        staged = []
        masters = update.adopted.masters
        for group_index in dict.fromkeys(index for index, *_ in self.members):
            members = [(param, grad) for index, param, grad in self.members if index == group_index]
            params = [param for param, _ in members]
            copies = clone_all([masters.small(p) if masters.has_small(p) else p.detach() for p in params])
            grads = dict(members)
            with_master = [param for param in params if masters.has_small(param)]
            wide = clone_all([grads[param] for param in with_master], dtype=torch.float32)
            grads.update(zip(with_master, wide, strict=True))
            if update.writes_gradients:
                grads = dict(zip(grads, clone_all(list(grads.values())), strict=True))
            for param, copy in zip(params, copies, strict=True):
                copy.requires_grad_(True).grad = grads[param]
            states = _all_cloned([update.adopted.optimizer.state.get(param, {}) for param in params])
            new_states = update.run_class(group_index, copies, states)
            staged += list(zip(params, copies, new_states, strict=True))
        return staged


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy_of(value) for key, value in state.items()}


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _all_cloned(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    clones = iter(clone_all(tensors))
    return [
        {key: next(clones) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        for state in states
    ]


def _commit_small_state(live: dict[str, Any], new: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results that are to be written into the user's state tensors, where they exist: torch updates them in place. The
    others take their place.
    """
    written = []
    for key, value in new.items():
        old = live.get(key)
        if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.shape == value.shape:
            if old is not value:  # what was interrupted comes here twice
                written.append((old, value))
        else:
            live[key] = value
    return written


class PagedUnit:
    """A slice of a paged parameter, in the order of its storage; or all of it, in its shape."""

    __slots__ = ("is_noted", "piece", "progress", "staged")

    def __init__(self, progress: Progress, piece: Slice) -> None:
        self.progress = progress
        self.piece = piece
        self.is_noted = False  # whether the timeline knows of the unit's accesses
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
        if not self.is_noted:
            note_accesses(engine, ranges)
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
                with span("update"):
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
        places = {key: place for place, key in enumerate(update.adopted.paged_states(binding), start=2)}
        if self.progress.has_master:
            return self._compute_master(update, views, places)
        copy = views[0].clone().requires_grad_(True)
        copy.grad = scaled_copy(views[1], self.progress.scale)
        new_state = self._step(update, copy, views, places)
        if not update.writes_gradients:
            copy.grad = None
        return copy, new_state

    def _compute_master(
        self, update: Update, views: list[torch.Tensor], places: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The same in fp32; the result is the rounded master, its low bits among the states."""
        master = views[0].float()
        if self.progress.low_is_valid:
            weight, low = views[0].contiguous(), views[places[LOW]].contiguous()
            master.copy_(join(weight, low, torch.empty_like(weight, dtype=torch.float32)))
        master.requires_grad_(True)
        master.grad = scaled(views[1], self.progress.scale).float()
        new_state = self._step(update, master, views, places)
        whole = master.detach().contiguous()
        weight = torch.empty_like(whole, dtype=torch.bfloat16)
        low = torch.empty_like(whole, dtype=torch.int16)
        split(whole, weight, low)
        if update.writes_gradients:
            weight.grad = master.grad.to(torch.bfloat16)
        return weight, {**new_state, LOW: low}

    def _step(
        self, update: Update, copy: torch.Tensor, views: list[torch.Tensor], places: dict[str, int]
    ) -> dict[str, Any]:
        binding = self.progress.binding
        state: dict[str, Any] = {}
        for key, value in update.adopted.optimizer.state.get(binding.tensor, {}).items():
            if key in places:
                state[key] = views[places[key]].clone()
            else:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return update.run_class(self.progress.group_index, [copy], [state])[0]

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
            assert binding.gradient is not None
            binding.gradient.norm = None
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
                if key != LOW
            }
        progress.done.add(self.piece.begin)
        if len(progress.done) == progress.num_units:
            states = update.adopted.optimizer.state
            if progress.state or progress.binding.tensor in states:
                progress.commit_state(update, progress.state)
            update.adopted.masters.written(progress.binding)


def _step_of(live: dict[str, Any]) -> tuple[Any, int]:
    """A state dict's step count, and its version."""
    step = live.get("step")
    return step, step._version if isinstance(step, torch.Tensor) else 0


def _commit_state(live: dict[str, Any], new: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Let ``live`` hold what ``new`` does; returned is what is to be copied for it."""
    written = []
    for key, value in new.items():
        old = live.get(key)
        if old is value:
            continue
        if type(old) is torch.Tensor and isinstance(value, torch.Tensor) and _alike(old, value):
            # Adam's step is updated in place; a scheduler or logger may hold the tensor.
            written.append((old, value))
        else:
            live[key] = value
    return written


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
