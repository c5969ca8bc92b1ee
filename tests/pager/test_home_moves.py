"""Another host budget while the model trains: which homes move, when, and that no bit changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pager import host_cap
from pager.errors import BudgetError
from pager.units import parse_size
from tests.cases.same import PAGE, state_bytes
from tests.faults.media import backward, check_equal, train_plainly
from tests.faults.moves import check_books, homes_of, manage_in_host_memory

ENGINES = [("late", "inline"), ("early", "inline"), ("late", "thread"), ("early", "thread")]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, num_steps: int
) -> list[torch.Tensor]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def check_values(model: torch.nn.Module, losses: list[torch.Tensor]) -> None:
    """As without pager."""
    model.pager.close()  # type: ignore[union-attr, operator]
    check_equal([*losses, *(param.detach() for param in model.parameters())], train_plainly(len(losses)))


@pytest.mark.parametrize(("streams", "daemon"), ENGINES)
def test_homes_go_to_the_disk_and_come_back_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: str, daemon: str
) -> None:
    checks = {"streams": streams, "daemon": daemon}
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks=checks)
    host = model.pager._runtime.host
    losses = train(model, optimizer, 0, 2)
    before = homes_of(model)
    full = host.reserved_bytes
    assert before["state", "HOST"] == 20
    model.pager.set(host_budget=full // 2)
    assert homes_of(model) == before, "not before the step boundary"
    assert model.pager.statistics().host_budget_bytes == 2 * state_bytes(model)
    losses += train(model, optimizer, 2, 1)
    assert model.pager.statistics().host_budget_bytes == model.pager.config.host_budget == full // 2
    assert full // 4 < host.reserved_bytes <= full // 2
    assert host.budget_bytes <= full // 2
    check_books(model)
    losses += train(model, optimizer, 3, 3)
    assert host.reserved_bytes <= full // 2
    model.pager.set(host_budget=2 * full)
    losses += train(model, optimizer, 6, 2)
    assert homes_of(model) == before
    check_books(model)
    losses += train(model, optimizer, 8, 2)
    check_values(model, losses)
