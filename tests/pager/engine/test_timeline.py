"""Following the access trace: next uses against brute force, deviations, micro-batches, and when to record anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pager.engine import timeline as timeline_module
from pager.engine.timeline import (
    DEVIATION_SHARE,
    LOOK_AHEAD_ROWS,
    SHORT_RECORDING_ROWS,
    UNKNOWN,
    Timeline,
)
from pager.graph.access_trace import AccessRow, AccessTrace, Phase

F, B, G, U = Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT, Phase.UPDATE


def make_trace(segments: Sequence[int], phases: Sequence[Phase] | None = None) -> AccessTrace:
    """One row per segment, each with a tick of its own, all forward unless ``phases`` says otherwise."""
    phases = phases or [F] * len(segments)
    return AccessTrace.from_rows(
        AccessRow(tick, segment, tick % 3, 1 + tick % 2, False, phase)
        for tick, (segment, phase) in enumerate(zip(segments, phases, strict=True))
    )


def make_timeline(
    segments: Sequence[int], phases: Sequence[Phase] | None = None, num_segments: int = 10
) -> Timeline:
    """A timeline that follows such a trace from its start."""
    timeline = Timeline()
    timeline.resize(num_segments)
    timeline.follow(make_trace(segments, phases))
    return timeline


def access(timeline: Timeline, *segments: int, phase: Phase = F) -> None:
    """Accesses in order."""
    for segment in segments:
        timeline.access(segment, 0, 1, write=False, phase=phase)


def brute_force(segments: Sequence[int], position: int, num_segments: int) -> list[int]:
    """Rows until each segment's next use, counted one by one."""
    length = len(segments)
    return [
        next((ahead for ahead in range(length) if segments[(position + ahead) % length] == segment), UNKNOWN)
        for segment in range(num_segments)
    ]


def until(timeline: Timeline, num_segments: int = 10) -> list[int]:
    """What the timeline says; beyond any trace is UNKNOWN."""
    ticks = timeline.ticks_until_use(np.arange(num_segments))
    return [UNKNOWN if value > 10**6 else int(value) for value in ticks]


@given(segments=st.lists(st.integers(0, 5), min_size=1, max_size=20), num_accesses=st.integers(0, 50))
def test_next_uses_are_those_that_brute_force_counts(segments: list[int], num_accesses: int) -> None:
    timeline = make_timeline(segments, num_segments=6)
    for number in range(num_accesses):
        assert until(timeline, 6) == brute_force(segments, number, 6)
        access(timeline, segments[number % len(segments)])
    assert timeline.position == num_accesses
    assert timeline.deviations == 0


@given(
    segments=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    accesses=st.lists(st.integers(0, 5), max_size=40),
)
def test_next_uses_belong_to_the_position_whatever_was_accessed(
    segments: list[int], accesses: list[int]
) -> None:
    timeline = make_timeline(segments, num_segments=6)
    for segment in accesses:
        access(timeline, segment)
        assert until(timeline, 6) == brute_force(segments, timeline.position, 6)
        assert [timeline.next_use(number) - timeline.position for number in set(segments)] == [
            until(timeline, 6)[number] for number in set(segments)
        ]


def test_without_a_trace_the_longest_unused_is_the_farthest() -> None:
    timeline = Timeline()
    timeline.resize(3)
    access(timeline, 0, 1, 2, 0)
    ticks = timeline.ticks_until_use(np.array([0, 1, 2]))
    assert ticks[1] > ticks[2] > ticks[0]
    assert timeline.expected(0) is None
    assert timeline.deviations == 0


def test_a_skipped_branch_leaves_the_trace_aligned() -> None:
    timeline = make_timeline([0, 1, 2, 3, 4])
    access(timeline, 0, 3)
    assert (timeline.position, timeline.deviations) == (4, 1)
    access(timeline, 4)
    assert (timeline.position, timeline.deviations) == (5, 1)


def test_a_skipped_branch_is_not_looked_for_in_another_phase() -> None:
    timeline = make_timeline([0, 1, 0], [F, F, B])
    access(timeline, 0)
    access(timeline, 0, phase=U)
    assert timeline.position == 1


def test_too_far_ahead_is_off_the_trace() -> None:
    timeline = make_timeline([0] * (LOOK_AHEAD_ROWS + 5) + [1])
    access(timeline, 0, 1)
    assert (timeline.position, timeline.deviations) == (1, 1)


def test_an_access_off_the_trace_is_counted_and_the_position_stays() -> None:
    timeline = make_timeline([0, 1, 2])
    access(timeline, 0, 9, 9, 1)
    assert (timeline.position, timeline.deviations) == (2, 2)


def test_a_new_forward_starts_the_trace_again() -> None:
    timeline = make_timeline([0, 1, 2, 2, 1, 0], [F, F, F, B, B, B])
    jumps = timeline.num_jumps
    access(timeline, 0, 1, 2, 0)
    assert (timeline.position, timeline.deviations) == (1, 0)
    assert timeline.num_jumps == jumps + 1


def test_the_expected_accesses_wrap_into_the_next_step() -> None:
    timeline = make_timeline([0, 1, 2], [F, G, U])
    access(timeline, 0)
    found = [timeline.expected(position) for position in range(1, 5)]
    assert [(row.segment, row.first_page, row.num_pages, row.rows_ahead) for row in found if row] == [
        (1, 1, 2, 0),
        (2, 2, 1, 1),
        (0, 0, 1, 2),
        (1, 1, 2, 3),
    ]


