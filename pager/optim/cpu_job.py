"""One parameter's update on the CPU: its place in ``step()``, and what runs on the pool's threads.

The order of things stands at the head of `pager.optim.on_cpu`.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from pager.interrupts import uninterrupted
from pager.optim.adamw_cpu import CpuAdam
from pager.optim.cpu_pool import UpdateHandle, UpdatePool, cut_into_slices
from pager.optim.masters import LOW
from pager.optim.schedule import cut, note_accesses, unit_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pager.address_space import Segment
    from pager.engine.run import Run
    from pager.mmu.binding import Binding
    from pager.optim.on_cpu import CpuUpdates
    from pager.optim.streamed import StreamedUnit
    from pager.optim.units import PagedUnit
    from pager.optim.update import Update

MOMENTS = ("exp_avg", "exp_avg_sq")


class CpuUnit:
    """One parameter's update in ``step()``: on the CPU, or by its other units where something stands against it."""

    def __init__(self, on_cpu: CpuUpdates, group_index: int, binding: Binding) -> None:
        self._on_cpu = on_cpu
        self._group_index = group_index
        self._binding = binding
        self._is_taken = False
        self._others: deque[PagedUnit | StreamedUnit] | None = None

    def run(self, update: Update) -> None:
        """Begin the update, or do it; goes on where it was interrupted."""
        if self._is_taken:
            return
        if self._others is None:
            group = update.groups[self._group_index]
            with uninterrupted():
                self._is_taken = self._on_cpu.take(update.adopted, group, self._binding, None)
                update.committed |= self._is_taken
            if self._is_taken:
                for piece in cut(update.adopted, group, self._binding):
                    note_accesses(update.adopted.engine, unit_ranges(update.adopted, self._binding, piece))
                return
            self._others = deque(update.units_of(self._group_index, self._binding))
        while self._others:
            self._others[0].run(update)
            self._others.popleft()


class Job:
    """One parameter's update on the CPU; until somebody uses the parameter, what its use has to wait for."""

    def __init__(
        self,
        owner: CpuUpdates,
        binding: Binding,
        states: dict[str, Binding],
        segments: Sequence[Segment],
        *,
        low_is_valid: bool,
        keeps_gradient: bool,
    ) -> None:
        self._owner = owner
        self._engine = binding.mmu.engine
        self._binding = binding
        # Of a parameter that stays on the device.
        self._run = binding.run if binding.fixed is not None else None
        # Whether the user can see the gradient, and whether it was dropped since.
        self._keeps_gradient = keeps_gradient
        self._is_released = False
        self._states = states
        # Whose homes it writes, and whose pages stay there meanwhile.
        self._segments = segments
        self._low_is_valid = low_is_valid
        self._began = 0.0
        self._handle: UpdateHandle | None = None

    def slices(self, num_slices: int, scalars: tuple[Any, ...]) -> list[_Slice]:
        """The parts of the pass, up to so many."""
        segment = self._binding.segment
        homes = {key: self._home(state) for key, state in self._states.items()}
        gradient = self._binding.gradient
        assert gradient is not None
        kernel = CpuAdam(
            self._home(self._binding),
            homes.get(LOW),
            homes[MOMENTS[0]],
            homes[MOMENTS[1]],
            self._home(gradient),
        )
        cuts = cut_into_slices(segment.num_elements, num_slices, longest=segment.num_elements)
        return [_Slice(kernel, begin, end, scalars) for begin, end in cuts]

    def start(self, pool: UpdatePool, slices: list[_Slice], due: int) -> None:
        """Queue the update; ``due``: where in the timeline the parameter is used next."""
        if self._run is not None:
            self._engine.hold(self._run)  # though the parameter may have to stream before this is done
            self._engine.note_uses(self._run)
        self._handle = pool.submit(slices, wait=self._wait, done=self._done, due=due)

    def _home(self, binding: Binding) -> torch.Tensor:
        segment = binding.segment
        return self._engine.transfers.home_view(segment).view(segment.dtype)[: segment.num_elements]

    def _wait(self) -> None:
        transfers = self._engine.transfers
        gradient = self._binding.gradient
        assert gradient is not None
        transfers.home_bytes(gradient.segment, write=False)
        for binding in (self._binding, *self._states.values()):
            transfers.home_bytes(binding.segment, write=True)
        if LOW in self._states and not self._low_is_valid:
            self._home(self._states[LOW]).zero_()
        self._began = time.perf_counter()

    def _done(self, error: BaseException | None) -> None:
        run = self._run
        try:
            if error is None:
                self._owner.rates.count(self._began, self._binding.segment.num_elements)
                if run is not None:
                    self._send(run)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._owner.failed(self._binding, error)
            self._owner.written(self._segments)
            if run is not None:
                self._engine.release(run)

    def _send(self, run: Run) -> None:
        ready = self._engine.transfers.send_to_device(run)
        with self._engine.lock:
            run.ready = ready
            # Nobody uses the new value yet, and the copy waits for who used the old one.
            run.waited.clear()
            run.users.clear()

    @property
    def is_over(self) -> bool:
        """Whether nothing is read or written for it any more."""
        return self._handle is not None and self._handle.is_done()

    # -- what the binding asks of a waiting update -------------------------------------------------

    def run(self, binding: Binding) -> None:
        """The parameter is wanted: wait until its new value is on its way to the device."""
        handle = self._handle
        if handle is None:
            return
        began = time.perf_counter()
        try:
            handle.result()
        finally:
            if handle.is_done() and binding.pending is self:
                binding.pending = None
                if self._is_released and binding.gradient is not None:
                    self._engine.discard(binding.gradient.segment)
            seconds = time.perf_counter() - began
            self._engine.counters.add(stall_seconds=seconds)
            self._owner.rates.was_waited_for(seconds)

    def is_released(self, binding: Binding) -> bool:
        """Whether the user dropped the gradient after the step. One that backward used up nobody could see."""
        return self._is_released

    def release(self, binding: Binding) -> None:
        """The user drops the gradient: it goes when the update has run."""
        self._is_released = self._keeps_gradient


class _Slice:
    """A part of the pass, for one thread."""

    __slots__ = ("_begin", "_end", "_kernel", "_scalars")

    def __init__(self, kernel: CpuAdam, begin: int, end: int, scalars: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._begin = begin
        self._end = end
        self._scalars = scalars

    def __call__(self) -> None:
        self._kernel.run(self._begin, self._end, self._scalars)
