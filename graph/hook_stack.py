"""Which saved-tensor hooks are in force, also for a torch that cannot say.

Whoever puts hooks of its own over others has to hand on to those what is not its own; else checkpointing would keep
what it means to drop. Newer versions of torch tell (`_top_saved_tensors_default_hooks`). For older ones a stack of each
thread's hooks is kept here, beside torch's own: its two functions, which all of torch's contexts call through their
module, are replaced by ones that do both.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["HookStack", "SavedTensorHooks", "top_hooks"]

SavedTensorHooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]


class HookStack(threading.local):
    """The hooks that were put in force in this thread, since the beginning of ``watch``."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def watch(self, module: Any) -> None:
        """Stand in for the functions of ``module``, torch's ``_C._autograd``."""
        push, pop = module._push_saved_tensors_default_hooks, module._pop_saved_tensors_default_hooks

        # One call into C does both, in either: a signal's handler never comes between torch's stack and this one.
        def push_both(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
            self._hooks.extend(zip((pack,), (unpack,), map(push, (pack,), (unpack,)), strict=True))

        def pop_both() -> None:
            # Nothing is here of what was in force before.
            forget = functools.partial(self._hooks.__delitem__, slice(-1, None))
            deque(map(functools.partial.__call__, (functools.partial(pop), forget)), maxlen=0)

        module._push_saved_tensors_default_hooks = push_both
        module._pop_saved_tensors_default_hooks = pop_both

    def top(self, ignore_is_tracing: bool) -> SavedTensorHooks | None:
        """As torch's own."""
        return self._hooks[-1][:2] if self._hooks else None


def _find_top() -> Callable[[bool], SavedTensorHooks | None]:
    found = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if found is not None:
        own: Callable[[bool], SavedTensorHooks | None] = found
        return own
    stack = HookStack()
    stack.watch(torch._C._autograd)
    return stack.top


top_hooks = _find_top()
"""The hooks (pack, unpack) in force in this thread, None without any."""
