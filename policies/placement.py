"""Placement: which segments stay on the device for good, and where the others live.

A segment that is wired costs its bytes of device memory and saves the traffic it would cause by streaming,
every step. So what fits is wired in order of traffic saved per byte (the greedy solution of a knapsack, exact
up to its last item). Most segments of a model tie: every weight is read in forward and backward and written
in the update.

Among equals the sum of traffic does not care which are taken, but time does: wire the first half of the
layers and the link idles during that half and the compute waits during the other. So ties are spread evenly
along the trace by error diffusion: walk along it, add the share that can be wired to a running error, wire a
segment when the error has grown to it. Then every stretch of the trace streams the same share.

What is not wired lives on the host, and what does not fit there on the disk: optimizer pages first, since
they move once a step and are needed last, parameters last. A segment has one home; homes add up to the
capacity. The same order says what leaves when the host is to hold less (`choose_leaving`), and, from its other end,
what comes back when it may hold more (`choose_returning`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pager.policies.protocol import IntArray
from pager.policies.staying import spread

HomeArray = npt.NDArray[np.int8]


class Home(IntEnum):
    """The tier a segment's bytes belong to."""

    DEVICE = 0  # wired: no copy below
    HOST = 1
    DISK = 2


class PlacementError(ValueError):
    """The tiers together are too small by ``missing_bytes``."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return PlacementError, (str(self), self.missing_bytes)


def place(
    *,
    num_bytes: npt.ArrayLike,
    traffic_bytes_if_streamed: npt.ArrayLike,
    position: npt.ArrayLike,
    kind_rank: npt.ArrayLike,
    device_capacity: int,
    host_capacity: int,
    disk_capacity: int = 0,
) -> HomeArray:
    """The home of each segment: int8, ``Home.DEVICE`` (wired), ``HOST`` or ``DISK``.

    One entry per segment: ``num_bytes`` int64; ``traffic_bytes_if_streamed`` int64 bytes a step that wiring
    it saves; ``position`` of its first use along the trace (any unit); ``kind_rank`` int, larger goes to disk
    sooner (parameter 0, gradient 1, optimizer state 2). Capacities in bytes; ``device_capacity`` is what may
    be wired, without the room that streaming needs. Raises ValueError for arrays of unequal length and
    negative numbers, PlacementError (a ValueError with ``missing_bytes``) if the segments do not fit the
    three tiers.
    """
    sizes, traffic, where, rank = _columns(num_bytes, traffic_bytes_if_streamed, position, kind_rank)
    if min(device_capacity, host_capacity, disk_capacity, sizes.min(initial=0), traffic.min(initial=0)) < 0:
        raise ValueError("sizes, traffic and capacities are bytes and cannot be negative")
    capacity = device_capacity + host_capacity + disk_capacity
    total = int(sizes.sum())
    if total > capacity:
        raise PlacementError(
            f"{total} bytes do not fit {device_capacity} on the device + {host_capacity} on the host "
            f"+ {disk_capacity} on disk: {total - capacity} bytes are missing",
            total - capacity,
        )
    homes = np.full(len(sizes), int(Home.HOST), dtype=np.int8)
    homes[_choose_wired(sizes, traffic, where, device_capacity)] = Home.DEVICE
    _overflow_to_disk(homes, sizes, traffic, where, rank, (device_capacity, host_capacity, disk_capacity))
    return homes


def _choose_wired(
    sizes: IntArray, traffic: IntArray, where: npt.NDArray[np.float64], capacity: int
) -> IntArray:
    """Indices of the segments to wire within ``capacity`` bytes."""
    if int(sizes.sum()) <= capacity:
        return np.arange(len(sizes), dtype=np.int64)
    # Traffic is a small multiple of the size; rounding makes segments with the same multiple equal.
    saved_per_byte = np.round(traffic / np.maximum(sizes, 1), 6)
    wired: list[int] = []
    room = capacity
    for density in -np.unique(-saved_per_byte):
        group = np.flatnonzero(saved_per_byte == density)
        if density == 0:
            group = group[sizes[group] == 0]
        group = group[np.lexsort((group, where[group]))]
        chosen = group[spread(sizes[group], room)]
        wired.extend(chosen.tolist())
        room -= int(sizes[chosen].sum())
    return np.array(wired, dtype=np.int64)


def _overflow_to_disk(
    homes: HomeArray,
    sizes: IntArray,
    traffic: IntArray,
    where: npt.NDArray[np.float64],
    rank: IntArray,
    capacities: tuple[int, int, int],
) -> None:
    """Move from host to disk, in place, until the host holds the rest. Raises PlacementError if it cannot."""
    device_capacity, host_capacity, disk_capacity = capacities
    below = np.flatnonzero(homes == Home.HOST)
    excess = int(sizes[below].sum()) - host_capacity
    disk_room = disk_capacity
    order = below[_leaving_order(sizes[below], traffic[below], where[below], rank[below])]
    for index in order.tolist():
        if excess <= 0:
            return
        if 0 < sizes[index] <= disk_room:
            homes[index] = Home.DISK
            disk_room -= int(sizes[index])
            excess -= int(sizes[index])
    # The disk has no room for a whole segment more: what is left over may still find a gap on the device.
    device_room = device_capacity - int(sizes[homes == Home.DEVICE].sum())
    for index in order.tolist():
        if excess > 0 and homes[index] == Home.HOST and sizes[index] <= device_room:
            homes[index] = Home.DEVICE
            device_room -= int(sizes[index])
            excess -= int(sizes[index])
    if excess > 0:
        raise PlacementError(
            f"the segments fit {device_capacity} bytes on the device + {host_capacity} on the host + "
            f"{disk_capacity} on disk together, but not as whole segments: {excess} bytes are missing",
            excess,
        )


def _leaving_order(
    sizes: IntArray, traffic: IntArray, where: npt.NDArray[np.float64], rank: IntArray
) -> IntArray:
    """First to leave the host first: highest rank, least traffic, farthest next use."""
    saved_per_byte = np.round(traffic / np.maximum(sizes, 1), 6)
    order: IntArray = np.lexsort((-np.arange(len(sizes)), -where, saved_per_byte, -rank))
    return order


def choose_leaving(
    *,
    num_bytes: npt.ArrayLike,
    traffic_bytes_if_streamed: npt.ArrayLike,
    position: npt.ArrayLike,
    kind_rank: npt.ArrayLike,
    excess_bytes: int,
    disk_capacity: int,
) -> IntArray:
    """Which segments at home on the host are to go to the disk, so that it holds ``excess_bytes`` less: indices, first
    to go first.

    Arrays as for :func:`place`; ``position``: of the next use. Raises PlacementError with the bytes that would be left
    over if all went that the disk has room for.
    """
    sizes, traffic, where, rank = _columns(num_bytes, traffic_bytes_if_streamed, position, kind_rank)
    chosen: list[int] = []
    left, room = excess_bytes, disk_capacity
    for index in _leaving_order(sizes, traffic, where, rank).tolist():
        if left <= 0:
            break
        if 0 < sizes[index] <= room:
            chosen.append(index)
            room -= int(sizes[index])
            left -= int(sizes[index])
    if left > 0:
        raise PlacementError(
            f"{excess_bytes} bytes are to leave the host, which has {int(sizes.sum())} that can go, for a disk with "
            f"room for {disk_capacity}: {left} bytes stay too many",
            left,
        )
    return np.array(chosen, dtype=np.int64)


def choose_returning(
    *,
    num_bytes: npt.ArrayLike,
    traffic_bytes_if_streamed: npt.ArrayLike,
    position: npt.ArrayLike,
    kind_rank: npt.ArrayLike,
    host_capacity: int,
    at_most_bytes: int,
) -> IntArray:
    """Which segments at home on the disk are to come to a host with room for ``host_capacity``: indices, first to come
    first; those that left last.

    About ``at_most_bytes``: the first one comes, however large it is. Arrays as for :func:`place`.
    """
    sizes, traffic, where, rank = _columns(num_bytes, traffic_bytes_if_streamed, position, kind_rank)
    chosen: list[int] = []
    room, quota = host_capacity, at_most_bytes
    for index in _leaving_order(sizes, traffic, where, rank)[::-1].tolist():
        size = int(sizes[index])
        if not 0 < size <= room or (chosen and size > quota):
            continue
        chosen.append(index)
        room -= size
        quota -= size
        if quota <= 0:
            break
    return np.array(chosen, dtype=np.int64)


def _columns(
    num_bytes: npt.ArrayLike, traffic: npt.ArrayLike, position: npt.ArrayLike, kind_rank: npt.ArrayLike
) -> tuple[IntArray, IntArray, npt.NDArray[np.float64], IntArray]:
    """The arrays of a question about segments. Raises ValueError where they differ in length."""
    sizes = np.asarray(num_bytes, dtype=np.int64).reshape(-1)
    saved = np.asarray(traffic, dtype=np.int64).reshape(-1)
    where = np.asarray(position, dtype=np.float64).reshape(-1)
    rank = np.asarray(kind_rank, dtype=np.int64).reshape(-1)
    if not len(sizes) == len(saved) == len(where) == len(rank):
        raise ValueError(
            "num_bytes, traffic_bytes_if_streamed, position and kind_rank differ in length: "
            f"{len(sizes)}, {len(saved)}, {len(where)}, {len(rank)}"
        )
    return sizes, saved, where, rank
