"""Columns: a numpy array with a row per page or frame."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["resized"]

Scalar = TypeVar("Scalar", bound=np.generic)


def resized(column: npt.NDArray[Scalar], num_rows: int, fill: int = 0) -> npt.NDArray[Scalar]:
    """A copy of ``column`` with ``num_rows`` rows: cut off at its end, or filled there with ``fill``."""
    new = np.full(num_rows, fill, dtype=column.dtype)
    kept = min(num_rows, len(column))
    new[:kept] = column[:kept]
    return new
