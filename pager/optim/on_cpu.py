"""Updates on the CPU, of parameters that stay on the device, beside what streams through it.

With ``update_on="auto"`` the states of some parameters never leave host memory. Their gradient is sent home, the pool
of update threads (`pager.optim.cpu_pool`) steps parameter and states there in one pass, and the new parameter is sent
to the device. Which ones: those whose gradients come first in backward, since they are used last in the next forward;
how many: as many as the CPU gets done beside the link (`pager.policies.update_split`, from measured rates).

One parameter's update, in order

1. take      (autograd's thread) the gradient's copy home is enqueued behind the work that made it
2. wait      (a pool thread) for that copy
3. step      (all pool threads) one pass over the homes
4. send      (a pool thread) the new parameter goes to the device; 2 came after the last use of the old one
5. use       (the next forward) whoever touches the parameter waits for 4 to be enqueued, and its stream for the copy

The arithmetic is torch's, but not its vector code: see the tolerance in `pager.optim.adamw_cpu`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pager.errors import BudgetError
from pager.optim.adamw_cpu import AdamValues, CpuAdam
from pager.optim.cpu_pool import UpdateHandle, UpdatePool, cut_into_slices, default_num_threads
from pager.optim.masters import LOW
from pager.page_table import Home
from pager.policies.update_split import balanced_share, num_threads_beside_link

if TYPE_CHECKING:
    from pager.engine.run import Run
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.adopted import AdoptedOptimizer
    from pager.optim.torn import Torn

_LINK_BYTES = 64 * 2**20
# Steps after which a share that was found to be larger asks for no more memory: homes of gradients are page-locked, and
# the rates that the share follows never stand quite still. By then they are those of warm threads and touched pages.
_RESERVING_STEPS = 8
_MOMENTS = ("exp_avg", "exp_avg_sq")


class CpuUpdates:
    """The CPU's part of the updates of one managed model."""

    def __init__(
        self, mmu: Mmu, torn: Torn, *, share: float | None, settle: Callable[[Binding], None]
    ) -> None:
        """``share``: of the elements to update here, None to find it; ``settle`` gives a gradient its home."""
        self._mmu = mmu
        self._engine = mmu.engine
        self._torn = torn
        self._fixed_share = share
        self._settle = settle
        self._share = 0.0
        self._num_assignments = 0
        self._pool: UpdatePool | None = None
        # When the last step ended, and how long after it the first gradient came.
        self._step_ended = 0.0
        self._rest_seconds = 0.0
        self._lock = threading.Lock()
        # Of each parameter its step count, and the version of the user's tensor at which it was that.
        self._counts: dict[Binding, tuple[int, int]] = {}
        self.assigned: set[Binding] = set()
        self._busy_seconds = 0.0
        self._last_done = 0.0
        self._num_elements = 0
        self._rate = 0.0
        self._link_bytes_per_second: float | None = None

    # -- which -------------------------------------------------------------------------------------

    def assign(self, order: Sequence[tuple[Binding, AdoptedOptimizer, int]]) -> None:
        """A step is over: decide which parameters (with optimizer and group, in the order in which their gradients
        come) the next one updates here.
        """
        self._look_back()
        candidates = [entry for entry in order if self._can_update(*entry)]
        total = sum(binding.segment.num_elements for binding, *_ in order)
        if not candidates or not total:
            self.assigned.clear()
            return
        self._share = self._find_share(order, total) if self._fixed_share is None else self._fixed_share
        self._num_assignments += 1
        reserves = self._fixed_share is not None or self._num_assignments <= _RESERVING_STEPS
        self.assigned.clear()
        left = self._share * total
        for binding, *_ in candidates:
            if left < binding.segment.num_elements / 2:
                break
            assert binding.gradient is not None
            if not reserves and not self._has_home(binding.gradient):
                continue
            try:
                self._settle(binding.gradient)
            except BudgetError:
                break  # host memory has no room for one more gradient
            self.assigned.add(binding)
            left -= binding.segment.num_elements

    def _has_home(self, binding: Binding) -> bool:
        return int(self._engine.table.home_frame[binding.segment.first_page]) >= 0

    def _find_share(self, order: Sequence[tuple[Binding, AdoptedOptimizer, int]], total: int) -> float:
        if self._link_bytes_per_second is None:
            self._link_bytes_per_second = self._engine.device.measure_bandwidth(_LINK_BYTES, direction="both")
        streamed = state_bytes = sent_bytes = 0
        for binding, adopted, _ in order:
            count = binding.segment.num_elements
            states = adopted.paged_states(binding).values()
            if not any(state.keep for state in states):
                streamed += count
                state_bytes += sum(state.segment.num_bytes for state in states)
            sent_bytes += binding.segment.num_bytes
        return balanced_share(
            streamed_share=streamed / total,
            state_bytes=state_bytes / max(streamed, 1),
            sent_bytes=sent_bytes / total,
            link_bytes_per_second=self._link_bytes_per_second,
            elements_per_second=self._rate,
            rest_seconds=self._rest_seconds / total,
        )

    def _look_back(self) -> None:
        """The CPU's rate in the step that ends."""
        self._step_ended = time.perf_counter()
        with self._lock:
            if self._busy_seconds:
                self._rate = self._num_elements / self._busy_seconds
            self._busy_seconds, self._num_elements = 0.0, 0

    def first_gradient(self) -> None:
        """The first gradient of a step is here: until now the link had nothing to do."""
        self._rest_seconds = time.perf_counter() - self._step_ended

    def _can_update(self, binding: Binding, adopted: AdoptedOptimizer, group_index: int) -> bool:
        """Whether the update of a parameter is one that the CPU's kernel does, on homes in host memory."""
        optimizer = adopted.optimizer
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        group = optimizer.param_groups[group_index]
        live = optimizer.state.get(binding.tensor, {})
        states = adopted.paged_states(binding)
        wanted = {*_MOMENTS, LOW} if adopted.masters.has(binding) else {*_MOMENTS}
        if set(states) != wanted or set(live) != {"step", *_MOMENTS} or group.get("amsgrad"):
            return False
        if isinstance(group["lr"], torch.Tensor) or any(
            isinstance(beta, torch.Tensor) for beta in group["betas"]
        ):
            return False
        if (
            adopted.stepped_dtype(binding) != torch.float32
            or binding.fixed is None
            or not binding.segment.dense
        ):
            return False
        homes = (binding, *states.values())
        table = self._engine.table
        return all(int(table.home[b.segment.first_page]) == Home.HOST for b in homes) and all(
            state.fixed is None and not state.keep and self._engine.has_value(state.segment)
            for state in states.values()
        )

    # -- one update --------------------------------------------------------------------------------

    def take(
        self, adopted: AdoptedOptimizer, group_index: int, binding: Binding, gradient: torch.Tensor
    ) -> bool:
        """Begin the update of one parameter with its final gradient. False if the device has to do it."""
        run = binding.run
        if binding not in self.assigned or run is None or not self._can_update(binding, adopted, group_index):
            return False
        engine = self._engine
        states = adopted.paged_states(binding)
        for state in states.values():
            engine.staging.forget(state.segment)
            if engine.runs_of(state.segment):
                engine.evict_segments([state.segment])
                if engine.runs_of(state.segment):
                    return False  # somebody holds it on the device
        if engine.is_dirty(binding.segment):
            engine.flush([binding.segment])
        values = self._values(adopted, group_index, binding)
        low_is_valid = adopted.masters.are_valid(binding)
        assert binding.gradient is not None
        engine.transfers.send_home(binding.gradient.segment, gradient)
        with engine.lock:
            binding.bump_version()
            run.version = binding.version()
        adopted.masters.written(binding)
        job = _Job(self, binding, run, states, low_is_valid=low_is_valid)
        binding.pending = job
        job.start(self._threads(), values)
        return True

    def _values(self, adopted: AdoptedOptimizer, group_index: int, binding: Binding) -> AdamValues:
        """The values of this step; counts it in the user's state."""
        group = adopted.optimizer.param_groups[group_index]
        step = adopted.optimizer.state[binding.tensor]["step"]
        known = self._counts.get(binding)
        # Fused optimizers count on the device: asking there would wait for all that is enqueued.
        count = known[0] if known is not None and known[1] == step._version else int(step.item())
        step += 1
        self._counts[binding] = count + 1, step._version
        return AdamValues(
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=count + 1,
            decoupled=isinstance(adopted.optimizer, torch.optim.AdamW)
            or bool(group.get("decoupled_weight_decay", False)),
            maximize=bool(group.get("maximize", False)),
        )

    def _threads(self) -> UpdatePool:
        if self._pool is None:
            all_threads = default_num_threads()
            alone = self._fixed_share is not None  # nothing to speak of streams beside it
            self._pool = UpdatePool(all_threads if alone else num_threads_beside_link(all_threads))
        return self._pool

    def count(self, began: float, num_elements: int) -> None:
        """An update that could begin at ``began`` (seconds) is done: for the rate."""
        now = time.perf_counter()
        with self._lock:
            self._busy_seconds += now - max(began, self._last_done)
            self._last_done = now
            self._num_elements += num_elements

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


