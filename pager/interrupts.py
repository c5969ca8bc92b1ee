"""Keeping Ctrl-C out of the places where the runtime's own records change.

Python raises KeyboardInterrupt between any two instructions of the main thread, also between two lines that
belong together, such as "frames are taken" and "the page table says so". Inside ``uninterrupted()`` an
interrupt is only noted; it is delivered, to the handler that was there, when the outermost such block is
left. The blocks last microseconds, or one wait for a disk.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class _Uninterrupted:
    """The context; one for the process, since only its main thread receives signals."""

    def __init__(self) -> None:
        self._depth = 0
        self._previous: Any = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            previous = signal.getsignal(signal.SIGINT)
            if not callable(previous):
                return  # ignored, or handled outside Python: nothing is raised here
            signal.signal(signal.SIGINT, self._note)
            self._previous = previous
        self._depth += 1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = (number, frame)

    def __exit__(self, *error: object) -> None:
        if self._depth == 0 or threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth:
            return
        previous, self._previous = self._previous, None
        signal.signal(signal.SIGINT, previous)
        noted, self._noted = self._noted, None
        if noted is not None:
            previous(*noted)


_context = _Uninterrupted()


def uninterrupted() -> _Uninterrupted:
    """Keep KeyboardInterrupt out of a ``with`` block; it is raised when the block (the outermost one) is left."""
    return _context
