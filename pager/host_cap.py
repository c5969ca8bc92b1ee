"""The host budget as a promise: looked at between steps, changed while the model trains.

What is reserved is bounded by the bill; what grows beside it (Python, other libraries, the data loader) is not ours,
and other processes may eat what was free. So between two steps the whole process is looked at, once a second at most:

1. above the high watermark, or where the machine (or the cgroup) has next to nothing left, the pageable part of what is
   ours is given back: garbage, the heap's free memory, free pieces of the arena and the free frames of pageable ones;
2. that is done until the low watermark; a line says what came of it;
   What was in vain is not tried again before the process has grown;
3. what is page-locked and in use stays: it is the training state. If that is too much, a warning says so, once for each
   time that the budget is passed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from typing import TYPE_CHECKING

from pager.errors import BudgetError
from pager.host_limit import free_host_bytes, host_budget_bytes, host_limit_bytes, process_bytes
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.homes import Homes

logger = logging.getLogger("pager.host_cap")

# The pair of watermarks, shares of the budget.
HIGH = 0.97
LOW = 0.92
# Where less than this share of all memory is left to anybody, the system is about to swap or to kill.
LEAST_FREE = 0.02
SECONDS_BETWEEN_LOOKS = 1.0


class HostCap:
    """Holds one process to its host budget. Used by the training thread, between steps."""

    def __init__(self, budget_bytes: int, homes: Homes) -> None:
        self.budget_bytes = budget_bytes
        self._homes = homes
        self._looked = float("-inf")
        self._is_warned = False
        # What the process took when nothing more could be given back.
        self._least_bytes = 0

    def resolve(self, knob: int | float | str) -> int:
        """Bytes meant by ``host_budget``. Raises BudgetError if what is in use cannot be brought under that, after
        giving back what can be.
        """
        wanted = host_budget_bytes(knob, host_limit_bytes())
        if process_bytes() > wanted:
            self._give_back(f"host_budget is to be {format_bytes(wanted)}", wanted)
        used = process_bytes()
        if used > wanted:
            held = self._homes.host_used_bytes
            raise BudgetError(
                f"pager: host_budget = {format_bytes(wanted)} is less than the {format_bytes(used)} that the process "
                f"takes, of which {format_bytes(held)} are the training state's homes, which cannot move while it "
                f"trains. The least that can be set now is {format_bytes(used)}; for less, close() and manage() again "
                "with more on the device or on the disk."
            )
        return wanted

    def resize(self, budget_bytes: int) -> None:
        """The budget is another from now on."""
        self._homes.resize_host(budget_bytes - self.budget_bytes)
        self.budget_bytes = budget_bytes
        self._is_warned = False
        self._looked = float("-inf")
        self._least_bytes = 0

    def look(self) -> None:
        """Between two steps; see the head of this file."""
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = now
        used, free = process_bytes(), free_host_bytes()
        if self._least_bytes * HIGH <= used <= self._least_bytes * (2 - HIGH):
            return  # tried in vain, and not much has come or gone since
        if free < LEAST_FREE * host_limit_bytes():
            self._give_back(
                f"only {format_bytes(free)} of memory are left to all processes", self.budget_bytes
            )
        elif used > HIGH * self.budget_bytes:
            self._give_back(
                f"the process takes {format_bytes(used)} of {format_bytes(self.budget_bytes)}",
                self.budget_bytes,
            )
        else:
            self._is_warned &= used > LOW * self.budget_bytes
            self._least_bytes = 0
            return
        used = self._least_bytes = process_bytes()
        if used > self.budget_bytes and not self._is_warned:
            self._is_warned = True
            logger.warning(
                "host memory: the process takes %s, more than host_budget = %s, and %s of it are the training state. "
                "What has grown is not pager's: look at the data loader and at tensors that are kept, or raise "
                "host_budget with set(host_budget=...)",
                format_bytes(used),
                format_bytes(self.budget_bytes),
                format_bytes(self._homes.host_used_bytes),
            )

    def _give_back(self, why: str, budget_bytes: int) -> None:
        """Give back the pageable part, cheapest first, until the low watermark of the budget is reached."""
        before = process_bytes()
        for release in (gc.collect, _trim_heap, self._homes.release_host):
            release()
            if process_bytes() <= LOW * budget_bytes and free_host_bytes() >= LEAST_FREE * host_limit_bytes():
                break
        logger.info(
            "host memory: %s; gave back %s that was pageable",
            why,
            format_bytes(max(before - process_bytes(), 0)),
        )


def _trim_heap() -> None:
    """Have the C library give free memory back to the system, where it can."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
