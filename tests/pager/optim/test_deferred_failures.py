"""Updates that wait and fail, are interrupted, or go on for long; and those of masters."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pager.optim.update
from pager.errors import TornStateError
from tests.cases.bombs import Bomb, Stop
from tests.cases.same import Report, check_equal, check_same, copied, manage, run, values_of
from tests.pager.optim.waiting import (
    BUDGETS,
    CHECKS,
    backward,
    batch,
    expect_waiting,
    make_adamw,
    make_net,
    pending,
    weight,
)

# In torch 2.6 AdamW has an arithmetic of its own; later it is Adam's.
NAME = "adam" if issubclass(torch.optim.AdamW, torch.optim.Adam) else "adamw"
torch_adam: Any = importlib.import_module(f"torch.optim.{NAME}")


def trained(steps: int = 3, budget: str = BUDGETS[0]) -> tuple[Any, Any, Any, Any]:
    """An ordinary and a managed model after some steps, the last one's updates waiting; with their optimizers."""
    plain, model = make_net(), manage(make_net(), device_budget=budget, checks=CHECKS)
    optimizers = [make_adamw(plain), make_adamw(model)]
    for each, optimizer in zip([plain, model], optimizers, strict=True):
        for step in range(steps):
            optimizer.zero_grad()
            backward(each, step)
            optimizer.step()
    expect_waiting(model)
    return plain, model, *optimizers


def plant(monkeypatch: pytest.MonkeyPatch, bomb: Bomb, *, after: bool) -> None:
    """AdamW's arithmetic goes off, before or after it has changed its tensors."""
    function = getattr(torch_adam, NAME)

    def adam(*args: Any, **kwargs: Any) -> Any:
        if not after:
            bomb.tick()
        function(*args, **kwargs)
        if after:
            bomb.tick()

    monkeypatch.setattr(torch_adam, NAME, adam)


def finish_and_compare(plain: Any, model: Any, optimizer: Any, managed: Any) -> None:
    """Two more steps, then everything is the same."""
    for each, stepper in ((plain, optimizer), (model, managed)):
        for step in range(2):
            stepper.zero_grad()
            backward(each, step)
            stepper.step()
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "at the end")
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")


@pytest.mark.pairwise(error=[Stop, torch.OutOfMemoryError, MemoryError], after=[False, True], at=[0, 3])
def test_what_passes_is_tried_again(
    error: type[BaseException], after: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model, optimizer, managed = trained()
    bomb = Bomb(at, error)
    with monkeypatch.context() as patch:
        plant(patch, bomb, after=after)
        managed.zero_grad()
        with pytest.raises(error, match="boom"):
            model(batch(1))
    assert bomb.fired
    expect_waiting(model)
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), "after the failure")
    assert not pending(model)
    finish_and_compare(plain, model, optimizer, managed)


def test_a_failure_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer, managed = trained()
    managed.zero_grad()
    for at in range(12):
        with monkeypatch.context() as patch:
            plant(patch, Bomb(at % 2, torch.OutOfMemoryError), after=bool(at % 3))
            with pytest.raises(torch.OutOfMemoryError):
                model(batch(1))
    finish_and_compare(plain, model, optimizer, managed)


@pytest.mark.parametrize("how", ["step", "state_dict", "load", "close"])
def test_who_asks_for_all_of_it_is_interrupted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer, managed = trained()
    calls: dict[str, Callable[[], Any]] = {
        "step": managed.step,
        "state_dict": managed.state_dict,
        "load": lambda: managed.load_state_dict(copied(optimizer.state_dict())),
        "close": model.pager.close,
    }
    with monkeypatch.context() as patch:
        plant(patch, Bomb(4), after=True)
        with pytest.raises(Stop):
            calls[how]()
    calls[how]()
    if how == "step":
        optimizer.step()
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")
    if how == "close":
        check_equal(values_of(plain), values_of(model), "closed")
    else:
        finish_and_compare(plain, model, optimizer, managed)


