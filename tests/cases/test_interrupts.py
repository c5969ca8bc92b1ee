"""Case 33: exceptions and Ctrl-C in forward, in backward, in a data loader and anywhere inside ``optimizer.step()``.

Training on afterwards equals the run that was not interrupted; a step that was interrupted is finished, not repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from tests import models
from tests.cases.bombs import Bomb, Stop
from tests.cases.same import Report, check_equal, check_same, manage, train, train_step


class Fused(nn.Module):
    """A layer whose forward or backward may go off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.bomb: Bomb | None = None
        self.where = "forward"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.bomb is not None and self.where == "forward":
                self.bomb.tick()
            if self.bomb is not None and self.where == "backward" and x.requires_grad:
                x.register_hook(lambda grad: self.bomb.tick())
        return x


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [Stop, ValueError])
def test_interrupted_forward_and_backward(where: str, error: type[BaseException]) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model.where = where
        for step in range(6):
            x = torch.full((2, 96), 0.1 * (step + 1))
            model.bomb = Bomb(step % 4, error) if step in (2, 3, 5) else None
            optimizer.zero_grad()
            try:
                model(x).square().sum().backward()
            except error:
                report("grads", [p.grad for p in model.parameters()])
                report("weights", list(model.parameters()))
                optimizer.zero_grad()
                model(x).square().sum().backward()
            optimizer.step()
            report("weights", list(model.parameters()))

    check_same(Fused, script, share=0.3)


def test_an_error_in_the_data_loader() -> None:
    case = models.make_mlp()

    def batches(broken: bool) -> Any:
        for step in range(4):
            if broken and step == 2:
                raise OSError("no such file")
            yield step

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for broken in (True, False):
            try:
                for step in batches(broken):
                    train(case, model, optimizer, [step], report)
            except OSError:
                report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_an_error_in_the_middle_of_accumulation_keeps_what_was_accumulated() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for micro in range(4):
            model.bomb = Bomb(1) if micro == 2 else None
            try:
                model(torch.full((2, 96), 0.1 * (micro + 1))).square().sum().backward()
            except Stop:
                report("grads", [p.grad for p in model.parameters()])
        optimizer.step()
        report("weights", list(model.parameters()))

    check_same(Fused, script, share=0.3)


def test_an_error_in_a_step_hook_before_the_step_leaves_all_as_it_was() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def veto(*args: Any) -> None:
            raise RuntimeError("veto")

        train(case, model, optimizer, range(1))
        train_step(case, model, 1)
        handle = optimizer.register_step_pre_hook(veto)
        with pytest.raises(RuntimeError, match="veto"):
            optimizer.step()
        handle.remove()
        report("weights", list(model.parameters()))
        report("state", copy.deepcopy(optimizer.state_dict()))
        train(case, model, optimizer, range(2, 4), report)

    check_same(lambda: models.make_mlp().model, script)


def test_an_error_in_a_closure_or_post_hook() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def bad() -> Tensor:
            train_step(case, model, 0)
            raise RuntimeError("closure")

        def post(*args: Any) -> None:
            raise RuntimeError("post")

        with pytest.raises(RuntimeError, match="closure"):
            optimizer.step(bad)
        report("weights", list(model.parameters()))
        handle = optimizer.register_step_post_hook(post)
        with pytest.raises(RuntimeError, match="post"):
            optimizer.step()
        handle.remove()
        report("weights", list(model.parameters()))
        train(case, model, optimizer, range(2, 4), report)

    check_same(lambda: models.make_mlp().model, script)


def failing(method: Callable[..., Any], bomb: Bomb) -> Callable[..., Any]:
    """``method``, after a tick of the bomb."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bomb.tick()
        return method(self, *args, **kwargs)

    return wrapped


def test_a_host_that_cannot_take_a_write_back_says_so_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pager.engine.transfer import Transfers

    case, twin = models.make_mlp(), models.make_mlp()
    plain = torch.optim.AdamW(twin.model.parameters(), lr=0.01)
    train(twin, twin.model, plain, range(4))
    model = manage(case.model, share=0.3, prefetch_distance=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    original = Transfers.page_out
    for step in range(4):
        bomb = Bomb(3, pager.PagerError)
        with monkeypatch.context() as patched:
            if step in (1, 2):
                patched.setattr(Transfers, "page_out", failing(original, bomb))
            try:
                optimizer.zero_grad()
                train_step(case, model, step)
            except pager.PagerError:
                optimizer.zero_grad()
                train_step(case, model, step)
            try:
                optimizer.step()
            except pager.PagerError:
                optimizer.step()
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")
