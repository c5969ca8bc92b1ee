"""The access trace: columns, cycle, micro-batches, update."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec

F, R, B, G, U = Phase


def make_step() -> AccessTrace:
    """Two segments forward, one tick backward over both, then an update of each in half of its pages."""
    rows = [
        AccessRow(0, 0, 0, 2, False, F),
        AccessRow(1, 1, 0, 2, False, F),
        AccessRow(2, 1, 0, 2, False, B),
        AccessRow(2, 0, 0, 2, False, B),
        AccessRow(3, 0, 0, 1, True, U),
        AccessRow(4, 1, 1, 1, True, U),
    ]
    return AccessTrace.from_rows(rows, seconds=[1.0, 2.0, 4.0, 8.0, 16.0])


def test_columns_have_their_types_and_are_read_only() -> None:
    trace = make_step()
    expected = {
        "tick": np.int32,
        "segment": np.int32,
        "first_page": np.int32,
        "num_pages": np.int32,
        "write": np.bool_,
        "phase": np.uint8,
        "seconds": np.float64,
    }
    for name, dtype in expected.items():
        column = getattr(trace, name)
        assert column.dtype == dtype, name
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    with pytest.raises(AttributeError, match="immutable"):
        trace.tick = trace.segment
    assert (len(trace), trace.num_ticks, trace.step_seconds, trace.num_update_rows) == (6, 5, 31.0, 2)
    assert trace.tick_start_seconds.tolist() == [0, 1, 3, 7, 15, 31]
    assert pickle.loads(pickle.dumps(trace)) == trace
    assert trace != trace.with_seconds(np.zeros(5))


def test_micro_batches_repeat_what_stands_before_the_update() -> None:
    trace = make_step().repeat_micro_batches(3)
    assert trace.segment.tolist() == [0, 1, 1, 0] * 3 + [0, 1]
    assert trace.tick.tolist() == [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10]
    assert trace.seconds.tolist() == [1, 2, 4] * 3 + [8, 16]
    assert make_step().repeat_micro_batches(1) == make_step()


def test_update_is_replaced() -> None:
    update = [AccessRow(0, 1, 0, 2, True, F), AccessRow(0, 0, 0, 2, True, U), AccessRow(1, 1, 0, 1, True, U)]
    trace = make_step().with_update(update)
    assert trace.segment.tolist() == [0, 1, 1, 0, 1, 0, 1]
    assert trace.tick.tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert trace.phase.tolist() == [F, F, B, B, U, U, U]
    assert trace.seconds.tolist() == [1, 2, 4, 0, 0]
    assert make_step().with_update([]).num_update_rows == 0
    timed = AccessTrace.from_rows(update, seconds=[5, 6])
    assert make_step().with_update(timed).seconds.tolist() == [1, 2, 4, 5, 6]


def test_next_access_wraps_into_the_next_step() -> None:
    assert make_step().next_access().tolist() == [3, 2, 5, 4, 6, 7]
    assert AccessTrace.from_rows([]).next_access().tolist() == []
    assert AccessTrace.from_rows([AccessRow(0, 7, 0, 1, False, F)]).next_access().tolist() == [1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_next_access_equals_a_search(segments: list[int]) -> None:
    trace = AccessTrace.from_rows([AccessRow(tick, key, 0, 1, False, F) for tick, key in enumerate(segments)])
    num = len(segments)
    expected = [
        next(ahead for ahead in range(row + 1, row + num + 1) if segments[ahead % num] == segments[row])
        for row in range(num)
    ]
    assert trace.next_access().tolist() == expected
    for key in range(6):
        assert trace.positions_of(key).tolist() == [row for row in range(num) if segments[row] == key]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 0, 0, 1, 0, F)], "ticks must start at 0"),
        ([(0, 0, 0, 1, 0, F), (2, 0, 0, 1, 0, F)], "rise by 0 or 1"),
        ([(0, 0, 0, 1, 0, F), (1, 0, 0, 1, 0, F), (0, 0, 0, 1, 0, F)], "rise by 0 or 1"),
        ([(0, -1, 0, 1, 0, F)], "cannot be negative"),
        ([(0, 0, -1, 1, 0, F)], "cannot be negative"),
        ([(0, 0, 0, -1, 0, F)], "cannot be negative"),
    ],
)
def test_impossible_rows_are_refused(rows: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AccessTrace.from_rows(rows)


def test_misfits_are_refused() -> None:
    trace = make_step()
    with pytest.raises(ValueError, match="3 entries for 5 ticks"):
        trace.with_seconds([1, 2, 3])
    with pytest.raises(ValueError, match="at least 1"):
        trace.repeat_micro_batches(0)
    early = AccessTrace.from_rows([AccessRow(0, 0, 0, 1, True, U), AccessRow(1, 0, 0, 1, False, F)])
    with pytest.raises(ValueError, match="a step ends with its update"):
        early.repeat_micro_batches(2)
    with pytest.raises(ValueError, match="differ in length"):
        AccessTrace(tick=[0], segment=[0, 1], first_page=[0], num_pages=[1], write=[False], phase=[0])
    with pytest.raises(ValueError, match="negative index, size or page"):
        SegmentSpec(index=0, name="w", kind="parameter", num_bytes=1, first_page=-1, num_pages=1)
