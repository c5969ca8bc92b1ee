"""When tasks run: a discrete-event simulation of engines that share the machine's memory, link and device.

A task belongs to one *engine*: a stream of the device (compute, beside, two for each direction of the link), the disk's
reads or writes, the CPU's update, or the host's thread. An engine does one task at a time, in the order in which tasks
were added, as a stream does, and begins one when all the tasks it depends on have ended. Between two events every
running task proceeds at a constant rate:

- compute and beside (the updates' stream, `pager.optim.update_stream`): 1 second a second; half of it each while both
  run, so that two streams compute no faster than one;
- a direction of the link: its rate alone, or the lower rate each way while both directions run. Its two streams, that
  of pages and that of the update's slots, have half of that each while both copy;
- the CPU's update: jobs are served as `pager.optim.cpu_pool` does, those first whose ``due`` is the smallest, by as
  many threads as its limit allows and as the job has slices. A thread does its rate, all together theirs at most;
- disk and host: their own rates; less each way where the disk reads and writes at once;
- host DRAM: each byte over the link or the disk is one byte of it, each parameter updated on the CPU
  ``cpu_bytes_per_parameter``. Where the running tasks ask for more than it has, all of them slow down in proportion.
  (Measured, one H200: all threads alone update 4.75 G parameters/s, the link alone moves 50 GB/s each way, together
  2.8 G and 31.5 GB/s: 0.59 and 0.63 of it.)

A *late* task is one that a thread adds to its engine when it becomes ready: nothing waits behind it before that, and
what was added in order goes first where both are ready.

Tasks may still be added while time passes (`Clock`): then nothing of them begins before the time that has come.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from pager.graph.access_trace import FloatArray

__all__ = ["ENGINE_NAMES", "RESOURCE", "Clock", "Engine", "MachineRates", "TaskList", "Timing", "run_tasks"]


class Engine(IntEnum):
    """What does one task at a time; the CPU's update: one for each thread at most."""

    COMPUTE = 0
    LINK_IN = 1
    LINK_OUT = 2
    DISK_READ = 3
    DISK_WRITE = 4
    CPU_UPDATE = 5
    HOST = 6
    SLOTS_IN = 7
    SLOTS_OUT = 8
    BESIDE = 9


