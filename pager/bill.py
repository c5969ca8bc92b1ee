"""The bill: what the training state of a model needs, against what the tiers have, before any work starts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from pager.address_space import span_elements
from pager.config import MIN_PAGE_BYTES, Config, resolve_budget
from pager.errors import BudgetError, ConfigError
from pager.graph.cost_model import Ceilings
from pager.homes import Homes, Wanted, state_name
from pager.host_limit import host_budget_bytes, host_limit_bytes, process_bytes
from pager.optim.probe import ExpectedStates
from pager.page_table import Home
from pager.tiers.disk_probe import DEPTHS, shape_of
from pager.tiers.page_packer import PagePacker
from pager.units import ceil_div, format_bytes

if TYPE_CHECKING:
    from pager.device.base import Device
    from pager.device_budget import DeviceBudget
    from pager.model_checks import Parameters

logger = logging.getLogger("pager.bill")

# States per parameter that are assumed until the optimizer is known: AdamW's two.
ASSUMED_STATES = 2

# The process grows by that in its first steps on a GPU, most of it the kernels of CUDA's libraries. Seen: 2.0 GB.
LOADED_LATER_BYTES = 9 * 2**28

# By a parameter's id: the states that its optimizer keeps. Of the others AdamW's are assumed.
States = Mapping[int, ExpectedStates]

# What AdamW keeps of a bf16 parameter that is stepped through a fp32 master: two states, and the low bits.
MASTER_STATES = ExpectedStates((torch.float32, torch.float32, torch.int16))


def training_state(parameters: Parameters, states: States, *, gradients: bool = True) -> list[Wanted]:
    """The tensors of the training state that will be paged; ``gradients``: they need a home."""
    wanted: list[Wanted] = []
    trainable = [(name, p) for name, p in parameters.paged if p.requires_grad]
    for name, param in parameters.paged:
        wanted.append(Wanted("parameter", name, _span_bytes(param)))
    for name, param in trainable if gradients else ():
        wanted.append(Wanted("gradient", name, _span_bytes(param)))
    for name, param in trainable:
        expected = _states_of(param, states)
        elements = _span_bytes(param) // param.element_size()
        in_slices = expected.in_slices and elements == param.numel()  # what has gaps is stepped whole
        wanted += [
            Wanted("state", state_name(name, ordinal), elements * dtype.itemsize, in_slices)
            for ordinal, dtype in enumerate(expected.dtypes)
        ]
    return wanted


def _span_bytes(param: nn.Parameter) -> int:
    return span_elements(param.size(), param.stride()) * param.element_size()


def _states_of(param: nn.Parameter, states: States) -> ExpectedStates:
    return states.get(id(param)) or ExpectedStates((param.dtype,) * ASSUMED_STATES)


def small_bytes(parameters: Parameters, model: nn.Module, states: States) -> int:
    """Device bytes of small tensors with gradients and states, and of buffers."""
    small = 0
    for _, param in parameters.small:
        small += param.nbytes
        if param.requires_grad:
            small += param.nbytes
            small += sum(param.numel() * dtype.itemsize for dtype in _states_of(param, states).dtypes)
    return small + sum(buffer.nbytes for buffer in model.buffers())


def smaller_pages(parameters: Parameters, page_size: int) -> str:
    """The remedy where tensors under a page fill the budget: the largest page that is not above all of them.

    Empty text if no tensor is as large as the smallest page.
    """
    name, largest = max(
        ((name, _span_bytes(param)) for name, param in parameters.small),
        key=lambda item: item[1],
        default=("", 0),
    )
    if largest < MIN_PAGE_BYTES:
        return ""
    fitting = 1 << largest.bit_length() - 1
    whose = f"of which {name} is the largest ({format_bytes(largest)})"
    return (
        f"A page is {format_bytes(page_size)}, and tensors under a page are not paged, {whose}: "
        f"lower page_size to {format_bytes(fitting)} or less"
    )


def fits(wanted: list[Wanted], page_size: int, arena_bytes: int) -> bool:
    """Whether the whole training state stays on the device, with a sixteenth to spare."""
    total = sum(ceil_div(item.num_bytes, page_size) * page_size for item in wanted)
    return total <= arena_bytes - arena_bytes // 16


def may_wire(config: Config, wanted: list[Wanted], budget: DeviceBudget) -> bool:
    """Whether the device may be a home. What the CPU updates has its home in host memory; it stays on the device all
    the same, if all parameters can.
    """
    parameters = sum(item.num_bytes for item in wanted if item.kind == "parameter")
    return config.update_on == "device" or parameters > budget.limit_bytes * 3 // 4


def check_largest(wanted: list[Wanted], page_size: int, arena_bytes: int, budget: DeviceBudget) -> None:
    """Refuse a budget in which the largest tensor has no room. Raises BudgetError with its name and the bytes."""
    if not wanted:
        return
    largest = max(wanted, key=lambda item: item.num_bytes)
    need = ceil_div(largest.num_bytes, page_size) * page_size
    if need > arena_bytes:
        raise BudgetError(
            f"pager: every operation on {largest.name} needs its {format_bytes(need)} on the device in one "
            f"piece, but of device_budget = {format_bytes(budget.limit_bytes)} only {format_bytes(arena_bytes)} are "
            f"left for pages ({budget.taken()}). Raise device_budget by at least {format_bytes(need - arena_bytes)}"
            f"{budget.or_less_headroom()}."
        )


def host_room(
    config: Config, device: Device, budget: DeviceBudget, parameters: Parameters, states: States
) -> tuple[int, int]:
    """Bytes of host memory that homes may take, and the host budget they are part of."""
    whole = host_budget_bytes(config.host_budget, host_limit_bytes())
    # What the model holds on the CPU now will be freed as it moves into pages.
    on_cpu = sum(param.nbytes for _, param in parameters.paged if param.device.type == "cpu")
    slabs = budget.limit_bytes if device.is_simulated else 0
    if device.is_simulated and config.device_budget is None:
        slabs = min(slabs, sum(item.num_bytes for item in training_state(parameters, states)))
    ring = shape_of(max(DEPTHS)).num_bytes if config.disk is not None else 0
    if config.disk_compression is not None:
        ring += max(DEPTHS) * PagePacker.buffer_bytes(config.page_bytes)
    later = 0 if device.is_simulated else LOADED_LATER_BYTES
    return whole - max(process_bytes() - on_cpu, 0) - slabs - ring - later, whole


class Movement(NamedTuple):
    """What a step moves at most, in bytes, and the seconds it takes at least: those of its slowest link or disk."""

    page_in_bytes: int
    page_out_bytes: int
    disk_read_bytes: int
    disk_write_bytes: int
    step_seconds: float

    @property
    def disk_write_bytes_per_day(self) -> float:
        """For the endurance of the disk: at most, since a step that computes longer is longer."""
        return self.disk_write_bytes * 86400 / self.step_seconds if self.disk_write_bytes else 0.0


# How often a byte that has no home on the device comes in and goes out in a step: a parameter for forward, backward
# and update, a gradient and a state once.
_COMES_IN = {"parameter": 3, "gradient": 1, "state": 1}


def movement(wanted: Sequence[Wanted], homes: Homes, ceilings: Ceilings | None = None) -> Movement:
    """What a step moves if nothing stays on the device but what is at home there. ``ceilings``: rates to assume."""
    rates = ceilings or Ceilings()
    come_in = {Home.HOST: 0, Home.DISK: 0}
    go_out = {Home.HOST: 0, Home.DISK: 0}
    for item in wanted:
        home = homes.home_planned(item)
        if home != Home.DEVICE:
            come_in[home] += _COMES_IN[item.kind] * item.num_bytes
            go_out[home] += item.num_bytes
    seconds = max(
        sum(come_in.values()) / rates.host_to_device_bytes_per_second,
        sum(go_out.values()) / rates.device_to_host_bytes_per_second,
        come_in[Home.DISK] / rates.disk_read_bytes_per_second
        + go_out[Home.DISK] / rates.disk_write_bytes_per_second,
    )
    return Movement(
        sum(come_in.values()), sum(go_out.values()), come_in[Home.DISK], go_out[Home.DISK], seconds
    )


def state_movement(wanted: Sequence[Wanted], homes: Homes) -> None:
    """One INFO line before any work: what a step moves, and what that means for the disk."""
    moved = movement(wanted, homes)
    logger.info(
        "a step moves at most %s in and %s out over the link, reads %s from the disk and writes %s to it%s",
        *(format_bytes(num_bytes) for num_bytes in moved[:4]),
        f": at {moved.step_seconds:.3g} s a step {moved.disk_write_bytes_per_day / 1e12:.3g} TB a day"
        if moved.disk_write_bytes
        else "",
    )


def disk_room(config: Config) -> int:
    """Bytes the third tier may take: what is free there less one tenth, or the smaller of what is free and
    ``disk_budget``; 0 without one. Raises ConfigError for a folder that is not there.
    """
    if config.disk is None:
        return 0
    try:
        free = shutil.disk_usage(config.disk).free
    except OSError as error:
        raise ConfigError(f"disk={str(config.disk)!r}: {error.strerror}; give an existing folder") from error
    if config.disk_budget is None:
        return free * 9 // 10
    return min(resolve_budget(config.disk_budget, free, name="disk_budget"), free)
