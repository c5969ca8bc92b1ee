"""Frames on the device, handed out in contiguous runs.

The problem: an operation wants its weight in one piece, tensors differ in size by four orders of magnitude,
and the arena is meant to be full. So the question is never "which page goes" but "which stretch of
neighbouring frames is cheapest to empty". Each slab is kept as a list of neighbouring *blocks*, free or taken
by a run; a request looks for

1. a free block (best fit), else
2. the window of neighbouring blocks that are free or may be evicted whose dearest victim is cheapest, where
   dear means late in the eviction order that the policy gave.

Frames carry *fences*: the last event per stream after which their former contents are not needed any more.
Whoever gets the frames makes its first stream wait for them; nobody waits on the host. Only the latest event
of a stream is kept, because it implies all earlier ones of that stream.

Why not a buddy system: sizes here are fixed by the model and not powers of two; rounding them up would waste
a third of the budget. Why not virtual memory mapping (cuMemMap): its granularity is 2 MiB, sixteen pages.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pager.device.base import Region
from pager.errors import PagerInternalError

if TYPE_CHECKING:
    import torch

    from pager.device.base import Device, Event, Note

Fence = dict[int, "Event"]


def merge_fence(into: Fence, other: Fence) -> None:
    """Add ``other``'s events; of two on one stream the later one stays."""
    for stream, event in other.items():
        known = into.get(stream)
        if known is None or known.number < event.number:
            into[stream] = event


@dataclass(slots=True, eq=False)
class Block:
    """Neighbouring frames of one slab: taken by ``owner``, or free (``owner is None``) with a fence."""

    start: int
    length: int
    owner: Any = None
    fence: Fence = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    first_frame: int
    num_frames: int
    blocks: list[Block]


