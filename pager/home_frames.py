"""The frames of homes: taken from the tiers below the device, and given back to them.

Host memory is mapped for many segments at a time (`Homes.reserve_host`); what is mapped and in nobody's hands is
*spare*. The disk's file is opened where there is a folder, and grows by what is asked of it, up to its budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pager.errors import BudgetError, ConfigError, TierFull, TierIOError
from pager.page_table import Home
from pager.tiers.disk_file import DiskFile
from pager.units import ceil_div

if TYPE_CHECKING:
    from pager.config import Config
    from pager.tiers.host_arena import HostArena


class HomeFrames:
    """Frames in host memory and on the disk, for `pager.homes.Homes`."""

    def __init__(self, host: HostArena, disk: DiskFile | None, page_size: int) -> None:
        self._host = host
        self._disk = disk
        self._page_size = page_size
        self._spare_frames = 0
        # Frames to be free once nobody looks at them: home, first frame, frames, whether somebody does.
        self._leaving: list[tuple[Home, int, int, Callable[[], bool]]] = []

    def open_disk(self, config: Config, budget_bytes: int) -> DiskFile | None:
        """Open the third tier, without a frame yet, where there is a folder. Raises ConfigError."""
        if config.disk is not None:
            checks, level = config.checks.happens_before, config.compression_level
            try:
                self._disk = DiskFile(
                    config.disk,
                    self._page_size,
                    0,
                    checksum=checks,
                    compression=level,
                    budget_bytes=budget_bytes,
                )
            except TierIOError as error:
                why = str(error.strerror).removeprefix("disk: ")
                raise ConfigError(
                    f"disk={str(config.disk)!r}: {why}. Name a folder where this user may make files"
                ) from error
        return self._disk

    def reserve_disk(self, num_frames: int) -> None:
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

    @property
    def untouched_host_bytes(self) -> int:
        """Bytes that are reserved for homes, and that the system gives when they are first written to."""
        return self._host.untouched_bytes

    @property
    def spare_host_bytes(self) -> int:
        """Bytes of host memory that are reserved and no home is in."""
        return self._host.reserved_bytes - self._host.used_bytes

    @property
    def host_room_bytes(self) -> int:
        """Bytes of host memory that homes may take still."""
        return max(self._host.budget_bytes - self._host.used_bytes, 0)

    @property
    def disk_room_bytes(self) -> int:
        """Bytes of disk that homes may take still; 0 without one."""
        disk = self._disk
        return 0 if disk is None else max(disk.budget_bytes - disk.used_bytes, 0)

    def limit_host(self, spare_bytes: int) -> None:
        """Homes may take so many bytes of host memory more than are reserved, unless they may take less already."""
        host = self._host
        host.budget_bytes = min(host.budget_bytes, host.reserved_bytes + max(spare_bytes, 0))

    def release_host(self, *, locked: bool = False) -> int:
        """Give the system back what no home is in, as far as it can be; the bytes of it.

        ``locked``: also page-locked memory between homes. No copy from or to a home may be under way then.
        """
        self._free_left()
        before = self._host.reserved_bytes
        released = self._host.shrink() if locked else self._host.trim() + self._host.release_free()
        gone = (before - self._host.reserved_bytes) // self._page_size
        self._spare_frames = max(self._spare_frames - gone, 0)
        return released

    @staticmethod
    def _disk_remedy(have_disk: bool) -> str:
        return (
            ", or raise disk_budget or free space there."
            if have_disk
            else ", or give a folder with disk=PATH."
        )

    def take(self, home: Home, num_pages: int) -> int:
        """The first of so many contiguous frames at ``home``, below the device. Raises TierError where it has none."""
        if home == Home.HOST:
            return self._allocate_host(num_pages)
        assert self._disk is not None
        if self._disk.largest_free < num_pages:
            self._disk.grow(num_pages)
        return self._disk.allocate(num_pages)

    def _below(self, home: Home, num_pages: int) -> tuple[Home, int]:
        """Frames at ``home``, or on the disk where host memory has none left."""
        if home == Home.HOST:
            try:
                return home, self._allocate_host(num_pages)
            except TierFull:
                if self._disk is None:
                    raise
        return Home.DISK, self.take(Home.DISK, num_pages)

    def _allocate_host(self, num_frames: int) -> int:
        if self._host.largest_free < num_frames:
            self._host.grow(num_frames)
            self._spare_frames += num_frames
        frame = self._host.allocate(num_frames)
        self._spare_frames = max(self._spare_frames - num_frames, 0)
        return frame

    def leave(self, home: Home, frame: int, num_frames: int, is_held: Callable[[], bool]) -> None:
        """These frames are free for others once not ``is_held()``."""
        self._leaving.append((home, frame, num_frames, is_held))

    def _free_left(self) -> None:
        leaving, self._leaving = self._leaving, []
        for home, frame, num_frames, is_held in leaving:
            if is_held():
                self._leaving.append((home, frame, num_frames, is_held))
            else:
                self.give_back(home, frame, num_frames)

    def give_back(self, home: Home, frame: int, num_frames: int) -> None:
        """Frames that nobody wants any more; none (-1), and those of the device, are nothing to do for."""
        if frame < 0:
            return
        if home == Home.HOST:
            self._host.free(frame, num_frames)
            self._spare_frames += num_frames
        elif home == Home.DISK and self._disk is not None:
            self._disk.free(frame, num_frames)
