"""The split of the update: how much of it runs on the CPU, beside what streams through the device.

Streaming is bound by the link, the CPU's part by its own rate, and both run at once. The best split lets both end
together. It is found from what the last step measured, not from what a machine ought to do: with ``share`` of the
elements on the CPU the step took ``step_seconds``; were the rest bound by the link, a share of ``s`` would take
``step_seconds * (1 - s) / (1 - share)``, and the CPU ``s * num_elements / rate``. Where the step is bound by the
compute instead, the same rule takes a little less than the CPU could do, and costs nothing.
"""

from __future__ import annotations

# The CPU begins with the first gradient and should be done before the parameters are used again.
CPU_SPAN = 0.9
# A share to measure the first rate with.
FIRST_SHARE = 0.1
MAX_SHARE = 0.75


def next_share(share: float, *, step_seconds: float, elements_per_second: float, num_elements: int) -> float:
    """The share of ``num_elements`` to update on the CPU in the next step, from 0 to ``MAX_SHARE``.

    ``share``: that of the last step; ``step_seconds``: how long it took; ``elements_per_second``: the rate of the
    CPU's part while it was at work. `FIRST_SHARE` where nothing was measured yet.
    """
    if elements_per_second <= 0 or step_seconds <= 0 or num_elements <= 0:
        return FIRST_SHARE
    streamed = max(1 - share, 1 - MAX_SHARE)
    balance = CPU_SPAN * step_seconds * elements_per_second / (num_elements * streamed)
    return min(balance / (1 + balance), MAX_SHARE)
