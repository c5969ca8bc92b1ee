"""A disk that goes wrong when it is told to, beneath the paging file, and models whose state is on it."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager import bill
from pager.config import Checks
from pager.errors import TierError
from pager.tiers.disk_file import DiskFile
from tests.cases.same import PAGE, state_bytes

WIDTH = 128
LAYERS = 10
DTYPE = torch.float32


@pytest.fixture(params=[None, "zstd"], ids=["plain", "zstd"])
def compression(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Every test of the disk once more with compression, and in bf16, of which pages as small as here shrink too."""
    chosen: str | None = request.param
    if chosen is not None:
        monkeypatch.setattr(sys.modules[__name__], "DTYPE", torch.bfloat16)
    return chosen


class Medium:
    """What lies beneath every paging file while a test runs.

    ``write_error`` and ``read_error``: errno of the next ``num_errors`` calls, from the ``after``-th (from 0) on.
    ``step``: bytes moved at a time. ``gate``: calls of ``gated`` kinds wait for it. ``reads``, ``writes``: how often
    each frame went through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write_error = self.read_error = 0
        self.num_errors = 0
        self.after = 0
        self.step: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.gated: tuple[str, ...] = ()
        self.num_waiting = 0
        self.lock = threading.Lock()
        self.reads: Counter[int] = Counter()
        self.writes: Counter[int] = Counter()
        self._pread, self._pwrite = DiskFile._pread, DiskFile._pwrite
        monkeypatch.setattr(
            DiskFile, "_pread", lambda file, view, offset: self.move(file, "read", view, offset)
        )
        monkeypatch.setattr(
            DiskFile, "_pwrite", lambda file, view, offset: self.move(file, "write", view, offset)
        )

    def fail(self, *, read: int = 0, write: int = 0, after: int = 0, times: int = 10**9) -> None:
        """From the ``after``-th call from now on so many calls fail."""
        self.read_error, self.write_error, self.after, self.num_errors = read, write, after, times

    def heal(self) -> None:
        """Everything works."""
        self.fail(times=0)
        self.gate.set()

    def move(self, file: DiskFile, what: str, view: memoryview, offset: int) -> int:
        """One call of the system's."""
        if what in self.gated:
            with self.lock:
                self.num_waiting += 1
            assert self.gate.wait(60), "the gate was never opened"
        number = self.read_error if what == "read" else self.write_error
        with self.lock:
            if number and self.num_errors:
                if self.after:
                    self.after -= 1
                else:
                    self.num_errors -= 1
                    raise OSError(number, os.strerror(number))
        moved = view if self.step is None else view[: self.step]
        count = self._pread(file, moved, offset) if what == "read" else self._pwrite(file, moved, offset)
        frames = range(offset // file.page_size, -(-(offset + count) // file.page_size))
        with self.lock:
            (self.reads if what == "read" else self.writes).update(frames)
        return count


def make_layers() -> Any:
    """Square layers of four pages each, or twice as many of two."""
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=DTYPE) for _ in range(LAYERS * 4 // DTYPE.itemsize))
    return nn.Sequential(*layers)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over all of it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def manage_over_three_tiers(
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    optimizer: Any,
    folder: Path,
    *,
    shares: tuple[float, float, float] = (0.2, 0.3, 0.5),
    compression: str | None = None,
    **checks: Any,
) -> Any:
    """`pager.manage` with about these shares of the training state at home on device, host and disk; its runtime."""
    total = state_bytes(model)
    host = int(total * shares[1]) // PAGE * PAGE
    # What the process itself takes would drown the budget of so small a model.
    monkeypatch.setattr(bill, "host_room", lambda *arguments: (host, host))
    pager.manage(
        model,
        optimizer,
        device="cpu",
        page_size=PAGE,
        device_budget=int(2 * total * shares[0]) // PAGE * PAGE,  # half of it for what streams
        disk=folder,
        disk_budget=int(total * (shares[2] + 0.1)),
        disk_compression=compression,
        checks=Checks(**{"happens_before": True, "poison": True, **checks}),
    )
    return model.pager._runtime


def batch(step: int) -> torch.Tensor:
    """The input of one step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(DTYPE)


def backward(model: Any, step: int) -> torch.Tensor:
    """Forward and backward; the loss."""
    loss: torch.Tensor = model(batch(step)).square().mean()
    loss.backward()
    return loss.detach().clone()


def train_plainly(num_steps: int) -> list[torch.Tensor]:
    """Losses, then parameters, without pager."""
    model = make_layers()
    optimizer = make_optimizer(model)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        optimizer.step()
    return [*losses, *(param.detach().clone() for param in model.parameters())]


def train_stubbornly(
    model: Any, optimizer: Any, num_steps: int, *, first: int = 0
) -> tuple[list[torch.Tensor], list[TierError]]:
    """Losses, and what was raised on the way, of a user who tries each thing again that a tier refuses."""
    losses: list[torch.Tensor] = []
    errors: list[TierError] = []

    def insist(what: Any) -> Any:
        for _ in range(20):
            try:
                return what()
            except TierError as error:
                errors.append(error.with_traceback(None))
        raise AssertionError(f"refused twenty times: {errors[-1]}")

    def forward_and_backward(step: int) -> torch.Tensor:
        optimizer.zero_grad()
        return backward(model, step)

    for step in range(first, first + num_steps):
        losses.append(insist(lambda step=step: forward_and_backward(step)))
        insist(optimizer.step)
    return losses, errors


def train_until_refused(model: Any, optimizer: Any, step: int) -> None:
    """Three times the same batch; raises what a tier refuses it with."""
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def check_it_was_compressed(model: Any, compression: str | None) -> None:
    """Whether pages went through packed, where they were to, and nowhere else."""
    assert (model.pager.statistics().disk_saved_bytes > 0) is (compression is not None)


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal in every bit."""
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"number {index} of {len(expected)} differs"
