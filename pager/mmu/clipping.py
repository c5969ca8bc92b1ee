"""Clipping by the norm of all gradients, without another pass over them.

The problem. Torch's own clipping reads every gradient twice and writes it once. Behind the door that works, but most
gradients have gone home by then: each comes to the device for its norm, again to be scaled, goes home, and comes a
third time for its update.

The way. A gradient is on the device twice anyway: when it arrives, and when it is used up.

- On arrival its norm is taken, where clipping has been asked for of late. The norm is good for the version of the
  gradient it was taken of, as long as nobody can have written without being counted. Else it is taken by reading.
- Scaling is put off. A gradient has a *scale*, which the update multiplies in as it reads its slice, with the same
  multiplication that torch does in place. Whoever else looks at the gradient comes through ``Mmu.before_access``,
  which does it for real first.

An update that waits shares the scale object with the gradient. So it does not matter who comes first: once the
gradient itself is scaled the object is empty, and where the gradient was dropped meanwhile the update still has it.

All of it is the arithmetic of ``torch.nn.utils.clip_grad_norm_(foreach=False)``, in its order, so the bits are its.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from pager.graph.access import current_phase
from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding
from pager.mmu.modes import apart
from pager.mmu.parameter import Paged

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.run import Run
    from pager.mmu.mmu import Mmu

# Steps without clipping after which norms are no longer taken on arrival: who clips every few steps still finds them.
MAX_IDLE_STEPS = 8


@dataclass(frozen=True, slots=True)
class Norm:
    """A gradient's norm, and what it was taken of: (0-dim, on the device), made on the stream of this index."""

    value: torch.Tensor
    norm_type: float
    segment: Segment
    version: int
    stream: int


class Scale:
    """What a gradient's values are still to be multiplied by; None once they are. Shared with a waiting update."""

    __slots__ = ("factor",)

    def __init__(self, factor: torch.Tensor) -> None:
        self.factor: torch.Tensor | None = factor


def scaled(gradient: torch.Tensor, scale: Scale | None) -> torch.Tensor:
    """(A slice of) a gradient as clipping leaves it: a new tensor, or the same one if nothing is to be done."""
    factor = None if scale is None else scale.factor
    # Rounded as by mul_: a 0-dim factor does not change the dtype.
    return gradient if factor is None else torch.mul(gradient, factor)


def scaled_copy(gradient: torch.Tensor, scale: Scale | None) -> torch.Tensor:
    """The same, always a tensor of its own."""
    result = scaled(gradient, scale)
    return result.clone() if result is gradient else result


