"""A step for the simulator, from an access trace."""

from __future__ import annotations

import numpy as np
import pytest

from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.graph.step_model import StepModel
from tests.graph.trace_builders import make_segments


def make_trace() -> AccessTrace:
    """Two parameters (segments 0 and 1), the gradients of which are segments 2 and 3; 4 is a state."""
    rows = [
        AccessRow(0, 0, 0, 2, False, Phase.FORWARD),
        AccessRow(1, 1, 0, 3, False, Phase.FORWARD),
        AccessRow(1, 0, 0, 2, False, Phase.FORWARD),
        AccessRow(2, 1, 0, 3, False, Phase.BACKWARD),
        AccessRow(3, 3, 0, 3, True, Phase.GRADIENT),
        AccessRow(4, 2, 0, 2, True, Phase.GRADIENT),
        AccessRow(5, 2, 0, 2, True, Phase.GRADIENT),
        AccessRow(6, 4, 0, 2, True, Phase.UPDATE),
    ]
    return AccessTrace.from_rows(rows, seconds=[1, 2, 3, 4, 5, 6, 7])


def make_model(**knobs: object) -> StepModel:
    segments = make_segments([2, 3, 2, 3, 2], ["parameter", "parameter", "gradient", "gradient", "state"])
    return StepModel.from_trace(make_trace(), segments, gradient_of={2: 0, 3: 1}, **knobs)  # type: ignore[arg-type]


def test_parameters_accesses_and_final_gradients_are_found() -> None:
    model = make_model(live_bytes=np.arange(6), tokens=7)
    assert model.names == ("layers.0.parameter", "layers.1.parameter")
    assert model.access_parameter.tolist() == [0, 1, 0, 1]
    assert model.access_tick.tolist() == [0, 1, 1, 2]
    assert model.gradient_tick.tolist() == [5, 3]  # a gradient that comes twice is final the second time
    assert model.num_elements.tolist() == [4, 6]  # pages of 4 bytes, bf16
    assert model.live_bytes.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.tokens == 7


def test_the_update_part_is_left_out_of_the_seconds() -> None:
    model = make_model()
    assert model.num_ticks == 6
    assert model.phase_seconds() == (3.0, 18.0)
    assert model.first_backward_tick == 2


def test_elements_can_be_given() -> None:
    assert make_model(num_elements={0: 3, 1: 5}).num_elements.tolist() == [3, 5]


def test_columns_must_fit_each_other() -> None:
    model = make_model()
    values = {name: getattr(model, name) for name in StepModel.__slots__}
    with pytest.raises(ValueError, match="2 names, 1 sizes"):
        StepModel(**(values | {"num_elements": np.array([1])}))
    with pytest.raises(ValueError, match="differ in length"):
        StepModel(**(values | {"live_bytes": np.zeros(2, np.int64)}))
    with pytest.raises(ValueError, match="order of their ticks"):
        StepModel(**(values | {"access_tick": np.array([3, 2, 1, 0])}))
