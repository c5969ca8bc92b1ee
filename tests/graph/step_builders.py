"""Steps for tests of the simulator: blocks of parameters, forward, recompute and backward of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from pager.graph.access_trace import Phase
from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.bound import BytesPerParameter
from pager.graph.simulate import SimulatedStep, simulate
from pager.graph.step_model import StepModel
from pager.graph.task_timing import MachineRates
from pager.policies.belady import Belady

# Round numbers, and a host that takes no time: results can be worked out by hand.
ROUND_RATES = MachineRates(
    link_in_bytes_per_second=10.0,
    link_out_bytes_per_second=10.0,
    link_both_bytes_per_second=8.0,
    host_dram_bytes_per_second=1e9,
    disk_read_bytes_per_second=2.0,
    disk_write_bytes_per_second=4.0,
    cpu_threads=4,
    cpu_update_parameters_per_second=1.0,
    cpu_thread_parameters_per_second=0.5,
    device_update_parameters_per_second=1e12,
    copy_seconds=1e-12,
    host_access_seconds=1e-12,
    host_unit_seconds=1e-12,
    host_step_seconds=1e-12,
    host_page_in_seconds=1e-12,
    host_eviction_seconds=1e-12,
)


def make_step(
    num_parameters: int = 6,
    *,
    elements: int = 100,
    tick_seconds: float = 1.0,
    live_bytes: int = 0,
    size: BytesPerParameter | None = None,
) -> StepModel:
    """Parameter 0 .. n-1 in forward, each read again (as recomputed) from the last to the first, then its gradient."""
    order = list(range(num_parameters))
    backward = [p for p in reversed(order) for _ in range(2)]
    accesses = order + backward
    phases = [int(Phase.FORWARD)] * num_parameters + [
        int(Phase.RECOMPUTE),
        int(Phase.BACKWARD),
    ] * num_parameters
    gradient = np.full(num_parameters, -1, np.int64)
    for tick, parameter in enumerate(accesses):
        gradient[parameter] = tick
    ticks = len(accesses)
    return StepModel(
        names=tuple(f"w{p}" for p in order),
        num_elements=np.full(num_parameters, elements, np.int64),
        gradient_tick=gradient,
        seconds=np.full(ticks, tick_seconds),
        phase=np.array(phases, np.uint8),
        live_bytes=np.full(ticks, live_bytes, np.int64),
        access_tick=np.arange(ticks, dtype=np.int64),
        access_parameter=np.array(accesses, np.int64),
        size=size or BytesPerParameter(),
    )


def run(
    step: StepModel,
    *,
    arena: int = 10**9,
    num_slots: int = 4,
    slot: int = 12 * 50,
    update_at: str = "backward",
    rates: MachineRates = ROUND_RATES,
    policy: Any = None,
    prefetch: int = 4,
    keep_tasks: bool = False,
    knobs: dict[str, Any] | None = None,
    **placement: Any,
) -> SimulatedStep:
    """Simulate with these knobs, ``knobs`` those of `StepKnobs`; ``placement``: columns of `Placement`."""
    return simulate(
        step,
        Placement.of(len(step.names), **placement),
        DeviceShares(arena_bytes=arena, num_slots=num_slots, slot_bytes=slot),
        policy=policy or Belady(),
        rates=rates,
        knobs=StepKnobs(update_at=update_at, prefetch_extents=prefetch, **(knobs or {})),
        keep_tasks=keep_tasks,
    )
