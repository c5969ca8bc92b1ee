"""Where the training step is in its cycle, and when each segment is used next.

The step is a program that repeats, so the future is known: the trace lists every access of one step.
Following it costs one integer comparison an access. When an access is not the expected one (control flow,
evaluation, a user's own read)

1. look a little ahead: a branch that was skipped leaves the trace aligned again after it;
2. at the start of a forward look at the start of the trace: another micro-batch, or a new step;
3. else the access is off the trace: it is served and counted, and the position stays.

Positions are absolute (they never wrap): ``cycle * len(trace) + row``. Nothing here decides correctness: a
wrong position costs time only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.interrupts import uninterrupted

# Rows looked ahead on a mismatch: longer than any block of a network, short enough to cost microseconds.
LOOK_AHEAD_ROWS = 256
# A trace is remade when two steps in a row miss it in more than this share of their accesses.
DEVIATION_SHARE = 0.05
UNKNOWN = np.iinfo(np.int64).max // 4
# A recording longer than so many times the trace is of something else than a step (evaluation, generation).
RECORDED_TRACES = 4
# Room for many micro-batches of a short trace, and, without a trace to measure by, for some tens of MB.
SHORT_RECORDING_ROWS = 4096
RECORDED_ROWS = 1 << 18


class Upcoming(NamedTuple):
    """An access that the trace expects: which pages, and how many rows and seconds ahead.

    Seconds are those of the trace: 0.0 where it knows none.
    """

    segment: int
    first_page: int
    num_pages: int
    rows_ahead: int
    seconds_ahead: float


class Timeline:
    """The access trace of one step, the position in it, and a recording of the step under way."""

    def __init__(self) -> None:
        self.trace: AccessTrace | None = None
        self.position = 0
        self.deviations = 0
        # How often the position was set anew; what was known of positions before is void then.
        self.num_jumps = 0
        self.micro_batches = 1
        self.recorded: list[AccessRow] = []
        self._overflowed = False
        self._max_recorded = RECORDED_ROWS
        self._tick = -1
        self._next: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._next_use: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._last_use: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._now = 0
        self._update_row = 0
        self._base: AccessTrace | None = None
        self._rounds = 0
        self._seen_micro_batches = 0
        self._step_began = 0
        self._step_deviations = 0
        self._bad_steps = 0
        # The trace's columns as lists: single items of numpy arrays cost ten times as much.
        self._segments: list[int] = []
        self._keys: list[int] = []
        self._first_pages: list[int] = []
        self._num_pages: list[int] = []
        self._phases: list[int] = []
        self._start_seconds: list[float] = []
        self._cycle_seconds = 0.0

    # -- the trace ---------------------------------------------------------------------------------

    def resize(self, num_segments: int) -> None:
        """Segments are 0 .. num_segments-1 from now on."""
        extra = num_segments - len(self._next_use)
        if extra > 0:
            self._next_use = np.concatenate([self._next_use, np.full(extra, UNKNOWN)])
            self._last_use = np.concatenate([self._last_use, np.full(extra, -1)])

    def follow(self, trace: AccessTrace, micro_batches: int = 1) -> None:
        """Follow this one-micro-batch trace from its start, with ``micro_batches`` rounds before each update."""
        with uninterrupted():
            self._follow(trace, micro_batches)

    def _follow(self, trace: AccessTrace, micro_batches: int) -> None:
        self._base = trace
        self.resize(int(trace.segment.max(initial=-1)) + 1)
        self.micro_batches = micro_batches
        whole = trace.repeat_micro_batches(micro_batches)
        self.trace = whole
        self._segments = whole.segment.tolist()
        self._keys = np.where(whole.phase < Phase.UPDATE, whole.segment, ~whole.segment).tolist()
        self._first_pages = whole.first_page.tolist()
        self._num_pages = whole.num_pages.tolist()
        self._phases = whole.phase.tolist()
        self._start_seconds = whole.tick_start_seconds[whole.tick].tolist()
        self._cycle_seconds = whole.step_seconds
        self._max_recorded = max(RECORDED_TRACES * len(whole), SHORT_RECORDING_ROWS)
        self._next = whole.next_access()
        self._update_row = len(whole) - whole.num_update_rows
        self._seek(0)

    def _seek(self, row: int) -> None:
        """Stand before ``row``; recompute every segment's next use from there."""
        assert self.trace is not None
        self.num_jumps += 1
        length = len(self.trace)
        self.position = self.position // length * length + row if length else 0
        self._next_use[:] = UNKNOWN
        order = np.concatenate([np.arange(row, length), np.arange(row)])[::-1]
        ahead = np.concatenate([np.arange(row, length), np.arange(length, length + row)])[::-1]
        # Written from the farthest to the nearest, so the nearest access of each segment stays.
        self._next_use[self.trace.segment[order]] = ahead + (self.position - row)

    # -- following ---------------------------------------------------------------------------------

    def new_tick(self) -> None:
        """The accesses that follow belong to one operation."""
        self._tick += 1

    def access(self, segment: int, first_page: int, num_pages: int, *, write: bool, phase: int) -> None:
        """One access happened; move on and note it in the recording."""
        if not self._overflowed:
            self._record(segment, first_page, num_pages, write, phase)
        self._now += 1
        self._last_use[segment] = self._now
        if not self._segments:
            return
        length = len(self._segments)
        row = self.position % length
        if self._keys[row] == _key(segment, phase):
            self._advance(row, segment)
        else:
            self._find_again(row, segment, phase)

    def _record(self, segment: int, first_page: int, num_pages: int, write: bool, phase: int) -> None:
        if len(self.recorded) < self._max_recorded:
            self.recorded.append(AccessRow(max(self._tick, 0), segment, first_page, num_pages, write, phase))
        else:
            self._overflowed = True
            self.recorded = []

    def _advance(self, row: int, segment: int) -> None:
        base = self.position - row
        self._next_use[segment] = base + self._next[row]
        self.position += 1

    def _find_again(self, row: int, segment: int, phase: int) -> None:
        key = _key(segment, phase)
        if phase == Phase.FORWARD and key == self._keys[0] and row != 0:
            # Another micro-batch, or a forward whose backward never came.
            self._rounds += self._rounds_before(row)
            self._seek(0)
            self._advance(0, segment)
            return
        if phase < Phase.UPDATE:
            # What waits for the next forward leaves the update's order; that is our own doing.
            self.deviations += 1
            self._step_deviations += 1
        end = min(row + LOOK_AHEAD_ROWS, len(self._segments))
        try:
            found = self._keys.index(key, row + 1, end)
        except ValueError:
            return
        if self._phases[found] == phase:
            self._seek(found)
            self._advance(found, segment)

    def _rounds_before(self, row: int) -> int:
        """Micro-batches that this pass over the trace has seen, up to ``row``; one without a backward is none."""
        one = self._update_row // self.micro_batches
        if not one:
            return 0
        done, rest = divmod(min(row, self._update_row), one)
        return done + (1 if rest and self._phases[row - 1] > Phase.FORWARD else 0)

    def begin_update(self) -> None:
        """The optimizer step begins: skip to the update's part, and see how many micro-batches came before
        it.
        """
        if self.trace is None:
            return
        row = self.position % len(self.trace) if len(self.trace) else 0
        one = self._update_row // self.micro_batches
        done = min(max(round(row / one), 1), self.micro_batches) if one else 1
        self._seen_micro_batches = self._rounds + done
        if self.trace.num_update_rows and row != self._update_row:
            self._seek(self._update_row)

    def end_step(self) -> bool:
        """The step is over. True if the recording should replace the trace: there is none, or it keeps
        failing. Never if the recording became too long to be one step's.
        """
        rows = max(self._now - self._step_began, 1)
        self._bad_steps = self._bad_steps + 1 if self._step_deviations > DEVIATION_SHARE * rows else 0
        renew = not self._overflowed and (self.trace is None or self._bad_steps >= 2)
        if self.trace is not None and len(self.trace):
            self.position = (self.position // len(self.trace) + 1) * len(self.trace)
            if self.position % len(self.trace) == 0:
                self._seek(0)
        self._step_deviations = 0
        self._step_began = self._now
        self._rounds = 0
        seen, self._seen_micro_batches = self._seen_micro_batches, 0
        if renew:
            self._bad_steps = 0
        elif self._base is not None and seen and seen != self.micro_batches:
            self.follow(self._base, seen)
        return renew

    def take_recording(self) -> list[AccessRow]:
        """The accesses since the last call, with ticks from 0. None of them if they were too many."""
        rows, self.recorded = self.recorded, []
        self._overflowed = False
        self._tick = -1
        return rows

    # -- the future --------------------------------------------------------------------------------

    def next_use(self, segment: int) -> int:
        """The absolute position of a segment's next expected use."""
        return int(self._next_use[segment])

    def ticks_until_use(self, segments: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows until each segment's next use. Without a trace: the longer unused, the farther (LRU's guess)."""
        if self.trace is None:
            return self._now + 1 - self._last_use[segments]
        return np.maximum(self._next_use[segments] - self.position, 0)

    def expected(self, position: int) -> Upcoming | None:
        """The access expected at an absolute ``position`` at or after the present one, None without a trace."""
        trace = self.trace
        if trace is None or not self._segments:
            return None
        row = position % len(self._segments)
        return Upcoming(
            self._segments[row],
            self._first_pages[row],
            self._num_pages[row],
            position - self.position,
            self._seconds_at(position) - self._seconds_at(self.position),
        )

    @property
    def step_seconds(self) -> float:
        """What the trace followed says of a whole step's length, with all micro-batches; 0.0 if nothing."""
        return self._cycle_seconds

    def _seconds_at(self, position: int) -> float:
        cycle, row = divmod(position, len(self._segments))
        return cycle * self._cycle_seconds + self._start_seconds[row]


def _key(segment: int, phase: int) -> int:
    """What is compared with the trace. The update often begins where the next forward does: they differ."""
    return segment if phase < Phase.UPDATE else ~segment
