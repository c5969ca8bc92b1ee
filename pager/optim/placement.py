"""Who updates where: what ``update_on`` asks for. In a file of its own, since the CPU's kernels take time to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pager.optim.gradient_homes import GradientHomes

if TYPE_CHECKING:
    from pager.homes import Homes
    from pager.mmu.mmu import Mmu
    from pager.optim.on_cpu import CpuUpdates
    from pager.optim.torn import Torn


def updates_on_cpu(update_on: str, mmu: Mmu, torn: Torn, homes: Homes) -> CpuUpdates | None:
    """The CPU's part of the updates, None for ``update_on="device"``. ``homes`` has those of gradients."""
    if update_on == "device":
        return None
    from pager.optim.on_cpu import CpuUpdates  # needs numba

    gradient_homes = GradientHomes(mmu, homes, mmu.gradients.settle)
    return CpuUpdates(mmu, torn, gradient_homes, share=1.0 if update_on == "cpu" else None)
