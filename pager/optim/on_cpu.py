"""Updates on the CPU, beside what streams through the device.

With ``update_on="auto"`` the states of some parameters never leave host memory. Their gradient is sent home, the pool
of update threads (`pager.optim.cpu_pool`) steps parameter and states there in one pass, and a parameter that stays on
the device is sent there. Which ones: spread along the backward; how many: as many as the CPU gets done beside the link
(`pager.policies.update_split`, from measured rates).

One parameter's update, in order

1. take      (autograd's thread, or in ``step()``) the gradient's copy home is enqueued behind the work that made it;
             a parameter that does not stay leaves the device, and pagerd lets it be
2. wait      (a pool thread) for that copy
3. step      (all pool threads) one pass over the homes
4. send      (a pool thread) a parameter that stays goes to the device, behind the last use of the old value
5. use       (the next forward) whoever touches the parameter waits for 3 and for 4 to be enqueued, and its stream
             for the copy

Until 3 is over the gradient is kept, also where the user drops it after ``step()``.

The arithmetic is torch's, but not its vector code: see the tolerance in `pager.optim.adamw_cpu`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pager.interrupts import whole
from pager.optim.adamw_cpu import AdamValues
from pager.optim.cpu_job import MOMENTS, CpuUnit, Job
from pager.optim.cpu_pool import UpdatePool, default_num_threads
from pager.optim.cpu_rates import CpuRates
from pager.optim.deferred import is_viewed
from pager.optim.masters import LOW
from pager.page_table import Home
from pager.policies.update_split import (
    STEADY_THREADS_SHARE,
    Diffusion,
    balanced_share,
    num_slices,
    num_threads_beside_link,
    rate_beside_link,
)

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.gradient_homes import GradientHomes
    from pager.optim.torn import Torn

# Where torch does not know it (2.6), AdamW's weight decay is decoupled and Adam's is not, whatever a group says.
_READS_DECOUPLED = "decoupled_weight_decay" in inspect.signature(torch.optim.Adam).parameters
# An assignment serves until the share has changed by this part of itself.
_STEADY_SHARE = 0.1


class CpuUpdates:
    """The CPU's part of the updates of one managed model."""

    def __init__(self, mmu: Mmu, torn: Torn, gradient_homes: GradientHomes, *, share: float | None) -> None:
        """``share``: of the elements to update here, None to find it."""
        self._mmu = mmu
        self._engine = mmu.engine
        self._torn = torn
        self._fixed_share = share
        self._gradient_homes = gradient_homes
        self._share = 0.0
        # What the assignment was made for.
        self._assigned_share = 0.0
        self._assigned_order: list[Binding] = []
        self._num_assigned_elements = 0
        self.assigned: set[Binding] = set()
        self._pool: UpdatePool | None = None
        self.rates = CpuRates()
        # What the link leaves of host memory, in elements per second.
        self._rate_beside = 0.0
        self._largest_bytes = 0

    # -- which -------------------------------------------------------------------------------------

    def end_step(self, optimizers: Iterable[AdoptedOptimizer]) -> None:
        """A step is over in which all of these updated in ``step()``: decide about the next one."""
        order = [
            (binding, adopted, index)
            for adopted in optimizers
            for index, group in enumerate(adopted.optimizer.param_groups)
            for binding in map(adopted.binding_of, group["params"])
            if binding is not None and binding.gradient is not None and binding.tensor.requires_grad
        ]
        self.assign(sorted(order, key=lambda entry: entry[1].next_use(entry[0]), reverse=True))

    def assign(self, order: Sequence[tuple[Binding, AdoptedOptimizer, int]]) -> None:
        """A step is over: decide which parameters the next one updates here. ``order``: each with optimizer and group,
        those first that are used last.
        """
        total = sum(binding.segment.num_elements for binding, *_ in order)
        # The arena leaves room for two of the largest gradient: one is made while others are on their way.
        self._largest_bytes = max((binding.segment.num_bytes for binding, *_ in order), default=0)
        self.rates.end_step(total)
        self._gradient_homes.renew()
        entries = [
            (binding, adopted, adopted.optimizer.param_groups[index]) for binding, adopted, index in order
        ]
        if not any(self._can_update(*entry) for entry in entries):
            self.assigned.clear()
            return
        self._share = self._find_share(order, total) if self._fixed_share is None else self._fixed_share
        self.rates.num_steps += 1
        if self._is_as_assigned(entries):
            return
        self.assigned.clear()
        self._num_assigned_elements = 0
        self._assigned_share, self._assigned_order = self._share, [binding for binding, *_ in order]
        gradients = [binding.gradient for binding, *_ in order if binding.gradient is not None]
        diffusion = Diffusion(self._share, total)
        for binding, adopted, group in entries:
            num_elements = binding.segment.num_elements
            if not diffusion.is_due(num_elements) or not self._can_update(binding, adopted, group):
                continue
            assert binding.gradient is not None
            if not self._will_have_home(binding.gradient, gradients):
                break  # host memory has no room for it
            self.assigned.add(binding)
            self._num_assigned_elements += num_elements
            diffusion.take(num_elements)

    def _is_as_assigned(self, entries: Sequence[tuple[Binding, AdoptedOptimizer, Mapping[str, Any]]]) -> bool:
        """Whether the last assignment still serves: who changes sides is fetched, or made ahead, for nothing."""
        return (
            bool(self.assigned)
            and abs(self._share - self._assigned_share) <= _STEADY_SHARE * self._assigned_share
            and self._assigned_order == [binding for binding, *_ in entries]
            and all(self._can_update(*entry) for entry in entries if entry[0] in self.assigned)
        )

    def _will_have_home(self, gradient: Binding, all_of_them: Sequence[Binding]) -> bool:
        """Whether a gradient has a home, or will be lent one; where all go here, the CPU is behind by too many."""
        homes = self._gradient_homes
        if homes.has_home(gradient):
            return True
        return homes.reserve(all_of_them) if self._fixed_share is None else homes.settle(gradient)

    def _find_share(self, order: Sequence[tuple[Binding, AdoptedOptimizer, int]], total: int) -> float:
        link = self._engine.device.link_bytes_per_second()
        streamed = state_bytes = sent_bytes = 0
        for binding, adopted, _ in order:
            count = binding.segment.num_elements
            states = adopted.paged_states(binding).values()
            if not any(state.keep for state in states):
                streamed += count
                state_bytes += sum(state.segment.num_bytes for state in states)
            sent_bytes += binding.segment.num_bytes
        rates = self.rates
        beside = alone = rates.per_second
        if rates.link_rests and rates.alone_per_second:
            # States and weight are read and written, the gradient read; gradient and weight cross the link besides.
            element_bytes = 2 * state_bytes / max(streamed, 1) + 5 * sent_bytes / total
            alone = rates.alone_per_second
            beside = self._rate_beside = rate_beside_link(
                alone, element_bytes=element_bytes, link_bytes_per_second=link
            )
        share = balanced_share(
            streamed_share=streamed / total,
            state_bytes=state_bytes / max(streamed, 1),
            sent_bytes=sent_bytes / total,
            link_bytes_per_second=link,
            elements_per_second=beside,
            alone_per_second=alone,
            rest_seconds=rates.rest_seconds / total if rates.link_rests else 0.0,
            waiting_share=self._gradient_homes.waiting_share,
        )
        return max(share - rates.less, 0.0)

    def first_gradient(self) -> None:
        """The first gradient of a step is here: the link has something to do from now on."""
        self.rates.first_gradient()
        if self._pool is not None:
            self._pool.limit(self._num_threads_beside_link(self._pool))

    def backward_ended(self, *, link_rests: bool) -> None:
        """``link_rests``: until the next gradient host memory is the CPU's alone."""
        self.rates.backward_ended(link_rests=link_rests)
        if self._pool is not None and link_rests:
            self._pool.limit(self._pool.num_threads)

    def _can_update(self, binding: Binding, adopted: AdoptedOptimizer, group: Mapping[str, Any]) -> bool:
        """Whether the update of a parameter is one that the CPU's kernel does, on homes in host memory."""
        optimizer = adopted.optimizer
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        live = optimizer.state.get(binding.tensor, {})
        states = adopted.paged_states(binding)
        wanted = {*MOMENTS, LOW} if adopted.masters.has(binding) else {*MOMENTS}
        if set(states) != wanted or set(live) != {"step", *MOMENTS} or group.get("amsgrad"):
            return False
        if isinstance(group["lr"], torch.Tensor) or any(
            isinstance(beta, torch.Tensor) for beta in group["betas"]
        ):
            return False
        if not all(0 <= beta < 1 for beta in group["betas"]):
            return False
        slot = binding.gradient
        if adopted.stepped_dtype(binding) != torch.float32 or not binding.segment.dense or slot is None:
            return False
        if slot.segment.dtype != binding.segment.dtype or slot.segment.stride != binding.segment.stride:
            return False
        homes = (binding, slot, *states.values())
        table = self._engine.table
        return all(int(table.home[b.segment.first_page]) == Home.HOST for b in homes) and all(
            state.fixed is None and not state.keep and self._engine.has_value(state.segment)
            for state in states.values()
        )

    # -- one update --------------------------------------------------------------------------------

    @whole
    def take(
        self,
        adopted: AdoptedOptimizer,
        group: Mapping[str, Any],
        binding: Binding,
        gradient: torch.Tensor | None,
    ) -> bool:
        """Begin the update of one parameter with its final gradient, None for that in its segment. False if the device
        has to do it.
        """
        if binding not in self.assigned or not self._can_update(binding, adopted, group):
            return False
        engine = self._engine
        states = adopted.paged_states(binding)
        slot = binding.gradient
        assert slot is not None
        is_kept = gradient is None
        if is_kept:
            self._mmu.clipping.apply(slot)
            engine.drain()
        if is_kept and (not self._is_at_home(slot) or any(map(is_viewed, (binding, slot)))):
            return False
        step = adopted.optimizer.state[binding.tensor]["step"]
        count = adopted.step_counts.of(binding, step)
        if count is None:
            return False
        if not is_kept and not (self._gradient_homes.lend(slot) and self._is_at_home(slot)):
            self.rates.was_refused(binding.segment.num_elements)
            return False
        # All that can go wrong comes before anything changes.
        pool = self._threads()
        scalars = self._values(adopted, group, count + 1).scalars()
        leaving = [state.segment for state in states.values()]
        if binding.fixed is None:
            leaving.append(binding.segment)
        with self._being_written(leaving) as taken:
            for segment in leaving:
                engine.staging.forget(segment)
            if not self._leave(leaving):
                return False  # somebody holds one of them on the device
            if engine.is_dirty(binding.segment):
                engine.flush([binding.segment])
            if gradient is None:
                engine.flush([slot.segment])
            else:
                engine.transfers.send_home(slot.segment, gradient, at_most_bytes=self._largest_bytes)
            low_is_valid = adopted.masters.are_valid(binding)
            job = Job(self, binding, states, leaving, low_is_valid=low_is_valid, keeps_gradient=is_kept)
            num_elements = binding.segment.num_elements
            slices = job.slices(
                num_slices(num_elements, self._num_assigned_elements, pool.num_threads), scalars
            )
            step += 1
            adopted.step_counts.keep(binding, step, count + 1)
            with engine.lock:
                binding.bump_version()
                if binding.run is not None:
                    binding.run.version = binding.version()
            adopted.masters.written(binding)
            binding.pending = job
            job.start(pool, slices, adopted.next_use(binding))
            self._gradient_homes.note(slot, job)
            taken.append(job)
            engine.streamed |= {state.segment.index for state in states.values()}
        return True

    @contextlib.contextmanager
    def _being_written(self, segments: Sequence[Segment]) -> Iterator[list[Job]]:
        """Keeps the pages of segments at home: until the job is done that the caller puts into the list, or to the
        end.
        """
        taken: list[Job] = []
        engine = self._engine
        with engine.lock:
            engine.being_written.update(segment.index for segment in segments)
        try:
            yield taken
        finally:
            if not taken:
                self.written(segments)

    def written(self, segments: Sequence[Segment]) -> None:
        """The homes of segments are as they are to be: their pages may come."""
        engine = self._engine
        with engine.lock:
            for segment in segments:
                engine.being_written.discard(segment.index)
                engine.horizon = min(engine.horizon, engine.timeline.next_use(segment.index))
            engine.changed.notify_all()

    def unit(self, group_index: int, binding: Binding) -> CpuUnit:
        """The update of an assigned parameter in ``step()``."""
        return CpuUnit(self, group_index, binding)

    def _is_at_home(self, binding: Binding) -> bool:
        """Whether the home in host memory is, or will be once flushed, where the value is."""
        at_home = int(self._engine.table.home[binding.segment.first_page]) == Home.HOST
        return at_home and self._gradient_homes.has_home(binding)

    def _leave(self, segments: list[Segment]) -> bool:
        """Send segments home; whether none of them is on the device any more."""
        engine = self._engine
        there = [segment for segment in segments if engine.runs_of(segment)]
        if there:
            engine.evict_segments(there)
        return not any(engine.runs_of(segment) for segment in there)

    @staticmethod
    def _values(adopted: AdoptedOptimizer, group: Mapping[str, Any], step: int) -> AdamValues:
        """The values of this step, the ``step``-th."""
        is_adamw = isinstance(adopted.optimizer, torch.optim.AdamW)
        return AdamValues(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            decoupled=bool(group.get("decoupled_weight_decay", is_adamw)) if _READS_DECOUPLED else is_adamw,
            maximize=bool(group.get("maximize", False)),
        )

    def _threads(self) -> UpdatePool:
        if self._pool is None:
            self._pool = UpdatePool(default_num_threads())
            self._pool.limit(self._num_threads_beside_link(self._pool))
        return self._pool

    def _num_threads_beside_link(self, pool: UpdatePool) -> int:
        if self._fixed_share is not None:
            return pool.num_threads  # nothing to speak of streams beside it
        if self.rates.link_rests is None:
            return num_threads_beside_link(pool.num_threads)
        if not self.rates.link_rests:
            return num_threads_beside_link(pool.num_threads, STEADY_THREADS_SHARE)
        # Until it is known what the CPU does alone it is held back, so that something is left to measure by.
        return num_threads_beside_link(
            pool.num_threads, self._rate_beside / (self.rates.alone_per_second or 1.0)
        )

    def failed(self, binding: Binding, error: BaseException) -> None:
        """An update ended in an exception: the parameter may be half a step ahead."""
        self._torn.mark(
            f"The update of {binding.name} on the CPU failed with {type(error).__name__}: {error}."
        )

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
