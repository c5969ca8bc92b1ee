"""``update_at="backward"``: the numbers that a step after backward gives, and a way back from what ends in between."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pager.errors import ConfigError, TornStateError
from pager.residency import Residency
from tests import models
from tests.cases.optimizers import OPTIMIZERS
from tests.cases.plainly import BUDGETS, MAKERS, Pair, checks
from tests.cases.same import check_equal, check_ordinary, copied, manage, train_step


@pytest.fixture(autouse=True)
def close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gradients of models as small as these would not be worth lending, and nothing would run beside the backward."""
    monkeypatch.setattr(Residency, "lent_bytes", lambda self: 2**20)
    yield
    Pair.close_all()


def make_mlp() -> models.Case:
    """Matrices of several pages, biases that stay ordinary."""
    return models.make_mlp(width=160, depth=2)


def make_pair(name: str = "adamw", make_case: Any = make_mlp, **knobs: Any) -> Pair:
    """An fp32 model without masters, so that plain torch is what to equal."""
    knobs = {"update_at": "backward", "master": False, "dtype": torch.float32, "checks": checks(), **knobs}
    return Pair(make_case, (MAKERS | OPTIMIZERS)[name], **knobs)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.pairwise(model=models.BUILDERS, budget=BUDGETS, planned=[True, False])
def test_equals_a_step_after_backward(model: str, budget: str, planned: bool) -> None:
    example = models.BUILDERS[model]().make_batch(0)[0] if planned else None
    pair = make_pair(make_case=models.BUILDERS[model], budget=BUDGETS[budget], example_inputs=example)
    pair.train(3)
    pair.train(1, micro_batches=3)
    pair.train(1)
    pair.close()


