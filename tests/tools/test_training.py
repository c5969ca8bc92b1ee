"""The training loop, being stopped, and the comparison of bits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pager.tools.training import (
    StopOnInterrupt,
    TrainingRecord,
    compare_models,
    deterministic,
    train_steps,
)

BATCH = (np.ones((2, 3), dtype=np.int64), np.zeros((2, 3), dtype=np.int64))


class Regression(nn.Module):
    """Loss of a linear map; `on_forward` lets a test step in."""

    def __init__(self, on_forward: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self._on_forward = on_forward

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._on_forward()
        return (self.linear(inputs.float()) - targets).square().mean()


def run_steps(model: nn.Module, steps: int, on_step: Callable[[float, float], bool]) -> TrainingRecord:
    record = TrainingRecord()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_steps(model, optimizer, repeat(BATCH), steps=steps, record=record, on_step=on_step)
    return record


def test_a_training_records_each_step_and_learns() -> None:
    seen: list[float] = []

    def on_step(loss: float, seconds: float) -> bool:
        seen.append(loss)
        return True

    record = run_steps(Regression(), 5, on_step)
    assert record.losses == seen
    assert len(record.step_seconds) == 5
    assert record.seconds == sum(record.step_seconds) > 0
    assert record.device == "cpu"
    assert record.losses == sorted(record.losses, reverse=True)


def test_a_step_may_ask_to_stop() -> None:
    assert len(run_steps(Regression(), 5, lambda loss, seconds: False).losses) == 1


def test_an_error_leaves_the_record_of_the_steps_before_it() -> None:
    calls = iter((None, None, RuntimeError("third step")))

    def on_forward() -> None:
        error = next(calls)
        if error is not None:
            raise error

    record = TrainingRecord()
    model = Regression(on_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="third step"):
        train_steps(model, optimizer, repeat(BATCH), steps=5, record=record, on_step=lambda *_: True)
    assert len(record.losses) == 2


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupt_lets_the_step_end() -> None:
    said: list[str] = []
    with StopOnInterrupt(said.append) as stop:
        record = run_steps(Regression(interrupt), 5, lambda loss, seconds: not stop.requested)
    assert len(record.losses) == 1
    assert said == ["stopping after this step; Ctrl-C again stops at once"]


def test_the_second_interrupt_stops_at_once() -> None:
    def interrupt_twice() -> None:
        interrupt()
        interrupt()

    record = TrainingRecord()
    model = Regression(interrupt_twice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyboardInterrupt), StopOnInterrupt(lambda message: None):
        train_steps(model, optimizer, repeat(BATCH), steps=5, record=record, on_step=lambda *_: True)
    assert record.losses == []


def test_the_handler_of_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnInterrupt(lambda message: None):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    results: list[Any] = []

    def work() -> None:
        with StopOnInterrupt(lambda message: None) as stop:
            results.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [False]


def test_equal_models_do_not_differ() -> None:
    assert compare_models(Regression(), Regression()) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "linear.bias: largest difference 0"),  # against -0.0: equal numbers, other bits
        (1.0, "linear.bias: largest difference 1"),
        (float("nan"), "linear.bias: largest difference nan"),
    ],
)
def test_one_other_bit_is_a_difference(value: float, expected: str) -> None:
    ours, plain = Regression(), Regression()
    with torch.no_grad():
        ours.linear.bias.fill_(-0.0)
        plain.linear.bias.fill_(-0.0)
        ours.linear.bias[1] = value
    assert compare_models(ours, plain) == [expected]


def test_equal_nans_are_equal() -> None:
    ours, plain = Regression(), Regression()
    with torch.no_grad():
        ours.linear.bias[0] = plain.linear.bias[0] = float("nan")
    assert compare_models(ours, plain) == []


def test_other_names_shapes_and_types_are_differences() -> None:
    ours, plain = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2, bias=False))
    assert compare_models(ours, plain)[0] == "0.bias: only in one of the models"
    assert compare_models(nn.Linear(2, 3), nn.Linear(2, 2))[0] == "bias: shape or dtype differs"
    assert compare_models(nn.Linear(2, 2), nn.Linear(2, 2).half())[0] == "bias: shape or dtype differs"


def test_determinism_is_put_back() -> None:
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(False):
            assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
