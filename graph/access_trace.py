"""The access trace: one training step as a cyclic list of accesses, in columns.

Rows stand in the order in which the operations meet the door. Rows of one operation share a *tick*, the unit
of logical time. The step is a cycle: after the last row comes the first one again, so every row has a next
access. With gradient accumulation the part before the update repeats. Nothing here loops over rows or pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

TIER_NAMES = ("device", "host", "disk")  # by home: what lives on the device is wired
SEGMENT_KINDS = ("parameter", "gradient", "state", "master")


class Phase(IntEnum):
    """The part of a step in which an access happens. Rows of a step stand in the order of execution."""

    FORWARD = 0
    RECOMPUTE = 1  # forward again inside backward, under checkpointing
    BACKWARD = 2
    GRADIENT = 3  # a gradient arrives and is accumulated
    UPDATE = 4  # the optimizer step


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentSpec:
    """One managed tensor's range of pages. Its pages are ``first_page .. first_page + num_pages`` of all
    pages.

    ``index``: dense from 0. ``kind``: one of ``SEGMENT_KINDS``. ``num_bytes``: of the tensor, which may end
    inside its last page. Raises ValueError for negative numbers.
    """

    index: int
    name: str
    kind: str
    num_bytes: int
    first_page: int
    num_pages: int

    def __post_init__(self) -> None:
        if min(self.index, self.num_bytes, self.first_page, self.num_pages) < 0:
            raise ValueError(f"segment {self.name!r} has a negative index, size or page: {self}")


class AccessRow(NamedTuple):
    """One access. Pages are relative to the segment."""

    tick: int
    segment: int
    first_page: int
    num_pages: int
    write: bool
    phase: int


_COLUMNS = (
    ("tick", np.int32),
    ("segment", np.int32),
    ("first_page", np.int32),
    ("num_pages", np.int32),
    ("write", np.bool_),
    ("phase", np.uint8),
)


class AccessTrace:
    """One training step, one row per access, in order. Immutable; columns are read-only numpy arrays.

    Columns of length ``len(trace)``: ``tick`` int32 (non-decreasing, dense from 0), ``segment`` int32,
    ``first_page`` and ``num_pages`` int32 (relative to the segment), ``write`` bool, ``phase`` uint8. Of
    length ``num_ticks``: ``seconds`` float64, estimated or measured; zeros where nothing is known.
    """

    __slots__ = ("first_page", "num_pages", "phase", "seconds", "segment", "tick", "write")

    tick: npt.NDArray[np.int32]
    segment: npt.NDArray[np.int32]
    first_page: npt.NDArray[np.int32]
    num_pages: npt.NDArray[np.int32]
    write: npt.NDArray[np.bool_]
    phase: npt.NDArray[np.uint8]
    seconds: FloatArray

    def __init__(
        self,
        *,
        tick: npt.ArrayLike,
        segment: npt.ArrayLike,
        first_page: npt.ArrayLike,
        num_pages: npt.ArrayLike,
        write: npt.ArrayLike,
        phase: npt.ArrayLike,
        seconds: npt.ArrayLike | None = None,
    ) -> None:
        """Copy the columns. Raises ValueError for unequal lengths, negative numbers, ticks that jump."""
        given = (tick, segment, first_page, num_pages, write, phase)
        for (name, dtype), values in zip(_COLUMNS, given, strict=True):
            column: npt.NDArray[Any] = np.array(values, dtype=dtype).reshape(-1)
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        lengths = {name: len(getattr(self, name)) for name, _ in _COLUMNS}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of a trace differ in length: {lengths}")
        if len(self.tick):
            steps = np.diff(self.tick)
            if self.tick[0] != 0 or steps.min(initial=0) < 0 or steps.max(initial=0) > 1:
                raise ValueError("ticks must start at 0 and rise by 0 or 1 from row to row")
            if self.segment.min() < 0 or self.first_page.min() < 0 or self.num_pages.min() < 0:
                raise ValueError("segment, first_page and num_pages cannot be negative")
        num_ticks = int(self.tick[-1]) + 1 if len(self.tick) else 0
        spans = np.zeros(num_ticks) if seconds is None else np.array(seconds, dtype=np.float64).reshape(-1)
        if len(spans) != num_ticks:
            raise ValueError(f"seconds has {len(spans)} entries for {num_ticks} ticks")
        spans.flags.writeable = False
        object.__setattr__(self, "seconds", spans)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an AccessTrace is immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (tuple(getattr(self, name) for name, _ in _COLUMNS), self.seconds)

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]], seconds: npt.ArrayLike | None = None) -> AccessTrace:
        """A trace of ``rows``, each an ``AccessRow`` or six integers in its order. ``seconds`` per tick."""
        table = np.array([tuple(row) for row in rows], dtype=np.int64).reshape(-1, len(_COLUMNS))
        columns = {name: table[:, index] for index, (name, _) in enumerate(_COLUMNS)}
        return cls(**columns, seconds=seconds)

    def __len__(self) -> int:
        return len(self.tick)

    def __repr__(self) -> str:
        return f"AccessTrace({len(self)} accesses, {self.num_ticks} ticks, {self.step_seconds:.4g} s)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AccessTrace):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    @property
    def num_ticks(self) -> int:
        """Ticks in the cycle."""
        return len(self.seconds)

    @property
    def step_seconds(self) -> float:
        """Length of the cycle in seconds; 0.0 where no times are known."""
        return float(self.seconds.sum())

    @property
    def tick_start_seconds(self) -> FloatArray:
        """float64 of length ``num_ticks + 1``: when each tick begins; the last is the end of the step."""
        return np.concatenate(([0.0], np.cumsum(self.seconds)))

    @property
    def num_update_rows(self) -> int:
        """Rows of the optimizer step; they stand at the end."""
        return int(np.count_nonzero(self.phase >= Phase.UPDATE))

    def with_seconds(self, seconds: npt.ArrayLike) -> AccessTrace:
        """The same accesses with other ``seconds``. Raises ValueError unless they are ``num_ticks``."""
        return AccessTrace(**{name: getattr(self, name) for name, _ in _COLUMNS}, seconds=seconds)

    def repeat_micro_batches(self, num_micro_batches: int) -> AccessTrace:
        """The step with ``num_micro_batches`` forward-backward parts before the update part.

        Raises ValueError if that is less than 1 or if update rows stand before others.
        """
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {num_micro_batches}; it must be at least 1")
        head, tail = self._split_update()
        return _concatenate([head] * num_micro_batches + [tail])

    def with_update(self, rows: Iterable[Sequence[int]] | AccessTrace) -> AccessTrace:
        """The step with its update part replaced by ``rows`` (``AccessRow`` or a trace; ticks from 0).

        Rows become ``Phase.UPDATE`` whatever they say. Raises ValueError if update rows stand before others.
        """
        update = rows if isinstance(rows, AccessTrace) else AccessTrace.from_rows(rows)
        columns = {name: getattr(update, name) for name, _ in _COLUMNS}
        columns["phase"] = np.full(len(update), int(Phase.UPDATE), dtype=np.uint8)
        head, _ = self._split_update()
        return _concatenate([head, AccessTrace(**columns, seconds=update.seconds)])

    def next_access(self) -> IntArray:
        """int64 per row: the index of the next row that touches the same segment.

        Cyclic: an index that wraps into the next step is larger by ``len(self)``; a segment with one access
        gives its own row in the next step.
        """
        num_rows = len(self)
        following = np.empty(num_rows, dtype=np.int64)
        if num_rows == 0:
            return following
        by_segment = np.argsort(self.segment, kind="stable")
        first = np.flatnonzero(np.diff(self.segment[by_segment], prepend=-1))
        last = np.append(first[1:], num_rows) - 1
        following[by_segment[:-1]] = by_segment[1:]
        following[by_segment[last]] = by_segment[first] + num_rows
        return following

    def positions_of(self, segment: int) -> IntArray:
        """int64: the indices of the rows that touch ``segment``, rising."""
        return np.flatnonzero(self.segment == segment).astype(np.int64)

    def _split_update(self) -> tuple[AccessTrace, AccessTrace]:
        """The rows before the update and the update rows, each with ticks from 0."""
        cut = len(self) - self.num_update_rows
        if np.any(self.phase[:cut] >= Phase.UPDATE):
            raise ValueError("update rows stand before other rows; a step ends with its update")
        # An operation does not straddle the boundary; should a tick do, its seconds stay with the first part.
        first_tick = int(self.tick[cut]) if cut < len(self) else self.num_ticks
        head_ticks = int(self.tick[cut - 1]) + 1 if cut else 0
        shared = head_ticks - first_tick
        head = {name: getattr(self, name)[:cut] for name, _ in _COLUMNS}
        tail = {name: getattr(self, name)[cut:] for name, _ in _COLUMNS}
        tail["tick"] = tail["tick"] - first_tick
        tail_seconds = self.seconds[first_tick:].copy()
        tail_seconds[:shared] = 0.0
        return (
            AccessTrace(**head, seconds=self.seconds[:head_ticks]),
            AccessTrace(**tail, seconds=tail_seconds),
        )


def _rebuild(columns: tuple[npt.ArrayLike, ...], seconds: npt.ArrayLike) -> AccessTrace:
    names = [name for name, _ in _COLUMNS]
    return AccessTrace(**dict(zip(names, columns, strict=True)), seconds=seconds)


def _concatenate(parts: Sequence[AccessTrace]) -> AccessTrace:
    """The parts one after the other, their ticks shifted."""
    shifts = np.cumsum([0] + [part.num_ticks for part in parts])
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in _COLUMNS}
    columns["tick"] = np.concatenate([part.tick + shift for part, shift in zip(parts, shifts, strict=False)])
    return AccessTrace(**columns, seconds=np.concatenate([part.seconds for part in parts]))
