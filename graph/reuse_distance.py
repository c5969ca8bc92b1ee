"""Reuse distances, exactly, weighted by bytes, over the cyclic step.

The reuse distance of an access is the number of distinct bytes touched since the previous access to the same
page (the stack distance of Mattson et al., 1970): what a cache must hold besides it for the access to be a
hit. Here "since" means in the rows strictly between the two. Steps repeat, so the previous access of a step's
first one lies in the step before, and in the steady state every access has a distance.

**Atoms.** Nine million pages are not nine million stories: pages that every access takes together are one
*atom* (the coarsest partition of each segment into runs of pages such that every access is a union of them).
All that is computed here is per atom; ``np.repeat`` expands it to pages where somebody wants to see pages.

**Counting.** Give every access the row ``t`` it happens in and the row ``p`` of the previous access to its
atom (-1 for none). The distinct atoms in the rows strictly between ``p_i`` and ``t_i`` are those whose
*first* access in that window is there: accesses ``j`` with ``p_i < t_j < t_i`` and ``p_j <= p_i``. Since
``p_j < t_j``, every access with ``t_j <= p_i`` fulfils ``p_j <= p_i``, so

    distance_i = sum(w_j : t_j < t_i, p_j <= p_i) - sum(w_j : t_j <= p_i)

The second sum is a prefix sum. The first is a dominance sum in two dimensions, which a Fenwick tree over
``p`` does in O(n log n) with a Python loop over accesses. Instead, all accesses are sorted by ``p`` once and
then split by ``t`` bit by bit, as in a wavelet tree: at each bit, an access in the upper half of a block
collects the weights of those of the lower half that stand before it. Each level is a handful of numpy passes
over n elements: the same O(n log n), no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import AccessTrace, FloatArray, IntArray, SegmentSpec

NEVER = -1  # in ticks and bytes: no access in the step; in seconds it is NaN


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Runs of pages that are always accessed together, rising by page; together they cover all segments.

    int64 arrays of one length: ``segment`` (index into the list of segments), ``first_page`` (of all pages),
    ``num_pages``.
    """

    segment: IntArray
    first_page: IntArray
    num_pages: IntArray

    def __len__(self) -> int:
        return len(self.segment)


@dataclass(frozen=True, slots=True, eq=False)
class AtomAccesses:
    """The trace with every row replaced by one access per atom: int64 ``row`` (rising) and ``atom``."""

    row: IntArray
    atom: IntArray

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True, eq=False)
class Distances:
    """How far away an access is, per atom or per atom access: int64 ticks, int64 bytes, float64 seconds."""

    ticks: IntArray
    bytes: IntArray
    seconds: FloatArray


def split_into_atoms(trace: AccessTrace, segments: Sequence[SegmentSpec]) -> Atoms:
    """The atoms of ``segments`` (pages rising from segment to segment) under the accesses of ``trace``.

    Raises ValueError if a row names a segment that does not exist or pages beyond its end, or if the pages of
    two segments overlap.
    """
    first = np.array([spec.first_page for spec in segments], dtype=np.int64)
    count = np.array([spec.num_pages for spec in segments], dtype=np.int64)
    check_rows(trace, segments, count)
    begin = first[trace.segment] + trace.first_page
    begin, end = begin[trace.num_pages > 0], (begin + trace.num_pages)[trace.num_pages > 0]
    bounds = np.unique(np.concatenate((first, first + count, begin, end)))
    order = np.argsort(first, kind="stable")
    order = order[count[order] > 0]
    if np.any(first[order[1:]] < (first + count)[order[:-1]]):
        raise ValueError("the pages of two segments overlap")
    if len(order) == 0:
        empty = np.empty(0, dtype=np.int64)
        return Atoms(empty, empty, empty)
    starts, ends = bounds[:-1], bounds[1:]
    owner = order[np.maximum(np.searchsorted(first[order], starts, side="right") - 1, 0)]
    inside = (starts >= first[owner]) & (ends <= (first + count)[owner])
    return Atoms(owner[inside], starts[inside], (ends - starts)[inside])


