"""Addresses of pages: which pages belong to which tensor. Metadata only; no tensor is held here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pager.errors import PagerInternalError
from pager.units import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One managed tensor's range of pages.

    ``size`` and ``stride`` are those of the tensor, in elements; its bytes are stored as they lie in its
    storage (``num_bytes`` spans from the first element to the last), so the layout of a page is the layout of
    the tensor. ``dense`` says that every element of that span belongs to the tensor, once: only then may it
    be cut into slices.
    """

    index: int
    name: str
    kind: str  # "parameter", "gradient" or "state"
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    first_page: int
    num_pages: int
    page_size: int
    dense: bool

    @property
    def num_elements(self) -> int:
        """Elements in the stored span (of the tensor, if it is dense)."""
        return self.num_bytes // self.dtype.itemsize

    @property
    def last_page(self) -> int:
        """One past the segment's last page."""
        return self.first_page + self.num_pages

    def __repr__(self) -> str:
        return f"Segment({self.index}, {self.kind} {self.name!r}, {self.num_bytes} bytes, {self.num_pages} pages)"


def span_elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, both included; 0 if it has none."""
    if any(extent == 0 for extent in size):
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a strided tensor covers its span exactly once (torch: non-overlapping and dense)."""
    expected = 1
    for step, extent in sorted(zip(stride, size, strict=True)):
        if extent == 1:
            continue
        if step != expected:
            return False
        expected *= extent
    return True


class AddressSpace:
    """Hands out segments. Page numbers are never used twice, so an old number cannot name a new tensor's
    page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.segments: list[Segment] = []
        self.num_pages = 0
        self.num_live_pages = 0
        # Segments that are no more, each with the one that has taken its place, if any.
        self.retired: dict[int, int | None] = {}

    def add(
        self, *, name: str, kind: str, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
    ) -> Segment:
        """Append a segment for a tensor of this layout. The tensor must have at least one element."""
        num_bytes = span_elements(size, stride) * dtype.itemsize
        if num_bytes == 0:
            raise PagerInternalError(f"segment {name!r} of size {tuple(size)} has no bytes")
        segment = Segment(
            index=len(self.segments),
            name=name,
            kind=kind,
            size=size,
            stride=stride,
            dtype=dtype,
            num_bytes=num_bytes,
            first_page=self.num_pages,
            num_pages=ceil_div(num_bytes, self.page_size),
            page_size=self.page_size,
            dense=is_dense(size, stride),
        )
        self.segments.append(segment)
        self.num_pages += segment.num_pages
        self.num_live_pages += segment.num_pages
        return segment

    def retire(self, segment: Segment, successor: Segment | None = None) -> None:
        """The segment is no more; ``successor`` holds what it held, in another dtype or layout."""
        self.retired[segment.index] = None if successor is None else successor.index
        self.num_live_pages -= segment.num_pages

    def successors(self) -> npt.NDArray[np.int64]:
        """For each index the index of the segment that now stands in its place (itself, if alive), -1 for none."""
        result = np.arange(len(self.segments))
        for index in sorted(self.retired, reverse=True):  # a successor is younger, so it is settled already
            successor = self.retired[index]
            result[index] = -1 if successor is None else result[successor]
        return result
