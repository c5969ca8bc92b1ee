"""The split of the update: how much of it runs on the CPU, beside what streams through the device.

Streaming is bound by the link, the CPU's part by its own rate, and both run at once: the best split lets both end
together. Of each element that streams, the link carries its states in and out; of one that the CPU updates, the
gradient out and the new weight in. With the bytes of a step over the link's rate on one side and elements over the
CPU's rate, as the last step measured it beside the link, on the other, the balance is a linear equation.
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
) -> float:
    """The share of all elements to update on the CPU, from 0 to ``MAX_SHARE``.

    ``streamed_share``: of the elements, those whose states do not stay on the device; ``state_bytes`` and
    ``sent_bytes``: what an element takes on the link in each direction, streamed and updated on the CPU;
    ``link_bytes_per_second``: of each direction with both at work; ``elements_per_second``: the CPU's rate, 0 where
    it was not measured yet (then `FIRST_SHARE`).
    """
    if elements_per_second <= 0 or link_bytes_per_second <= 0:
        return min(FIRST_SHARE, streamed_share)
    streamed_seconds = state_bytes / link_bytes_per_second
    saved_seconds = (state_bytes - sent_bytes) / link_bytes_per_second
    # share / rate == CPU_SPAN * (streamed_share * streamed - share * saved)
    share = (
        CPU_SPAN * streamed_share * streamed_seconds / (1 / elements_per_second + CPU_SPAN * saved_seconds)
    )
    return min(share, streamed_share, MAX_SHARE)