def check_rows(trace: AccessTrace, segments: Sequence[SegmentSpec], count: IntArray) -> None:
    """Raise ValueError, naming the row, if an access of ``trace`` does not lie inside its segment."""
    if len(trace) == 0:
        return
    if int(trace.segment.max()) >= len(segments):
        raise ValueError(f"the trace names segment {int(trace.segment.max())} of {len(segments)} segments")
    beyond = np.flatnonzero(trace.first_page.astype(np.int64) + trace.num_pages > count[trace.segment])
    if len(beyond):
        row = int(beyond[0])
        spec = segments[int(trace.segment[row])]
        raise ValueError(
            f"row {row} of the trace takes pages {int(trace.first_page[row])} .. "
            f"{int(trace.first_page[row]) + int(trace.num_pages[row])} of {spec.name!r}, "
            f"which has {spec.num_pages} pages"
        )


def expand_accesses(trace: AccessTrace, atoms: Atoms, segments: Sequence[SegmentSpec]) -> AtomAccesses:
    """Every row of ``trace`` as accesses to whole atoms, rows in order and atoms rising within a row."""
    first = np.array([spec.first_page for spec in segments], dtype=np.int64)
    begin = first[trace.segment] + trace.first_page
    low = np.searchsorted(atoms.first_page, begin, side="left")
    high = np.searchsorted(atoms.first_page, begin + trace.num_pages, side="left")
    counts = high - low
    row = np.repeat(np.arange(len(trace), dtype=np.int64), counts)
    within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return AtomAccesses(row, np.repeat(low, counts) + within)


def previous_rows(accesses: AtomAccesses, num_rows: int) -> IntArray:
    """int64 per access: row of the previous access to its atom, less ``num_rows`` if a step ago."""
    previous = np.empty(len(accesses), dtype=np.int64)
    if len(accesses) == 0:
        return previous
    by_atom = np.argsort(accesses.atom, kind="stable")
    first = np.flatnonzero(np.diff(accesses.atom[by_atom], prepend=-1))
    last = np.append(first[1:], len(by_atom)) - 1
    rows = accesses.row[by_atom]
    previous[by_atom[1:]] = rows[:-1]
    previous[by_atom[first]] = rows[last] - num_rows
    return previous


def reuse_distance_bytes(accesses: AtomAccesses, atom_bytes: IntArray, num_rows: int) -> IntArray:
    """int64 bytes per access: distinct bytes touched in the rows since the previous access to the same atom.

    ``atom_bytes``: int64 per atom; ``num_rows``: rows in the step. Cyclic: the second of two steps in a row.
    O(n log n) time, O(n) memory.
    """
    num = len(accesses)
    if num == 0:
        return np.empty(0, dtype=np.int64)
    weight = atom_bytes[accesses.atom]
    previous = previous_rows(accesses, num_rows)
    row = np.concatenate((accesses.row, accesses.row + num_rows))
    before = np.concatenate((np.where(previous < 0, -1, previous), previous + num_rows))
    weights = np.concatenate((weight, weight))
    dominated = _dominance_sums(row, before, weights)
    # touched[r] = bytes touched in rows < r, so touched[p + 1] is the prefix sum over t_j <= p.
    touched = np.concatenate(([0], np.cumsum(np.bincount(row, weights, 2 * num_rows).astype(np.int64))))
    distance: IntArray = dominated[num:] - touched[before[num:] + 1]
    return distance


