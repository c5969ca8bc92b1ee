"""How much of the device the arena may take: the budget, less everything else the process takes there.

On CUDA the budget counts the context, what torch's allocator reserves (activations, small tensors,
workspaces) and the arena, which is allocated through torch's allocator too. So that the promise is kept by
more than good will, the allocator is capped at the budget less the context. What activations need is known
from capture; without it half is left to them until the first step was measured. The first steps also show what
CUDA has loaded beside, and which fragments stay, so that less has to be kept free for these. After an out-of-memory
error the arena gives a slab back, so that the next step uses less.

On the simulated device the budget counts the arena, the small tensors, their gradients and states;
activations are ordinary tensors in host memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pager.config import Config, resolve_budget
from pager.errors import BudgetError
from pager.units import format_bytes, parse_size

if TYPE_CHECKING:
    from pager.device.base import Device

# CUDA loads kernels when they are first used, into memory of the context; seen: about 300 MiB in a training
# step.
_LAZY_CONTEXT_BYTES = 384 * 2**20
# After a step most of them are there; an evaluation or another batch size may still load some.
_LATER_CONTEXT_BYTES = 128 * 2**20
_FREE_SHARE = 0.9
# Of a simulated device's budget that nobody gave: a share of the host memory that is free.
_SIMULATED_SHARE = 0.25
# Headroom, as a part of the budget: at first, and once steps were measured.
_HEADROOM_SHARE = 32
_SETTLED_HEADROOM_SHARE = 48
# The allocator cuts a block that was freed for a smaller tensor and cannot use the rest for a larger one. Seen with
# batches of eight: a quarter of what activations take. A third beside what capture expects; a step that was
# measured had such pieces already, later ones may have a few more, and fewer still after some that had none.
_FRAGMENTS_SHARE = 3
_MORE_FRAGMENTS_SHARE = 6
_SETTLED_FRAGMENTS_SHARE = 12
# Steps after which what they took is known. The first captures and warms up; it is not counted among them.
_SETTLING_STEPS = 2
# Share of what is left for the arena before activations were measured.
_UNMEASURED_SHARE = 2
# Asking the driver for the process's bytes takes milliseconds, and who asks for statistics asks at every step.
_SECONDS_BETWEEN_MEASUREMENTS = 1.0


class DeviceBudget:
    """Bytes of one device, for one managed model. All figures in bytes."""

    def __init__(self, device: Device, config: Config, *, small_bytes: int, remedy: str = "") -> None:
        """``remedy``: the way out to name before a larger budget, where nothing is left for pages."""
        self._device = device
        self.small_bytes = small_bytes
        self.limit_bytes = self._limit(config.device_budget)
        self._headroom = config.device_headroom
        self._fixed_arena_bytes = config.checks.arena_bytes
        self._context_bytes = self._measure_context()
        self._out_of_memory = device.num_out_of_memory()
        self._peak_allocator_bytes = 0
        self._outside_bytes = 0
        self._measured_at = -_SECONDS_BETWEEN_MEASUREMENTS
        self._num_steps = 0
        # The most that the allocator took beside the arena in any step.
        self._most_beside_bytes = 0
        device.reset_allocator_peak()  # what was before is not this model's
        self.activation_bytes: int | None = None
        if self.allocator_bytes <= small_bytes + self.headroom_bytes:
            raise BudgetError(
                f"pager: device_budget is {format_bytes(self.limit_bytes)}, {self.taken()}; nothing is left for "
                f"pages. {f'{remedy}, or raise' if remedy else 'Raise'} device_budget{self.or_less_headroom()}."
            )
        device.limit_allocator(self.allocator_bytes)

    def taken(self) -> str:
        """For messages: what of the budget is not for pages."""
        context = (
            f"the CUDA context takes {format_bytes(self._context_bytes)}, " if self._context_bytes else ""
        )
        headroom = f"device_headroom {format_bytes(self.headroom_bytes)}, " if self.headroom_bytes else ""
        return f"of which {context}{headroom}tensors under a page {format_bytes(self.small_bytes)}"

    def or_less_headroom(self) -> str:
        """For messages: the other way out, where the user set a headroom."""
        return " or lower device_headroom" if self._headroom != "auto" and self.headroom_bytes else ""

    def _limit(self, knob: int | float | str | None) -> int:
        device = self._device
        if knob is not None:
            return resolve_budget(knob, device.total_bytes(), name="device_budget")
        if device.is_simulated:
            return int(device.free_bytes() * _SIMULATED_SHARE)
        return int(device.free_bytes() * _FREE_SHARE) + device.process_bytes()

    def _measure_context(self) -> int:
        if self._device.is_simulated:
            return 0
        outside = self._device.process_bytes() - self._device.allocator_bytes()
        return max(outside, 0) + _LAZY_CONTEXT_BYTES

    @property
    def allocator_bytes(self) -> int:
        """What torch's allocator may reserve, the arena included."""
        return self.limit_bytes - self._context_bytes

    @property
    def headroom_bytes(self) -> int:
        """Kept free beyond what activations were seen to need: blocks of other sizes, fragments."""
        if self._headroom != "auto":
            return parse_size(self._headroom, name="device_headroom")
        return 0 if self._device.is_simulated else self.limit_bytes // _HEADROOM_SHARE

    def _headroom_for(self, fragment_bytes: int, share: int = _HEADROOM_SHARE) -> int:
        """The headroom where so many bytes of fragments are to be expected, and one ``share``-th of the budget."""
        if self._headroom != "auto" or self._device.is_simulated:
            return self.headroom_bytes
        return max(self.limit_bytes // share, fragment_bytes)

    def arena_bytes(self, activation_bytes: int | None, *, settled: bool = False) -> int:
        """What the arena may take when activations (with transient gradients) need ``activation_bytes``: at first, or,
        as far as can be known, once the first steps have shown what they take (``settled``).
        """
        pieces, share = (
            (_SETTLED_FRAGMENTS_SHARE, _SETTLED_HEADROOM_SHARE)
            if settled
            else (_FRAGMENTS_SHARE, _HEADROOM_SHARE)
        )
        left = (
            self.allocator_bytes
            - self.small_bytes
            - self._headroom_for((activation_bytes or 0) // pieces, share)
        )
        if self._fixed_arena_bytes is not None:
            return min(self._fixed_arena_bytes, left)
        if self._device.is_simulated:
            return max(left, 0)
        if activation_bytes is None:
            return max(left // _UNMEASURED_SHARE, 0)
        return max(left - activation_bytes, 0)

    def spare_bytes(self, arena_bytes: int) -> int:
        """What no step left unused of the allocator's share beyond the headroom, with an arena of ``arena_bytes``;
        negative after an out-of-memory. To be asked once at the end of each step.
        """
        ooms = self._device.num_out_of_memory()
        if ooms > self._out_of_memory:
            self._out_of_memory = ooms
            return -1
        if self._device.is_simulated or self._fixed_arena_bytes is not None:
            return 0
        peak = self._device.allocator_peak_bytes()
        self._peak_allocator_bytes = max(self._peak_allocator_bytes, peak)
        self._device.reset_allocator_peak()
        self._num_steps += 1
        if self._num_steps <= 1 + _SETTLING_STEPS:
            self._look_at_context()
        before = self._most_beside_bytes if self._num_steps > 2 else 0
        self._most_beside_bytes = max(before, peak - arena_bytes)
        is_settled = self._num_steps > _SETTLING_STEPS
        # A step that reached into the headroom is what the headroom is for.
        pieces = _SETTLED_FRAGMENTS_SHARE if is_settled else _MORE_FRAGMENTS_SHARE
        headroom = self._headroom_for(
            self._most_beside_bytes // pieces, _SETTLED_HEADROOM_SHARE if is_settled else _HEADROOM_SHARE
        )
        return max(self.allocator_bytes - headroom - arena_bytes - self._most_beside_bytes, 0)

    def _look_at_context(self) -> None:
        """What CUDA has loaded by now need not be guessed any more."""
        outside = self._device.process_bytes() - self._device.allocator_bytes()
        known = max(outside, 0) + _LATER_CONTEXT_BYTES
        if known < self._context_bytes:
            self._context_bytes = known
            self._device.limit_allocator(self.allocator_bytes)

    def peak_process_bytes(self) -> int:
        """The most the process took on the device since this budget was made; 0 on the simulated device.

        The allocator's peak, and what the process holds beside it (context, kernels), which only grows.
        """
        if self._device.is_simulated:
            return 0
        now = time.monotonic()
        if now - self._measured_at >= _SECONDS_BETWEEN_MEASUREMENTS:
            self._measured_at = now
            outside = self._device.process_bytes() - self._device.allocator_bytes()
            self._outside_bytes = max(self._outside_bytes, outside)
        self._peak_allocator_bytes = max(self._peak_allocator_bytes, self._device.allocator_peak_bytes())
        return self._peak_allocator_bytes + self._outside_bytes

    def close(self) -> None:
        """Take the cap off torch's allocator."""
        self._device.limit_allocator(None)
