"""What every measured system is to the bench, and the values all of them start from."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pager.tools.bench.job import BETAS, EPS, LR, WEIGHT_DECAY
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes

__all__ = ["Refused", "System", "Traffic", "adamw_options", "fill_module", "make_filled_model"]


class Refused(RuntimeError):
    """The system cannot do what was asked of it; the message says why."""


class Traffic(NamedTuple):
    """Since the start: bytes over the link in each direction, and seconds that the compute stood still.

    None where the system does not tell.
    """

    h2d_bytes: float | None = None
    d2h_bytes: float | None = None
    stall_seconds: float | None = None


class System(ABC):
    """A model with its optimizer, ready for steps. Made by a function of one job and one device."""

    state: str | None = None  # where it differs from job.SYSTEMS

    @abstractmethod
    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        """One training step; the loss, a scalar on the device. Raises Refused for a clip it cannot do."""

    def traffic(self) -> Traffic:
        """What moved since the start."""
        return Traffic()

    def facts(self) -> dict[str, Any]:
        """More for the row."""
        return {}

    def close(self) -> None:
        """Let go of processes and memory that would outlive this object."""
        return


def adamw_options() -> dict[str, Any]:
    """The optimizer's, the same for all."""
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


@torch.no_grad()
def fill_module(module: nn.Module, path: str, *, seed: int, dtype: str, device: torch.device) -> None:
    """Draw the parameters that ``module`` itself holds: each from a seed of its own, on ``device``, in ``dtype``.

    So all systems of one machine start from the same weights, in whatever order and wherever theirs are. A DTensor
    of one process is filled as a whole.
    """
    for name, param in module._parameters.items():
        if param is None:
            continue
        to_local = getattr(param, "to_local", None)
        local = param.detach() if to_local is None else to_local().detach()
        if isinstance(module, (nn.Linear, nn.Embedding)):
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {path}.{name}".encode()))
            values = torch.empty(tuple(local.shape), dtype=torch.float32, device=device)
            if isinstance(module, nn.Linear):
                limit = module.in_features**-0.5
                values.uniform_(-limit, limit, generator=generator)
            else:
                values.normal_(generator=generator)
            local.copy_(values.to(getattr(torch, dtype)))
        else:
            local.fill_(1.0)  # norms


def make_filled_model(sizes: ModelSizes, *, seed: int, device: torch.device) -> nn.Module:
    """An ordinary model on ``device``, filled module by module; nothing of it stands anywhere else."""
    model = make_model(sizes, seed=seed, device="meta")
    model.to_empty(device=device)
    for path, module in model.named_modules():
        fill_module(module, path, seed=seed, dtype=sizes.dtype, device=device)
    return model
