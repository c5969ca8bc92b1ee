"""Where each segment's bytes live, and the bill that says so before any work starts.

At ``manage()`` the tensors of the whole training state are known: parameters, their gradients, and the
optimizer's states: what its probe saw, or two per parameter, as AdamW has, until it is known.
`pager.policies.placement` gives each a home; what cannot fit is refused there and then, with the bytes that
are missing. Segments get their frames when they are made. When an optimizer is adopted its states are planned
again, with what the tiers have left, since only then is it certain what it keeps. States go by (parameter,
ordinal), since nobody knows beforehand what the optimizer calls them.

Wired (home on the device): everything, where everything fits; else parameters, up to half of the arena, since
a parameter that streams crosses the link four times a step and a state twice. The other half is what
streaming needs to run ahead. Where host memory does not hold the rest, as many parameters more as streaming can do
without: a disk is slower than the link by an order of magnitude. Gradients come and go and would leave holes between
wired runs, so they are wired never; where there is no pressure nothing moves them either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pager.address_space import AddressSpace, Segment, span_elements
from pager.errors import BudgetError, TierFull
from pager.home_frames import HomeFrames
from pager.page_table import Home, PageTable
from pager.policies.placement import PlacementError, place
from pager.policies.staying import WiredShare, share_wired, usually_wired_bytes
from pager.units import ceil_div, format_at_least, format_bytes

if TYPE_CHECKING:
    from pager.tiers.disk_file import DiskFile
    from pager.tiers.host_arena import HostArena

logger = logging.getLogger("pager.homes")

KIND_RANK = {"parameter": 0, "gradient": 1, "state": 2}
# How often a byte of this kind crosses the link in a step if it streams: a parameter for forward and backward
# and both ways at its update; a gradient out and in; a state in and out.
CROSSINGS = {"parameter": 4, "gradient": 2, "state": 2}
# More than anything crosses it.
_FIRST = 8
# States are wired only where as many of the largest tensor stay free: what does not fill an arena's slabs.
_FREE_TENSORS = 8


class Wanted(NamedTuple):
    """A tensor that will need a home: its kind, its name, its bytes; ``in_slices``: all of it is never on the device
    at once.
    """

    kind: str
    name: str
    num_bytes: int
    in_slices: bool = False


def state_name(parameter: str, ordinal: int) -> str:
    """What the plan calls the ``ordinal``-th (from 0) state of a parameter."""
    return f"{parameter}.state{ordinal}"


class Homes(HomeFrames):
    """Gives segments their homes, and frames there (`pager.home_frames`)."""

    def __init__(
        self, space: AddressSpace, table: PageTable, host: HostArena, disk: DiskFile | None, page_size: int
    ) -> None:
        super().__init__(host, disk, page_size)
        self._space = space
        self._table = table
        self._planned: dict[tuple[str, str], Home] = {}
        self._over_host_bytes = 0
        self._arena_bytes = 0
        self._wires_states = False

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
        share = WiredShare(arena_bytes if wires else 0, largest)
        if not everything_fits:
            is_whole = np.array([not w.in_slices for w in wanted], bool)
            share = share_wired(
                arena_bytes,
                self._page_size,
                parameter_bytes=sizes[is_whole & may_wire].tolist(),
                largest_other_bytes=int(sizes[is_whole & ~may_wire].max(initial=0)),
                total_bytes=total,
                largest_bytes=largest,
                host_bytes=host_bytes,
                wires=wires,
            )
        # Wired first, among those that may be; the rest is placed on the tiers below.
        homes = np.full(len(wanted), int(Home.HOST), np.int64)
        wired = self._place(
            wanted,
            sizes,
            may_wire,
            device=share.num_bytes,
            host=total,
            disk=0,
            first_above=share.first_above,
        )
        homes[np.flatnonzero(may_wire)[wired == int(Home.DEVICE)]] = int(Home.DEVICE)
        self._plan_below(wanted, sizes, homes, what="training state", host=host_bytes, disk=disk_bytes)

    def lacks_room(self, wanted: Sequence[Wanted], *, arena_bytes: int, host_bytes: int) -> bool:
        """Whether device and host together do not hold all, with the usual share of the arena left for streaming."""
        sizes = self._sizes(wanted)
        spare = usually_wired_bytes(arena_bytes, int(sizes.max(initial=0)))
        return int(sizes.sum()) > spare + max(host_bytes, 0)

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
                f"(host_budget less what the process takes, and is about to load)"
                f"{have_disk} it misses {format_bytes(error.missing_bytes)}{also}. Raise host_budget or device_budget"
                + self._disk_remedy(bool(have_disk))
                + self._smallest_change(wanted, sizes, below, error.missing_bytes, host, disk)
            ) from error
        self.reserve_disk(int(sizes[homes == int(Home.DISK)].sum()) // self._page_size)
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

        of_host = format_at_least(self._over_host_bytes + enough(1, 0))
        of_disk = format_at_least(disk + enough(0, 1))
        other = (
            f"disk_budget = {of_disk}"
            if self._disk is not None or disk
            else f"disk=PATH with {of_disk} to take"
        )
        return f" The smallest change that fits: host_budget larger by {of_host}, or {other}."

    def _place(
        self,
        wanted: Sequence[Wanted],
        sizes: np.ndarray,
        chosen: np.ndarray,
        *,
        device: int,
        host: int,
        disk: int,
        first_above: int = 2**62,
    ) -> np.ndarray:
        """The homes of the ``chosen``; to be wired, those of more than ``first_above`` bytes come first."""
        index = np.flatnonzero(chosen).tolist()
        saved = np.array([CROSSINGS[w.kind] for w in wanted], np.int64) + np.where(
            sizes > first_above, _FIRST, 0
        )
        return place(
            num_bytes=sizes[index],
            traffic_bytes_if_streamed=(sizes * saved)[index],
            position=index,
            kind_rank=np.array([KIND_RANK[wanted[i].kind] for i in index], np.int64),
            device_capacity=device,
            host_capacity=host,
            disk_capacity=disk,
        )

    @staticmethod
    def _bill(wanted: Sequence[Wanted], sizes: np.ndarray) -> str:
        parts = []
        for kind in KIND_RANK:
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
        self.give_back(home, frame, num_pages)
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

    def free(self, segment: Segment) -> None:
        """Give back the home frames of a segment that is no more."""
        self.give_back(*self._frames_of(segment))

    def retire(
        self, segment: Segment, successor: Segment | None = None, *, is_held: Callable[[], bool] = bool
    ) -> None:
        """The segment is no more; ``successor`` stands in its place. Its frames are free once not ``is_held()``."""
        self.leave(*self._frames_of(segment), is_held)
        self._space.retire(segment, successor)
        self._table.settle(segment.first_page, segment.last_page, Home.HOST, -1)  # counts as wired no more
        self._free_left()

    def other_frames(self, segment: Segment) -> tuple[Home, int]:
        """Frames for :meth:`move` beside those that somebody looks at in host memory. Raises BudgetError."""
        try:
            return self._below(Home.HOST, segment.num_pages)
        except TierFull as error:
            raise BudgetError(
                f"pager: no tier has room for another value of {segment.name} beside the one that a held state_dict() "
                f"shows, {format_bytes(segment.num_pages * self._page_size)} ({error}). Let go of the state dict "
                f"before assigning .data, or raise host_budget{self._disk_remedy(self._disk is not None)}"
            ) from error

    def move(self, segment: Segment, home: Home, frame: int, *, is_held: Callable[[], bool] = bool) -> None:
        """The segment's bytes, all of them, are in these frames now: that is its home. The old frames are free once not
        ``is_held()``.
        """
        old = self._frames_of(segment)
        self._table.settle(segment.first_page, segment.last_page, home, frame)
        self._planned[segment.kind, segment.name] = home
        self.leave(*old, is_held)
        self._free_left()

    def _frames_of(self, segment: Segment) -> tuple[Home, int, int]:
        page = segment.first_page
        return Home(int(self._table.home[page])), int(self._table.home_frame[page]), segment.num_pages

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
