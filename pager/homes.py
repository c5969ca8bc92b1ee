"""Where each segment's bytes live, and the bill that says so before any work starts.

At ``manage()`` the tensors of the whole training state are known: parameters, their gradients, and the
optimizer's states (two per parameter, as AdamW has, until the optimizer is known). `pager.policies.placement`
gives each a home; what cannot fit is refused there and then, with the bytes that are missing. Segments get
their frames when they are made.

Wired (home on the device): everything, where everything fits; else parameters, up to half of the arena, since
a parameter that streams crosses the link four times a step and a state twice. The other half is what
streaming needs to run ahead. Gradients come and go and would leave holes between wired runs, so they are
wired never; where there is no pressure nothing moves them either.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pager.address_space import AddressSpace, Segment
from pager.errors import BudgetError, TierFull
from pager.page_table import Home, PageTable
from pager.policies.placement import PlacementError, place
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from pager.tiers.disk_file import DiskFile
    from pager.tiers.host_arena import HostArena

logger = logging.getLogger("pager.homes")

_KIND_RANK = {"parameter": 0, "gradient": 1, "state": 2}
# How often a byte of this kind crosses the link in a step if it streams: a parameter for forward and backward
# and both ways at its update; a gradient out and in; a state in and out.
_CROSSINGS = {"parameter": 4, "gradient": 2, "state": 2}
# What is not wired must hold the update of the largest tensor, for an optimizer that cannot be cut into
# slices: the tensor, its gradient, two states.
_UPDATE_TENSORS = 4


class Wanted(NamedTuple):
    """A tensor that will need a home: its kind, its name, its bytes."""

    kind: str
    name: str
    num_bytes: int


class Homes:
    """Gives segments their homes and keeps the tiers' frames for them."""

    def __init__(
        self, space: AddressSpace, table: PageTable, host: HostArena, disk: DiskFile | None, page_size: int
    ) -> None:
        self._space = space
        self._table = table
        self._host = host
        self._disk = disk
        self._page_size = page_size
        self._planned: dict[tuple[str, str], Home] = {}
        self._spare_frames = 0

    def plan(self, wanted: Sequence[Wanted], *, arena_bytes: int, host_bytes: int, disk_bytes: int) -> None:
        """Decide the homes of all ``wanted``. Raises BudgetError with the missing bytes."""
        sizes = np.array([ceil_div(w.num_bytes, self._page_size) * self._page_size for w in wanted], np.int64)
        total = int(sizes.sum())
        everything_fits = total <= arena_bytes - arena_bytes // 16
        may_wire = np.array(
            [w.kind != "gradient" and (everything_fits or w.kind == "parameter") for w in wanted]
        )
        largest = int(sizes.max(initial=0))
        spare = max(min(arena_bytes // 2 - largest, arena_bytes - _UPDATE_TENSORS * largest), 0)
        wire_bytes = arena_bytes if everything_fits else spare
        # Wired first, among those that may be; the rest is placed on the tiers below.
        homes = np.full(len(wanted), int(Home.HOST), np.int64)
        wired = self._place(wanted, sizes, may_wire, device=wire_bytes, host=total, disk=0)
        homes[np.flatnonzero(may_wire)[wired == int(Home.DEVICE)]] = int(Home.DEVICE)
        below = homes != int(Home.DEVICE)
        try:
            homes[below] = self._place(wanted, sizes, below, device=0, host=host_bytes, disk=disk_bytes)
        except PlacementError as error:
            have_disk = (
                f" and {format_bytes(disk_bytes)} of disk" if self._disk is not None or disk_bytes else ""
            )
            raise BudgetError(
                f"pager: the training state needs {format_bytes(total)} ({self._bill(wanted, sizes)}); with "
                f"{format_bytes(int(sizes[~below].sum()))} on the device, {format_bytes(host_bytes)} of host memory"
                f"{have_disk} it misses {format_bytes(error.missing_bytes)}. Raise host_budget or device_budget"
                + (", or raise disk_budget." if have_disk else ", or give a folder with disk=PATH.")
            ) from error
        for item, home in zip(wanted, homes, strict=True):
            self._planned[item.kind, item.name] = Home(int(home))

    def _place(
        self,
        wanted: Sequence[Wanted],
        sizes: np.ndarray,
        chosen: np.ndarray,
        *,
        device: int,
        host: int,
        disk: int,
    ) -> np.ndarray:
        index = np.flatnonzero(chosen).tolist()
        return place(
            num_bytes=sizes[index],
            traffic_bytes_if_streamed=sizes[index]
            * np.array([_CROSSINGS[wanted[i].kind] for i in index], np.int64),
            position=index,
            kind_rank=np.array([_KIND_RANK[wanted[i].kind] for i in index], np.int64),
            device_capacity=device,
            host_capacity=host,
            disk_capacity=disk,
        )

    @staticmethod
    def _bill(wanted: Sequence[Wanted], sizes: np.ndarray) -> str:
        parts = []
        for kind in _KIND_RANK:
            num_bytes = int(sum(size for w, size in zip(wanted, sizes, strict=True) if w.kind == kind))
            parts.append(f"{kind}s {format_bytes(num_bytes)}")
        return ", ".join(parts)

    def disk_bytes_planned(self, wanted: Sequence[Wanted]) -> int:
        """Bytes of ``wanted`` whose home is the disk."""
        return sum(
            ceil_div(w.num_bytes, self._page_size) * self._page_size
            for w in wanted
            if self._planned.get((w.kind, w.name)) == Home.DISK
        )

    def use_disk(self, disk: DiskFile) -> None:
        """The disk file, once it was preallocated for what the plan puts there."""
        self._disk = disk

    def reserve_host(self, num_bytes_of: Sequence[int]) -> None:
        """Map host memory for segments of these sizes in one piece, so that making them allocates nothing.

        Where there is a disk, no more than the budget leaves: the rest of them goes there.
        """
        frames = sum(ceil_div(num_bytes, self._page_size) for num_bytes in num_bytes_of)
        missing = frames - self._spare_frames
        if self._disk is not None:
            missing = min(missing, (self._host.budget_bytes - self._host.reserved_bytes) // self._page_size)
        if missing > 0:
            self._host.grow(missing)
            self._spare_frames += missing

    def planned(self, kind: str, name: str) -> Home | None:
        """The home decided for a tensor, None if nothing was."""
        return self._planned.get((kind, name))

    def new_segment(
        self,
        *,
        name: str,
        kind: str,
        size: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        home: Home | None = None,
    ) -> Segment:
        """A segment with frames at its home (the planned one, if none is given).

        Raises TierFull when no tier has room for it.
        """
        segment = self._space.add(name=name, kind=kind, size=size, stride=stride, dtype=dtype)
        self._table.grow(self._space.num_pages)
        if home is None:
            home = self._planned.get((kind, name), Home.HOST)
        frame = -1
        if home == Home.HOST:
            home, frame = self._below(segment)
        elif home == Home.DISK:
            assert self._disk is not None
            frame = self._disk.allocate(segment.num_pages)
        self._table.settle(segment.first_page, segment.last_page, home, frame)
        return segment

    def _below(self, segment: Segment) -> tuple[Home, int]:
        try:
            return Home.HOST, self._allocate_host(segment.num_pages)
        except TierFull:
            if self._disk is None:
                raise
        return Home.DISK, self._disk.allocate(segment.num_pages)

    def _allocate_host(self, num_frames: int) -> int:
        if self._host.largest_free < num_frames:
            self._host.grow(num_frames)
            self._spare_frames += num_frames
        frame = self._host.allocate(num_frames)
        self._spare_frames = max(self._spare_frames - num_frames, 0)
        return frame

    def free(self, segment: Segment) -> None:
        """Give back the home frames of a segment that is no more."""
        home = Home(int(self._table.home[segment.first_page]))
        frame = int(self._table.home_frame[segment.first_page])
        if home == Home.HOST:
            self._host.free(frame, segment.num_pages)
        elif home == Home.DISK and self._disk is not None:
            self._disk.free(frame, segment.num_pages)

    def report(self, wanted: Sequence[Wanted]) -> dict[str, int]:
        """Bytes per tier that the plan gives ``wanted``."""
        totals: dict[str, int] = {home.name.lower(): 0 for home in Home}
        for item in wanted:
            home = self._planned.get((item.kind, item.name), Home.HOST)
            totals[home.name.lower()] += ceil_div(item.num_bytes, self._page_size) * self._page_size
        return totals
