"""A model of which some parameters are a step ahead of the others.

That happens in two ways. A backward that updates parameters as it goes (``update_at="backward"``) ends in an exception.
Or a user's optimizer class raises in the middle of a step, and again when the rest of the
step is tried once more. What is committed stays, the rest is given up. The values can be read and saved; training on
from them is refused until values are loaded.
"""

from __future__ import annotations

import logging

from pager.errors import TornStateError

logger = logging.getLogger("pager.optim")


class Torn:
    """Whether one managed model is torn, and what tore it."""

    def __init__(self) -> None:
        # Text, not the exception: its traceback would keep the tensors of a step alive.
        self._what = ""
        self.num_loads = 0

    def __bool__(self) -> bool:
        return bool(self._what)

    def mark(self, what: str) -> None:
        """From now on :meth:`check` raises, telling ``what`` happened."""
        self._what = self._what or what

    def gave_up(self, cls: type, error: Exception, *, half_done: bool) -> None:
        """A step of an optimizer of ``cls`` was given up."""
        what = f"{cls.__name__}.step() was given up after {type(error).__name__}: {error}."
        logger.warning("%s %s", what, "It was half done." if half_done else "Nothing was done yet.")
        if half_done:
            self.mark(what)

    def clear(self) -> None:
        """Values were loaded."""
        self._what = ""
        self.num_loads += 1

    def check(self) -> None:
        """Raise TornStateError if the model is torn."""
        if self._what:
            raise TornStateError(
                f"{self} They can be read, saved and closed; to train on, load a state dict into the model or the "
                "optimizer (load_state_dict)."
            )

    def __str__(self) -> str:
        """What tore the model and what that means; empty if nothing did."""
        means = (
            "Some parameters have taken that step and others have not, one perhaps in a part of its elements."
        )
        return f"{self._what} {means}" if self._what else ""
