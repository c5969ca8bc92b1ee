"""What a hostile user found in updates that wait, are fetched ahead, or keep masters."""

from __future__ import annotations

import contextlib
import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.engine.staging import Staging
from pager.errors import TornStateError

BATCHES = torch.randn(8, 16, 256, generator=torch.Generator().manual_seed(1))
STATE_BYTES = 4 * 4 * 3 * 256 * 257


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).to(dtype)


def manage(model: nn.Module, **knobs: Any) -> Any:
    checks = Checks(streams="late", happens_before=True, poison=True, daemon="inline")
    knobs = {
        "device": "cpu",
        "page_size": "16KiB",
        "device_budget": STATE_BYTES // 3,
        "checks": checks,
        **knobs,
    }
    return pager.manage(model, **knobs)


def backward(model: nn.Module, batch: int) -> None:
    model(BATCHES[batch].to(next(model.parameters()).dtype)).float().pow(2).mean().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    wanted = values_of(expected)
    assert [key for key, value in values_of(found).items() if not torch.equal(value, wanted[key])] == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; in the background of a shell it would arrive ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_interrupt_held_back_by_a_commit_does_not_repeat_it(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised right after the unit's results are in; the unit must not run again."""
    plain, model = make(), manage(make())
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), range(2))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(2))
    original = Staging.write_back
    calls = 0

    def write_back(staging: Staging, *args: Any) -> None:
        nonlocal calls
        original(staging, *args)
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "write_back", write_back)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(BATCHES[2])
    assert calls >= call
    check_equal(model, plain)
    model.pager.close()


@pytest.mark.parametrize("share", [1, 2, 3])
def test_a_step_without_a_last_backward_leaves_no_old_states_behind(share: int) -> None:
    """What was fetched for the next backward is old once step() itself has updated the parameter."""
    plain, model = make(), manage(make(), update_at="backward", device_budget=STATE_BYTES // share)
    for one, accumulate in ((plain, contextlib.nullcontext), (model, model.pager.accumulate)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        train(one, optimizer, range(2))
        with accumulate():
            backward(one, 2)
        optimizer.step()
        optimizer.zero_grad()
        train(one, optimizer, range(3, 5))
    check_equal(model, plain)
    model.pager.close()


def test_states_that_were_rounded_on_the_way_in_are_refused() -> None:
    """torch's load_state_dict gives states the parameter's dtype, unless it is told of the masters before."""
    model = manage(make(torch.bfloat16), master="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))

    late = manage(make(torch.bfloat16), master="float32")
    unknown = torch.optim.AdamW(late.parameters(), lr=1e-3)
    late.load_state_dict(saved[0])
    unknown.load_state_dict(saved[1])
    with pytest.raises(pager.ConfigError, match=r"rounded it: pass the optimizer to pager.manage"):
        train(late, unknown, range(2, 3))
    late.pager.close()

    resumed = make(torch.bfloat16)
    known = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    manage(resumed, optimizer=known, master="float32")
    resumed.load_state_dict(saved[0])
    known.load_state_dict(saved[1])
    train(resumed, known, range(2, 4))
    check_equal(resumed, model)
    handle: Any = resumed.pager
    handle.close()
    model.pager.close()


def test_masters_of_an_optimizer_without_states_are_saved() -> None:
    model = make(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    manage(model, optimizer=optimizer, master="float32")
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, range(2))
    shown = optimizer.state_dict()["state"]
    assert sorted(shown) == list(range(6))
    assert all(state["master"].dtype == torch.float32 for state in shown.values())
    handle: Any = model.pager
    handle.close()


def test_a_backward_after_one_that_ended_in_an_exception_says_torn() -> None:
    model = manage(make(), update_at="backward")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(2))

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError("in the user's hook")

    hidden = model[0](BATCHES[2])
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model[2](model[1](hidden)).pow(2).mean().backward()
    optimizer.zero_grad()
    with pytest.raises(TornStateError, match="ended a backward"):
        backward(model, 3)
    model.pager.close()


def test_close_ends_masters_aloud_and_leaves_an_optimizer_that_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manage(model, optimizer=optimizer, master="float32")
    train(model, optimizer, range(2))
    handle: Any = model.pager
    handle.close()
    assert "save optimizer.state_dict() before close()" in caplog.text
    train(model, optimizer, range(2, 3))
    first: Any = next(model.parameters())
    assert optimizer.state[first]["exp_avg"].dtype == torch.bfloat16