class _Job:
    """One parameter's update on the CPU; until somebody uses the parameter, what its use has to wait for."""

    def __init__(
        self,
        owner: CpuUpdates,
        binding: Binding,
        run: Run,
        states: dict[str, Binding],
        *,
        low_is_valid: bool,
    ) -> None:
        self._owner = owner
        self._engine = binding.mmu.engine
        self._binding = binding
        self._run = run
        self._states = states
        self._low_is_valid = low_is_valid
        self._began = 0.0
        self._handle: UpdateHandle | None = None

    def start(self, pool: UpdatePool, values: AdamValues) -> None:
        """Queue the update."""
        segment = self._binding.segment
        homes = {key: self._home(state) for key, state in self._states.items()}
        gradient = self._binding.gradient
        assert gradient is not None
        kernel = CpuAdam(
            self._home(self._binding),
            homes.get(LOW),
            homes[_MOMENTS[0]],
            homes[_MOMENTS[1]],
            self._home(gradient),
        )
        scalars = values.scalars()
        slices = [
            _Slice(kernel, begin, end, scalars)
            # One for each thread: to take the next one a thread needs the GIL, which the training wants too.
            for begin, end in cut_into_slices(
                segment.num_elements, pool.num_threads, longest=segment.num_elements
            )
        ]
        self._handle = pool.submit(slices, wait=self._wait, done=self._done)

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
        if error is not None:
            self._owner.failed(self._binding, error)
            return
        self._owner.count(self._began, self._binding.segment.num_elements)
        engine = self._engine
        ready = engine.transfers.send_to_device(self._run)
        with engine.lock:
            self._run.ready = ready
            # Nobody uses the new value yet, and the host has waited for who used the old one.
            self._run.waited.clear()
            self._run.users.clear()

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
            self._engine.counters.add(stall_seconds=time.perf_counter() - began)

    def is_released(self, binding: Binding) -> bool:
        """The gradient was used up; nobody can see it."""
        return False

    def release(self, binding: Binding) -> None:
        """There is no gradient to drop."""


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
