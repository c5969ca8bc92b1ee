"""An optimizer class that raises, and a ``close()`` that is interrupted: nothing is bricked, nothing leaks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pager
from pager.errors import PagerInternalError, TierError, TornStateError
from pager.mmu import values
from tests import models
from tests.cases.same import check_equal, check_ordinary, manage, train, train_step


class Picky(torch.optim.Optimizer):
    """Momentum SGD that refuses tensors that hold ``poison`` elements or more, as often as ``times`` says."""

    calls = 0
    from_call = 10**9
    times = 10**9
    error: type[BaseException] = ValueError

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                Picky.calls += 1
                if Picky.calls > Picky.from_call and Picky.times > 0:
                    Picky.times -= 1
                    raise Picky.error("not this tensor")
                state = self.state[param]
                if "m" not in state:
                    state["m"] = torch.zeros_like(param)
                state["m"].mul_(0.9).add_(param.grad)
                param.sub_(state["m"], alpha=group["lr"])


@pytest.fixture(autouse=True)
def _harmless() -> Any:
    yield
    Picky.calls, Picky.from_call, Picky.times, Picky.error = 0, 10**9, 10**9, ValueError


def fail_after(num_calls: int, *, times: int = 10**9, error: type[BaseException] = ValueError) -> None:
    """The class raises from its call number ``num_calls`` (from now) on."""
    Picky.from_call, Picky.times, Picky.error = Picky.calls + num_calls, times, error


def prepared(num_calls: int, **how: Any) -> tuple[models.Case, Any, Picky, dict[str, Any]]:
    """A model one step into training whose second step fails after ``num_calls``; its values before that step."""
    case = models.make_mlp(depth=2)
    model = manage(case.model, share=0.3)
    optimizer = Picky(model.parameters())
    train(case, model, optimizer, range(1))
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer.zero_grad()
    train_step(case, model, 1)
    fail_after(num_calls, **how)
    return case, model, optimizer, before


def snapshot(model: Any) -> dict[str, Any]:
    """The values that can be read now, copied."""
    return {name: value.clone() for name, value in model.state_dict().items()}


READERS: dict[str, Callable[[models.Case, Any, Any], Any]] = {
    "read": lambda case, model, optimizer: [param.sum() for param in model.parameters()],
    "zero_grad": lambda case, model, optimizer: optimizer.zero_grad(),
    "state_dict": lambda case, model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "forward": lambda case, model, optimizer: model(*case.make_batch(1)[0]),
    "deepcopy": lambda case, model, optimizer: copy.deepcopy(model),
    "close": lambda case, model, optimizer: model.pager.close(),
}


@pytest.mark.parametrize("first", READERS)
def test_a_class_that_raises_half_way_bricks_nothing(first: str) -> None:
    case, model, optimizer, before = prepared(4)
    with pytest.raises(ValueError, match="not this tensor"):
        optimizer.step()
    READERS[first](case, model, optimizer)
    if first != "close":
        for reader in READERS.values():
            with torch.no_grad():
                after = snapshot(model)
                reader(case, model, optimizer) if reader is not READERS["close"] else None
                check_equal(after, snapshot(model), "reading changes nothing")
        with pytest.raises(
            TornStateError, match=r"Picky.step\(\) was given up.*not this tensor.*load_state_dict"
        ):
            optimizer.step()
        model.pager.close()
    check_ordinary(model)
    changed = [
        name for name, value in before.items() if not torch.equal(value, dict(model.state_dict())[name])
    ]
    assert changed, "what was committed stays"
    assert len(changed) < len(before), "the rest is not updated"


def test_the_rest_is_tried_once_more() -> None:
    case, model, optimizer, _ = prepared(4, times=1)
    with pytest.raises(ValueError, match="not this tensor"):
        optimizer.step()
    found = snapshot(model)
    optimizer.step()
    train(case, model, optimizer, range(2, 3))
    model.pager.close()
    plain = models.make_mlp(depth=2)
    plain_optimizer = Picky(plain.model.parameters())
    train(plain, plain.model, plain_optimizer, range(2))
    check_equal(dict(plain.model.state_dict()), found, "finished at the first read")


def test_a_first_tensor_that_fails_leaves_the_last_step() -> None:
    _, model, optimizer, before = prepared(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="not this tensor"):
            optimizer.step()
        check_equal(before, snapshot(model), "as it was")
    Picky.times = 0
    optimizer.step()
    plain = models.make_mlp(depth=2)
    train(plain, plain.model, Picky(plain.model.parameters()), range(2))
    check_equal(dict(plain.model.state_dict()), snapshot(model), "the step, when it works again")
    model.pager.close()


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_loading_heals(what: str) -> None:
    _, model, optimizer, before = prepared(4)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="not this tensor"):
        optimizer.step()
    with pytest.raises(TornStateError):
        optimizer.step()
    Picky.times = 0
    if what == "model":
        model.load_state_dict(before)
    optimizer.load_state_dict(saved) if what == "optimizer" else None
    optimizer.step()
    assert model.pager.statistics().num_steps == 2
    model.pager.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, TierError, MemoryError])
def test_what_can_pass_is_finished_later(error: type[BaseException]) -> None:
    _, model, optimizer, _ = prepared(4, times=3, error=error)
    for _ in range(3):
        with pytest.raises(error):
            optimizer.step()
    optimizer.step()
    model.pager.close()
    plain = models.make_mlp(depth=2)
    train(plain, plain.model, Picky(plain.model.parameters()), range(2))
    check_equal(dict(plain.model.state_dict()), dict(model.state_dict()), "finished")


def test_an_optimizer_dropped_in_mid_step_still_finishes() -> None:
    _, model, optimizer, _ = prepared(4, times=1, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del optimizer
    found = snapshot(model)
    plain = models.make_mlp(depth=2)
    train(plain, plain.model, Picky(plain.model.parameters()), range(2))
    check_equal(dict(plain.model.state_dict()), found, "finished")
    model.pager.close()


def test_an_optimizer_dropped_in_mid_step_can_be_replaced() -> None:
    case, model, optimizer, _ = prepared(4, times=1, error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    del optimizer
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.step()
    plain = models.make_mlp(depth=2)
    train(plain, plain.model, Picky(plain.model.parameters()), range(2))
    torch.optim.SGD(plain.model.parameters(), lr=0.1).step()
    model.pager.close()
    check_equal(dict(plain.model.state_dict()), dict(model.state_dict()), "both steps")
    assert case.model is model


# -- close -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(0, 20, 3))
def test_close_goes_on_where_it_was_interrupted(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.make_mlp(depth=2)
    model = manage(case.model, share=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(case, model, optimizer, range(2))
    plain = models.make_mlp(depth=2)
    plain_optimizer = torch.optim.AdamW(plain.model.parameters(), lr=0.01)
    train(plain, plain.model, plain_optimizer, range(2))
    handle, original, calls = model.pager, values.cpu_tensor, []

    def cpu_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(values, "cpu_tensor", cpu_tensor)
    interrupted = False
    try:
        handle.close()
    except KeyboardInterrupt:
        interrupted = True
        assert model.pager is handle
        handle.close()
    assert interrupted == (len(calls) > at)
    handle.close()
    check_ordinary(model)
    check_equal(dict(plain.model.state_dict()), dict(model.state_dict()), "weights")
    check_equal([p.grad for p in plain.model.parameters()], [p.grad for p in model.parameters()], "gradients")
    check_equal(plain_optimizer.state_dict()["state"], optimizer.state_dict()["state"], "state")


def test_close_from_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.make_mlp(depth=2)
    model = manage(case.model, share=0.3)
    handle, original = model.pager, values.cpu_tensor
    inside, go_on = threading.Event(), threading.Event()

    def cpu_tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        inside.set()
        assert go_on.wait(30)
        return original(*args, **kwargs)

    monkeypatch.setattr(values, "cpu_tensor", cpu_tensor)
    ordinary: list[bool] = []

    def close() -> None:
        handle.close()
        ordinary.append(all(type(param) is torch.nn.Parameter for param in model.parameters()))

    threads = [threading.Thread(target=close) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert ordinary == [True] * 3
    check_ordinary(model)


@pytest.mark.parametrize("where", ["background", "reading"])
def test_close_gives_everything_back_after_an_internal_error(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = models.make_mlp(depth=2)
    model = manage(case.model, share=0.3, disk=tmp_path, host_budget=2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(case, model, optimizer, range(2))
    expected, runtime = snapshot(model), model.pager._runtime
    error = PagerInternalError("a bug")
    if where == "background":
        runtime.engine.fail(error)
    else:

        def broken(*args: Any) -> None:
            raise error

        monkeypatch.setattr(type(runtime.engine), "flush", broken)
    with pytest.raises(PagerInternalError, match="a bug"):
        model.pager.close()
    check_ordinary(model)
    check_equal(expected, dict(model.state_dict()), "values")
    assert runtime.closed
    assert runtime.pagerd.is_closed
    assert runtime.device.is_closed
    model = pager.manage(model, device="cpu", page_size="16KiB")
    model.pager.close()
