"""Which homes move between host memory and the disk when the host budget changes, and what has to be still meanwhile.

The order is that of the placement (`pager.policies.placement`): optimizer states leave first, those of the parameters
that the step uses last before the others; parameters leave last, and come back first. `pager.engine.moving` moves them.

What stays where it is: a home that somebody looks at (a tensor of a ``state_dict()`` that is held), pages that somebody
uses on the device, and gradients that are lent a home (``update_at="backward"``). Updates of what moves that wait for
its next use are done first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pager.engine.moving import HomeMover
from pager.homes import CROSSINGS, KIND_RANK
from pager.optim.cpu_job import Job
from pager.page_table import Home
from pager.policies.placement import PlacementError, choose_leaving, choose_returning

if TYPE_CHECKING:
    from pager.engine.pagerd import Pagerd
    from pager.homes import Homes
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu


class HomeMoves:
    """Moves homes of one managed model. Used by the training thread, between two steps."""

    def __init__(self, mmu: Mmu, homes: Homes, pagerd: Pagerd, *, gradients: bool) -> None:
        """``gradients``: they have homes of their own, which may move."""
        self._mmu = mmu
        self._engine = mmu.engine
        self._homes = homes
        self._pagerd = pagerd
        self._moves_gradients = gradients
        self._mover = HomeMover(mmu.engine, homes)

    @property
    def bytes_to_come(self) -> int:
        """Host memory that the first move takes for itself: the disk's buffers."""
        return self._engine.transfers.bytes_to_come

    @contextlib.contextmanager
    def standstill(self) -> Iterator[None]:
        """The CPU is at no update, the disk at no write, and pagerd begins no copy. Raises TierError if the disk does
        not take what it was given before: then nothing has changed.
        """
        self._pagerd.pause()
        try:
            # A job of the CPU's copies when it pleases.
            self._settle([b for b in list(self._mmu.bindings.values()) if isinstance(b.pending, Job)])
            self._engine.drain()
            self._engine.transfers.settle()
            yield
        finally:
            self._pagerd.resume()

    def release(self) -> int:
        """Give the system back what no home is in, also page-locked memory between homes; the bytes of it. Inside
        ``standstill``.
        """
        # Updates that were done for what moves have left copies under way, also from and to what stays.
        device = self._engine.device
        for stream in (device.current_stream(), *device.own_streams):
            stream.synchronize()
        return self._homes.release_host(locked=True)

    # -- to the disk -------------------------------------------------------------------------------

    def leaving_bytes(self, excess_bytes: int) -> int:
        """Bytes of the homes that would go to the disk so that host memory holds ``excess_bytes`` less; they are
        reserved there. Raises PlacementError with the bytes that would stay too many, BudgetError and TierIOError where
        the disk refuses.
        """
        found = self._find(Home.HOST)
        chosen = choose_leaving(
            **self._columns(found), excess_bytes=excess_bytes, disk_capacity=self._homes.disk_room_bytes
        )
        pages = sum(found[index].segment.num_pages for index in chosen)
        self._homes.reserve_disk(pages)
        return pages * self._engine.arena.page_size

    def to_disk(self, excess_bytes: int) -> int:
        """Move homes until host memory holds about ``excess_bytes`` less, or no more can move; the bytes that moved.

        Inside ``standstill``. Raises TierError; what has moved until then stays where it is now.
        """
        stuck: set[int] = set()
        moved_bytes = 0
        while moved_bytes < excess_bytes:
            found = [b for b in self._find(Home.HOST) if b.segment.index not in stuck]
            chosen = self._choose(found, excess_bytes - moved_bytes)
            if not chosen:
                break
            moved_bytes += self._move(chosen, Home.DISK)
            stuck |= {binding.segment.index for binding in chosen}
        return moved_bytes

    def _choose(self, found: list[Binding], excess_bytes: int) -> list[Binding]:
        """What is to leave, as much of it as there is and the disk has room for."""
        room = self._homes.disk_room_bytes
        columns = self._columns(found)
        try:
            chosen = choose_leaving(**columns, excess_bytes=excess_bytes, disk_capacity=room)
        except PlacementError as error:
            chosen = choose_leaving(
                **columns, excess_bytes=excess_bytes - error.missing_bytes, disk_capacity=room
            )
        return [found[index] for index in chosen]

    # -- and back ----------------------------------------------------------------------------------

    def to_host(self, room_bytes: int, *, at_most_bytes: int) -> int:
        """Bring homes back from the disk that host memory has room for, about ``at_most_bytes`` of them; the bytes that
        moved. Raises TierError, BudgetError where the system has no such memory.
        """
        found = self._find(Home.DISK)
        chosen = choose_returning(
            **self._columns(found),
            host_capacity=min(room_bytes, self._homes.host_room_bytes),
            at_most_bytes=at_most_bytes,
        )
        if not len(chosen):
            return 0
        self._pagerd.pause()
        try:
            coming = [found[index] for index in chosen]
            self._homes.reserve_host([binding.segment.num_bytes for binding in coming])
            return self._move(coming, Home.HOST)
        finally:
            self._pagerd.resume()

    # -- both --------------------------------------------------------------------------------------

    def _move(self, bindings: Sequence[Binding], target: Home) -> int:
        self._settle(bindings)
        self._mmu.aliases.settle(bindings)
        for binding in bindings:
            self._mmu.unfix(binding)  # what is to stay on the device is brought there by its next use
        moved = self._mover.move(
            [binding.segment for binding in bindings], target, is_held=self._mmu.aliases.is_held
        )
        return sum(segment.num_pages for segment in moved) * self._engine.arena.page_size

    @staticmethod
    def _settle(bindings: Sequence[Binding]) -> None:
        for binding in bindings:
            owner = binding.owner
            if owner.pending is not None:
                owner.pending.run(owner)

    def _find(self, home: Home) -> list[Binding]:
        """The tensors at home there that may move."""
        table, aliases = self._engine.table, self._mmu.aliases
        return [
            binding
            for binding in list(self._mmu.bindings.values())
            if int(table.home[binding.segment.first_page]) == home
            and int(table.home_frame[binding.segment.first_page]) >= 0
            and (self._moves_gradients or binding.segment.kind != "gradient")
            and not aliases.is_held(binding.segment)
        ]

    def _columns(self, bindings: Sequence[Binding]) -> dict[str, np.ndarray]:
        """What the policy is asked with."""
        page_size = self._engine.arena.page_size
        sizes = np.array([binding.segment.num_pages for binding in bindings], np.int64) * page_size
        kinds = [binding.segment.kind for binding in bindings]
        return {
            "num_bytes": sizes,
            "traffic_bytes_if_streamed": sizes * np.array([CROSSINGS[kind] for kind in kinds], np.int64),
            "position": np.array(
                [self._mmu.update_order(binding.owner.segment.index) for binding in bindings], np.float64
            ),
            "kind_rank": np.array([KIND_RANK[kind] for kind in kinds], np.int64),
        }
