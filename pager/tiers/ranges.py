"""Contiguous ranges of frames: which are free, and where the next one goes.

Best fit (the smallest hole that is large enough, the lowest of equals): extents come in few sizes, and a hole
left by one is most often filled by another of its size, so it fragments less here than first fit.
Neighbouring holes are joined on free, but not across the border of two pieces, since memory behind two pieces
is not contiguous.

Two sorted lists, of holes by address and of holes by size; bisection finds the place, and moving the tail of
a list of some ten thousand entries takes a few microseconds. Not safe among threads: the tier that owns it
has a lock.
"""

from __future__ import annotations

import bisect

from pager.errors import PagerInternalError


class FrameRanges:
    """Free and used frames of an arena made of pieces. Starts empty; ``grow`` adds frames."""

    def __init__(self, num_frames: int = 0) -> None:
        self.num_free = 0
        self.num_used = 0
        self._end = 0  # one past the highest frame number ever given
        self._piece_begins: list[int] = []
        self._piece_ends: dict[int, int] = {}
        self._hole_begins: list[int] = []
        self._hole_ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (number of frames, begin)
        if num_frames:
            self.grow(num_frames)

    @property
    def num_frames(self) -> int:
        """Frames there are, free or used."""
        return self.num_free + self.num_used

    @property
    def end(self) -> int:
        """One past the highest frame number ever given."""
        return self._end

    @property
    def largest_free(self) -> int:
        """Frames in the largest hole: the most that ``allocate`` can give."""
        return self._by_size[-1][0] if self._by_size else 0

    def grow(self, num_frames: int) -> int:
        """Add a piece of free frames; its first frame. Numbers of removed pieces do not come back."""
        if num_frames <= 0:
            raise ValueError(f"cannot grow by {num_frames} frames")
        begin = self._end
        self._end += num_frames
        self._piece_begins.append(begin)
        self._piece_ends[begin] = self._end
        self._add_hole(begin, self._end)
        self.num_free += num_frames
        return begin

    def allocate(self, num_frames: int) -> int | None:
        """The first of ``num_frames`` contiguous frames, now used; None where no hole is large enough."""
        if num_frames <= 0:
            raise ValueError(f"cannot allocate {num_frames} frames")
        place = bisect.bisect_left(self._by_size, (num_frames, -1))
        if place == len(self._by_size):
            return None
        begin = self._by_size[place][1]
        end = self._remove_hole(begin)
        if end - begin > num_frames:
            self._add_hole(begin + num_frames, end)
        self.num_free -= num_frames
        self.num_used += num_frames
        return begin

    def free(self, first_frame: int, num_frames: int) -> None:
        """Take back used frames of one piece. PagerInternalError where one is free or does not exist."""
        begin, end = first_frame, first_frame + num_frames
        piece = self.piece_of(begin)
        if num_frames <= 0 or piece is None or end > piece[1]:
            raise PagerInternalError(f"frames {begin}..{end} are not a range of one piece")
        place = bisect.bisect_left(self._hole_begins, begin)
        before = self._hole_begins[place - 1] if place else None
        after = self._hole_begins[place] if place < len(self._hole_begins) else None
        if (before is not None and self._hole_ends[before] > begin) or (after is not None and after < end):
            raise PagerInternalError(f"frames {begin}..{end} are freed, but some of them are free already")
        if after is not None and after == end and after < piece[1]:
            end = self._remove_hole(after)
        if before is not None and self._hole_ends[before] == begin and before >= piece[0]:
            self._remove_hole(before)
            begin = before
        self._add_hole(begin, end)
        self.num_free += num_frames
        self.num_used -= num_frames

    def remove(self, first_frame: int) -> None:
        """Take away the piece that begins at ``first_frame``, all of whose frames must be free."""
        end = self._piece_ends.get(first_frame)
        if end is None or self._hole_ends.get(first_frame) != end:
            raise PagerInternalError(f"no piece that is wholly free begins at frame {first_frame}")
        self._remove_hole(first_frame)
        self._piece_begins.remove(first_frame)
        del self._piece_ends[first_frame]
        self.num_free -= end - first_frame

    def cut_holes(self, first_frame: int) -> list[tuple[int, int]]:
        """Take the free frames of a piece away. What is in use stands, with its numbers, in pieces of its own from then
        on: ``(begin, end)`` of each.
        """
        end = self._piece_ends.get(first_frame)
        if end is None:
            raise PagerInternalError(f"no piece begins at frame {first_frame}")
        place = bisect.bisect_left(self._hole_begins, first_frame)
        pieces: list[tuple[int, int]] = []
        begin = first_frame
        while place < len(self._hole_begins) and self._hole_begins[place] < end:
            hole = self._hole_begins[place]
            if hole > begin:
                pieces.append((begin, hole))
            begin = self._remove_hole(hole)
            self.num_free -= begin - hole
        if end > begin:
            pieces.append((begin, end))
        at = bisect.bisect_left(self._piece_begins, first_frame)
        self._piece_begins[at : at + 1] = [piece_begin for piece_begin, _ in pieces]
        del self._piece_ends[first_frame]
        self._piece_ends.update(pieces)
        return pieces

    def piece_of(self, frame: int) -> tuple[int, int] | None:
        """``(begin, end)`` of the piece ``frame`` is in; None where there is no such frame."""
        place = bisect.bisect_right(self._piece_begins, frame) - 1
        if place < 0:
            return None
        begin = self._piece_begins[place]
        return (begin, self._piece_ends[begin]) if frame < self._piece_ends[begin] else None

    def free_pieces(self) -> list[int]:
        """First frames of the pieces that are wholly free."""
        return [begin for begin, end in self._piece_ends.items() if self._hole_ends.get(begin) == end]

    def holes(self) -> list[tuple[int, int]]:
        """The free ranges as ``(begin, end)``, by address."""
        return [(begin, self._hole_ends[begin]) for begin in self._hole_begins]

    def is_used(self, first_frame: int, num_frames: int) -> bool:
        """Whether all these frames exist in one piece and are in use."""
        piece = self.piece_of(first_frame)
        end = first_frame + num_frames
        if piece is None or end > piece[1]:
            return False
        place = bisect.bisect_left(self._hole_begins, end) - 1
        return place < 0 or self._hole_ends[self._hole_begins[place]] <= first_frame

    def _add_hole(self, begin: int, end: int) -> None:
        bisect.insort(self._hole_begins, begin)
        self._hole_ends[begin] = end
        bisect.insort(self._by_size, (end - begin, begin))

    def _remove_hole(self, begin: int) -> int:
        end = self._hole_ends.pop(begin)
        del self._hole_begins[bisect.bisect_left(self._hole_begins, begin)]
        del self._by_size[bisect.bisect_left(self._by_size, (end - begin, begin))]
        return end