class DeviceArena:
    """A few slabs of device memory, cut into frames of ``page_size`` bytes.

    ``budget_bytes`` is a hard limit on the slabs together; taking a run never allocates.
    """

    def __init__(self, device: Device, page_size: int, budget_bytes: int) -> None:
        self.device = device
        self.page_size = page_size
        self.budget_bytes = budget_bytes
        self.resident_bytes = 0
        self.peak_resident_bytes = 0
        self._slabs: list[_Slab] = []
        self._next_frame = 0

    # -- slabs -------------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.num_frames for slab in self._slabs) * self.page_size

    @property
    def largest_slab_frames(self) -> int:
        """The longest run that could ever be had, in frames."""
        return max((slab.num_frames for slab in self._slabs), default=0)

    @property
    def num_slabs(self) -> int:
        """Slabs in use."""
        return len(self._slabs)

    @property
    def num_frames(self) -> int:
        """One past the highest frame number given out so far (numbers of returned slabs stay unused)."""
        return self._next_frame

    def add_slab(self, num_frames: int) -> None:
        """Allocate one more slab. Raises PagerInternalError beyond the budget, torch's error if memory is
        short.
        """
        if self.capacity_bytes + num_frames * self.page_size > self.budget_bytes:
            raise PagerInternalError(
                f"device arena: a slab of {num_frames} frames would exceed the budget of {self.budget_bytes} bytes"
            )
        memory = self.device.allocate_slab(num_frames * self.page_size)
        slab = _Slab(memory, self._next_frame, num_frames, [Block(self._next_frame, num_frames)])
        self._next_frame += num_frames
        self._slabs.append(slab)
        if self.device.checker is not None:
            self.device.checker.resize("device", self._next_frame)

    def slab_owners(self, index: int) -> list[Any]:
        """The owners of the taken blocks of one slab."""
        return [block.owner for block in self._slabs[index].blocks if block.owner is not None]

    def slab_bytes(self, index: int) -> int:
        """Bytes of one slab."""
        return self._slabs[index].num_frames * self.page_size

    def remove_slab(self, index: int) -> None:
        """Give an empty slab's memory back. The caller has waited for the work that used it."""
        slab = self._slabs[index]
        if any(block.owner is not None for block in slab.blocks):
            raise PagerInternalError("remove_slab: the slab still holds runs")
        for block in slab.blocks:
            for event in block.fence.values():
                event.synchronize()
        self._give_back(slab)
        del self._slabs[index]

    def _give_back(self, slab: _Slab) -> None:
        # Whoever gets the memory next may write to it at once.
        frames = Region("device", slab.first_frame, slab.first_frame + slab.num_frames)
        self.device.host_touch(frames, write=True)

    def bytes_of(self, frame: int, num_bytes: int) -> torch.Tensor:
        """The memory from ``frame`` on, as uint8. Keeps nothing alive but the slab; for copies only."""
        slab = self._slab_of(frame)
        offset = (frame - slab.first_frame) * self.page_size
        return slab.memory[offset : offset + num_bytes]

    def lease(self, frame: int, num_bytes: int, on_release: Callable[[], None] | Note) -> torch.Tensor:
        """A fresh uint8 tensor over the frames with its own storage; ``on_release`` runs when its last view
        dies.
        """
        slab = self._slab_of(frame)
        return self.device.wrap(
            slab.memory, (frame - slab.first_frame) * self.page_size, num_bytes, on_release
        )

    def is_one_slab(self, frame: int, num_frames: int) -> bool:
        """Whether so many frames lie side by side in memory."""
        slab = self._slab_of(frame)
        return frame + num_frames <= slab.first_frame + slab.num_frames

    def _slab_of(self, frame: int) -> _Slab:
        for slab in self._slabs:
            if slab.first_frame <= frame < slab.first_frame + slab.num_frames:
                return slab
        raise PagerInternalError(f"device arena: no frame {frame}")

    # -- runs --------------------------------------------------------------------------------------

    def take_free(self, num_frames: int, owner: Any) -> tuple[int, Fence] | None:
        """Take the smallest free block that holds ``num_frames``; None if there is none."""
        best: tuple[_Slab, int] | None = None
        best_length = 0
        for slab in self._slabs:
            for index, block in enumerate(slab.blocks):
                if (
                    block.owner is None
                    and block.length >= num_frames
                    and (best is None or block.length < best_length)
                ):
                    best, best_length = (slab, index), block.length
        if best is None:
            return None
        return self._take(best[0], best[1], num_frames, owner)

    def _take(self, slab: _Slab, index: int, num_frames: int, owner: Any) -> tuple[int, Fence]:
        block = slab.blocks[index]
        taken = Block(block.start, num_frames, owner)
        if block.length > num_frames:
            rest = Block(block.start + num_frames, block.length - num_frames, None, dict(block.fence))
            slab.blocks[index : index + 1] = [taken, rest]
        else:
            slab.blocks[index] = taken
        self.resident_bytes += num_frames * self.page_size
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)
        assert self.resident_bytes <= self.capacity_bytes <= self.budget_bytes
        return taken.start, block.fence

    def cheapest_window(self, num_frames: int) -> list[Any] | None:
        """The owners to evict so that ``num_frames`` neighbouring frames become free, or None.

        An owner's attribute ``rank`` is its place in the eviction order (0 goes first), or None if it may not
        go. Of all windows the one whose highest rank is lowest is taken; of equals the one that evicts fewest
        frames.
        """
        best: tuple[int, int] | None = None
        window: tuple[_Slab, int, int] | None = None
        for slab in self._slabs:
            if slab.num_frames < num_frames:
                continue
            ranks = [-1 if block.owner is None else block.owner.rank for block in slab.blocks]
            lengths = [block.length for block in slab.blocks]
            num_blocks = len(lengths)
            for begin in range(num_blocks):
                length = evicted = 0
                worst = -1
                for end in range(begin, num_blocks):
                    rank = ranks[end]
                    if rank is None or (best is not None and rank > best[0]):
                        break
                    length += lengths[end]
                    if rank >= 0:
                        evicted += lengths[end]
                        if rank > worst:
                            worst = rank
                    if length >= num_frames:
                        if best is None or (worst, evicted) < best:
                            best, window = (worst, evicted), (slab, begin, end + 1)
                        break
        if window is None:
            return None
        slab, begin, end = window
        return [block.owner for block in slab.blocks[begin:end] if block.owner is not None]

    def free(self, frame: int, fence: Fence) -> None:
        """Return the run that starts at ``frame``; its next user waits for ``fence``."""
        slab = self._slab_of(frame)
        index = bisect.bisect_left(slab.blocks, frame, key=lambda block: block.start)
        block = slab.blocks[index] if index < len(slab.blocks) else None
        if block is None or block.start != frame or block.owner is None:
            raise PagerInternalError(f"device arena: no run starts at frame {frame}")
        self.resident_bytes -= block.length * self.page_size
        merged = Block(block.start, block.length, None, dict(fence))
        begin, end = index, index + 1
        if index > 0 and slab.blocks[index - 1].owner is None:
            begin -= 1
            before = slab.blocks[begin]
            merged.start = before.start
            merged.length += before.length
            merge_fence(merged.fence, before.fence)
        if end < len(slab.blocks) and slab.blocks[end].owner is None:
            after = slab.blocks[end]
            merged.length += after.length
            merge_fence(merged.fence, after.fence)
            end += 1
        slab.blocks[begin:end] = [merged]

    def poison(self, frame: int, num_frames: int, fence: Fence) -> Fence:
        """Overwrite frames that nobody uses after ``fence`` with NaN bytes; the fence of who uses them next.

        On a stream of its own: on one that pages move on, it would order just those who forget the fence.
        """
        stream = self.device.poison
        for event in fence.values():
            stream.wait(event)
        memory = self.bytes_of(frame, num_frames * self.page_size)
        stream.fill(memory, 0xFF, writes=Region("device", frame, frame + num_frames))
        event = stream.record()
        return {event.stream.index: event}

    def largest_free_frames(self, evictable: Callable[[Any], bool]) -> int:
        """The longest stretch that is free or could be emptied, for error messages."""
        best = 0
        for slab in self._slabs:
            length = 0
            for block in slab.blocks:
                length = length + block.length if block.owner is None or evictable(block.owner) else 0
                best = max(best, length)
        return best

    def close(self) -> None:
        """Give all slabs back. The caller has waited for the work that used them."""
        for slab in self._slabs:
            self._give_back(slab)
        self._slabs.clear()