def _dominance_sums(row: IntArray, value: IntArray, weight: IntArray) -> IntArray:
    """For each i, the sum of ``weight[j]`` over ``row[j] < row[i]`` and ``value[j] <= value[i]``."""
    num_rows = int(row.max()) + 1
    num_bits = max(int(num_rows - 1).bit_length(), 1)
    result = np.zeros(len(row), dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=num_rows))))
    # At equal values the earlier row comes first, so that "stands before" means "value <=".
    item = np.lexsort((row, value))
    for bit in range(num_bits - 1, -1, -1):
        rows = row[item]
        upper = ((rows >> bit) & 1).astype(bool)
        # Elements stand by blocks of 2^(bit+1) rows already; a block's place is where its rows begin.
        block_start = offsets[np.minimum((rows >> (bit + 1)) << (bit + 1), num_rows)]
        lower_weight = np.concatenate(([0], np.cumsum(np.where(upper, 0, weight[item]))))
        gained = lower_weight[:-1] - lower_weight[block_start]
        result[item[upper]] += gained[upper]
        # Stable partition of each block into its lower and upper half.
        lower_count = np.concatenate(([0], np.cumsum(~upper)))
        place_lower = block_start + lower_count[:-1] - lower_count[block_start]
        half_start = offsets[np.minimum((rows >> bit) << bit, num_rows)]
        upper_before = (np.arange(len(item)) - block_start) - (lower_count[:-1] - lower_count[block_start])
        target = np.where(upper, half_start + upper_before, place_lower)
        moved = np.empty_like(item)
        moved[target] = item
        item = moved
    return result


def reuse_distances(trace: AccessTrace, accesses: AtomAccesses, atom_bytes: IntArray) -> Distances:
    """Per atom access: ticks, distinct bytes and seconds since the previous access to the same atom."""
    num_rows = len(trace)
    previous = previous_rows(accesses, num_rows)
    wrapped = previous < 0
    tick_now = trace.tick[accesses.row].astype(np.int64)
    tick_before = trace.tick[np.where(wrapped, previous + num_rows, previous)].astype(np.int64)
    start = trace.tick_start_seconds
    return Distances(
        ticks=tick_now - tick_before + np.where(wrapped, trace.num_ticks, 0),
        bytes=reuse_distance_bytes(accesses, atom_bytes, num_rows),
        seconds=start[tick_now] - start[tick_before] + np.where(wrapped, trace.step_seconds, 0.0),
    )


def first_accesses(accesses: AtomAccesses, num_atoms: int) -> IntArray:
    """int64 per atom: the index of its first access in the step, or NEVER."""
    first = np.full(num_atoms, NEVER, dtype=np.int64)
    atoms, index = np.unique(accesses.atom, return_index=True)
    first[atoms] = index
    return first


def next_uses(
    trace: AccessTrace, accesses: AtomAccesses, atom_bytes: IntArray, num_atoms: int
) -> tuple[Distances, IntArray]:
    """Per atom, seen from the start of the step: ticks, bytes and seconds until its first access.

    Bytes are those that all accesses before it touch (counted each time). NEVER (NaN seconds) for an atom
    that the step does not touch. The second result is ``first_accesses``.
    """
    first = first_accesses(accesses, num_atoms)
    used = first != NEVER
    row_bytes = np.zeros(len(trace) + 1, dtype=np.int64)
    np.add.at(row_bytes, accesses.row + 1, atom_bytes[accesses.atom])
    bytes_before = np.cumsum(row_bytes)
    row = accesses.row[first[used]]
    ticks = np.full(num_atoms, NEVER, dtype=np.int64)
    until = np.full(num_atoms, NEVER, dtype=np.int64)
    seconds = np.full(num_atoms, np.nan)
    ticks[used] = trace.tick[row]
    until[used] = bytes_before[row]
    seconds[used] = trace.tick_start_seconds[ticks[used]]
    return Distances(ticks, until, seconds), first


def miss_ratio_curve(
    distance_bytes: IntArray, access_bytes: IntArray, capacities: npt.ArrayLike
) -> FloatArray:
    """Share of the accessed bytes that an LRU cache of each capacity (bytes) misses, in the steady state.

    ``distance_bytes`` and ``access_bytes``: int64 per access. An access hits where what came between and the
    accessed bytes themselves fit together. Returns float64 of the shape of ``capacities``; never rises with
    it.
    """
    needed = np.asarray(distance_bytes, dtype=np.int64) + access_bytes
    order = np.argsort(needed, kind="stable")
    hit_bytes = np.concatenate(([0], np.cumsum(np.asarray(access_bytes, dtype=np.int64)[order])))
    num_hits = np.searchsorted(needed[order], np.asarray(capacities), side="right")
    total = max(int(hit_bytes[-1]), 1)
    curve: FloatArray = 1.0 - hit_bytes[num_hits] / total
    return curve
