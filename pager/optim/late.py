"""Updates that wait for the end of the backward, so that the link does not rest in the next forward.

The problem. With ``update_at="backward"`` states stream while gradients come. Where the link is the wall it is busy
throughout the backward, and has nothing to do from its end to the first gradient of the next one: the slots are full,
all weights are there. To bring more states ahead, or let written ones wait, takes as much device memory as it moves.
A gradient takes a fifth of that (2 bytes of an element whose states are 10).

So some gradients are kept, those of the parameters that the next forward uses last, and at the end of the backward

1. begin   their step counts, which the user can see, move on at once, on the compute stream
2. run     their updates are enqueued, all of them, on the stream beside the compute, where each waits for its states
3. use     whoever touches a parameter waits, on its stream, for the update that wrote it

How many: as many as the link gets done in the time in which it rested, or in that for which the compute stood still if
that is less (`pager.optim.link_rest`, `pager.policies.update_split`).

Only where all weights stay on the device. Else the link has weights to bring in the forward, and those of these
updates would push out what it uses first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from pager.errors import BudgetError
from pager.optim.deferred import Deferred, is_viewed, isolated
from pager.optim.link_rest import LinkRest
from pager.optim.shadow import may_wait
from pager.optim.streamed import StreamedUnit
from pager.optim.units import keep_copies
from pager.page_table import Home
from pager.policies.update_split import late_elements
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.units import PagedUnit, Progress
    from pager.optim.update import Update
    from pager.optim.update_stream import UpdateStream

logger = logging.getLogger("pager.optim")

# What was planned serves until the link rests for this part of the time, or for so many times as long.
_STEADY = 0.8

Owned = tuple["Binding", "AdoptedOptimizer", int]


class LateUpdates:
    """Which updates of one managed model are late, and the gradients that wait for theirs in this backward."""

    def __init__(self, mmu: Mmu, stream: UpdateStream, reserve: Callable[[int], None]) -> None:
        """``reserve``: have so many bytes of the arena for gradients that wait, from the next step on."""
        self._mmu = mmu
        self._engine = mmu.engine
        self._stream = stream
        self._reserve = reserve
        self.chosen: frozenset[Binding] = frozenset()
        # Those for whose gradients there is room, or will be, and what of elements they were planned for.
        self._planned: dict[Binding, AdoptedOptimizer] = {}
        self._planned_for = 0.0
        self._reserved_bytes = 0
        self._waiting: dict[Binding, tuple[AdoptedOptimizer, int]] = {}
        self._begun: list[Deferred] = []
        self.rest = LinkRest(mmu.engine)
        # Of elements, what was found for a rest of so many seconds.
        self._wanted = self._found_for_seconds = 0.0

    # -- which -------------------------------------------------------------------------------------

    def end_step(self, order: Sequence[Owned]) -> None:
        """Decide about the next step. ``order``: all parameters that were updated in backward, each with optimizer and
        group, in the order of their gradients.
        """
        self.rest.end_step()
        wanted = self._wanted_elements(order)
        if wanted != self._planned_for or not self._is_still_good():
            self._plan(order, wanted)
        num_bytes = sum(b.segment.num_pages * b.segment.page_size for b in self._planned)
        if num_bytes > self._reserved_bytes:
            logger.debug("%s of gradients are to wait for the next forward", format_bytes(num_bytes))
        # In the step after this one there is room for them.
        self.chosen = frozenset(self._planned) if num_bytes <= self._reserved_bytes else frozenset()
        self._reserved_bytes = num_bytes
        self._reserve(num_bytes)

    def _is_still_good(self) -> bool:
        """A step that uses other parameters is no reason to choose anew: what stays would change with each."""
        return bool(self._planned) and all(self._may_be_late(*owned) for owned in self._planned.items())

    def _plan(self, order: Sequence[Owned], wanted: float) -> None:
        self._planned, self._planned_for = {}, wanted
        for binding, adopted, _ in order:
            num_elements = binding.segment.num_elements
            if wanted < num_elements / 2:
                break
            if self._may_be_late(binding, adopted) and self._settle(binding):
                self._planned[binding] = adopted
                wanted -= num_elements

    def _wanted_elements(self, order: Sequence[Owned]) -> float:
        if not self.rest.is_known:
            self._wanted = self._found_for_seconds = 0.0
            return 0.0
        seconds = self.rest.seconds
        if _STEADY * self._found_for_seconds <= seconds <= self._found_for_seconds / _STEADY:
            return self._wanted
        streamed = state_bytes = 0
        for binding, adopted, _ in order:
            if self._may_be_late(binding, adopted):
                streamed += binding.segment.num_elements
                state_bytes += sum(s.segment.num_bytes for s in adopted.paged_states(binding).values())
        if not streamed:
            return 0.0
        try:
            link = self._engine.device.link_bytes_per_second()
        except torch.OutOfMemoryError:
            return 0.0  # where there is no room to measure, gradients have none
        self._found_for_seconds = seconds
        self._wanted = late_elements(
            rest_seconds=seconds,
            stall_seconds=self.rest.stall_seconds,
            link_bytes_per_second=link,
            state_bytes=state_bytes / streamed,
            num_elements=sum(binding.segment.num_elements for binding, *_ in order),
        )
        return self._wanted

    def _may_be_late(self, binding: Binding, adopted: AdoptedOptimizer) -> bool:
        """Whether the parameter stays on the device, and its states stream from host memory."""
        states = adopted.paged_states(binding)
        if binding.fixed is None or not states or not adopted.alive or not may_wait(type(adopted.optimizer)):
            return False
        table = self._engine.table
        return adopted.stages(binding) and all(
            not state.keep and int(table.home[state.segment.first_page]) == Home.HOST
            for state in states.values()
        )

    def _settle(self, binding: Binding) -> bool:
        """Whether its gradient has a home: who is kept may have to leave."""
        assert binding.gradient is not None
        try:
            self._mmu.gradients.settle(binding.gradient)
        except BudgetError:
            return False
        return True

    # -- one backward ------------------------------------------------------------------------------

    def keep(self, binding: Binding, adopted: AdoptedOptimizer, group_index: int) -> None:
        """The final gradient of a parameter that was chosen is here, and is being kept."""
        self._waiting[binding] = (adopted, group_index)

    def forget(self) -> None:
        """Values were loaded after a backward that stopped half way: the gradients that wait are of no use."""
        for binding in self._waiting:
            self._mmu.gradients.set(binding, None)
        self._waiting.clear()

    def begin(self, update_of: Callable[[AdoptedOptimizer], Update]) -> None:
        """The backward is over: from here on nobody sees that the updates of those that wait are still to run."""
        for adopted in dict.fromkeys(adopted for adopted, _ in self._waiting.values()):
            bindings = [binding for binding, owner in self._waiting.items() if owner[0] is adopted]
            self._begin(adopted, update_of(adopted), bindings)
            for binding in bindings:
                del self._waiting[binding]

    def _begin(self, adopted: AdoptedOptimizer, update: Update, bindings: list[Binding]) -> None:
        adopted.finish_deferred()
        adopted.take_over_writes(bindings)
        later: dict[Binding, Sequence[PagedUnit | StreamedUnit]] = {}
        again: list[Progress] = []
        # What the next forward uses first comes first.
        for binding in sorted(bindings, key=adopted.next_use):
            units = self._units(update, binding, again)
            if self._may_run_later(adopted, binding, units):
                later[binding] = units
                self._engine.hand_over(_gradient_of(binding))
                continue
            with isolated(update):
                for unit in units:
                    unit.run(update)
            self._engine.discard(_gradient_of(binding))
        keep_copies(again)
        if later:
            streamed = (unit for units in later.values() for unit in units if isinstance(unit, StreamedUnit))
            deferred = Deferred(update, list(streamed))
            deferred.begin()
            adopted.deferred = deferred
            for binding in later:
                deferred.release(binding)  # as all gradients that backward has used up
            self._begun.append(deferred)

    def run_beside(self) -> None:
        """Enqueue what has begun. What an interrupt leaves is done at its parameters' next use."""
        begun, self._begun = self._begun, []
        for deferred in begun:
            deferred.run_beside(self._stream)

    def _units(
        self, update: Update, binding: Binding, again: list[Progress]
    ) -> Sequence[PagedUnit | StreamedUnit]:
        self._mmu.before_access([binding])
        units = update.units_again(self._waiting[binding][1], binding, again)
        for unit in units:
            unit.is_noted = True  # the trace has updates after the backward, not in it
            if isinstance(unit, StreamedUnit):
                unit.comes_with(None)
        return units

    def _may_run_later(
        self, adopted: AdoptedOptimizer, binding: Binding, units: Sequence[PagedUnit | StreamedUnit]
    ) -> bool:
        """Whether nobody sees when these units run: views are read without asking."""
        if not all(isinstance(unit, StreamedUnit) for unit in units) or units[0].progress.is_fresh:
            return False
        self._engine.drain()
        return not any(map(is_viewed, (binding, *adopted.paged_states(binding).values())))


def _gradient_of(binding: Binding) -> Segment:
    assert binding.gradient is not None
    return binding.gradient.segment
