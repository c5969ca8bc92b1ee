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

# Of a row's largest number: below it a number is rounding, and no pivot.
_ROUNDING = 1e-9
# By how much a row (its largest number made 1) may be missed.
_MISSED = 1e-10


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
    scale = np.abs(matrix).max(axis=1, initial=0.0)
    scale[scale == 0] = 1.0
    tableau = np.hstack((matrix / scale[:, None], np.eye(num_rows)))
    right /= scale
    reduced = np.concatenate((costs, np.zeros(num_rows)))
    basis = np.arange(num_variables, num_variables + num_rows)
    while np.any(right < -_MISSED):
        violated = np.flatnonzero(right < -_MISSED)
        row = int(violated[np.argmin(basis[violated])])
        columns = np.flatnonzero(tableau[row] < -_ROUNDING * np.abs(tableau[row]).max())
        if not len(columns):
            raise Infeasible("no point satisfies all rows")
        ratios = reduced[columns] / -tableau[row, columns]
        column = int(columns[np.argmin(ratios)])
        right[row] /= tableau[row, column]
        tableau[row] /= tableau[row, column]
        factors = tableau[:, column].copy()
        factors[row] = 0.0
        tableau -= np.outer(factors, tableau[row])
        right -= factors * right[row]
        # Rounding must not turn a cost into a gain.
        reduced = np.maximum(reduced - reduced[column] * tableau[row], 0.0)
        tableau[:, column] = 0.0
        tableau[row, column] = 1.0
        reduced[column] = 0.0
        basis[row] = column
    solution = np.zeros(num_variables + num_rows)
    solution[basis] = np.maximum(right, 0.0)
    return solution[:num_variables]
