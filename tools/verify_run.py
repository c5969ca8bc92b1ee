"""Three steps of a model with and without pager, from the same seeds, and the comparison of every tensor.

The plain run is kept (on the CPU: its gradients of every step, and what it leaves). The managed run is compared as it
goes, so nothing of it is kept. Gradients are looked at by hooks on both sides, as they come: with
``update_at="backward"`` they are used up by then. Where they stay, the last step's are read from ``p.grad`` too.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import pager
from pager.graph.capture import step_loss
from pager.statistics import Statistics
from pager.tools.errors import InputError
from pager.tools.model_source import ModelSource
from pager.tools.training import bits_of

__all__ = [
    "OPTIMIZERS",
    "Comparison",
    "Masters",
    "Record",
    "TensorRow",
    "Work",
    "train_managed",
    "train_plainly",
]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
}
LOSS, GRADIENT, KEPT, PARAMETER, BUFFER, STATE = (
    *("loss", "gradient", "gradient in p.grad", "parameter", "buffer", "optimizer state"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained. ``keeps_gradients``: they are read from ``p.grad`` too."""

    source: ModelSource
    steps: int
    seed: int
    optimizer: str
    lr: float
    keeps_gradients: bool


class Observer(Protocol):
    """Who is shown every tensor of a run."""

    def see(self, kind: str, name: str, step: int, tensor: Tensor) -> None:
        """Look at ``tensor`` now: it is gone or changed later."""


