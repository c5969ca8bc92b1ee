"""Gradients: from autograd into their segments, and back to whoever asks for ``p.grad``.

Autograd accumulates into the parameter object itself. A hook takes each finished gradient from there at once:
the first of a step is copied into the gradient's segment, later ones are added to it (the same addition, in
the same order, that autograd would have done). So at any time a parameter has either no gradient, or one in
its segment. The hook can fire twice in one backward (reentrant checkpointing); that is just one more
addition.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pager.errors import ConfigError
from pager.graph.access_trace import Phase
from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding, NoTorchFunction, num_storage_users
from pager.mmu.clipping import scaled_copy
from pager.mmu.parameter import PagedTensor, make_ordinary, page_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from pager.address_space import Segment
    from pager.mmu.mmu import Mmu


class InBackward(Protocol):
    """Who steps parameters inside backward."""

    def take(self, binding: Binding, gradient: torch.Tensor) -> bool:
        """Step the parameter with its final gradient. False if the gradient is to be kept."""

    def forget_before_load(self) -> bool:
        """If values were loaded, nothing of the step that was under way counts, and all gradients go. Whether so."""


class Gradients:
    """The gradients of one managed model's paged parameters."""

    def __init__(
        self, mmu: Mmu, make: Callable[[Binding], Binding], settle: Callable[[Binding], None]
    ) -> None:
        self._mmu = mmu
        # Gives a gradient's segment its place at home, where it has none yet.
        self.settle = settle
        # Makes the binding of a parameter's gradient: a segment of the same layout and a place at home for
        # it.
        self._make = make
        # Counts changes of gradients, so that a repeated step() can be told from a new one.
        self.generation = 0
        # How often one was given up.
        self.num_zeroed = 0
        # Steps a parameter as soon as its gradient is final; None where gradients wait for ``step()``.
        self.in_backward: InBackward | None = None
        # Of gradients on their way home, whose memory is torch's: beyond it the compute waits for the oldest.
        self.most_sent_bytes = 0
        # Whether one was added to another in this step, and in the one before.
        self._adds = self._added_before = False

    def prepare(self, binding: Binding) -> None:
        """Give a parameter that requires a gradient its segment and its hook; idempotent."""
        with NoTorchFunction():
            if not binding.tensor.requires_grad or binding.hook is not None:
                return
            self._make_slot(binding)
            binding.hook = binding.tensor.register_post_accumulate_grad_hook(_take)

    def _make_slot(self, binding: Binding) -> None:
        if binding.gradient is None:
            binding.gradient = self._make(binding)
            binding.gradient.owner = binding

    def absorb(self, binding: Binding, *, is_final: bool = False) -> None:
        """Move the gradient that autograd left on the parameter into the segment. ``is_final``: autograd has just made
        it, and whoever looks at it next comes through the door.
        """
        grad = binding.raw_grad()
        if grad is None:
            return
        if binding.derived_blindly:
            binding.set_raw_grad(None)
            binding.check_graph()
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"{binding.name}: its gradient is {grad.layout}; sparse gradients cannot be paged yet. Use "
                "sparse=False in the embedding."
            )
        if self.in_backward is not None and self.in_backward.forget_before_load():
            binding.set_raw_grad(grad)  # it came after that
        if grad.requires_grad:
            # backward(create_graph=True): the user goes on differentiating it; it is taken at the optimizer
            # step.
            return
        if self.in_backward is not None:
            # Not to be left behind by an exception in there: half of the step would be in it.
            binding.set_raw_grad(None)
            if self.in_backward.take(binding, grad):
                self._mmu.look_at_heap()
                return
        if not (is_final and self._send_home(binding, grad)):
            self.add(binding, grad)
        self._mmu.look_at_heap()

    @property
    def sends(self) -> bool:
        """Whether gradients that have no room go home at once. Not while the user adds them up over backwards: each
        would have to come back.
        """
        return not (self._adds or self._added_before)

    def end_step(self) -> None:
        """A step is over."""
        self._added_before, self._adds = self._adds, False

    def _send_home(self, binding: Binding, grad: torch.Tensor) -> bool:
        """Send a gradient that autograd has just made home at once, where the plan has no room for it on the device.
        False if it has to be added to, laid out otherwise, or kept, or if its memory is somebody else's too.
        """
        slot = binding.gradient
        assert slot is not None
        segment, engine = slot.segment, self._mmu.engine
        if not (slot.goes_home and self.sends and is_plain(grad, segment) and is_alone(grad)):
            return False
        self._mmu.before_access([slot])
        self.settle(slot)
        if not engine.takes_at_home(segment):
            return False
        self._mmu.note([slot], Phase.GRADIENT, write=True)
        self.generation += 1
        with uninterrupted():
            engine.send_home(segment, grad, at_most_bytes=self.most_sent_bytes)
            slot.bump_version()
            binding.set_raw_grad(None)
        self._mmu.clipping.arrived(slot, None, grad)
        return True

    def add(self, binding: Binding, grad: torch.Tensor) -> None:
        """Add a gradient to the one in the segment, or begin it there; in the same act it leaves the tensor, if it was
        on it. Else whoever comes after an interrupt would find pages without a value, or take it again.
        """
        slot = binding.gradient
        assert slot is not None
        self._mmu.before_access([slot])
        self.settle(slot)
        self.generation += 1
        overwrite = not self._mmu.engine.has_value(slot.segment)
        if (
            overwrite
            and not _same_layout(slot.segment, binding.segment)
            and grad.dtype == binding.segment.dtype
        ):
            # The parameter was converted (model.half(), channels_last) while it had no gradient.
            with uninterrupted():
                self._mmu.renew(slot, _laid_out(grad, binding.segment))
                binding.set_raw_grad(None)
            return
        if grad.dtype != slot.segment.dtype:
            raise ConfigError(
                f"{binding.name}: its gradient is {grad.dtype}, the parameter {slot.segment.dtype}; gradients of "
                "another dtype cannot be paged"
            )
        with torch.no_grad(), uninterrupted():
            run, view = self._mmu.fault(
                slot, Phase.GRADIENT, overwrite=overwrite, what=f"the gradient of {binding.name}"
            )
            if overwrite:
                view.copy_(grad)
            else:
                view.add_(grad)
                self._adds = True
            slot.bump_version()
            binding.set_raw_grad(None)
        self._mmu.clipping.arrived(slot, run, view)

    def take_from_graph(self, binding: Binding) -> None:
        """At the optimizer step: a gradient that still is part of a graph is taken without it, and one that the user
        gave to a frozen parameter, which torch steps too.
        """
        raw = binding.raw_grad()
        if raw is not None:
            self._make_slot(binding)
            binding.set_raw_grad(None)
            self.add(binding, raw.detach())

    def get(self, binding: Binding) -> torch.Tensor | None:
        """What ``p.grad`` answers: the paged gradient, None, or a gradient that is still part of a graph."""
        raw = binding.raw_grad()
        if raw is not None:
            if raw.requires_grad or binding.gradient is None:
                return raw
            self.absorb(binding)
        slot = binding.gradient
        if binding.pending is not None and binding.pending.is_released(binding):
            return None
        if slot is None or not self._mmu.engine.has_value(slot.segment):
            return None
        return slot.tensor

    def set(self, binding: Binding, value: torch.Tensor | None) -> None:
        """``p.grad = value``. None frees the gradient's pages; a tensor's values are copied."""
        slot = binding.gradient
        if slot is not None and value is slot.tensor:
            return
        if self.in_backward is not None and value is not None:
            self.in_backward.forget_before_load()
        # An update that was interrupted, or waits, still needs the gradient; dropped, it is kept for it.
        self._mmu.before_access([binding] if value is not None else [])
        self.generation += 1
        self.num_zeroed += value is None
        if value is None or slot is None:
            binding.set_raw_grad(value)
            if slot is not None:
                self._let_go(slot)
            return
        binding.set_raw_grad(value)  # torch checks shape, dtype and device here
        binding.set_raw_grad(None)
        if value.requires_grad:
            value = value.detach()
        self._let_go(slot)
        self.add(binding, value)

    def _let_go(self, slot: Binding) -> None:
        """The gradient is given up. Whoever keeps the tensor, or views of it, keeps the old values, as in
        torch.

        Views hold their frames. The tensor itself becomes an ordinary one, and a new one stands for the next
        gradient.
        """
        mmu = self._mmu

        def value(slot: Binding) -> torch.Tensor:
            _, view = mmu.fault(slot, Phase.GRADIENT, what=f"keeping the old gradient of {slot.name}")
            return scaled_copy(view, slot.scale)

        pending = slot.owner.pending
        if pending is None:
            if not mmu.engine.is_empty(slot.segment):  # it mostly is: the update has used it up
                let_go(slot, value)
                mmu.engine.discard(slot.segment)
        elif not pending.is_released(slot.owner):
            let_go(slot, value)
            pending.release(slot.owner)
        # A waiting update has it still.
        slot.scale = None


