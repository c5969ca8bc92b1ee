"""The plan: where every page lives, when it is used next, and what a step will move.

A plan is a value. It is made from the segments, their homes and, once it is known, the access trace, and
never changes; a better trace or another budget makes another plan. Everything is kept per *atom* (a run of
pages that are always used together, see ``reuse_distance``), of which even a 70 B model has only some ten
thousand; ``pages()`` expands them to one row per page.

Two figures say how a page is used. Its *next use* is counted from the start of the step. Its *reuse distance*
is that of the same access: the distinct bytes touched between it and the last use in the step before, which
is what a cache has to hold besides the page for that use to be a hit across the step boundary.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pager.graph import locality, plan_view
from pager.graph.access_trace import (
    SEGMENT_KINDS,
    TIER_NAMES,
    AccessTrace,
    FloatArray,
    IntArray,
    Phase,
    SegmentSpec,
)
from pager.graph.cost_model import StepTraffic, SupportsEviction, largest_tick_bytes, simulate_step
from pager.graph.reuse_distance import (
    NEVER,
    AtomAccesses,
    Atoms,
    Distances,
    expand_accesses,
    next_uses,
    reuse_distances,
    split_into_atoms,
)

WAITING = "waiting for the first batch"

PAGE_DTYPE = np.dtype(
    [
        ("page", np.int64),
        ("segment", np.int32),
        ("kind", np.uint8),  # index into Plan.kinds
        ("tier", np.uint8),  # index into TIER_NAMES: the page's home
        ("next_use_ticks", np.int32),
        ("next_use_bytes", np.int64),
        ("next_use_seconds", np.float64),
        ("reuse_distance_ticks", np.int32),
        ("reuse_distance_bytes", np.int64),
        ("reuse_distance_seconds", np.float64),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predicted:
    """What the plan expects of one step in the steady state, all in bytes.

    ``tier_bytes``: whole pages per home. ``wired_bytes``: those that stay on the device.
    ``largest_tick_bytes``: what must be streamed in together for the hungriest tick. ``resident_bytes``:
    int64 per tick, wired pages included. The transfers are None, and ``reason`` says why, where no step could
    be simulated.
    """

    tier_bytes: dict[str, int]
    wired_bytes: int
    largest_tick_bytes: int
    policy: str | None = None
    reason: str | None = None
    page_in_bytes: int | None = None
    page_out_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None
    hit_rate: float | None = None
    peak_resident_bytes: int | None = None
    resident_bytes: IntArray | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Plan:
    """Which pages are wired, where the others live, when each is used next. Made by ``make_plan``; immutable.

    ``print(plan)`` shows a table per segment, ``pages()`` gives one row per page, ``to_json``, ``to_csv`` and
    ``plot`` write files. ``way`` says how the trace was had: "captured on meta", "recorded first step" or
    "waiting for the first batch". ``homes``: int8 per segment, index into ``TIER_NAMES``.
    """

    segments: tuple[SegmentSpec, ...]
    trace: AccessTrace | None
    page_size: int
    homes: npt.NDArray[np.int8]
    budgets: dict[str, int]
    way: str
    note: str
    predicted: Predicted
    kinds: tuple[str, ...]
    atoms: Atoms
    next_use: Distances  # per atom, from the start of the step
    reuse: Distances  # per atom, of its next use
    accesses: AtomAccesses | None
    access_distances: Distances | None  # per atom access
    graph_source: Callable[[], Any] | None = None
    critical_path_source: Callable[[], Any] | None = None
    _lazy: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return plan_view.render(self)

    def __repr__(self) -> str:
        return f"Plan({len(self.segments)} segments, {self.num_pages} pages, {self.way})"

    @property
    def num_pages(self) -> int:
        """Pages of all segments."""
        return int(self.atoms.num_pages.sum())

    @property
    def wired(self) -> npt.NDArray[np.bool_]:
        """bool per segment: stays on the device."""
        return self.homes == 0

    @property
    def graph(self) -> Any:
        """The fx graph as a networkx object, built when first asked for. ValueError if the plan has none."""
        return self._built("graph", self.graph_source)

    def critical_path(self) -> Any:
        """The longest chain of dependent operations in ``graph``: a networkx DiGraph of its nodes in order.

        No schedule is shorter. ``path.graph["total"]`` is its length in seconds, by the ``seconds`` of the nodes:
        a roofline estimate with the rates of ``cost_model.Ceilings``. Built when first asked for. ValueError if
        the plan has none.
        """
        return self._built("critical path", self.critical_path_source)

    def pages(self, first: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """One row per page, rising by page: a structured array of ``PAGE_DTYPE``.

        ``first`` and ``stop`` choose a range of rows, as a slice would. ``kind`` indexes ``plan.kinds`` and
        ``tier`` indexes ``TIER_NAMES``. Where nothing is known (no trace yet, a page the step does not touch)
        ticks and bytes are -1 and seconds NaN. 54 bytes per page.
        """
        ends = np.cumsum(self.atoms.num_pages)
        begin, end, _ = slice(first, stop).indices(self.num_pages)
        num_rows = max(end - begin, 0)
        rows = np.empty(num_rows, dtype=PAGE_DTYPE)
        if num_rows == 0:
            return rows
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(ends, end, side="left")) + 1
        starts = ends[low:high] - self.atoms.num_pages[low:high]
        counts = np.minimum(ends[low:high], end) - np.maximum(starts, begin)
        rows["page"] = np.repeat(self.atoms.first_page[low:high] - starts, counts)
        rows["page"] += np.arange(begin, end)
        segment = self.atoms.segment[low:high]
        columns: dict[str, npt.NDArray[Any]] = {
            "segment": segment,
            "kind": self.kind_codes[segment],
            "tier": self.homes[segment],
        }
        for prefix, distances in (("next_use", self.next_use), ("reuse_distance", self.reuse)):
            for unit in ("ticks", "bytes", "seconds"):
                columns[f"{prefix}_{unit}"] = getattr(distances, unit)[low:high]
        for name, values in columns.items():
            rows[name] = np.repeat(values.astype(PAGE_DTYPE[name]), counts)
        return rows

    def miss_ratio_curve(self, policy: SupportsEviction | Literal["lru"], sizes: npt.ArrayLike) -> FloatArray:
        """Bytes missed by bytes accessed in a device memory of each of ``sizes`` (bytes), in the steady state.

        As if nothing were wired: everything that the step accesses goes through a cache of that size. "lru": exactly,
        from the reuse distances, for all sizes at once. A policy object (``pager.policies.protocol``: for example
        ``make_eviction_policy("belady")``), which stays as it is: by carrying the second of two steps out with it, page
        by page, atoms as keys. Returns float64 of the shape of ``sizes``. ValueError for negative sizes, another name
        than "lru", or while there is no trace; TypeError for what is no policy object. ``pager.graph.locality`` says
        what is exact and what is optimal.
        """
        accesses, atom_bytes = self._accesses(), self.atoms.num_pages * self.page_size
        if not isinstance(policy, str):
            return locality.replayed_miss_ratios(accesses, atom_bytes, sizes, policy)
        if policy != "lru":
            raise ValueError(
                f"only 'lru' follows from the distances alone; instead of {policy!r} pass a policy object: "
                f"pager.policies.protocol.make_eviction_policy({policy!r})"
            )
        return locality.lru_miss_ratios(accesses, atom_bytes, sizes)

    def working_set(self, *, ticks: int | None = None, seconds: float | None = None) -> locality.WorkingSet:
        """The distinct bytes that windows of so many ``ticks``, or ``seconds``, of the cyclic step touch.

        Give one of the two. The result has the maximum, the mean and, per tick, the bytes of the window that begins
        with it. ValueError for both or none, lengths that are not positive, seconds where the trace has no times, or
        while there is no trace; TypeError for a fraction of a tick.
        """
        accesses = self._accesses()
        assert self.trace is not None
        assert self.access_distances is not None
        atom_bytes = self.atoms.num_pages * self.page_size
        return locality.working_set(
            self.trace, accesses, atom_bytes, self.access_distances, ticks=ticks, seconds=seconds
        )

    def _accesses(self) -> AtomAccesses:
        if self.accesses is None:
            raise ValueError(f"this plan has no trace yet: {self.way}")
        return self.accesses

    @property
    def kind_codes(self) -> npt.NDArray[np.uint8]:
        """uint8 per segment: index into ``kinds``."""
        code = {kind: index for index, kind in enumerate(self.kinds)}
        return np.array([code[spec.kind] for spec in self.segments], dtype=np.uint8)

    def to_json(self, path: str | os.PathLike[str], *, pages: bool = True) -> None:
        """Write the plan to ``path``: header, budgets, prediction, segments, and a row per page unless
        ``pages=False``.

        Rows are written in chunks, so memory stays flat. Raises OSError if the file cannot be written.
        """
        plan_view.write_json(self, path, pages=pages)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line per page to ``path``, names instead of codes, in chunks. OSError as for any file."""
        plan_view.write_csv(self, path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw pages over time, the predicted resident bytes and the reuse distances to ``path`` (.png, .pdf,
        .svg).

        Needs matplotlib: ImportError saying ``pip install torch-pager[plot]`` where it is missing. Raises
        ValueError if there is no trace yet.
        """
        plan_view.draw(self, path)

    def _built(self, what: str, source: Callable[[], Any] | None) -> Any:
        if source is None:
            raise ValueError(
                f"this plan has no {what}: {self.way}; only a step captured before training has one"
            )
        if what not in self._lazy:
            self._lazy[what] = source()
        return self._lazy[what]


def make_plan(
    segments: Sequence[SegmentSpec],
    trace: AccessTrace | None,
    *,
    page_size: int,
    homes: npt.ArrayLike | None = None,
    budgets: Mapping[str, int | None] | None = None,
    seconds: npt.ArrayLike | None = None,
    policy: SupportsEviction | None = None,
    way: str | None = None,
    note: str = "",
    graph: Callable[[], Any] | None = None,
    critical_path: Callable[[], Any] | None = None,
) -> Plan:
    """The plan for ``segments`` (``index`` dense from 0, pages rising) under ``trace``.

    ``homes``: int per segment, 0 device (wired), 1 host (default), 2 disk. ``budgets``: bytes per tier name;
    None or absent where there is no limit. ``seconds`` per tick replaces those of the trace. ``policy``: an
    eviction policy whose copy is simulated to predict the transfers (needs a trace and a device budget); its
    keys here are atoms. ``graph`` and ``critical_path``: called when first asked for. Without ``trace`` the
    plan says that it waits for the first batch. Raises ValueError for homes, budgets or rows that do not
    match the segments.
    """
    specs = tuple(segments)
    if page_size < 1:
        raise ValueError(f"page_size is {page_size} bytes; it must be positive")
    if any(spec.index != place for place, spec in enumerate(specs)):
        raise ValueError("segments must be listed by index, dense from 0")
    home = np.ones(len(specs), dtype=np.int8) if homes is None else np.array(homes, dtype=np.int8).reshape(-1)
    if len(home) != len(specs) or np.any((home < 0) | (home >= len(TIER_NAMES))):
        raise ValueError(f"homes must be {len(specs)} values of 0 (device), 1 (host), 2 (disk)")
    home.flags.writeable = False
    limits = {tier: int(limit) for tier, limit in (budgets or {}).items() if limit is not None}
    unknown = sorted(set(limits) - set(TIER_NAMES))
    if unknown:
        raise ValueError(f"budgets name unknown tiers {unknown}; known are {list(TIER_NAMES)}")
    if trace is not None and seconds is not None:
        trace = trace.with_seconds(seconds)
    empty = AccessTrace.from_rows([])
    atoms = split_into_atoms(empty if trace is None else trace, specs)
    atom_bytes = atoms.num_pages * page_size
    accesses, distances = None, None
    next_use = reuse = _unknown(len(atoms))
    if trace is not None:
        accesses = expand_accesses(trace, atoms, specs)
        distances = reuse_distances(trace, accesses, atom_bytes)
        next_use, first = next_uses(trace, accesses, atom_bytes, len(atoms))
        reuse = _at_first_access(distances, first)
    return Plan(
        segments=specs,
        trace=trace,
        page_size=page_size,
        homes=home,
        budgets=limits,
        way=way or (WAITING if trace is None else "captured on meta"),
        note=note,
        predicted=_predict(specs, trace, atoms, accesses, home, atom_bytes, limits.get("device"), policy),
        kinds=SEGMENT_KINDS + tuple(sorted({spec.kind for spec in specs} - set(SEGMENT_KINDS))),
        atoms=atoms,
        next_use=next_use,
        reuse=reuse,
        accesses=accesses,
        access_distances=distances,
        graph_source=graph,
        critical_path_source=critical_path,
    )


def _unknown(num_atoms: int) -> Distances:
    never = np.full(num_atoms, NEVER, dtype=np.int64)
    return Distances(never, never, np.full(num_atoms, np.nan))


def _at_first_access(distances: Distances, first: IntArray) -> Distances:
    """Per atom, the distances of its first access; unknown for one that is never accessed."""
    result = _unknown(len(first))
    used = first != NEVER
    ticks, num_bytes, seconds = result.ticks.copy(), result.bytes.copy(), result.seconds.copy()
    ticks[used] = distances.ticks[first[used]]
    num_bytes[used] = distances.bytes[first[used]]
    seconds[used] = distances.seconds[first[used]]
    return Distances(ticks, num_bytes, seconds)


def _predict(
    segments: Sequence[SegmentSpec],
    trace: AccessTrace | None,
    atoms: Atoms,
    accesses: AtomAccesses | None,
    homes: npt.NDArray[np.int8],
    atom_bytes: IntArray,
    device_budget: int | None,
    policy: SupportsEviction | None,
) -> Predicted:
    """Simulate one step of what is not wired in the device memory that wiring leaves."""
    home = homes[atoms.segment]
    bytes_of_home = np.bincount(home, atom_bytes, len(TIER_NAMES)).astype(np.int64)
    wired_bytes = int(bytes_of_home[0])
    tier_bytes = {tier: int(bytes_of_home[index]) for index, tier in enumerate(TIER_NAMES)}
    if trace is None or accesses is None:
        return Predicted(
            tier_bytes=tier_bytes,
            wired_bytes=wired_bytes,
            largest_tick_bytes=0,
            reason="there is no trace yet",
        )
    streamed = home[accesses.atom] != 0
    atom, row = accesses.atom[streamed], accesses.row[streamed]
    tick = trace.tick[row].astype(np.int64)
    largest = largest_tick_bytes(atom, tick, atom_bytes)
    room = None if device_budget is None else device_budget - wired_bytes
    reason = None
    if policy is None:
        reason = "no eviction policy was given"
    elif room is None:
        reason = "no device budget was given"
    elif largest > room:
        reason = f"one tick needs {largest} bytes at once and wiring leaves {room} of the device budget"
    if reason is not None or policy is None or room is None:
        return Predicted(
            tier_bytes=tier_bytes, wired_bytes=wired_bytes, largest_tick_bytes=largest, reason=reason
        )
    is_gradient = np.array([spec.kind == "gradient" for spec in segments], dtype=bool)[atoms.segment[atom]]
    first, last = _ends(atom)
    write, phase = trace.write[row], trace.phase[row]
    traffic: StepTraffic = simulate_step(
        key=atom,
        tick=tick,
        key_bytes=atom_bytes,
        budget_bytes=room,
        policy=copy.deepcopy(policy),
        write=write,
        born=is_gradient & first & write,
        dies=is_gradient & last & (phase == Phase.UPDATE),
        num_ticks=trace.num_ticks,
    )
    on_disk = home == TIER_NAMES.index("disk")
    return Predicted(
        tier_bytes=tier_bytes,
        wired_bytes=wired_bytes,
        largest_tick_bytes=largest,
        policy=policy.name,
        page_in_bytes=traffic.page_in_bytes,
        page_out_bytes=traffic.page_out_bytes,
        disk_read_bytes=int(traffic.page_in_bytes_of_key[on_disk].sum()),
        disk_write_bytes=int(traffic.page_out_bytes_of_key[on_disk].sum()),
        # Where everything is wired no access can miss, and none is simulated.
        hit_rate=traffic.hits / (traffic.hits + traffic.misses) if traffic.hits + traffic.misses else 1.0,
        peak_resident_bytes=traffic.peak_resident_bytes + wired_bytes,
        resident_bytes=traffic.resident_bytes + wired_bytes,
    )


def _ends(key: IntArray) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool per access: it is the first, the last, of its key in the step."""
    first, last = np.zeros(len(key), dtype=bool), np.zeros(len(key), dtype=bool)
    if len(key):
        by_key = np.argsort(key, kind="stable")
        begins = np.flatnonzero(np.diff(key[by_key], prepend=-1))
        first[by_key[begins]] = True
        last[by_key[np.append(begins[1:], len(key)) - 1]] = True
    return first, last
