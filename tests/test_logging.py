"""What the library logs: silent until the application asks, and each fact once."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import pager


def test_a_library_has_no_say_in_where_logs_go() -> None:
    program = (
        "import logging, pager; "
        "logging.getLogger('pager.tiers.host_arena').warning('unwanted'); "
        "print([type(handler).__name__ for handler in logging.getLogger('pager').handlers])"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert completed.stderr == ""
    assert completed.stdout == "['NullHandler']\n"


class ReadsAValue(nn.Module):
    """Cannot be captured without data: what runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(96, 96)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fc(batch)
        return output * 2 if float(output.detach().sum()) > 0 else output


def test_that_the_first_step_is_recorded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = ReadsAValue()
    with caplog.at_level(logging.INFO, "pager"):
        pager.manage(
            model,
            device="cpu",
            device_budget="128KiB",
            page_size="16KiB",
            example_inputs=(torch.zeros(2, 96),),
        )
    model.pager.close()
    reasons = [record for record in caplog.records if "item() cannot be called" in record.getMessage()]
    assert len(reasons) == 1
    assert "the first step is recorded" in reasons[0].getMessage()
