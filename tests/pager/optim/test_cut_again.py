"""A step is cut as the last one was, and its first states come while the host is at the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pager.optim import update
from pager.optim.deferred import Deferred
from tests.cases.same import Report, check_same, manage
from tests.pager.optim.waiting import BUDGETS, CHECKS, backward, make_adamw, make_net


def train(model: Any, num_steps: int, optimizer: torch.optim.Optimizer) -> None:
    """Steps that end with ``step()``."""
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("budget", BUDGETS)
def test_steps_that_are_alike_are_cut_once(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = manage(make_net(), device_budget=budget, checks=CHECKS)
    optimizer = make_adamw(model)
    train(model, 3, optimizer)
    names: list[str] = []
    original = update.cut

    def cut(adopted: Any, group: Any, binding: Any) -> Any:
        names.append(binding.name)
        return original(adopted, group, binding)

    monkeypatch.setattr(update, "cut", cut)
    train(model, 2, optimizer)
    assert not names
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, 1, optimizer)
    assert not names, "a learning rate changes no slice"
    optimizer.param_groups[0]["maximize"] = True
    train(model, 1, optimizer)
    assert len(names) == 6, "the class might not be cut alike with it"
    model.pager.close()


def test_the_ring_fills_before_all_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link has nothing to do until then."""
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizer = make_adamw(model)
    train(model, 3, optimizer)
    staging = model.pager._runtime.engine.staging
    held: list[int] = []
    original = update.keep_copies

    def keep_copies(members: Any) -> None:
        held.append(len(staging._held))
        original(members)

    monkeypatch.setattr(update, "keep_copies", keep_copies)
    train(model, 1, optimizer)
    assert held == [len(staging._slots)]
    model.pager.close()


def fail_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step raises when its first units have been fetched."""
    original = update.keep_copies

    def keep_copies(members: Any) -> None:
        monkeypatch.setattr(update, "keep_copies", original)
        raise RuntimeError("of the test")

    monkeypatch.setattr(update, "keep_copies", keep_copies)


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_a_failed_step_has_fetched_is_not_used(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients may have changed since."""

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        train(model, 3, optimizer)
        optimizer.zero_grad()
        backward(model, 3)
        if hasattr(model, "pager"):
            engine = model.pager._runtime.engine
            engine.evict_segments([layer.weight._pager.gradient.segment for layer in model.layers])
            fail_once(monkeypatch)
            with pytest.raises(RuntimeError, match="of the test"):
                optimizer.step()
        for layer in model.layers:
            layer.weight.grad.mul_(2)
        optimizer.step()
        report("weights", list(model.parameters()))
        report("states", [dict(optimizer.state[param]) for param in model.parameters()])

    check_same(make_net, script, device_budget=budget, checks=CHECKS)


def test_counts_move_on_before_the_updates_have_run() -> None:
    """All of them, in one launch, and each is the tensor that the user may hold."""
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizer = make_adamw(model)
    train(model, 2, optimizer)
    counts = [optimizer.state[param]["step"] for param in model.parameters()]
    train(model, 1, optimizer)
    assert isinstance(model.layers[0].weight._pager.pending, Deferred)
    assert [float(count) for count in counts] == [3.0] * 7
    assert all(
        optimizer.state[param]["step"] is count
        for param, count in zip(model.parameters(), counts, strict=True)
    )
    model.pager.close()
