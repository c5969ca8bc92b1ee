"""Threads that take what there is to do from a queue, or, without threads, whoever waits for it.

Without threads (``inline``, for tests: the same order in each run) whoever waits does the work: "late" when there is no
way around it, "early" at once.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from pager.errors import PagerClosed, PagerInternalError
from pager.exiting import end_at_exit
from pager.interrupts import uninterrupted


class Workers(ABC):
    """The base of a queue. ``changed`` guards all that the queue has; whoever changes it says so there."""

    def __init__(self, num_threads: int, inline: str | None) -> None:
        self.changed = threading.Condition()
        # Apart from the queue, so that `abandon` need not keep it alive.
        self.closed = threading.Event()
        self._num_threads = num_threads
        self._inline = inline
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def _pick(self) -> Callable[[], None] | None:
        """The next thing to do (locked), begun; None if there is nothing that can be done now."""

    def _check_open(self) -> None:
        if self.closed.is_set():
            raise PagerClosed("the disk's queue was closed")

    def _start(self) -> None:
        """Have threads, and tell them that there is something to do (locked)."""
        if self._inline is None and not self._threads:
            self._threads = [
                threading.Thread(target=self._loop, name=f"pager-disk-{index}", daemon=True)
                for index in range(self._num_threads)
            ]
            end_at_exit(self.stop)
            for thread in self._threads:
                thread.start()
        self.changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self.changed:
                while (action := self._pick()) is None:
                    if self.closed.is_set():
                        return
                    self.changed.wait()
            action()
            del action

    def advance(self) -> bool:
        """Without threads: do one thing. False if there is nothing, or there are threads."""
        if self._inline is None:
            return False
        with uninterrupted():
            with self.changed:
                action = self._pick()
            if action is not None:
                action()
        return action is not None

    def _run_early(self) -> None:
        while self._inline == "early" and self.advance():
            pass

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            with self.changed:
                if condition():
                    return
                if self.closed.is_set():
                    raise PagerClosed("the disk's queue was closed")
                if self._inline is None:
                    self.changed.wait()
                    continue
            if not self.advance():
                raise PagerInternalError("a request to the disk waits for nothing that will happen")

    def stop(self) -> None:
        """End the threads, once what they are at is done; what waits is dropped. Idempotent."""
        abandon(self.changed, self.closed)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def abandon(changed: threading.Condition, closed: threading.Event) -> None:
    """Have the threads of a queue end by themselves."""
    with changed:
        closed.set()
        changed.notify_all()
