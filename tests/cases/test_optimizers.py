"""Cases 20 to 23: the optimizer contract. Every class, schedule and habit of use equals plain torch, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests import models
from tests.cases.optimizers import OPTIMIZERS, Rms, copy_state
from tests.cases.same import Report, check_equal, check_same, manage, train, train_step


@pytest.mark.parametrize(
    ("name", "made"),
    [(name, "before") for name in OPTIMIZERS]
    + [(name, "after") for name in ("sgd momentum", "adamw amsgrad", "adagrad", "adafactor", "lion")],
)
def test_every_optimizer_equals_plain_torch(name: str, made: str) -> None:
    case, twin = models.make_cnn(), models.make_cnn()
    plain = OPTIMIZERS[name](twin.model.parameters())
    optimizer = OPTIMIZERS[name](case.model.parameters()) if made == "before" else None
    model = manage(case.model, optimizer, share=0.3)
    if optimizer is None:
        optimizer = OPTIMIZERS[name](model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    for each, its in ((twin.model, plain), (model, optimizer)):
        torch.manual_seed(0)
        train(case, each, its, range(4))
    check_equal(copy_state(plain), copy_state(optimizer), name)
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), name)
    check_equal(copy_state(plain), copy_state(optimizer), f"{name} after close")
    train(case, twin.model, plain, range(4, 6))
    train(case, model, optimizer, range(4, 6))


# torch has it since 2.9.
MUON: Any = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(MUON is None, reason=f"torch {torch.__version__} has no Muon")


@needs_muon
def test_muon_takes_whole_tensors() -> None:
    def matrices(model: Any) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2]

    def script(model: Any, report: Report) -> None:
        case = models.make_mlp()
        muon = MUON(matrices(model), lr=0.02)
        rest = torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], lr=0.1)
        for step in range(3):
            muon.zero_grad()
            rest.zero_grad()
            report("loss", train_step(case, model, step))
            muon.step()
            rest.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("optimizer_class", [Rms, pytest.param(MUON, marks=needs_muon)])
def test_a_warm_up_from_zero_does_not_hide_what_an_optimizer_is(optimizer_class: Callable[..., Any]) -> None:
    """With lr = 0 every optimizer leaves parameters alone, so a probe at that moment could take it for sliceable."""

    def script(model: Any, report: Report) -> None:
        case = models.make_mlp(width=160, depth=1)
        optimizer = optimizer_class([p for p in model.parameters() if p.dim() == 2], lr=0.05)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 2, 1))
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
            scheduler.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp(width=160, depth=1).model, script)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8),
    "cosine after warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        ],
        milestones=[3],
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.02, step_size_up=2, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


# torch 2.6 warns of what its own SequentialLR does.
@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize(("name", "tensor_lr"), [*((name, False) for name in SCHEDULERS), ("lambda", True)])
def test_schedulers_and_two_groups(name: str, tensor_lr: bool) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        lr: Any = torch.tensor(0.01) if tensor_lr else 0.01
        groups = [
            {"params": params[::2], "weight_decay": 0.1},
            {"params": params[1::2], "weight_decay": 0.0, "lr": lr * 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss = train_step(case, model, step)
            optimizer.step()
            scheduler.step(*([float(loss.detach())] if name == "plateau" else []))
            report("lr", [group["lr"] for group in optimizer.param_groups])
            report("loss", loss)
        report("opt called", getattr(optimizer, "_opt_called", None))

    check_same(lambda: models.make_mlp().model, script)


def test_a_scheduler_made_before_manage_does_not_warn() -> None:
    case = models.make_mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    model = manage(case.model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        train_step(case, model, step)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert model.pager.statistics().num_steps == 3
    model.pager.close()
