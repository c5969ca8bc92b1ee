"""A state dict that the user holds while training goes on shows the newest step, as plain torch's does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager import bill
from pager.config import Checks
from pager.mmu.parameter import PagedParameter
from pager.page_table import Home

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
    """The parameter, unseen, then its tensor in the state dict; the parameter's own value."""
    with torch.no_grad():
        model[1].weight.data.add_(1)
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


def write(model: Any, optimizer: torch.optim.Optimizer, change: Callable[[torch.Tensor], Any]) -> None:
    """Through tensors of a state dict that nobody keeps, as loaders of old write."""
    for value in model.state_dict().values():
        change(value)


def write_everywhere(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Through state dicts at all moments of training; what the model shows meanwhile."""
    seen: list[torch.Tensor] = []
    write(model, optimizer, lambda value: value.mul_(0.5))
    seen.append(model(X).detach().clone())
    held = model.state_dict()
    step(model, optimizer)
    for value in held.values():
        value.add_(0.01)
    model(X).square().mean().backward()
    for value in held.values():
        value.mul_(0.9)
    held_states = optimizer.state_dict()["state"]
    for state in held_states.values():
        state["exp_avg"].mul_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    seen += [value.clone() for value in held.values()]
    for state in held_states.values():
        state["exp_avg_sq"].add_(1e-6)
    step(model, optimizer)
    write(model, optimizer, lambda value: value.sub_(0.01))
    return seen


Script = Callable[[Any, torch.optim.Optimizer], list[torch.Tensor]]


def check_with_homes_on(tier: str, script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``script`` sees, and the weights after it, are those of plain torch while some homes are on ``tier``."""
    plain, plain_optimizer = make("adamw")
    model, optimizer = make("adamw")
    checks = Checks(daemon="inline", poison=True, streams="late", happens_before=True, page_all=True)
    knobs: dict[str, Any] = {"device_budget": "1MiB" if tier == "device" else "320KiB"}
    if tier == "disk":
        # What the process itself takes would drown the budget of so small a model: only homes are counted.
        monkeypatch.setattr(bill, "host_room", lambda *arguments: (2**18, 2**18))
        knobs |= {"disk": folder, "disk_budget": "64MiB"}
    pager.manage(model, optimizer, device="cpu", page_size="16KiB", checks=checks, **knobs)
    handle: Any = model.pager
    homes = handle._runtime.table.home[: handle._runtime.table.num_pages]
    assert (homes == int(Home[tier.upper()])).any()
    expected, found = script(plain, plain_optimizer), script(model, optimizer)
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(theirs, ours), index
    handle.close()
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("tier", ["host", "device", "disk"])
def test_what_is_written_to_a_state_dict_counts_wherever_the_home_is(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_with_homes_on(tier, write_everywhere, tmp_path, monkeypatch)


def test_a_write_to_a_copy_of_a_parameter_that_has_changed_is_refused_once() -> None:
    model, optimizer = make("adamw")
    checks = Checks(daemon="inline", page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget="1MiB", page_size="16KiB", checks=checks)
    handle: Any = model.pager
    held = model.state_dict()
    on_device = next(
        name
        for name, param in model.named_parameters()
        if type(param) is PagedParameter
        and handle._runtime.table.home[param._pager.segment.first_page] == int(Home.DEVICE)
    )
    param: Any = model.get_parameter(on_device)
    param.data.fill_(2.0)
    with torch.no_grad():
        param._pager.bump_version()  # as an update does that is over before its step
    held[on_device].zero_()
    with pytest.raises(RuntimeError, match=f"{on_device}: a tensor from state_dict.* keeps its own value"):
        model(X)
    assert (param == 2.0).all()
    handle.close()


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "by a view": lambda w: w[1].fill_(3),
    "by a held view": lambda w: w.detach().t().add_(1),
    "copied": lambda w: w.copy_(torch.linspace(0, 1, w.numel()).view(w.shape)),
    "an operator": lambda w: w.__iadd__(w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("tier", ["host", "device", "disk"])
def test_a_held_state_dict_shows_a_write_at_once_and_takes_one(
    tier: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To all three layers, wherever some of their homes are: in place, and in the state dict after that."""

    def write_to(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        step(model, optimizer)
        seen = []
        held, states = model.state_dict(), optimizer.state_dict()["state"]
        for index in (0, 1, 2):
            with torch.no_grad():
                WRITES[how](model[index].weight)
                WRITES[how](optimizer.state[model[index].weight]["exp_avg"])
            seen += [held[f"{index}.weight"].clone(), states[2 * index]["exp_avg"].clone()]
            held[f"{index}.weight"][0].fill_(1)
        step(model, optimizer)
        return [*seen, *(value.clone() for value in held.values())]

    check_with_homes_on(tier, write_to, tmp_path, monkeypatch)


def test_state_dicts_that_nobody_keeps_are_forgotten() -> None:
    model, optimizer = make("adamw")
    checks = Checks(daemon="inline", page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget="1MiB", page_size="16KiB", checks=checks)
    handle: Any = model.pager
    for _ in range(5):
        model.state_dict()
        optimizer.state_dict()
    aliases = handle._runtime.mmu.aliases
    assert all(len(copies) == 1 for copies in aliases._copies.values())
    step(model, optimizer)
    assert not aliases._copies
    handle.close()


def test_state_dicts_taken_one_after_another_share_their_memory() -> None:
    """Of homes on the device too: what is written to one is seen in the other, and neither write is lost."""
    model, optimizer = make("adamw")
    checks = Checks(daemon="inline", page_all=True)
    pager.manage(model, optimizer, device="cpu", device_budget="1MiB", page_size="16KiB", checks=checks)
    first, second = model.state_dict(), model.state_dict()
    for name in ("0.weight", "1.weight", "2.weight"):
        first[name][0].fill_(1.0)
        second[name][1].fill_(2.0)
        param = model.get_parameter(name)
        assert (param[0] == 1.0).all()
        assert (param[1] == 2.0).all()
        assert torch.equal(first[name], second[name])
        with torch.no_grad():
            param[2].fill_(3.0)
        assert (model.state_dict()[name][2] == 3.0).all()
        assert torch.equal(first[name], param)
    handle: Any = model.pager
    handle.close()
