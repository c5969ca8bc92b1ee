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

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pager.errors import PagerError
from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding
from pager.optim.bookkeeping import Bookkeeping, Opening
from pager.optim.deferred import Deferred, is_viewed, isolated
from pager.optim.schedule import cut
from pager.optim.shadow import make_shadow, may_wait, raw_step, snapshot_attributes, snapshot_group
from pager.optim.streamed import StreamedUnit, can_stream
from pager.optim.units import PagedUnit, Progress, SmallUnit, keep_copies

# Units that are looked at ahead of the one that is computed: no more than there can be slots.
_UNITS_AHEAD = 16

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.cpu_job import CpuUnit


class Update:
    """One step of one optimizer: the values it began with, and the units still to do."""

    def __init__(
        self, adopted: AdoptedOptimizer, *, collect: bool = True, opening: Opening | None = None
    ) -> None:
        """``collect``: of all parameters that have a gradient; else whoever made this asks for units one by one.
        ``opening``: what ``step()`` began with, where the class is the user's and a step is under way.
        """
        optimizer = adopted.optimizer
        self.adopted = adopted
        # Not to be lost in mid-step, though its user may drop it.
        self._keeps_alive: Optimizer | None = optimizer
        # Whether values of this step are in pages; whether, and how often, it was the user's class that raised.
        self.committed = False
        self.refused = False
        self.num_refusals = 0
        self.optimizer_class: type[Optimizer] = type(optimizer)
        self._own_shadow: Optimizer | None = None
        self.step = raw_step(optimizer)
        self.attributes = snapshot_attributes(optimizer)
        self.groups = [snapshot_group(group) for group in optimizer.param_groups]
        # torch's own classes leave all but states as it is.
        self.books = None if may_wait(self.optimizer_class) else Bookkeeping(optimizer, self.step, opening)
        # GradScaler hands its scale to a fused step, which then divides the gradients in place, and some classes
        # write to them too: then the copies that were stepped go back into the gradients.
        self.writes_gradients = self.attributes.get("grad_scale") is not None
        # With these a fused class steps nothing where a gradient is not finite.
        self.may_skip = any(self.attributes.get(name) is not None for name in ("grad_scale", "found_inf"))
        adopted.page_existing_state()
        self._num_states = len(optimizer.state)
        self.todo: deque[SmallUnit | PagedUnit | StreamedUnit | CpuUnit] = deque(
            self._units() if collect else ()
        )
        # What waits until the parameters are used next; begun when everything else is done.
        self.later: Deferred | None = self._defer()

    def _defer(self) -> Deferred | None:
        if self.writes_gradients or not may_wait(self.optimizer_class):
            return None
        waiting = [
            unit for unit in self.todo if isinstance(unit, StreamedUnit) and not unit.progress.is_fresh
        ]
        self.adopted.engine.drain()
        viewed = {
            binding
            for binding in {unit.progress.binding for unit in waiting}
            if any(map(is_viewed, self._seen_of(binding)))
        }
        waiting = [unit for unit in waiting if unit.progress.binding not in viewed]
        if not waiting:
            return None
        left = set(map(id, waiting))
        self.todo = deque(unit for unit in self.todo if id(unit) not in left)
        return Deferred(self, waiting)

    def _seen_of(self, binding: Binding) -> list[Binding]:
        """What a user may hold views of, and look at or write to unseen: a parameter, its gradient, its states."""
        slot = [binding.gradient] if binding.gradient is not None else []
        return [binding, *slot, *self.adopted.paged_states(binding).values()]

    def _units(self) -> list[SmallUnit | PagedUnit | StreamedUnit | CpuUnit]:
        adopted = self.adopted
        small = SmallUnit()
        paged: list[tuple[int, int, Binding]] = []
        for group_index, group in enumerate(adopted.optimizer.param_groups):
            for param in group["params"]:
                binding = adopted.binding_of(param)
                if binding is None:
                    if param.grad is not None:
                        small.members.append((group_index, param, param.grad))
                    continue
                if binding.pending is not None and self._has_gradient(binding):
                    binding.pending.run(binding)  # of another optimizer, which had the parameter before
                binding.mmu.gradients.take_from_graph(binding)
                slot = binding.gradient
                if slot is not None and adopted.engine.has_value(slot.segment):
                    paged.append((adopted.next_use(binding), group_index, binding))
        for _, group_index, binding in paged:
            self.writes_gradients |= adopted.probed(self.groups[group_index], binding).writes_gradients
        for binding in [binding for *_, binding in paged] if self.writes_gradients else ():
            assert binding.gradient is not None
            adopted.mmu.clipping.apply(binding.gradient)
        units: list[SmallUnit | PagedUnit | StreamedUnit | CpuUnit] = [small] if small.members else []
        on_device: list[PagedUnit | StreamedUnit] = []
        again: list[Progress] = []
        on_cpu = None if self.writes_gradients else adopted.on_cpu
        is_ahead = True
        for _, group_index, binding in sorted(paged, key=lambda item: item[0]):
            if on_cpu is not None and binding in on_cpu.assigned:
                units.append(on_cpu.unit(group_index, binding))  # first: they have the longest way to go
                continue
            new = self.units_again(group_index, binding, again)
            on_device.extend(new)
            # The link is at rest, and has something to do while the host goes on with this.
            is_ahead = is_ahead and self._fetch(new)
        keep_copies(again)
        return [*units, *on_device]

    def _fetch(self, units: Sequence[PagedUnit | StreamedUnit]) -> bool:
        """Begin to bring what these need; whether there may be room for more."""
        with isolated(self):
            return all(isinstance(unit, StreamedUnit) and unit.fetch(self.adopted) for unit in units)

    def _has_gradient(self, binding: Binding) -> bool:
        """Whether there is one to step with. An update inside backward that the CPU is still at left none."""
        slot = binding.gradient
        return binding.raw_grad() is not None or (
            slot is not None and self.adopted.engine.has_value(slot.segment)
        )

    def units_of(self, group_index: int, binding: Binding) -> list[PagedUnit] | list[StreamedUnit]:
        """The units of one parameter's update."""
        adopted = self.adopted
        group = self.groups[group_index]
        probed = adopted.probed(group, binding)
        adopted.fit_states(binding, probed)
        pieces = cut(adopted, group, binding)
        progress = self._progress(group_index, binding, len(pieces))
        sliced = not any(piece.whole for piece in pieces)
        if sliced and not self.writes_gradients and can_stream(adopted, binding, probed.state_dtypes):
            self._leave_to_slots(binding, streams=True)
            progress.keep_scalars(adopted)
            return [StreamedUnit(progress, piece) for piece in pieces]
        self._leave_to_slots(binding, streams=False)
        return [PagedUnit(progress, piece) for piece in pieces]

    def units_again(
        self, group_index: int, binding: Binding, again: list[Progress]
    ) -> Sequence[PagedUnit | StreamedUnit]:
        """The same: those of the last step where they serve again. Then what they share is put into ``again``, whose
        scalars are to be copied (`keep_copies`).
        """
        old = self._cut_again(group_index, binding)
        again += [unit.progress for unit in old[:1]]
        if old:
            return old
        new = self.units_of(group_index, binding)
        self.adopted.cut_units[binding] = [unit for unit in new if isinstance(unit, StreamedUnit)]
        return new

    def _leave_to_slots(self, binding: Binding, *, streams: bool) -> None:
        """What of an update is nothing for pagerd: where it streams, the states, and a gradient that went home."""
        streamed = self.adopted.engine.streamed
        states = {state.segment.index for state in self.adopted.paged_states(binding).values()}
        (streamed.update if streams else streamed.difference_update)(states)
        slot = binding.gradient
        if slot is not None:
            hides = streams and slot.goes_home and self.adopted.mmu.gradients.sends
            (streamed.add if hides else streamed.discard)(slot.segment.index)

    def _cut_again(self, group_index: int, binding: Binding) -> list[StreamedUnit]:
        """The streamed units of the last step for this one, their scalars not copied yet (`keep_copies`); none where it
        cuts the parameter otherwise.
        """
        adopted = self.adopted
        units = adopted.cut_units.get(binding, [])
        for unit in units:
            adopted.engine.staging.give_back(unit)  # what was fetched for a step that came to nothing
        if self.writes_gradients or not self.take_again(group_index, binding, units):
            return []
        progress = self._progress(group_index, binding, len(units))
        progress.keep_scalars(adopted, copied=False)
        for unit in units:
            unit.progress = progress
        self._leave_to_slots(binding, streams=True)
        return units

    def _progress(self, group_index: int, binding: Binding, num_units: int) -> Progress:
        masters = self.adopted.masters
        return Progress(
            binding,
            group_index,
            num_units=num_units,
            has_master=masters.has(binding),
            low_is_valid=masters.are_valid(binding),
            depends_on=self.adopted.cut_depends_on(self.groups[group_index], binding),
            scale=None if binding.gradient is None else binding.gradient.scale,
        )

    def take_again(self, group_index: int, binding: Binding, units: list[StreamedUnit]) -> bool:
        """Let the streamed units of an earlier step be fetched for the next one, which adopts them; False if it would
        cut the parameter otherwise.
        """
        adopted, group = self.adopted, self.groups[group_index]
        if not units or not can_stream(adopted, binding, adopted.probed(group, binding).state_dtypes):
            return False
        if units[0].progress.depends_on != adopted.cut_depends_on(group, binding):
            return False
        for unit in units:
            unit.begin_again()
        units[0].progress.look_again(adopted)
        return True

    def adopt_units(self, group_index: int, binding: Binding, units: list[StreamedUnit]) -> bool:
        """Let units that were made ahead be those of this step, which does not wait; False if it would cut the
        parameter otherwise.
        """
        made = units[0].progress
        progress = self._progress(group_index, binding, len(units))
        if made.num_units != len(units) or made.depends_on != progress.depends_on or self.writes_gradients:
            return False
        progress.keep_scalars(self.adopted, copied=False)
        for unit in units:
            unit.progress = progress
        return True

    @property
    def is_over(self) -> bool:
        """Whether everything is done, or waits for the parameters' next use."""
        return not self.todo and self.later is None

    def keep_gradients(self) -> None:
        """After an interrupt: copies of ordinary gradients, which no door keeps users from zeroing."""
        for unit in self.todo:
            if isinstance(unit, SmallUnit):
                unit.members = [(index, param, grad.clone()) for index, param, grad in unit.members]

    def finish(self) -> None:
        """Do what is left to do. May be called again after an exception."""
        self.refused = False
        with torch.no_grad():
            while self.todo:
                self.todo[0].run(self)
                self.todo.popleft()
                self._fetch_ahead()
        self._order_states()
        if self.later is not None:
            self.later.begin()
            self.adopted.deferred, self.later = self.later, None
        else:
            self.end()

    def _fetch_ahead(self) -> None:
        for unit in itertools.islice(self.todo, _UNITS_AHEAD):
            if not isinstance(unit, StreamedUnit) or not unit.fetch(self.adopted):
                return

    def end(self) -> None:
        """All of the step is done: the user may drop the optimizer."""
        self._keeps_alive = None

    def drop(self) -> None:
        """Forget what is left to do."""
        self.todo.clear()
        if self.later is not None:
            self.later.give_back()
        self.later = None

    def settle_books(self) -> None:
        """The user's optimizer has what this step leaves beside states: nobody ran its class to the end."""
        if self.books is not None:
            self.books.settle(self.adopted.optimizer)

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

    def _shadow(
        self, group_index: int, params: Sequence[torch.Tensor], states: dict[torch.Tensor, dict[str, Any]]
    ) -> Optimizer:
        """An optimizer as the step began with it, over these tensors."""
        if self.books is not None:
            return self.books.shadow(group_index, params, states)
        group = self.groups[group_index]
        if self._own_shadow is None:
            self._own_shadow = make_shadow(
                self.optimizer_class, self.attributes, [(snapshot_group(group), params)], states
            )
            return self._own_shadow
        # torch's own classes leave their attributes and group values as they are: one object serves all units.
        shadow = self._own_shadow
        shadow.param_groups = [{**group, "params": list(params)}]
        shadow.state = defaultdict(dict, states)
        return shadow

    def run_class(
        self, group_index: int, params: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Step the user's class on these tensors (their ``.grad`` set); the state dicts it leaves."""
        shadow: Optimizer | None = None
        is_unfit = False
        try:
            shadow = self._shadow(group_index, params, dict(zip(params, states, strict=True)))
            if self.books is None:
                self.step(shadow)
            else:
                self.books.run(shadow)
                is_unfit = True  # if the check raises: no other time would be better
                self.books.check(shadow, params)
            return [shadow.state[param] for param in params]
        except Exception as error:
            # Short of memory, it can be done later.
            self.refused = is_unfit or not isinstance(
                error, (PagerError, torch.OutOfMemoryError, MemoryError)
            )
            self.num_refusals += self.refused
            raise
        finally:
            if shadow is not None:
                shadow.param_groups, shadow.state = [], defaultdict(dict)  # it must not keep tensors alive
