"""Gradients that have no room on the device until their update go home as soon as autograd has made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pager.engine.reclaim import Reclaimer
from pager.mmu.gradient import Gradients
from pager.mmu.mmu import Mmu
from tests.cases.same import Report, check_same, manage
from tests.pager.optim.waiting import CHECKS, backward, make_adamw, make_net

# Weights stay, and half of the gradients has room beside them.
BUDGET = "608KiB"


def slots_of(model: Any) -> list[Any]:
    """The gradients' bindings, in the order of the layers."""
    return [layer.weight._pager.gradient for layer in model.layers]


def going_home(model: Any) -> list[bool]:
    """Which gradients are planned to go home at once."""
    return [slot.goes_home for slot in slots_of(model)]


def on_device(model: Any) -> list[bool]:
    """Which gradients have pages on the device."""
    engine = model.pager._runtime.engine
    return [bool(engine.runs_of(slot.segment)) for slot in slots_of(model)]


def manage_net(**knobs: Any) -> Any:
    return manage(make_net(), device_budget=BUDGET, checks=CHECKS, **knobs)


def train(model: Any, num_steps: int) -> torch.optim.Optimizer:
    """Steps of AdamW, then a backward of one more."""
    optimizer = make_adamw(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    optimizer.zero_grad()
    backward(model, num_steps)
    return optimizer


def test_what_has_no_room_goes_and_the_rest_stays() -> None:
    model = manage_net()
    train(model, 2)
    assert going_home(model) == [False, True, False, True, False, True], "spread over the backward"
    assert on_device(model) == [not goes for goes in going_home(model)]
    model.pager.close()


def test_a_backward_throws_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent at once needs no frames, so that none have to be made free while the compute waits."""
    model = manage_net()
    optimizer = train(model, 2)
    optimizer.step()
    optimizer.zero_grad()
    loss = model(torch.ones(2, 96)).square().sum()
    asked: list[int] = []
    original = Reclaimer.make_room

    def make_room(reclaimer: Reclaimer, num_pages: int, **options: Any) -> bool:
        asked.append(num_pages)
        return original(reclaimer, num_pages, **options)

    monkeypatch.setattr(Reclaimer, "make_room", make_room)
    loss.backward()
    assert not asked
    model.pager.close()


def test_no_more_is_under_way_than_the_largest() -> None:
    """Streams are late here: without back-pressure all of them would wait in torch's memory."""
    model = manage_net()
    optimizer = train(model, 2)
    transfers = model.pager._runtime.engine.transfers
    largest = max(slot.segment.num_bytes for slot in slots_of(model))
    assert 0 < transfers._sent_bytes <= largest
    optimizer.step()
    model(torch.ones(2, 96))
    assert transfers._sent_bytes == 0, "kept through the next forward"
    model.pager.close()


def test_none_goes_where_weights_stream_or_all_have_room() -> None:
    for budget in ("320KiB", "1200KiB"):
        model = manage(make_net(), device_budget=budget, checks=CHECKS)
        train(model, 2)
        assert going_home(model) == [False] * 6, budget
        model.pager.close()


def test_none_goes_with_updates_in_backward() -> None:
    model = manage_net(update_at="backward")
    train(model, 2)
    assert going_home(model) == [False] * 6
    model.pager.close()


# -- what a user sees of it ----------------------------------------------------------------------------------------


def accumulated(model: Any, optimizer: Any) -> None:
    backward(model, 7)
    backward(model, 8)


def zeroed_in_place(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model, 7)


def written(model: Any, optimizer: Any) -> None:
    for layer in model.layers:
        layer.weight.grad.mul_(0.5)
        layer.weight.grad[3] = 1.0


def clipped(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def clipped_by_pager(model: Any, optimizer: Any) -> None:
    """Twice, so that the second finds norms that were taken on arrival."""
    for _ in range(2):
        if hasattr(model, "pager"):
            model.pager.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, 7)


def exchanged(model: Any, optimizer: Any) -> None:
    first, second = model.layers[1].weight, model.layers[3].weight
    first.grad, second.grad = second.grad, first.grad


def dropped(model: Any, optimizer: Any) -> None:
    for layer in model.layers:
        layer.weight.grad = None
    backward(model, 9)


def converted(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.double()
    model(torch.ones(2, 96, dtype=torch.float64)).square().sum().backward()
    optimizer.zero_grad()
    model.float()
    backward(model, 3)


def from_a_graph(model: Any, optimizer: Any) -> None:
    """Gradients that the user goes on differentiating are taken at the step."""
    optimizer.zero_grad()
    loss = model(torch.ones(2, 96)).square().sum()
    loss.backward(create_graph=True)


def seen_by_a_graph(model: Any, optimizer: Any) -> None:
    """A graph that looks back at a gradient is not given the next one."""
    x = torch.ones(96, requires_grad=True)
    loss = sum((layer.weight.grad @ x).sum() for layer in model.layers)
    optimizer.zero_grad()
    backward(model, 5)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert x.grad is not None
    model.bias.grad = x.grad.clone()


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        accumulated,
        zeroed_in_place,
        written,
        clipped,
        clipped_by_pager,
        exchanged,
        dropped,
        converted,
        from_a_graph,
        seen_by_a_graph,
    ],
    ids=lambda change: change.__name__,
)
def test_as_in_torch(change: Callable[[Any, Any], None]) -> None:
    sent = []

    def script(model: Any, report: Report) -> None:
        optimizer = train(model, 2)
        if hasattr(model, "pager"):
            sent.append(any(going_home(model)))
        change(model, optimizer)
        report("gradients", [param.grad for param in model.parameters()])
        optimizer.step()
        report("weights", list(model.parameters()))
        optimizer.zero_grad()
        report("loss", backward(model, 4))

    check_same(make_net, script, device_budget=BUDGET, checks=CHECKS)
    assert sent == [True]


