"""Equality beyond the common table: dtypes, variants of optimizers, clipping, scaling, a user's own reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import pager
from pager.config import Checks
from tests import models
from tests.equality.training import collect, same_bits, state_bytes

NUM_STEPS = 5
LIMIT = 1e-3  # below every norm of the gradients here

# What one run shows, by name.
Seen = dict[str, Tensor]
Loop = Callable[[models.Case, Optimizer, Seen], None]


def check_both(
    make_optimizer: Callable[[Any], Optimizer],
    loop: Loop,
    *,
    make_case: Callable[[], models.Case] = models.make_mlp,
    budget: float = 0.25,
    num_states: int = 2,
) -> Seen:
    """Run ``loop`` without the pager and with it, and fail where what they show or leave differs in a bit."""
    shown: list[Seen] = []
    for managed in (False, True):
        case = make_case()
        optimizer = make_optimizer(case.model.parameters())
        if managed:
            pager.manage(
                case.model,
                optimizer,
                device="cpu",
                page_size="16KiB",
                device_budget=int(budget * state_bytes(case.model, num_states)),
                checks=Checks(streams="late", happens_before=True, poison=True, daemon="inline"),
            )
        seen: Seen = {}
        torch.manual_seed(3)
        loop(case, optimizer, seen)
        seen.update(collect(case.model, optimizer))
        if managed:
            handle: Any = case.model.pager
            statistics = handle.statistics()
            assert statistics.num_steps > 0
            assert statistics.page_out_bytes > 0
            handle.close()
        shown.append(seen)
    plain, paged = shown
    assert list(plain) == list(paged)
    assert [name for name in plain if not same_bits(plain[name], paged[name])] == []
    return plain


def forward_backward(case: models.Case, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The loss of one batch, after its backward."""
    args, kwargs = case.make_batch(step)
    batch = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args), kwargs
    loss = case.loss(case.model(*batch[0], **kwargs), batch)
    loss.backward()
    return loss.detach().clone()


def plain_loop(
    case: models.Case, optimizer: Optimizer, seen: Seen, dtype: torch.dtype = torch.float32
) -> None:
    for step in range(NUM_STEPS):
        seen[f"loss {step}"] = forward_backward(case, step, dtype)
        optimizer.step()
        if step < NUM_STEPS - 1:
            optimizer.zero_grad()


def note_gradients(model: nn.Module, seen: Seen, when: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            seen[f"{when} {name}"] = parameter.grad.detach().clone()


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype, implementation: str) -> None:
    def make_case() -> models.Case:
        case = models.make_mlp(width=128)
        case.model.to(dtype)
        return case

    # The usual eps of 1e-8 is zero in float16.
    chosen: dict[str, Any] = {} if implementation == "loop" else {implementation: True}
    make = functools.partial(AdamW, lr=0.01, eps=1e-4, **chosen)
    plain = check_both(make, functools.partial(plain_loop, dtype=dtype), make_case=make_case)
    assert plain["0.weight"].dtype is dtype
    assert torch.isfinite(plain["0.weight"]).all()


