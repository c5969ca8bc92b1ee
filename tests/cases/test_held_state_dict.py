"""A state dict that the user holds while training goes on shows the newest step, as plain torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    return model, KINDS[kind](model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", ["320KiB", "600KiB", "1MiB"])
def test_a_held_state_dict_follows_the_steps(kind: str, budget: str) -> None:
    plain, plain_optimizer = make(kind)
    model, optimizer = make(kind)
    checks = Checks(daemon="inline", poison=True, streams="late", happens_before=True, page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget=budget, page_size="16KiB", checks=checks)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        step(m, o)
    held, held_states = model.state_dict(), optimizer.state_dict()["state"]
    for _ in range(2):
        for m, o in ((plain, plain_optimizer), (model, optimizer)):
            step(m, o)
        for name, value in plain.state_dict().items():
            assert torch.equal(held[name], value), name
        for index, state in plain_optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(held_states[index][key]), torch.as_tensor(value)), (
                    index,
                    key,
                )
    model.load_state_dict(held)
    for m, o in ((plain, plain_optimizer), (model, optimizer)):
        step(m, o)
    handle: Any = model.pager
    handle.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def make_managed() -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    """A paged model after one step, and its state dict."""
    model, optimizer = make("adamw")
    checks = Checks(daemon="inline", poison=True, streams="late", happens_before=True, page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget="320KiB", page_size="16KiB", checks=checks)
    step(model, optimizer)
    return model, optimizer, model.state_dict()


def change_both(model: Any, held: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameter, then its tensor in the state dict; the parameter's own value."""
    with torch.no_grad():
        model[1].weight.add_(1)
        own: torch.Tensor = model[1].weight.cpu().clone()
    held["1.weight"].fill_(7)
    return own


def check_ordinary(model: Any, value: torch.Tensor) -> None:
    assert "pager" not in model.__dict__
    assert type(model[1].weight) is nn.Parameter
    assert torch.equal(model[1].weight, value)


def test_a_write_that_was_refused_does_not_keep_the_model_from_closing() -> None:
    model, _, held = make_managed()
    own = change_both(model, held)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"1\.weight.*close\(\) keeps the parameter's own value"):
            model(X)
    model.pager.close()
    check_ordinary(model, own)


def test_a_write_that_nobody_was_told_of_is_told_of_at_closing_once() -> None:
    model, optimizer, held = make_managed()
    own = change_both(model, held)
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\) takes what was written; close\(\) keeps"):
        model.pager.close()
    assert float(held["1.weight"][0, 0]) == 7  # still there to be taken
    held["1.weight"].fill_(8)
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        model.pager.close()
    model.pager.close()
    check_ordinary(model, own)
    step(model, optimizer)


@pytest.mark.parametrize("told", ["at a use", "at closing"])
def test_load_state_dict_takes_what_was_written(told: str) -> None:
    model, optimizer, held = make_managed()
    change_both(model, held)
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        model(X) if told == "at a use" else model.pager.close()
    model.load_state_dict(held)
    assert float(model[1].weight.detach()[0, 0]) == 7
    step(model, optimizer)
    value = model[1].weight.detach().cpu().clone()
    model.pager.close()
    check_ordinary(model, value)


def test_a_write_beside_a_live_view_is_the_value_after_closing() -> None:
    model, _, held = make_managed()
    view = model[1].weight.detach()[0]
    held["1.weight"].fill_(7)
    with pytest.raises(RuntimeError, match=r"views of the parameter are alive"):
        model(X)
    model.pager.close()
    check_ordinary(model, torch.full((128, 128), 7.0))
    assert view.shape == (128,)
