"""The fastest of some placements, by simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.cost_model import SupportsEviction
from pager.graph.simulate import SimulatedStep, simulate
from pager.graph.step_model import StepModel
from pager.graph.task_timing import MachineRates

__all__ = ["Choice", "choose_placement"]

# A difference below the simulator's error is none: the first placement is kept then.
MARGIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """The placement that was chosen, by name, and what the simulator says of each: a step, or why there is none."""

    name: str
    placement: Placement
    step: SimulatedStep
    steps: Mapping[str, SimulatedStep | str]

    def __str__(self) -> str:
        parts = [
            f"{name} {step if isinstance(step, str) else f'{step.seconds:.3f} s'}"
            for name, step in self.steps.items()
        ]
        return f"{self.name} of {', '.join(parts)}"


def choose_placement(
    model: StepModel,
    shares: DeviceShares,
    candidates: Mapping[str, Placement],
    *,
    policy: SupportsEviction,
    rates: MachineRates | None = None,
    knobs: StepKnobs | None = None,
    margin: float = MARGIN,
) -> Choice:
    """The fastest of ``candidates``, the first of them unless another is faster by more than ``margin`` of it.

    Takes about ten milliseconds a candidate for some hundred parameters. Raises ValueError without a candidate, and
    where none of them can be carried out, with the reason of the first.
    """
    steps: dict[str, SimulatedStep | str] = {}
    for name, placement in candidates.items():
        try:
            steps[name] = simulate(model, placement, shares, policy=policy, rates=rates, knobs=knobs)
        except ValueError as error:
            steps[name] = str(error)
    chosen: tuple[str, SimulatedStep] | None = None
    for name, step in steps.items():
        if isinstance(step, str):
            continue
        if chosen is None or step.seconds < chosen[1].seconds * (1 - margin):
            chosen = name, step
    if chosen is None:
        raise ValueError(
            next((str(reason) for reason in steps.values()), "there is no placement to choose from")
        )
    return Choice(name=chosen[0], placement=candidates[chosen[0]], step=chosen[1], steps=steps)
