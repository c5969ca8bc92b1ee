"""Train a case with and without the pager in one of many ways, and compare every bit.

A `Setting` names one way. `train(setting, folder)` runs five steps managed, `train_plainly(setting)` the same
steps on plain PyTorch from the same seeds, and `check_equal` compares what they leave.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.checkpoint import checkpoint

import pager
from pager.config import Checks
from tests import models

NUM_STEPS = 5
NUM_MICRO_BATCHES = 4
MAX_NORM = 0.05  # below every norm that occurs, so that clipping changes the gradients

MakeOptimizer = Callable[[Iterable[Any]], Optimizer]

# Name -> (maker, state tensors per parameter). Each option that changes which states exist is on somewhere.
OPTIMIZERS: dict[str, tuple[MakeOptimizer, int]] = {
    "sgd": (functools.partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01), 1),
    "adam": (functools.partial(Adam, lr=0.01), 2),
    "adamw": (functools.partial(AdamW, lr=0.01, weight_decay=0.1), 2),
    "adagrad": (functools.partial(Adagrad, lr=0.02), 1),
    "rmsprop": (functools.partial(RMSprop, lr=0.002, momentum=0.5), 2),
}
MODELS = (
    "mlp",
    "cnn",
    "decoder",
    "attention",
    "lstm",
    "encoder_decoder",
    "called_twice",
    "outside_use",
)
TRAININGS = ("plain", "accumulate", "reentrant", "nonreentrant", "clip", "groups")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train. ``budget`` is the share of the state: parameters, gradients, optimizer states."""

    model: str = "mlp"
    optimizer: str = "adamw"
    training: str = "plain"
    budget: float = 0.25
    streams: str = "late"
    daemon: str = "inline"
    eviction: str = "belady"
    prefetch: int = 4
    home: str = "host"
    adoption: str = "given"

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)) for name in self.__dataclass_fields__)


@dataclass
class Outcome:
    """What a run leaves. Tensors are ordinary copies on the CPU, by name; deviations are counted by step."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    input_gradients: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    deviations: list[int] = field(default_factory=list)


class _Checkpointed:
    """Mixed into a module's class: its forward is recomputed in backward."""

    use_reentrant: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(super().__call__, **kwargs)  # type: ignore[misc]
        return checkpoint(forward, *args, use_reentrant=self.use_reentrant)


def _checkpointed_class(cls: type[nn.Module], use_reentrant: bool) -> type[nn.Module]:
    return type(cls.__name__, (_Checkpointed, cls), {"use_reentrant": use_reentrant})


def make_case(model: str, training: str) -> models.Case:
    """The case, with checkpointing where the training asks for it: the same object kinds, other classes."""
    if training not in ("reentrant", "nonreentrant"):
        return models.BUILDERS[model]()
    if model == "decoder":
        return models.make_decoder(training)
    case = models.BUILDERS[model]()
    for name in case.blocks:
        module = case.model.get_submodule(name)
        module.__class__ = _checkpointed_class(type(module), training == "reentrant")
    return case


def make_optimizer(setting: Setting, model: nn.Module) -> tuple[Optimizer, Any]:
    """The optimizer and the scheduler, None where there is none."""
    make, _ = OPTIMIZERS[setting.optimizer]
    if setting.training != "groups":
        return make(model.parameters()), None
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    optimizer = make(
        [{"params": matrices[::2], "lr": 0.004}, {"params": matrices[1::2] + others, "weight_decay": 0.0}]
    )
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def state_bytes(model: nn.Module, num_states: int) -> int:
    """Bytes of parameters, gradients and ``num_states`` optimizer states of each."""
    return sum(p.nbytes for p in model.parameters()) * (2 + num_states)


def knobs_of(setting: Setting, model: nn.Module, folder: Path, **checks: Any) -> dict[str, Any]:
    """The knobs of `pager.manage` for a setting; every check is on."""
    knobs: dict[str, Any] = {
        "device": "cpu",
        "page_size": "16KiB",
        "device_budget": int(setting.budget * state_bytes(model, OPTIMIZERS[setting.optimizer][1])),
        "eviction": setting.eviction,
        "prefetch_distance": setting.prefetch,
        "checks": Checks(
            streams=setting.streams, happens_before=True, poison=True, daemon=setting.daemon, **checks
        ),
    }
    if setting.home == "disk":
        knobs.update(
            host_budget=1, disk=folder, disk_budget="64MiB"
        )  # nothing but the disk is left for homes
    return knobs


