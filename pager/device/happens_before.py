"""Finds two accesses to a frame that nothing orders, from the order in which work is enqueued.

The problem. A copy into frames that a kernel still reads gives wrong numbers only if the copy happens to run
first. A test that compares numbers sees the accident, not the mistake. What can be seen always, on any
machine, is whether the program *orders* the two: by being on one stream, or by a chain of events and waits
between them.

The argument is that of vector clocks (Lamport 1978, Mattern 1989, Fidge 1988), and the idea of using it for
CUDA streams is that of ``torch.cuda._sanitizer``. The actors are the streams and the host (all its threads
count as one: they have locks of their own, which are not our business).

1. Every actor counts its own epochs, and knows of every other actor the newest epoch whose work is certainly
   over when its own next work starts. The row of these numbers is its clock.
2. ``record`` copies the stream's clock into the event and opens a new epoch on the stream, so that what the
   stream does afterwards is not taken for what the event covers. A wait takes the larger of both numbers,
   entry by entry.
3. Work is enqueued by the host, so it starts after all that the host did and knows to be over: enqueueing
   merges the host's clock into the stream's. That is also why the host needs no second epoch. The other
   direction needs the host to wait for an event, or to be told by ``query`` that it is over.
4. For each frame the last write (actor, epoch) is kept, and of each actor the epoch of its last read. An
   access by A is ordered after an earlier one by B in epoch e exactly if A's clock says at least e for B. A
   read has to be ordered after the last write, a write after the last write and after the last read of every
   actor. Older accesses need no look: a write was itself checked against all that came before it, so to be
   after it is to be after them, and of one actor's reads the last one is the latest.

Nothing is said of the order in which things really happen, so it works on CUDA as well: it sees calls, not
kernels. The cost is a few numpy operations over the touched range of frames per call.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from pager.columns import resized
from pager.errors import PagerInternalError, RaceError

if TYPE_CHECKING:
    from pager.device.base import Event, Region, Stream

Clock: TypeAlias = npt.NDArray[np.int64]

_HOST = 0  # actor 0 is the host, actor i + 1 is the stream of index i


class HappensBefore:
    """Vector clocks for streams, events and the host; last accesses for every frame. Safe among threads.

    Hold ``lock`` around telling the checker of an operation and putting it on its stream: the two orders must
    be one. Memories are ``"device"`` and ``"host"``; they grow as frames are named, or by ``resize``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_checked = 0
        self._clocks: list[Clock] = [np.ones(1, dtype=np.int64)]
        self._names = ["host"]
        self._memories: dict[str, _Frames] = {}

    def resize(self, memory: str, num_frames: int) -> None:
        """Set the number of frames of ``memory``; what is known of frames beyond it is forgotten."""
        with self.lock:
            self._memories.setdefault(memory, _Frames()).resize(num_frames)

    def record(self, event: Event) -> None:
        """``event`` covers everything put on its stream until now."""
        with self.lock:
            actor = self._enqueue(event.stream)
            clock = self._clocks[actor]
            event.clock = clock.copy()
            clock[actor] += 1

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on starts after ``event``."""
        with self.lock:
            self._merge(self._enqueue(stream), _clock_of(event))

    def host_waits(self, event: Event) -> None:
        """The host knows that ``event`` is over."""
        with self.lock:
            self._merge(_HOST, _clock_of(event))

    def access(
        self, stream: Stream | None, what: str, *, reads: Region | None, writes: Region | None
    ) -> None:
        """``stream`` (None: the host) reads and writes these frames by an operation called ``what``.

        Raises RaceError, and notes nothing, where an earlier access is not ordered before it.
        """
        with self.lock:
            actor = _HOST if stream is None else self._enqueue(stream)
            for region in (reads, writes):
                if region is not None:
                    self._check(actor, what, region, is_write=region is writes)
            if reads is not None:
                self._memories[reads.memory].note_read(
                    reads.begin, reads.end, actor, self._epoch(actor), what
                )
            if writes is not None:
                self._memories[writes.memory].note_write(
                    writes.begin, writes.end, actor, self._epoch(actor), what
                )
            self.num_checked += 1

    def _epoch(self, actor: int) -> int:
        return int(self._clocks[actor][actor])

    def _enqueue(self, stream: Stream) -> int:
        actor = stream.index + 1
        while len(self._clocks) <= actor:
            self._names.append("")
            self._clocks = [np.append(clock, 0) for clock in self._clocks]
            self._clocks.append(np.zeros(len(self._names), dtype=np.int64))
            self._clocks[-1][-1] = 1
        self._names[actor] = stream.name
        self._merge(actor, self._clocks[_HOST])
        return actor

    def _merge(self, actor: int, other: Clock) -> None:
        clock = self._clocks[actor][: len(other)]  # an older event's clock may be shorter
        np.maximum(clock, other, out=clock)

    def _check(self, actor: int, what: str, region: Region, *, is_write: bool) -> None:
        memory, begin, end = region
        if not 0 <= begin <= end:
            raise PagerInternalError(f"{what} names {region}, which is not a range of frames")
        frames = self._memories.setdefault(memory, _Frames())
        if end > frames.num_frames:
            frames.resize(max(end, 2 * frames.num_frames))
        found = frames.find_unordered(begin, end, self._clocks[actor], is_write=is_write)
        if found is None:
            return
        bad, other, other_is_write, other_what = found
        raise RaceError(
            f"{memory} frames {_spans(bad + begin)}: {what} on {self._names[actor]} "
            f"{'writes' if is_write else 'reads'} them, and nothing orders it after the {other_what} on "
            f"{self._names[other]} that {'wrote' if other_is_write else 'read'} them. "
            "A wait for an event is missing."
        )


def _clock_of(event: Event) -> Clock:
    if event.clock is None:
        raise PagerInternalError(f"{event} was recorded before the checker was switched on")
    return event.clock


def _spans(frames: npt.NDArray[np.int64]) -> str:
    """``3-7, 9 (6 in all)``: at most four runs of neighbours."""
    runs = np.split(frames, np.flatnonzero(np.diff(frames) != 1) + 1)
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:4]]
    return f"{', '.join(texts)}{', ...' if len(runs) > 4 else ''} ({len(frames)} in all)"


class _Frames:
    """Last accesses to the frames of one memory. Epoch 0 is "never"; operations are kept as codes."""

    def __init__(self) -> None:
        self.num_frames = 0
        self._codes: dict[str, int] = {}
        self._writer = np.zeros(0, dtype=np.int32)
        self._write_epoch = np.zeros(0, dtype=np.int64)
        self._write_code = np.zeros(0, dtype=np.int16)
        self._reads: dict[int, tuple[Clock, npt.NDArray[np.int16]]] = {}  # of each actor

    def resize(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._writer = resized(self._writer, num_frames)
        self._write_epoch = resized(self._write_epoch, num_frames)
        self._write_code = resized(self._write_code, num_frames)
        for actor, (epoch, code) in self._reads.items():
            self._reads[actor] = (resized(epoch, num_frames), resized(code, num_frames))

    def find_unordered(
        self, begin: int, end: int, clock: Clock, *, is_write: bool
    ) -> tuple[npt.NDArray[np.int64], int, bool, str] | None:
        """Frames, counted from ``begin``, with an access that ``clock`` does not cover, and what it was."""
        names = list(self._codes)
        bad = np.flatnonzero(self._write_epoch[begin:end] > clock[self._writer[begin:end]])
        if len(bad):
            first = begin + int(bad[0])
            return bad, int(self._writer[first]), True, names[self._write_code[first]]
        if is_write:
            for actor, (epoch, code) in self._reads.items():
                bad = np.flatnonzero(epoch[begin:end] > clock[actor])
                if len(bad):
                    return bad, actor, False, names[code[begin + int(bad[0])]]
        return None

    def note_read(self, begin: int, end: int, actor: int, epoch: int, what: str) -> None:
        if actor not in self._reads:
            none = np.zeros(self.num_frames, dtype=np.int64)
            self._reads[actor] = (none, np.zeros(self.num_frames, dtype=np.int16))
        epochs, codes = self._reads[actor]
        epochs[begin:end] = epoch
        codes[begin:end] = self._code(what)

    def note_write(self, begin: int, end: int, actor: int, epoch: int, what: str) -> None:
        self._writer[begin:end] = actor
        self._write_epoch[begin:end] = epoch
        self._write_code[begin:end] = self._code(what)

    def _code(self, what: str) -> int:
        return self._codes.setdefault(what, len(self._codes))
