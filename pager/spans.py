"""What the runtime is at, as named ranges for ``torch.profiler``: ``pager::fault``, ``pager::update`` and the like.

A range costs microseconds whether anybody looks or not; to ask whether somebody does costs a tenth of one.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range ``pager::<name>`` around what stands in it, while a profiler runs in this thread."""
    # Private; `torch.autograd.profiler` asks the same.
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"pager::{name}")
