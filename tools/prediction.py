"""What a run would be like on a machine: the device's shares, the placement, and the simulated step.

The formulas are the runtime's own: `pager.device_budget` says how much is the arena's, `pager.policies` who stays,
where homes are and what the CPU is given; only the device is one of paper.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pager.config import Config
from pager.device_budget import DeviceBudget
from pager.errors import BudgetError
from pager.graph.arena_walk import DeviceShares, Placement
from pager.graph.bound import StepBound, StepCeilings, step_bound
from pager.graph.simulate import SimulatedStep, simulate
from pager.optim.adopted import UNIT_BYTES
from pager.policies.placement import PlacementError
from pager.policies.protocol import make_eviction_policy
from pager.policies.staying import UPDATE_TENSORS, lent_gradient_bytes, share_arena, spread
from pager.policies.update_split import LEAD, late_elements
from pager.tools.captured import CapturedModel
from pager.tools.cpu_part import CpuPart
from pager.tools.machine import Machine
from pager.tools.placing import Placing, weights_to_wire
from pager.units import format_bytes

__all__ = ["Prediction", "Wanted", "predict"]

# A share of the update for the CPU follows from rates that it changes itself.
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The knobs of a run. ``compute_seconds``: measured, of forward and backward; None: by the machine's rates.

    ``cpu_share``: None: as the runtime finds it. ``cpu_order``: "spread" (the runtime's), over the first ``cpu_lead``
    of the gradients, or "last used"; ``weights``, ``states``: "spread" or "belady".
    ``num_machines``: each holds all weights, a share of the states, and takes its own batch (on paper only: the runtime
    uses one device). ``late``: some updates inside backward may wait for its end. ``simulated``: as on the simulated
    device, where the budget is the pages' alone. ``eviction``: a name or a policy object. ``host_bytes``: for homes.
    """

    budget_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    update_at: str = "step"
    update_on: str = "device"
    eviction: Any = "belady"
    prefetch_extents: int = 4
    compute_seconds: float | None = None
    cpu_share: float | None = None
    cpu_order: str = "spread"
    cpu_lead: float = LEAD
    weights: str = "spread"
    states: str = "belady"
    num_machines: int = 1
    late: bool = True
    simulated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """``fits``: nothing would be paged. ``reason``: why there is no step, else None; ``may_train``: it may train all
    the same, but nobody knows how fast. Bytes as on the device.

    ``network_seconds``: what several machines need between them: gradients to their owners, new weights to all.
    """

    wanted: Wanted
    fits: bool
    reason: str | None
    arena_bytes: int
    activation_bytes: int
    may_train: bool = False
    headroom_bytes: int
    shares: DeviceShares | None = None
    placement: Placement | None = None
    step: SimulatedStep | None = None
    bound: StepBound | None = None
    network_seconds: float = 0.0

    @property
    def seconds(self) -> float | None:
        """Of a step; None where there is none. The network is taken to work beside everything else."""
        return None if self.step is None else max(self.step.seconds, self.network_seconds)


class _PaperDevice:
    """What `DeviceBudget` asks of a device."""

    def __init__(self, machine: Machine, *, is_simulated: bool) -> None:
        self.is_simulated = is_simulated
        self._machine = machine

    def total_bytes(self) -> int:
        return self._machine.device_bytes

    def free_bytes(self) -> int:
        return self._machine.device_bytes - self._machine.context_bytes

    def process_bytes(self) -> int:
        return self._machine.context_bytes

    def allocator_bytes(self) -> int:
        return 0

    def allocator_peak_bytes(self) -> int:
        return 0

    def num_out_of_memory(self) -> int:
        return 0

    def reset_allocator_peak(self) -> None:
        """Nothing was allocated."""

    def limit_allocator(self, num_bytes: int | None) -> None:
        """Nothing is allocated."""


