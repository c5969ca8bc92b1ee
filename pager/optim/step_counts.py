"""How often each parameter was stepped, as a number of the host.

Adam keeps that count in a tensor, which fused implementations have on the device: to read it, the host waits for all
that is enqueued there. So the count is read once, and followed from then on: a tensor that nobody else has written to
since still is what it was, or one more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from pager.mmu.binding import Binding


class _Known(NamedTuple):
    steps: int
    version: int
    tensor: torch.Tensor


class StepCounts:
    """The counts of one optimizer's parameters."""

    def __init__(self) -> None:
        self._known: dict[Binding, _Known] = {}

    def of(self, binding: Binding, step: torch.Tensor) -> int | None:
        """The value of ``step``, a tensor of one element; None for what is no whole number."""
        known = self._known.get(binding)
        if known is not None and known.tensor is step and known.version == step._version:
            return known.steps
        value = float(step.item())
        return int(value) if value >= 0 and value.is_integer() else None

    def keep(self, binding: Binding, step: torch.Tensor, count: int) -> None:
        """``step`` is ``count`` now."""
        self._known[binding] = _Known(count, step._version, step)

    def add_one(self, binding: Binding, step: Any, version: int) -> None:
        """The optimizer's class stepped once, and ``step``, which had ``version`` before, was written."""
        known = self._known.get(binding)
        if known is not None and known.tensor is step and known.version == version:
            self.keep(binding, known.tensor, known.steps + 1)
