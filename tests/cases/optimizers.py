"""Optimizers of torch and of users, for the cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, after Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class Counting(torch.optim.Optimizer):
    """Keeps a step count on itself and in its groups, and warms up by it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "t": 0})
        self.num_steps = 0
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["t"] += 1
            warm = min(1.0, group["t"] / 3)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * warm)
        self.history.append(self.param_groups[0]["lr"])
        return self.num_steps


class Rms(torch.optim.Optimizer):
    """Scales each tensor's update by its own norm, as LAMB does: whole tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6) * p.norm(), alpha=group["lr"])


class Coupled(torch.optim.Optimizer):
    """Scales all gradients by their common norm: no tensor can be stepped alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in params]).norm() if params else 1
            for p in params:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Noisy(torch.optim.Optimizer):
    """Draws random numbers for each tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd loop": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd maximize": lambda params: torch.optim.SGD(
        params, lr=0.01, maximize=True, dampening=0.1, momentum=0.5
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw capturable": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, maximize=True),
    "adagrad": lambda params: torch.optim.Adagrad(
        params, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "lion": Lion,
    "counting": Counting,
    "rms": Rms,
}


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict, as it is now."""
    return copy.deepcopy(optimizer.state_dict())