class Shared(nn.Module):
    """One layer inside two reentrant checkpoints: its gradient comes twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(160, 160)
        self.shared = nn.Linear(160, 160)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_comes_in_parts(micro_batches: int) -> None:
    def make_shared() -> models.Case:
        mlp = make_mlp()
        torch.manual_seed(0)
        return models.Case("shared", Shared(), mlp.make_batch, mlp.loss)

    pair = make_pair(make_case=make_shared, example_inputs=make_mlp().make_batch(0)[0])
    pair.train(4, micro_batches)
    pair.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str) -> None:
    pair = make_pair(name)
    pair.train(2)
    pair.train(1, micro_batches=2)
    pair.train(1)
    pair.close()


@pytest.mark.parametrize(
    "switches",
    [{"streams": "early"}, {"daemon": "inline"}, {"page_all": False}],
    ids=str,
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_however_the_work_is_ordered(switches: dict[str, Any], micro_batches: int) -> None:
    pair = make_pair(checks=checks(**switches))
    pair.train(4, micro_batches)
    pair.close()


def test_gradients_have_no_home() -> None:
    def host_bytes(update_at: str) -> int:
        model: Any = make_mlp().model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manage(model, optimizer, update_at=update_at)
        for step in range(2):
            optimizer.zero_grad()
            train_step(make_mlp(), model, step)
            optimizer.step()
        found: int = model.pager.statistics().host_bytes
        model.pager.close()
        return found

    assert host_bytes("backward") < 0.6 * host_bytes("step")


def test_states_on_disk(tmp_path: Path) -> None:
    for folder in ("model", "twin"):
        (tmp_path / folder).mkdir()
    pair = make_pair(disk=tmp_path / "model", host_budget=2**20)
    pair.train(3)
    assert pair.model.pager.statistics().disk_bytes > 0
    pair.close()


def test_under_autocast() -> None:
    pair = make_pair()
    for step in range(3):
        for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
            trainer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                train_step(pair.case, model, step)
            trainer.step()
    pair.close()


def test_bf16_without_masters_is_stepped_in_bf16() -> None:
    pair = make_pair(dtype=torch.bfloat16)
    pair.train(3)
    assert pair.optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16
    pair.close()


def test_hooks_on_parameters_see_and_change_gradients() -> None:
    pair = make_pair()
    seen: list[list[Tensor]] = [[], []]
    for model, notes in zip((pair.plain.model, pair.model), seen, strict=True):

        def halve(grad: Tensor, notes: list[Tensor] = notes) -> Tensor:
            notes.append(copied(grad))
            return grad * 0.5

        model.get_parameter("2.weight").register_hook(halve)
    pair.train(3)
    assert len(seen[0]) == 3
    check_equal(seen[0], seen[1], "gradients")
    pair.close()


# -- what a loop does besides ----------------------------------------------------------------------


def test_a_scheduler_sets_the_rate_of_the_next_backward() -> None:
    pair = make_pair()
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for optimizer in (pair.plain.optimizer, pair.optimizer)
    ]
    for _ in range(4):
        pair.train(1)
        for scheduler in schedulers:
            scheduler.step()
    assert pair.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 16)
    pair.close()


@pytest.mark.parametrize(
    "way", ["eval", "no_grad", "generate", "inference_mode", "state_dict", "deepcopy", "to"]
)
def test_looking_in_between_changes_nothing(way: str) -> None:
    pair = make_pair()
    for _ in range(3):
        pair.train(1)
        args = pair.case.make_batch(100)[0]
        for model in (pair.plain.model, pair.model):
            if way == "state_dict":
                model.state_dict()
            elif way == "deepcopy":
                copy.deepcopy(model)
            elif way == "to":
                model.to(torch.float32)
            elif way == "eval":
                model.eval()
                model(*args)
                model.train()
            else:
                x = args[0]
                with torch.inference_mode() if way == "inference_mode" else torch.no_grad():
                    for _ in range(4 if way == "generate" else 1):
                        x = model(x)
    pair.close()


@pytest.mark.parametrize("form", ["none", "zeros", "model", "never"])
def test_every_way_to_zero_gradients(form: str) -> None:
    pair = make_pair()
    pair.train(1)
    for step in range(1, 4):
        pair.plain.zero_grad()
        if form == "model":
            pair.model.zero_grad()
        elif form != "never":
            pair.optimizer.zero_grad(set_to_none=form == "none")
        for model in (pair.plain.model, pair.model):
            if form == "never" and model is pair.model:
                for param in model.parameters():
                    if type(param) is nn.Parameter:
                        param.grad = None
            train_step(pair.case, model, step)
        pair.plain.step()
        pair.optimizer.step()
    pair.close()


def test_zero_grad_drops_what_was_accumulated() -> None:
    pair = make_pair()
    pair.train(2)
    with pair.model.pager.accumulate():
        train_step(pair.case, pair.model, 50)
    pair.optimizer.zero_grad()
    pair.train(2)
    pair.close()


def test_a_step_without_backward_changes_nothing() -> None:
    pair = make_pair()
    pair.train(2)
    pair.plain.zero_grad()
    pair.optimizer.zero_grad()
    for _ in range(2):
        pair.plain.step()
        pair.optimizer.step()
    pair.train(1)
    pair.optimizer.zero_grad()
    pair.plain.zero_grad()
    pair.plain.step()
    pair.optimizer.step()
    pair.train(1)
    pair.close()


def test_a_step_over_accumulated_gradients_alone() -> None:
    pair = make_pair()
    for step in range(3):
        pair.plain.zero_grad()
        pair.optimizer.zero_grad()
        train_step(pair.case, pair.plain.model, step)
        with pair.model.pager.accumulate():
            train_step(pair.case, pair.model, step)
        pair.plain.step()
        pair.optimizer.step()
    pair.close()


@pytest.mark.parametrize("unfreeze", [True, False])
def test_frozen_parameters(unfreeze: bool) -> None:
    pair = make_pair(frozen=["0.weight", "2.bias"])
    pair.train(2)
    if unfreeze:
        for model in (pair.plain.model, pair.model):
            model.requires_grad_(True)
    pair.train(2)
    for model in (pair.plain.model, pair.model):
        model.get_parameter("4.weight").requires_grad_(False)
    pair.train(2, micro_batches=2)
    pair.close()


class Gated(nn.Module):
    """Uses its second layer in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        used = [0, 2] if self.calls % 2 else [0, 1, 2]
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x


