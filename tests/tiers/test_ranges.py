"""Ranges of frames against a set of free frame numbers, and the cases that have bitten others."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pager.errors import PagerInternalError
from pager.tiers.ranges import FrameRanges


def test_best_fit_takes_the_smallest_hole_and_the_lowest_of_equals() -> None:
    ranges = FrameRanges(20)
    assert [ranges.allocate(size) for size in (4, 1, 2, 1, 2, 1)] == [0, 4, 5, 7, 8, 10]
    for first, size in ((0, 4), (5, 2), (8, 2)):
        ranges.free(first, size)
    assert ranges.holes() == [(0, 4), (5, 7), (8, 10), (11, 20)]
    assert ranges.allocate(2) == 5
    assert ranges.allocate(2) == 8
    assert ranges.allocate(2) == 0
    assert ranges.allocate(3) == 11


def test_holes_join_on_both_sides() -> None:
    ranges = FrameRanges(9)
    for _ in range(3):
        ranges.allocate(3)
    ranges.free(0, 3)
    ranges.free(6, 3)
    assert ranges.largest_free == 3
    ranges.free(3, 3)
    assert ranges.holes() == [(0, 9)]
    assert ranges.allocate(9) == 0


def test_a_range_never_spans_two_pieces() -> None:
    ranges = FrameRanges(4)
    assert ranges.grow(4) == 4
    assert ranges.allocate(5) is None
    assert (ranges.allocate(4), ranges.allocate(4)) == (0, 4)
    ranges.free(4, 4)
    ranges.free(0, 4)
    assert ranges.holes() == [(0, 4), (4, 8)]
    assert ranges.allocate(5) is None
    assert ranges.free_pieces() == [0, 4]


def test_a_removed_pieces_numbers_do_not_come_back() -> None:
    ranges = FrameRanges(4)
    ranges.grow(4)
    ranges.remove(4)
    assert ranges.num_frames == 4
    assert ranges.grow(2) == 8
    assert ranges.piece_of(5) is None
    assert ranges.piece_of(9) == (8, 10)
    assert not ranges.is_used(4, 1)


@pytest.mark.parametrize(
    ("first", "size"),
    [(0, 2), (1, 1), (1, 2), (2, 3), (3, 2), (5, 1), (5, 2), (7, 2), (-1, 1), (8, 1), (6, 0)],
)
def test_freeing_what_is_not_used_is_a_bug_and_changes_nothing(first: int, size: int) -> None:
    ranges = FrameRanges(8)
    ranges.allocate(8)
    ranges.free(0, 2)
    ranges.free(4, 2)
    with pytest.raises(PagerInternalError):
        ranges.free(first, size)
    assert ranges.holes() == [(0, 2), (4, 6)]
    assert ranges.num_used == 4


def test_a_piece_in_use_cannot_be_removed() -> None:
    ranges = FrameRanges(8)
    ranges.allocate(1)
    with pytest.raises(PagerInternalError, match="wholly free"):
        ranges.remove(0)
    with pytest.raises(PagerInternalError, match="wholly free"):
        ranges.remove(1)
    assert ranges.num_frames == 8


@pytest.mark.parametrize("size", [0, -3])
def test_sizes_are_positive(size: int) -> None:
    ranges = FrameRanges(8)
    with pytest.raises(ValueError, match="allocate"):
        ranges.allocate(size)
    with pytest.raises(ValueError, match="grow"):
        ranges.grow(size)
    assert ranges.num_free == 8


def test_holes_are_cut_out_and_what_is_used_keeps_its_numbers() -> None:
    ranges = FrameRanges(10)
    ranges.grow(4)
    ranges.allocate(10)
    for first, size in ((0, 1), (3, 2), (9, 1)):
        ranges.free(first, size)
    assert ranges.cut_holes(0) == [(1, 3), (5, 9)]
    assert (ranges.num_frames, ranges.num_free, ranges.holes()) == (10, 4, [(10, 14)])
    assert ranges.piece_of(2) == (1, 3)
    assert ranges.piece_of(3) is None
    assert ranges.is_used(5, 4)
    assert not ranges.is_used(2, 4)
    ranges.free(5, 4)
    assert ranges.free_pieces() == [10, 5]
    assert (ranges.grow(1), ranges.end) == (14, 15)
    with pytest.raises(PagerInternalError, match="no piece begins at frame 0"):
        ranges.cut_holes(0)


class RangesMachine(RuleBasedStateMachine):
    """The model: a set of used frames and a list of pieces."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.ranges = FrameRanges()
        self.pieces: list[tuple[int, int]] = []
        self.used: set[int] = set()

    def runs(self) -> list[tuple[int, int]]:
        """The free runs, frame by frame."""
        found: list[tuple[int, int]] = []
        for begin, end in self.pieces:
            start = None
            for frame in range(begin, end + 1):
                is_free = frame < end and frame not in self.used
                if is_free and start is None:
                    start = frame
                elif not is_free and start is not None:
                    found.append((start, frame))
                    start = None
        return found

    @rule(size=st.integers(1, 12))
    def grow(self, size: int) -> None:
        begin = self.ranges.grow(size)
        assert all(begin >= end for _, end in self.pieces)
        self.pieces.append((begin, begin + size))

    @rule(target=taken, size=st.integers(1, 6))
    def allocate(self, size: int) -> tuple[int, int]:
        fitting = [(end - begin, begin) for begin, end in self.runs() if end - begin >= size]
        first = self.ranges.allocate(size)
        assert first == (min(fitting)[1] if fitting else None)
        if first is None:
            return (0, 0)
        self.used.update(range(first, first + size))
        return (first, size)

    @rule(span=consumes(taken), cut=st.integers(0, 6), front_first=st.booleans())
    def free_in_two_parts(self, span: tuple[int, int], cut: int, front_first: bool) -> None:
        first, size = span
        cut = min(cut, size)
        parts = [(first, cut), (first + cut, size - cut)]
        for begin, length in parts if front_first else reversed(parts):
            if length:
                self.ranges.free(begin, length)
                self.used.difference_update(range(begin, begin + length))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        free = [piece for piece in self.pieces if not self.used.intersection(range(*piece))]
        assert sorted(self.ranges.free_pieces()) == [begin for begin, _ in free]
        if free:
            piece = data.draw(st.sampled_from(free))
            self.ranges.remove(piece[0])
            self.pieces.remove(piece)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def cut_holes(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.pieces))
        left: list[tuple[int, int]] = []
        for frame in sorted(self.used.intersection(range(*piece))):
            if left and left[-1][1] == frame:
                left[-1] = (left[-1][0], frame + 1)
            else:
                left.append((frame, frame + 1))
        assert self.ranges.cut_holes(piece[0]) == left
        self.pieces.remove(piece)
        self.pieces = sorted([*self.pieces, *left])

    @rule(frame=st.integers(0, 60), size=st.integers(1, 4))
    def ask(self, frame: int, size: int) -> None:
        frames = set(range(frame, frame + size))
        in_one = any(begin <= frame and frame + size <= end for begin, end in self.pieces)
        assert self.ranges.is_used(frame, size) == (in_one and frames <= self.used)

    @invariant()
    def agrees(self) -> None:
        assert self.ranges.holes() == self.runs()
        assert self.ranges.num_used == len(self.used)
        assert self.ranges.num_frames == sum(end - begin for begin, end in self.pieces)
        assert self.ranges.largest_free == max((end - begin for begin, end in self.runs()), default=0)


TestRanges = RangesMachine.TestCase
TestRanges.settings = settings(max_examples=100, stateful_step_count=40)
