"""Updates inside backward: each parameter is stepped as soon as its gradient is final.

With ``update_at="backward"`` the user has said that nothing needs the whole gradient before the step. Then a gradient
needs no home: it is stepped where autograd left it, and freed. States stream through staging in the order in which
gradients come, some units ahead of the compute, also across the step (the first states of the next backward are on
their way during its forward). The updates run beside the compute (`pager.optim.update_stream`), which waits where too
many gradients wait for their states: back-pressure instead of storage. Some gradients are kept until the backward ends,
so that the link has something to do in the next forward (`pager.optim.late`).

A gradient is final when it has come as often as the trace says (reentrant checkpointing delivers that of a tied
parameter in parts). Micro-batches that are not the last run in ``accumulate()``: their gradients go to their segments
as in the default mode, and the last one's is added there.

``optimizer.step()`` then has left to do: small tensors, parameters whose gradient came under ``accumulate()`` only,
hooks and counters. An exception inside a backward leaves some parameters a step ahead: the model is torn until values
are loaded.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from pager.errors import ConfigError
from pager.graph.access_trace import Phase
from pager.mmu.gradient import is_alone, is_plain
from pager.optim.deferred import is_viewed, isolated
from pager.optim.late import LateUpdates
from pager.optim.streamed import StreamedUnit
from pager.optim.update import Update
from pager.optim.update_stream import UpdateStream
from pager.policies.staying import is_worth_lending

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.on_cpu import CpuUpdates
    from pager.optim.torn import Torn
    from pager.optim.units import PagedUnit

logger = logging.getLogger("pager.optim")

# Units of the coming parameters that are made ahead, so that their states can be fetched.
_UNITS_AHEAD = 8


class GradientRoom(Protocol):
    """Who knows what device memory there is for gradients that wait."""

    def lent_bytes(self) -> int:
        """Of those that wait for their updates while the backward goes on."""

    def reserve_late(self, num_bytes: int) -> None:
        """From the next step on, have so many bytes in the arena for those that wait for the next forward."""


class BackwardUpdates:
    """Steps the parameters of one managed model while gradients come. Called by autograd's threads."""

    def __init__(
        self,
        mmu: Mmu,
        torn: Torn,
        *,
        optimizers: Callable[[], Sequence[AdoptedOptimizer]],
        num_gradients: Callable[[int], int],
        on_cpu: CpuUpdates | None,
        room: GradientRoom,
    ) -> None:
        """``on_cpu`` updates what it was assigned."""
        self._mmu = mmu
        self._torn = torn
        self._optimizers = optimizers
        # How often a parameter's gradient comes in one backward, by its gradient's segment.
        self._num_gradients = num_gradients
        self.accumulating = False
        self.on_cpu = on_cpu
        self._lent_bytes = room.lent_bytes
        self._stream = UpdateStream(mmu.engine.device, room.lent_bytes)
        self._late = LateUpdates(mmu, self._stream, room.reserve_late)
        self._lock = threading.RLock()
        self._owners: dict[Binding, tuple[AdoptedOptimizer, int]] = {}
        self._known_optimizers: list[AdoptedOptimizer] = []
        self._updates: dict[AdoptedOptimizer, Update] = {}
        self._seen: dict[Binding, int] = {}
        self._stepped: set[Binding] = set()
        # The order in which gradients came in the last step, and the units made ahead for it.
        self._order: list[Binding] = []
        self._last_order: list[Binding] = []
        self._coming: deque[Binding] = deque()
        self._ahead: deque[tuple[StreamedUnit, AdoptedOptimizer]] = deque()
        # Of the last step: they serve the next one too, unless what they were cut for has changed.
        self._units: dict[Binding, list[StreamedUnit]] = {}
        self._cutters: dict[AdoptedOptimizer, Update] = {}
        self._open: set[int] = set()
        # Of ``mmu.gradients.num_zeroed`` when the last step ended; None before it, and once the user was told.
        self._zeroed_before: int | None = None
        self._was_told = False
        self._loads_seen = torn.num_loads

    # -- one gradient ------------------------------------------------------------------------------

    def take(self, binding: Binding, gradient: torch.Tensor) -> bool:
        """Step a parameter whose gradient autograd just finished. False if the gradient is to be kept instead."""
        self._mmu.engine.transfers.forget_sent()
        with self._lock:
            if torch._C._current_graph_task_id() not in self._open:
                self._owners = {}  # the user may have moved parameters between groups since
            owner = None if self.accumulating else self._owner_of(binding)
            if owner is None:
                return False
            self._torn.check()
            if self._zeroed_before == self._mmu.gradients.num_zeroed and not self._was_told:
                self._was_told = True
                logger.warning(
                    "gradients were not zeroed since the last step(). They add up over steps in torch; with "
                    "update_at='backward' each is used up and none adds up. Call zero_grad() after step(), or manage "
                    "the model with update_at='step'"
                )
            self._zeroed_before = None
            self._enter_backward()
            if binding in self._stepped and self._open - {torch._C._current_graph_task_id()}:
                self.check_whole()
            if binding in self._stepped:
                self._torn.mark(f"{binding.name}: a second backward came before optimizer.step().")
                raise ConfigError(
                    f"{binding.name}: a gradient came after the parameter had been updated with an earlier one. With "
                    'update_at="backward" run all micro-batches but the last in `with model.pager.accumulate():`, and '
                    "call optimizer.step() after each backward that is not in it. (Where one backward delivers a "
                    "gradient in parts, as reentrant checkpointing does, pass example_inputs.)"
                )
            seen = self._seen[binding] = self._seen.get(binding, 0) + 1
            slot = binding.gradient
            assert slot is not None
            if seen < self._num_gradients(slot.segment.index):
                return False
            if not self._order:
                self._first_gradient()
            self._stepped.add(binding)
            self._order.append(binding)
            if binding in self._late.chosen:
                self._late.keep(binding, *owner)
                return False
            self._step(binding, *owner, gradient)
            return True

    def _first_gradient(self) -> None:
        self._late.rest.ends()
        if self.on_cpu is not None:
            self.on_cpu.first_gradient()

    def _update_of(self, adopted: AdoptedOptimizer) -> Update:
        """What the updates of this backward belong to."""
        update = self._updates.get(adopted)
        if update is None:
            update = self._updates[adopted] = Update(adopted, collect=False)
        return update

    def _step(
        self, binding: Binding, adopted: AdoptedOptimizer, group_index: int, gradient: torch.Tensor
    ) -> None:
        slot = binding.gradient
        assert slot is not None
        self._mmu.before_access([binding])
        adopted.take_over_writes([binding])
        update = self._update_of(adopted)
        kept = self._mmu.engine.has_value(slot.segment)
        plain = is_plain(gradient, binding.segment)
        on_cpu = self.on_cpu if plain and not kept and is_alone(gradient) else None
        if on_cpu is not None and on_cpu.take(
            adopted, adopted.optimizer.param_groups[group_index], binding, gradient
        ):
            self._mmu.note([slot], Phase.GRADIENT, write=True)
            return
        units: Sequence[PagedUnit | StreamedUnit] = self._take_over(binding, update, group_index)
        units = units or update.units_of(group_index, binding)
        direct = all(isinstance(unit, StreamedUnit) for unit in units) and plain and not kept
        if direct:
            self._mmu.note([slot], Phase.GRADIENT, write=True)
        else:
            self._mmu.gradients.add(binding, gradient)
        is_beside = direct and self._may_run_beside(binding, gradient, adopted, units)
        with isolated(update), self._lend(binding, gradient, adopted, units) if is_beside else nullcontext():
            for unit in units:
                unit.is_noted = True  # the trace has updates after the backward, not in it
                if isinstance(unit, StreamedUnit):
                    unit.comes_with(gradient if direct else None)
            for position, unit in enumerate(units):
                unit.run(update)
                # This parameter's own units come before those of the next: they are not among the ones made ahead.
                own = [later for later in units[position + 1 :] if isinstance(later, StreamedUnit)]
                if all(later.fetch(adopted) for later in own):
                    self._fetch_ahead()
        if not direct:
            self._mmu.engine.discard(slot.segment)
        self._units[binding] = [unit for unit in units if isinstance(unit, StreamedUnit)]

    def _may_run_beside(
        self,
        binding: Binding,
        gradient: torch.Tensor,
        adopted: AdoptedOptimizer,
        units: Sequence[PagedUnit | StreamedUnit],
    ) -> bool:
        """Whether these streamed units may run on the stream beside the compute, and it is worth it."""
        if units[0].progress.is_fresh or not is_worth_lending(gradient.nbytes, self._lent_bytes()):
            return False
        # A view that somebody holds is read without asking, on the compute stream.
        self._mmu.engine.drain()
        return not any(map(is_viewed, (binding, *adopted.paged_states(binding).values())))

    def _lend(
        self,
        binding: Binding,
        gradient: torch.Tensor,
        adopted: AdoptedOptimizer,
        units: Sequence[PagedUnit | StreamedUnit],
    ) -> AbstractContextManager[None]:
        """Computes beside the backward; what the user may drop, or a unit lets go of, outlives the work."""
        own = [*adopted.optimizer.state[binding.tensor].values(), *units[0].progress.scalars.values()]
        paged = [state.tensor for state in adopted.paged_states(binding).values()]
        return self._stream.lend(
            gradient,
            [
                value
                for value in own
                if isinstance(value, torch.Tensor) and not any(value is tensor for tensor in paged)
            ],
        )

    def _owner_of(self, binding: Binding) -> tuple[AdoptedOptimizer, int] | None:
        """The optimizer that steps a parameter, and the parameter's group in it."""
        optimizers = list(self._optimizers())
        if optimizers != self._known_optimizers or binding not in self._owners:
            self._known_optimizers = optimizers
            self._owners = {
                found: (adopted, index)
                for adopted in optimizers
                for index, group in enumerate(adopted.optimizer.param_groups)
                for found in map(adopted.binding_of, group["params"])
                if found is not None
            }
        return self._owners.get(binding)

    def _cutter(self, adopted: AdoptedOptimizer) -> Update:
        """What cuts parameters into units: the step's update, or one that serves for nothing else."""
        update = self._updates.get(adopted) or self._cutters.get(adopted)
        if update is None:
            update = self._cutters[adopted] = Update(adopted, collect=False)
            update.end()  # it steps nothing: the user may drop the optimizer
        return update

    # -- ahead of the gradients --------------------------------------------------------------------

    def _take_over(self, binding: Binding, update: Update, group_index: int) -> list[StreamedUnit]:
        """The units of ``binding`` that were made ahead, their states on the way; none where they fit no more."""
        ahead = [unit for unit, _ in self._ahead if unit.progress.binding is binding]
        if ahead:
            self._ahead = deque(entry for entry in self._ahead if entry[0].progress.binding is not binding)
            if not update.adopt_units(group_index, binding, ahead):
                for unit in ahead:
                    self._mmu.engine.staging.give_back(unit)
                ahead = []
        return ahead

    def _fetch_ahead(self) -> None:
        staging = self._mmu.engine.staging
        if not staging.has_free_slot:
            return
        while len(self._ahead) < _UNITS_AHEAD and self._coming:
            binding = self._coming.popleft()
            owner = self._owner_of(binding)
            if owner is None or binding in self._stepped:
                continue
            if self.on_cpu is not None and binding in self.on_cpu.assigned:
                continue
            adopted, group_index = owner
            self._ahead.extend(
                (unit, adopted) for unit in self._streamed_units(adopted, group_index, binding)
            )
        for unit, adopted in self._ahead:
            if not staging.holds(unit) and not unit.fetch(adopted):
                return

    def _streamed_units(
        self, adopted: AdoptedOptimizer, group_index: int, binding: Binding
    ) -> list[StreamedUnit]:
        """The units of a parameter's update, where all of it streams."""
        cutter = self._cutter(adopted)
        units = self._units.pop(binding, [])
        if not cutter.take_again(group_index, binding, units):
            made = cutter.units_of(group_index, binding)
            units = [unit for unit in made if isinstance(unit, StreamedUnit)]
        for unit in units:
            unit.comes_with(None)
        return units

    # -- the step ----------------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        """A backward that ends well closes what it opened."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._open:
            return
        self._open.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._leave_backward(task))

    def _leave_backward(self, task: int) -> None:
        with self._lock:
            self._stream.join()
            self._late.rest.begins()
            self._late.begin(self._update_of)
            self._open.discard(task)
            self._late.run_beside()

    def check_whole(self) -> None:
        """Raise TornStateError if a backward stopped half way."""
        self.look_for_tear()
        self._torn.check()

    def look_for_tear(self) -> None:
        """Mark the model as torn if a backward stopped half way."""
        self.forget_before_load()
        if self._open - {torch._C._current_graph_task_id()}:
            with self._lock:
                self._stream.join()  # whoever looks now sees each update that was begun
            self._torn.mark("An exception ended a backward in which parameters were updated.")
            self._open.clear()

    def begin_step(self, adopted: AdoptedOptimizer) -> None:
        """``optimizer.step()``: what backward updated is done."""
        self.check_whole()
        for update in (self._updates.pop(adopted, None), self._cutters.pop(adopted, None)):
            if update is not None:
                update.end()

    def end_step(self) -> None:
        """All optimizers have stepped: the next backward begins anew, most likely in the same order."""
        with self._lock:
            # What came under accumulate() only was used up by step(); zero_grad() does not see it.
            for binding in [found for known in self._optimizers() for found in known.bindings()]:
                if binding not in self._stepped and binding.gradient is not None:
                    self._mmu.gradients.set(binding, None)
            self._seen.clear()
            self._stepped.clear()
            self._updates.clear()
            self._last_order, self._order = self._order or self._last_order, []
            known = [
                (binding, *self._owners[binding])
                for binding in self._last_order
                if binding in self._owners and self._owners[binding][0].alive
            ]
            self._late.end_step(known)
            self._coming = deque(found for found in self._last_order if found not in self._late.chosen)
            if self.on_cpu is not None:
                self.on_cpu.assign([owned for owned in known if owned[0] not in self._late.chosen])
                self.on_cpu.backward_ended(link_rests=not self._late.chosen)
            for unit, _ in self._ahead:
                self._mmu.engine.staging.give_back(unit)
            self._ahead.clear()
            self._mmu.engine.transfers.forget_sent()
            self._zeroed_before = self._mmu.gradients.num_zeroed
            # The first states of the next backward are on their way while its forward runs.
            self._fetch_ahead()

    def forget_before_load(self) -> bool:
        """If values were loaded, nothing of the step that was under way counts, and all gradients go. Whether so."""
        if self._torn.num_loads == self._loads_seen:
            return False
        self._loads_seen = self._torn.num_loads
        self._open.clear()
        with self._lock:
            self._stream.join()
            self._late.forget()
        self.end_step()
        return True
