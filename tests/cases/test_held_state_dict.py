"""A state dict that the user holds while training goes on shows the newest step, as plain torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    return model, KINDS[kind](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["320KiB", "600KiB", "1MiB"])
def test_a_held_state_dict_follows_the_steps(kind: str, budget: str) -> None:
    plain, plain_optimizer = make(kind)
    model, optimizer = make(kind)
    checks = Checks(daemon="inline", poison=True, streams="late", happens_before=True, page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget=budget, page_size="16KiB", checks=checks)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        step(m, o)
    held, held_states = model.state_dict(), optimizer.state_dict()["state"]
    for _ in range(2):
        for m, o in ((plain, plain_optimizer), (model, optimizer)):
            step(m, o)
        for name, value in plain.state_dict().items():
            assert torch.equal(held[name], value), name
        for index, state in plain_optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(held_states[index][key]), torch.as_tensor(value)), (
                    index,
                    key,
                )
    model.load_state_dict(held)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        step(m, o)
    handle: Any = model.pager
    handle.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
