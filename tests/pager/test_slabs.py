"""The arena once activations are known: what is left to it, and to what stands beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pager import slabs
from pager.optim.adopted import UNIT_BYTES
from pager.page_table import Home
from pager.policies.staying import lent_gradient_bytes

MIB = 2**20
LEFT = 4096 * MIB
LARGEST = 100 * MIB


class Boundary:
    """Notes what the arena is to be."""

    largest_parameter_bytes = LARGEST

    def __init__(self) -> None:
        self.fits: list[tuple[int, int]] = []

    def fit_arena(self, target_bytes: int, *, least_bytes: int) -> None:
        """As `StepBoundary.fit_arena`."""
        self.fits.append((target_bytes, least_bytes))


def fit(activation_bytes: int | None, *, lends: bool, need: int = 0) -> list[tuple[int, int]]:
    boundary: Any = Boundary()
    planner: Any = SimpleNamespace(
        peak_activation_bytes=activation_bytes, largest_tick=lambda: (need, ["weight"])
    )
    table: Any = SimpleNamespace(home=np.array([Home.DEVICE, Home.HOST, Home.DEVICE]), num_pages=2)
    budget: Any = SimpleNamespace(arena_bytes=lambda beside: LEFT - beside)
    slabs.fit_activations(boundary, planner, table, SimpleNamespace(page_size=MIB), budget, lends=lends)  # type: ignore[arg-type]
    return list(boundary.fits)


def test_without_activations_nothing_is_known() -> None:
    assert fit(None, lends=True) == []


@pytest.mark.parametrize("lends", [False, True])
def test_what_activations_gradients_and_units_take_is_not_the_arenas(lends: bool) -> None:
    """One page has its home on the device; four of the largest tensor are the least to stream at all."""
    activations = 1024 * MIB
    beside = activations + 2 * LARGEST + 4 * UNIT_BYTES
    lent = lent_gradient_bytes(activations, LEFT - beside) if lends else 0
    assert (lent > 0) == lends
    assert fit(activations, lends=lends) == [(LEFT - beside - lent, MIB + 4 * LARGEST)]


def test_the_hungriest_operation_has_room() -> None:
    ((_, least),) = fit(0, lends=False, need=999 * MIB)
    assert least == MIB + 999 * MIB
