"""A model whose updates wait, and what a user may do meanwhile: on it and on an ordinary one, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pager.config import Checks
from tests.cases.same import Report, check_same

WIDTH = 96
NUM_LAYERS = 6
CHECKS = Checks(streams="late", happens_before=True, poison=True, daemon="inline")
# With the smaller one slot and streaming parameters, with the larger two and parameters that stay.
BUDGETS = ("320KiB", "608KiB")
# The same shares of a larger model, where several threads hold pages at once.
ROOMY_LAYERS = 10
ROOMY_BUDGETS = ("528KiB", "992KiB")


class Net(nn.Module):
    """Layers of three pages each, (batch, WIDTH) in and out; a bias that stays an ordinary tensor."""

    def __init__(self, width: int = WIDTH, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.bias = nn.Parameter(torch.randn(width))
        self.used = num_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.used]:
            x = torch.tanh(layer(x))
        return x + self.bias


def make_net(width: int = WIDTH, num_layers: int = NUM_LAYERS) -> Net:
    """The same model each time."""
    torch.manual_seed(0)
    return Net(width, num_layers)


def make_roomy_net() -> Net:
    """For `ROOMY_BUDGETS`."""
    return make_net(num_layers=ROOMY_LAYERS)


def batch(step: int) -> torch.Tensor:
    """The input of a step."""
    return torch.linspace(-1, 1, WIDTH).repeat(2, 1) * (step + 1)


def backward(model: Any, step: int) -> torch.Tensor:
    """Forward and backward; the loss."""
    loss: torch.Tensor = model(batch(step)).square().sum()
    loss.backward()
    return loss


def make_adamw(model: Any) -> torch.optim.Optimizer:
    """What most corners use."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def pending(model: Any) -> list[Any]:
    """The bindings whose updates wait; none of a model that is not managed."""
    return [p._pager for p in model.parameters() if hasattr(p, "_pager") and p._pager.pending is not None]


def expect_waiting(model: Any) -> None:
    """Else the corner shows nothing."""
    if hasattr(model, "pager"):
        assert pending(model), "no update waits"


def optimizer_state(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """The states of all parameters, read one by one."""
    return [dict(optimizer.state[param]) for param in model.parameters()]


Corner = Callable[[Any, torch.optim.Optimizer, Report], Any]


def check_corner(
    corner: Corner,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = make_adamw,
    *,
    expects_waiting: bool = True,
    budgets: tuple[str, ...] = BUDGETS,
    steps_after: int = 2,
    make_model: Callable[[], Net] = make_net,
) -> None:
    """Two steps, the corner, two more; it may give back another optimizer to go on with.

    With the larger budget one step after the corner is enough, since what the second adds is the same for all; and so
    it is (``steps_after``) where the corner goes on training by itself, or only reads.
    """

    def script(model: Any, report: Report, last: int) -> None:
        optimizer = make_optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            report("loss", backward(model, step))
            optimizer.step()
        if expects_waiting:
            expect_waiting(model)
        optimizer = corner(model, optimizer, report) or optimizer
        for step in range(2, last):
            report("loss", backward(model, step))
            optimizer.step()
            optimizer.zero_grad()
        report("states", optimizer_state(model, optimizer))

    for budget in budgets:
        last = 2 + steps_after if budget in (BUDGETS[0], ROOMY_BUDGETS[0]) else 3
        check_same(make_model, functools.partial(script, last=last), device_budget=budget, checks=CHECKS)


def weight(model: Any, index: int = 3) -> Any:
    """A paged parameter that has its home in host memory with both budgets."""
    return model.layers[index].weight
