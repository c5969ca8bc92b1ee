"""Who stays on the device, where homes are, and which parameters the CPU updates, in a prediction.

By the formulas of `pager.policies`, as `pager.homes`, `pager.residency` and `pager.optim` use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pager.graph.arena_walk import DeviceShares, Placement
from pager.policies.placement import Home, place
from pager.policies.staying import (
    WiredShare,
    belady,
    is_worth_lending,
    lent_gradient_bytes,
    room_for_gradients,
    room_for_staying,
    share_wired,
    spread,
    usually_wired_bytes,
)
from pager.policies.update_split import Diffusion, cpu_part
from pager.tools.captured import CapturedModel

if TYPE_CHECKING:
    from pager.tools.prediction import Wanted

__all__ = ["Placing", "weights_to_wire"]

# As `pager.homes`: a parameter that streams crosses the link four times, a gradient or a state twice.
_CROSSINGS = (4, 2, 2)
# As `pager.bill`: parameters are wired with updates on the CPU only where they fill so much of the budget.
_WIRED_SHARE = 0.75


# An fp32 moment, or what a parameter has most of.
_LARGEST_ELEMENT = 4


def weights_to_wire(captured: CapturedModel, wanted: Wanted, *, first_arena: int, arena: int) -> WiredShare:
    """What is the only home of parameters of an arena that does not hold the training state. ``first_arena``: what it
    has before activations are known, which is not asked for where host memory holds the rest.
    """
    step = captured.step
    weight_bytes = step.num_parameters * step.size.weight
    gradients = wanted.update_at == "step"
    below = step.size.state + (step.size.gradient if gradients else 0)
    total = weight_bytes + int(step.num_elements[step.gradient_tick >= 0].sum()) * below
    largest = int(step.num_elements.max()) * max(step.size.weight, _LARGEST_ELEMENT)
    lacks_room = total > usually_wired_bytes(first_arena, largest) + wanted.host_bytes
    share = share_wired(
        max(first_arena, arena) if lacks_room else first_arena,
        captured.page_size,
        parameter_bytes=(step.num_elements * step.size.weight).tolist(),
        largest_other_bytes=int(step.num_elements.max()) * step.size.gradient if gradients else 0,
        total_bytes=total,
        largest_bytes=largest,
        host_bytes=wanted.host_bytes,
        wires=wanted.update_on == "device" or weight_bytes > wanted.budget_bytes * _WIRED_SHARE,
    )
    return share._replace(num_bytes=min(share.num_bytes, weight_bytes))


class Placing:
    """Who stays, where homes are, and what the CPU updates: as `pager.homes`, `pager.residency`, `pager.optim`."""

    def __init__(self, captured: CapturedModel, shares: DeviceShares, wanted: Wanted) -> None:
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
        in_backward = wanted.update_at == "backward"
        room = room_for_staying(arena, shares.ring_bytes, largest, in_backward=in_backward)
        self.all_stay = all_stay = int(weights.sum()) <= room
        self.stays = np.full(count, all_stay)
        self.wired = weights > shares.wired_above
        room_beside = shares.wired_bytes - int(weights[self.wired].sum())
        self.wired |= self._take(np.where(self.wired, 0, weights), room_beside, wanted.weights)
        self.stays |= self.wired
        self.keeps_states, self.late = np.zeros(count, bool), np.zeros(count, bool)
        self._room_for_states = room - int(weights.sum())
        if not in_backward:
            self._room_for_states -= int(self.elements[self.trained].sum()) * step.size.gradient
        if all_stay:
            self._keep_states()
        self.sends_gradient = np.zeros(count, bool)
        if all_stay and wanted.update_at == "step":
            room = room_for_gradients(arena, shares.ring_bytes, int(weights.sum()), largest)
            gradients = np.where(self.trained, self.elements * step.size.gradient, 0)
            self.sends_gradient = self.trained & ~self._take(gradients, room, "spread")
        self.lent_bytes = lent_gradient_bytes(captured.activation_bytes, arena)
        self.beside = self.trained & (wanted.update_at == "backward") & (not wanted.simulated)
        for parameter, num_elements in enumerate(self.elements.tolist()):
            self.beside[parameter] &= is_worth_lending(num_elements * step.size.gradient, self.lent_bytes)

    def _keep_states(self) -> None:
        size = self.captured.step.size
        states = np.where(self.trained, self.elements * size.state, 0)
        room = self._room_for_states - int(self.elements[self.late].sum()) * size.gradient
        self.keeps_states = self._take(states, max(room, 0), self.wanted.states) & self.trained

    def leave_to_the_end(self, num_elements: float) -> None:
        """Let about so many be updated at the end of the backward, as `pager.optim.late` chooses them."""
        _, states_on_disk = self._below(self.late)
        for parameter in np.argsort(self.captured.step.gradient_tick, kind="stable").tolist():
            if num_elements < self.elements[parameter] / 2:
                break
            if self.trained[parameter] and not (self.keeps_states[parameter] or states_on_disk[parameter]):
                self.late[parameter] = True
                num_elements -= int(self.elements[parameter])
        self._keep_states()

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
            late=self.late,
            sends_gradient=self.sends_gradient,
            weight_on_disk=weight_on_disk,
            states_on_disk=states_on_disk,
        )

    def _on_cpu(
        self, share: float, weight_on_disk: npt.NDArray[np.bool_], states_on_disk: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        on_disk = weight_on_disk | states_on_disk
        trained = self.trained & ~self.late
        can = trained & ~self.keeps_states & ~self.wired & ~on_disk
        # Those that are used last in forward come first in backward.
        by = -self.captured.step.gradient_tick if self.wanted.update_at == "backward" else self.first_use
        order = np.argsort(-by, kind="stable")
        chosen = np.zeros(len(self.elements), bool)
        if self.wanted.cpu_order != "spread":
            own = order[can[order]]
            chosen[own] = cpu_part(self.elements[own], share * float(self.elements.sum()), evenly=False)
            return chosen
        diffusion = Diffusion(share, int(self.elements[trained].sum()), lead=self.wanted.cpu_lead)
        for parameter in order[trained[order]].tolist():
            num_elements = int(self.elements[parameter])
            if diffusion.is_due(num_elements) and can[parameter]:
                diffusion.take(num_elements)
                chosen[parameter] = True
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