class Hooked(nn.Module):
    """Its gradients are seen by hooks that keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.seen: list[torch.Tensor] = []
        for weight in self.net.parameters():
            weight.register_hook(self.seen.append)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(x)
        return output


def test_a_hook_that_keeps_gradients_may_write_to_them() -> None:
    """Autograd gives the parameter a copy then: what is on its way home is nobody else's."""

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            model.seen.clear()
            backward(model, step)
            for gradient in model.seen:
                gradient.fill_(float("nan"))
            report("gradients", [param.grad for param in model.parameters()])
            optimizer.step()
        report("weights", list(model.parameters()))

    check_same(Hooked, script, device_budget=BUDGET, checks=CHECKS)


class Reentrant(nn.Module):
    """One weight's gradient comes in two parts, in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        for _ in range(2):
            x = checkpoint(self.net, x, use_reentrant=True)
        return x


def test_what_comes_in_parts_is_added_up() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            report("gradients", [param.grad for param in model.parameters()])
            optimizer.step()

    check_same(Reentrant, script, device_budget=BUDGET, checks=CHECKS)


def test_a_gradient_in_another_layout_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are not those of the segment."""
    model = manage_net()
    train(model, 2)
    weight = model.layers[1].weight
    assert slots_of(model)[1].goes_home
    answers = []
    original = Gradients._send_home

    def send(gradients: Gradients, binding: Any, grad: torch.Tensor) -> bool:
        answers.append(original(gradients, binding, grad.t()))
        return answers[-1]

    model.zero_grad()
    monkeypatch.setattr(Gradients, "_send_home", send)
    (weight * torch.arange(96.0)).sum().backward()
    assert answers == [False]
    torch.testing.assert_close(weight.grad + 0, torch.arange(96.0).repeat(96, 1), rtol=0, atol=0)
    model.pager.close()


def test_a_gradient_gets_its_weight_s_layout_back() -> None:
    """What the user laid out otherwise is no pattern for the next one."""
    model = manage_net()
    train(model, 2)
    weight = model.layers[1].weight
    weight.grad.data = torch.arange(96.0 * 96).view(96, 96).t()
    model.zero_grad()
    (weight.t() * torch.arange(96.0)).sum().backward()
    assert weight.grad.stride() == weight.stride()
    torch.testing.assert_close(weight.grad + 0, torch.arange(96.0).repeat(96, 1).t(), rtol=0, atol=0)
    model.pager.close()


def test_its_norm_is_taken_before_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = manage_net()
    optimizer = train(model, 2)
    model.pager.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 3)
    brought: list[str] = []
    original = Mmu.fault

    def fault(mmu: Mmu, binding: Any, *args: Any, **options: Any) -> Any:
        brought.append(binding.name)
        return original(mmu, binding, *args, **options)

    monkeypatch.setattr(Mmu, "fault", fault)
    model.pager.clip_grad_norm_(0.1)
    assert not brought
    model.pager.close()