VARIANTS: dict[str, tuple[Callable[[Any], Optimizer], int]] = {
    "adamw-foreach": (functools.partial(AdamW, foreach=True), 2),
    "adamw-fused": (functools.partial(AdamW, fused=True), 2),
    "adamw-amsgrad": (functools.partial(AdamW, amsgrad=True), 3),
    "adamw-amsgrad-fused": (functools.partial(AdamW, amsgrad=True, fused=True), 3),
    "adamw-tensor-lr": (functools.partial(AdamW, lr=torch.tensor(0.01)), 2),
    "adam-foreach": (functools.partial(Adam, foreach=True, weight_decay=0.01), 2),
    "adam-maximize": (functools.partial(Adam, maximize=True), 2),
    "sgd": (functools.partial(SGD, lr=0.1), 0),
    "sgd-nesterov-foreach": (functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True), 1),
    "sgd-dampening-fused": (functools.partial(SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True), 1),
    "adagrad-foreach": (
        functools.partial(Adagrad, foreach=True, initial_accumulator_value=0.1, lr_decay=0.1),
        1,
    ),
    "adagrad-fused": (functools.partial(Adagrad, fused=True), 1),
    "rmsprop-centered": (functools.partial(RMSprop, lr=0.001, momentum=0.9, centered=True), 3),
    "rmsprop-foreach": (functools.partial(RMSprop, lr=0.001, foreach=True), 1),
    "adadelta": (functools.partial(torch.optim.Adadelta, lr=1.0), 2),
    "adamax": (functools.partial(torch.optim.Adamax, lr=0.01), 2),
    "nadam": (functools.partial(torch.optim.NAdam, lr=0.01), 2),
    "radam": (functools.partial(torch.optim.RAdam, lr=0.01), 2),
    "asgd": (functools.partial(torch.optim.ASGD, lr=0.01), 1),
    "rprop": (functools.partial(torch.optim.Rprop, lr=0.01), 2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_implementations_and_options(name: str) -> None:
    make, num_states = VARIANTS[name]
    # A unit of the update is a page of each of the unit's tensors; SGD alone has too few for a quarter.
    plain = check_both(make, plain_loop, num_states=num_states, budget=0.25 if num_states else 0.5)
    assert sum(name.startswith("0.weight.") for name in plain) >= 1 + num_states


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(norm_type: float, foreach: bool | None) -> None:
    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        for step in range(3):
            optimizer.zero_grad()
            forward_backward(case, step)
            total = nn.utils.clip_grad_norm_(
                case.model.parameters(), LIMIT, norm_type=norm_type, foreach=foreach
            )
            seen[f"total {step}"] = total.detach().clone()
            note_gradients(case.model, seen, f"clipped {step}")
            optimizer.step()

    plain = check_both(AdamW, loop)
    assert plain["total 0"] > LIMIT


@pytest.mark.parametrize("foreach", [None, True])
def test_clip_grad_value(foreach: bool | None) -> None:
    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        for step in range(3):
            optimizer.zero_grad()
            forward_backward(case, step)
            nn.utils.clip_grad_value_(case.model.parameters(), 1e-4, foreach=foreach)
            note_gradients(case.model, seen, f"clipped {step}")
            optimizer.step()

    plain = check_both(AdamW, loop)
    assert max(float(plain[name].abs().max()) for name in plain if name.startswith("clipped")) <= 1.001e-4


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through", ["optimizer", "model", "hand"])
def test_gradients_of_every_step(through: str, set_to_none: bool) -> None:
    def zero(case: models.Case, optimizer: Optimizer) -> None:
        if through != "hand":
            (optimizer if through == "optimizer" else case.model).zero_grad(set_to_none=set_to_none)
            return
        for parameter in case.model.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        for step in range(NUM_STEPS):
            zero(case, optimizer)
            note_gradients(case.model, seen, f"zeroed {step}")
            seen[f"loss {step}"] = forward_backward(case, step)
            note_gradients(case.model, seen, f"gradient {step}")
            optimizer.step()
            note_gradients(case.model, seen, f"after {step}")

    plain = check_both(AdamW, loop)
    assert ("zeroed 1 0.weight" in plain) == (not set_to_none)


@pytest.mark.parametrize("fused", [False, True])
def test_gradscaler(fused: bool) -> None:
    """A step whose gradients overflow is skipped, the scale halves, and the rest goes on equal."""

    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            args, _ = batch = case.make_batch(step)
            with torch.autocast("cpu", torch.bfloat16):
                output = case.model(*args)
            loss = case.loss(output, batch)
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if step % 2 and not fused:
                scaler.unscale_(optimizer)
                seen[f"norm {step}"] = (
                    nn.utils.clip_grad_norm_(case.model.parameters(), 0.05).detach().clone()
                )
            scaler.step(optimizer)
            scaler.update()
            seen[f"scale {step}"] = torch.tensor(scaler.get_scale())
            seen[f"weight {step}"] = next(case.model.parameters()).detach().clone()

    plain = check_both(functools.partial(AdamW, lr=0.01, fused=fused), loop)
    assert plain["scale 2"] < plain["scale 1"]
    assert same_bits(plain["weight 1"], plain["weight 2"])


def test_a_users_own_reads_and_writes() -> None:
    """An average of the weights, a norm, a penalty in the loss, a projection after the step."""

    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        average = {name: p.detach().clone() for name, p in case.model.named_parameters()}
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            args, _ = batch = case.make_batch(step)
            penalty = torch.stack([p.square().sum() for p in case.model.parameters()]).sum()
            loss = case.loss(case.model(*args), batch) + 1e-3 * penalty
            loss.backward()
            seen[f"loss {step}"] = loss.detach().clone()
            optimizer.step()
            with torch.no_grad():
                for name, parameter in case.model.named_parameters():
                    average[name].lerp_(parameter, 0.1)
                    if parameter.dim() > 1:
                        parameter.mul_(parameter.norm().clamp(max=5.0) / parameter.norm())
                    seen[f"norm {step} {name}"] = parameter.norm()
                case.model[0].weight.data.clamp_(-0.3, 0.3)  # type: ignore[index]
        seen.update({f"average {name}": value for name, value in average.items()})

    plain = check_both(AdamW, loop)
    assert "average 0.weight" in plain


def test_gradients_of_gradients() -> None:
    """A gradient penalty: backward through autograd.grad with create_graph."""

    def loop(case: models.Case, optimizer: Optimizer, seen: Seen) -> None:
        weights = [p for p in case.model.parameters() if p.dim() > 1]
        for step in range(3):
            optimizer.zero_grad()
            args, _ = batch = case.make_batch(step)
            loss = case.loss(case.model(*args), batch)
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            penalty = torch.stack([g.square().sum() for g in gradients]).sum()
            (loss + penalty).backward()
            seen[f"penalty {step}"] = penalty.detach().clone()
            optimizer.step()

    plain = check_both(AdamW, loop, budget=0.5)
    assert plain["penalty 0"] > 0
