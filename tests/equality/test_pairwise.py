"""The combinations hold every pair, are few, and are the same each time."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.equality.pairwise import all_pairs, pairs_of, pairwise

SHAPES = [(2, 2), (3, 2, 2), (8, 5, 6, 3, 2, 2), (4, 4, 4, 4, 4), (1, 3, 1), (2,) * 12]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_is_there(shape: tuple[int, ...]) -> None:
    factors = {f"f{index}": list(range(size)) for index, size in enumerate(shape)}
    rows = pairwise(factors)
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == set(all_pairs(factors))
    assert all(list(row) == list(factors) for row in rows)
    fewest = max(a * b for a, b in itertools.combinations(shape, 2))
    assert fewest <= len(rows) <= min(math.prod(shape), 2 * fewest + len(shape))
    assert rows == pairwise(factors)