@pytest.mark.parametrize("budget", BUDGETS)
def test_parameters_without_a_gradient_in_some_steps(budget: str) -> None:
    def make_gated() -> models.Case:
        mlp = make_mlp()
        torch.manual_seed(0)
        return models.Case("gated", Gated(), mlp.make_batch, mlp.loss)

    pair = make_pair(make_case=make_gated, budget=BUDGETS[budget])
    pair.train(6)
    pair.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers(order: tuple[int, int]) -> None:
    def make(params: Any) -> list[torch.optim.Optimizer]:
        params = list(params)
        return [
            torch.optim.AdamW(params[:3], lr=1e-2),
            torch.optim.SGD(params[3:], lr=0.05, momentum=0.9),
        ]

    case, twin = make_mlp(), make_mlp()
    plain_ones = make(case.model.parameters())
    model = manage(twin.model, update_at="backward")
    managed = make(model.parameters())
    for step in range(4):
        for each, optimizers in ((case.model, plain_ones), (model, managed)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            train_step(case, each, step)
            for index in order:
                optimizers[index].step()
    model.pager.close()
    check_equal(dict(case.model.state_dict()), dict(model.state_dict()), "weights")
    for plain_one, one in zip(plain_ones, managed, strict=True):
        check_equal(plain_one.state_dict()["state"], one.state_dict()["state"], "state")


def test_groups_with_their_own_values() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": params[::2], "lr": 1e-2},
            {"params": params[1::2], "lr": 1e-3, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups)

    pair = Pair(make_mlp, make, master=False, dtype=torch.float32, update_at="backward", checks=checks())
    pair.train(3)
    pair.close()


@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_given_and_one_found(given: bool) -> None:
    case, twin = make_mlp(), make_mlp()
    plain = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    model = manage(twin.model, optimizer if given else None, update_at="backward")
    for step in range(3):
        for each, one in ((case.model, plain), (model, optimizer)):
            one.zero_grad()
            train_step(case, each, step)
            one.step()
    model.pager.close()
    check_equal(dict(case.model.state_dict()), dict(model.state_dict()), "weights")


def test_another_optimizer_takes_over() -> None:
    pair = make_pair()
    pair.train(2)
    pair.optimizer = MAKERS["momentum"](list(pair.model.parameters()))
    pair.plain.optimizer = MAKERS["momentum"](pair.plain.masters)
    pair.train(3)
    pair.close()


def test_accumulate_ends_with_its_block() -> None:
    pair = make_pair()
    pair.train(1)
    accumulate = pair.model.pager.accumulate
    with pytest.raises(ValueError, match="mine"), accumulate(), accumulate():
        raise ValueError("mine")
    pair.train(2)
    with accumulate(), accumulate():
        train_step(pair.case, pair.model, 5)
    pair.optimizer.zero_grad()
    pair.train(1)
    pair.close()


def test_accumulate_does_nothing_where_the_step_updates() -> None:
    pair = make_pair(update_at="step")
    pair.train(2, micro_batches=3)
    pair.close()


def test_closing_between_backward_and_step_keeps_the_update() -> None:
    pair = make_pair()
    pair.train(2)
    pair.plain.zero_grad()
    pair.optimizer.zero_grad()
    train_step(pair.case, pair.plain.model, 7)
    train_step(pair.case, pair.model, 7)
    pair.model.pager.close()
    check_ordinary(pair.model)
    pair.plain.step()
    for param in pair.model.parameters():  # paged ones have none, they are stepped
        assert (param.grad is None) == (param.dim() == 2)
    pair.optimizer.step()
    check_equal(dict(pair.plain.model.state_dict()), dict(pair.model.state_dict()), "weights")


# -- what cannot be ----------------------------------------------------------------------------------


def test_gradients_cannot_be_looked_at() -> None:
    pair = make_pair()
    pair.train(1)
    pair.optimizer.zero_grad()
    train_step(pair.case, pair.model, 1)
    with pytest.raises(ConfigError, match=r"0.weight: .grad was asked for.*update_at='step'"):
        _ = pair.model[0].weight.grad
    with pytest.raises(ConfigError, match=r"Clipping.*update_at='step'"):
        torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0)
    pair.optimizer.step()
    pair.model.pager.close()


