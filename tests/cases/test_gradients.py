"""Cases 7, 8, 12, 13, 14: gradients summed, clipped, tied, absent, and of unusual layouts; and what ``p.grad`` is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.cases.same import Report, check_same, manage, train, train_step


def make(case: models.Case) -> Callable[[], Any]:
    """A builder of equal models of the case."""
    return lambda: models.BUILDERS[case.name]().model


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("mlp", 0.25),
        ("mlp", 1.0),
        ("decoder", 0.25),
        ("decoder_reentrant", 0.25),
        ("decoder_nonreentrant", 0.25),
        ("called_twice", 0.25),
    ],
)
def test_four_backwards_per_step_are_summed(name: str, share: float) -> None:
    case = models.BUILDERS[name]()

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(4):
                report("loss", train_step(case, model, 4 * step + micro))
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_same(make(case), script, share=share)


@pytest.mark.parametrize(
    ("norm_type", "max_norm", "foreach"),
    [(2.0, 0.01, None), (2.0, 1e6, None), (2.0, 0.01, True), (1.0, 0.01, None), (float("inf"), 0.01, False)],
)
def test_clipping_after_accumulation_returns_the_same_norm(
    norm_type: float, max_norm: float, foreach: bool | None
) -> None:
    case = models.make_decoder()

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                train_step(case, model, 2 * step + micro)
            report(
                "norm",
                nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type, foreach=foreach),
            )
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_same(make(case), script, share=0.25)


def test_clipping_values_and_asking_for_the_norm() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            train_step(case, model, step)
            report(
                "norm", nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            )
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_same(make(case), script, share=0.25)


def test_tied_weights_are_one_segment_and_one_update() -> None:
    case = models.make_decoder()

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        train(case, model, optimizer, range(3), report)
        assert model.head.weight is model.embed.weight
        report("weight", model.head.weight)
        report("adam", optimizer.state[model.embed.weight]["exp_avg_sq"])

    paged = check_same(make(case), script, close=False)
    kinds = [s.kind for s in paged.pager.plan.segments if s.name.startswith(("embed.weight", "head.weight"))]
    assert sorted(kinds) == ["gradient", "parameter", "state", "state"]
    paged.pager.close()
    assert paged.head.weight is paged.embed.weight


class Sometimes(nn.Module):
    """Uses its second layer only where ``use`` says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(96, 96)
        self.second = nn.Linear(96, 96)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.use else x


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_a_parameter_unused_in_one_step_and_used_in_the_next(
    set_to_none: bool, optimizer_class: type
) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = optimizer_class(model.parameters(), lr=0.01, weight_decay=0.1)
        for step, use in enumerate([True, False, True, False, False, True]):
            model.use = use
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = model(torch.full((2, 96), 0.1 * step)).square().sum()
            loss.backward()
            report("loss", loss)
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()
            report("weights", list(model.parameters()))

    check_same(Sometimes, script)


