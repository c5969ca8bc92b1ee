"""Settings measured: in the simulator, and by a short run of the model under pager on this machine."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import pager
from pager.device.base import make_device
from pager.errors import ConfigError
from pager.graph.capture import step_loss
from pager.statistics import Statistics
from pager.tools.captured import CapturedModel
from pager.tools.errors import CommandFailed
from pager.tools.machine import Machine
from pager.tools.model_source import ModelSource
from pager.tools.plan_options import capture_from, wanted_from
from pager.tools.prediction import predict
from pager.tools.tuner import Measurement, Setting, spread_of

__all__ = ["MachineRuns", "SimulatedRuns", "measure_steps"]

# The first steps fault, page-lock and learn their rates.
WARM_STEPS = 3


class SimulatedRuns:
    """Settings in the simulator, with the options of a command; ``measure`` takes a second or so each."""

    def __init__(self, arguments: argparse.Namespace, budget_bytes: int) -> None:
        self._arguments = arguments
        self._budget_bytes = budget_bytes
        self._captured: dict[int, tuple[CapturedModel, Machine]] = {}

    def measure(self, setting: Setting) -> Measurement:
        """The predicted step; the reason where there is none."""
        arguments = argparse.Namespace(
            **{
                **vars(self._arguments),
                "page_size": str(setting.page_bytes),
                "prefetch_distance": setting.prefetch_distance,
            }
        )
        try:
            # Which tensors are small enough to be left alone depends on the page size.
            if setting.page_bytes not in self._captured:
                self._captured[setting.page_bytes] = capture_from(arguments)
        except CommandFailed as error:
            return Measurement(reason=str(error))
        captured, machine = self._captured[setting.page_bytes]
        found = predict(captured, machine, wanted_from(arguments, captured, machine, self._budget_bytes))
        if found.step is None:
            return Measurement(reason=found.reason or "everything fits the device; nothing is paged")
        return Measurement(
            seconds=found.step.seconds,
            busy_share=1 - found.step.stall_share,
            peak_share=found.step.waveform.peak_bytes / self._budget_bytes,
        )


class MachineRuns:
    """Settings on this machine: ``make_source`` draws the model anew for each. ``knobs``: all other knobs."""

    def __init__(
        self, make_source: Callable[[], ModelSource], *, knobs: dict[str, Any], steps: int, seed: int
    ) -> None:
        self._make_source = make_source
        self._knobs = knobs
        self._steps = steps
        self._seed = seed

    def measure(self, setting: Setting) -> Measurement:
        """Steady steps of a run; the reason where pager refuses it or pages nothing."""
        try:
            return self._run(setting)
        # With what is refused up front (BudgetError) also what activations do not fit in.
        except (torch.OutOfMemoryError, ConfigError) as error:
            return Measurement(reason=str(error).removeprefix("pager: "))
        finally:
            # What torch keeps for later counts to the budget of the next run.
            with contextlib.closing(make_device(self._knobs.get("device", "auto"))) as device:
                device.release_cached_memory()

    def _run(self, setting: Setting) -> Measurement:
        source = self._make_source()
        optimizer = torch.optim.AdamW(source.model.parameters(), lr=1e-4)
        knobs = self._knobs | {
            "page_size": setting.page_bytes,
            "prefetch_distance": setting.prefetch_distance,
            "example_inputs": source.args or source.kwargs,
        }
        pager.manage(source.model, optimizer, **knobs)
        with contextlib.closing(source.model.pager) as handle:  # type: ignore[type-var]
            torch.manual_seed(self._seed)
            return measure_steps(source, optimizer, handle, self._steps)


def measure_steps(
    source: ModelSource,
    optimizer: torch.optim.Optimizer,
    handle: Any,
    num_steps: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Train a managed model for `WARM_STEPS` and ``num_steps``, and measure the latter, from loss to loss."""
    device = next(source.model.parameters()).device
    args = tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in source.args)
    kwargs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in source.kwargs.items()
    }
    before: Statistics = handle.statistics()
    began, seconds = clock(), []
    for number in range(WARM_STEPS + num_steps):
        if number == WARM_STEPS:
            before = handle.statistics()
        optimizer.zero_grad()
        loss = step_loss(source.model(*args, **kwargs))
        if loss is None:
            raise CommandFailed(f"{source.name}: nothing in what the model returns has a gradient")
        loss.backward()
        optimizer.step()
        loss.item()  # the device is done with the forward
        ended = clock()
        seconds.append(ended - began)
        began = ended
    return _measurement(seconds[WARM_STEPS:], before, handle.statistics())


def _measurement(seconds: list[float], before: Statistics, after: Statistics) -> Measurement:
    if after.page_in_bytes == before.page_in_bytes:
        return Measurement(reason="nothing is paged in a step: the device budget holds what it needs")
    waited = after.stall_seconds - before.stall_seconds
    accesses = max(after.num_accesses - before.num_accesses, 1)
    peak = after.peak_device_process_bytes or after.peak_resident_bytes
    return Measurement(
        seconds=statistics.median(seconds),
        noise=spread_of(seconds),
        busy_share=min(max(1 - waited / sum(seconds), 0.0), 1.0),
        peak_share=peak / after.device_budget_bytes,
        wasted_share=(after.prefetch_unused - before.prefetch_unused) / accesses,
    )
