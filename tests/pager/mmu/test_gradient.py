"""Gradients that have no room on the device until their update go home as soon as autograd has made them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pager.engine.engine import Engine
from pager.engine.reclaim import Reclaimer
from pager.mmu.gradient import Gradients, is_plain
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


# -- whose memory it is --------------------------------------------------------------------------------------------


class Overwrites(nn.Module):
    """Hooks keep what shares the gradients' memory, and ``spoil`` writes to it when the step is over."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.seen: list[torch.Tensor] = []
        for weight in self.net.parameters():
            weight.register_hook(lambda gradient: self.seen.append(gradient.detach()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.net(x)
        return output

    def spoil(self) -> None:
        """Torch has used the gradients by now."""
        for gradient in self.seen:
            gradient.fill_(float("nan"))
        self.seen.clear()


def test_a_gradient_whose_memory_somebody_has_is_copied() -> None:
    """Autograd counts who refers to the tensor, not to its memory."""

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            model.spoil()
        report("weights", list(model.parameters()))

    check_same(Overwrites, script, device_budget=BUDGET, checks=CHECKS)


def test_a_gradient_that_begins_as_a_view_is_copied() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        buffers = [torch.empty(96 * 96) for _ in model.layers]
        for step in range(4):
            for buffer in buffers:
                buffer.copy_(torch.arange(96.0 * 96) * (step + 1))
            torch.autograd.backward([layer.weight.view(-1) for layer in model.layers], buffers)
            optimizer.step()
            optimizer.zero_grad()
            for buffer in buffers:
                buffer.fill_(float("nan"))
        report("weights", list(model.parameters()))

    check_same(make_net, script, device_budget=BUDGET, checks=CHECKS)


def test_what_the_cpu_updates_with_is_nobody_elses() -> None:
    model: Any = Overwrites()
    optimizer = make_adamw(model)
    manage(model, optimizer, device_budget=BUDGET, checks=CHECKS, update_at="backward", update_on="cpu")
    for step in range(4):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        model.spoil()
    assert all(bool(torch.isfinite(param + 0).all()) for param in model.parameters())
    model.pager.close()


class Complex(nn.Module):
    """Its gradients come as lazy conjugates: their memory does not hold their values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(48, 96, dtype=torch.complex64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = x + (weight.conj() * x) * 0.1
        return x


@pytest.mark.parametrize("budget", ["528KiB", "608KiB"])
def test_a_lazy_conjugate_is_resolved(budget: str) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(48, 96, dtype=torch.complex64)).abs().square().sum().backward()
            report("gradients", [param.grad for param in model.parameters()])
            optimizer.step()

    check_same(Complex, script, device_budget=budget, checks=CHECKS)


def test_only_memory_that_holds_the_values_is_plain() -> None:
    segment = manage_net().layers[1].weight._pager.gradient.segment
    pair = torch.randn(96, 96, dtype=torch.complex64)
    assert is_plain(torch.ones(96, 96), segment)
    assert not is_plain(torch.ones(96, 96).t(), segment)
    assert not is_plain(torch.ones(96, 96, dtype=torch.float64), segment)
    negated = torch._neg_view(torch.ones(96, 96))
    assert negated.is_neg()
    assert not is_plain(negated, segment)
    assert not is_plain(pair.conj(), segment)


# -- accumulation, memory, interrupts ------------------------------------------------------------------------------


def test_while_gradients_are_added_up_none_is_sent() -> None:
    """Each would have to come back. pagerd brings those that were thrown out, as it does where weights stream."""
    model = manage_net()
    optimizer = train(model, 2)
    engine, gradients = model.pager._runtime.engine, model.pager._runtime.mmu.gradients
    hidden = {slot.segment.index for slot in slots_of(model) if slot.goes_home}
    assert hidden <= engine.streamed
    for _ in range(2):
        assert gradients.sends
        backward(model, 3)
        assert not gradients.sends
        optimizer.step()
        optimizer.zero_grad()
        assert not hidden & engine.streamed
        backward(model, 4)
        assert not gradients.sends, "the last step added them up"
        optimizer.step()
        optimizer.zero_grad()
        assert gradients.sends
        backward(model, 5)
    model.pager.close()


class OnesOwn(torch.optim.AdamW):
    """Not torch's: its updates run in ``step()``."""


def test_what_is_home_is_not_kept_by_who_goes_on() -> None:
    for make in (make_adamw, lambda model: OnesOwn(model.parameters())):
        model = manage_net()
        optimizer = make(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        optimizer.zero_grad()
        assert any(going_home(model))
        model(torch.ones(2, 96))
        assert not model.pager._runtime.engine.transfers.has_sent
        model.pager.close()


@pytest.mark.parametrize("where", ["sent", "added"])
def test_an_interrupt_takes_no_gradient_twice(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is held back while a gradient is taken raises right after it."""
    model, plain = manage_net(), make_net()
    optimizers = [train(each, 2) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        optimizer.step()
        optimizer.zero_grad()
        loss = each(torch.ones(2, 96)).square().sum()
        if each is plain:
            loss.backward()
            continue
        name = "send_home" if where == "sent" else "acquire_all"
        original = getattr(Engine, name)

        def interrupted(engine: Engine, *args: Any, original: Any = original, **options: Any) -> Any:
            result = original(engine, *args, **options)
            if where == "sent" or "the gradient of" in args[1]:
                monkeypatch.undo()
                signal.raise_signal(signal.SIGINT)
            return result

        monkeypatch.setattr(Engine, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    for managed, expected in zip(model.parameters(), plain.parameters(), strict=True):
        if managed.grad is not None:
            torch.testing.assert_close(managed.grad + 0, expected.grad, rtol=0, atol=0)
    model.pager.close()