def test_seconds_ahead_are_the_traces_and_wrap_too() -> None:
    timeline = Timeline()
    timeline.resize(3)
    timeline.follow(make_trace([0, 1, 2], [F, B, U]).with_seconds([1.0, 2.0, 4.0]), 2)
    assert timeline.step_seconds == 10.0
    access(timeline, 0)
    rows = [timeline.expected(position) for position in range(1, 7)]
    assert [row.seconds_ahead for row in rows if row] == [0.0, 2.0, 3.0, 5.0, 9.0, 10.0]


def test_a_trace_without_seconds_has_none_ahead() -> None:
    row = make_timeline([0, 1, 2]).expected(2)
    assert row is not None
    assert row.seconds_ahead == 0.0


# -- steps -----------------------------------------------------------------------------------------------------

STEP = ([0, 1, 1, 0, 0, 1], [F, F, B, B, U, U])


def take_step(timeline: Timeline, micro_batches: int, *, off: Sequence[int] = ()) -> bool:
    """Forward and backward as often as that, ``off`` the trace at the end, and an update."""
    for _ in range(micro_batches):
        access(timeline, 0, 1)
        access(timeline, 1, 0, phase=B)
    access(timeline, *off, phase=B)
    timeline.begin_update()
    access(timeline, 0, 1, phase=U)
    return timeline.end_step()


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5])
def test_micro_batches_are_counted_and_the_trace_repeats_them(micro_batches: int) -> None:
    timeline = make_timeline(*STEP)
    assert take_step(timeline, micro_batches) is False
    assert timeline.micro_batches == micro_batches
    jumps = timeline.num_jumps
    assert take_step(timeline, micro_batches) is False
    assert timeline.deviations == 0
    assert timeline.num_jumps == jumps + 1, "only the end of the step sets the position"


def test_fewer_micro_batches_are_noticed_too() -> None:
    timeline = make_timeline(*STEP)
    for micro_batches in (4, 2, 1):
        take_step(timeline, micro_batches)
        assert timeline.micro_batches == micro_batches


def test_the_update_is_found_from_anywhere() -> None:
    timeline = make_timeline(*STEP)
    access(timeline, 0, 1)
    timeline.begin_update()
    assert timeline.position % 6 == 4


def test_a_step_ends_at_the_start_of_the_next() -> None:
    timeline = make_timeline(*STEP)
    for _ in range(3):
        access(timeline, 0)
        timeline.end_step()
        assert timeline.position % 6 == 0
        assert until(timeline, 2) == [0, 1]


def test_without_a_trace_the_recording_becomes_one() -> None:
    timeline = Timeline()
    timeline.resize(2)
    timeline.begin_update()
    assert timeline.end_step() is True


def test_a_trace_that_keeps_failing_is_recorded_anew() -> None:
    timeline = make_timeline(*STEP)
    assert DEVIATION_SHARE * 9 < 3
    assert take_step(timeline, 1, off=[7, 8, 9]) is False
    assert take_step(timeline, 1, off=[7, 8, 9]) is True
    timeline.take_recording()
    assert take_step(timeline, 1, off=[7, 8, 9]) is False, "the next two steps decide again"


def test_one_bad_step_between_good_ones_is_forgiven() -> None:
    timeline = make_timeline(*STEP)
    for off in ([7, 8, 9], [], [7, 8, 9], []):
        assert take_step(timeline, 1, off=off) is False


def test_the_recording_has_the_ticks_of_operations() -> None:
    timeline = Timeline()
    timeline.resize(3)
    for segments in ([0, 1], [2]):
        timeline.new_tick()
        access(timeline, *segments)
    rows = timeline.take_recording()
    assert [(row.tick, row.segment) for row in rows] == [(0, 0), (0, 1), (1, 2)]
    timeline.new_tick()
    access(timeline, 1)
    assert [row.tick for row in timeline.take_recording()] == [0]
    assert timeline.take_recording() == []


def test_forwards_without_steps_are_not_recorded_for_ever() -> None:
    timeline = make_timeline(*STEP)
    longest = 0
    for _ in range(SHORT_RECORDING_ROWS):
        access(timeline, 0, 1)
        longest = max(longest, len(timeline.recorded))
    assert longest <= SHORT_RECORDING_ROWS
    assert timeline.recorded == []
    assert take_step(timeline, 1) is False
    assert timeline.micro_batches == 1, "a forward without a backward is no micro-batch"
    assert timeline.take_recording() == []
    access(timeline, 0)
    assert len(timeline.take_recording()) == 1, "the next step is recorded again"


def test_a_recording_that_was_cut_never_becomes_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "RECORDED_ROWS", 10)
    timeline = Timeline()
    timeline.resize(2)
    timeline._max_recorded = timeline_module.RECORDED_ROWS
    for _ in range(6):
        access(timeline, 0, 1)
    assert timeline.end_step() is False
    assert timeline.take_recording() == []
    access(timeline, 0, 1)
    assert timeline.end_step() is True
    assert len(timeline.take_recording()) == 2


def test_a_failing_trace_waits_for_a_recording_that_is_whole() -> None:
    timeline = make_timeline(*STEP)
    for off in ([7, 8, 9], [7] * SHORT_RECORDING_ROWS):
        assert take_step(timeline, 1, off=off) is False
        timeline.take_recording()
    assert take_step(timeline, 1, off=[7, 8, 9]) is True


def test_new_segments_are_unknown_to_the_trace() -> None:
    timeline = make_timeline([0, 1], num_segments=2)
    timeline.resize(4)
    timeline.resize(3)
    assert until(timeline, 4) == [0, 1, UNKNOWN, UNKNOWN]
