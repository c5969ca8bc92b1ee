"""The split of the update: how much of it runs on the CPU, and on how many threads, beside what streams.

Streaming is bound by the link, the CPU's part by its own rate, and both run at once: the best split lets both end
together. Of each element that streams, the link carries its states in and out; of one that the CPU updates, the
gradient out and the new weight in. With the bytes of a step over the link's rate on one side and elements over the
CPU's rate on the other, the balance is a linear equation. The CPU also has the seconds in which the link rests: the
next forward, and the step itself; but what is to be done then waits in host memory until then, where room is limited.

Both sides use the same host memory, and an element takes more of it on the CPU (30 bytes with a split master) than on
the link (20). So beside the link the CPU does only what the link leaves of the memory's bandwidth, with as few threads
as that takes; with all of them it updates while the link rests (docs/decisions.md, 23). Where it is not known what the
CPU does alone, a third of the threads, which take as long as the link, are faster than all (docs/decisions.md, 14).
Where the link has something to do throughout the step (`pager.optim.late`), a fifth is faster still, and takes as long
(docs/decisions.md, 62).

Which ones: spread evenly along the backward by error diffusion. In one block at its begin they would leave the link
idle until the first gradient of those that stream.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pager.policies.staying import BoolArray

# A share to measure the CPU's rate with.
FIRST_SHARE = 0.1
MAX_SHARE = 0.75
# The CPU should be done a little before the link: what it updates last is used first.
CPU_SPAN = 0.9
# Of the threads there are.
THREADS_SHARE = 1 / 3
# The same where the link does not rest between two backwards: then the CPU has the whole step for its part, and leaves
# the link the more of the memory the longer it takes.
STEADY_THREADS_SHARE = 1 / 5
# Of the elements, in the order of their gradients, those among which the CPU's are. The last ones are used first in
# the next forward, when the CPU is still at what it was given before: its last is to be used in the middle.
LEAD = 0.6
# Of the bytes of all gradients, room in host memory for those that come inside backward and wait for the CPU: it
# updates a third of them, and is behind by a part of that.
WAITING_SHARE = 1 / 6
# Of the elements, those whose gradients wait for the next forward: each takes 2 bytes on the device, and may have to
# take them in host memory.
MAX_LATE = 0.08
# Of what the CPU was late by, in elements, so much is taken off its share, but not more than a part of the whole at
# once; after a step in which it was in time, some of what was taken off is given back.
_LESS = 0.5
_MOST_AT_ONCE = 0.05
_GIVEN_BACK = 0.05
# A step's part is cut into so many slices for each thread: enough that all end together. Not more: for each slice a
# thread needs the GIL twice, and each time the training, which lets go of it in every operation, waits to have it back.
_SLICES_OF_A_THREAD = 4
# Nobody is exactly in time: a part of the whole.
_IN_TIME = 0.002


def balanced_share(
    *,
    streamed_share: float,
    state_bytes: float,
    sent_bytes: float,
    link_bytes_per_second: float,
    elements_per_second: float,
    alone_per_second: float | None = None,
    rest_seconds: float = 0.0,
    waiting_share: float = 1.0,
) -> float:
    """The share of all elements to update on the CPU, from 0 to ``MAX_SHARE``.

    ``streamed_share``: of the elements, those whose states do not stay on the device; ``state_bytes`` and
    ``sent_bytes``: what an element takes on the link in each direction, streamed and updated on the CPU;
    ``link_bytes_per_second``: of each direction with both at work; ``elements_per_second``: the CPU's rate beside it,
    ``alone_per_second`` while it rests, the same by default; 0 where it was not measured yet (then `FIRST_SHARE`);
    ``rest_seconds``: in which the link rests, for each element; ``waiting_share``: of all elements, those whose
    gradients may wait for the CPU at once.
    """
    alone = elements_per_second if alone_per_second is None else alone_per_second
    if alone <= 0 or link_bytes_per_second <= 0:
        return min(FIRST_SHARE, streamed_share)
    streamed_seconds = state_bytes / link_bytes_per_second
    saved_seconds = (state_bytes - sent_bytes) / link_bytes_per_second
    # What the CPU gets done beside the link: ``beside * (streamed_share * streamed_seconds - share * saved_seconds)``.
    beside = CPU_SPAN * elements_per_second
    at_most = beside * streamed_share * streamed_seconds
    # share == beside the link + CPU_SPAN * alone * rest
    share = (at_most + CPU_SPAN * alone * rest_seconds) / (1 + beside * saved_seconds)
    # Most wait when the last one is given to the CPU: share - LEAD * beside the link == waiting_share
    most = (waiting_share + LEAD * at_most) / (1 + LEAD * beside * saved_seconds)
    return min(share, most, streamed_share, MAX_SHARE)


def late_elements(
    *,
    rest_seconds: float,
    stall_seconds: float,
    link_bytes_per_second: float,
    state_bytes: float,
    num_elements: int,
) -> float:
    """Of ``num_elements``, those whose updates inside backward wait for its end (`pager.optim.late`).

    As many as the link brings, ``state_bytes`` each, in the time in which it would rest; no more than it takes for the
    device not to wait for it: ``rest_seconds`` and ``stall_seconds`` of a step without.
    """
    seconds = min(rest_seconds, stall_seconds)
    return min(seconds * link_bytes_per_second / max(state_bytes, 1), MAX_LATE * num_elements)


def rate_beside_link(alone_per_second: float, *, element_bytes: float, link_bytes_per_second: float) -> float:
    """Elements per second that the CPU updates at no cost to a link that is busy in both directions.

    ``alone_per_second``: of all threads while the link rests; ``element_bytes``: what one takes of host memory.
    """
    return max(alone_per_second - 2 * link_bytes_per_second / element_bytes, 0.0)


def less_share(
    less: float,
    *,
    late_seconds: float,
    elements_per_second: float,
    num_elements: int,
    num_refused_elements: int = 0,
) -> float:
    """By how much the CPU's share is to be below the balance, which knows neither what the training waits for nor how
    fast the link is beside the CPU.

    ``less``: the same of the last step; ``late_seconds``: the training stood still for in that step;
    ``num_refused_elements``: of ``num_elements``, those that the device had to update in the CPU's stead.
    """
    late = (late_seconds * elements_per_second + num_refused_elements) / max(num_elements, 1)
    if late <= _IN_TIME:
        return (1 - _GIVEN_BACK) * less
    return min(less + min(_LESS * late, _MOST_AT_ONCE), MAX_SHARE)


class Diffusion:
    """Chooses parameters, in the order of their gradients, so that at each point about the same share was chosen."""

    def __init__(self, share: float, num_elements: int, *, lead: float = LEAD) -> None:
        """``share``: of ``num_elements``, those of all parameters; ``lead``: among so many of the first of them."""
        lead = max(lead, share)
        self._density = share / lead
        self._left = lead * num_elements
        self._owed = 0.0

    def is_due(self, num_elements: int) -> bool:
        """Whether the next parameter, of ``num_elements``, is to be chosen; if it is not, a later one is."""
        self._owed += self._density * min(num_elements, self._left)
        self._left -= min(num_elements, self._left)
        return self._owed >= num_elements / 2

    def take(self, num_elements: int) -> None:
        """It was chosen."""
        self._owed -= num_elements


def cpu_part(
    num_elements: npt.ArrayLike, wanted_elements: float, *, evenly: bool, lead: float = LEAD
) -> BoolArray:
    """bool: which parameters the CPU updates, about ``wanted_elements`` of all elements.

    ``num_elements``: of each parameter that it can update, in the order in which their gradients come. ``evenly``: as
    `Diffusion` chooses, with ``lead``; else those that come first, which are used last in the next forward.
    """
    sizes = np.asarray(num_elements, dtype=np.int64).reshape(-1)
    if not evenly:
        before = np.cumsum(sizes) - sizes
        # Up to the first of which less than half is wanted.
        return np.cumprod((wanted_elements - before >= sizes / 2) & (wanted_elements > 0)).astype(bool)
    total = int(sizes.sum())
    diffusion = Diffusion(min(max(wanted_elements / max(total, 1), 0.0), 1.0), total, lead=lead)
    taken = np.zeros(len(sizes), dtype=bool)
    for index, size in enumerate(sizes.tolist()):
        if diffusion.is_due(size):
            diffusion.take(size)
            taken[index] = True
    return taken


def num_slices(num_elements: int, num_step_elements: int, num_threads: int) -> int:
    """Into how many slices to cut the update of one parameter, for ``num_threads``, of a step's CPU part of
    ``num_step_elements`` in all.
    """
    wanted = round(_SLICES_OF_A_THREAD * num_threads * num_elements / max(num_step_elements, 1))
    return min(max(wanted, 1), num_threads)


def num_threads_beside_link(num_threads: int, share: float = THREADS_SHARE) -> int:
    """How many of ``num_threads`` update while the link streams, for a ``share`` of the rate of all: see the head of
    this file.
    """
    return max(1, round(num_threads * share))
