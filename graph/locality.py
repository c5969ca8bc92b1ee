"""How much a cache of any size would miss, and how much a window of the step touches.

Both look at one string of accesses: the rows of the step in order, the atoms of a row rising, one after the other (see
``reuse_distance`` for atoms). The step is a cycle, and what is counted is the steady state: the second of two passes.

**Whole atoms are as good as pages under LRU.** Take the pages of the string one by one. Between two accesses to a page
of an atom come all its other pages, and what came between the atom's two accesses. So every page of an atom needs the
same capacity, an atom hits or misses as a whole, and a cache that evicts whole atoms by last use sees the same
misses: when an atom is the next to go, all that is in the cache was used after it, so it goes just when those bytes and
its own pass the capacity. Hence a replay of LRU equals the curve from the reuse distances at *every* size (R. L.
Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).

The distances here count the other atoms of a row too, where those of a plan count the rows strictly between two
accesses: an operation needs its row as a whole, and a cache that cannot hold it does not hit half of it by magic.

**Working set.** The distinct bytes touched in a window of time (P. J. Denning, "The working set model for program
behavior", Communications of the ACM 11(5), 1968). An atom is in a window if one of its accesses is; of the accesses in
a window take the first. Access ``t`` with its predecessor at ``p`` is the first one in the windows that begin after
``p``, not after ``t``, and last until ``t``: a range of beginnings, and every window is counted once per atom. So all
windows together are one sum over accesses of a range's two ends: O(n), after the sort that found the predecessors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import AccessTrace, FloatArray, IntArray
from pager.graph.cost_model import SupportsEviction
from pager.graph.reuse_distance import (
    AtomAccesses,
    Distances,
    miss_ratio_curve,
    previous_rows,
    reuse_distance_bytes,
)

__all__ = ["WorkingSet", "lru_miss_ratios", "replayed_miss_ratios", "working_set"]

_METHODS = ("resize", "record_access", "record_evict", "eviction_order")


class _VictimQueue(Protocol):
    """What a policy's ``victim_queue`` gives: its ranking, kept up to date from access to access."""

    def use(self, key: int, next_use: int) -> None: ...

    def pop(self) -> int: ...


def _sizes(capacities: npt.ArrayLike) -> npt.NDArray[Any]:
    sizes = np.asarray(capacities)
    if not np.issubdtype(sizes.dtype, np.number) or np.iscomplexobj(sizes):
        raise ValueError(f"sizes must be numbers of bytes; got {capacities!r}")
    if np.any(np.isnan(sizes)) or np.any(sizes < 0):
        raise ValueError(f"sizes must be bytes, 0 or more; got {sizes.min()}")
    return sizes


def lru_miss_ratios(accesses: AtomAccesses, atom_bytes: IntArray, capacities: npt.ArrayLike) -> FloatArray:
    """Bytes missed by bytes accessed under LRU in each of ``capacities`` (bytes), by the reuse distances: exact.

    ``atom_bytes``: int64 per atom. float64 of the shape of ``capacities``; never rises with it. 1.0 for a trace
    without accesses. O(n log n) for all sizes together. Raises ValueError for negative sizes.
    """
    sizes = _sizes(capacities)
    each = AtomAccesses(np.arange(len(accesses), dtype=np.int64), accesses.atom)
    distance = reuse_distance_bytes(each, atom_bytes, len(accesses))
    return miss_ratio_curve(distance, atom_bytes[accesses.atom], sizes)


