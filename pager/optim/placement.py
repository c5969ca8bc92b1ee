"""Who updates where: what ``update_on`` asks for. In a file of its own, since the CPU's kernels take time to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.on_cpu import CpuUpdates
    from pager.optim.torn import Torn


def updates_on_cpu(
    update_on: str, mmu: Mmu, torn: Torn, settle: Callable[[Binding], None]
) -> CpuUpdates | None:
    """The CPU's part of the updates, None for ``update_on="device"``. ``settle`` gives a gradient its home."""
    if update_on == "device":
        return None
    from pager.optim.on_cpu import CpuUpdates  # needs numba

    return CpuUpdates(mmu, torn, share=1.0 if update_on == "cpu" else None, settle=settle)
