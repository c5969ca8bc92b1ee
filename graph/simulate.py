"""The simulator: how long a step takes, what it waits for, and what stands where meanwhile, before any of it is run.

``simulate`` takes a step (`pager.graph.step_model`), the machine's rates (`pager.graph.task_timing`), a placement, the
device's shares (`pager.graph.arena_walk`) and an eviction policy: any object with the methods of
``pager.policies.protocol.EvictionPolicy``, as the runtime's. It walks over a few steps as the runtime's host thread
does, times the tasks, and reports the last step. A step ends with its computation; the time between the ends of two
is a step's. It works on parameters and slices, never on pages, so that it takes seconds for 1 T parameters.

docs/benchmarks.md says how far it was from measured steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pager.graph.access_trace import FloatArray, IntArray
from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.cost_model import SupportsEviction
from pager.graph.step_model import StepModel
from pager.graph.step_schedule import Schedule
from pager.graph.task_timing import ENGINE_NAMES, RESOURCE, Engine, MachineRates, Timing

__all__ = ["SimulatedStep", "simulate"]

# The first step starts from an idle machine, the second from what the first left.
NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Waveform:
    """Bytes on the device over a step, piecewise constant from each of ``seconds`` (float64, from the step's begin).

    ``pages``: of the arena, in use (int64): what stays, slots, and what streams. ``activations``: int64.
    """

    seconds: FloatArray
    pages: IntArray
    activations: IntArray

    @property
    def peak_pages_bytes(self) -> int:
        """The most pages in use at once."""
        return int(self.pages.max(initial=0))

    @property
    def peak_bytes(self) -> int:
        """The most of pages and activations together."""
        return int((self.pages + self.activations).max(initial=0))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedTask:
    """What an engine did, in seconds from the step's begin: ``kind`` says what, ``subject`` for which parameter.

    ``waits``: ``number`` of the tasks that it waited for.
    """

    number: int
    waits: tuple[int, ...]
    engine: str
    kind: str
    subject: str
    begin_seconds: float
    end_seconds: float
    work: float


class ResidentSpan(NamedTuple):
    """Elements of a parameter's weight (``kind`` 0), gradient (1) or states (2) on the device, and when in the step."""

    kind: int
    parameter: int
    first_element: int
    num_elements: int
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedStep:
    """One step in the steady state.

    ``stall_seconds``: by what the computation waited for, with nothing beside it. ``busy_seconds``, by what streams
    share: the device, each direction of the link. ``*_bytes``: over each link direction and each way of the disk.
    ``cpu_share``: of the elements. ``rest_seconds``: from the end of a step to the first gradient, as the host sees it,
    without ``late_seconds`` in which it waited for the CPU's updates. ``num_refused_elements``: of the CPU's part,
    updated by the device since no home was free. ``bound`` is `pager.graph.bound`'s, in seconds, where whoever
    simulated asked for it.
    """

    seconds: float
    forward_seconds: float
    backward_seconds: float
    compute_seconds: float
    stall_seconds: Mapping[str, float]
    busy_seconds: Mapping[str, float]
    page_in_bytes: int
    page_out_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    dram_bytes: int
    cpu_share: float
    cpu_parameters_per_second: float
    rest_seconds: float
    late_seconds: float
    num_refused_elements: int
    waveform: Waveform
    hit_rate: float
    tasks: tuple[SimulatedTask, ...] = field(repr=False)
    spans: tuple[ResidentSpan, ...] = field(repr=False)
    tier_bytes: Mapping[str, int]
    bound: float | None = None

    @property
    def of_bound(self) -> float | None:
        """``bound`` over ``seconds``: 1 where no schedule could be faster."""
        return None if self.bound is None else self.bound / self.seconds

    @property
    def stall_share(self) -> float:
        """Of the step, in which the device computed nothing."""
        return sum(self.stall_seconds.values()) / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All but tasks and waveform, as plain values."""
        names = [name for name in SimulatedStep.__slots__ if name not in ("tasks", "spans", "waveform")]
        values = {name: getattr(self, name) for name in names}
        for name in ("stall_seconds", "busy_seconds", "tier_bytes"):
            values[name] = dict(values[name])
        return values | {
            "of_bound": self.of_bound,
            "stall_share": self.stall_share,
            "peak_pages_bytes": self.waveform.peak_pages_bytes,
            "peak_device_bytes": self.waveform.peak_bytes,
        }


def simulate(
    model: StepModel,
    placement: Placement,
    shares: DeviceShares,
    *,
    policy: SupportsEviction,
    rates: MachineRates | None = None,
    knobs: StepKnobs | None = None,
    keep_tasks: bool = False,
) -> SimulatedStep:
    """The step in the steady state. ``policy`` is copied. ``keep_tasks``: for a trace and a
    map: the step's ``tasks``, and ``spans`` of what is not on the device throughout.

    Raises ValueError where the arena cannot hold what stays, the slots, or what one operation needs.
    """
    limits = rates or MachineRates()
    schedule = Schedule(model, placement, shares, knobs or StepKnobs(), copy.deepcopy(policy), limits)
    for _ in range(NUM_STEPS):
        schedule.run_step()
    return _Report(schedule, schedule.clock.run()).make(keep_tasks=keep_tasks)


class _Report:
    """What the last step shows."""

    def __init__(self, schedule: Schedule, timing: Timing) -> None:
        self.schedule = schedule
        self.timing = timing
        before, self.marks = schedule.steps[-2:]
        # A step ends with its computation; what is under way then belongs to the next one.
        self.begin = float(timing.end[before.last_compute])
        self.end = float(timing.end[self.marks.last_compute])

    def make(self, *, keep_tasks: bool) -> SimulatedStep:
        schedule, timing = self.schedule, self.timing
        model = schedule.model
        tasks = schedule.tasks
        own = range(self.marks.first_task, len(tasks))
        work = dict.fromkeys(Engine, 0.0)
        for task in own:
            work[RESOURCE[Engine(tasks.engine[task])]] += tasks.work[task]
        busy = self._busy()
        first_backward = model.first_backward_tick
        middle = (
            float(timing.begin[self.marks.ticks[first_backward]])
            if first_backward < model.num_ticks
            else self.end
        )
        count = max(model.num_parameters, 1)
        cpu_bytes = schedule.rates.cpu_bytes_per_parameter
        moved = sum(work[e] for e in (Engine.LINK_IN, Engine.LINK_OUT, Engine.DISK_READ, Engine.DISK_WRITE))
        return SimulatedStep(
            seconds=self.end - self.begin,
            forward_seconds=middle - self.begin,
            backward_seconds=self.end - middle,
            compute_seconds=work[Engine.COMPUTE],
            stall_seconds=self._stalls(),
            busy_seconds={ENGINE_NAMES[engine]: busy[engine] for engine in Engine if engine in busy},
            page_in_bytes=round(work[Engine.LINK_IN]),
            page_out_bytes=round(work[Engine.LINK_OUT]),
            disk_read_bytes=round(work[Engine.DISK_READ]),
            disk_write_bytes=round(work[Engine.DISK_WRITE]),
            dram_bytes=round(moved + work[Engine.CPU_UPDATE] * cpu_bytes),
            cpu_share=work[Engine.CPU_UPDATE] / count,
            cpu_parameters_per_second=(
                work[Engine.CPU_UPDATE] / busy[Engine.CPU_UPDATE] if busy[Engine.CPU_UPDATE] else 0.0
            ),
            **self._rest(),
            num_refused_elements=self.marks.num_refused_elements,
            waveform=self._waveform(),
            hit_rate=self.marks.hits / max(self.marks.hits + self.marks.misses, 1),
            tasks=self._tasks() if keep_tasks else (),
            spans=self._spans() if keep_tasks else (),
            tier_bytes=self._tier_bytes(),
        )

    def _own(self, *engines: Engine) -> list[int]:
        engine = self.schedule.tasks.engine
        return [task for task in range(self.marks.first_task, len(engine)) if engine[task] in engines]

    def _busy(self) -> dict[Engine, float]:
        """Seconds in which something of a resource was at work, for the tasks of the step."""
        busy = {}
        for resource in dict.fromkeys(RESOURCE.values()):
            own = self._own(*(engine for engine in Engine if RESOURCE[engine] == resource))
            order = sorted(own, key=lambda task: float(self.timing.begin[task]))
            seconds, until = 0.0, -np.inf
            for task in order:
                end = float(self.timing.end[task])
                seconds += max(end - max(float(self.timing.begin[task]), until), 0.0)
                until = max(until, end)
            busy[resource] = seconds
        return busy

    def _rest(self) -> dict[str, float]:
        """What the runtime's rates say (`pager.optim.cpu_rates`) of the time before the first gradient."""
        tasks, timing = self.schedule.tasks, self.timing
        late, free = 0.0, self.begin
        for task in self._own(Engine.HOST):
            if tasks.kind[task] == "host waits":
                late += max(float(timing.begin[task]) - free, 0.0)
            free = float(timing.end[task])
        before, first = self.schedule.steps[-2].link_rests, self.marks.first_gradient
        began = float(timing.end[before]) if before >= 0 else self.begin
        rest = float(timing.end[first]) - began - late if first >= 0 else 0.0
        return {"rest_seconds": max(rest, 0.0), "late_seconds": late}

    def _stalls(self) -> dict[str, float]:
        """Gaps in the computation, each by the last thing that it waited for; an update beside it waited itself."""
        tasks, timing = self.schedule.tasks, self.timing
        beside = self._own(Engine.BESIDE)
        begins, ends = timing.begin[beside], timing.end[beside]
        stalls: dict[str, float] = {}
        free = self.begin
        for task in self._own(Engine.COMPUTE):
            begin = float(timing.begin[task])
            gap = begin - free
            gap -= float(np.clip(np.minimum(ends, begin) - np.maximum(begins, free), 0.0, None).sum())
            free = float(timing.end[task])
            last = task
            while tasks.waits(last) and (last == task or tasks.engine[last] == Engine.BESIDE):
                last = max(tasks.waits(last), key=lambda before: float(timing.end[before]))
            if gap > 1e-9 and last != task:
                stalls[tasks.kind[last]] = stalls.get(tasks.kind[last], 0.0) + gap
        return dict(sorted(stalls.items(), key=lambda item: -item[1]))

    def _waveform(self) -> Waveform:
        schedule, timing = self.schedule, self.timing
        stays = [stay[:3] for stay in (*schedule.memory, *schedule.still_there())]
        table = np.array(stays, np.int64).reshape(-1, 3)
        begins = timing.begin[table[:, 1]]
        ends = np.where(table[:, 2] >= 0, timing.end[table[:, 2]], np.inf)
        ticks = np.array(self.marks.ticks, np.int64)
        # Changes of pages and of activations, in one list of events.
        seconds = np.concatenate([ends, begins, timing.begin[ticks], [self.end]])
        change = np.concatenate([-table[:, 0], table[:, 0], np.zeros(len(ticks) + 1, np.int64)])
        live = schedule.model.live_bytes
        activation = np.concatenate(
            [
                np.zeros(2 * len(table), np.int64),
                np.diff(live, prepend=0),
                [-int(live[-1]) if len(live) else 0],
            ]
        )
        order = np.argsort(seconds, kind="stable")
        seconds = seconds[order]
        fixed = schedule.fixed_bytes + schedule.shares.ring_bytes
        pages = np.cumsum(change[order]) + fixed
        activations = np.cumsum(activation[order])
        inside = np.flatnonzero((seconds >= self.begin) & (seconds <= self.end) & np.isfinite(seconds))
        return Waveform(
            seconds=seconds[inside] - self.begin,
            pages=pages[inside].astype(np.int64),
            activations=activations[inside].astype(np.int64),
        )

    def _tasks(self) -> tuple[SimulatedTask, ...]:
        schedule, timing = self.schedule, self.timing
        tasks = schedule.tasks
        names = schedule.model.names
        inside = np.flatnonzero((timing.end > self.begin) & (timing.begin < self.end))
        return tuple(
            SimulatedTask(
                number=task,
                waits=tuple(tasks.waits(task)),
                engine=ENGINE_NAMES[tasks.engine[task]],
                kind=tasks.kind[task],
                subject=names[tasks.subject[task]] if tasks.subject[task] >= 0 else "",
                begin_seconds=float(timing.begin[task]) - self.begin,
                end_seconds=float(timing.end[task]) - self.begin,
                work=tasks.work[task],
            )
            for task in inside.tolist()
        )

    def _spans(self) -> tuple[ResidentSpan, ...]:
        schedule, timing = self.schedule, self.timing
        spans = []
        for stay in (*schedule.memory, *schedule.in_slots, *schedule.still_there()):
            begin = float(timing.begin[stay.first_task])
            end = float(timing.end[stay.last_task]) if stay.last_task >= 0 else self.end
            if begin < self.end and end > self.begin:
                when = (max(begin - self.begin, 0.0), min(end, self.end) - self.begin)
                spans.append(ResidentSpan(*stay[3:], *when))
        return tuple(spans)

    def _tier_bytes(self) -> dict[str, int]:
        """What has its home in each tier; gradients have one in host memory unless they never leave the device."""
        schedule = self.schedule
        model, placement = schedule.model, schedule.placement
        size = model.size
        elements = model.num_elements
        trained = model.gradient_tick >= 0
        state_bytes = np.where(trained, elements * size.state, 0)
        needs_home = trained & (placement.on_cpu | (schedule.knobs.update_at == "step"))
        host = int((elements * size.weight)[~placement.weight_on_disk & ~placement.wired].sum())
        host += int(state_bytes[~placement.states_on_disk].sum())
        host += int((elements * size.gradient)[needs_home].sum())
        disk = int((elements * size.weight)[placement.weight_on_disk].sum())
        disk += int(state_bytes[placement.states_on_disk].sum())
        return {"device": schedule.shares.arena_bytes + model.small_bytes, "host": host, "disk": disk}
