"""Our threads are over before the interpreter is.

At its end Python stops a daemon thread where that next asks for the interpreter's lock. If it comes from torch's C++,
the stack is unwound through that, and the process aborts (exit status 134) although the user's script ended well.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable


def end_at_exit(method: Callable[[], None]) -> None:
    """Call a bound method that ends threads when the interpreter ends, if its object lives then; not in a forked child,
    which has no threads.
    """
    ending = functools.partial(_end, weakref.WeakMethod(method), os.getpid())
    atexit.register(ending)
    owner = method.__self__  # type: ignore[attr-defined]
    weakref.finalize(owner, atexit.unregister, ending).atexit = False


def _end(method: weakref.WeakMethod[Callable[[], None]], process: int) -> None:
    bound = method()
    if bound is not None and os.getpid() == process:
        bound()
