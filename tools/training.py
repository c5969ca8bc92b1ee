"""A training loop that can be stopped, and the bit comparison of two models: parts of ``pager train``."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["StopOnInterrupt", "TrainingRecord", "bits_of", "compare_models", "deterministic", "train_steps"]

Batches = Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(kw_only=True, slots=True)
class TrainingRecord:
    """What a training did so far; filled while it runs, so that it is right whenever the run stops."""

    losses: list[float] = field(default_factory=list)
    device: str = "cpu"
    step_seconds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time of all steps, without set-up."""
        return sum(self.step_seconds)


class StopOnInterrupt:
    """Within it the first Ctrl-C asks for a stop after this step; the second raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._previous: Any = None
        # Python delivers signals to the main thread only, and lets no other thread set a handler.
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> StopOnInterrupt:
        if self._active:
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("stopping after this step; Ctrl-C again stops at once")


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    steps: int,
    record: TrainingRecord,
    on_step: Callable[[float, float], bool],
) -> None:
    """Train ``model``, which maps (inputs, targets) to a loss, for ``steps`` batches.

    Losses and seconds go to ``record``; then ``on_step(loss, seconds)`` is called, and may answer False to
    stop.
    """
    device = next(model.parameters()).device
    record.device = str(device)
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))
        loss.backward()
        optimizer.step()
        value = float(loss.detach())
        seconds = time.perf_counter() - start
        record.losses.append(value)
        record.step_seconds.append(seconds)
        if not on_step(value, seconds):
            return


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8, flat, on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def compare_models(ours: nn.Module, plain: nn.Module) -> list[str]:
    """What differs in the ``state_dict`` of two models, a line per tensor; empty if every bit is the same."""
    expected, actual = plain.state_dict(), ours.state_dict()
    differences = [f"{name}: only in one of the models" for name in sorted(expected.keys() ^ actual.keys())]
    for name in expected.keys() & actual.keys():
        if expected[name].shape != actual[name].shape or expected[name].dtype != actual[name].dtype:
            differences.append(f"{name}: shape or dtype differs")
        elif not torch.equal(bits_of(expected[name]), bits_of(actual[name])):
            distance = (
                (expected[name].detach().cpu().double() - actual[name].detach().cpu().double()).abs().max()
            )
            differences.append(f"{name}: largest difference {float(distance):.3g}")
    return sorted(differences)


@contextlib.contextmanager
def deterministic(active: bool) -> Iterator[None]:
    """Deterministic algorithms while ``active``: some CUDA backwards differ from run to run by themselves."""
    if not active:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
