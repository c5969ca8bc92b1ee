"""The split of the update: how much of it runs on the CPU, and on how many threads, beside what streams.

Streaming is bound by the link, the CPU's part by its own rate, and both run at once: the best split lets both end
together. Of each element that streams, the link carries its states in and out; of one that the CPU updates, the
gradient out and the new weight in. With the bytes of a step over the link's rate on one side and elements over the
CPU's rate, as the last step measured it beside the link, on the other, the balance is a linear equation. The CPU also
has the seconds in which the link rests: the next forward, and the step itself.

Both sides use the same host memory. Threads that race through their part at its full bandwidth leave the link half of
its rate for a while, and then stand idle while the link alone cannot use all of the memory's: less threads that take as
long as the link are faster together. How many that is depends on the machine, so it is tried out (`ThreadSearch`).
"""

from __future__ import annotations

# A share to measure the CPU's rate with.
FIRST_SHARE = 0.1
MAX_SHARE = 0.75
# The CPU should be done a little before the link: what it updates last is used first.
CPU_SPAN = 0.9


def balanced_share(
    *,
    streamed_share: float,
    state_bytes: float,
    sent_bytes: float,
    link_bytes_per_second: float,
    elements_per_second: float,
    rest_seconds: float = 0.0,
) -> float:
    """The share of all elements to update on the CPU, from 0 to ``MAX_SHARE``.

    ``streamed_share``: of the elements, those whose states do not stay on the device; ``state_bytes`` and
    ``sent_bytes``: what an element takes on the link in each direction, streamed and updated on the CPU;
    ``link_bytes_per_second``: of each direction with both at work; ``elements_per_second``: the CPU's rate, 0 where
    it was not measured yet (then `FIRST_SHARE`); ``rest_seconds``: in which the link rests, for each element.
    """
    if elements_per_second <= 0 or link_bytes_per_second <= 0:
        return min(FIRST_SHARE, streamed_share)
    streamed_seconds = state_bytes / link_bytes_per_second
    saved_seconds = (state_bytes - sent_bytes) / link_bytes_per_second
    # share / rate == CPU_SPAN * (streamed_share * streamed + rest - share * saved)
    share = (
        CPU_SPAN
        * (streamed_share * streamed_seconds + rest_seconds)
        / (1 / elements_per_second + CPU_SPAN * saved_seconds)
    )
    return min(share, streamed_share, MAX_SHARE)


# Of a trial's steps the first ones find the share for so many threads; the best of the others counts.
STEPS_PER_TRIAL = 4
SETTLING_STEPS = 2
# Each trial has so many of all threads.
TRIALS = (1.0, 1 / 2, 1 / 3, 1 / 5)


class ThreadSearch:
    """Tries numbers of threads, a few steps each, and stays with the one whose steps took least."""

    def __init__(self, most: int) -> None:
        """``most``: threads there are."""
        self._left = list(dict.fromkeys(max(1, round(most * share)) for share in TRIALS))
        self._num_steps = 0
        self._seconds: dict[int, float] = {}
        self.num_threads = self._left.pop(0)

    @property
    def is_over(self) -> bool:
        """Whether the number stays from now on."""
        return not self._left and self._num_steps < 0

    def step_took(self, seconds: float) -> None:
        """A step with ``num_threads`` is over."""
        if self.is_over:
            return
        self._num_steps += 1
        if self._num_steps > SETTLING_STEPS:
            self._seconds[self.num_threads] = min(seconds, self._seconds.get(self.num_threads, seconds))
        if self._num_steps < STEPS_PER_TRIAL:
            return
        self._num_steps = 0
        if self._left:
            self.num_threads = self._left.pop(0)
        else:
            self.num_threads = min(self._seconds, key=lambda number: self._seconds[number])
            self._num_steps = -1
