"""Prefetch: which of the upcoming page ins to put on the link now.

The order is never in question: a link that serves the earliest use first misses a deadline only where every
order misses one (Jackson's rule). What is to be decided is how early. Too late and the compute waits; too
early and bytes that are still of use are evicted for bytes that are not needed yet.

``FixedDistance`` keeps a constant number of extents ahead. It needs to know nothing, and is right where
extents are alike. ``Deadline`` starts as late as is safe: with ``b`` bytes that must cross the link up to and
including an extent, at ``r`` bytes per second, its last safe start is ``b / r`` seconds before its use. A
margin absorbs what the prediction does not know. If an extent must start now, all before it must have
started, so what is issued is always a prefix of what is upcoming.

Both see the same arrays, one row per upcoming access in order of use, of what was absent when they were
listed: a row is listed until its use. ``num_bytes`` is what still has to cross the link (0 once it has
arrived), ``issued`` says that its page in was asked for.

The runtime uses ``FixedDistance``, by the knob ``prefetch_distance``: a distance in extents needs no prediction
of time, and a wrong one only costs a little memory. ``Deadline`` is for simulations and comparisons. What the
runtime hands in would do for it: real bytes, and the trace's seconds, scaled to the measured step. Only issued
rows are known by their sum alone: they come first, with equal shares of it, 0.0 seconds before their use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pager.policies.protocol import IntArray

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class PrefetchPolicy(Protocol):
    """Chooses page ins to issue. Pure: keeps no state between calls."""

    def select(
        self,
        num_bytes: IntArray,
        seconds_until_use: FloatArray,
        issued: BoolArray,
        bandwidth_bytes_per_second: float,
    ) -> IntArray:
        """Indices (int64, rising) of the rows to issue now, none of them issued already.

        ``num_bytes`` int64 bytes still to move, ``seconds_until_use`` float64, ``issued`` bool: one entry per
        upcoming row, in order of use. ``bandwidth_bytes_per_second``: the rate of the link they all cross.
        """


@dataclass(frozen=True)
class FixedDistance:
    """Keep ``num_extents`` upcoming extents issued. Raises ValueError if that is less than one."""

    num_extents: int

    def __post_init__(self) -> None:
        if self.num_extents < 1:
            raise ValueError(f"prefetch distance is {self.num_extents} extents; it must be at least 1")

    def select(
        self,
        num_bytes: IntArray,
        seconds_until_use: FloatArray,
        issued: BoolArray,
        bandwidth_bytes_per_second: float,
    ) -> IntArray:
        """The nearest rows not issued, as many as are missing to ``num_extents`` issued ones."""
        issued = np.asarray(issued, dtype=bool)
        free = self.num_extents - int(np.count_nonzero(issued))
        return np.flatnonzero(~issued)[: max(free, 0)].astype(np.int64)


@dataclass(frozen=True)
class Deadline:
    """Issue as late as is safe, with ``margin_seconds`` to spare; at most ``max_extents`` issued at once.

    The default margin is 2 ms: an extent of 64 MiB takes 1.2 ms at 55 GB/s, and its predecessor on the link
    cannot be interrupted. Raises ValueError for a negative margin or a limit of less than one extent.
    """

    margin_seconds: float = 2e-3
    max_extents: int = 64

    def __post_init__(self) -> None:
        if not self.margin_seconds >= 0:
            raise ValueError(f"margin_seconds is {self.margin_seconds}; it cannot be negative")
        if self.max_extents < 1:
            raise ValueError(f"max_extents is {self.max_extents}; it must be at least 1")

    def select(
        self,
        num_bytes: IntArray,
        seconds_until_use: FloatArray,
        issued: BoolArray,
        bandwidth_bytes_per_second: float,
    ) -> IntArray:
        """The rows up to the last one whose time on the link plus the margin reaches its use.

        Raises ValueError if the bandwidth is not positive.
        """
        if not bandwidth_bytes_per_second > 0:
            raise ValueError(f"bandwidth is {bandwidth_bytes_per_second} bytes/s; it must be positive")
        issued = np.asarray(issued, dtype=bool)
        waiting = np.flatnonzero(~issued).astype(np.int64)
        if len(waiting) == 0:
            return waiting
        sizes = np.asarray(num_bytes, dtype=np.int64)
        # What was issued is on the link already, whatever its place in the order of use: all of it is ahead.
        bytes_ahead = int(sizes[issued].sum()) + np.cumsum(sizes[waiting])
        last_start = bytes_ahead / bandwidth_bytes_per_second + self.margin_seconds
        due = np.flatnonzero(last_start >= np.asarray(seconds_until_use, dtype=np.float64)[waiting])
        num_due = int(due[-1]) + 1 if len(due) else 0
        free = self.max_extents - int(np.count_nonzero(issued))
        return waiting[: max(min(num_due, free), 0)]


def auto_distance(
    bandwidth_bytes_per_second: float,
    seconds_per_extent_compute: float,
    extent_bytes: float,
    *,
    latency_seconds: float = 0.0,
    spare_bytes: int | None = None,
    minimum: int = 2,
    maximum: int = 64,
) -> int:
    """The prefetch distance, in extents, at which a steady stream of extents arrives in time.

    An extent is on its way for ``latency + extent_bytes / bandwidth`` seconds; meanwhile the compute uses up
    ``that / seconds_per_extent_compute`` others, and one is in use: Little's law. Where the link is slower
    than the compute no distance hides it and a deep queue only smooths, so the result is held to ``maximum``;
    and to ``spare_bytes`` of device memory, if given, but never below one. Raises ValueError unless bandwidth
    and extent size are positive and ``1 <= minimum <= maximum``.
    """
    if not bandwidth_bytes_per_second > 0 or not extent_bytes > 0:
        raise ValueError(
            f"bandwidth ({bandwidth_bytes_per_second} bytes/s) and extent size ({extent_bytes} bytes)"
            " must be positive"
        )
    if not 1 <= minimum <= maximum:
        raise ValueError(f"need 1 <= minimum <= maximum, got minimum={minimum}, maximum={maximum}")
    transfer_seconds = latency_seconds + extent_bytes / bandwidth_bytes_per_second
    if seconds_per_extent_compute * maximum <= transfer_seconds:
        distance = maximum
    else:
        distance = math.ceil(transfer_seconds / seconds_per_extent_compute - 1e-9) + 1
    distance = min(max(distance, minimum), maximum)
    if spare_bytes is not None:
        distance = min(distance, int(spare_bytes // extent_bytes))
    return max(distance, 1)
