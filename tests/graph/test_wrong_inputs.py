"""Whose fault a failed capture is."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from pager.graph.wrong_inputs import (
    ForwardFailed,
    NotOnThisRung,
    fault_of_inputs,
    quiet_fake_tensors,
    unfit_call,
)


def failed(error: Exception) -> ForwardFailed:
    wrapped = ForwardFailed()
    wrapped.__cause__ = error
    return wrapped


@pytest.mark.parametrize(
    ("errors", "answer"),
    [
        (
            [failed(ValueError("expected 4D\ninput")), failed(ValueError("expected 4D\ninput"))],
            "ValueError: expected 4D input",
        ),
        ([NotOnThisRung("lstm"), failed(RuntimeError("sizes"))], "RuntimeError: sizes"),
        ([failed(ValueError("a")), failed(ValueError("b"))], None),
        ([failed(ValueError("a")), failed(TypeError("a"))], None),
        ([ValueError("in backward"), ValueError("in backward")], None),
        ([failed(ValueError("a")), ValueError("a")], None),
        ([failed(NotImplementedError("no kernel")), failed(NotImplementedError("no kernel"))], None),
        (
            [
                failed(RuntimeError("Cannot access data pointer")),
                failed(RuntimeError("Cannot access data pointer")),
            ],
            None,
        ),
        # Stand-ins for kernels of a GPU, which the CPU's do not agree with.
        (
            [
                failed(RuntimeError("Expected inputs of BF16 type")),
                failed(RuntimeError("Expected inputs of BF16 type")),
            ],
            None,
        ),
        (
            [
                failed(RuntimeError("got torch.float32, not Long")),
                failed(RuntimeError("got torch.float32, not Long")),
            ],
            "RuntimeError: got torch.float32, not Long",
        ),
        ([failed(OSError("no file")), failed(OSError("no file"))], None),
        ([NotOnThisRung("autocast")], None),
        ([], None),
    ],
)
def test_only_the_same_words_on_every_rung_are_the_inputs_fault(
    errors: list[Exception], answer: str | None
) -> None:
    assert fault_of_inputs(errors) == answer


def test_calls_that_python_would_refuse() -> None:
    model = nn.Linear(2, 2)
    assert unfit_call(model, (torch.zeros(2),), {}) is None
    assert "too many" in str(unfit_call(model, (1, 2), {}))
    assert "'input'" in str(unfit_call(model, (), {}))
    model.register_forward_pre_hook(lambda module, args: args[:1])
    assert unfit_call(model, (1, 2), {}) is None


def test_torchs_log_is_quiet_inside_only(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with caplog.at_level(logging.ERROR, logger.name):
        logger.addHandler(caplog.handler)
        with quiet_fake_tensors():
            logger.error("inside")
        logger.error("outside")
        logger.removeHandler(caplog.handler)
    assert "inside" not in caplog.text
    assert "outside" in caplog.text
