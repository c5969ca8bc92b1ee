"""An optimizer of the user's whose parameters are paged. The object stays the user's; only its work is
redirected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from pager.errors import ConfigError, PagerInternalError
from pager.homes import Wanted, state_name
from pager.mmu import values
from pager.mmu.binding import Binding
from pager.mmu.gradient import let_go
from pager.mmu.parameter import PagedParameter, PagedTensor, page_tensor
from pager.optim import state_dict
from pager.optim.deferred import Deferred
from pager.optim.masters import LOW, Masters
from pager.optim.probe import Cut, ProbeResult, admit, check_class, key_of
from pager.optim.shadow import move_state
from pager.optim.step_counts import StepCounts
from pager.optim.torn import Torn
from pager.optim.update import Update
from pager.page_table import Home
from pager.units import even_slices

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.mmu.mmu import Mmu
    from pager.optim.backward import BackwardUpdates
    from pager.optim.bookkeeping import Opening
    from pager.optim.on_cpu import CpuUpdates
    from pager.optim.streamed import StreamedUnit

# A unit of the update may fill this share of the arena, so that the next ones can arrive while it is
# computed.
_UNIT_SHARE = 4
# Bytes of parameter in a unit: large, since each costs the host about a millisecond; small against any arena
# that needs units.
UNIT_BYTES = 64 * 2**20
# A parameter up to this share is brought in whole for its update, and is then there for the next forward.
_WHOLE_SHARE = 3


class AdoptedOptimizer:
    """One optimizer over (some of) one managed model's parameters.

    ``new_segment`` makes a segment with a place at its home; ``plan_states`` gives states homes and reserves
    room there; ``retire`` frees those of a binding that is no more; ``end_step`` is called when a user's step is
    over. The optimizer is not kept alive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mmu: Mmu,
        *,
        new_segment: Callable[..., Segment],
        plan_states: Callable[[list[Wanted]], None],
        retire: Callable[[Binding], None],
        end_step: Callable[[AdoptedOptimizer], None],
        torn: Torn,
        master: bool = False,
        in_backward: BackwardUpdates | None = None,
        on_cpu: CpuUpdates | None = None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.mmu = mmu
        self.engine: Engine = mmu.engine
        self._new_segment = new_segment
        self._plan_states = plan_states
        self._retire = retire
        self._end_step = end_step
        self.torn = torn
        # By the parameter's binding: its segment changes with its dtype or layout.
        self._states: dict[Binding, dict[str, Binding]] = {}
        self._in_backward = in_backward
        # What updates some of the parameters in ``step()``; in backward it is asked there.
        self.on_cpu = on_cpu if in_backward is None else None
        self.step_counts = StepCounts()
        self._is_adopted = False
        self.masters = Masters(self, enabled=master)
        mmu.keeps_masters |= master
        self._probed: dict[Any, ProbeResult] = {}
        # How parameters were cut last; equal steps, which is nearly all of them, are cut alike.
        self.cut_units: dict[Binding, list[StreamedUnit]] = {}
        self.update: Update | None = None
        self.deferred: Deferred | None = None
        self._gradients_seen = -1
        self._hooks: list[Any] = []
        self.masters.check_loaded()
        check_class(optimizer)
        for binding, result in self._check_groups():
            self._make_room(binding, result)
        self.page_existing_state()
        self._hooks += state_dict.install(self)
        self._is_adopted = True

    @property
    def alive(self) -> bool:
        """Whether the user still has the optimizer."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise PagerInternalError("the adopted optimizer is gone")
        return optimizer

    # -- what it knows of its parameters -----------------------------------------------------------

    def binding_of(self, param: torch.Tensor) -> Binding | None:
        """The parameter's binding, None if it is an ordinary tensor."""
        if type(param) is not PagedParameter:
            return None
        binding = param._pager
        if binding.mmu is not self.mmu:
            raise ConfigError(
                f"{type(self.optimizer).__name__} has parameters of two managed models (such as {binding.name}); "
                "use one optimizer for each"
            )
        return binding

    def bindings(self) -> list[Binding]:
        """The paged parameters of all groups."""
        found = [self.binding_of(p) for group in self.optimizer.param_groups for p in group["params"]]
        return [binding for binding in found if binding is not None]

    def next_use(self, binding: Binding) -> int:
        """Where the parameter's next use lies, for the order of the update; unknown ones keep the parameters'
        order.
        """
        return self.mmu.update_order(binding.segment.index)

    def _check_groups(self) -> list[tuple[Binding, ProbeResult]]:
        """Probe every group; refuse what cannot be paged."""
        found = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                binding = self.binding_of(param)
                if binding is not None:
                    found.append((binding, self.probed(group, binding)))
        self._plan_states(
            [
                Wanted(
                    "state",
                    state_name(binding.name, ordinal),
                    binding.segment.num_bytes // binding.segment.dtype.itemsize * dtype.itemsize,
                )
                for binding, result in found
                if binding.tensor.requires_grad
                for ordinal, dtype in enumerate(self._kept_dtypes(binding, result).values())
            ]
        )
        return found

    def _make_room(self, binding: Binding, result: ProbeResult) -> None:
        """Segments for the states this optimizer will make, so that the plan knows them and steps allocate
        nothing.
        """
        if binding.tensor.requires_grad:
            for key, dtype in self._kept_dtypes(binding, result).items():
                self.make_state(binding, key, dtype)

    def _kept_dtypes(self, binding: Binding, result: ProbeResult) -> dict[str, torch.dtype]:
        """The dtypes of all that is kept of a parameter: the class's states, and a master's low bits."""
        low = {LOW: torch.int16} if self.masters.has(binding) else {}
        return {**result.state_dtypes, **low}

    def stepped_dtype(self, binding: Binding) -> torch.dtype:
        """The dtype in which the class sees the parameter."""
        return torch.float32 if self.masters.has(binding) else binding.segment.dtype

    def probed(self, group: Mapping[str, Any], binding: Binding) -> ProbeResult:
        """How this optimizer may be cut with these group values. Raises ConfigError for coupled ones."""
        dtype = self.stepped_dtype(binding)
        live = self.optimizer.state.get(binding.tensor, {}).items()
        states = [(key, value._pager.segment.dtype) for key, value in live if type(value) is PagedTensor]
        others = sorted((key, str(kept)) for key, kept in states if kept != dtype)
        key = (*key_of(group, dtype), tuple(others))
        found = self._probed.get(key)
        if found is None:
            found = self._probed[key] = self._probe(group, binding)
        return found

    def cut_depends_on(self, group: Mapping[str, Any], binding: Binding) -> tuple[Any, ...]:
        """What the units of a parameter's update depend on; equal answers mean equal units."""
        live = self.optimizer.state.get(binding.tensor, {})
        return (
            binding.segment.index,
            None if binding.gradient is None else binding.gradient.segment.index,
            tuple(live),
            tuple(state.segment.index for state in self.paged_states(binding).values()),
            self.engine.staging.slot_bytes,
            key_of(group, self.stepped_dtype(binding)),
        )

    def _probe(self, group: Mapping[str, Any], binding: Binding) -> ProbeResult:
        device = self.engine.device.torch_device
        try:
            return admit(self.optimizer, group, binding.tensor, self.stepped_dtype(binding), device)
        except ConfigError as error:
            if not self._is_adopted or error.__cause__ is None:
                raise
            # It worked before the model was converted, or the group changed: let step() raise what it raises.
            return ProbeResult(cut=Cut.WHOLE_TENSOR, state_dtypes={}, writes_gradients=True)

    def unit_elements(self, binding: Binding, probed: ProbeResult) -> int:
        """Elements of a slice: aligned to pages in every dtype involved, small enough that several fit the
        device.
        """
        segment = binding.segment
        dtypes = [state.segment.dtype for state in self.paged_states(binding).values()]
        dtypes += [
            dtype for key, dtype in probed.state_dtypes.items() if key not in self.paged_states(binding)
        ]
        slot = binding.gradient
        dtypes.append(segment.dtype if slot is None else slot.segment.dtype)
        sizes = [segment.dtype.itemsize, *(dtype.itemsize for dtype in dtypes)]
        align = segment.page_size // min(sizes)
        if self.stages(binding):
            most = self.engine.staging.slot_bytes // sum(self._staged_sizes(binding))
        else:
            room = self.engine.arena.capacity_bytes // _UNIT_SHARE // sum(sizes)
            most = min(room, UNIT_BYTES // segment.dtype.itemsize)
        return even_slices(segment.num_elements, most, align)

    def stages(self, binding: Binding) -> bool:
        """Whether a staging slot holds a unit of this parameter's update."""
        return self.engine.staging.slot_bytes >= self.slot_bytes(binding) > 0

    def slot_bytes(self, binding: Binding) -> int:
        """The least a slot must have for a unit: the smallest slices that are whole pages in every dtype."""
        sizes = self._staged_sizes(binding)
        return binding.segment.page_size // min(binding.segment.dtype.itemsize, *sizes) * sum(sizes)

    def _staged_sizes(self, binding: Binding) -> list[int]:
        """Bytes per element of what passes through a slot: states, and the gradient unless autograd brings it."""
        states = [state.segment.dtype.itemsize for state in self.paged_states(binding).values()]
        if self._in_backward is not None and states:
            return states
        gradient = binding.segment if binding.gradient is None else binding.gradient.segment
        return [gradient.dtype.itemsize, *states]

    def keeps_whole(self, segment: Segment) -> bool:
        """Whether a parameter is small enough to be brought in whole for its update."""
        return segment.num_pages * segment.page_size <= self.engine.arena.capacity_bytes // _WHOLE_SHARE

    # -- state -------------------------------------------------------------------------------------

    def paged_states(self, binding: Binding) -> dict[str, Binding]:
        """The parameter's paged states by key; do not change it."""
        return self._states.setdefault(binding, {})

    def make_state(self, binding: Binding, key: str, dtype: torch.dtype) -> Binding:
        """The binding of a state in the parameter's shape and layout, made if need be; another one's value is lost."""
        states = self.paged_states(binding)
        state = states.get(key)
        if state is not None:
            if state.segment.dtype == dtype and state.segment.stride == binding.segment.stride:
                return state
            self._drop(state)
        segment = self._new_segment(
            name=f"{binding.name}.{key}",
            kind="state",
            size=binding.segment.size,
            stride=binding.segment.stride,
            dtype=dtype,
            # One that takes another's place, in another dtype, was not planned.
            planned_as=state_name(binding.name, len(states)) if state is None else None,
        )
        tensor = torch.empty(0, dtype=dtype, device=self.engine.device.torch_device)
        state = Binding(self.mmu, segment, tensor, torch.Tensor)
        self.mmu.bind(state)
        page_tensor(state, PagedTensor)
        state.owner = binding
        states[key] = state
        if Home(int(self.engine.table.home[segment.first_page])) is Home.DEVICE:
            # Its frames are taken now, while they lie together.
            whole = (segment, 0, segment.num_pages, True)
            self.engine.release(self.engine.acquire_all([whole], f"making {segment.name}")[0])
        return state

    def fit_states(self, binding: Binding, probed: ProbeResult) -> None:
        """Room for states that have no value yet follows the parameter's dtype and layout."""
        live = self.optimizer.state.get(binding.tensor, {})
        states = self.paged_states(binding)
        for key in [key for key in probed.state_dtypes if key in states and key not in live]:
            self.make_state(binding, key, probed.state_dtypes[key])

    def retire_states(self) -> None:
        """The user's optimizer is gone: so are its states."""
        for states in self._states.values():
            while states:
                self._drop(states.popitem()[1])

    def _drop(self, state: Binding) -> None:
        """Give up a state. Who holds its tensor keeps the value, as in torch."""
        let_go(state, lambda kept: values.cpu_tensor(self.mmu, state, alias=False).to(kept.phantom.device))
        self._retire(state)

    def is_param_shaped(self, binding: Binding, value: Any) -> bool:
        """Whether a state value is paged: a tensor of the parameter's shape."""
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == binding.segment.size

    def page_state(self, binding: Binding, key: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Move an ordinary state tensor into pages; the paged tensor that stands for it."""
        state = self.make_state(binding, key, dtype)
        values.store(self.mmu, state, value.to(dtype))
        return state.tensor

    def page_existing_state(self) -> None:
        """Take state tensors that the optimizer or the user made into pages."""
        device = self.engine.device.torch_device
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                binding = self.binding_of(param)
                for key, value in self.optimizer.state.get(param, {}).items():
                    if type(value) is PagedTensor:
                        continue
                    if binding is not None and self.is_param_shaped(binding, value):
                        self.optimizer.state[param][key] = self.page_state(binding, key, value, value.dtype)
                    elif isinstance(value, torch.Tensor) and value.dim() > 0:
                        # Scalars such as Adam's step stay where the optimizer put them.
                        self.optimizer.state[param][key] = value.to(device)

    # -- a step ------------------------------------------------------------------------------------

    def take_up(self, *, may_resume: bool) -> bool:
        """A user's class is about to step. True if it goes on with an interrupted step; else that is finished."""
        update = self.update
        if update is None or update.books is None:
            return False
        if may_resume and self.mmu.gradients.generation == self._gradients_seen:
            update.books.undo(self.optimizer)
            return True
        self.finish()
        if self.update is update:
            update.settle_books()
            self.update = None
        return False

    def begin_step(self, opening: Opening | None) -> None:
        """The class reads its groups: remember the values it begins with. An interrupted step is taken up again."""
        self.finish_deferred()
        if self._in_backward is not None:
            self._in_backward.begin_step(self)
        if self.update is not None and self.mmu.gradients.generation != self._gradients_seen:
            self.finish()
            self.update = None
        self.torn.check()
        if self.update is None:
            self.engine.raise_failure()
            self.take_over_writes(self.bindings())
            self.update = Update(self, opening=opening)
            self._gradients_seen = self.mmu.gradients.generation
            with self.engine.lock:
                self.engine.timeline.begin_update()

    def take_over_writes(self, bindings: Iterable[Binding]) -> None:
        """Before these parameters are updated: what was written to tensors of a state dict counts, states too."""
        if self.mmu.aliases:
            for binding in bindings:
                self.mmu.aliases.settle([binding, *self.paged_states(binding).values()])

    def finish_deferred(self) -> None:
        """Carry out what waits of the last step."""
        if self.deferred is not None:
            self.deferred.run_all()
            self.deferred = None

    def finish(self, *, in_step: bool = False) -> None:
        """Carry the step under way to its end. What the user's class raises is raised ``in_step`` only.

        ``in_step``: updates that may wait for their parameters' next use do so; else they run too.
        """
        self._finish_begun(in_step=in_step)
        if not in_step:
            self.finish_deferred()

    def _finish_begun(self, *, in_step: bool) -> None:
        update = self.update
        if update is None or update.is_over:
            return
        # What runs below reads and writes values, and must not come back here.
        others = [finish for finish in self.mmu.unfinished if finish != self.finish]
        self.mmu.unfinished = []
        try:
            self._run(update, in_step=in_step)
        except BaseException:
            if not update.is_over:
                update.keep_gradients()
                others.append(self.finish)
            raise
        finally:
            self.mmu.unfinished = others
        if not in_step and self.update is update and self.alive:
            update.settle_books()

    def _run(self, update: Update, *, in_step: bool) -> None:
        while not update.is_over:
            try:
                update.finish()
            except Exception as error:
                if not update.refused:
                    raise
                if not update.committed or update.num_refusals > 1:
                    self.give_up(error)
                    if in_step and update.committed:
                        self.torn.check()
                if in_step:
                    raise

    def give_up(self, error: Exception) -> None:
        """Drop what is left of the step under way; with a part of it done the model is torn."""
        update, self.update = self.update, None
        self.mmu.unfinished = [finish for finish in self.mmu.unfinished if finish != self.finish]
        if update is not None and not update.is_over:
            update.drop()
            self.torn.gave_up(update.optimizer_class, error, half_done=update.committed)

    def end_step(self) -> None:
        """``step()`` is over: everything is updated."""
        self.finish(in_step=True)
        self.update = None
        self._end_step(self)

    def close(self, tensor_of: Callable[[Binding], torch.Tensor]) -> None:
        """Give the optimizer ordinary state tensors again and take our hooks off."""
        self.finish()
        for state in self.optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if type(value) is PagedTensor and value._pager.mmu is self.mmu:
                    state[key] = tensor_of(value._pager)
        self.masters.end()
        move_state(self.optimizer, torch.device("cpu"))
        for hook in self._hooks:
            hook.remove()