def replayed_miss_ratios(
    accesses: AtomAccesses, atom_bytes: IntArray, capacities: npt.ArrayLike, policy: SupportsEviction
) -> FloatArray:
    """Bytes missed by bytes accessed under ``policy`` in each of ``capacities`` (bytes), by carrying the step out.

    ``policy``: a fresh object, of which each size gets a copy; its keys are atoms, its unit of time is an access. A
    miss evicts whole atoms, the shortest prefix of the policy's order that makes room. An atom larger than the
    capacity misses, and as its pages pass through nothing else stays.

    Belady never misses more than LRU, whatever the sizes: it evicts an atom only if that, what it keeps and what comes
    in pass the capacity; all of these are used before the atom's next use, so LRU has lost it by then too. Where all
    atoms have one size no policy misses less from an empty cache on. Where they differ the optimum is NP-hard and
    Belady a heuristic: the farthest next use may belong to a large atom where a small one would have been room enough,
    and CLOCK may miss less. CLOCK may also miss more in more memory (Belady's anomaly). Steps of Belady and CLOCK need
    not be alike; the second stands for them all.

    float64 of the shape of ``capacities``; 1.0 for a trace without accesses. A size takes time O(n log n) where the
    policy has a ``victim_queue`` (Belady, CLOCK, LRU), else one ranking of all residents per miss. Raises ValueError
    for negative sizes and for an order that leaves out candidates, TypeError for what is no policy object.
    """
    sizes = _sizes(capacities)
    if isinstance(policy, type) or not all(callable(getattr(policy, name, None)) for name in _METHODS):
        raise TypeError(f"{policy!r} is no eviction policy: an object with the methods {', '.join(_METHODS)}")
    num = len(accesses)
    each = AtomAccesses(np.arange(num, dtype=np.int64), accesses.atom)
    previous = previous_rows(each, num)
    # Whose predecessor I am, I am the successor of; a predecessor in the step before has its successor in the next.
    following = np.empty(num, dtype=np.int64)
    following[previous] = np.arange(num) + np.where(previous < 0, num, 0)
    string = _String(accesses.atom.tolist(), following.tolist(), np.asarray(atom_bytes, dtype=np.int64))
    run = _replay_queue if _has_queue(policy) else _replay_asking
    total = int(string.atom_bytes[accesses.atom].sum())
    # More than everything is no better than everything, and may be infinite.
    whole = np.minimum(sizes, int(string.atom_bytes.sum())).reshape(-1)
    missed = [run(string, int(size), copy.deepcopy(policy)) for size in whole.tolist()]
    hit = total - np.array(missed, dtype=np.int64).reshape(sizes.shape)
    ratios: FloatArray = 1.0 - hit / max(total, 1)
    return ratios


@dataclass(frozen=True, slots=True, eq=False)
class _String:
    """One step: the atoms accessed, the position of each one's next access (past the end: in the next step)."""

    atom: list[int]
    following: list[int]
    atom_bytes: IntArray


def _has_queue(policy: SupportsEviction) -> bool:
    """Whether the policy's ``victim_queue`` stands for its ranking: no subclass has changed that without it."""
    place = {
        name: next((rank for rank, owner in enumerate(type(policy).__mro__) if name in vars(owner)), None)
        for name in ("victim_queue", *_METHODS)
    }
    queue = place.pop("victim_queue")
    return queue is not None and all(rank is None or queue <= rank for rank in place.values())


def _replay_queue(string: _String, capacity: int, policy: Any) -> int:
    """Bytes missed in the second step; the policy keeps its order itself."""
    sizes = string.atom_bytes.tolist()
    queue: _VictimQueue = policy.victim_queue(len(sizes))
    use, pop = queue.use, queue.pop
    resident = [False] * len(sizes)
    used = missed = 0
    for base in (0, len(string.atom)):
        missed = 0
        for key, following in zip(string.atom, string.following, strict=True):
            if not resident[key]:
                size = sizes[key]
                missed += size
                room = max(capacity - size, 0)
                while used > room:
                    victim = pop()
                    resident[victim] = False
                    used -= sizes[victim]
                if size > capacity:
                    continue
                resident[key] = True
                used += size
            use(key, following + base)
    return missed