@pytest.mark.parametrize("at", range(3))
def test_a_step_that_is_interrupted_as_it_begins_to_wait(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that the user sees at once move on once."""
    plain, model, optimizer, managed = trained()
    for each, stepper in ((plain, optimizer), (model, managed)):
        stepper.zero_grad()
        backward(each, 4)
    optimizer.step()
    with monkeypatch.context() as patch:
        plant(patch, Bomb(at), after=True)
        try:
            managed.step()
        except Stop:
            managed.step()
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")
    finish_and_compare(plain, model, optimizer, managed)


def test_the_first_states_are_on_their_way_before_the_step_looks_at_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is ahead of the device, so the link would rest while ``step()`` does what has to be seen at once."""
    plain, model, optimizer, managed = trained()
    staging = model.pager._runtime.engine.staging
    for each, stepper in ((plain, optimizer), (model, managed)):
        stepper.zero_grad()
        backward(each, 4)
    optimizer.step()
    function = getattr(torch_adam, NAME)
    held: list[bool] = []

    def adam(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if len(params) > 1:  # the stand-ins
            held.append(bool(staging._held))
        function(params, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch_adam, NAME, adam)
        managed.step()
    assert held == [True]
    finish_and_compare(plain, model, optimizer, managed)


def test_a_step_that_is_given_up_as_it_begins_to_wait_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer, managed = trained()
    saved, states = copied(dict(plain.state_dict())), copied(optimizer.state_dict())
    managed.zero_grad()
    backward(model, 4)
    function = getattr(torch_adam, NAME)

    def adam(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if len(params) > 1:  # the stand-ins
            raise ValueError("boom")
        function(params, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch_adam, NAME, adam)
        with pytest.raises(ValueError, match="boom"):
            managed.step()
        with pytest.raises(TornStateError, match=r"given up after ValueError: boom"):
            managed.step()
    assert not model.pager._runtime.engine.staging._held
    model.load_state_dict(saved)
    managed.load_state_dict(states)
    finish_and_compare(plain, model, optimizer, managed)


def test_a_class_that_raises_in_a_waiting_update_tears_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, optimizer, managed = trained()
    saved, states = copied(dict(plain.state_dict())), copied(optimizer.state_dict())
    managed.zero_grad()
    with monkeypatch.context() as patch:
        plant(patch, Bomb(2, ValueError), after=True)
        with pytest.raises(ValueError, match="boom"):
            model(batch(1))
    assert not pending(model)
    with pytest.raises(TornStateError, match=r"given up after ValueError"):
        managed.step()
    values = [param.detach().clone() for param in model.parameters()]
    assert all(value.isfinite().all() for value in values)
    model.load_state_dict(saved)
    managed.load_state_dict(states)
    finish_and_compare(plain, model, optimizer, managed)


@pytest.mark.parametrize("budget", BUDGETS)
def test_nothing_piles_up_over_many_steps(budget: str) -> None:
    """Objects, blocks of the arena, slots and pins are as many after 60 steps as after 20."""
    model = manage(make_net(), device_budget=budget, checks=CHECKS)
    optimizer = make_adamw(model)
    engine = model.pager._runtime.engine

    def count() -> dict[str, int]:
        gc.collect()
        engine.drain()
        return {
            "objects": len(gc.get_objects()) // 50,
            "tensors": sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
            "slots": len(engine.staging._slots),
            "held slots": len(engine.staging._held),
            "pins": int(engine.table.pins.sum()),
            "bytes": engine.arena.resident_bytes // (64 * 2**10),
        }

    found = []
    for step in range(61):
        optimizer.zero_grad()
        backward(model, step % 5)
        optimizer.step()
        if step in (20, 60):
            found.append(count())
    for name, before in found[0].items():
        assert abs(found[1][name] - before) <= (2 if name == "objects" else 1), (name, found)
    model.pager.close()


def test_a_parameter_is_handed_over_to_another_optimizer_while_its_update_waits() -> None:
    def script(model: Any, report: Report) -> None:
        one, other = torch.optim.AdamW(model.parameters(), lr=0.01), None
        for step in range(3):
            one.zero_grad()
            backward(model, step)
            one.step()
        expect_waiting(model)
        params = one.param_groups[0]["params"]
        kept, given = params[:3], params[3:]
        one.param_groups[0]["params"] = kept
        other = torch.optim.SGD(given, lr=0.01, momentum=0.9)
        other.step()
        report("values", list(model.parameters()))
        for step in range(2):
            backward(model, step)
            for optimizer in (one, other):
                optimizer.step()
                optimizer.zero_grad()
        report("states", [one.state[p] for p in kept] + [other.state[p] for p in given])

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)


# -- masters -------------------------------------------------------------------------------------------------------


def write(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight(model).mul_(0.5)


def load_model(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in copied(dict(model.state_dict())).items()})


def load_same(model: Any, optimizer: Any) -> None:
    model.load_state_dict(copied(dict(model.state_dict())))


MASTERS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda model, optimizer: None,
    "write": write,
    "load other values": load_model,
    "load the same values": load_same,
    "save and load": lambda model, optimizer: optimizer.load_state_dict(copied(optimizer.state_dict())),
    "look": lambda model, optimizer: weight(model).norm(),
    "hold a view": lambda model, optimizer: model.__dict__.setdefault("kept", weight(model).detach()),
    "step again": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("budget", ["660KiB", "1320KiB"])
@pytest.mark.parametrize("name", MASTERS)
def test_masters_are_the_same_whether_their_updates_wait(
    name: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for waits in (False, True):
        monkeypatch.setattr(pager.optim.update, "may_wait", lambda cls, waits=waits: waits)
        model = manage(
            make_net(width=160).to(torch.bfloat16), device_budget=budget, checks=CHECKS, master="float32"
        )

        def script(model: Any, report: Report) -> None:
            optimizer = make_adamw(model)
            for step in range(4):
                x = torch.linspace(-1, 1, 160, dtype=torch.bfloat16).repeat(2, 1) * (step + 1)
                model(x).float().square().sum().backward()
                optimizer.step()
                if waits and step:  # noqa: B023
                    expect_waiting(model)
                if step % 2:
                    MASTERS[name](model, optimizer)
                optimizer.zero_grad()
                report("values", list(model.parameters()) if step >= 2 else step)
            model.__dict__.pop("kept", None)
            report("states", optimizer.state_dict())

        found.append(run(script, model))
        model.pager.close()
    for (what, one), (_, other) in zip(*found, strict=True):
        check_equal(one, other, what)
