"""Threads that use a tensor while others take and drop CPU views of its home, made to meet by gates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks
from tests.races.gates import Worker, stop_at
from tests.races.scenarios import handle_of

CHECKS = Checks(streams="late", happens_before=True, poison=True, daemon="inline", page_all=True)


@pytest.fixture
def model() -> Iterator[nn.Linear]:
    """One paged weight with its home in host memory."""
    torch.manual_seed(0)
    linear = nn.Linear(96, 96, bias=False)
    pager.manage(
        linear, device="cpu", page_size="16KiB", device_budget="144KiB", prefetch_distance=0, checks=CHECKS
    )
    yield linear
    handle_of(linear).close()


def run(model: nn.Linear) -> torch.Tensor:
    """A forward without gradients."""
    with torch.no_grad():
        return model(torch.ones(1, 96)).clone()


def test_two_threads_notice_at_once_that_an_alias_is_gone(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(model)
    state = model.state_dict()
    del state
    gate = stop_at(monkeypatch, handle_of(model)._runtime.engine, "evict_segments")
    first = Worker(lambda: run(model))
    gate.wait_until_reached()
    torch.testing.assert_close(run(model), before, rtol=0, atol=0)
    gate.open()
    torch.testing.assert_close(first.result(), before, rtol=0, atol=0)


def test_an_alias_taken_while_another_is_settled_is_remembered(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(model)
    state = model.state_dict()
    del state
    gate = stop_at(monkeypatch, handle_of(model)._runtime.engine, "evict_segments")
    first = Worker(lambda: run(model))
    gate.wait_until_reached()
    state = model.state_dict()
    gate.open()
    first.result()
    state["weight"].mul_(2)
    torch.testing.assert_close(run(model), 2 * before)


def test_who_comes_second_to_a_written_alias_does_not_complain_about_the_first(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread has taken the write over and uses the weight again: that is no view of the old values."""
    before = run(model)
    state = model.state_dict()
    state["weight"].mul_(2)
    engine = handle_of(model)._runtime.engine
    gate = stop_at(monkeypatch, engine, "runs_of")
    second = Worker(lambda: run(model))
    gate.wait_until_reached()
    with handle_of(model).resident(model):
        gate.open()
        torch.testing.assert_close(second.result(), 2 * before)


def test_tied_names_share_one_storage_though_another_thread_takes_a_state_dict(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = handle_of(model)._runtime
    gate = stop_at(monkeypatch, runtime.mmu.aliases, "share")
    first = Worker(model.state_dict)
    gate.wait_until_reached()
    mine = model.state_dict()
    gate.open()
    theirs = first.result()
    assert mine["weight"].untyped_storage().data_ptr() == theirs["weight"].untyped_storage().data_ptr()
    assert mine["weight"].untyped_storage()._cdata == theirs["weight"].untyped_storage()._cdata