def _replay_asking(string: _String, capacity: int, policy: SupportsEviction) -> int:
    """Bytes missed in the second step; every miss asks the policy for a ranking of all that is resident."""
    sizes = string.atom_bytes
    resident = np.zeros(len(sizes), dtype=bool)
    next_use = np.zeros(len(sizes), dtype=np.int64)
    policy.resize(len(sizes))
    used = missed = 0
    for base in (0, len(string.atom)):
        missed = 0
        for now, (key, following) in enumerate(zip(string.atom, string.following, strict=True)):
            size = int(sizes[key])
            is_miss = not resident[key]
            if is_miss:
                missed += size
                need = used - max(capacity - size, 0)
                if need > 0:
                    candidates = np.flatnonzero(resident).astype(np.int64)
                    order = policy.eviction_order(candidates, next_use[candidates] - (base + now))
                    victims = _prefix(np.asarray(order, dtype=np.int64), sizes, need, policy)
                    resident[victims] = False
                    used -= int(sizes[victims].sum())
                    policy.record_evict(victims)
            policy.record_access(key, now)
            if size > capacity:
                policy.record_evict(np.array([key], dtype=np.int64))
            elif is_miss:
                resident[key] = True
                used += size
            next_use[key] = base + following
    return missed


def _prefix(order: IntArray, sizes: IntArray, need: int, policy: SupportsEviction) -> IntArray:
    freed = np.cumsum(sizes[order])
    found = int(freed[-1]) if len(order) else 0
    if found < need:
        raise ValueError(f"policy {policy.name!r} finds {found} bytes to evict where {need} are needed")
    return order[: int(np.searchsorted(freed, need)) + 1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkingSet:
    """The distinct bytes that windows of one length touch.

    ``bytes``: int64 per tick, of the window that begins with it (it may reach into the next step). ``max_bytes`` and
    ``mean_bytes`` are over these windows; in the mean of windows in seconds, each counts as long as its first tick.
    """

    bytes: IntArray
    max_bytes: int
    mean_bytes: float


def working_set(
    trace: AccessTrace,
    accesses: AtomAccesses,
    atom_bytes: IntArray,
    distances: Distances,
    *,
    ticks: int | None = None,
    seconds: float | None = None,
) -> WorkingSet:
    """The working set over every window of so many ``ticks``, or ``seconds``, of the cyclic step.

    A window begins with a tick and holds the ticks that begin within its length, at least its first one and at most
    one whole step. ``distances``: of ``accesses``, as by ``reuse_distances``. O(n). Raises ValueError unless one of
    the lengths is given and positive, and for seconds where the trace has no times; TypeError for a part of a tick.
    """
    if (ticks is None) == (seconds is None):
        raise ValueError("give the window's length in ticks or in seconds, one of them")
    num = trace.num_ticks
    weights = np.ones(num)
    begins = np.arange(num, dtype=np.int64)
    if seconds is not None:
        if not seconds > 0:
            raise ValueError(f"a window of {seconds} seconds; expected more than 0")
        if num and not trace.step_seconds > 0:
            raise ValueError("the trace has no times; give the window's length in ticks")
        weights, length = trace.seconds, trace.step_seconds
        start = trace.tick_start_seconds[:-1]
        ends = begins + num
        if seconds < length:
            twice = np.concatenate((start, start + length))
            # A window as long as some ticks ends with them, though sums of seconds are rounded.
            until = start + (seconds - 1e-9 * length)
            ends = np.clip(np.searchsorted(twice, until, side="left"), begins + 1, ends)
    else:
        if not isinstance(ticks, (int, np.integer)):
            raise TypeError(f"a window of {ticks!r} ticks; expected a whole number")
        if ticks < 1:
            raise ValueError(f"a window of {ticks} ticks; expected at least 1")
        ends = begins + min(int(ticks), num)
    # Windows that began in the step before hold accesses of this one: their beginnings are -num .. -1.
    ends = np.concatenate((ends - num, ends))
    tick = trace.tick[accesses.row].astype(np.int64)
    earliest = np.searchsorted(ends, tick, side="right") - num
    first = np.maximum(earliest, tick - distances.ticks + 1)
    size = np.where(first <= tick, atom_bytes[accesses.atom], 0)
    change = np.zeros(2 * num + 1, dtype=np.int64)
    np.add.at(change, first + num, size)
    np.add.at(change, tick + 1 + num, -size)
    both = np.cumsum(change)[:-1]
    series: IntArray = both[:num] + both[num:]
    mean = float(np.average(series, weights=weights)) if num else 0.0
    return WorkingSet(bytes=series, max_bytes=int(series.max(initial=0)), mean_bytes=mean)
