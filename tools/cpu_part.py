"""The CPU's part of the update in a prediction: how much, on how many threads, and what waits for it.

By the formulas of `pager.policies.update_split`, from the steps before, as `pager.optim.on_cpu` does it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from pager.graph.arena_walk import Placement, StepKnobs
from pager.policies.update_split import (
    STEADY_THREADS_SHARE,
    WAITING_SHARE,
    balanced_share,
    less_share,
    num_slices,
    num_threads_beside_link,
    rate_beside_link,
)

if TYPE_CHECKING:
    from pager.graph.simulate import SimulatedStep
    from pager.graph.step_model import StepModel
    from pager.graph.task_timing import MachineRates
    from pager.policies.staying import BoolArray
    from pager.tools.prediction import Wanted

__all__ = ["CpuPart"]

# Of the elements: no other share than in the step before.
_SAME_SHARE = 0.005
# As `pager.optim.gradient_homes`: room for so many of the largest.
_LEAST_GRADIENTS = 2


class CpuPart:
    """How much the CPU updates, and on how many threads: as `pager.optim.on_cpu` and `pager.optim.cpu_rates`."""

    def __init__(
        self, step: StepModel, rates: MachineRates, wanted: Wanted, *, keeps_states: BoolArray
    ) -> None:
        """``keeps_states``: per parameter, whether its states stay on the device."""
        self.step = step
        self.wanted = wanted
        self.rates = dataclasses.replace(rates, cpu_bytes_per_parameter=float(step.size.cpu_update))
        self.streamed = self._streamed(keeps_states)
        self.link_rests = True
        self.fixed = {"device": 0.0, "cpu": 1.0}.get(wanted.update_on, wanted.cpu_share)
        gradients = np.where(step.gradient_tick >= 0, step.num_elements * step.size.gradient, 0)
        self.home_bytes: int | None = None
        self.waiting_share = 1.0
        if wanted.update_at == "backward" and wanted.update_on == "auto":
            total, largest = int(gradients.sum()), int(gradients.max())
            self.home_bytes = max(int(WAITING_SHARE * total), _LEAST_GRADIENTS * largest)
            self.waiting_share = self.home_bytes / max(total, 1)
        # Of the last step; 0.0 before it.
        self.per_second = self.rest_seconds = self.less = 0.0
        # What the runtime finds while the link rests is taken to be the machine's rate. Where nobody knows when it
        # rests, the rate of a whole step counts.
        size = self.step.size
        self.alone = rates.cpu_update_parameters_per_second if wanted.update_at == "backward" else 0.0
        self.beside = rate_beside_link(
            self.alone,
            element_bytes=2 * size.state + 5 * size.gradient,
            link_bytes_per_second=rates.link_both_bytes_per_second,
        )
        self.share = self._balance() if self.fixed is None else self.fixed

    def _streamed(self, keeps_states: BoolArray) -> float:
        return 1 - float(self.step.num_elements[keeps_states].sum()) / self.step.num_parameters

    def has_whole_step(self, keeps_states: BoolArray) -> None:
        """The link does not rest between two backwards from now on: so the CPU need not hurry, and its rate in a whole
        step counts.
        """
        self.link_rests = False
        self.streamed = self._streamed(keeps_states)
        self.alone = self.rest_seconds = self.less = 0.0

    def _balance(self) -> float:
        size = self.step.size
        share = balanced_share(
            streamed_share=self.streamed,
            state_bytes=size.state,
            sent_bytes=size.gradient,
            link_bytes_per_second=self.rates.link_both_bytes_per_second,
            elements_per_second=self.beside if self.alone else self.per_second,
            alone_per_second=self.alone or self.per_second,
            rest_seconds=self.rest_seconds / self.step.num_parameters,
            waiting_share=self.waiting_share,
        )
        return max(share - self.less, 0.0)

    @property
    def _num_threads(self) -> int:
        """Beside the link."""
        total = self.rates.cpu_threads
        if self.wanted.update_on == "cpu":
            return total
        if self.wanted.update_at == "step":
            return num_threads_beside_link(total)
        if not self.link_rests:
            return num_threads_beside_link(total, STEADY_THREADS_SHARE)
        return num_threads_beside_link(total, self.beside / (self.alone or 1.0))

    def knobs(self, placement: Placement, lent_bytes: int) -> StepKnobs:
        """The knobs of a step with this part."""
        wanted, elements = self.wanted, self.step.num_elements
        part = int(elements[placement.on_cpu].sum())
        return StepKnobs(
            update_at=wanted.update_at,
            prefetch_extents=wanted.prefetch_extents,
            lent_bytes=lent_bytes,
            home_bytes=self.home_bytes,
            cpu_threads=self._num_threads,
            cpu_slices=tuple(num_slices(n, part, self.rates.cpu_threads) for n in elements.tolist()),
        )

    def goes_on(self, result: SimulatedStep) -> bool:
        """Learn from a step; whether the next one has another part."""
        if self.fixed is not None:
            return False
        share = self.share
        self.per_second = result.cpu_parameters_per_second
        if self.link_rests:
            self.rest_seconds = (result.rest_seconds + (self.rest_seconds or result.rest_seconds)) / 2
        self.less = less_share(
            self.less,
            late_seconds=result.late_seconds,
            elements_per_second=self.per_second,
            num_elements=self.step.num_parameters,
            num_refused_elements=result.num_refused_elements,
        )
        self.share = self._balance()
        return abs(self.share - share) >= _SAME_SHARE