# As the runtime's streams are called.
ENGINE_NAMES = (
    *("compute", "h2d", "d2h", "disk read", "disk write", "cpu update", "host"),
    *("slots in", "slots out", "beside"),
)
# What engines share: two streams each of a direction of the link, and of the device.
RESOURCE = {
    **{engine: engine for engine in Engine},
    Engine.SLOTS_IN: Engine.LINK_IN,
    Engine.SLOTS_OUT: Engine.LINK_OUT,
    Engine.BESIDE: Engine.COMPUTE,
}
_IN = (Engine.LINK_IN, Engine.SLOTS_IN)
_OUT = (Engine.LINK_OUT, Engine.SLOTS_OUT)
_LINK = (*_IN, *_OUT)
_DISK = (Engine.DISK_READ, Engine.DISK_WRITE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRates:
    """What the parts of a machine do in a second. Defaults: one H200 on PCIe 5 x16, measured (docs/benchmarks.md).

    Bytes, but for the CPU's and the device's update: parameters. ``link_both_bytes_per_second``,
    ``disk_both_bytes_per_second``: each way, while both go on. ``cpu_threads``: that update;
    ``cpu_update_parameters_per_second``: all of them at once, while the link rests;
    ``cpu_thread_parameters_per_second``: one of few. ``cpu_bytes_per_parameter``: of host DRAM (weight, gradient and
    states read, weight and states written). ``copy_seconds``: what a copy costs beside its bytes. ValueError for a rate
    that is not positive.
    """

    link_in_bytes_per_second: float = 55.3e9
    link_out_bytes_per_second: float = 55.3e9
    link_both_bytes_per_second: float = 50.5e9
    host_dram_bytes_per_second: float = 150e9
    disk_read_bytes_per_second: float = 1.8e9
    disk_write_bytes_per_second: float = 2.9e9
    disk_both_bytes_per_second: float = 1.0e9
    cpu_threads: int = 15
    cpu_update_parameters_per_second: float = 4.7e9
    # Five of sixteen do 2.5 G.
    cpu_thread_parameters_per_second: float = 0.5e9
    device_update_parameters_per_second: float = 118e9
    cpu_bytes_per_parameter: float = 26.0
    copy_seconds: float = 4.4e-6
    # The host's thread: an access with the operations around it (the forward of 3.4 B has 198 and takes it 0.08 s), a
    # unit of the update, a page in, a choice of victims (measured: docs/decisions.md, 8); and ``step()``, for each
    # parameter (0.16 ms with updates at the step, 0.09 in backward).
    host_access_seconds: float = 0.4e-3
    host_unit_seconds: float = 1e-3
    host_step_seconds: float = 0.12e-3
    host_page_in_seconds: float = 0.1e-3
    host_eviction_seconds: float = 0.5e-3
    # What the driver queues of a stream before a launch waits (assumed), and what an access and a unit of the update
    # put there (counted: kernels and events of the preset models; docs/benchmarks.md).
    queued_launches: int = 1024
    access_launches: int = 6
    unit_launches: int = 15

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if not value > 0:
                raise ValueError(f"{own.name} is {value}; a rate must be positive")


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
        self.late: list[bool] = []
        # Of the CPU's updates: when they are due, and the threads that may work at one.
        self.jobs: dict[int, tuple[int, int]] = {}
        # From the end of a task on, so many threads may be at the CPU's updates.
        self.limits: dict[int, int] = {}

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
        due: int = 0,
        slices: int = 2**30,
    ) -> int:
        """Add a task and return its number.

        ``work``: seconds (compute, host), bytes (link, disk) or parameters (CPU). ``waits``: tasks that end before this
        one begins; negative numbers are left out. ``kind`` and ``subject`` (a parameter's number) name it.
        ``late``: see the head of this file. ``due`` and ``slices``: of a CPU's update.
        """
        number = len(self.engine)
        self.engine.append(int(engine))
        self.work.append(float(work))
        awaited = self.awaited
        awaited += {task for task in waits if task >= 0}
        self.wait_begin.append(len(awaited))
        self.kind.append(kind)
        self.subject.append(subject)
        self.late.append(late)
        if engine == Engine.CPU_UPDATE:
            self.jobs[number] = (due, slices)
        return number

    def waits(self, task: int) -> list[int]:
        """The tasks that end before ``task`` begins."""
        return self.awaited[self.wait_begin[task] : self.wait_begin[task + 1]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timing:
    """When each task began and ended (float64 seconds per task)."""

    begin: FloatArray
    end: FloatArray
    dram_bytes: float


def run_tasks(tasks: TaskList, rates: MachineRates) -> Timing:
    """Carry ``tasks`` out. Raises ValueError where tasks wait for each other in a circle."""
    return Clock(tasks, rates).run()


class Clock:
    """One simulation: the heads of the engines' queues, and how much of them is left."""

    def __init__(self, tasks: TaskList, rates: MachineRates) -> None:
        self.tasks = tasks
        self.rates = rates
        self.now = 0.0
        self._num_known = self._num_done = 0
        self._missing: list[int] = []
        # Those who wait for task t, as a chain: first[t], then next[...], flat again.
        self._first: list[int] = []
        self._next: list[int] = []
        self._waiting: list[int] = []
        # Two queues for each engine: what was added in order, and what came late.
        self._queues: list[deque[int]] = [deque() for _ in Engine]
        self._late: list[deque[int]] = [deque() for _ in Engine]
        # The CPU's updates that are ready, by when they are due; those of them that have threads, with how many.
        self._ready: list[tuple[int, int]] = []
        self._served: list[tuple[int, int]] = []
        self._is_served = True
        self._limit = rates.cpu_threads
        self._running: list[int] = [-1] * len(Engine)
        self._active: list[int] = []
        # Engines that may have something to begin: those that came free, and those of tasks that became ready.
        self._idle: set[int] = set()
        self._left: list[float] = []
        self._begin: list[float] = []
        self._end: list[float] = []
        self._speeds: dict[tuple[int, int], tuple[list[float], float]] = {}
        self._dram_bytes = 0.0

    def run(self) -> Timing:
        """Let all tasks end."""
        self._take_in()
        while self._num_done < len(self.tasks):
            self._pass()
        return Timing(
            begin=np.array(self._begin),
            end=np.array(self._end),
            dram_bytes=self._dram_bytes,
        )

    def is_over(self, task: int, *, at: int) -> bool:
        """Whether ``task`` has ended when ``at`` ends."""
        self._take_in()
        while math.isnan(self._end[at]):
            self._pass()
        return self._end[task] <= self._end[at]

    def _take_in(self) -> None:
        """Tasks that were added since."""
        tasks = self.tasks
        new = range(self._num_known, len(tasks))
        self._num_known = len(tasks)
        self._first += [-1] * len(new)
        self._missing += [0] * len(new)
        self._begin += [math.nan] * len(new)
        self._end += [math.nan] * len(new)
        self._left += map(self._work, new)
        for task in new:
            for before in tasks.waits(task):
                if math.isnan(self._end[before]):
                    self._missing[task] += 1
                    self._next.append(self._first[before])
                    self._first[before] = len(self._waiting)
                    self._waiting.append(task)
            engine = tasks.engine[task]
            if not tasks.late[task] and engine != Engine.CPU_UPDATE:
                self._queues[engine].append(task)
            elif not self._missing[task]:
                self._queue_up(task)
            self._idle.add(engine)

    def _work(self, task: int) -> float:
        work = self.tasks.work[task]
        if self.tasks.engine[task] in _LINK and work > 0:
            work += self.rates.copy_seconds * self.rates.link_both_bytes_per_second
        return work

    def _queue_up(self, task: int) -> None:
        """A late task, or one of the CPU's, is ready."""
        engine = self.tasks.engine[task]
        if engine == Engine.CPU_UPDATE:
            bisect.insort(self._ready, (self.tasks.jobs[task][0], task))
            self._is_served = False
        else:
            self._late[engine].append(task)

    def _pass(self) -> None:
        """Until the next task ends."""
        for engine in self._idle:
            if self._running[engine] < 0 and self._start(engine):
                self._active.append(engine)
        self._idle.clear()
        if not self._is_served:
            self._serve()
        if not self._active and not self._served:
            left = self._num_known - self._num_done
            raise ValueError(f"{left} of {self._num_known} tasks wait for each other in a circle")
        mask = 0
        for engine in self._active:
            mask |= 1 << engine
        num_threads = sum(threads for _, threads in self._served)
        if (mask, num_threads) not in self._speeds:
            self._speeds[mask, num_threads] = _speeds(mask, num_threads, self.rates)
        speeds, dram = self._speeds[mask, num_threads]
        # Every task that runs, and its speed.
        now_at = [(self._running[engine], speeds[engine]) for engine in self._active]
        per_thread = speeds[Engine.CPU_UPDATE] / max(num_threads, 1)
        now_at += [(task, threads * per_thread) for task, threads in self._served]
        remaining = self._left
        step = min([remaining[task] / speed for task, speed in now_at])
        self.now += step
        self._dram_bytes += dram * step
        for task, speed in now_at:
            remaining[task] -= step * speed
            # What is left after rounding is far below a nanosecond's worth.
            if remaining[task] <= 1e-9 * speed:
                self._finish(task)

    def _start(self, engine: int) -> bool:
        """Begin the engine's next task, if one is ready; whether one was."""
        for queue in (self._queues[engine], self._late[engine]):
            if queue and not self._missing[queue[0]]:
                self._running[engine] = queue.popleft()
                self._begin[self._running[engine]] = self.now
                return True
        return False

    def _serve(self) -> None:
        """Give the CPU's threads to the updates that are due first, to each as many as it has slices."""
        self._is_served = True
        self._served.clear()
        free = self._limit
        for _, task in self._ready:
            threads = min(free, self.tasks.jobs[task][1])
            if not threads:
                return
            free -= threads
            self._served.append((task, threads))
            if math.isnan(self._begin[task]):
                self._begin[task] = self.now

    def _finish(self, task: int) -> None:
        tasks = self.tasks
        engine = tasks.engine[task]
        self._end[task] = self.now
        self._num_done += 1
        if engine == Engine.CPU_UPDATE:
            self._ready.remove((tasks.jobs[task][0], task))
            self._is_served = False
        else:
            self._running[engine] = -1
            self._active.remove(engine)
            self._idle.add(engine)
        if task in tasks.limits:
            self._limit, self._is_served = min(tasks.limits[task], self.rates.cpu_threads), False
        edge = self._first[task]
        while edge >= 0:
            follower, edge = self._waiting[edge], self._next[edge]
            self._missing[follower] -= 1
            if not self._missing[follower]:
                engine = tasks.engine[follower]
                self._idle.add(engine)
                if tasks.late[follower] or engine == Engine.CPU_UPDATE:
                    self._queue_up(follower)


def _speeds(mask: int, num_threads: int, rates: MachineRates) -> tuple[list[float], float]:
    """Work a second of each engine while those of ``mask`` run and so many threads update, and bytes a second of host
    DRAM.
    """
    running = [engine for engine in Engine if mask >> engine & 1]
    into, out = (sum(engine in running for engine in streams) for streams in (_IN, _OUT))
    link = rates.link_both_bytes_per_second if into and out else math.inf
    disk = rates.disk_both_bytes_per_second if all(engine in running for engine in _DISK) else math.inf
    alone = dict.fromkeys(Engine, 0.0) | {
        Engine.COMPUTE: 1.0,
        Engine.BESIDE: 1.0,
        Engine.HOST: 1.0,
        Engine.DISK_READ: min(rates.disk_read_bytes_per_second, disk),
        Engine.DISK_WRITE: min(rates.disk_write_bytes_per_second, disk),
        Engine.CPU_UPDATE: min(
            num_threads * rates.cpu_thread_parameters_per_second, rates.cpu_update_parameters_per_second
        ),
    }
    alone |= dict.fromkeys(_IN, min(rates.link_in_bytes_per_second, link) / max(into, 1))
    alone |= dict.fromkeys(_OUT, min(rates.link_out_bytes_per_second, link) / max(out, 1))
    if Engine.COMPUTE in running and Engine.BESIDE in running:
        alone |= {Engine.COMPUTE: 0.5, Engine.BESIDE: 0.5}
    if num_threads:
        running.append(Engine.CPU_UPDATE)
    dram_of = dict.fromkeys(Engine, 0.0) | dict.fromkeys((*_LINK, *_DISK), 1.0)
    dram_of[Engine.CPU_UPDATE] = rates.cpu_bytes_per_parameter
    asked = sum(alone[engine] * dram_of[engine] for engine in running)
    share = min(1.0, rates.host_dram_bytes_per_second / asked) if asked else 1.0
    speeds = [
        alone[engine] * (share if dram_of[engine] else 1.0) if engine in running else 0.0 for engine in Engine
    ]
    return speeds, asked * share
