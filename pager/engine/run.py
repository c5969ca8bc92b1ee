"""A run: neighbouring pages of one segment in neighbouring device frames, with the events that order its use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pager.device.base import Region
from pager.tiers.device_arena import merge_fence

if TYPE_CHECKING:
    from torch.multiprocessing.reductions import StorageWeakRef

    from pager.address_space import Segment
    from pager.device.base import Event, Stream
    from pager.engine.disk_requests import Job
    from pager.tiers.device_arena import Fence


@dataclass(slots=True, eq=False)
class Run:
    """Pages ``[first, first + num_pages)`` of ``segment`` in the frames from ``frame`` on.

    The page table owns the pages' states and pins. A run keeps what belongs to this stay on the device:

    issued: the copy that fills it has been enqueued (or it needs none); until then only its issuer may use
    it. leaving: a write-back is under way; it has the run to itself, but for who uses it on the device.
    fence: events of the frames' former users; the first work that writes the frames waits for them. ready:
    the event after which the frames may be used: the bytes are there, or were copied out; None if the
        compute stream itself writes them.
    waited: indices of the streams that already waited for ``ready`` (or ``fence``).
    users: streams that use the run now; uses: per stream the event after which the last use is over.
    wired: the device is its home. stays: it has a home below, but is not evicted while the plan keeps it here.
    escaped: a raw pointer or an uncounted alias is about, so any use may have written; until nobody uses the
    run. settled: all its writes were told of, so that who uses it reads, until the next write. orphan: the segment
    has dropped this value; the frames go when the last lease does. rank: scratch of reclaim: the run's place in the
    eviction order, None if it may not go. version: the tensor's version counter when device and home were last
    known to agree, or a write was last noted. arrival: the page in from a disk that fills it. shared: the storage of
    a tensor over the run that was given to the user.
    """

    segment: Segment
    first: int
    num_pages: int
    frame: int = -1
    issued: bool = False
    leaving: bool = False
    wired: bool = False
    stays: bool = False
    pins: int = 0
    fence: Fence = field(default_factory=dict)
    ready: Event | None = None
    waited: set[int] = field(default_factory=set)
    users: dict[int, Stream] = field(default_factory=dict)
    uses: Fence = field(default_factory=dict)
    prefetched: bool = False
    escaped: bool = False
    settled: bool = False
    orphan: bool = False
    version: int = 0
    arrival: Job | None = None
    shared: StorageWeakRef | None = None
    rank: int | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it is not to leave the device."""
        return self.wired or self.stays

    @property
    def begin(self) -> int:
        """First page in the global numbering."""
        return self.segment.first_page + self.first

    @property
    def end(self) -> int:
        """One past the last page in the global numbering."""
        return self.begin + self.num_pages

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment in these pages; the last page of a segment may be partly used."""
        page_size = self.segment.page_size
        return min(self.segment.num_bytes - self.first * page_size, self.num_pages * page_size)

    @property
    def region(self) -> Region:
        """The device frames."""
        return Region("device", self.frame, self.frame + self.num_pages)

    def last_events(self) -> Fence:
        """The events after which nobody needs the contents of the frames any more."""
        fence = dict(self.uses)
        merge_fence(fence, self.fence if self.ready is None else {self.ready.stream.index: self.ready})
        return fence

    def covers(self, first: int, num_pages: int) -> bool:
        """Whether all of the segment's pages ``[first, first + num_pages)`` are in this run."""
        return self.first <= first and first + num_pages <= self.first + self.num_pages

    def overlaps(self, first: int, num_pages: int) -> bool:
        """Whether any of the segment's pages ``[first, first + num_pages)`` is in this run."""
        return self.first < first + num_pages and first < self.first + self.num_pages
