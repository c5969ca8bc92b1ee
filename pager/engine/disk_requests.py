"""Requests to the disk as values, and the rules of their order: what a read sees, which write may go.

See `pager.engine.disk_queue` for the protocol. Nothing here blocks or has a lock: the queue's is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pager.tiers.disk_file import BLOCK_BYTES
from pager.units import ceil_div

if TYPE_CHECKING:
    import torch

    from pager.device.base import Event, Region
    from pager.engine.ring import Slot

logger = logging.getLogger("pager.engine.disk_requests")

# Puts the bytes of an extent where they belong: (offset in the job, bytes, what the checker is told of them) -> the
# event after which the bytes may be overwritten, None for now.
Use = Callable[[int, "torch.Tensor", "Region"], "Event | None"]
# Puts the bytes of an extent into a buffer: -> the event after which they are all there, None for now.
Fill = Callable[["torch.Tensor", "Region"], "Event | None"]


class Extent(NamedTuple):
    """Neighbouring frames, and where their bytes stand in whatever they are a part of."""

    frame: int
    num_bytes: int
    offset: int


def blocks_of(num_bytes: int) -> int:
    """Bytes in whole blocks of the disk."""
    return ceil_div(num_bytes, BLOCK_BYTES) * BLOCK_BYTES


@dataclass(slots=True, eq=False)
class Job:
    """Reads that belong together. ``finish`` is called once, when all are done or one has failed, unless cancelled."""

    use: Use
    finish: Callable[[Job], None] | None = None
    is_urgent: bool = False
    num_left: int = 0
    error: BaseException | None = None
    is_done: bool = False
    ready: Event | None = None
    is_cancelled: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Nothing more is done with the bytes from now on."""
        with self.lock:
            self.is_cancelled = True


@dataclass(slots=True, eq=False)
class Request:
    number: int
    begin: int
    end: int
    num_bytes: int

    def overlaps(self, other: Request) -> bool:
        return self.begin < other.end and other.begin < self.end

    @property
    def block_bytes(self) -> int:
        """Bytes in whole blocks of the disk; what is behind the extent's end in its last page is nobody's."""
        return blocks_of(self.num_bytes)


@dataclass(slots=True, eq=False)
class Read(Request):
    job: Job
    offset: int


@dataclass(slots=True, eq=False)
class Write(Request):
    """A write whose bytes are in ``slot`` once ``filled`` has passed."""

    slot: Slot
    filled: Event | None
    error: BaseException | None = None
    is_done: bool = False
    is_repeated: bool = False
    num_readers: int = 0


class Piece(NamedTuple):
    """Where a part of a read's bytes comes from: the slot of a write, or (None) the disk."""

    begin: int
    end: int
    write: Write | None


def pieces_of(read: Read, held: Sequence[Write]) -> list[Piece]:
    """Cut a read into what the newest writes before it have in their slots, and the rest, which is on the disk."""
    found: list[Piece] = []
    left = [(read.begin, read.end)]
    for write in reversed(held):
        if write.number > read.number or not write.overlaps(read):
            continue
        rest: list[tuple[int, int]] = []
        for begin, end in left:
            low, high = max(begin, write.begin), min(end, write.end)
            if low >= high:
                rest.append((begin, end))
                continue
            found.append(Piece(low, high, write))
            rest += [span for span in ((begin, low), (high, end)) if span[0] < span[1]]
        left = rest
    return found + [Piece(begin, end, None) for begin, end in left]


def next_write(held: Sequence[Write], moving: Sequence[Write], reads: Sequence[Read]) -> Write | None:
    """The first write that nothing holds up, one that the link has filled if there is one.

    ``reads``: those that wait or move.
    """
    first: Write | None = None
    for place, write in enumerate(held):
        if write in moving or write.error is not None:
            continue
        if any(earlier.overlaps(write) for earlier in held[:place]):
            continue
        if any(read.number < write.number and read.overlaps(write) for read in reads):
            continue
        if write.filled is None or write.filled.query():
            return write
        first = first or write
    return first


def stripped(error: BaseException) -> BaseException:
    """An error to be raised elsewhere: its traceback would keep buffers and runs alive meanwhile."""
    logger.debug("a request to the disk failed", exc_info=error)
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
