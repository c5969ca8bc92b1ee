"""When tasks run: a discrete-event simulation of engines that share the machine's memory and link.

A task belongs to one *engine* (compute, each direction of the link, disk read, disk write, the CPU's update, the
host's thread). An engine does one task at a time, in the order in which tasks were added, as a stream does, and begins
one when all the tasks it depends on have ended. Between two events every running task proceeds at a constant rate:

- compute and host: 1 second a second;
- the link: its rate alone, or the lower rate each way while both directions run;
- disk and CPU: their own rates;
- host DRAM: each byte over the link or the disk is one byte of it, each parameter updated on the CPU
  ``cpu_bytes_per_parameter``. Where the running tasks ask for more than it has, all of them slow down in proportion.
  (Measured, one H200: all threads alone update 4.75 G parameters/s, the link alone moves 50 GB/s each way, together
  2.8 G and 31.5 GB/s: 0.59 and 0.63 of it.)

A *late* task is one that a thread adds to the engine when it becomes ready: it takes its place behind what was added
before the mark it names, and nothing waits behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from pager.graph.access_trace import FloatArray

__all__ = ["Engine", "MachineRates", "TaskList", "Timing", "run_tasks"]


class Engine(IntEnum):
    """What does one task at a time."""

    COMPUTE = 0
    LINK_IN = 1
    LINK_OUT = 2
    DISK_READ = 3
    DISK_WRITE = 4
    CPU_UPDATE = 5
    HOST = 6


ENGINE_NAMES = ("compute", "h2d", "d2h", "disk read", "disk write", "cpu update", "host")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRates:
    """What the parts of a machine do in a second. Defaults: one H200 on PCIe 5 x16, measured (docs/benchmarks.md).

    Bytes, but for the CPU's and the device's update: parameters. ``link_both_bytes_per_second``: each way, while both
    directions run. ``cpu_bytes_per_parameter``: of host DRAM (weight, gradient and states read, weight and states
    written). ``copy_seconds``: what a copy costs beside its bytes. ValueError for a rate that is not positive.
    """

    link_in_bytes_per_second: float = 54.6e9
    link_out_bytes_per_second: float = 55.1e9
    link_both_bytes_per_second: float = 45.6e9
    host_dram_bytes_per_second: float = 141e9
    disk_read_bytes_per_second: float = 1.8e9
    disk_write_bytes_per_second: float = 2.9e9
    # Five of sixteen threads: those that update beside the link.
    cpu_update_parameters_per_second: float = 2.5e9
    device_update_parameters_per_second: float = 113e9
    cpu_bytes_per_parameter: float = 26.0
    copy_seconds: float = 4.4e-6
    # The host's thread: an access with the operations around it, a unit of the update (measured), a page in, a choice
    # of victims (measured: docs/decisions.md, 8).
    host_access_seconds: float = 0.07e-3
    host_unit_seconds: float = 1e-3
    host_page_in_seconds: float = 0.1e-3
    host_eviction_seconds: float = 0.5e-3
    # Its speed while the CPU updates; most likely both want the interpreter's lock. This and the access are fitted,
    # once, to the two measured rows in which the host is the wall (docs/benchmarks.md).
    host_speed_beside_cpu: float = 1 / 5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} is {value}; a rate must be positive")


class TaskList:
    """The tasks of a program, in the order in which they are added."""

    def __init__(self) -> None:
        self.engine: list[int] = []
        self.work: list[float] = []
        # What task t waits for: those at wait_begin[t] up to wait_begin[t + 1]. Flat: a million small tuples would
        # cost the garbage collector more time than all else takes.
        self.awaited: list[int] = []
        self.wait_begin: list[int] = [0]
        self.kind: list[str] = []
        self.subject: list[int] = []
        self.turn: list[float] = []
        self.num_late = 0

    def __len__(self) -> int:
        return len(self.engine)

    def add(
        self,
        engine: Engine,
        work: float,
        waits: Iterable[int] = (),
        *,
        kind: str = "",
        subject: int = -1,
        late: bool = False,
    ) -> int:
        """Add a task and return its number.

        ``work``: seconds (compute, host), bytes (link, disk) or parameters (CPU). ``waits``: tasks that end before this
        one begins; negative numbers are left out. ``kind`` and ``subject`` (a parameter's number) name it.
        ``late``: see the head of this file; its mark is the next call of :meth:`mark`.
        """
        number = len(self.engine)
        self.engine.append(int(engine))
        self.work.append(float(work))
        awaited = self.awaited
        awaited += {task for task in waits if task >= 0}
        self.wait_begin.append(len(awaited))
        self.kind.append(kind)
        self.subject.append(subject)
        self.turn.append(-1 if late else number)
        self.num_late += int(late)
        return number

    def waits(self, task: int) -> list[int]:
        """The tasks that end before ``task`` begins."""
        return self.awaited[self.wait_begin[task] : self.wait_begin[task + 1]]

    def mark(self) -> None:
        """Late tasks added so far take their turn here."""
        if self.num_late:
            now = len(self.engine) - 0.5
            self.turn = [now if turn < 0 else turn for turn in self.turn]
            self.num_late = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timing:
    """When each task began and ended (float64 seconds per task), and the busy seconds of each engine."""

    begin: FloatArray
    end: FloatArray
    busy_seconds: FloatArray
    dram_bytes: float


def run_tasks(tasks: TaskList, rates: MachineRates) -> Timing:
    """Carry ``tasks`` out. Raises ValueError where tasks wait for each other in a circle."""
    tasks.mark()
    return _Run(tasks, rates).run()


class _Run:
    """One simulation: the heads of the engines' queues, and how much of them is left."""

    def __init__(self, tasks: TaskList, rates: MachineRates) -> None:
        self.tasks = tasks
        self.rates = rates
        num_tasks = len(tasks)
        begins = np.array(tasks.wait_begin, np.int64)
        awaited = np.array(tasks.awaited, np.int64)
        self.missing: list[int] = np.diff(begins).tolist()
        # Those who wait for task t, flat again.
        waiting = np.repeat(np.arange(num_tasks), np.diff(begins))
        self.followers: list[int] = waiting[np.argsort(awaited, kind="stable")].tolist()
        counts = np.bincount(awaited, minlength=num_tasks)
        self.follower_begin: list[int] = np.concatenate([[0], np.cumsum(counts)]).tolist()
        # Two queues for each engine: what was added in order, and what came late.
        self.queues: list[list[list[int]]] = [[[], []] for _ in Engine]
        for task in range(num_tasks):
            self.queues[tasks.engine[task]][int(tasks.turn[task] != task)].append(task)
        self.places = [[0, 0] for _ in Engine]
        self.running: list[int] = [-1] * len(Engine)
        self.left = [0.0] * len(Engine)
        self.begin = [math.nan] * num_tasks
        self.end = [math.nan] * num_tasks
        self.known: dict[int, tuple[list[float], float]] = {}

    def run(self) -> Timing:
        tasks, running, left = self.tasks, self.running, self.left
        busy = [0.0] * len(Engine)
        now, done, dram_bytes = 0.0, 0, 0.0
        active: list[int] = []
        # Engines that may have something to begin: those that came free, and those of tasks that became ready.
        idle: set[int] = {int(engine) for engine in Engine}
        while done < len(tasks):
            for engine in idle:
                if running[engine] < 0 and self._start(engine, now):
                    active.append(engine)
            idle.clear()
            if not active:
                raise ValueError(f"{len(tasks) - done} of {len(tasks)} tasks wait for each other in a circle")
            mask = 0
            for engine in active:
                mask |= 1 << engine
            speed, dram = self._speed(mask)
            step = min([left[engine] / speed[engine] for engine in active])
            now += step
            dram_bytes += dram * step
            still: list[int] = []
            for engine in active:
                busy[engine] += step
                left[engine] -= step * speed[engine]
                # What is left after rounding is far below a nanosecond's worth.
                if left[engine] > 1e-9 * speed[engine]:
                    still.append(engine)
                    continue
                self._finish(engine, now, idle)
                done += 1
            active = still
        return Timing(
            begin=np.array(self.begin),
            end=np.array(self.end),
            busy_seconds=np.array(busy),
            dram_bytes=dram_bytes,
        )

    def _start(self, engine: int, now: float) -> bool:
        """Begin the engine's next task, if one is ready; whether one was."""
        best = -1
        for queue in (0, 1):
            waiting, place = self.queues[engine][queue], self.places[engine][queue]
            if place == len(waiting) or self.missing[waiting[place]]:
                continue
            task = waiting[place]
            if best < 0 or self.tasks.turn[task] < self.tasks.turn[best]:
                best = task
        if best < 0:
            return False
        self.places[engine][int(self.tasks.turn[best] != best)] += 1
        self.running[engine] = best
        self.left[engine] = self._work(engine, best)
        self.begin[best] = now
        return True

    def _work(self, engine: int, task: int) -> float:
        work = self.tasks.work[task]
        if engine in (Engine.LINK_IN, Engine.LINK_OUT) and work > 0:
            work += self.rates.copy_seconds * self.rates.link_both_bytes_per_second
        return work

    def _finish(self, engine: int, now: float, idle: set[int]) -> None:
        task, self.running[engine] = self.running[engine], -1
        self.end[task] = now
        idle.add(engine)
        for follower in self.followers[self.follower_begin[task] : self.follower_begin[task + 1]]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                idle.add(self.tasks.engine[follower])

    def _speed(self, mask: int) -> tuple[list[float], float]:
        """Work a second of each engine while those of ``mask`` run, and bytes a second of host DRAM."""
        if mask not in self.known:
            self.known[mask] = _speeds([engine for engine in Engine if mask >> engine & 1], self.rates)
        return self.known[mask]


def _speeds(running: Sequence[Engine], rates: MachineRates) -> tuple[list[float], float]:
    both = Engine.LINK_IN in running and Engine.LINK_OUT in running
    link = rates.link_both_bytes_per_second if both else math.inf
    alone = {
        Engine.COMPUTE: 1.0,
        Engine.HOST: rates.host_speed_beside_cpu if Engine.CPU_UPDATE in running else 1.0,
        Engine.LINK_IN: min(rates.link_in_bytes_per_second, link),
        Engine.LINK_OUT: min(rates.link_out_bytes_per_second, link),
        Engine.DISK_READ: rates.disk_read_bytes_per_second,
        Engine.DISK_WRITE: rates.disk_write_bytes_per_second,
        Engine.CPU_UPDATE: rates.cpu_update_parameters_per_second,
    }
    dram_of = dict.fromkeys(Engine, 1.0) | {
        Engine.COMPUTE: 0.0,
        Engine.HOST: 0.0,
        Engine.CPU_UPDATE: rates.cpu_bytes_per_parameter,
    }
    asked = sum(alone[engine] * dram_of[engine] for engine in running)
    share = min(1.0, rates.host_dram_bytes_per_second / asked) if asked else 1.0
    speeds = [
        alone[engine] * (share if dram_of[engine] else 1.0) if engine in running else 0.0 for engine in Engine
    ]
    return speeds, asked * share
