"""Where each segment's bytes live, and the bill that says so before any work starts.

At ``manage()`` the tensors of the whole training state are known: parameters, their gradients, and the
optimizer's states: what its probe saw, or two per parameter, as AdamW has, until it is known.
`pager.policies.placement` gives each a home; what cannot fit is refused there and then, with the bytes that
are missing. Segments get their frames when they are made. When an optimizer is adopted its states are planned
again, with what the tiers have left, since only then is it certain what it keeps. States go by (parameter,
ordinal), since nobody knows beforehand what the optimizer calls them.

The disk's file is opened where there is a folder, and grows by what is planned there, up to its budget.

Wired (home on the device): everything, where everything fits; else parameters, up to half of the arena, since
a parameter that streams crosses the link four times a step and a state twice. The other half is what
streaming needs to run ahead. Gradients come and go and would leave holes between wired runs, so they are
wired never; where there is no pressure nothing moves them either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pager.address_space import AddressSpace, Segment, span_elements
from pager.errors import BudgetError, ConfigError, TierFull, TierIOError
from pager.page_table import Home, PageTable
from pager.policies.placement import PlacementError, place
from pager.tiers.disk_file import DiskFile
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from pager.config import Config
    from pager.tiers.host_arena import HostArena

logger = logging.getLogger("pager.homes")

_KIND_RANK = {"parameter": 0, "gradient": 1, "state": 2}
# How often a byte of this kind crosses the link in a step if it streams: a parameter for forward and backward
# and both ways at its update; a gradient out and in; a state in and out.
_CROSSINGS = {"parameter": 4, "gradient": 2, "state": 2}
# What is not wired must hold the update of the largest tensor, for an optimizer that cannot be cut into
# slices: the tensor, its gradient, two states.
_UPDATE_TENSORS = 4
# States are wired only where as many of the largest tensor stay free: what does not fill an arena's slabs.
_FREE_TENSORS = 8


class Wanted(NamedTuple):
    """A tensor that will need a home: its kind, its name, its bytes."""

    kind: str
    name: str
    num_bytes: int


def state_name(parameter: str, ordinal: int) -> str:
    """What the plan calls the ``ordinal``-th (from 0) state of a parameter."""
    return f"{parameter}.state{ordinal}"


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
        self._over_host_bytes = 0
        self._arena_bytes = 0
        self._wires_states = False
        # Frames to be free once nobody looks at them: home, first frame, frames, whether somebody does.
        self._leaving: list[tuple[Home, int, int, Callable[[], bool]]] = []

    def plan(
        self,
        wanted: Sequence[Wanted],
        *,
        arena_bytes: int,
        host_bytes: int,
        disk_bytes: int,
        wires: bool = True,
    ) -> None:
        """Decide the homes of all ``wanted``. Raises BudgetError with the missing bytes.

        ``wires``: the device may be the home of some. ``host_bytes`` below 0: so much more than host_budget the
        process takes without us.
        """
        self._over_host_bytes = max(-host_bytes, 0)
        host_bytes = max(host_bytes, 0)
        sizes = self._sizes(wanted)
        total = int(sizes.sum())
        largest = int(sizes.max(initial=0))
        everything_fits = total <= arena_bytes - arena_bytes // 16
        self._arena_bytes = arena_bytes
        self._wires_states = wires and everything_fits and total + _FREE_TENSORS * largest <= arena_bytes
        may_wire = np.array(
            [w.kind == "parameter" or (w.kind == "state" and self._wires_states) for w in wanted], bool
        )
        spare = max(min(arena_bytes // 2 - largest, arena_bytes - _UPDATE_TENSORS * largest), 0)
        wire_bytes = (arena_bytes if everything_fits else spare) if wires else 0
        # Wired first, among those that may be; the rest is placed on the tiers below.
        homes = np.full(len(wanted), int(Home.HOST), np.int64)
        wired = self._place(wanted, sizes, may_wire, device=wire_bytes, host=total, disk=0)
        homes[np.flatnonzero(may_wire)[wired == int(Home.DEVICE)]] = int(Home.DEVICE)
        self._plan_below(wanted, sizes, homes, what="training state", host=host_bytes, disk=disk_bytes)

    def plan_states(self, wanted: Sequence[Wanted]) -> None:
        """Decide anew the homes of the states of an optimizer that is now known, and reserve room for them.

        Raises BudgetError, and changes nothing, where the tiers have no room left for them.
        """
        sizes = self._sizes(wanted)
        total, largest = int(sizes.sum()), int(sizes.max(initial=0))
        present = self._space.num_live_pages * self._page_size
        wired = self._wires_states and present + total + _FREE_TENSORS * largest <= self._arena_bytes
        homes = np.full(len(wanted), int(Home.DEVICE if wired else Home.HOST), np.int64)
        disk = self._disk
        self._plan_below(
            wanted,
            sizes,
            homes,
            what="optimizer",
            host=self._host.budget_bytes - self._host.used_bytes,
            disk=disk.budget_bytes - disk.used_bytes if disk is not None else 0,
        )
        self.reserve_host(
            [w.num_bytes for w, home in zip(wanted, homes.tolist(), strict=True) if home == int(Home.HOST)]
        )

    def _sizes(self, wanted: Sequence[Wanted]) -> np.ndarray:
        return np.array([ceil_div(w.num_bytes, self._page_size) * self._page_size for w in wanted], np.int64)

    def _plan_below(
        self,
        wanted: Sequence[Wanted],
        sizes: np.ndarray,
        homes: np.ndarray,
        *,
        what: str,
        host: int,
        disk: int,
    ) -> None:
        """Place what is not on the device on the tiers below, in ``homes``, and keep the plan."""
        below = homes != int(Home.DEVICE)
        try:
            homes[below] = self._place(wanted, sizes, below, device=0, host=host, disk=disk)
        except PlacementError as error:
            have_disk = f" and {format_bytes(disk)} of disk" if self._disk is not None or disk else ""
            over = self._over_host_bytes
            also = (
                f"; the process without it takes {format_bytes(over)} more than host_budget, which so lacks "
                f"{format_bytes(over + error.missing_bytes)}"
                if over
                else ""
            )
            raise BudgetError(
                f"pager: the {what} needs {format_bytes(int(sizes.sum()))} ({self._bill(wanted, sizes)}); with "
                f"{format_bytes(int(sizes[~below].sum()))} on the device, {format_bytes(host)} of host memory "
                f"(host_budget less what the process takes)"
                f"{have_disk} it misses {format_bytes(error.missing_bytes)}{also}. Raise host_budget or device_budget"
                + self._disk_remedy(bool(have_disk))
                + self._smallest_change(wanted, sizes, below, error.missing_bytes, host, disk)
            ) from error
        self._reserve_disk(int(sizes[homes == int(Home.DISK)].sum()) // self._page_size)
        for item, home in zip(wanted, homes, strict=True):
            self._planned[item.kind, item.name] = Home(int(home))

    def _smallest_change(
        self,
        wanted: Sequence[Wanted],
        sizes: np.ndarray,
        below: np.ndarray,
        missing_bytes: int,
        host: int,
        disk: int,
    ) -> str:
        """What alone would make it fit: more host memory, or more of a disk. Tensors are not cut, so it is tried."""

        def enough(host_share: int, disk_share: int) -> int:
            extra = missing_bytes
            for _ in range(len(wanted)):
                try:
                    more = {"host": host + host_share * extra, "disk": disk + disk_share * extra}
                    self._place(wanted, sizes, below, device=0, **more)
                    break
                except PlacementError as error:
                    extra += max(error.missing_bytes, self._page_size)
            return extra

        of_host = _format_at_least(self._over_host_bytes + enough(1, 0))
        of_disk = _format_at_least(disk + enough(0, 1))
        other = (
            f"disk_budget = {of_disk}"
            if self._disk is not None or disk
            else f"disk=PATH with {of_disk} to take"
        )
        return f" The smallest change that fits: host_budget larger by {of_host}, or {other}."

    @staticmethod
    def _disk_remedy(have_disk: bool) -> str:
        return (
            ", or raise disk_budget or free space there."
            if have_disk
            else ", or give a folder with disk=PATH."
        )

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

    def open_disk(self, config: Config, budget: int) -> DiskFile | None:
        """Open the third tier of so many bytes, without a frame yet, if it has a folder. Raises ConfigError."""
        if config.disk is not None:
            try:
                checks, level = config.checks.happens_before, config.compression_level
                self._disk = DiskFile(
                    config.disk, self._page_size, 0, checksum=checks, compression=level, budget_bytes=budget
                )
            except TierIOError as error:
                why = str(error.strerror).removeprefix("disk: ")
                raise ConfigError(
                    f"disk={str(config.disk)!r}: {why}. Name a folder where this user may make files"
                ) from error
        return self._disk

    def _reserve_disk(self, num_frames: int) -> None:
        """Have ``num_frames`` free frames on the disk. Raises BudgetError."""
        disk = self._disk
        if disk is None or num_frames <= disk.num_free:
            return
        try:
            disk.grow(num_frames - disk.num_free)
        except TierFull as error:
            raise BudgetError(f"pager: {error}") from error

    def reserve_host(self, num_bytes_of: Sequence[int]) -> None:
        """Map host memory for segments of these sizes in one piece, so that making them allocates nothing.

        Where there is a disk, no more than the budget leaves: the rest of them goes there. Raises BudgetError.
        """
        self._free_left()
        frames = sum(ceil_div(num_bytes, self._page_size) for num_bytes in num_bytes_of)
        missing = frames - self._spare_frames
        if self._disk is not None:
            missing = min(missing, (self._host.budget_bytes - self._host.reserved_bytes) // self._page_size)
        if missing > 0:
            try:
                self._host.grow(missing)
            except TierFull as error:
                raise BudgetError(f"pager: {error}{self._disk_remedy(self._disk is not None)}") from error
            self._spare_frames += missing

    @property
    def host_used_bytes(self) -> int:
        """Bytes of host memory that are somebody's home."""
        return self._host.used_bytes

    def resize_host(self, extra_bytes: int) -> None:
        """Homes may take so much more host memory, or less, than before; never less than they have."""
        self._host.budget_bytes = max(self._host.budget_bytes + extra_bytes, self._host.reserved_bytes)

    def release_host(self) -> int:
        """Give the system back what no home is in, as far as it can be; the bytes of it."""
        before = self._host.reserved_bytes
        released = self._host.trim() + self._host.release_free()
        gone = (before - self._host.reserved_bytes) // self._page_size
        self._spare_frames = max(self._spare_frames - gone, 0)
        return released

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
        planned_as: str | None = None,
        later: bool = False,
    ) -> Segment:
        """A segment with frames at its home: ``home``, or what was planned under ``planned_as`` (None: its name).

        ``later``: it may never have a value, so it gets no frames before :meth:`settle`.

        Raises BudgetError, and makes nothing, when no tier has room for it.
        """
        key = kind, name if planned_as is None else planned_as
        num_pages = ceil_div(span_elements(size, stride) * dtype.itemsize, self._page_size)
        if home is None:
            home = self._planned.get(key, Home.HOST)
        frame = -1
        if home != Home.DEVICE and not later:
            home, frame = self._frames_for(name, home, num_pages)
        segment = self._space.add(name=name, kind=kind, size=size, stride=stride, dtype=dtype)
        self._table.grow(self._space.num_pages)
        self._table.settle(segment.first_page, segment.last_page, home, frame)
        self._planned[key] = home
        return segment

    def settle(self, segment: Segment) -> None:
        """Give a segment that was made for later its frames; does nothing where it has them. Raises BudgetError."""
        home, frame, num_pages = self._frames_of(segment)
        if home != Home.DEVICE and frame < 0:
            home, frame = self._frames_for(segment.name, home, num_pages)
            self._table.settle(segment.first_page, segment.last_page, home, frame)

    def unsettle(self, segment: Segment) -> None:
        """Take back the frames of a segment that has no value; :meth:`settle` may give it others."""
        home, frame, num_pages = self._frames_of(segment)
        self._free(home, frame, num_pages)
        self._table.settle(segment.first_page, segment.last_page, home, -1)

    def has_host_room(self, segment: Segment) -> bool:
        """Whether :meth:`settle` finds frames in host memory that is reserved already."""
        return self._frames_of(segment)[0] == Home.HOST and self._host.largest_free >= segment.num_pages

    def _frames_for(self, name: str, home: Home, num_pages: int) -> tuple[Home, int]:
        try:
            return self._below(home, num_pages)
        except TierFull as error:
            raise BudgetError(
                f"pager: no tier has room for {name}, {format_bytes(num_pages * self._page_size)} ({error}). "
                f"Raise host_budget{self._disk_remedy(self._disk is not None)}"
            ) from error

    def _below(self, home: Home, num_pages: int) -> tuple[Home, int]:
        """Frames at ``home``, or on the disk where host memory has none left."""
        if home == Home.HOST:
            try:
                return home, self._allocate_host(num_pages)
            except TierFull:
                if self._disk is None:
                    raise
        assert self._disk is not None
        if self._disk.largest_free < num_pages:
            self._disk.grow(num_pages)
        return Home.DISK, self._disk.allocate(num_pages)

    def _allocate_host(self, num_frames: int) -> int:
        if self._host.largest_free < num_frames:
            self._host.grow(num_frames)
            self._spare_frames += num_frames
        frame = self._host.allocate(num_frames)
        self._spare_frames = max(self._spare_frames - num_frames, 0)
        return frame

    def free(self, segment: Segment) -> None:
        """Give back the home frames of a segment that is no more."""
        self._free(*self._frames_of(segment))

    def retire(
        self, segment: Segment, successor: Segment | None = None, *, is_held: Callable[[], bool] = bool
    ) -> None:
        """The segment is no more; ``successor`` stands in its place. Its frames are free once not ``is_held()``."""
        self._leaving.append((*self._frames_of(segment), is_held))
        self._space.retire(segment, successor)
        self._table.settle(segment.first_page, segment.last_page, Home.HOST, -1)  # counts as wired no more
        self._free_left()

    def _frames_of(self, segment: Segment) -> tuple[Home, int, int]:
        page = segment.first_page
        return Home(int(self._table.home[page])), int(self._table.home_frame[page]), segment.num_pages

    def _free_left(self) -> None:
        leaving, self._leaving = self._leaving, []
        for home, frame, num_frames, is_held in leaving:
            if is_held():
                self._leaving.append((home, frame, num_frames, is_held))
            else:
                self._free(home, frame, num_frames)

    def _free(self, home: Home, frame: int, num_frames: int) -> None:
        if frame < 0:
            return
        if home == Home.HOST:
            self._host.free(frame, num_frames)
            self._spare_frames += num_frames
        elif home == Home.DISK and self._disk is not None:
            self._disk.free(frame, num_frames)

    def home_planned(self, item: Wanted) -> Home:
        """The home that the plan gives a tensor."""
        return self._planned.get((item.kind, item.name), Home.HOST)

    def report(self, wanted: Sequence[Wanted]) -> dict[str, int]:
        """Bytes per tier that the plan gives ``wanted``."""
        totals: dict[str, int] = {home.name.lower(): 0 for home in Home}
        for item in wanted:
            home = self.home_planned(item)
            totals[home.name.lower()] += ceil_div(item.num_bytes, self._page_size) * self._page_size
        return totals


def _format_at_least(num_bytes: int) -> str:
    """As `format_bytes`, rounded up: who takes the number at its word has enough."""
    unit = 1
    while num_bytes >= 1024 * unit:
        unit *= 1024
    return format_bytes(ceil_div(num_bytes * 100, unit) * unit / 100)
