"""What the runtime is at shows in ``torch.profiler``, and costs nothing where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pager
from pager import spans
from pager.config import Checks


def make_managed(**knobs: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    checks = Checks(daemon="inline")
    pager.manage(
        model, optimizer, device="cpu", page_size="16KiB", device_budget="320KiB", checks=checks, **knobs
    )
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_a_profile_names_what_the_runtime_does(update_at: str) -> None:
    model, optimizer = make_managed(update_at=update_at)
    for _ in range(2):
        train(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train(model, optimizer)
        train(model, optimizer)
    names = {event.name for event in profiled.events() if event.name.startswith("pager::")}
    assert names >= {"pager::update", "pager::evict", "pager::step boundary"}
    assert names & {"pager::fault", "pager::prefetch"}
    handle = model.pager
    assert isinstance(handle, pager.Handle)
    handle.close()


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch.profiler, "record_function", made.append)
    with spans.span("fault"):
        assert made == []