def let_go(slot: Binding, value_of: Callable[[Binding], torch.Tensor]) -> None:
    """A gradient or state whose value will be gone: if the user holds its tensor, that becomes an ordinary one with
    ``value_of(slot)``, and a new one stands in its place.
    """
    if not _is_shared(slot) or not slot.mmu.engine.has_value(slot.segment):
        return
    with torch.inference_mode(False):
        value = value_of(slot)
    kept = slot.tensor
    slot.versions_before = slot.version() + 1
    slot.tensor = torch.empty(0, dtype=slot.segment.dtype, device=slot.phantom.device)
    page_tensor(slot, PagedTensor)
    make_ordinary(kept, slot.original_class, value)


def _take(tensor: Any) -> None:
    # Not a bound method: torch's hook dictionary is invisible to the garbage collector and would keep the model alive.
    binding: Binding = tensor._pager
    binding.mmu.gradients.absorb(binding, is_final=True)


def is_plain(grad: torch.Tensor, segment: Segment) -> bool:
    """Whether a gradient's memory holds its values, in the segment's dtype and layout."""
    as_they_are = not (grad.is_conj() or grad.is_neg())
    return as_they_are and grad.dtype == segment.dtype and grad.stride() == segment.stride


def is_alone(grad: torch.Tensor) -> bool:
    """Whether nobody else has the memory of a gradient, and may write to it before another stream has read it. Autograd
    copies one that anybody else refers to, but not one that is a view of what somebody has.
    """
    return num_storage_users(grad) == 1


def _same_layout(one: Segment, other: Segment) -> bool:
    return one.dtype == other.dtype and one.stride == other.stride


def _laid_out(grad: torch.Tensor, segment: Segment) -> torch.Tensor:
    result = torch.empty_strided(segment.size, segment.stride, dtype=segment.dtype, device=grad.device)
    return result.copy_(grad)


def _num_references(holder: Any) -> int:
    """References to ``holder.tensor``, for comparison only."""
    return sys.getrefcount(holder.tensor)


class _Alone:
    tensor = torch.empty(0)


# References to a tensor that only its binding holds.
_UNSHARED = _num_references(_Alone)


class _Viewed(_Alone):
    tensor = torch.empty(1)
    view = tensor[:]


# In torch 2.6 the views of a tensor are no references to its Python object.
_VIEWS_REFER = _num_references(_Viewed) > _UNSHARED


def _is_shared(slot: Binding) -> bool:
    """Whether the user holds a tensor, or a view of it: views count their writes with it."""
    return _num_references(slot) > _UNSHARED or (not _VIEWS_REFER and slot.mmu.engine.in_use(slot.segment))
