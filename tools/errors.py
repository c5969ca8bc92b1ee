"""What a command says when it cannot go on: one line and an exit code, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["CommandFailed", "InputError", "closest"]


class InputError(ValueError):
    """What the user gave cannot be used; exit code 2. The message says what was given and what would do."""


class CommandFailed(RuntimeError):
    """The command ran and did not reach its end, or the answer is no; exit code 1."""


def closest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'small'?"``, or the known names where none is near, to end an error message with."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; known are {', '.join(names)}"
