"""The tasks of a step: what the runtime enqueues, in the order in which it does, for the simulator to time.

The runtime's host thread runs ahead of the device: it decides by the position in the trace, never by the clock. So the
simulation falls into two parts. This one walks over the step as the host does and makes its decisions, with the same
policy object: what is brought ahead (a number of extents, nearest use first), what leaves for it, which slot a unit's
states go to, what the CPU is given. It knows no time. The result is a list of tasks with what each waits for;
`pager.graph.task_timing` says when they run.

Of the runtime it keeps: parameters that stay or stream; batches of eviction; staging slots, units cut to a slot;
``update_at="step"`` (updates wait for their parameter's next use, gradients wait on the device or, where room is
short, at home, where they go at once if weights stay) and ``"backward"`` (each parameter is stepped as its gradient
comes, the states of the next ones on their way; beside the compute where gradients may be lent, which then waits for
the oldest loan of too many; or at the end, underneath the next forward); slots on streams of their own; the CPU's part
(gradient home, update in the order of the next uses, a parameter that stays is sent back; threads by whether the link
rests); the host's time for each access and unit, that it runs no farther ahead than the driver queues, waits for an
update of the CPU whose parameter it uses, and that a loop reads its loss. It leaves out: that frames must stand side by
side, pages at the ends of tensors, optimizers that cannot be cut into slices, accumulation. States on the disk stream
through the slots too.

One decision hangs on the clock, in the runtime and so here: a gradient that finds all homes lent to updates that the
CPU has not done is the device's. ``is_over`` is asked for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from pager.graph.arena_walk import ArenaWalk, DeviceShares, Held, Placement, Stay, StepKnobs
from pager.graph.cost_model import SupportsEviction
from pager.graph.step_model import StepModel
from pager.graph.task_timing import Clock, Engine, MachineRates

__all__ = ["Schedule", "StepMarks"]


@dataclass(slots=True)
class _Unit:
    """A slice of a parameter's update, and its slot once that is being filled."""

    parameter: int
    first_element: int
    num_elements: int
    arrival: int | None = None


@dataclass(slots=True)
class StepMarks:
    """Where a step is among the tasks: its first task, its last compute task, and the compute task of each tick."""

    first_task: int
    last_compute: int = -1
    ticks: list[int] = field(default_factory=list)
    # The host's tasks at which the link has something to do, and rests again.
    first_gradient: int = -1
    link_rests: int = -1
    num_refused_elements: int = 0
    hits: int = 0
    misses: int = 0


