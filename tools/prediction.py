"""What a run would be like on a machine: the device's shares, the placement, and the simulated step.

The formulas are the runtime's own: `pager.device_budget` says how much is the arena's, `pager.policies` who stays,
where homes are and what the CPU is given; only the device is one of paper.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pager.config import Config
from pager.device_budget import DeviceBudget
from pager.errors import BudgetError
from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.bound import StepBound, StepCeilings, step_bound
from pager.graph.simulate import SimulatedStep, simulate
from pager.optim.adopted import UNIT_BYTES
from pager.policies.placement import Home, PlacementError, place
from pager.policies.protocol import make_eviction_policy
from pager.policies.staying import (
    belady,
    is_worth_lending,
    lent_gradient_bytes,
    room_for_staying,
    share_arena,
    spread,
)
from pager.policies.update_split import (
    LEAD,
    Diffusion,
    balanced_share,
    cpu_part,
    less_share,
    num_slices,
    num_threads_beside_link,
    rate_beside_link,
)
from pager.tools.captured import CapturedModel
from pager.tools.machine import Machine
from pager.units import format_bytes

__all__ = ["Prediction", "Wanted", "predict"]

# A share of the update for the CPU follows from rates that it changes itself.
_ROUNDS = 12
_SAME_SHARE = 0.005
# As `pager.homes`: what is not wired must hold the update of the largest tensor; a parameter that streams crosses the
# link four times, a gradient or a state twice.
_UPDATE_TENSORS = 4
_CROSSINGS = (4, 2, 2)
# As `pager.bill`: parameters are wired with updates on the CPU only where they fill so much of the budget.
_WIRED_SHARE = 0.75
# As `pager.optim.gradient_homes`: of the bytes of all gradients, and of the largest.
_HOMES_SHARE = 6
_LEAST_HOMES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The knobs of a run. ``compute_seconds``: measured, of forward and backward; None: by the machine's rates.

    ``cpu_share``: None: as the runtime finds it. ``cpu_order``: "spread" (the runtime's), over the first ``cpu_lead``
    of the gradients, or "last used"; ``weights``, ``states``: "spread" or "belady".
    ``num_machines``: each holds all weights, a share of the states, and takes its own batch (on paper only: the runtime
    uses one device). ``simulated``: as on the simulated device, where the budget is the pages' alone.
    ``eviction``: a name or a policy object. ``host_bytes``: for homes.
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
    if wanted.update_at == "backward" and not wanted.simulated:
        beside += lent_gradient_bytes(captured.activation_bytes, max(budget.arena_bytes(beside), 0))
    arena = max(budget.arena_bytes(beside), 0)
    known["arena_bytes"] = arena
    least_slot = captured.page_size // step.size.gradient * (step.size.gradient + step.size.state)
    num_slots, slot_bytes = share_arena(
        arena,
        captured.page_size,
        least_slot_bytes=least_slot,
        activation_bytes=0 if wanted.simulated else captured.activation_bytes,
    )
    shares = DeviceShares(arena_bytes=arena, num_slots=num_slots, slot_bytes=slot_bytes)
    known["shares"] = shares
    if not num_slots or arena < _UPDATE_TENSORS * largest:
        return Prediction(
            **known,
            fits=False,
            # The runtime then steps whole tensors through the arena, which is not simulated.
            may_train=arena >= largest,
            reason=f"of a budget of {format_bytes(wanted.budget_bytes)} {format_bytes(arena)} are left for pages "
            f"beside activations of {format_bytes(captured.activation_bytes)}; streaming the largest tensor "
            f"({format_bytes(largest)}) takes {_UPDATE_TENSORS} of it, and its states a slot",
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
    placing = _Placing(captured, wanted, shares)
    cpu = _CpuPart(captured, machine, wanted, placing)
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
        if not cpu.goes_on(result):
            break
    return placement, result


class _CpuPart:
    """How much the CPU updates, and on how many threads: as `pager.optim.on_cpu` and `pager.optim.cpu_rates`."""

    def __init__(self, captured: CapturedModel, machine: Machine, wanted: Wanted, placing: _Placing) -> None:
        self.step = captured.step
        self.wanted = wanted
        self.rates = dataclasses.replace(
            machine.rates, cpu_bytes_per_parameter=float(self.step.size.cpu_update)
        )
        self.streamed = 1 - float(self.step.num_elements[placing.keeps_states].sum()) / self.step.num_parameters
        self.fixed = {"device": 0.0, "cpu": 1.0}.get(wanted.update_on, wanted.cpu_share)
        # Of the last step; 0.0 before it.
        self.per_second = self.rest_seconds = self.less = 0.0
        # What the runtime finds while the link rests is taken to be the machine's rate. Where nobody knows when it
        # rests, the rate of a whole step counts.
        size = self.step.size
        self.alone = machine.rates.cpu_update_parameters_per_second if wanted.update_at == "backward" else 0.0
        self.beside = rate_beside_link(
            self.alone,
            element_bytes=2 * size.state + 5 * size.gradient,
            link_bytes_per_second=machine.rates.link_both_bytes_per_second,
        )
        self.share = self._balance() if self.fixed is None else self.fixed

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
        return num_threads_beside_link(total, self.beside / (self.alone or 1.0))

    def knobs(self, placement: Placement, lent_bytes: int) -> StepKnobs:
        """The knobs of a step with this part."""
        wanted, elements = self.wanted, self.step.num_elements
        gradients = np.where(self.step.gradient_tick >= 0, elements * self.step.size.gradient, 0)
        homes = max(int(gradients.sum()) // _HOMES_SHARE, _LEAST_HOMES * int(gradients.max()))
        part = int(elements[placement.on_cpu].sum())
        return StepKnobs(
            update_at=wanted.update_at,
            prefetch_extents=wanted.prefetch_extents,
            lent_bytes=lent_bytes,
            home_bytes=homes if wanted.update_at == "backward" and wanted.update_on == "auto" else None,
            cpu_threads=self._num_threads,
            cpu_slices=tuple(num_slices(n, part, self.rates.cpu_threads) for n in elements.tolist()),
        )

    def goes_on(self, result: SimulatedStep) -> bool:
        """Learn from a step; whether the next one has another part."""
        if self.fixed is not None:
            return False
        share = self.share
        self.per_second, self.rest_seconds = result.cpu_parameters_per_second, result.rest_seconds
        self.less = less_share(
            self.less,
            late_seconds=result.late_seconds,
            elements_per_second=self.per_second,
            num_elements=self.step.num_parameters,
        )
        self.share = self._balance()
        return abs(self.share - share) >= _SAME_SHARE


class _Placing:
    """Who stays, where homes are, and what the CPU updates: as `pager.homes`, `pager.residency`, `pager.optim`."""

    def __init__(self, captured: CapturedModel, wanted: Wanted, shares: DeviceShares) -> None:
        self.captured = captured
        self.wanted = wanted
        step = captured.step
        self.elements = step.num_elements
        count = len(self.elements)
        self.first_use = np.full(count, len(step.access_parameter), np.int64)
        np.minimum.at(self.first_use, step.access_parameter, np.arange(len(step.access_parameter)))
        self.trained = step.gradient_tick >= 0
        weights = self.elements * step.size.weight
        largest, arena = int(weights.max()), shares.arena_bytes
        room = room_for_staying(arena, shares.ring_bytes, largest)
        all_stay = int(weights.sum()) <= room
        self.stays = np.full(count, all_stay)
        may_wire = wanted.update_on == "device" or int(weights.sum()) > wanted.budget_bytes * _WIRED_SHARE
        self.wired = np.zeros(count, bool)
        if not all_stay and may_wire:
            spare = max(min(arena // 2 - largest, arena - _UPDATE_TENSORS * largest), 0)
            self.wired = self._take(weights, spare, wanted.weights)
            self.stays = self.wired.copy()
        self.keeps_states = np.zeros(count, bool)
        if all_stay and wanted.update_at == "backward":
            states = np.where(self.trained, self.elements * step.size.state, 0)
            self.keeps_states = self._take(states, room - int(weights.sum()), wanted.states) & self.trained
        self.lent_bytes = lent_gradient_bytes(captured.activation_bytes, arena)
        self.beside = self.trained & (wanted.update_at == "backward") & (not wanted.simulated)
        for place, num_elements in enumerate(self.elements.tolist()):
            self.beside[place] &= is_worth_lending(num_elements * step.size.gradient, self.lent_bytes)

    def _take(self, sizes: npt.NDArray[np.int64], room: int, how: str) -> npt.NDArray[np.bool_]:
        if how == "belady":
            return belady(sizes, self.first_use, room)
        if how != "spread":
            raise ValueError(f"{how!r} is no way to choose what stays; known are 'spread' and 'belady'")
        order = np.argsort(self.first_use, kind="stable")
        taken = np.zeros(len(sizes), bool)
        taken[order] = spread(sizes[order], room)
        return taken

    def make(self, cpu_share: float) -> Placement:
        """The placement with so much of the update on the CPU. Raises PlacementError where homes have no room."""
        nobody = np.zeros(len(self.elements), bool)
        # The CPU updates only what has its home in host memory; its gradients need homes there too.
        on_cpu = self._on_cpu(cpu_share, *self._below(nobody)) if cpu_share else nobody
        weight_on_disk, states_on_disk = self._below(on_cpu)
        return Placement.of(
            len(self.elements),
            stays=self.stays,
            wired=self.wired,
            keeps_states=self.keeps_states,
            on_cpu=on_cpu & ~weight_on_disk & ~states_on_disk,
            beside=self.beside,
            weight_on_disk=weight_on_disk,
            states_on_disk=states_on_disk,
        )

    def _on_cpu(
        self, share: float, weight_on_disk: npt.NDArray[np.bool_], states_on_disk: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        on_disk = weight_on_disk | states_on_disk
        can = self.trained & ~self.keeps_states & ~self.wired & ~on_disk
        # Those that are used last in forward come first in backward.
        by = -self.captured.step.gradient_tick if self.wanted.update_at == "backward" else self.first_use
        order = np.argsort(-by, kind="stable")
        chosen = np.zeros(len(self.elements), bool)
        if self.wanted.cpu_order != "spread":
            own = order[can[order]]
            chosen[own] = cpu_part(self.elements[own], share * float(self.elements.sum()), evenly=False)
            return chosen
        diffusion = Diffusion(share, int(self.elements[self.trained].sum()), lead=self.wanted.cpu_lead)
        for place in order[self.trained[order]].tolist():
            if diffusion.is_due(int(self.elements[place])) and can[place]:
                diffusion.take(int(self.elements[place]))
                chosen[place] = True
        return chosen

    def _below(self, on_cpu: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Whose weight, whose states have their home on the disk."""
        step, count = self.captured.step, len(self.elements)
        needs = self.trained & (on_cpu | (self.wanted.update_at == "step"))
        sizes = [
            np.where(self.wired, 0, self.elements * step.size.weight),
            np.where(needs, self.elements * step.size.gradient, 0),
            np.where(self.trained, self.elements * step.size.state, 0),
        ]
        homes = place(
            num_bytes=np.concatenate(sizes),
            traffic_bytes_if_streamed=np.concatenate(
                [crossings * size for crossings, size in zip(_CROSSINGS, sizes, strict=True)]
            ),
            position=np.tile(self.first_use, 3),
            kind_rank=np.repeat(np.arange(3), count),
            device_capacity=0,
            host_capacity=self.wanted.host_bytes,
            disk_capacity=self.wanted.disk_bytes,
        )
        on_disk = (homes == int(Home.DISK)).reshape(3, count)
        return on_disk[0], on_disk[2]


def _bound(captured: CapturedModel, machine: Machine, wanted: Wanted, device_bytes: int) -> StepBound | None:
    """The least seconds of any schedule, with the disk left out; None where the linear program has no solution."""
    step = captured.step
    forward, backward = step.phase_seconds()
    rates = machine.rates
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
            ),
            device_bytes=float(device_bytes),
            activation_bytes=float(captured.activation_bytes),
            update_at=wanted.update_at,
            update_on=wanted.update_on,
            size=step.size,
        )
    except ValueError:
        return None
