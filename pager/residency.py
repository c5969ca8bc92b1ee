"""How the arena is shared out: slots for streaming updates, what stays on the device, and the rest for everybody.

A segment that stays crosses the link never (a parameter) or is where its update is (optimizer state). Unlike a
wired segment, whose home is the device, it can be let go at any time: when an operation finds no room, or when
the arena must shrink, everything that stays becomes an ordinary resident again. So this is a decision about
speed alone, made again whenever the arena has changed.

Parameters first: each crosses the link for forward, backward and update. They stay all or not at all; where only
some have room, `pager.homes` wires those, spread along the step, and the rest streams.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pager.page_table import Home, PageState
from pager.policies.staying import (
    lent_gradient_bytes,
    room_for_gradients,
    room_for_staying,
    share_arena,
    spread,
)
from pager.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pager.engine.engine import Engine
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.adopted import AdoptedOptimizer

logger = logging.getLogger("pager.residency")

# The slots are set aside anew where they may have so many times the bytes.
_RENEWED_FROM = 1.5


class Residency:
    """Decides which parameters stay on the device, and lets go of them under pressure."""

    def __init__(self, mmu: Mmu, *, in_backward: bool = False) -> None:
        """``in_backward``: updates run inside backward, so that gradients need no room."""
        self._mmu = mmu
        self._in_backward = in_backward
        self._engine: Engine = mmu.engine
        self._chosen_for = (-1, -1, -1)
        self._late_bytes = 0
        self._least_slot_bytes = 0
        self._wanted_ring_bytes = 0
        self._no_slots_in = 0
        # Counted for an arena of so many bytes and so many pages.
        self._wired, self._wired_for = 0, (-1, -1)
        self._engine.give_up_kept = self.give_up
        # What a step's activations take at most, as far as it is known.
        self.activation_bytes = 0

    def choose(self, parameters: Iterable[Binding], optimizers: Iterable[AdoptedOptimizer]) -> None:
        """Decide for the arena as it is now, and bring what is to stay. Does nothing while the arena is the same."""
        engine = self._engine
        capacity = engine.arena.capacity_bytes
        self._reserve_slots()
        now = capacity, engine.staging.num_bytes, self._late_bytes
        if self._no_slots_in == capacity:
            return
        if now == self._chosen_for:
            return
        self._chosen_for = now
        parameters = list(parameters)
        pages = sum(binding.segment.num_pages for binding in parameters)
        largest = max((binding.segment.num_pages for binding in parameters), default=0)
        page_size = engine.arena.page_size
        room = room_for_staying(
            capacity, engine.staging.num_bytes, largest * page_size, in_backward=self._in_backward
        )
        keep = pages * page_size <= room
        for binding in parameters:
            binding.keep = keep
        if keep:
            self._mmu.fix([binding for binding in parameters if self._can_be_fixed(binding)])
            logger.info("all parameters stay on the device, %s", format_bytes(pages * page_size))
        # What parameters leave, and gradients that wait (for step(), or the backward's end), goes to optimizer states.
        waiting_bytes = (
            self._late_bytes
            if self._in_backward
            else sum(b.segment.num_pages for b in parameters if b.gradient is not None) * page_size
        )
        left = room - pages * page_size - waiting_bytes if keep else 0
        self._keep_states(parameters, list(optimizers), left)
        if not self._in_backward:
            free = room_for_gradients(
                capacity, engine.staging.num_bytes, pages * page_size, largest * page_size
            )
            self._send_gradients(parameters, free if keep else None)

    def _keep_states(
        self, parameters: list[Binding], optimizers: list[AdoptedOptimizer], room_bytes: int
    ) -> None:
        """States of those parameters first that the forward uses first. Their gradients come last: nothing is left to
        hide their copies behind, neither inside backward nor as the next forward begins.
        """
        page_size = self._engine.arena.page_size
        kept_bytes = 0
        for binding in sorted(parameters, key=lambda binding: self._mmu.update_order(binding.segment.index)):
            states = [state for known in optimizers for state in known.paged_states(binding).values()]
            num_bytes = sum(state.segment.num_pages for state in states) * page_size
            keep = kept_bytes + num_bytes <= room_bytes
            kept_bytes += num_bytes if keep else 0
            for state in states:
                state.keep = keep
                if not keep and state.fixed is not None:
                    self._mmu.unfix(state)
        logger.info("%s of optimizer state stay on the device", format_bytes(kept_bytes))

    def _send_gradients(self, parameters: list[Binding], room_bytes: int | None) -> None:
        """Which gradients go home as soon as autograd has made them: what has no room until the update. Spread over the
        backward, so that the link carries them while it computes. None: weights pass through the arena too, and who
        leaves it is decided by next use.
        """
        slots = [
            binding.gradient
            for binding in sorted(parameters, key=lambda b: self._mmu.update_order(b.segment.index))
            if binding.gradient is not None
        ]
        sizes = [slot.segment.num_pages * slot.segment.page_size for slot in slots]
        stays = spread(sizes, room_bytes) if room_bytes is not None else [True] * len(slots)
        for slot, stay in zip(slots, stays, strict=True):
            slot.goes_home = not stay
        self._mmu.gradients.most_sent_bytes = max(sizes, default=0)

    def lent_bytes(self) -> int:
        """Of gradients that may wait for their updates while the backward goes on."""
        return lent_gradient_bytes(self.activation_bytes, self._engine.arena.capacity_bytes)

    def reserve_late(self, num_bytes: int) -> None:
        """From the next choice on, have room for so many bytes of gradients that wait for the next forward."""
        self._late_bytes = num_bytes

    def needs_slots(self, least_bytes: int) -> None:
        """An optimizer's updates stream through slots of at least ``least_bytes``."""
        self._least_slot_bytes = max(self._least_slot_bytes, least_bytes)

    def _reserve_slots(self) -> None:
        """Set staging slots aside, once it is known what they are for; small ones only where the arena is small."""
        engine = self._engine
        page_size = engine.arena.page_size
        if engine.arena.capacity_bytes == self._no_slots_in:
            return
        num_slots, slot_bytes = share_arena(
            engine.arena.capacity_bytes,
            page_size,
            least_slot_bytes=self._least_slot_bytes,
            in_backward=self._in_backward,
            activation_bytes=self.activation_bytes,
            wired_bytes=self._wired_bytes(),
        )
        if not num_slots:
            return
        slot_frames, wanted = slot_bytes // page_size, num_slots * slot_bytes
        # As a rule they stay as they are; an arena that has grown by much gets others.
        if engine.staging.num_bytes and (
            wanted < _RENEWED_FROM * self._wanted_ring_bytes or not engine.staging.release()
        ):
            return
        self._wanted_ring_bytes = wanted
        for _ in range(num_slots):
            # An optimizer that is first seen at its step finds the arena full of what the step left there.
            if engine.staging.reserve(num_slots, slot_frames) == num_slots:
                return
            if not engine.reclaimer.make_room(slot_frames, sooner_than=None):
                return
        engine.staging.reserve(num_slots, slot_frames)

    def _wired_bytes(self) -> int:
        """What has its home in the arena, and so is no room for anybody else."""
        table = self._engine.table
        now = self._engine.arena.capacity_bytes, table.num_pages
        if now != self._wired_for:
            num_pages = int((table.home[: table.num_pages] == Home.DEVICE).sum())
            self._wired, self._wired_for = num_pages * self._engine.arena.page_size, now
        return self._wired

    def _can_be_fixed(self, binding: Binding) -> bool:
        table = self._engine.table
        page = binding.segment.first_page
        if int(table.state[page]) == PageState.EMPTY:
            return False  # on meta still: its first use brings it
        return binding.fixed is None and int(table.home[page]) != Home.DISK

    def give_up(self) -> bool:
        """Nothing stays or is set aside any more, until the arena changes. Whether anything was."""
        had_slots = self._engine.staging.release()
        self._no_slots_in = self._engine.arena.capacity_bytes if had_slots else self._no_slots_in
        fixed = [binding for binding in list(self._mmu.bindings.values()) if binding.keep]
        for binding in fixed:
            binding.keep = False
            self._mmu.unfix(binding)
        if fixed:
            logger.info("device memory ran short: parameters stream from now on")
        return bool(fixed) or had_slots