class Schedule(ArenaWalk):
    """Walks over a step again and again and collects the tasks. Raises ValueError where the arena is too small."""

    def __init__(
        self,
        model: StepModel,
        placement: Placement,
        shares: DeviceShares,
        knobs: StepKnobs,
        policy: SupportsEviction,
        rates: MachineRates,
        *,
        is_over: Callable[..., bool] | None = None,
    ) -> None:
        """``is_over(task, at=task)``: whether the first has ended when the second does; by default by the clock."""
        super().__init__(model, placement, shares, knobs, policy, rates)
        self.clock = Clock(self.tasks, rates)
        self.is_over = is_over or self.clock.is_over
        self.steps: list[StepMarks] = []
        self.unit_elements = (
            max(shares.slot_bytes // model.size.staged(knobs.update_at), 1) if shares.num_slots else 0
        )
        self.slots: deque[int] = deque([-1] * shares.num_slots)  # free ones, by the task that let go of them
        self.pending: dict[int, list[_Unit]] = {}  # updates that wait for their parameter's next use
        self.coming: deque[int] = deque()  # parameters whose gradients come, in order
        self.ahead: dict[int, list[_Unit]] = {}
        self.stepped: set[int] = set()
        self.in_slots: list[Stay] = []
        # Gradients lent to updates beside the backward, oldest first: until which task, and bytes.
        self.loans: deque[tuple[int, int]] = deque()
        # Gradients on their way home, oldest first: tasks and bytes. Of too many the compute waits for the oldest.
        self.sent: deque[tuple[int, int]] = deque()
        self.most_sent_bytes = max(self.elements, default=0) * model.size.gradient
        # Homes lent to gradients that the CPU updates with, in the same way.
        self.homes: list[tuple[int, int]] = []
        if knobs.cpu_threads is not None and self.placement.on_cpu.any():
            self._limit_threads(knobs.cpu_threads)

    # -- the walk ----------------------------------------------------------------------------------

    def run_step(self) -> None:
        """Walk over one step."""
        marks = StepMarks(len(self.tasks))
        self.steps.append(marks)
        base = len(self.steps) - 1
        seconds = self.model.seconds.tolist()
        for tick in range(self.model.num_ticks):
            waits: list[int] = []
            begin, end = self.row_bounds[tick], self.row_bounds[tick + 1]
            parameters = self.row_parameter[begin:end]
            for row in range(begin, end):
                self.position = base * self.num_rows + row
                waits += self._use(self.row_parameter[row])
            self._host(self.rates.host_access_seconds)
            task = self._compute(seconds[tick], waits, "compute", parameters[0] if parameters else -1)
            self._launched(task, self.rates.access_launches)
            marks.ticks.append(task)
            for parameter in parameters:
                self._used(parameter, task)
            for parameter in self.gradients_at.get(tick, ()):
                if marks.first_gradient < 0:
                    marks.first_gradient = self._limit_threads(self.knobs.cpu_threads)
                self._gradient(parameter)
            if parameters:
                self.position += 1
                self._prefetch()
        self._end_step()
        marks.last_compute = self.last_compute
        marks.hits, self.num_hits = self.num_hits, 0
        marks.misses, self.num_misses = self.num_misses, 0

    def _use(self, parameter: int) -> list[int]:
        """Bring a weight for an access, its waiting update first; what the access waits for."""
        self._wait_for_cpu(parameter)
        waits = [] if self.stays[parameter] else self._bring(parameter)
        self.num_hits += self.stays[parameter]
        if self.stays[parameter] and self.ready[parameter] >= 0:
            waits.append(self.ready[parameter])
        if parameter in self.pending:
            units = self.pending[parameter]
            while units:
                self._run_unit(units.pop(0), waits)
                self._fetch_ahead()
            del self.pending[parameter]
            self._drop_gradient(parameter, self.last_compute)
        return waits

    def _used(self, parameter: int, task: int) -> None:
        self.policy.record_access(parameter, self.position % max(self.num_rows, 1))
        held = self.held.get(parameter)
        if held is not None:
            held.last_use, held.pinned = task, False

    # -- gradients and updates ---------------------------------------------------------------------

    def _gradient(self, parameter: int) -> None:
        """The gradient of a parameter is final."""
        if self.knobs.update_at == "step" or self.late[parameter]:
            self._keep_gradient(parameter)
        elif self.on_cpu[parameter] and self._lend_home(parameter):
            out = self._send_gradient(parameter, self.last_compute)
            update = self._update_on_cpu(parameter, out)
            self.homes.append((update, self.elements[parameter] * self.model.size.gradient))
        else:
            self._step_on_device(parameter)

    def _step_on_device(self, parameter: int) -> None:
        self.stepped.add(parameter)
        units = self.ahead.pop(parameter, None) or self._units(parameter)
        waits = [] if self.stays[parameter] else self._bring(parameter)
        if self.beside[parameter]:
            waits.append(self.last_compute)
        last = -1
        for place, unit in enumerate(units):
            last = self._run_unit(unit, waits, beside=self.beside[parameter])
            if all(self._fetch(later) for later in units[place + 1 :]):
                self._fetch_ahead()
        self._used(parameter, last)
        if self.beside[parameter]:
            self._lend(self.elements[parameter] * self.model.size.gradient, last)

    def _lend(self, num_bytes: int, until: int) -> None:
        """A gradient is lent until an update beside the backward is done; of too many the compute waits for the oldest.
        Those that are over by then it waits for in vain.
        """
        self.loans.append((until, num_bytes))
        while len(self.loans) > 1 and sum(lent for _, lent in self.loans) > self.knobs.lent_bytes:
            self.owed.append(self.loans.popleft()[0])

    def _lend_home(self, parameter: int) -> bool:
        """Whether a gradient finds a home for the CPU's update of its parameter."""
        if self.knobs.home_bytes is None:
            return True
        num_bytes = self.elements[parameter] * self.model.size.gradient
        self.homes = [home for home in self.homes if not self.is_over(home[0], at=self.issued)]
        if sum(lent for _, lent in self.homes) + num_bytes <= self.knobs.home_bytes:
            return True
        self.steps[-1].num_refused_elements += self.elements[parameter]
        return False

    def _limit_threads(self, num_threads: int | None) -> int:
        """From where the host is now on, so many threads are at the CPU's updates; the host's task."""
        self._host(0.0)
        self.tasks.limits[self.issued] = self.rates.cpu_threads if num_threads is None else num_threads
        return self.issued

    def _keep_gradient(self, parameter: int) -> None:
        num_bytes = self.elements[parameter] * self.model.size.gradient
        if self.placement.sends_gradient[parameter]:
            self.gradient_home[parameter] = self._send_gradient(parameter, self.last_compute)
            self.sent.append((self.gradient_home[parameter], num_bytes))
            while len(self.sent) > 1 and sum(sent for _, sent in self.sent) > self.most_sent_bytes:
                self.owed.append(self.sent.popleft()[0])
            return
        if not self._make_room(num_bytes, demand=True):
            raise ValueError(
                f"the gradient of {self.model.names[parameter]} needs {num_bytes} bytes of an arena that has "
                f"{self.capacity} bytes for what streams"
            )
        # Autograd's gradient is copied into its frames once they are free.
        task = self._compute(0.0, list(self._take(num_bytes)), "gradient kept", parameter)
        held = Held(num_bytes, task, task, task, dirty=True)
        self.held[parameter + len(self.elements)] = held
        self.policy.record_access(parameter + len(self.elements), self.position % max(self.num_rows, 1))

    def _drop_gradient(self, parameter: int, after: int) -> None:
        """A gradient was used up."""
        key = parameter + len(self.elements)
        if key in self.held:
            self._release(key, [after])
            self.policy.record_evict(np.array([key], np.int64))

    def _send_gradient(self, parameter: int, after: int) -> int:
        num_bytes = self.elements[parameter] * self.model.size.gradient
        return self.tasks.add(Engine.LINK_OUT, num_bytes, (after,), kind="gradient out", subject=parameter)

    def _update_on_cpu(self, parameter: int, gradient_at_home: int) -> int:
        slices = self.knobs.cpu_slices
        update = self.updating[parameter] = self.tasks.add(
            Engine.CPU_UPDATE,
            self.elements[parameter],
            (gradient_at_home,),
            kind="cpu update",
            subject=parameter,
            due=len(self.steps) * self.num_rows + (self.rows_of[parameter] or [0])[0],
            slices=self.rates.cpu_threads if slices is None else slices[parameter],
        )
        if self.stays[parameter]:
            self.ready[parameter] = self.tasks.add(
                Engine.LINK_IN,
                self.weight_bytes[parameter],
                (update, self.last_compute),
                kind="updated parameter in",
                subject=parameter,
                late=True,
            )
            return update
        if parameter in self.held:
            self._evict(parameter)
        self.ready[parameter] = update
        return update

    def _units(self, parameter: int) -> list[_Unit]:
        count = self.elements[parameter]
        # About equally long, as the runtime cuts them.
        step = ceil(count / ceil(count / (self.unit_elements or count)))
        return [_Unit(parameter, begin, min(step, count - begin)) for begin in range(0, count, step)]

    def _unit_bytes(self, unit: _Unit) -> int:
        """What a unit's slot is filled with: states, and a gradient that went home."""
        size = self.model.size
        num_bytes = 0 if self.keeps_states[unit.parameter] else size.state
        key = unit.parameter + len(self.elements)
        if self.knobs.update_at == "step" and key not in self.held:
            num_bytes += size.gradient
        return num_bytes * unit.num_elements

    def _fetch(self, unit: _Unit) -> bool:
        """Begin to bring a unit's states. False if no slot is free for them."""
        if unit.arrival is not None:
            return True
        num_bytes = self._unit_bytes(unit)
        if not num_bytes:
            unit.arrival = -1
            return True
        if not self.slots:
            return False
        source = self.gradient_home[unit.parameter] if self.knobs.update_at == "step" else -1
        if self.states_on_disk[unit.parameter] and not self.keeps_states[unit.parameter]:
            source = self.tasks.add(
                Engine.DISK_READ,
                self.model.size.state * unit.num_elements,
                (source, self.issued),
                kind="states from disk",
                subject=unit.parameter,
            )
        unit.arrival = self.tasks.add(
            Engine.SLOTS_IN,
            num_bytes,
            (self.slots.popleft(), source, self.issued),
            kind="states in",
            subject=unit.parameter,
        )
        return True

    def _drop_fetched(self) -> None:
        """A unit that nobody fetched ahead finds no free slot: what was fetched last is needed last."""
        units = [*self.ahead.values(), *self.pending.values()]
        fetched = [unit for some in units for unit in some if unit.arrival is not None and unit.arrival >= 0]
        if fetched:
            last = max(fetched, key=lambda unit: unit.arrival or 0)
            self.slots.append(last.arrival or 0)
            last.arrival = None

    def _run_unit(self, unit: _Unit, waits: list[int], *, beside: bool = False) -> int:
        """Step a slice, and send its states home; the task that steps."""
        parameter = unit.parameter
        if not self._fetch(unit):
            self._drop_fetched()
        if not self._fetch(unit):
            raise ValueError("a unit of the update finds no slot: there are none for states that stream")
        self._host(self.rates.host_unit_seconds)
        held_slot = unit.arrival is not None and unit.arrival >= 0
        seconds = unit.num_elements / self.rates.device_update_parameters_per_second
        arrival = -1 if unit.arrival is None else unit.arrival
        if beside:
            waits = [*waits, arrival, self.issued]
            task = self.tasks.add(Engine.BESIDE, seconds, waits, kind="update", subject=parameter)
        else:
            task = self._compute(seconds, [*waits, arrival], "update", parameter)
        self._launched(task, self.rates.unit_launches)
        if held_slot:
            last = task
            if not self.keeps_states[parameter]:
                num_bytes = self.model.size.state * unit.num_elements
                last = self.tasks.add(
                    Engine.SLOTS_OUT, num_bytes, (task,), kind="states out", subject=parameter
                )
                if self.states_on_disk[parameter]:
                    self.tasks.add(
                        Engine.DISK_WRITE, num_bytes, (last,), kind="states to disk", subject=parameter
                    )
            self.slots.append(last)
            in_slot = (2, parameter, unit.first_element, unit.num_elements)
            self.in_slots.append(Stay(self._unit_bytes(unit), unit.arrival or 0, last, *in_slot))
        held = self.held.get(parameter)
        if held is not None:
            held.dirty, held.last_use = True, task
        return task

    def _fetch_ahead(self) -> None:
        """Fill free slots for the units that run next."""
        if self.knobs.update_at == "step":
            for units in self.pending.values():
                if not all(self._fetch(unit) for unit in units):
                    return
            return
        for units in self.ahead.values():
            if not all(self._fetch(unit) for unit in units):
                return
        while self.slots and self.coming:
            parameter = self.coming.popleft()
            if self.on_cpu[parameter] or self.late[parameter] or parameter in self.stepped:
                continue
            units = self.ahead[parameter] = self._units(parameter)
            if not all(self._fetch(unit) for unit in units):
                return

    def _run_late(self) -> None:
        """The backward is over: the updates that waited for that, in the order of their weights' next uses."""
        for parameter in sorted(np.flatnonzero(self.late).tolist(), key=lambda p: self.rows_of[p][:1]):
            last = -1
            for unit in self._units(parameter):
                last = self._run_unit(unit, [self.last_compute], beside=True)
            self.ready[parameter] = last
            self._drop_gradient(parameter, last)

    def _end_step(self) -> None:
        """``optimizer.step()`` and the boundary."""
        if self.knobs.update_at == "step":
            for parameter in sorted(self.gradient_order, key=lambda p: self.rows_of[p][:1]):
                if not self.on_cpu[parameter]:
                    self.pending[parameter] = self._units(parameter)
                    continue
                held = self.held.get(parameter + len(self.elements))
                home = self.gradient_home[parameter]
                if held is not None:
                    home = self._page_out(parameter + len(self.elements), held)
                    self._drop_gradient(parameter, home)
                self._update_on_cpu(parameter, home)
        else:
            self.owed += [until for until, _ in self.loans]
            self.loans.clear()
            if self.owed:
                self._compute(0.0, [], "updates joined", -1)
            self._run_late()
            if self.placement.on_cpu.any() and not self.placement.late.any():
                self.steps[-1].link_rests = self._limit_threads(None)
            self.coming = deque(self.gradient_order)
            self.ahead, self.stepped = {}, set()
            self._host(self.rates.host_step_seconds * len(self.gradient_order))
        self._fetch_ahead()
        if self.knobs.update_at == "step":  # the ring fills before all else
            self._host(self.rates.host_step_seconds * len(self.gradient_order))
        self.synchronized = self.last_compute  # the loop reads the loss