def test_a_scaler_is_refused() -> None:
    pair = make_pair()
    pair.train(1)
    scaler = torch.amp.GradScaler("cpu")
    pair.optimizer.zero_grad()
    args = pair.case.make_batch(3)[0]
    scaler.scale(pair.model(*args).square().mean()).backward()
    with pytest.raises(ConfigError, match=r"GradScaler.*update_at='step'"):
        scaler.step(pair.optimizer)


def test_a_second_backward_needs_accumulate() -> None:
    pair = make_pair()
    pair.train(1)
    saved = copied({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    pair.optimizer.zero_grad()
    train_step(pair.case, pair.model, 1)
    with pytest.raises(ConfigError, match=r"accumulate\(\).*example_inputs"):
        train_step(pair.case, pair.model, 2)
    check_torn(pair)
    heal(pair, saved)


@pytest.mark.parametrize("retain", [True, False])
def test_several_backwards_through_one_graph(retain: bool) -> None:
    """All but the last under ``accumulate()``; a graph that is gone through again after an update is refused."""
    pair = make_pair()
    pair.train(1)
    pair.plain.zero_grad()
    pair.optimizer.zero_grad()
    args = pair.case.make_batch(9)[0]
    plain_loss, loss = (model(*args).square().mean() for model in (pair.plain.model, pair.model))
    if retain:
        plain_loss.backward(retain_graph=True)
        with pair.model.pager.accumulate():
            loss.backward(retain_graph=True)
    plain_loss.backward()
    loss.backward()
    pair.plain.step()
    pair.optimizer.step()
    pair.train(1)
    pair.close()


def test_a_graph_from_before_an_update_is_refused() -> None:
    pair = make_pair()
    pair.train(1)
    pair.optimizer.zero_grad()
    loss = pair.model(*pair.case.make_batch(9)[0]).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises((RuntimeError, ConfigError), match=r"modified by an inplace operation|accumulate"):
        loss.backward()


# -- an exception inside backward ------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("not this gradient")


def fail_in_backward(pair: Pair, how: str) -> None:
    """A backward that ends half way: behind the last layer's update, before the first's."""
    pair.optimizer.zero_grad()
    x = pair.case.make_batch(20)[0][0]
    x = pair.model[1](pair.model[0](x))
    if how == "function":
        x = Failing.apply(x)
    else:

        def refuse(grad: Tensor) -> None:
            raise ValueError("not this gradient")

        x.register_hook(refuse)
    for layer in list(pair.model)[2:]:
        x = layer(x)
    with pytest.raises(ValueError, match="not this gradient"):
        x.square().mean().backward()


def check_torn(pair: Pair) -> None:
    """Steps and backwards are refused, reading is not."""
    assert all(value.isfinite().all() for value in copied(dict(pair.model.state_dict())).values())
    copy.deepcopy(pair.model)
    pair.model(*pair.case.make_batch(0)[0])
    for _ in range(2):
        with pytest.raises(TornStateError, match="load_state_dict"):
            pair.optimizer.step()
    pair.optimizer.zero_grad()


def heal(pair: Pair, saved: dict[str, Any]) -> None:
    """Loaded values train on as if nothing had been."""
    pair.model.load_state_dict(saved["model"])
    pair.optimizer.load_state_dict(saved["optimizer"])
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("budget", ["streaming", "everything"])
@pytest.mark.parametrize("how", ["function", "hook"])
def test_an_exception_inside_backward_leaves_a_torn_model(how: str, budget: str) -> None:
    pair = make_pair(budget=BUDGETS[budget])
    pair.train(2)
    saved = copied({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    fail_in_backward(pair, how)
    now = copied(dict(pair.model.state_dict()))
    assert not torch.equal(now["4.weight"], saved["model"]["4.weight"])
    assert torch.equal(now["0.weight"], saved["model"]["0.weight"])
    check_torn(pair)
    heal(pair, saved)


def test_a_torn_model_refuses_the_next_backward() -> None:
    pair = make_pair()
    pair.train(2)
    fail_in_backward(pair, "hook")
    before = copied(dict(pair.model.state_dict()))
    pair.optimizer.zero_grad()
    with pytest.raises((TornStateError, ConfigError)):
        train_step(pair.case, pair.model, 1)
    with pytest.raises(TornStateError, match="load_state_dict"):
        pair.optimizer.step()
    check_equal(before, copied(dict(pair.model.state_dict())), "nothing is updated any more")


@pytest.mark.parametrize("first", ["backward", "accumulated", "step"])
def test_loading_right_after_the_exception(first: str) -> None:
    pair = make_pair()
    pair.train(2)
    saved = copied({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    fail_in_backward(pair, "hook")
    pair.model.load_state_dict(saved["model"])
    pair.optimizer.load_state_dict(saved["optimizer"])
    if first == "step":
        pair.optimizer.zero_grad()
        pair.optimizer.step()
    elif first == "accumulated":
        pair.plain.zero_grad()
        pair.optimizer.zero_grad()
        train_step(pair.case, pair.plain.model, 30)
        with pair.model.pager.accumulate():
            train_step(pair.case, pair.model, 30)
        pair.plain.step()
        pair.optimizer.step()
    pair.train(2)
    pair.close()


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", ["create_graph", "assigned"])
def test_gradients_that_come_after_a_load_count(way: str) -> None:
    """Also those that no hook takes: ``step()`` sees them first."""
    pair = make_pair()
    pair.train(2)
    pair.model.load_state_dict(copied(dict(pair.model.state_dict())))
    for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
        trainer.zero_grad()
        if way == "create_graph":
            args = pair.case.make_batch(30)[0]
            model(*args).square().mean().backward(create_graph=True)
        else:
            for index, param in enumerate(model.parameters()):
                torch.manual_seed(index)
                param.grad = torch.randn(param.shape)
        trainer.step()
        trainer.zero_grad()
    pair.train(2)
    pair.close()


def test_the_class_raises_inside_backward() -> None:
    class Picky(torch.optim.SGD):
        refuses = False

        def step(self, closure: Any = None) -> Any:
            if Picky.refuses:
                raise ValueError("not this tensor")
            return super().step(closure)

    def make(params: Any) -> torch.optim.Optimizer:
        return Picky(params, lr=0.1, momentum=0.9)

    pair = Pair(make_mlp, make, master=False, dtype=torch.float32, update_at="backward", checks=checks())
    pair.train(2)
    saved = copied({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    pair.optimizer.zero_grad()
    Picky.refuses = True
    with pytest.raises(ValueError, match="not this tensor"):
        train_step(pair.case, pair.model, 5)
    Picky.refuses = False
    check_torn(pair)
    heal(pair, saved)


@pytest.mark.parametrize("budget", ["streaming", "everything"])
def test_an_interrupt_inside_backward(budget: str) -> None:
    pair = make_pair(budget=BUDGETS[budget])
    pair.train(2)
    saved = copied({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    pair.optimizer.zero_grad()
    x = pair.case.make_batch(20)[0][0]
    x = pair.model[1](pair.model[0](x))

    def interrupt(grad: Tensor) -> None:
        signal.raise_signal(signal.SIGINT)

    x.register_hook(interrupt)
    for layer in list(pair.model)[2:]:
        x = layer(x)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            x.square().mean().backward()
    finally:
        signal.signal(signal.SIGINT, before)
    check_torn(pair)
    heal(pair, saved)


def test_a_torn_model_closes() -> None:
    pair = make_pair()
    pair.train(2)
    fail_in_backward(pair, "function")
    before = copied(dict(pair.model.state_dict()))
    pair.model.pager.close()
    check_ordinary(pair.model)
    check_equal(before, dict(pair.model.state_dict()), "weights")


def test_an_exception_before_the_first_update_tears_nothing() -> None:
    pair = make_pair()
    pair.train(2)
    pair.optimizer.zero_grad()
    loss = pair.model(*pair.case.make_batch(20)[0])
    with pytest.raises(ValueError, match="not this gradient"):
        Failing.apply(loss).square().mean().backward()
    pair.train(2)
    pair.close()