class Unusual(nn.Module):
    """Parameters of layouts that are not a plain matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.transposed = nn.Parameter(torch.randn(80, 96).t())
        self.strided = nn.Parameter(torch.randn(64, 200)[:, ::2])
        self.offset = nn.Parameter(torch.randn(20_000)[37:9037])
        self.nothing = nn.Parameter(torch.randn(0, 7))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.rotation = nn.Parameter(torch.randn(50, 60, dtype=torch.complex64))
        self.odd = nn.Parameter(torch.randn(14_411, 3))
        self.single = nn.Parameter(torch.randn(1))
        self.precise = nn.Parameter(torch.randn(70, 70, dtype=torch.float64))
        conv: Any = nn.Conv2d(16, 32, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        volume: Any = nn.Conv3d(4, 16, 4)
        self.volume = volume.to(memory_format=torch.channels_last_3d)

    def forward(self, x: Tensor) -> Tensor:
        total = (x[:80] @ self.transposed.t()).sum() + (self.strided * x[:100]).square().mean()
        total = total + self.offset.sin().sum() * self.scalar + self.nothing.sum() + self.single.sum()
        total = (
            total
            + (self.rotation * 1j * torch.view_as_complex(x[:60, None].expand(60, 2).contiguous()))
            .abs()
            .sum()
        )
        total = total + self.odd.square().mean() + self.precise.cos().sum().float()
        total = (
            total
            + self.conv(x[: 16 * 36].view(1, 16, 6, 6).contiguous(memory_format=torch.channels_last))
            .square()
            .mean()
        )
        return total + self.volume(x[:864].view(1, 4, 6, 6, 6)).abs().mean()


@pytest.mark.parametrize(
    ("name", "share"), [("sgd", 0.3), ("adam", 0.3), ("adam", 1.0), ("adagrad", 0.3), ("rmsprop", 0.3)]
)
def test_unusual_parameters(name: str, share: float) -> None:
    optimizers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.01),
        "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
        "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    }

    def script(model: Any, report: Report) -> None:
        optimizer = optimizers[name](list(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 1000) * (step + 1))
            loss.backward()
            report("loss", loss)
            for key, param in model.named_parameters():
                report(f"{key} strides", (param.shape, param.stride(), param.is_contiguous(), param.dtype))
                assert param.grad is not None
                report(f"{key} grad", param.grad)
            optimizer.step()

    paged = check_same(Unusual, script, share=share)
    assert paged.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert paged.transposed.stride() == Unusual().transposed.stride()


def test_the_gradient_of_a_parameter_can_be_read_assigned_and_deleted() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        weight = model[2].weight
        report("before", weight.grad is None)
        train_step(case, model, 0)
        grad = weight.grad
        report(
            "identity",
            (grad is weight.grad, type(grad).__name__ != "Parameter", grad.requires_grad, grad.is_leaf),
        )
        report("strides", (grad.shape, grad.stride(), grad.device.type, grad.dtype))
        report("grad", grad)
        grad.mul_(2)
        weight.grad += 1
        report("in place", weight.grad)
        report("through the name", grad)
        weight.grad = torch.full_like(weight, 0.5)
        report("assigned", weight.grad)
        report("the old one is apart", grad)
        train_step(case, model, 1)
        report("accumulated on it", weight.grad)
        weight.grad.zero_()
        report("zeroed", weight.grad)
        del weight.grad
        report("deleted", weight.grad is None)
        train_step(case, model, 2)
        report("again", weight.grad)
        weight.grad = weight.grad * 2
        report("from itself", weight.grad)
        weight.grad.data.add_(1)
        weight.grad.detach_()
        report("through data", weight.grad)
        weight.grad = None
        report("none", weight.grad is None)
        with pytest.raises(RuntimeError):
            weight.grad = torch.zeros(3)
        with pytest.raises(TypeError):
            weight.grad = "text"

    check_same(make(case), script)


def test_gradients_used_after_zero_grad_keep_their_values() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        train_step(case, model, 0)
        views = [p.grad[:3] for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(model[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        train_step(case, model, 1)
        report("views", views)
        report("norm", norm)

    check_same(make(case), script, share=1.0)


def test_create_graph_keeps_gradients_differentiable() -> None:
    case = models.make_mlp(depth=2)

    def make_small() -> Any:
        return models.make_mlp(depth=2).model

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            batch = case.make_batch(step)
            loss = case.loss(model(*batch[0]), batch)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            (loss + 0.1 * penalty).backward()
            report("loss", loss)
            report("penalty", penalty)
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_same(make_small, script)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_backward_with_create_graph() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(torch.full((2, 96), 0.3 + step)).square().sum()
            loss.backward(create_graph=True)
            report("grads", [p.grad for p in model.parameters()])
            penalty = sum(p.grad.square().sum() for p in model.parameters())
            more = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
            report("second", list(more))
            optimizer.step()
            report("weights", list(model.parameters()))

    check_same(Sometimes, script)


@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant"])
def test_autograd_grad_with_respect_to_paged_parameters(checkpointing: str) -> None:
    case = models.make_decoder(checkpointing)

    def script(model: Any, report: Report) -> None:
        batch = case.make_batch(0)
        loss = case.loss(model(*batch[0]), batch)
        extra = nn.Parameter(torch.ones(3))
        params = [*model.parameters(), extra]
        report("grads", list(torch.autograd.grad(loss, params, allow_unused=True)))
        report("nothing accumulated", [p.grad for p in params])
        loss = case.loss(model(*batch[0]), batch)
        report("zeros", list(torch.autograd.grad(loss, params, materialize_grads=True)))
        loss = case.loss(model(*batch[0]), batch)
        with pytest.raises(RuntimeError, match="allow_unused"):
            torch.autograd.grad(loss, params)

    check_same(lambda: models.make_decoder(checkpointing).model, script, share=0.25)


def test_hooks_on_parameters_fire_as_before() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        seen: list[str] = []
        weight = model[2].weight
        handle = weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"post {p.grad is not None}"))
        report("loss", train_step(case, model, 0))
        report("grad", weight.grad)
        handle.remove()
        train_step(case, model, 1)
        report("grad", weight.grad)
        report("seen", seen)

    check_same(make(case), script)


def test_an_optimizer_step_inside_a_gradient_hook() -> None:
    """A user's own optimizer-in-backward: a hook reads and frees the gradient as soon as it is there."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        def update(param: Any) -> None:
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.1)
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)
        for step in range(3):
            report("loss", train_step(case, model, step))
        report("weights", list(model.parameters()))

    check_same(make(case), script)


def test_a_gradient_of_zero_size_batches_and_of_functional_calls() -> None:
    def script(model: Any, report: Report) -> None:
        F.linear(torch.zeros(0, 96), model.first.weight).sum().backward()
        report("zero batch", model.first.weight.grad)
        weights = {name: param * 2 for name, param in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, torch.ones(2, 96)).sum()
        loss.backward()
        report("functional_call", [p.grad for p in model.parameters()])

    check_same(Sometimes, script)


def test_gradients_that_nobody_asked_for_take_no_pages() -> None:
    model = manage(Sometimes())
    model.first.requires_grad_(False)
    model(torch.ones(2, 96)).sum().backward()
    assert model.first.weight.grad is None
    assert model.second.weight.grad is not None
    model.pager.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_frozen_parameter_with_a_gradient_is_stepped(when: str) -> None:
    """Optimizers look at gradients alone."""

    def make_model() -> Any:
        model = models.BUILDERS["mlp"]().model
        model.get_parameter("0.weight").requires_grad_(False)
        if when == "before":
            frozen = model.get_parameter("0.weight")
            frozen.grad = torch.ones_like(frozen)
        return model

    def script(model: Any, report: Report) -> None:
        frozen = model.get_parameter("0.weight")
        if when == "after":
            frozen.grad = torch.ones(frozen.shape)
        optimizer = adamw(model)
        for step in range(3):
            x = torch.full((2, frozen.shape[1]), float(step + 1))
            model(x).square().mean().backward()
            optimizer.step()
            report("frozen", frozen.detach().clone())
            report("its gradient", frozen.grad.clone())
        report("states", [dict(optimizer.state[param]) for param in model.parameters()])

    check_same(make_model, script)
