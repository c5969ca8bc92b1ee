"""pager: train PyTorch models that are larger than GPU memory, bit for bit.

GPU memory is a cache over host memory and disk; pages move by their next use, which a training step
gives away in advance. One call makes a model paged::

    model = pager.manage(model, device_budget="12GiB")

Importing this package is cheap: each name is looked up in its module on first use (PEP 562), so that
``import pager.policies.lru`` needs numpy only.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pager.api import Handle, manage
    from pager.config import Config
    from pager.errors import BudgetError, ConfigError, PagerClosed, PagerError
    from pager.graph.plan import Plan
    from pager.statistics import Statistics
    from pager.units import parse_size

__version__ = "0.1.0"

# Without a handler of the application's, Python would print our warnings itself.
logging.getLogger("pager").addHandler(logging.NullHandler())

__all__ = [
    "manage",
    "Handle",
    "Config",
    "Plan",
    "Statistics",
    "parse_size",
    "PagerError",
    "ConfigError",
    "BudgetError",
    "PagerClosed",
    "__version__",
]

_MODULE_OF = {
    "manage": "pager.api",
    "Handle": "pager.api",
    "Config": "pager.config",
    "Plan": "pager.graph.plan",
    "Statistics": "pager.statistics",
    "parse_size": "pager.units",
    "PagerError": "pager.errors",
    "ConfigError": "pager.errors",
    "BudgetError": "pager.errors",
    "PagerClosed": "pager.errors",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