def predict(
    captured: CapturedModel, machine: Machine, wanted: Wanted, *, keep_tasks: bool = False
) -> Prediction:
    """Simulate a run with these knobs. Never raises for a run that cannot be: its ``reason`` says why."""
    step = captured.step
    if wanted.compute_seconds is not None:
        step = step.scaled_to(wanted.compute_seconds)
        captured = dataclasses.replace(captured, step=step)
    if wanted.num_machines > 1:
        captured = _share_of(captured, wanted.num_machines)
        step = captured.step
    element_bytes = step.size.weight + step.size.gradient + step.size.state
    state_bytes = step.num_parameters * element_bytes
    known: dict[str, Any] = {"wanted": wanted, "activation_bytes": captured.activation_bytes}
    try:
        budget = DeviceBudget(
            _PaperDevice(machine, is_simulated=wanted.simulated),  # type: ignore[arg-type]
            Config(device_budget=wanted.budget_bytes),
            small_bytes=step.small_bytes,
        )
    except BudgetError as error:
        return Prediction(**known, fits=False, reason=_plain(error), arena_bytes=0, headroom_bytes=0)
    largest = int(step.num_elements.max()) * step.size.weight
    arena = max(budget.arena_bytes(captured.activation_bytes), 0)
    known |= {
        "headroom_bytes": max(
            budget.allocator_bytes - step.small_bytes - captured.activation_bytes - arena, 0
        ),
    }
    if state_bytes <= arena - arena // 16:
        return Prediction(**known, fits=True, reason=None, arena_bytes=state_bytes)
    beside = captured.activation_bytes + 2 * largest + 4 * UNIT_BYTES
    # What steps were seen to take: a gradient of the largest on its way, and those that are lent.
    taken = captured.activation_bytes + largest
    if wanted.update_at == "backward" and not wanted.simulated:
        beside += lent_gradient_bytes(captured.activation_bytes, max(budget.arena_bytes(beside), 0))
        taken += lent_gradient_bytes(captured.activation_bytes, max(budget.arena_bytes(taken), 0))
    unsettled = max(budget.arena_bytes(beside), 0)
    arena = max(budget.arena_bytes(taken, settled=True), unsettled)
    known["arena_bytes"] = arena
    least_slot = captured.page_size // step.size.gradient * step.size.staged(wanted.update_at)
    wired = weights_to_wire(captured, wanted, first_arena=max(budget.arena_bytes(None), 0), arena=unsettled)
    num_slots, slot_bytes = share_arena(
        arena,
        captured.page_size,
        least_slot_bytes=least_slot,
        in_backward=wanted.update_at == "backward",
        activation_bytes=0 if wanted.simulated else captured.activation_bytes,
        wired_bytes=wired.num_bytes,
    )
    shares = DeviceShares(
        arena_bytes=arena,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        wired_bytes=wired.num_bytes,
        wired_above=wired.first_above,
    )
    known["shares"] = shares
    if not num_slots or arena < UPDATE_TENSORS * largest:
        return Prediction(
            **known,
            fits=False,
            # The runtime then steps whole tensors through the arena, which is not simulated.
            may_train=arena >= largest,
            reason=f"of a budget of {format_bytes(wanted.budget_bytes)} {format_bytes(arena)} are left for pages "
            f"beside activations of {format_bytes(captured.activation_bytes)}; streaming the largest tensor "
            f"({format_bytes(largest)}) takes {UPDATE_TENSORS} of it, and its states a slot",
        )
    try:
        placement, result = _simulate(captured, machine, wanted, shares, keep_tasks=keep_tasks)
    except (PlacementError, ValueError) as error:
        return Prediction(**known, fits=False, reason=_plain(error))
    # The bound knows one machine that updates everything.
    bound = (
        _bound(captured, machine, wanted, arena + captured.activation_bytes)
        if wanted.num_machines == 1
        else None
    )
    if bound is not None:
        result = dataclasses.replace(result, bound=bound.seconds)
    others = 1 - 1 / wanted.num_machines
    known["network_seconds"] = (
        others
        * step.num_parameters
        * (step.size.weight + step.size.gradient)
        / machine.network_bytes_per_second
    )
    return Prediction(**known, fits=False, reason=None, placement=placement, step=result, bound=bound)


def _share_of(captured: CapturedModel, num_machines: int) -> CapturedModel:
    """The step of one of several machines: it updates every so-many-th parameter, evenly by elements."""
    step = captured.step
    own = spread(step.num_elements, step.num_parameters / num_machines)
    return dataclasses.replace(
        captured, step=dataclasses.replace(step, gradient_tick=np.where(own, step.gradient_tick, -1))
    )


def _plain(error: Exception) -> str:
    return str(error).removeprefix("pager: ")


def _simulate(
    captured: CapturedModel, machine: Machine, wanted: Wanted, shares: DeviceShares, *, keep_tasks: bool
) -> tuple[Placement, SimulatedStep]:
    """Where the CPU takes part its share and its threads are found as the runtime does: from the steps before."""
    placing = Placing(captured, shares, wanted)
    cpu = CpuPart(captured.step, machine.rates, wanted, keeps_states=placing.keeps_states)
    is_on_gpu = not wanted.simulated
    leaves_late = wanted.late and wanted.update_at == "backward" and placing.all_stay and is_on_gpu
    for _ in range(_ROUNDS):
        placement = placing.make(cpu.share)
        result = simulate(
            captured.step,
            placement,
            shares,
            policy=make_eviction_policy(wanted.eviction),
            rates=cpu.rates,
            knobs=cpu.knobs(placement, placing.lent_bytes),
            keep_tasks=keep_tasks,
        )
        goes_on = cpu.goes_on(result)
        if leaves_late:
            leaves_late = False
            placing.leave_to_the_end(
                late_elements(
                    rest_seconds=result.forward_seconds,
                    stall_seconds=sum(result.stall_seconds.values()),
                    link_bytes_per_second=machine.rates.link_both_bytes_per_second,
                    state_bytes=captured.step.size.state,
                    num_elements=captured.step.num_parameters,
                )
            )
            if placing.late.any():
                cpu.has_whole_step(placing.keeps_states)
                goes_on = True
        if not goes_on:
            break
    return placement, result


def _bound(captured: CapturedModel, machine: Machine, wanted: Wanted, device_bytes: int) -> StepBound | None:
    """The least seconds of any schedule; None where the linear program has no solution."""
    step = captured.step
    forward, backward = step.phase_seconds()
    rates = machine.rates
    # What is on the disk is read and written once, so that either way takes as long.
    each_way = min(
        rates.disk_read_bytes_per_second, rates.disk_write_bytes_per_second, rates.disk_both_bytes_per_second
    )
    try:
        return step_bound(
            num_parameters=step.num_parameters,
            ceilings=StepCeilings(
                forward_seconds=forward,
                backward_seconds=backward,
                device_update_parameters_per_second=rates.device_update_parameters_per_second,
                link_in_bytes_per_second=rates.link_in_bytes_per_second,
                link_out_bytes_per_second=rates.link_out_bytes_per_second,
                link_both_bytes_per_second=rates.link_both_bytes_per_second,
                host_dram_bytes_per_second=rates.host_dram_bytes_per_second,
                cpu_update_parameters_per_second=rates.cpu_update_parameters_per_second,
                disk_bytes_per_second=2 * each_way if wanted.disk_bytes else math.inf,
            ),
            device_bytes=float(device_bytes),
            activation_bytes=float(captured.activation_bytes),
            update_at=wanted.update_at,
            update_on=wanted.update_on,
            size=step.size,
            host_bytes=float(wanted.host_bytes),
        )
    except ValueError:
        return None