class Record:
    """What a run showed: copies on the CPU, by kind and name, in order, each with its step."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}

    def see(self, kind: str, name: str, step: int, tensor: Tensor) -> None:
        """Keep a copy."""
        found = tensor.detach().clone().cpu()
        if kind == KEPT:  # the one that came is nearly always the same
            came = self.seen.get((GRADIENT, name), [(0, found)])[-1][1]
            found = came if same_bits(came, found) else found
        self.seen.setdefault((kind, name), []).append((step, found))


@dataclass(kw_only=True, slots=True)
class TensorRow:
    """One tensor in both runs, over all steps: norms (of the last time), the largest difference, and whether every bit
    was the same; ``first_step``: where it first was not.
    """

    kind: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    times: int = 0
    norm: float = 0.0
    plain_norm: float = 0.0
    max_difference: float = 0.0
    equal: bool = True
    first_step: int | None = None
    note: str = ""

    def differs(self, step: int, note: str = "") -> None:
        """Note a difference in ``step``."""
        self.equal = False
        self.note = self.note or note
        self.first_step = step if self.first_step is None else self.first_step


class Comparison:
    """A run beside a record."""

    def __init__(self, plain: Record) -> None:
        self._plain = plain
        self._rows: dict[tuple[str, str], TensorRow] = {}

    def see(self, kind: str, name: str, step: int, tensor: Tensor) -> None:
        """Compare with what the record has in this place."""
        row = self._rows.setdefault((kind, name), TensorRow(kind=kind, name=name))
        known = self._plain.seen.get((kind, name), [])
        found = tensor.detach().cpu()
        place = row.times
        row.times += 1
        row.shape, row.dtype = tuple(found.shape), str(found.dtype).removeprefix("torch.")
        row.norm = _norm(found)
        if place >= len(known) or known[place][0] != step:
            row.differs(step, "not there without pager")
            return
        plain = known[place][1]
        row.plain_norm = _norm(plain)
        if plain.shape != found.shape or plain.dtype != found.dtype:
            row.differs(step, f"{str(plain.dtype).removeprefix('torch.')} {tuple(plain.shape)} without pager")
        elif not same_bits(plain, found):
            row.differs(step)
            row.max_difference = max(row.max_difference, _max_difference(plain, found), key=_nan_is_most)

    def rows(self) -> list[TensorRow]:
        """A row for each tensor of either run, in the record's order."""
        for (kind, name), known in self._plain.seen.items():
            row = self._rows.setdefault((kind, name), TensorRow(kind=kind, name=name))
            if row.times < len(known):
                row.differs(known[row.times][0], "not there with pager")
        order = {key: place for place, key in enumerate(self._plain.seen)}
        return sorted(self._rows.values(), key=lambda row: order.get((row.kind, row.name), len(order)))


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether shape, dtype and all bytes are the same: -0.0 is not 0.0, and a NaN equals itself."""
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(bits_of(one), bits_of(two))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _max_difference(one: Tensor, two: Tensor) -> float:
    return float((one.double() - two.double()).abs().max())


def _nan_is_most(value: float) -> float:
    return float("inf") if value != value else value


def train_plainly(
    work: Work, device: torch.device, observer: Observer, *, master_from_bytes: int | None = None
) -> None:
    """The steps on plain PyTorch. ``master_from_bytes``: bf16 parameters are stepped through fp32 masters, as a loop of
    one's own does it; exact ties of tensors this large go as pager's (README). Raises InputError for a model whose
    step fails.
    """
    model = copy.deepcopy(work.source.model).to(device)
    masters = Masters(model, master_from_bytes)
    optimizer = OPTIMIZERS[work.optimizer](masters.masters, lr=work.lr)
    _seed(work.seed)
    _train(work, model, device, observer, lambda: masters.step(optimizer))
    _show_rest(model, optimizer, masters.states(optimizer), observer, work.steps)


def train_managed(work: Work, knobs: dict[str, Any], observer: Observer) -> Statistics:
    """The steps under pager with ``knobs``; its statistics. Raises what pager raises for knobs that cannot be."""
    model = copy.deepcopy(work.source.model)
    optimizer = OPTIMIZERS[work.optimizer](model.parameters(), lr=work.lr)
    example = work.source.args or work.source.kwargs
    pager.manage(model, optimizer, example_inputs=example, **knobs)
    handle: Any = model.pager
    try:
        _seed(work.seed)
        device = next(model.parameters()).device
        _train(work, model, device, observer, optimizer.step)
        _show_rest(model, optimizer, optimizer.state_dict()["state"], observer, work.steps)
        statistics: Statistics = handle.statistics()
    finally:
        handle.close()
    return statistics


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # what a model's own code may draw from


def _train(
    work: Work, model: nn.Module, device: torch.device, observer: Observer, step: Callable[[], Any]
) -> None:
    args = tuple(_to(value, device) for value in work.source.args)
    kwargs = {name: _to(value, device) for name, value in work.source.kwargs.items()}
    for number in range(1, work.steps + 1):
        model.zero_grad()
        with _shown(model, observer, number):
            loss = step_loss(model(*args, **kwargs))
            if loss is None:
                raise InputError(f"{work.source.name}: nothing in what the model returns has a gradient")
            loss.backward()
        observer.see(LOSS, "loss", number, loss)
        if work.keeps_gradients and number == work.steps:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    observer.see(KEPT, name, number, parameter.grad)
        step()


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _shown(model: nn.Module, observer: Observer, step: int) -> Iterator[None]:
    """Show each parameter's gradient as it comes."""

    def look(name: str, gradient: Tensor) -> None:
        observer.see(GRADIENT, name, step, gradient)

    hooks = [
        parameter.register_hook(functools.partial(look, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _show_rest(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    states: dict[int, dict[str, Any]],
    observer: Observer,
    step: int,
) -> None:
    """What the steps leave: parameters, buffers, the optimizer's states."""
    names = [name for name, _ in model.named_parameters()]
    ours = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            observer.see(PARAMETER if name in ours else BUFFER, name, step, value)
    for index, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                observer.see(STATE, f"{names[index]}.{key}", step, value)


@dataclass
class Masters:
    """An ordinary loop's fp32 masters of bf16 parameters; without them the parameters themselves."""

    model: nn.Module
    from_bytes: int | None
    masters: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.params = list(self.model.parameters())
        self.masters = [
            p.detach().float().requires_grad_(p.requires_grad) if self._has_master(p) else p
            for p in self.params
        ]

    def _has_master(self, parameter: Tensor) -> bool:
        return self.from_bytes is not None and parameter.dtype == torch.bfloat16

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the masters with the parameters' gradients, and round them to the parameters."""
        pairs = [
            (p, m)
            for p, m in zip(self.params, self.masters, strict=True)
            if m is not p and p.grad is not None
        ]
        for p, m in pairs:
            m.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, m in pairs:
            p.copy_(m)
            if self.from_bytes is not None and p.nbytes >= self.from_bytes:
                bits = m.view(torch.int32)
                bits[bits - (p.view(torch.int16).int() << 16) == 0x8000] -= 1

    def states(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        """The optimizer's states by index, masters among them."""
        states: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
        for index, (p, m) in enumerate(zip(self.params, self.masters, strict=True)):
            if m is not p and p.grad is not None:
                states.setdefault(index, {})["master"] = m
        return states
