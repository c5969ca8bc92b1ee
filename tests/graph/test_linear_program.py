"""The small linear program against all its corners."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pager.graph.linear_program import Infeasible, minimise


def best_corner(cost: np.ndarray, rows: np.ndarray, limits: np.ndarray) -> float:
    """The least cost over all feasible corners: every choice of n of the n + m bounding planes, solved."""
    num_variables = len(cost)
    planes = np.vstack((rows, -np.eye(num_variables)))
    right = np.concatenate((limits, np.zeros(num_variables)))
    best = np.inf
    for chosen in itertools.combinations(range(len(planes)), num_variables):
        part = planes[list(chosen)]
        if abs(np.linalg.det(part)) > 1e-9:
            corner = np.linalg.solve(part, right[list(chosen)])
            if np.all(planes @ corner <= right + 1e-9):
                best = min(best, float(cost @ corner))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_it_finds_the_cheapest_corner(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_variables, num_rows = int(random.integers(1, 5)), int(random.integers(1, 6))
    cost = np.round(random.uniform(0, 3, num_variables)) if seed % 2 else random.uniform(0, 3, num_variables)
    rows = random.normal(size=(num_rows, num_variables))
    limits = random.normal(size=num_rows)
    expected = best_corner(cost, rows, limits)
    if expected == np.inf:
        with pytest.raises(Infeasible, match="no point"):
            minimise(cost, rows, limits)
        return
    found = minimise(cost, rows, limits)
    assert np.all(found >= 0)
    assert np.all(rows @ found <= limits + 1e-8)
    assert float(cost @ found) == pytest.approx(expected, abs=1e-8)


def test_nothing_to_pay_for_is_zero() -> None:
    assert minimise([1.0, 2.0], [[1.0, 1.0]], [3.0]).tolist() == [0.0, 0.0]


def test_many_equal_ways_end() -> None:
    """Ties everywhere, where a careless rule goes round in circles."""
    found = minimise(
        [0, 0, 0, 1], [[-1, -1, -1, 0], [1, 1, 1, -1], [1, 1, 1, -1], [1, 0, 0, 0]], [-1, 0, 0, 0]
    )
    assert found[3] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cost", "rows", "limits", "message"),
    [
        ([1.0, -1.0], [[1.0, 1.0]], [1.0], "cost 1 is -1.0"),
        ([1.0], [[1.0, 1.0]], [1.0], r"shape \(1, 2\) for 1 limits and 1 costs"),
    ],
)
def test_what_it_is_not_for(cost: list, rows: list, limits: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minimise(cost, rows, limits)
