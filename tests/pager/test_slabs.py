"""What the arena may take, before anything is placed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pager.config import Config
from pager.model_checks import sort_parameters
from pager.optim.adopted import UNIT_BYTES
from pager.slabs import known_arena_bytes

BATCH, WIDTH = 4096, 256
LEFT = 2**30


class Budget:
    """Leaves what activations do not take."""

    def arena_bytes(self, activation_bytes: int | None) -> int:
        return LEFT - (activation_bytes or 0)


def known(inputs: Any, *, is_simulated: bool = False) -> int:
    """For three layers on a device that is a CPU by another name."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    config = Config(example_inputs=inputs, page_size="16KiB")
    device: Any = SimpleNamespace(is_simulated=is_simulated, torch_device=torch.device("cpu"))
    budget: Any = Budget()
    return known_arena_bytes(model, sort_parameters(model, config.page_bytes), config, budget, device)


def test_it_leaves_what_a_step_without_data_takes() -> None:
    found = known((torch.zeros(BATCH, WIDTH),))
    assert found % 2**14 == 0
    output = BATCH * WIDTH * 4
    activations = LEFT - found - 4 * UNIT_BYTES - 2 * WIDTH * WIDTH * 4
    assert 3 * output <= activations <= 6 * output, (
        "three layers keep one for backward, and one or two are in use"
    )
    assert known({"input": torch.zeros(BATCH, WIDTH)}) == found
    assert known((torch.zeros(2 * BATCH, WIDTH),)) < found


def test_where_none_can_be_run_nothing_is_known() -> None:
    assert known(None) == 0
    assert known((torch.zeros(BATCH, WIDTH + 1),)) == 0
    assert known((torch.zeros(BATCH, WIDTH),), is_simulated=True) == 0
