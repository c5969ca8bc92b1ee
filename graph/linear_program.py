"""A linear program small enough to solve by hand: the dual simplex method on a dense tableau.

The bound of a step (`graph.bound`) has some twenty variables and fifteen rows, all costs non-negative. Then the
basis of slack variables satisfies every condition of optimality but feasibility, and the dual method walks from
there to the optimum without a first phase. A solver of a library would be one more dependency for this one file.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Infeasible", "minimise"]

FloatArray = npt.NDArray[np.float64]

# Rows and costs are expected near 1 in size; below this a number is rounding.
_EPSILON = 1e-11


class Infeasible(ValueError):
    """No point satisfies all rows."""


def minimise(cost: npt.ArrayLike, rows: npt.ArrayLike, limits: npt.ArrayLike) -> FloatArray:
    """The ``x >= 0`` that minimises ``cost @ x`` under ``rows @ x <= limits``: float64 (n,).

    ``cost``: (n,), none negative; ``rows``: (m, n); ``limits``: (m,), any sign. Ties are broken by the smallest
    index (Bland's rule), so that it ends. Raises Infeasible, and ValueError for a negative cost or for shapes
    that do not agree.
    """
    costs = np.asarray(cost, dtype=np.float64)
    matrix = np.asarray(rows, dtype=np.float64)
    right = np.array(limits, dtype=np.float64)
    if matrix.shape != (len(right), len(costs)):
        raise ValueError(f"rows have shape {matrix.shape} for {len(right)} limits and {len(costs)} costs")
    if np.any(costs < 0):
        raise ValueError(f"cost {int(np.argmin(costs))} is {costs.min()}; the dual method needs costs >= 0")
    num_rows, num_variables = matrix.shape
    tableau = np.hstack((matrix, np.eye(num_rows)))
    reduced = np.concatenate((costs, np.zeros(num_rows)))
    basis = np.arange(num_variables, num_variables + num_rows)
    while np.any(right < -_EPSILON):
        violated = np.flatnonzero(right < -_EPSILON)
        row = int(violated[np.argmin(basis[violated])])
        columns = np.flatnonzero(tableau[row] < -_EPSILON)
        if not len(columns):
            raise Infeasible("no point satisfies all rows")
        ratios = reduced[columns] / -tableau[row, columns]
        column = int(columns[np.flatnonzero(ratios <= ratios.min() + _EPSILON)[0]])
        right[row] /= tableau[row, column]
        tableau[row] /= tableau[row, column]
        factors = tableau[:, column].copy()
        factors[row] = 0.0
        tableau -= np.outer(factors, tableau[row])
        right -= factors * right[row]
        reduced -= reduced[column] * tableau[row]
        basis[row] = column
    solution = np.zeros(num_variables + num_rows)
    solution[basis] = np.maximum(right, 0.0)
    return solution[:num_variables]
