"""Columns grow and shrink at their end."""

from __future__ import annotations

import numpy as np
import pytest

from pager.columns import resized


@pytest.mark.parametrize(
    ("num_rows", "fill", "expected"),
    [(5, -1, [3, 4, 5, -1, -1]), (5, 0, [3, 4, 5, 0, 0]), (3, 9, [3, 4, 5]), (2, 9, [3, 4]), (0, 9, [])],
)
def test_rows_are_kept_from_the_first(num_rows: int, fill: int, expected: list[int]) -> None:
    column = np.array([3, 4, 5], dtype=np.int16)
    new = resized(column, num_rows, fill)
    assert new.tolist() == expected
    assert new.dtype == np.int16
    assert not np.shares_memory(new, column)
