"""Host memory for gradients that go to the CPU inside backward: each has a home for as long as its update takes.

With ``update_at="backward"`` gradients have no homes. One for each that the CPU updates would be page-locked for the
whole run and used for a moment in each step. So a part of that is set aside, and lent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pager.errors import BudgetError
from pager.policies.update_split import WAITING_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pager.homes import Homes
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu
    from pager.optim.cpu_job import Job

# Room for so many of the largest, for a model that has few.
_LEAST_GRADIENTS = 2


class GradientHomes:
    """The homes that gradients of one managed model have, for good or for one update."""

    def __init__(self, mmu: Mmu, homes: Homes, settle: Callable[[Binding], None]) -> None:
        """``settle`` gives a gradient a home for good."""
        self._engine = mmu.engine
        self._homes = homes
        self._settle = settle
        self._is_reserved: bool | None = None
        # Of the bytes of all gradients, those set aside. Gradients that wait in step() have homes of their own.
        self.waiting_share = 1.0
        self._pool_bytes = 0
        self._lent: list[tuple[Binding, Job | None]] = []

    def has_home(self, gradient: Binding) -> bool:
        """Whether it has one now."""
        return int(self._engine.table.home_frame[gradient.segment.first_page]) >= 0

    def settle(self, gradient: Binding) -> bool:
        """Have a home for it for good; False if there is no room for one."""
        try:
            self._settle(gradient)
        except BudgetError:
            return False
        return True

    def reserve(self, gradients: Iterable[Binding]) -> bool:
        """Once: set the memory aside that is lent to ``gradients``. False if there is no room for it."""
        if self._is_reserved is None:
            sizes = [gradient.segment.num_bytes for gradient in gradients]
            self._pool_bytes = max(int(WAITING_SHARE * sum(sizes)), _LEAST_GRADIENTS * max(sizes, default=0))
            self._is_reserved = self._reserve(self._pool_bytes)
            self.waiting_share = self._pool_bytes / max(sum(sizes), 1)
        return self._is_reserved

    def _reserve(self, num_bytes: int) -> bool:
        try:
            self._homes.reserve_host([num_bytes])
        except BudgetError:
            return False
        return True

    def renew(self) -> None:
        """Between two steps: have again what was given back when the host budget was lowered, if it may be now."""
        lent_bytes = sum(
            gradient.segment.num_pages * gradient.segment.page_size for gradient, _ in self._lent
        )
        if self._homes.spare_host_bytes + lent_bytes < self._pool_bytes and self._is_reserved:
            self._reserve(self._pool_bytes - lent_bytes)

    def lend(self, gradient: Binding) -> bool:
        """Have a home for it in host memory, without asking for more of that; False if none is free."""
        if not self.has_home(gradient):
            self._take_back()
            if not self._homes.has_host_room(gradient.segment):
                return False
            if not self.settle(gradient):
                return False
            self._lent.append((gradient, None))
        return True

    def note(self, gradient: Binding, job: Job) -> None:
        """What was lent is used by ``job``."""
        self._lent = [(lent, job if lent is gradient else its_job) for lent, its_job in self._lent]

    def _take_back(self) -> None:
        """What is lent to jobs that are over. A gradient that has come to stay keeps its home."""
        engine = self._engine
        left: list[tuple[Binding, Job | None]] = []
        for gradient, job in self._lent:
            if job is not None and not job.is_over:
                left.append((gradient, job))
                continue
            with engine.lock:
                if engine.is_empty(gradient.segment):
                    self._homes.unsettle(gradient.segment)
        self._lent = left
