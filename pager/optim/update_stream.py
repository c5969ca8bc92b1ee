"""Updates inside backward on a stream of their own, beside the model's kernels.

The problem. An update waits for its states, which come over the link. On the compute stream the whole backward waits
with it, though all it needs of the update is the memory of one gradient; and the link in turn rests while the model
computes, since slots for states are few. Gradients come in bursts (three of a feed-forward block within milliseconds),
states at the link's even rate.

So updates are put on the stream ``Device.beside``, and what they read meanwhile is *lent* to them:

1. lend   the stream waits for what made the gradient, computes, and an event says when it is done; until then the
          gradient (2 bytes of an element, where its states are 10) is kept from torch's allocator, which would give
          its memory to the next kernel of the compute stream
2. take   what is lent comes back when its event has passed; where more than so many bytes are lent, the compute stream
   back   waits for the oldest: back-pressure instead of storage
3. join   at the end of the backward the compute stream waits for all of it: whoever reads a parameter, a state or a
          step count from then on, or frees one, comes after the update (what is enqueued then, `pager.optim.late`,
          reads pages and tensors of its own only, and is waited for at the end of the next one)

Pages need none of this: the engine orders every use of them by events, whatever stream it is on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pager.device.base import Region
from pager.interrupts import uninterrupted

if TYPE_CHECKING:
    import torch

    from pager.device.base import Device, Event, Stream


class _Loan(NamedTuple):
    """Tensors of one update: read until ``event``, their memory reused on ``owner`` afterwards."""

    event: Event
    owner: Stream
    tensors: tuple[torch.Tensor, ...]
    num_bytes: int
    # What the checker is told of: the memory is torch's, so a number stands for it.
    region: Region


class UpdateStream:
    """Runs updates beside the compute. The caller holds a lock; contexts do not nest."""

    def __init__(self, device: Device, limit_bytes: Callable[[], int]) -> None:
        """``limit_bytes``: to be lent at most, beside the newest loan."""
        self._device = device
        self._limit_bytes = limit_bytes
        self._loans: deque[_Loan] = deque()
        self._numbers: deque[int] = deque()
        self.num_bytes = 0

    @contextlib.contextmanager
    def lend(self, gradient: torch.Tensor | None, others: Sequence[torch.Tensor]) -> Iterator[None]:
        """Compute on the stream beside, behind what is on the current one. ``gradient`` (None for one in pages) and
        ``others``, tensors on the device that the work reads or writes, are kept until it is done.
        """
        owner, beside = self._device.current_stream(), self._device.beside
        number = self._numbers.popleft() if self._numbers else len(self._loans)
        region = Region("loan", number, number + 1)
        owner.touch(region, write=True)
        beside.wait(owner.record())
        try:
            with self._device.computing_on(beside):
                yield
        finally:
            # Also after an exception: kernels may be under way.
            with uninterrupted():
                beside.touch(region, write=False)
                tensors = others if gradient is None else [gradient, *others]
                num_bytes = 0 if gradient is None else gradient.nbytes
                loan = _Loan(beside.record(), owner, tuple(tensors), num_bytes, region)
                self._loans.append(loan)
                self.num_bytes += loan.num_bytes
        self._take_back()

    def _take_back(self) -> None:
        """What is over, and the oldest of what is too much."""
        while self._loans and self._loans[0].event.query():
            self._end(self._loans[0])
        while len(self._loans) > 1 and self.num_bytes > self._limit_bytes():
            oldest = self._loans[0]
            oldest.owner.wait(oldest.event, timed=True)
            self._end(oldest)

    def join(self) -> None:
        """The current stream goes on after all updates; nothing is lent any more."""
        if not self._loans:
            return
        stream = self._device.current_stream()
        stream.wait(self._loans[-1].event, timed=True)
        for loan in list(self._loans):
            if loan.owner is not stream:
                loan.owner.wait(loan.event)
            self._end(loan)

    def _end(self, loan: _Loan) -> None:
        with uninterrupted():
            loan.owner.touch(loan.region, write=True)  # torch may put something else there from now on
            self._loans.remove(loan)
            self._numbers.append(loan.region.begin)
            self.num_bytes -= loan.num_bytes
