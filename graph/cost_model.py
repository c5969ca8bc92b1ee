"""What a step costs: seconds per tick, and bytes that move under a given policy and budget.

Seconds come from a roofline: an operation takes as long as its arithmetic or its memory traffic, whichever is
longer. The ceilings are rates that were measured, not data-sheet peaks, but on one machine. They only have to be
right enough to weigh one tick against another: once a step was measured, the runtime scales all of them so that
the step takes as long as it did.

Bytes come from carrying the trace out: ``simulate_step`` walks over the ticks with a policy object that is
handed in (anything with the four methods of ``pager.policies.protocol.EvictionPolicy``), brings in what is
absent, evicts what the policy ranks first, and counts in the second of two steps: the first one starts from
an empty device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import AccessTrace, FloatArray, IntArray, Phase

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Rates of one machine. Defaults: one H200 on PCIe 5 x16 with 16 cores, measured (DESIGN, section 5).

    Raises ValueError if a rate is not positive.
    """

    # A plain 3.4 B decoder, batch 8 x 2048, checkpointed, in 0.890 s: 8 * 3.4e9 * 16384 operations.
    flops_per_second: float = 5.0e14
    # Fused AdamW on the GPU: 113 G parameters/s, each 16 bytes read and 12 written.
    device_memory_bytes_per_second: float = 3.2e12
    host_to_device_bytes_per_second: float = 55.1e9
    device_to_host_bytes_per_second: float = 55.4e9
    # Each way, while both directions run.
    duplex_bytes_per_second: float = 50.4e9
    disk_read_bytes_per_second: float = 1.8e9
    disk_write_bytes_per_second: float = 2.9e9
    # torch fused AdamW, fp32, 16 threads.
    cpu_update_parameters_per_second: float = 4.75e9
    # What one torch copy costs to issue.
    issue_seconds: float = 4.4e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} is {value}; a rate must be positive")


def operation_seconds(
    flops: npt.ArrayLike, memory_bytes: npt.ArrayLike, ceilings: Ceilings | None = None
) -> FloatArray:
    """Seconds (float64) that operations take on the device: the slower of arithmetic and memory.

    ``flops`` and ``memory_bytes`` (read and written): arrays that broadcast.
    """
    limits = ceilings or Ceilings()
    arithmetic = np.asarray(flops, dtype=np.float64) / limits.flops_per_second
    memory = np.asarray(memory_bytes, dtype=np.float64) / limits.device_memory_bytes_per_second
    return np.asarray(np.maximum(arithmetic, memory), dtype=np.float64)


def estimate_tick_seconds(
    trace: AccessTrace,
    page_size: int,
    *,
    flops_per_tick: npt.ArrayLike | None = None,
    moved_bytes_per_tick: npt.ArrayLike | None = None,
    ceilings: Ceilings | None = None,
) -> FloatArray:
    """Seconds (float64 of length ``trace.num_ticks``) per tick of ``trace``.

    Memory traffic is the accessed pages, once for a read, twice for a write in the update (which reads what
    it replaces), or ``moved_bytes_per_tick`` where that is more: capture counts activations too.
    ``flops_per_tick``: floating-point operations. Raises ValueError if one of them has not ``num_ticks``
    entries.
    """
    columns = {}
    for name, values in (("flops_per_tick", flops_per_tick), ("moved_bytes_per_tick", moved_bytes_per_tick)):
        columns[name] = np.zeros(trace.num_ticks) if values is None else np.asarray(values, dtype=np.float64)
        if columns[name].shape != (trace.num_ticks,):
            raise ValueError(f"{name} has shape {columns[name].shape} for {trace.num_ticks} ticks")
    passes = 1 + (trace.write & (trace.phase == Phase.UPDATE))
    row_bytes = trace.num_pages.astype(np.int64) * page_size * passes
    tick_bytes = np.bincount(trace.tick, row_bytes, trace.num_ticks)
    moved = np.maximum(tick_bytes, columns["moved_bytes_per_tick"])
    return operation_seconds(columns["flops_per_tick"], moved, ceilings)


