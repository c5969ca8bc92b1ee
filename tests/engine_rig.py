"""An engine over segments of plain bytes, without a model: what the tests of the engine are made with.

The rig stands in for the MMU: it counts a version per segment, takes leases, and reads and writes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from pager.address_space import AddressSpace, Segment
from pager.device.simulated import SimulatedDevice
from pager.engine.engine import Engine
from pager.engine.moving import HomeMover
from pager.engine.run import Run
from pager.engine.transfer import Transfers
from pager.homes import Homes
from pager.page_table import Home, PageTable
from pager.policies.protocol import make_eviction_policy
from pager.statistics import Counters
from pager.tiers.adaptors import FaultyTier
from pager.tiers.device_arena import DeviceArena
from pager.tiers.disk_file import DiskFile
from pager.tiers.disk_probe import RingShape
from pager.tiers.host_arena import HostArena
from pager.tiers.page_packer import PagePacker

PAGE = 4096
Bytes = npt.NDArray[np.uint8]


class Rig:
    """An engine, its tiers, and one segment per entry of ``sizes`` (bytes) at home where ``homes`` says."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        arena_frames: int,
        homes: Sequence[Home] | None = None,
        disk_folder: Path | str | None = None,
        streams: Literal["late", "early"] = "late",
        check_races: bool = True,
        poison: bool = True,
        skip_wait: Callable[..., bool] | None = None,
        eviction: str = "lru",
        device: SimulatedDevice | None = None,
        disk_inline: str | None = "early",
        ring: tuple[int, int] = (16, 4),
        num_threads: int = 3,
        spare_pages: int = 0,
        packs: bool = False,
    ) -> None:
        """``disk_inline``: see `pager.engine.disk_workers`; None: threads. ``ring``: frames of a slot, and slots.
        ``spare_pages``: what may be kept in host memory when the disk fails. ``packs``: pages go to the disk
        compressed, in blocks so small that pages as small as these are worth it.
        """
        homes = homes or [Home.HOST] * len(sizes)
        self.device = device or SimulatedDevice(streams, check_races=check_races, skip_wait=skip_wait)
        self.space = AddressSpace(PAGE)
        self.table = PageTable()
        self.counters = Counters()
        frames = sum(-(-size // PAGE) for size in sizes)
        self.host = HostArena(PAGE, self.device, frames * PAGE)
        self.host.grow(frames)
        self.disk: FaultyTier | None = None
        if disk_folder:
            file = DiskFile(disk_folder, PAGE, frames, checksum=True, direct=not packs)
            file._packer = PagePacker(PAGE, frames, 1, block_bytes=PAGE // 16) if packs else None
            self.disk = FaultyTier(file)
        self.arena = DeviceArena(self.device, PAGE, arena_frames * PAGE)
        self.arena.add_slab(arena_frames)
        self.transfers = Transfers(
            device=self.device,
            table=self.table,
            arena=self.arena,
            host=self.host,
            disk=self.disk,
            counters=self.counters,
            ring_shape=RingShape(ring[0] * PAGE, ring[1], num_threads),
            spare_room=lambda: spare_pages * PAGE,
            disk_inline=disk_inline,
        )
        self.engine = Engine(
            device=self.device,
            space=self.space,
            table=self.table,
            arena=self.arena,
            transfers=self.transfers,
            policy=make_eviction_policy(eviction),
            counters=self.counters,
            poison=poison,
        )
        self.homes = Homes(self.space, self.table, self.host, self.disk, PAGE)  # type: ignore[arg-type]
        self.mover = HomeMover(self.engine, self.homes)
        self.versions: list[int] = []
        self.segments: list[Segment] = []
        for size, home in zip(sizes, homes, strict=True):
            self.add(size, home)

    def add(self, size: int, home: Home) -> None:
        """One more segment of ``size`` bytes."""
        index = len(self.segments)
        self.versions.append(0)
        segment = self.space.add(
            name=f"s{index}", kind="state", size=torch.Size((size,)), stride=(1,), dtype=torch.uint8
        )
        self.table.grow(self.space.num_pages)
        frame = -1
        if home is Home.HOST:
            frame = self.host.allocate(segment.num_pages)
        elif home is Home.DISK:
            assert self.disk is not None
            frame = self.disk.allocate(segment.num_pages)
        self.table.settle(segment.first_page, segment.last_page, home, frame)
        self.segments.append(segment)
        self.engine.register(segment, lambda: self.versions[index])

    # -- what the MMU does -------------------------------------------------------------------------------------

    def lease(
        self, index: int, *, overwrite: bool = False, pages: tuple[int, int] | None = None
    ) -> tuple[Run, torch.Tensor]:
        """A run over (first page, pages) of a segment, all of it by default, and a lease of it."""
        segment = self.segments[index]
        first, num_pages = pages or (0, segment.num_pages)
        run = self.engine.acquire_all([(segment, first, num_pages, overwrite)], f"using {segment.name}")[0]
        return run, self.engine.lease(run)

    def read(self, index: int) -> Bytes:
        """The segment's bytes through the device."""
        lease = self.lease(index)[1]
        values = lease.numpy().copy()
        del lease
        self.engine.drain()
        return values

    def write(self, index: int, values: Bytes) -> None:
        """Write in place: the old value is paged in, the version moves."""
        self.write_through(index, self.lease(index)[1], values)
        self.engine.drain()

    def write_through(self, index: int, lease: torch.Tensor, values: Bytes) -> None:
        """Write through a lease, counted by the version."""
        lease.copy_(torch.from_numpy(values))
        self.versions[index] += 1

    def overwrite(self, index: int, values: Bytes) -> None:
        """Write every byte; nothing is paged in."""
        run, lease = self.lease(index, overwrite=True)
        self.write_through(index, lease, values)
        self.engine.mark_dirty(run)
        del lease
        self.engine.drain()

    def store(self, index: int, values: Bytes) -> None:
        """A new value at the home, as loading does; device copies are dropped first."""
        segment = self.segments[index]
        if self.engine.has_value(segment) and self.home(index) is not Home.DEVICE:
            self.engine.discard(segment)
        self.engine.store(segment, torch.from_numpy(values))
        self.versions[index] += 1

    def home(self, index: int) -> Home:
        """Where the segment's pages belong."""
        return Home(int(self.table.home[self.segments[index].first_page]))

    def home_value(self, index: int) -> Bytes:
        """The segment's bytes at its home, written back first: what ``state_dict`` does."""
        segment = self.segments[index]
        self.engine.flush([segment])
        view = self.transfers.home_bytes(segment, write=False)
        if view is None:
            view = self.transfers.read_disk_home(segment)
        return view.numpy().copy()

    def set_host_budget(self, num_pages: int, *, settle: bool = True) -> None:
        """Homes leave host memory, the last segment's first, until it holds no more than so many pages; or come back
        while it does.
        """
        if settle:
            self.transfers.settle()
        self.homes.limit_host(0)
        self.host.budget_bytes = max(num_pages * PAGE, self.host.reserved_bytes)
        leaving, coming, excess = [], [], self.host.used_bytes // PAGE - num_pages
        for index, segment in reversed(list(enumerate(self.segments))):
            if excess > 0 and self.home(index) is Home.HOST:
                leaving.append(segment)
                excess -= segment.num_pages
        room = -excess
        for index, segment in enumerate(self.segments if not leaving else ()):
            if self.home(index) is Home.DISK and segment.num_pages <= room:
                coming.append(segment)
                room -= segment.num_pages
        try:
            self.mover.move(leaving, Home.DISK)
            self.mover.move(coming, Home.HOST)
        finally:
            for stream in self.device.own_streams:
                stream.synchronize()
            self.homes.release_host(locked=True)
            self.host.budget_bytes = max(num_pages * PAGE, self.host.reserved_bytes)

    def prefetch(self, index: int, *, ticks_ahead: int = 0) -> bool:
        """Ask for a segment ahead of its use."""
        segment = self.segments[index]
        return self.engine.prefetch(segment, 0, segment.num_pages, ticks_ahead=ticks_ahead)

    def evict(self, *indices: int) -> None:
        """Send segments home."""
        self.engine.evict_segments([self.segments[index] for index in indices])

    def state(self, index: int) -> list[int]:
        """The states of the segment's pages."""
        segment = self.segments[index]
        return [int(state) for state in self.table.state[segment.first_page : segment.last_page]]

    def close(self) -> None:
        """Give everything back, in the order of the runtime."""
        self.transfers.stop()
        for stream in (self.device.compute, *self.device.own_streams):
            stream.synchronize()
        self.transfers.close()
        self.host.close()
        if self.disk is not None:
            self.disk.close()
        self.arena.close()
        self.device.close()


def make_values(size: int, seed: int) -> Bytes:
    """Random bytes, equal for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def make_filled(*args: Any, **kwargs: Any) -> tuple[Rig, list[Bytes]]:
    """A rig whose segments all have a value, and the values."""
    rig = Rig(*args, **kwargs)
    values = [make_values(segment.num_bytes, seed) for seed, segment in enumerate(rig.segments)]
    for index, value in enumerate(values):
        rig.store(index, value)
    return rig, values
