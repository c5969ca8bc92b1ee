"""How long the link rests between two backwards of a model, and the compute waits for it: measured, in the first steps.

With updates inside backward the link is at work from the first gradient on. From the end of a backward to the next
one's first gradient it rests, where all weights are on the device. The two places are noted in the compute stream, so
the time between them is the device's own, and holds what the host waits for as well (data, an evaluation).

Once updates are enqueued for that time (`pager.optim.late`) the compute may wait for them in it. So no rest counts for
more than what was measured without.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pager.device.base import Moment
    from pager.engine.engine import Engine

# The first steps compile, page-lock, and give the arena its size; then one settles, and so many are measured.
_WARM_UP_STEPS = 1
_MEASURED_STEPS = 2
# Of so many steps the middle one counts: a short last batch, or an evaluation in between, says nothing of the others.
_REMEMBERED_STEPS = 9


class LinkRest:
    """Seconds of one engine's steps; begins anew with each size of the arena."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arena_bytes = -1
        self._num_steps = 0
        self._stalls: list[float] = []
        self._stalled_before = 0.0
        # The last ones; some are still to come on the device.
        self._pairs: deque[tuple[Moment, Moment]] = deque(maxlen=_REMEMBERED_STEPS)
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._without: list[float] = []
        self._ended: Moment | None = None

    def begins(self) -> None:
        """The compute has all of a backward, and of the updates in it, behind it."""
        self._ended = self._engine.device.current_stream().moment()

    def ends(self) -> None:
        """The first gradient of a backward is here."""
        if self._ended is not None:
            self._pairs.append((self._ended, self._engine.device.current_stream().moment()))
            self._ended = None

    def end_step(self) -> None:
        """A step is over."""
        arena_bytes = self._engine.arena.capacity_bytes
        if arena_bytes != self._arena_bytes:
            self._arena_bytes, self._num_steps = arena_bytes, 0
            for values in (self._stalls, self._pairs, self._seconds, self._without):
                values.clear()
        self._num_steps += 1
        before, self._stalled_before = self._stalled_before, self._engine.counters.stall_seconds
        if self._num_steps <= _WARM_UP_STEPS:
            self._pairs.clear()
        elif len(self._stalls) < _MEASURED_STEPS:
            self._stalls.append(self._stalled_before - before)
        while self._pairs:
            seconds = self._pairs[0][0].seconds_until(self._pairs[0][1])
            if seconds is None:
                return
            self._pairs.popleft()
            self._seconds.append(seconds)
            if len(self._without) < _MEASURED_STEPS:
                self._without.append(seconds)

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured."""
        return len(self._stalls) == len(self._without) == _MEASURED_STEPS

    @property
    def seconds(self) -> float:
        """From the end of a backward to the first gradient of the next."""
        return min(*self._without, statistics.median(self._seconds))

    @property
    def stall_seconds(self) -> float:
        """In which the compute of a step waited for the link, with nothing enqueued for its rest."""
        return statistics.mean(self._stalls)
