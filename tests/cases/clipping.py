"""Clipping a managed and an ordinary model alike, and what a user may hold of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.pager.optim.waiting import weight

MAX_NORM = 1e-3  # below every norm that occurs


def clip(model: Any, max_norm: float = MAX_NORM, **options: Any) -> Tensor:
    """Clip a managed model by its handle, and an ordinary one by torch."""
    if hasattr(model, "pager"):
        norm: Tensor = model.pager.clip_grad_norm_(max_norm, **options)
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False, **options)
    return norm


def owed(model: Any) -> list[Any]:
    """The gradients whose scaling is put off; none of a model that is not managed."""
    slots = [p._pager.gradient for p in model.parameters() if hasattr(p, "_pager")]
    return [slot for slot in slots if slot.scale is not None]


def expect_owed(model: Any) -> None:
    """Else a corner shows nothing."""
    if hasattr(model, "pager"):
        assert owed(model), "nothing is put off"


def numpy_of(gradient: Any) -> Tensor:
    """A copy that was taken by a raw pointer."""
    return torch.from_numpy(gradient.numpy().copy())


HELD: dict[str, Callable[[Any], Any]] = {
    "gradient": lambda m: weight(m).grad,
    "row": lambda m: weight(m).grad[3],
    "data": lambda m: weight(m).grad.data,
    "numpy": lambda m: torch.from_numpy(weight(m).grad.numpy()),
}


class Halves(torch.optim.SGD):
    """Not torch's own, and it writes to the gradients it is given."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return super().step(closure)
