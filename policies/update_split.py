"""The split of the update: how much of it runs on the CPU, and on how many threads, beside what streams.

Streaming is bound by the link, the CPU's part by its own rate, and both run at once: the best split lets both end
together. Of each element that streams, the link carries its states in and out; of one that the CPU updates, the
gradient out and the new weight in. With the bytes of a step over the link's rate on one side and elements over the
CPU's rate, as the last step measured it beside the link, on the other, the balance is a linear equation. The CPU also
has the seconds in which the link rests: the next forward, and the step itself.

Both sides use the same host memory. Threads that race through their part at its full bandwidth leave the link half of
its rate for a while, and then stand idle while the link alone cannot use all of the memory's: a third of them, which
take as long as the link, are faster together (docs/decisions.md, 15).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pager.policies.staying import BoolArray, spread

# A share to measure the CPU's rate with.
FIRST_SHARE = 0.1
MAX_SHARE = 0.75
# The CPU should be done a little before the link: what it updates last is used first.
CPU_SPAN = 0.9
# Of the threads there are.
THREADS_SHARE = 1 / 3


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


def cpu_part(num_elements: npt.ArrayLike, wanted_elements: float, *, evenly: bool) -> BoolArray:
    """bool: which parameters the CPU updates, about ``wanted_elements`` of all elements.

    ``num_elements``: of each parameter that it can update, in the order in which their gradients come. Not ``evenly``:
    those that come first, which are used last in the next forward, so that the CPU has the most time for them; right
    where all updates begin at once, after backward. ``evenly``: spread over backward, so that the link has something
    to stream all the time (docs/decisions.md, 31). A share that moves a little then moves nearly all of the choice: a
    caller that keeps something for each (homes for gradients) keeps the share.
    """
    sizes = np.asarray(num_elements, dtype=np.int64).reshape(-1)
    if evenly:
        return spread(sizes, wanted_elements)
    before = np.cumsum(sizes) - sizes
    # Up to the first of which less than half is wanted.
    return np.cumprod((wanted_elements - before >= sizes / 2) & (wanted_elements > 0)).astype(bool)


def num_threads_beside_link(num_threads: int) -> int:
    """How many of ``num_threads`` update while the link streams: see the head of this file."""
    return max(1, round(num_threads * THREADS_SHARE))
