"""Optimizers that cannot be managed, or not with this model, are refused before anything moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from tests import models
from tests.cases.optimizers import Coupled, Noisy
from tests.cases.refusals import adamw, check_refused
from tests.cases.same import CHECKS, batch_loss, check_equal, check_ordinary, manage, train


def test_an_optimizer_of_another_model() -> None:
    other = models.make_mlp(seed=9).model
    optimizer = adamw(other)
    check_refused(models.make_mlp, pager.ConfigError, "none of the 10 parameters of AdamW", optimizer)


@pytest.mark.parametrize(("value", "name"), [("adamw", "str"), (3, "int"), (torch.optim.AdamW, "type")])
def test_something_else_as_optimizer(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"optimizer is a {name}"):
        manage(models.make_mlp().model, value)


def test_an_optimizer_with_parameters_of_this_and_of_an_unmanaged_model() -> None:
    """Supported: its other parameters stay ordinary."""
    case, twin = models.make_mlp(), models.make_mlp()

    def script(model: Any) -> list[Tensor]:
        extra = nn.Parameter(torch.linspace(0, 1, 9216).view(96, 96))
        optimizer = torch.optim.AdamW([*model.parameters(), extra], lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            (batch_loss(case, model, step) + extra.square().sum()).backward()
            optimizer.step()
        return [extra.detach()]

    model = manage(case.model)
    check_equal(script(twin.model), script(model), "the foreign parameter")
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "the model")


def test_several_disjoint_optimizers() -> None:
    case, twin = models.make_mlp(), models.make_mlp()

    def make_optimizers(model: Any) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        return [
            torch.optim.AdamW(params[:4], lr=0.01),
            torch.optim.SGD(params[4:8], lr=0.1, momentum=0.9),
            torch.optim.RMSprop(params[8:], lr=0.001),
        ]

    def run(model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            batch_loss(case, model, step).backward()
            for optimizer in optimizers[: 2 + step % 2]:
                optimizer.step()

    optimizers = make_optimizers(case.model)
    model = manage(case.model, optimizers)
    run(model, optimizers)
    run(twin.model, make_optimizers(twin.model))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "three optimizers")


def test_overlapping_optimizers_are_refused() -> None:
    def overlapping(model: Any) -> list[torch.optim.Optimizer]:
        params = list(model.parameters())
        return [torch.optim.SGD(params[:5], lr=0.1), torch.optim.SGD(params[4:], lr=0.1)]

    check_refused(models.make_mlp, pager.ConfigError, r"two optimizers hold 4\.weight", overlapping)


def test_a_second_optimizer_over_the_same_parameters_is_refused_at_its_step() -> None:
    case = models.make_mlp()
    first = adamw(case.model)
    model = manage(case.model, first)
    second = adamw(model)
    batch_loss(case, model, 0).backward()
    with pytest.raises(pager.ConfigError, match="two optimizers hold"):
        second.step()
    first.step()
    model.pager.close()


@pytest.mark.parametrize("optimizer_class", [Coupled, Noisy])
def test_optimizers_that_couple_tensors_are_refused(
    optimizer_class: Callable[[Any], torch.optim.Optimizer],
) -> None:
    check_refused(
        models.make_mlp,
        pager.ConfigError,
        f"{optimizer_class.__name__} cannot be managed.*one at a time",
        lambda model: optimizer_class(model.parameters()),
    )


def test_lbfgs_is_refused() -> None:
    check_refused(
        models.make_mlp,
        pager.ConfigError,
        r"LBFGS cannot be managed: its step\(\) needs a closure.*one direction for all parameters.*Use an optimizer",
        lambda model: torch.optim.LBFGS(model.parameters()),
    )


def test_a_coupled_optimizer_made_later_is_refused_at_its_first_step_and_nothing_is_lost() -> None:
    case = models.make_mlp()
    expected = copy.deepcopy(case.model.state_dict())
    model = manage(case.model)
    optimizer = Coupled(model.parameters())
    batch_loss(case, model, 0).backward()
    with pytest.raises(pager.ConfigError, match="Coupled cannot be managed"):
        optimizer.step()
    model.pager.close()
    check_equal(dict(expected), dict(model.state_dict()), "untouched")


def test_a_failed_manage_keeps_gradients_and_optimizer_state() -> None:
    case, twin = models.make_mlp(), models.make_mlp()
    optimizers = [adamw(case.model), adamw(twin.model)]
    for model, optimizer in zip([case.model, twin.model], optimizers, strict=True):
        train(case, model, optimizer, range(2))
    late = nn.Parameter(torch.ones(96, 96))
    case.model.register_parameter("late", late)
    with pytest.raises(pager.ConfigError, match="Coupled"):
        manage(case.model, [optimizers[0], Coupled([late])])
    del case.model.late
    check_ordinary(case.model)
    check_equal(
        [p.grad for p in twin.model.parameters()], [p.grad for p in case.model.parameters()], "gradients"
    )
    check_equal(optimizers[1].state_dict(), optimizers[0].state_dict(), "optimizer state")
    for model, optimizer in zip([case.model, twin.model], optimizers, strict=True):
        optimizer.step()
        train(case, model, optimizer, range(2, 4))
    check_equal(dict(twin.model.state_dict()), dict(case.model.state_dict()), "trained on")


def test_the_first_model_is_free_after_the_failure_of_a_second() -> None:
    with pytest.raises(pager.ConfigError, match="Coupled"):
        manage(*(lambda m: (m, Coupled(m.parameters())))(models.make_mlp().model))
    model = manage(models.make_mlp().model, checks=CHECKS)
    assert model.pager.statistics().num_steps == 0
    model.pager.close()
