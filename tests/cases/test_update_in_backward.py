"""What users do around a backward that updates: on the managed model the same bits come out as on an ordinary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests import models
from tests.cases.plainly import MAKERS, Pair, checks
from tests.cases.same import manage, train_step


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    Pair.close_all()


def loss_of(pair: Pair, model: Any, batch: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = model(pair.case.make_batch(batch)[0][0].to(dtype)).float().square().mean()
    return loss


def create_graph(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    """Gradients that are part of a graph are updated at the step."""
    trainer.zero_grad()
    loss_of(pair, model, 3).backward(create_graph=True)
    trainer.step()


def gradient_penalty(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    for batch in range(3):
        trainer.zero_grad()
        loss = loss_of(pair, model, batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(grad.float().square().sum() for grad in grads)).backward()
        trainer.step()


def backward_of_one_weight(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    trainer.zero_grad()
    loss_of(pair, model, 3).backward(inputs=[model.get_parameter("4.weight")])
    trainer.step()


def writes_to_weights(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    for batch in range(3):
        trainer.zero_grad()
        loss_of(pair, model, batch).backward()
        trainer.step()
        with torch.no_grad():
            model.get_parameter("2.weight").mul_(0.75)
        if model is pair.plain.model:
            pair.plain.written(model.get_parameter("2.weight"))


def writes_to_states(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.state[params[2]]["exp_avg"].mul_(0.5)
    trainer.zero_grad()
    loss_of(pair, model, 3).backward()
    trainer.step()


def saving_before_the_step(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    trainer.zero_grad()
    loss_of(pair, model, 3).backward()
    model.state_dict()
    optimizer.state_dict()
    trainer.step()


def one_group_after_the_other(pair: Pair, model: Any, trainer: Any, optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"][4:]
    del optimizer.param_groups[0]["params"][4:]
    for batch in range(4):
        if batch == 2:
            optimizer.add_param_group({"params": moved, "lr": 1e-3})
        # The last layer has no optimizer at first: its gradients wait, and are zeroed with the model's.
        model.zero_grad()
        loss_of(pair, model, batch).backward()
        if model is pair.plain.model and batch < 2:
            for param in pair.plain.params[4:]:
                param.grad = None
        trainer.step()


@pytest.mark.parametrize("master", [False, True], ids=["fp32", "masters"])
@pytest.mark.parametrize(
    "script",
    [
        create_graph,
        gradient_penalty,
        backward_of_one_weight,
        writes_to_weights,
        writes_to_states,
        saving_before_the_step,
        one_group_after_the_other,
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_users_do(script: Callable[..., None], master: bool) -> None:
    pair = Pair(
        lambda: models.make_mlp(width=160, depth=2),
        MAKERS["adamw"],
        master=master,
        dtype=torch.bfloat16 if master else torch.float32,
        update_at="backward",
        checks=checks(),
    )
    pair.train(2)
    script(pair, pair.plain.model, pair.plain, pair.plain.optimizer)
    script(pair, pair.model, pair.optimizer, pair.optimizer)
    pair.check()
    if script is not one_group_after_the_other:
        pair.train(2)
    pair.close()


def test_a_closure_runs_its_own_backward() -> None:
    pair = Pair(
        lambda: models.make_mlp(width=160, depth=2),
        MAKERS["adamw"],
        master=False,
        dtype=torch.float32,
        update_at="backward",
        checks=checks(),
    )
    pair.train(1)
    model: Any
    optimizer: Any
    for model, optimizer in ((pair.plain.model, pair.plain.optimizer), (pair.model, pair.optimizer)):

        def closure(model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(pair, model, 3)
            loss.backward()
            return loss

        first, second = optimizer.step(closure), optimizer.step(closure)
        assert second.item() < first.item()
    pair.train(1)
    pair.close()


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """How many warnings say it."""
    return sum(text in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.parametrize("zeroes", ["after the step", "before the backward", "in place", "by hand", "never"])
def test_who_never_zeroes_gradients_is_told_once(zeroes: str, caplog: pytest.LogCaptureFixture) -> None:
    """In torch they add up then."""
    case = models.make_mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    manage(case.model, optimizer, update_at="backward")
    for step in range(4):
        if zeroes == "before the backward":
            optimizer.zero_grad()
        train_step(case, case.model, step)
        optimizer.step()
        if zeroes == "after the step":
            case.model.zero_grad()
        if zeroes == "in place":
            optimizer.zero_grad(set_to_none=False)
        for param in case.model.parameters() if zeroes == "by hand" else ():
            param.grad = None
    assert warnings_of(caplog, "gradients were not zeroed") == (zeroes == "never")
    handle: Any = case.model.pager
    handle.close()


@pytest.mark.parametrize("breaks", [True, False])
def test_who_saves_or_closes_a_torn_model_is_told(breaks: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody refuses to train on from it without pager."""
    case = models.make_mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.01)
    manage(case.model, optimizer, update_at="backward")
    train_step(case, case.model, 0)
    optimizer.step()
    optimizer.zero_grad()
    if breaks:
        first = next(iter(case.model.parameters()))

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        first.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            train_step(case, case.model, 1)
    saved = case.model.state_dict()
    assert warnings_of(caplog, "this state dict is of a model that is torn") == breaks
    handle: Any = case.model.pager
    handle.close()
    assert warnings_of(caplog, "closing a model that is torn") == breaks
    for name, value in case.model.state_dict().items():
        assert torch.equal(value, saved[name])
