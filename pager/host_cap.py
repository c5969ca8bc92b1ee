"""The host budget as a promise: looked at between steps, changed while the model trains.

What is reserved is bounded by the bill; what grows beside it (Python, other libraries, the data loader) is not ours,
and other processes may eat what was free. So between two steps the whole process is looked at, once a second at most:

1. above the high watermark, or where the machine (or the cgroup) has next to nothing left, the pageable part of what is
   ours is given back: garbage, the heap's free memory, free pieces of the arena and the free frames of pageable ones;
2. that is done until the low watermark; a line says what came of it;
   What was in vain is not tried again before the process has grown;
3. what is page-locked and in use stays: it is the training state. If that is too much, a warning says so, once for each
   time that the budget is passed.

None of that moves a home: it would cost every later step, for what may be over in a moment. Homes move when the user
says so, with ``set(host_budget=...)``. A budget that holds what the process takes, once step 1 is done, is in force at
once. Below that

4. it is asked, before anything changes, whether what is free between the homes, and homes that the disk has room for,
   make up for the difference. If not, BudgetError names the least budget for which they do;
5. at the next step boundary that much moves (`pager.home_moves`), to the high watermark if it can be, and the arena
   gives the system what came free. Then the budget is in force, and host memory takes no home more than fits;
6. if the disk fails at that, what has moved stays there, the rest stays here, and the budget is the old one again. The
   error is raised at the next access, where the training can go on.

With a budget that is raised homes come back, parameters first, up to the low watermark, and no more at a step boundary
than a disk brings in about a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pager.errors import BudgetError, TierError
from pager.host_limit import free_host_bytes, host_budget_bytes, host_limit_bytes, process_bytes
from pager.interrupts import uninterrupted
from pager.policies.placement import PlacementError
from pager.units import format_at_least, format_bytes

if TYPE_CHECKING:
    from pager.home_moves import HomeMoves
    from pager.homes import Homes

logger = logging.getLogger("pager.host_cap")

# The pair of watermarks, shares of the budget.
HIGH = 0.97
LOW = 0.92
# Where less than this share of all memory is left to anybody, the system is about to swap or to kill.
LEAST_FREE = 0.02
# A look takes 0.7 ms. Between two the process grows by what a step or two leave in the heap.
SECONDS_BETWEEN_LOOKS = 0.2
# The process takes a little more or less from one look to the next, whatever we do.
NOISE_BYTES = 4 * 2**20
# What comes back from the disk at a step boundary: a virtual disk reads 1.8 GB a second (docs/benchmarks.md).
RETURN_BYTES = 2**30
# What has moved is measured, and what is left of the excess moves then: buffers, the heap.
_MOST_ROUNDS = 4


class HostCap:
    """Holds one process to its host budget. Used by the training thread, between steps."""

    def __init__(self, budget_bytes: int, homes: Homes, knob: int | float | str) -> None:
        """``knob``: what the user gave, that means ``budget_bytes``."""
        self.budget_bytes = budget_bytes
        self.knob = knob
        # Set once there are homes that could move.
        self.moves: HomeMoves | None = None
        # Told what went wrong at a step boundary, which must not raise: its step is over.
        self.on_failure: Callable[[BaseException], None] = _log
        self._homes = homes
        self._looked = float("-inf")
        self._is_warned = False
        # What the process took when nothing more could be given back.
        self._least_bytes = 0
        # What it took when its heap was trimmed last, as a model went into pages.
        self._trimmed_bytes = 0
        self._looked_at_heap = 0.0
        # A smaller budget that the next step boundary has to move homes for.
        self._wanted: tuple[int, int | float | str] | None = None
        self._may_return = False

    # -- another budget ----------------------------------------------------------------------------

    def set(self, knob: int | float | str) -> None:
        """Ask for another ``host_budget``: in force now, or, where homes have to move, from the next step boundary on.

        Raises BudgetError, and changes nothing, if what is in use cannot be brought under it.
        """
        wanted = host_budget_bytes(knob, host_limit_bytes())
        if self._taken() > wanted:
            self._give_back(f"host_budget is to be {format_bytes(wanted)}", wanted)
        used = self._taken()
        if used > wanted:
            self._check(wanted, used)
            self._wanted = wanted, knob
            return
        self._wanted = None
        self._may_return = wanted > self.budget_bytes or self._may_return
        self._resize(wanted, knob)

    def _taken(self) -> int:
        """What the process takes, and will take as soon as all that is reserved has been written to."""
        return process_bytes() + self._homes.untouched_host_bytes

    def _check(self, wanted: int, used: int) -> None:
        """Whether the next step boundary can bring ``used`` under ``wanted``. Raises BudgetError."""
        held = self._homes.host_used_bytes
        excess = used - wanted + NOISE_BYTES - self._homes.spare_host_bytes
        if excess <= 0:
            return
        missing, can_leave = excess, 0
        if self.moves is not None:
            excess += self.moves.bytes_to_come
            try:
                self.moves.leaving_bytes(excess)
                return
            except PlacementError as error:
                missing, can_leave = error.missing_bytes, excess - error.missing_bytes
        where = (
            f"of which {format_bytes(can_leave)} can move to the disk"
            if can_leave
            else "which cannot move while it trains, since there is no disk with room for them"
        )
        raise BudgetError(
            f"pager: host_budget = {format_bytes(wanted)} is less than the {format_bytes(used)} that the process "
            f"takes, of which {format_bytes(held)} are the training state's homes, {where}. The least that can be set "
            f"now is {format_at_least(wanted + missing + NOISE_BYTES)}; for less, close() and manage() again with more "
            "on the device or on the disk."
        )

    def _resize(self, budget_bytes: int, knob: int | float | str) -> None:
        """The budget is another from now on."""
        self.knob = knob
        self._homes.resize_host(budget_bytes - self.budget_bytes)
        self.budget_bytes = budget_bytes
        self._is_warned = False
        self._looked = float("-inf")
        self._least_bytes = 0

    # -- at a step boundary ------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether homes are to move at the next step boundary."""
        return self._wanted is not None or self._may_return

    def move_homes(self) -> None:
        """Do what a changed budget asks for; after an interrupt the next call goes on. Errors go to ``on_failure``."""
        if self._wanted is not None:
            self._lower(*self._wanted)
        elif self._may_return:
            self._bring_back()

    def _lower(self, wanted: int, knob: int | float | str) -> None:
        before = process_bytes()
        logger.info(
            "host memory: %s more than host_budget = %s are taken; homes move to the disk, about a second for each GiB",
            format_bytes(max(self._taken() - wanted, 0)),
            format_bytes(wanted),
        )
        try:
            moved = self._move_out(wanted)
            used = self._taken()
            if used > wanted:
                raise BudgetError(
                    f"pager: host_budget cannot be {format_bytes(wanted)} any more: the process takes "
                    f"{format_bytes(used)} after {format_bytes(moved)} of homes moved to the disk, and of the "
                    f"{format_bytes(self._homes.host_used_bytes)} of homes that are left none can. The least that can "
                    f"be set now is {format_at_least(used + NOISE_BYTES)}."
                )
        except (TierError, BudgetError) as error:
            self._wanted = None
            logger.warning(
                "host_budget stays %s: it could not be lowered to %s (%s)",
                format_bytes(self.budget_bytes),
                format_bytes(wanted),
                error,
            )
            self.on_failure(error)
            return
        with uninterrupted():
            self._wanted, self._may_return = None, False
            self._resize(wanted, knob)
            self._homes.limit_host(wanted - used)
        logger.info(
            "host memory: host_budget is %s from now on; %s of homes moved to the disk, and the process takes %s "
            "instead of %s",
            format_bytes(wanted),
            format_bytes(moved),
            format_bytes(process_bytes()),
            format_bytes(before),
        )

    def _move_out(self, wanted: int) -> int:
        """Bring the process under ``wanted``, below its high watermark if it can be; bytes of homes that moved."""
        moves = self.moves
        assert moves is not None
        moved_bytes = 0
        with moves.standstill():
            try:
                for _ in range(_MOST_ROUNDS):
                    moves.release()
                    excess = self._taken() - int(HIGH * wanted)
                    moved = moves.to_disk(excess) if excess > 0 else 0
                    moved_bytes += moved
                    if not moved:
                        break
            finally:
                moves.release()
        if self._taken() > wanted:
            self._give_back(f"host_budget is to be {format_bytes(wanted)}", wanted)
        return moved_bytes

    def _bring_back(self) -> None:
        moves = self.moves
        moved = 0
        room = int(LOW * self.budget_bytes) - self._taken()
        try:
            if moves is not None and room > 0:
                moved = moves.to_host(room, at_most_bytes=RETURN_BYTES)
        except BudgetError as error:  # what is free on paper the system has not got
            logger.info("host memory: homes stay on the disk (%s)", error)
        except TierError as error:
            self.on_failure(error)
        self._may_return = moved > 0
        if moved:
            logger.debug("host memory: %s of homes came back from the disk", format_bytes(moved))

    # -- looking -----------------------------------------------------------------------------------

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
                "host_budget with set(host_budget=...). Set to the same again, it has homes move to the disk",
                format_bytes(used),
                format_bytes(self.budget_bytes),
                format_bytes(self._homes.host_used_bytes),
            )

    def look_at_heap(self) -> None:
        """While a model goes into pages: what its tensors leave in the heap, in pieces that the next ones do not fit
        into, goes back before it adds up to more than the budget.
        """
        if process_bytes() > max(HIGH * self.budget_bytes, self._trimmed_bytes + NOISE_BYTES):
            _trim_heap()
            self._trimmed_bytes = process_bytes()

    def look_in_step(self) -> None:
        """In the midst of a step: what it has left in the heap until now. (What is computed on the CPU comes and goes
        there; seen: 70 MB in one backward.)
        """
        now = time.monotonic()
        if now - self._looked_at_heap >= SECONDS_BETWEEN_LOOKS:
            self._looked_at_heap = now
            self.look_at_heap()

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


def _log(error: BaseException) -> None:
    logger.error("homes could not move: %s", error)
