"""Exceptions that go off at a chosen place."""

from __future__ import annotations


class Stop(BaseException):
    """Our Ctrl-C, which pytest does not take for its own."""


class Bomb:
    """Raises ``error`` at its ``at``-th call (from 0), once."""

    def __init__(self, at: int, error: type[BaseException] = Stop) -> None:
        self.left = at
        self.error = error
        self.fired = False

    def tick(self) -> None:
        if self.left == 0 and not self.fired:
            self.fired = True
            raise self.error("boom")
        self.left -= 1