class SupportsEviction(Protocol):
    """The part of an eviction policy that the simulation calls."""

    name: str

    def resize(self, num_keys: int) -> None: ...

    def record_access(self, key: int, position: int) -> None: ...

    def record_evict(self, keys: IntArray) -> None: ...

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTraffic:
    """What one step moves in the steady state. An access counts once per tick and key.

    ``page_in_bytes_of_key`` and ``page_out_bytes_of_key``: int64 per key; ``resident_bytes``: int64 per tick,
    while the tick runs.
    """

    hits: int
    misses: int
    accessed_bytes: int
    miss_bytes: int
    page_in_bytes: int
    page_out_bytes: int
    peak_resident_bytes: int
    page_in_bytes_of_key: IntArray
    page_out_bytes_of_key: IntArray
    resident_bytes: IntArray


def largest_tick_bytes(key: IntArray, tick: IntArray, key_bytes: IntArray) -> int:
    """Bytes that the hungriest tick needs at once: the least budget that ``simulate_step`` accepts."""
    if len(key) == 0:
        return 0
    pairs = np.unique(np.stack((tick, key)), axis=1)
    return int(np.bincount(pairs[0], key_bytes[pairs[1]]).max())


def simulate_step(
    *,
    key: npt.ArrayLike,
    tick: npt.ArrayLike,
    key_bytes: npt.ArrayLike,
    budget_bytes: int,
    policy: SupportsEviction,
    write: npt.ArrayLike | None = None,
    born: npt.ArrayLike | None = None,
    dies: npt.ArrayLike | None = None,
    num_ticks: int | None = None,
    num_warm_up_steps: int = 1,
) -> StepTraffic:
    """Carry a cyclic trace out under ``policy`` with ``budget_bytes`` and count the last step.

    One entry per access: ``key`` int, ``tick`` int (non-decreasing), ``write`` bool (makes the key dirty:
    evicting it costs a page out), ``born`` bool (nothing to read if absent: a first gradient), ``dies`` bool
    (its bytes are worthless after this tick: an applied gradient). ``key_bytes``: int64 per key. All keys of
    a tick are held at once. ``policy`` must be fresh; it is changed. Raises ValueError if a tick needs more
    than the budget, or if the policy's order does not free enough.
    """
    cache = _Cache(key_bytes, budget_bytes, policy)
    columns = _by_tick(key, tick, write, born, dies, num_ticks)
    for step in range(num_warm_up_steps + 1):
        cache.reset_counters()
        for now in range(len(columns.offset) - 1):
            begin, end = int(columns.offset[now]), int(columns.offset[now + 1])
            if end > begin:
                cache.run_tick(columns, begin, end, now, step * (len(columns.offset) - 1))
            cache.note_resident()
    return cache.traffic()


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Accesses without repetition inside a tick; ``offset[t] : offset[t + 1]`` are those of tick t."""

    key: IntArray
    write: BoolArray
    born: BoolArray
    dies: BoolArray
    next_tick: IntArray  # of the next access to the key; beyond num_ticks if in the next step
    offset: IntArray


def _by_tick(key: Any, tick: Any, write: Any, born: Any, dies: Any, num_ticks: int | None) -> _Columns:
    """Sort and merge the columns of ``simulate_step``."""
    keys = np.asarray(key, dtype=np.int64).reshape(-1)
    ticks = np.asarray(tick, dtype=np.int64).reshape(-1)
    if len(keys) != len(ticks) or np.any(np.diff(ticks) < 0):
        raise ValueError("key and tick must have one length, and ticks must not fall")
    count = (int(ticks[-1]) + 1 if len(ticks) else 0) if num_ticks is None else num_ticks
    order = np.lexsort((keys, ticks))
    fresh = np.ones(len(keys), dtype=bool)
    fresh[1:] = (np.diff(ticks[order]) != 0) | (np.diff(keys[order]) != 0)
    group = np.cumsum(fresh) - 1
    flags = []
    for column in (write, born, dies):
        merged = np.zeros(int(fresh.sum()), dtype=bool)
        if column is not None:
            np.logical_or.at(merged, group, np.asarray(column, dtype=bool)[order])
        flags.append(merged)
    keys, ticks = keys[order][fresh], ticks[order][fresh]
    following = np.empty(len(keys), dtype=np.int64)
    by_key = np.argsort(keys, kind="stable")
    if len(keys):
        first = np.flatnonzero(np.diff(keys[by_key], prepend=-1))
        last = np.append(first[1:], len(keys)) - 1
        following[by_key[:-1]] = ticks[by_key[1:]]
        following[by_key[last]] = ticks[by_key[first]] + count
    offset = np.searchsorted(ticks, np.arange(count + 1)).astype(np.int64)
    return _Columns(keys, flags[0], flags[1], flags[2], following, offset)


class _Cache:
    """The device while a trace is carried out: which keys are resident, and what has moved."""

    def __init__(self, key_bytes: npt.ArrayLike, budget_bytes: int, policy: SupportsEviction) -> None:
        self.sizes: IntArray = np.asarray(key_bytes, dtype=np.int64).reshape(-1)
        self.budget = budget_bytes
        self.policy = policy
        num_keys = len(self.sizes)
        policy.resize(num_keys)
        self.resident = np.zeros(num_keys, dtype=bool)
        self.dirty = np.zeros(num_keys, dtype=bool)
        self.next_use = np.zeros(num_keys, dtype=np.int64)  # absolute tick
        self.used = 0
        self.in_bytes: IntArray = np.zeros(num_keys, dtype=np.int64)
        self.out_bytes: IntArray = np.zeros(num_keys, dtype=np.int64)
        self.reset_counters()

    def reset_counters(self) -> None:
        """Begin to count a step."""
        self.hits = self.misses = self.accessed_bytes = self.miss_bytes = 0
        self.peak = self.used
        self.in_bytes[:] = 0
        self.out_bytes[:] = 0
        self.history: list[int] = []
        self.tick_peak = self.used

    def run_tick(self, columns: _Columns, begin: int, end: int, now: int, base: int) -> None:
        """Make the keys of tick ``now`` resident together, use them, let those that die go."""
        keys = columns.key[begin:end]
        absent_mask = ~self.resident[keys]
        absent = keys[absent_mask]
        missing = int(self.sizes[absent].sum())
        if self.used + missing > self.budget:
            self._evict(keys, self.used + missing - self.budget, base + now)
        read = keys[absent_mask & ~columns.born[begin:end]]
        self.in_bytes[read] += self.sizes[read]
        self.resident[absent] = True
        self.used += missing
        self.tick_peak = self.used
        self.peak = max(self.peak, self.used)
        self.hits += len(keys) - len(absent)
        self.misses += len(absent)
        self.miss_bytes += missing
        self.accessed_bytes += int(self.sizes[keys].sum())
        self.dirty[keys[columns.write[begin:end]]] = True
        self.next_use[keys] = columns.next_tick[begin:end] + base
        for key in keys.tolist():
            self.policy.record_access(key, now)
        dead = keys[columns.dies[begin:end]]
        if len(dead):
            self._drop(dead)

    def note_resident(self) -> None:
        """End a tick: keep what was resident while it ran."""
        self.history.append(self.tick_peak)
        self.tick_peak = self.used

    def _evict(self, held: IntArray, need: int, now: int) -> None:
        """Evict at least ``need`` bytes of keys that this tick does not hold."""
        evictable = self.resident.copy()
        evictable[held] = False
        candidates = np.flatnonzero(evictable).astype(np.int64)
        order = np.asarray(self.policy.eviction_order(candidates, self.next_use[candidates] - now))
        freed = np.cumsum(self.sizes[order])
        if len(order) == 0 or int(freed[-1]) < need:
            raise ValueError(
                f"tick {now} needs {need} bytes more than the budget of {self.budget} bytes, and policy "
                f"{self.policy.name!r} finds {int(freed[-1]) if len(order) else 0} bytes to evict"
            )
        victims = order[: int(np.searchsorted(freed, need)) + 1]
        written = victims[self.dirty[victims]]
        self.out_bytes[written] += self.sizes[written]
        self._drop(victims)

    def _drop(self, keys: IntArray) -> None:
        """``keys`` leave the device without a copy."""
        self.resident[keys] = False
        self.dirty[keys] = False
        self.used -= int(self.sizes[keys].sum())
        self.policy.record_evict(keys)

    def traffic(self) -> StepTraffic:
        """The counts since ``reset_counters``."""
        return StepTraffic(
            hits=self.hits,
            misses=self.misses,
            accessed_bytes=self.accessed_bytes,
            miss_bytes=self.miss_bytes,
            page_in_bytes=int(self.in_bytes.sum()),
            page_out_bytes=int(self.out_bytes.sum()),
            peak_resident_bytes=self.peak,
            page_in_bytes_of_key=self.in_bytes.copy(),
            page_out_bytes_of_key=self.out_bytes.copy(),
            resident_bytes=np.array(self.history, dtype=np.int64),
        )
