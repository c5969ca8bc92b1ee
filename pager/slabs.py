"""How much of the device is the arena's, in slabs: at the beginning, and once activations are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pager.errors import BudgetError
from pager.graph.capture import capture
from pager.optim.adopted import UNIT_BYTES
from pager.page_table import Home
from pager.policies.staying import lent_gradient_bytes
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from torch import nn

    from pager.config import Config
    from pager.device.base import Device
    from pager.device_budget import DeviceBudget
    from pager.homes import Wanted
    from pager.model_checks import Parameters
    from pager.page_table import PageTable
    from pager.planning import Planner
    from pager.step_boundary import StepBoundary
    from pager.tiers.device_arena import DeviceArena

# Slabs of a CUDA arena: giving one back frees an eighth, while each is large enough for any operation's
# tensors.
_NUM_SLABS = 8
# To stream at all, so many of the largest tensor beside what has its home there: in use, arriving, leaving, a gradient.
_STREAMING_TENSORS = 4


def add_first(arena: DeviceArena, config: Config, arena_bytes: int, wanted: list[Wanted]) -> int:
    """Give the arena its first slabs; the frames of each, or 0 on the simulated device, whose one slab stays."""
    page_size = arena.page_size
    if arena.device.is_simulated:
        state = sum(item.num_bytes for item in wanted)
        frames = arena_bytes // page_size
        if config.device_budget is None:
            # Nobody set a budget: no more than the whole state could ever use, with room for its page
            # ends.
            frames = min(frames, 2 * ceil_div(state, page_size) + 64)
        if frames:
            arena.add_slab(frames)
        return 0
    largest = max((item.num_bytes for item in wanted), default=0)
    num_slabs = max(min(_NUM_SLABS, arena_bytes // max(4 * largest, 1)), 1)
    slab_frames = arena_bytes // num_slabs // page_size
    for _ in range(num_slabs):
        if slab_frames:
            arena.add_slab(slab_frames)
    return slab_frames


def known_arena_bytes(
    model: nn.Module, parameters: Parameters, config: Config, budget: DeviceBudget, device: Device
) -> int:
    """What the arena may take beside the activations that a step without data shows; 0 where none can be run.

    For a model that host memory does not hold, before its homes are chosen: what the device can hold need not go to a
    disk.
    """
    managed = {param: index for index, (_, param) in enumerate(parameters.paged)}
    if not managed or config.example_inputs is None or device.is_simulated:
        return 0
    found = capture(model, managed, *config.example_call(), device=device.torch_device)
    if found.way == "recorded":
        return 0
    largest = max(param.nbytes for param in managed)
    beside = _beside(found.peak_activation_bytes, largest, budget, lends=config.update_at == "backward")
    return budget.arena_bytes(beside) // config.page_bytes * config.page_bytes


def _beside(activation_bytes: int, largest_bytes: int, budget: DeviceBudget, *, lends: bool) -> int:
    """What a step takes on the device outside of the arena: activations, a gradient on its way into its pages, the
    staged copies of a unit of the update, and gradients that wait for theirs (``lends``).
    """
    beside = activation_bytes + 2 * largest_bytes + 4 * UNIT_BYTES
    if lends:
        beside += lent_gradient_bytes(activation_bytes, budget.arena_bytes(beside))
    return beside


def fit_activations(
    boundary: StepBoundary,
    planner: Planner,
    table: PageTable,
    arena: DeviceArena,
    budget: DeviceBudget,
    *,
    lends: bool,
) -> None:
    """Now that activations are known: as many slabs as they leave room for, but no fewer than streaming takes.
    ``lends``: gradients wait for their updates while the backward goes on.
    """
    activation_bytes = planner.peak_activation_bytes
    if activation_bytes is None:
        return
    largest = boundary.largest_parameter_bytes
    target = budget.arena_bytes(_beside(activation_bytes, largest, budget, lends=lends))
    need, _ = planner.largest_tick()
    streaming = max(need, _STREAMING_TENSORS * largest)
    boundary.fit_arena(target, least_bytes=_home_bytes(table, arena) + streaming)


def _home_bytes(table: PageTable, arena: DeviceArena) -> int:
    """What has its home in the arena."""
    return int((table.home[: table.num_pages] == Home.DEVICE).sum()) * arena.page_size


def check_operations(planner: Planner, table: PageTable, arena: DeviceArena, budget: DeviceBudget) -> None:
    """Raise BudgetError if the hungriest operation of the trace finds no room, beside what has its home here."""
    need, names = planner.largest_tick()
    have = arena.capacity_bytes - _home_bytes(table, arena)
    if need > have:
        raise BudgetError(
            f"pager: one operation needs {', '.join(names[:6])} on the device together, {format_bytes(need)}; of "
            f"device_budget = {format_bytes(budget.limit_bytes)} only {format_bytes(have)} are left for "
            f"pages. Raise device_budget by at least {format_bytes(need - have)}{budget.or_less_headroom()}."
        )
