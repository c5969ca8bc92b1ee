"""Another value for a paged tensor, as ``p.data = t`` gives it.

The problem. In torch the assignment lets the parameter look at other memory. Whoever looks at the old memory goes on to
see the old value: an alias (``old = p.data``), a view, a tensor of a ``state_dict()``, what autograd saved. An
average of weights that is swapped in for an evaluation and out again lives by that. Pages are copied into, so each
of these has to be given something to keep:

- an alias or a view leases device frames. They are left to it (`Engine.replace`), as those of a dropped gradient;
- what autograd saved of a view is (segment, version, layout), and in nobody's frames. Where such a graph is alive the
  old value is copied to host memory (`Value`). A parameter that was saved as it is has, in torch, the new value then;
- a tensor of a state dict over a home in host memory keeps that home, and the segment gets other frames. One that is a
  copy of a home elsewhere is brought up to date for the last time.

Nobody's version counter moves, as in torch: backward raises nothing. What else goes by versions, a master's low bits
or a gradient's norm, sees another value all the same (`Binding.version`).

What differs from torch: ``t`` is copied. Later writes to the parameter do not show in ``t``, nor the other way round.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from pager.interrupts import whole
from pager.mmu import values
from pager.mmu.binding import Value

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.homes import Homes
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu


class Replacing:
    """Gives one managed model's tensors other values. ``frames_changed`` is called where there are new homes."""

    def __init__(self, mmu: Mmu, homes: Homes, frames_changed: Callable[[], None]) -> None:
        self._mmu = mmu
        self._homes = homes
        self._frames_changed = frames_changed

    @whole
    def replace(self, binding: Binding, source: torch.Tensor) -> None:
        """Give the tensor the values of ``source``, an ordinary tensor of its size and dtype; who holds the old value
        keeps it.

        Raises BudgetError where the tiers lack room for both values, and TierError.
        """
        mmu, segment = self._mmu, binding.segment
        mmu.before_access([binding])
        if mmu.aliases:
            mmu.aliases.settle([binding])
        if self._stands_there(segment, source):
            return
        raw = values.storage_bytes(source, segment.size, segment.stride, segment.num_bytes)
        is_new = not values.holds_already(mmu, binding, source)
        value = self._look_back(binding)
        done = False
        try:
            if value is not None:
                value.kept = values.cpu_bytes(mmu, binding).clone()
            with self._leaving_home(binding) as settle:
                mmu.unfix(binding)
                mmu.engine.replace(segment, raw, settle)
            done = True
        finally:
            if not done and value is not None and mmu.engine.has_value(segment):
                value.kept, binding.value = None, value
        if is_new:
            binding.versions_before += 1
        if binding.users:
            self._point_anew(binding)

    def _stands_there(self, segment: Segment, source: torch.Tensor) -> bool:
        """Whether ``source`` is the very value: ``p.data = p.data``."""
        engine = self._mmu.engine
        return any(
            run.pins and engine.arena.bytes_of(run.frame, run.num_bytes).data_ptr() == source.data_ptr()
            for run in engine.runs_of(segment)
        )

    def _look_back(self, binding: Binding) -> Value | None:
        """The value that goes, if a graph looks back at it; from now on the tensor's is another one."""
        looked_at = weakref.ref(binding.value)
        binding.value = Value()
        value = looked_at()
        return value if value is not None and values.has_value(self._mmu, binding) else None

    @contextlib.contextmanager
    def _leaving_home(self, binding: Binding) -> Iterator[Callable[[], None]]:
        """What is held of state dicts keeps what it shows. Gives what is to be called when the segment has no value."""
        segment, homes, engine = binding.segment, self._homes, self._mmu.engine
        aliases = self._mmu.aliases
        if not aliases.are_held(binding):
            yield _nothing
            aliases.leave(segment)
            return
        home, frame = homes.other_frames(segment)
        self._frames_changed()
        is_settled = False

        def settle() -> None:
            nonlocal is_settled
            engine.transfers.forget(segment)
            with engine.lock:
                homes.move(segment, home, frame, is_held=aliases.leave(segment))
            is_settled = True

        try:
            yield settle
        finally:
            if not is_settled:
                homes.give_back(home, frame, segment.num_pages)

    def _point_anew(self, binding: Binding) -> None:
        """Who uses the tensor now (``pager.resident()``) finds it pointed at the value it has."""
        mmu = self._mmu
        use = object()
        with mmu.lock:
            binding.pointed = False
            binding.point_at(binding.phantom)
        try:
            mmu.point(binding, use)
            for run in mmu.engine.runs_of(binding.segment):
                run.escaped = True  # it may be written to by raw pointers
        finally:
            mmu.exit([binding], use)


def _nothing() -> None:
    return
