"""Keeping signal handlers out of the places where the runtime's own records change.

The problem. Python runs the handler of a signal between any two instructions of the main thread, also between
two lines that belong together, such as "frames are taken" and "the page table says so". One that raises
(KeyboardInterrupt for Ctrl-C, a SIGALRM timeout, SystemExit for SIGTERM) would leave the first done alone.

The way. Inside ``uninterrupted()`` a noter stands in for every handler written in Python: a signal is only
noted, once however often it comes, as the system keeps a blocked one. When the outermost block is left, the
handlers are put back and those that were noted run, in order. The blocks last microseconds, or one wait for a disk.

Which handlers there are is asked at each outermost block, so none of the user's calls need be replaced, and
``signal.getsignal`` gives the user's own outside of blocks. Signals that are ignored, have the default action
or a handler outside Python raise nothing here and stay as they are; so does ``signal.set_wakeup_fd``, which acts
when a signal arrives. A call that the system restarts after a signal (``signal.siginterrupt``) is one that
fails with EINTR again, as after every ``signal.signal``; Python's own calls try again by themselves.

Why not block signals (``pthread_sigmask``): the system then hands them to another thread, torch's or a
library's, and Python runs the handler in the main thread all the same.

The functions are those of ``_signal``: ``signal``'s own make an enum of every answer, ten times their cost.
A block costs 3.6 us where SIGINT alone has a handler (1.6 us of it for asking), 0.8 us more for each further one,
0.7 us inside another block: ``tests/pager/test_interrupts.py`` run as a script, on a busy core.
"""

from __future__ import annotations

import functools
import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[[int, FrameType | None], Any]

_fast: Any = importlib.import_module("_signal")  # which no type stubs describe
_getsignal, _signal = _fast.getsignal, _fast.signal
_NUMBERS = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class _Uninterrupted:
    """The context; one for the process, since only its main thread runs handlers.

    Any line here may be struck by a handler that still, or again, stands in its place; it may raise, or use a managed
    model and so come here. Hence the user's handlers are kept in ``_handlers``, and a noter that is left behind is no
    loss: at the next signal, or block, it puts the handlers back and passes the signal on.
    """

    def __init__(self) -> None:
        self._depth = 0
        # What getsignal() last said of all numbers, and those among them that are Python functions of the user's.
        self._found: list[Any] = []
        self._active: list[tuple[int, Handler]] = []
        self._handlers: dict[int, Handler] = {}
        self._replaced: list[int] = []
        self._noted: dict[int, tuple[Handler, FrameType | None]] = {}
        self._noter = self._note  # one object, to be recognised

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth == 0:
            try:
                self._replace()
            except BaseException:  # a handler whose turn had not come
                self._leave()
                raise
        self._depth += 1

    def _replace(self) -> None:
        found = [*map(_getsignal, _NUMBERS)]
        if found != self._found:
            self._look_at(found)
        self._replaced.clear()
        while len(self._replaced) < len(self._active):  # again, if a handler came here and put them back
            for number, handler in self._active:
                self._handlers[number] = handler
                self._replaced.append(number)
                _signal(number, self._noter)

    def _look_at(self, found: list[Any]) -> None:
        active = []
        for number, handler in zip(_NUMBERS, found, strict=True):
            if handler is self._noter:  # left behind
                active.append((number, self._handlers[number]))
            elif callable(handler):
                active.append((number, handler))
        self._handlers = dict(active)  # who is no handler any more is not kept alive
        self._active = active
        self._found = found

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.setdefault(number, (self._handlers[number], frame))
        if self._depth == 0:
            self._leave()  # of a block that is being entered or left, or was struck in doing so

    def __exit__(self, *error: object) -> None:
        if self._depth == 0 or threading.get_ident() != threading.main_thread().ident:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self._depth = 0
        finally:
            self._leave()

    def _leave(self) -> None:
        """Put the handlers back and run those that were noted, all of them, also where one raises."""
        try:
            while self._replaced:
                number = self._replaced[-1]
                if _getsignal(number) is self._noter:  # else one was set inside the block
                    _signal(number, self._handlers[number])
                del self._replaced[-1:]
            while self._noted:
                number = next(iter(self._noted))
                handler, frame = self._noted.pop(number)
                handler(number, frame)
        finally:
            if self._replaced or self._noted:
                self._leave()


_context = _Uninterrupted()


def uninterrupted() -> _Uninterrupted:
    """Keep signal handlers out of a ``with`` block; they run, and raise, when the outermost block is left."""
    return _context


def whole(method: Callable[P, R]) -> Callable[P, R]:
    """An interrupt comes before the method or after it, not in it."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterrupted():
            return method(*args, **kwargs)

    return run
