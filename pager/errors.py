"""The errors pager raises.

::

    PagerError
    |-- ConfigError           a knob or a model that cannot work        (also ValueError)
    |-- BudgetError           a budget that cannot hold what is asked   (also torch.OutOfMemoryError)
    |-- TierError             a tier did not do what was asked
    |   |-- TierFull          no frame left
    |   |-- TierIOError       the operating system refused; keeps errno (also OSError)
    |   |   `-- DiskFull      it has no room left (also TierFull)
    |   `-- CorruptPage       bytes read are not the bytes written
    |-- PagerClosed           the handle was used after ``close()``
    |-- TornStateError        an update was given up half way; load a state dict
    `-- PagerInternalError    a bug of ours
        `-- RaceError         two accesses to a frame that nothing orders

Users' mistakes are ``ValueError`` or ``TypeError`` (``ConfigError`` is one). A message names the module or
tensor, the tier, the numbers with their units, the limit and the way out.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptPage",
    "DiskFull",
    "PagerClosed",
    "PagerError",
    "PagerInternalError",
    "RaceError",
    "TierError",
    "TierFull",
    "TierIOError",
    "TornStateError",
]


class PagerError(Exception):
    """Base of every error that is pager's own."""


class ConfigError(PagerError, ValueError):
    """A knob, a model or an optimizer that pager cannot work with; the message says what to change."""


class TierError(PagerError):
    """A tier could not do what was asked of it."""


class TierFull(TierError):
    """A tier has no room for the pages it was asked to take."""


class TierIOError(TierError, OSError):
    """An input or output operation failed. ``errno`` and ``filename`` are kept."""


class DiskFull(TierFull, TierIOError):
    """The disk, or this user's quota of it, is full. ``errno`` and ``filename`` are kept."""


class CorruptPage(TierError):
    """The bytes read from a tier are not the bytes written to it."""


class PagerClosed(PagerError):
    """The handle was used after ``close()``."""


class TornStateError(PagerError):
    """Some parameters are a step ahead of others, since the optimizer's class raised twice in the middle of a step.

    Raised by ``step()`` until a state dict is loaded; reading, saving and closing work.
    """


class PagerInternalError(PagerError):
    """A bug in pager. Please report it with the message."""


class RaceError(PagerInternalError):
    """Two accesses to one frame of which at least one writes, and no stream or event orders them."""


if TYPE_CHECKING:
    from torch import OutOfMemoryError

    class BudgetError(PagerError, OutOfMemoryError):
        """A budget in bytes that cannot hold what is asked of it; names the bytes, the limit, the remedy."""

else:

    def __getattr__(name: str) -> type:
        # BudgetError derives from torch's error; importing torch only when it is asked for keeps this leaf
        # light.
        if name != "BudgetError":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torch import OutOfMemoryError

        doc = (
            "A budget in bytes that cannot hold what is asked of it; names the bytes, the limit, the remedy."
        )
        namespace = {"__doc__": doc, "__module__": __name__}
        error = builtins.type("BudgetError", (PagerError, OutOfMemoryError), namespace)
        globals()["BudgetError"] = error
        return error
