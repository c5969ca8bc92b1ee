"""Weights and gradients in the arena while a step is walked over: what comes, what leaves, what waits for whom.

The part of `pager.graph.step_schedule` that stands for the runtime's engine: page ins on demand and ahead of it,
eviction in the order of a policy and in batches, frames that are free only once tasks have ended.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pager.graph.cost_model import SupportsEviction
from pager.graph.step_model import StepModel
from pager.graph.task_timing import Engine, MachineRates, TaskList

__all__ = ["ArenaWalk", "DeviceShares", "Placement", "Stay", "StepKnobs"]

BoolArray = npt.NDArray[np.bool_]

# As the runtime's: extents, how many upcoming accesses are looked at, the share of the arena that leaves at once.
EXTENT_BYTES = 16 * 2**20
ROWS_AHEAD = 128
BATCH_SHARE = 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """bool per parameter: ``stays`` (its weight is on the device for good), ``wired`` (it is so and has no home below),
    ``keeps_states`` (its states are on the device, and have a home below), ``on_cpu`` (the CPU updates it), ``beside``
    (its gradient may be lent to an update beside the backward), ``late`` (its update inside backward waits for the end
    of that), ``sends_gradient`` (its gradient waits at home for the step, and goes there as soon as it is made),
    ``weight_on_disk`` and ``states_on_disk`` (where its home is).
    """

    stays: BoolArray
    wired: BoolArray
    keeps_states: BoolArray
    on_cpu: BoolArray
    beside: BoolArray
    late: BoolArray
    sends_gradient: BoolArray
    weight_on_disk: BoolArray
    states_on_disk: BoolArray

    @classmethod
    def of(cls, num_parameters: int, **columns: npt.ArrayLike) -> Placement:
        """A placement with these columns; the others are False throughout. ValueError for other lengths."""
        found = {}
        for name in cls.__slots__:
            values = np.asarray(columns.pop(name, False), bool)
            if values.shape not in ((), (num_parameters,)):
                raise ValueError(f"{name} has shape {values.shape} for {num_parameters} parameters")
            found[name] = np.broadcast_to(values, (num_parameters,)).copy()
        if columns:
            raise TypeError(f"unknown columns {sorted(columns)}; known are {sorted(cls.__slots__)}")
        return cls(**found)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShares:
    """Bytes of the device: the arena in all, and of it the slots for states, and the only homes of weights; among these
    all weights of more than ``wired_above`` bytes.
    """

    arena_bytes: int
    num_slots: int = 0
    slot_bytes: int = 0
    wired_bytes: int = 0
    wired_above: int = 2**62

    @property
    def ring_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StepKnobs:
    """``update_at``: "step" or "backward"; ``prefetch_extents``: of 16 MiB, brought ahead. ValueError for others.

    With updates in backward: ``lent_bytes`` of gradients may wait for their updates beside it, and ``home_bytes`` of
    gradients may be at home for the CPU's (None: all). ``cpu_threads``: at the CPU's updates while the link has
    something to do, None for all of them; while it rests it is all, if updates are in backward. ``cpu_slices``: into
    how many an update of the CPU is cut, per parameter; None: one for each thread.
    """

    update_at: str = "step"
    prefetch_extents: int = 4
    lent_bytes: int = 0
    home_bytes: int | None = None
    cpu_threads: int | None = None
    cpu_slices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.update_at not in ("step", "backward"):
            raise ValueError(f"update_at is {self.update_at!r}")
        if self.prefetch_extents < 0:
            raise ValueError(f"prefetch_extents is {self.prefetch_extents}")


@dataclass(slots=True)
class Held:
    """A weight or gradient in the arena: the tasks that brought it and used it last."""

    num_bytes: int
    first_task: int
    arrival: int
    last_use: int
    dirty: bool = False
    unused: bool = False
    pinned: bool = False


class Stay(NamedTuple):
    """Elements of a parameter's weight (``kind`` 0), gradient (1) or states (2) that stand on the device from the begin
    of one task to the end of another; ``last_task`` -1: still there.
    """

    num_bytes: int
    first_task: int
    last_task: int
    kind: int
    parameter: int
    first_element: int
    num_elements: int


class ArenaWalk:
    """The arena of a device, and the tasks that move its contents. ValueError where what stays passes it."""

    def __init__(
        self,
        model: StepModel,
        placement: Placement,
        shares: DeviceShares,
        knobs: StepKnobs,
        policy: SupportsEviction,
        rates: MachineRates,
    ) -> None:
        self.model = model
        self.placement = placement
        self.shares = shares
        self.knobs = knobs
        self.policy = policy
        self.rates = rates
        self.tasks = TaskList()
        self.memory: list[Stay] = []
        self.num_hits = self.num_misses = 0
        size = model.size
        self.weight_bytes = (model.num_elements * size.weight).tolist()
        self.elements = model.num_elements.tolist()
        # As lists: single items of arrays cost ten times as much.
        self.stays, self.keeps_states = placement.stays.tolist(), placement.keeps_states.tolist()
        self.on_cpu, self.beside = placement.on_cpu.tolist(), placement.beside.tolist()
        self.late = placement.late.tolist()
        self.weight_on_disk = placement.weight_on_disk.tolist()
        self.states_on_disk = placement.states_on_disk.tolist()
        self.fixed_bytes = sum(b for b, stays in zip(self.weight_bytes, self.stays, strict=True) if stays)
        self.fixed_bytes += size.state * sum(
            n for n, keeps in zip(self.elements, self.keeps_states, strict=True) if keeps
        )
        self.capacity = shares.arena_bytes - shares.ring_bytes - self.fixed_bytes
        if self.capacity < 0:
            raise ValueError(
                f"slots of {shares.ring_bytes} bytes and what stays, {self.fixed_bytes} bytes, pass the arena's "
                f"{shares.arena_bytes}"
            )
        self._trace()
        policy.resize(2 * len(self.elements))
        self.used = 0
        self.held: dict[int, Held] = {}
        # Free frames, those free the longest first, each with the tasks that still use what stood there.
        self.freed: deque[tuple[int, tuple[int, ...]]] = deque([(self.capacity, ())])
        self.ready = [-1] * len(
            self.elements
        )  # the weight's home, or the copy that stays, is good after this task
        self.gradient_home = [-1] * len(self.elements)
        self.last_compute = -1
        # What the compute stream waits for before its next task, as it was told.
        self.owed: list[int] = []
        # The CPU's update of a weight, until somebody has waited for it.
        self.updating: dict[int, int] = {}
        # The host's last task, and what its thread waits for before the next one.
        self.issued = self.synchronized = -1
        # What the host has launched and may not have begun yet: tasks, each with its launches.
        self.queued: deque[tuple[int, int]] = deque()
        self.num_queued = 0
        self.position = 0
        self.horizon = 0
        self.num_unused_extents = 0

    def _trace(self) -> None:
        model = self.model
        self.row_parameter = model.access_parameter.tolist()
        bounds = np.searchsorted(model.access_tick, np.arange(model.num_ticks + 1))
        self.row_bounds = bounds.tolist()
        self.rows_of: list[list[int]] = [[] for _ in self.elements]
        for row, parameter in enumerate(self.row_parameter):
            self.rows_of[parameter].append(row)
        self.gradients_at: dict[int, list[int]] = {}
        for parameter, tick in enumerate(model.gradient_tick.tolist()):
            if tick >= 0:
                self.gradients_at.setdefault(tick, []).append(parameter)
        self.gradient_order = [p for tick in sorted(self.gradients_at) for p in self.gradients_at[tick]]
        self.num_rows = len(self.row_parameter)

    def _host(self, seconds: float) -> None:
        """The host's thread is busy; what is enqueued after this cannot begin before. It runs no farther ahead of the
        device than the driver queues.
        """
        waits = [self.synchronized]
        while self.num_queued > self.rates.queued_launches:
            task, count = self.queued.popleft()
            self.num_queued -= count
            waits.append(task)
        self.issued = self.tasks.add(Engine.HOST, seconds, waits[:1] + waits[-1:], kind="host")
        self.synchronized = -1

    def _compute(self, seconds: float, waits: list[int], kind: str, subject: int) -> int:
        waits = [*waits, *self.owed, self.issued]
        self.owed.clear()
        self.last_compute = self.tasks.add(Engine.COMPUTE, seconds, waits, kind=kind, subject=subject)
        return self.last_compute

    def _launched(self, task: int, num_launches: int) -> None:
        self.queued.append((task, num_launches))
        self.num_queued += num_launches

    def _wait_for_cpu(self, parameter: int) -> None:
        """The host's thread waits until the CPU has updated a weight that is wanted."""
        update = self.updating.pop(parameter, -1)
        if update >= 0:
            waits = (update, self.synchronized)
            self.issued = self.tasks.add(Engine.HOST, 0.0, waits, kind="host waits", subject=parameter)
            self.synchronized = -1

    def _bring(self, parameter: int) -> list[int]:
        """A streamed weight is to be on the device: page it in unless it is there. Pins it."""
        held = self.held.get(parameter)
        self.num_hits += held is not None
        if held is None:
            self.num_misses += 1
            if not self._make_room(self.weight_bytes[parameter], demand=True):
                raise ValueError(
                    f"{self.model.names[parameter]} needs {self.weight_bytes[parameter]} bytes of an arena that has "
                    f"{self.capacity} bytes for what streams"
                )
            held = self._page_in(parameter)
        if held.unused:
            held.unused = False
            self.num_unused_extents -= _extents(held.num_bytes)
        held.pinned = True
        return [held.arrival]

    def _page_in(self, parameter: int) -> Held:
        num_bytes = self.weight_bytes[parameter]
        self._host(self.rates.host_page_in_seconds)
        waits = (*self._take(num_bytes), self.issued)
        source = self.ready[parameter]
        if self.weight_on_disk[parameter]:
            source = self.tasks.add(
                Engine.DISK_READ, num_bytes, (source,), kind="parameter from disk", subject=parameter
            )
        # pagerd passes over what the CPU is at, and comes back to it.
        arrival = self.tasks.add(
            Engine.LINK_IN,
            num_bytes,
            (*waits, source),
            kind="parameter in",
            subject=parameter,
            late=parameter in self.updating,
        )
        held = self.held[parameter] = Held(num_bytes, arrival, arrival, arrival)
        return held

    def _prefetch(self) -> None:
        """As pagerd: keep some extents on their way, nearest use first, evicting only what is needed later."""
        self.horizon = max(self.horizon, self.position)
        last = self.position + min(ROWS_AHEAD, self.num_rows)
        while self.num_unused_extents < self.knobs.prefetch_extents and self.horizon < last:
            parameter = self.row_parameter[self.horizon % self.num_rows]
            if not self.stays[parameter] and parameter not in self.held:
                if not self._make_room(self.weight_bytes[parameter], demand=False, sooner_than=self.horizon):
                    return
                held = self._page_in(parameter)
                held.unused = True
                self.num_unused_extents += _extents(held.num_bytes)
            self.horizon += 1

    # -- the arena ---------------------------------------------------------------------------------

    def _next_use(self, key: int) -> int:
        """The absolute row of the next use of a weight, or of the update that uses a gradient."""
        count = len(self.elements)
        rows = self.rows_of[key % count]
        if not rows:
            return self.position + self.num_rows
        cycle, row = divmod(self.position, self.num_rows)
        if key >= count:
            return (cycle + 1) * self.num_rows + rows[0]
        found = bisect.bisect_left(rows, row)
        return (
            cycle * self.num_rows + rows[found]
            if found < len(rows)
            else (cycle + 1) * self.num_rows + rows[0]
        )

    def _make_room(self, num_bytes: int, *, demand: bool, sooner_than: int = 0) -> bool:
        """Have ``num_bytes`` free, evicting in the policy's order; False, and nothing changed, where it cannot be."""
        need = num_bytes - (self.capacity - self.used)
        if need <= 0:
            return True
        keys = [key for key, held in self.held.items() if not held.pinned]
        until = [self._next_use(key) for key in keys]
        if not demand:
            late = [later > sooner_than for later in until]
            keys = [key for key, is_late in zip(keys, late, strict=True) if is_late]
            until = [row for row, is_late in zip(until, late, strict=True) if is_late]
        if sum(self.held[key].num_bytes for key in keys) < need:
            return False
        order = self.policy.eviction_order(
            np.array(keys, np.int64), np.array(until, np.int64) - self.position
        ).tolist()
        self._host(self.rates.host_eviction_seconds)
        batch = self.shares.arena_bytes // BATCH_SHARE
        gone = 0
        for key in order:
            size = self.held[key].num_bytes
            if gone >= need and gone + size > batch:
                break
            self._evict(key)
            gone += size
        return True

    def _evict(self, key: int) -> None:
        held = self.held[key]
        waits = [held.last_use]
        if held.dirty:
            waits = [self._page_out(key, held)]
        self._release(key, waits)
        self.policy.record_evict(np.array([key], np.int64))
        self.horizon = min(self.horizon, self.position)

    def _page_out(self, key: int, held: Held) -> int:
        count = len(self.elements)
        is_weight, parameter = key < count, key % count
        task = self.tasks.add(
            Engine.LINK_OUT,
            held.num_bytes,
            (held.last_use,),
            kind="parameter out" if is_weight else "gradient out",
            subject=parameter,
        )
        home = task
        if is_weight and self.weight_on_disk[parameter]:
            home = self.tasks.add(
                Engine.DISK_WRITE, held.num_bytes, (task,), kind="parameter to disk", subject=parameter
            )
        if is_weight:
            self.ready[parameter] = home
        else:
            self.gradient_home[parameter] = home
        held.dirty = False
        return task

    def _release(self, key: int, waits: list[int]) -> None:
        """What stood in the arena under ``key`` is worth nothing there once these tasks have ended."""
        held = self.held.pop(key)
        if held.unused:
            self.num_unused_extents -= _extents(held.num_bytes)
        self.used -= held.num_bytes
        self.freed.append((held.num_bytes, tuple(waits)))
        self.memory.append(self._stay(key, held, max(waits)))

    def _stay(self, key: int, held: Held, last_task: int) -> Stay:
        kind, parameter = divmod(key, len(self.elements))
        return Stay(held.num_bytes, held.first_task, last_task, kind, parameter, 0, self.elements[parameter])

    def still_there(self) -> list[Stay]:
        """What stands in the arena after the last step."""
        return [self._stay(key, held, -1) for key, held in self.held.items()]

    def _take(self, num_bytes: int) -> tuple[int, ...]:
        """Frames for so many bytes, which are free; what their next user has to wait for."""
        waits: tuple[int, ...] = ()
        self.used += num_bytes
        while num_bytes > 0:
            free, tasks = self.freed.popleft()
            waits += tasks
            if free > num_bytes:
                self.freed.appendleft((free - num_bytes, tasks))
            num_bytes -= free
        return waits


def _extents(num_bytes: int) -> int:
    return -(-num_bytes // EXTENT_BYTES)