def train_plainly(setting: Setting) -> Outcome:
    """Five steps on plain PyTorch."""
    case = make_case(setting.model, setting.training)
    optimizer, scheduler = make_optimizer(setting, case.model)
    return _collect(case, optimizer, _run(setting, case, optimizer, scheduler))


def train(setting: Setting, folder: Path, **checks: Any) -> tuple[Outcome, Outcome]:
    """Five steps under the pager; what is left before ``close()`` and after it."""
    case = make_case(setting.model, setting.training)
    knobs = knobs_of(setting, case.model, folder, **checks)
    if setting.adoption == "given":
        optimizer, scheduler = make_optimizer(setting, case.model)
        pager.manage(case.model, optimizer, **knobs)
    else:
        pager.manage(case.model, **knobs)
        optimizer, scheduler = make_optimizer(setting, case.model)
    handle: Any = case.model.pager
    try:
        outcome = _run(setting, case, optimizer, scheduler)
        _check_paged(setting, handle, knobs["device_budget"])
        _collect(case, optimizer, outcome)
    finally:
        handle.close()
    return outcome, _collect(case, optimizer, Outcome(outcome.losses, outcome.norms, outcome.input_gradients))


def _check_paged(setting: Setting, handle: Any, budget: int) -> None:
    statistics = handle.statistics()
    assert statistics.num_steps == NUM_STEPS
    assert statistics.peak_resident_bytes <= budget
    if setting.budget < 1:
        assert statistics.page_in_bytes > 0
        assert statistics.page_out_bytes > 0
        assert (statistics.disk_read_bytes > 0) == (setting.home == "disk")


def _run(setting: Setting, case: models.Case, optimizer: Optimizer, scheduler: Any) -> Outcome:
    outcome = Outcome()
    torch.manual_seed(7)  # once: a pager that drew random numbers would change every dropout mask
    num_micro_batches = NUM_MICRO_BATCHES if setting.training == "accumulate" else 1
    for step in range(NUM_STEPS):
        for micro_batch in range(num_micro_batches):
            args, kwargs = batch = case.make_batch(step * num_micro_batches + micro_batch)
            floats = [arg.requires_grad_() for arg in args if arg.is_floating_point()]
            loss = case.loss(case.model(*args, **kwargs), batch) / num_micro_batches
            loss.backward()
            outcome.losses.append(loss.detach().clone())
            outcome.input_gradients += [arg.grad for arg in floats if arg.grad is not None]
        if setting.training == "clip":
            outcome.norms.append(nn.utils.clip_grad_norm_(case.model.parameters(), MAX_NORM).detach().clone())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if hasattr(case.model, "pager"):
            handle: Any = case.model.pager
            outcome.deviations.append(handle.statistics().deviations)
        if step < NUM_STEPS - 1:
            optimizer.zero_grad()
    return outcome


def _collect(case: models.Case, optimizer: Optimizer, outcome: Outcome) -> Outcome:
    outcome.tensors = dict(collect(case.model, optimizer))
    return outcome


def collect(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Copies of the parameters, buffers, gradients and optimizer states by name."""
    for name, parameter in model.named_parameters():
        yield name, _copy(parameter)
        if parameter.grad is not None:
            yield f"{name}.grad", _copy(parameter.grad)
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                yield f"{name}.{key}", _copy(value)
    for name, buffer in model.named_buffers():
        yield name, _copy(buffer)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether shape, dtype, strides and all bytes are the same: -0.0 is not 0.0, and a NaN equals itself."""
    if one.shape != two.shape or one.dtype != two.dtype or one.stride() != two.stride():
        return False
    one, two = (t.contiguous().view(-1).view(torch.uint8) for t in (one, two))
    return torch.equal(one, two)


def check_equal(managed: Outcome, plain: Outcome) -> None:
    """Fail, naming the tensors, where the two differ in a bit."""
    for what in ("losses", "norms", "input_gradients"):
        pairs = list(zip(getattr(managed, what), getattr(plain, what), strict=True))
        wrong = [index for index, pair in enumerate(pairs) if not same_bits(*pair)]
        assert not wrong, f"{what} {wrong} of {len(pairs)} differ"
    assert list(managed.tensors) == list(plain.tensors)
    differing = [
        name for name, tensor in plain.tensors.items() if not same_bits(managed.tensors[name], tensor)
    ]
    assert not differing, f"{len(differing)} of {len(plain.tensors)} tensors differ: {differing[:8]}"
