"""What the steps so far say of the CPU's part: how fast it is, beside the link and alone, and whether it was late.

A step, as seen from here: it ends (``end_step``), the link may rest until the first gradient of the next
(``backward_ended``, ``first_gradient``; only where updates run inside backward does anybody know that), and somebody
may stand still for an update that is not done (``was_waited_for``), or the device do one because there is no room in
host memory for more gradients that wait (``was_refused``). Jobs are counted as they end, on the pool's threads.
"""

from __future__ import annotations

import threading
import time

from pager.policies.update_split import less_share

# In the first steps the kernel is compiled and its pages are touched for the first time: what they were late by says
# nothing of the others.
_WARM_UP_STEPS = 4


class CpuRates:
    """Elements per second of one model's CPU updates. Safe to call from several threads."""

    def __init__(self) -> None:
        # Of the last step, whatever the link did meanwhile; and while it rests, smoothed. 0.0 until measured.
        self.per_second = 0.0
        self.alone_per_second = 0.0
        # From the end of a step to the first gradient, without what was waited for the CPU, smoothed.
        self.rest_seconds = 0.0
        # By how much the CPU's share is to be less for what it was late by.
        self.less = 0.0
        # Whether the link rests between two backwards; None where nobody knows.
        self.link_rests: bool | None = None
        # Steps that had a part for the CPU.
        self.num_steps = 0
        self._step_ended: float | None = None
        self._late_seconds = 0.0
        self._num_refused_elements = 0
        self._rest_began: float | None = None
        self._last_done = 0.0
        self._lock = threading.Lock()
        # Seconds at work and elements done, in all and while the link rested.
        self._all: tuple[float, int] = (0.0, 0)
        self._alone: tuple[float, int] = (0.0, 0)

    def count(self, began: float, num_elements: int) -> None:
        """An update that could begin at ``began`` (seconds) is done."""
        now = time.perf_counter()
        with self._lock:
            began = max(began, self._last_done)
            self._all = (self._all[0] + now - began, self._all[1] + num_elements)
            if self._rest_began is not None:
                began = max(began, self._rest_began)
                self._alone = (self._alone[0] + now - began, self._alone[1] + num_elements)
            self._last_done = now

    def was_waited_for(self, seconds: float) -> None:
        """Somebody needed a parameter that the CPU had not updated yet."""
        self._late_seconds += seconds

    def was_refused(self, num_elements: int) -> None:
        """There was no room for a gradient: the device had to do an update that was the CPU's."""
        self._num_refused_elements += num_elements

    def end_step(self, num_elements: int) -> None:
        """A step is over, of ``num_elements`` in all."""
        self._step_ended = time.perf_counter()
        with self._lock:
            seconds, done = self._all
            if seconds:
                self.per_second = done / seconds
            seconds, done = self._alone
            if seconds:
                rate = done / seconds
                self.alone_per_second = (rate + (self.alone_per_second or rate)) / 2
            self._all = self._alone = (0.0, 0)
        if self.num_steps >= _WARM_UP_STEPS:
            self.less = less_share(
                self.less,
                late_seconds=self._late_seconds,
                elements_per_second=self.per_second,
                num_elements=num_elements,
                num_refused_elements=self._num_refused_elements,
            )
        self._late_seconds, self._num_refused_elements = 0.0, 0

    def first_gradient(self) -> None:
        """The first gradient of a step is here: until now the link had nothing to do."""
        with self._lock:
            self._rest_began = None
        if self._step_ended is None:
            return  # of the very first step
        seconds = max(time.perf_counter() - self._step_ended - self._late_seconds, 0.0)
        self.rest_seconds = (seconds + (self.rest_seconds or seconds)) / 2

    def backward_ended(self, *, link_rests: bool) -> None:
        """The backward is over. ``link_rests``: until its next gradient host memory is the CPU's alone."""
        with self._lock:
            self.link_rests, self._rest_began = link_rests, time.perf_counter() if link_rests else None
