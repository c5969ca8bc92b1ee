"""What is lent to updates beside the backward: kept until they are over, bounded, given back at the end."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks
from pager.device.simulated import SimulatedDevice, SimulatedEvent
from pager.optim.update_stream import UpdateStream
from pager.residency import Residency

BYTES = 4096


def make_managed() -> tuple[Any, Any]:
    """Eight layers whose states stream, and the handle; ``model.optimizer`` steps them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    object.__setattr__(model, "optimizer", torch.optim.AdamW(model.parameters()))
    pager.manage(
        model,
        model.optimizer,
        device="cpu",
        page_size="16KiB",
        device_budget="480KiB",
        update_at="backward",
        checks=Checks(streams="late", happens_before=True, poison=True, daemon="inline"),
    )
    return model, model.pager


def train(model: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.optimizer.step()
    model.optimizer.zero_grad()


class Lender:
    """A stream for updates on a device whose compute is over only when somebody has waited for it."""

    def __init__(self, limit_bytes: int) -> None:
        self.device = SimulatedDevice(lazy_compute=True)
        self.stream = UpdateStream(self.device, lambda: limit_bytes)
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def lend(self, *others: torch.Tensor) -> None:
        gradient = torch.ones(BYTES, dtype=torch.uint8)
        self.alive.append(weakref.ref(gradient))
        with self.stream.lend(gradient, others):
            pass

    def num_alive(self) -> int:
        return sum(reference() is not None for reference in self.alive)


def test_work_goes_to_the_stream_beside_and_back() -> None:
    lender = Lender(0)
    device = lender.device
    with lender.stream.lend(torch.ones(1), []):
        assert device.current_stream() is device.beside
    assert device.current_stream() is device.compute


@pytest.mark.parametrize(("limit", "kept"), [(0, 1), (BYTES, 1), (2 * BYTES, 2), (9 * BYTES, 5)])
def test_no_more_is_lent_than_may_be(limit: int, kept: int) -> None:
    lender = Lender(limit)
    for _ in range(5):
        lender.lend()
    assert lender.num_alive() == kept
    assert lender.stream.num_bytes == kept * BYTES


def test_what_is_over_comes_back_without_a_wait() -> None:
    lender = Lender(9 * BYTES)
    lender.lend()
    event = lender.stream._loans[0].event
    assert isinstance(event, SimulatedEvent)
    lender.device.force(event)
    lender.lend()
    assert lender.num_alive() == 1


def test_other_tensors_live_as_long() -> None:
    lender = Lender(9 * BYTES)
    count = torch.zeros(())
    alive = weakref.ref(count)
    lender.lend(count)
    del count
    assert alive() is not None
    lender.stream.join()
    assert alive() is None
    assert not lender.stream.num_bytes


def test_work_that_fails_may_have_begun() -> None:
    lender = Lender(9 * BYTES)
    with pytest.raises(ZeroDivisionError), lender.stream.lend(torch.ones(BYTES, dtype=torch.uint8), []):
        raise ZeroDivisionError
    assert lender.device.current_stream() is lender.device.compute
    assert lender.stream.num_bytes == BYTES
    lender.stream.join()
    assert not lender.stream.num_bytes


def test_a_wait_beside_stops_nobody() -> None:
    device = SimulatedDevice()
    device.beside.wait(device.h2d.record(), timed=True)
    assert device.drain_stall_seconds() == 0
    device.compute.wait(device.h2d.record(), timed=True)
    assert device.drain_stall_seconds() > 0


def test_who_looks_after_a_backward_that_broke_comes_after_its_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The callback at the end of a backward, which would have joined, is not called."""
    monkeypatch.setattr(Residency, "lent_bytes", lambda self: 2**20)
    model, handle = make_managed()
    x = torch.randn(2, 96)
    for _ in range(2):
        train(model, x)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    next(iter(model.parameters())).register_hook(fail)
    # None of them is over before somebody has waited for it.
    monkeypatch.setattr(SimulatedEvent, "_query", lambda event: False)
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    stream = handle._runtime.in_backward._stream
    assert stream.num_bytes
    model.state_dict()
    assert not stream.num_bytes
    handle.close()


@pytest.mark.parametrize("holds_view", [False, True])
def test_a_parameter_that_somebody_has_a_view_of_is_updated_on_the_compute_stream(
    holds_view: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader asks nobody before it reads."""
    monkeypatch.setattr(Residency, "lent_bytes", lambda self: 2**20)
    lent: list[torch.Tensor] = []
    lend = UpdateStream.lend

    def note_and_lend(self: UpdateStream, gradient: torch.Tensor, others: Any) -> Any:
        lent.append(gradient)
        return lend(self, gradient, others)

    monkeypatch.setattr(UpdateStream, "lend", note_and_lend)
    model, handle = make_managed()
    x = torch.randn(2, 96)
    for _ in range(2):
        train(model, x)
    before = len(lent)
    assert before
    weight = next(model.parameters())
    with torch.no_grad():
        view = weight.view(-1) if holds_view else None
    train(model, x)
    assert len(lent) - before == (7 if holds_view else 8)
    if view is not None:
        assert torch.equal(view, weight.flatten())
    del view
    handle.close()