class Clipping:
    """Norms and pending scales of one managed model's gradients. Safe to call from several threads."""

    def __init__(self, mmu: Mmu) -> None:
        self._mmu = mmu
        # The kind of norm that is taken on arrival; None while nobody clips.
        self._norm_type: float | None = None
        self._num_idle_steps = 0
        self._lock = threading.RLock()
        # Updates may multiply it in on another stream than the one that made it. By the time of the next clipping
        # that is over, for whoever orders streams as torch asks.
        self._last_factor: torch.Tensor | None = None

    # -- as gradients come -------------------------------------------------------------------------

    def arrived(self, slot: Binding, run: Run | None, view: torch.Tensor) -> None:
        """A gradient has a new value, which the caller has on the device, in frames of ``run`` or in none: take its
        norm, if clipping is likely.
        """
        norm_type = self._norm_type
        if norm_type is None:
            return
        slot.norm = None
        if run is not None and run.escaped:
            return  # somebody has an alias, and may write through it without being counted
        device = self._mmu.engine.device
        with apart(device.torch_device.type):
            value = torch.linalg.vector_norm(view, norm_type)
        slot.norm = Norm(value, norm_type, slot.segment, slot.version(), device.current_stream().index)

    def end_step(self) -> None:
        """A step is over: after several without clipping it costs nothing any more."""
        if self._norm_type is not None:
            self._num_idle_steps += 1
            if self._num_idle_steps > MAX_IDLE_STEPS:
                self._norm_type = None

    # -- clipping ----------------------------------------------------------------------------------

    @torch.no_grad()
    def clip(
        self,
        params: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """Scale the gradients of ``params`` so that their total norm is at most ``max_norm``; the norm before."""
        norm_type = float(norm_type)
        found = self._gradients(params)
        slots = [gradient for gradient in found if isinstance(gradient, Binding)]
        # An earlier clipping is done for real: two roundings, as torch would.
        self._mmu.before_access(slots)
        total = self._total(found, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is non-finite, so they cannot be clipped; with "
                "error_if_nonfinite=False they are scaled by it all the same"
            )
        max_norm = float(max_norm)
        if found:
            self._norm_type, self._num_idle_steps = norm_type, 0
            self._scale(found, torch.clamp(max_norm / (total + 1e-6), max=1.0))
        return total

    def _gradients(self, params: Iterable[torch.Tensor]) -> list[Binding | torch.Tensor]:
        """The gradients there are: bindings of paged ones, and ordinary tensors."""
        found: list[Binding | torch.Tensor] = []
        for param in params:
            if not isinstance(param, Paged) or param._pager.mmu is not self._mmu:
                found += [] if param.grad is None else [param.grad]
                continue
            gradient = self._mmu.gradients.get(param._pager)
            if gradient is not None:
                # One that is still part of a graph is an ordinary tensor.
                found.append(gradient._pager if isinstance(gradient, Paged) else gradient)
        return found

    def _total(self, found: Sequence[Binding | torch.Tensor], norm_type: float) -> torch.Tensor:
        if not found:
            return torch.tensor(0.0)
        self._mmu.engine.drain()
        norms = [
            self._norm(gradient, norm_type)
            if isinstance(gradient, Binding)
            else torch.linalg.vector_norm(gradient, norm_type)
            for gradient in found
        ]
        device = norms[0].device
        norms = [norms[place].to(device) for place in _order(found)]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type)

    def _norm(self, slot: Binding, norm_type: float) -> torch.Tensor:
        mmu = self._mmu
        device = mmu.engine.device
        known = slot.norm
        if (
            known is not None
            and known.norm_type == norm_type
            and known.segment is slot.segment
            and known.version == slot.version()
            and known.stream == device.current_stream().index
            # Under autocast torch may take the norm in another dtype.
            and not torch.is_autocast_enabled(device.torch_device.type)
        ):
            return known.value
        _, view = mmu.fault(slot, current_phase(), what=f"the norm of the gradient of {slot.name}")
        return torch.linalg.vector_norm(view, norm_type)

    def _scale(self, found: Sequence[Binding | torch.Tensor], factor: torch.Tensor) -> None:
        slots = [gradient for gradient in found if isinstance(gradient, Binding)]
        ordinary = [gradient for gradient in found if not isinstance(gradient, Binding)]
        alike = [g for g in ordinary if g.dtype == factor.dtype and g.device == factor.device]
        others = [g for g in ordinary if g.dtype != factor.dtype or g.device != factor.device]
        engine = self._mmu.engine
        engine.drain()
        self._last_factor = factor
        with uninterrupted():
            if alike:
                torch._foreach_mul_(alike, factor)
            for gradient in others:
                gradient.mul_(factor.to(gradient.device))
            for slot in slots:
                slot.scale = Scale(factor)
                self._count_write(slot)
        for slot in slots:
            if self._is_viewed(slot):
                # The view shows what is in the frames, and nobody asks before it is read.
                self.apply(slot)

    def _count_write(self, slot: Binding) -> None:
        """For autograd the gradient has changed; its frames have not, so clean ones are not to go home again."""
        engine = self._mmu.engine
        with engine.lock:
            slot.bump_version()
            for run in engine.runs_of(slot.segment):
                if not run.pins:
                    run.version = slot.version()

    def _is_viewed(self, slot: Binding) -> bool:
        return any(run.pins for run in self._mmu.engine.runs_of(slot.segment))

    # -- for who looks -----------------------------------------------------------------------------

    def apply(self, slot: Binding) -> None:
        """Scale a gradient for real, if that is still to be done. Updates that wait for it have run."""
        mmu = self._mmu
        with self._lock:
            scale = slot.scale
            if scale is None:
                return
            run, view = mmu.fault(slot, current_phase(), what=f"clipping the gradient of {slot.name}")
            with uninterrupted(), apart(mmu.engine.device.torch_device.type):
                if slot.scale is scale and scale.factor is not None:  # else a finalizer was here meanwhile
                    # What a unit of an update has fetched of it, ahead of its turn, is old now.
                    mmu.engine.staging.forget(slot.segment)
                    view.mul_(scale.factor)
                    mmu.engine.wrote(run)
                    scale.factor = slot.scale = None


def _order(found: Sequence[Binding | torch.Tensor]) -> list[int]:
    """The places of the gradients in the order in which torch stacks norms: by device and dtype, as it groups them."""
    kinds = [
        (gradient.phantom.device, gradient.segment.dtype)
        if isinstance(gradient, Binding)
        else (gradient.device, gradient.dtype)
        for gradient in found
    ]
    if len(set(kinds)) == 1:
        return list(range(len(kinds)))
    stand_ins = [torch.empty(0, device=device, dtype=dtype) for device, dtype in kinds]
    groups = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True)  # type: ignore[list-item]
    return [place for _, places in groups.values() for place in places]
