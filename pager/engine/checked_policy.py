"""An eviction policy of the user's, kept from harming the engine.

It is asked in the middle of the engine's work, by the thread that trains and by pagerd. So its answer is compared
with the question, and what it raises comes out under its name. Where it is only told something, the engine is half way
through a change: an error there is kept, and raised at the next use of a page. It is gone with the policy, once
another one is set.
"""

from __future__ import annotations

import numpy as np

from pager.errors import ConfigError
from pager.policies.protocol import EvictionPolicy, IntArray

# Keys that a message names before it only counts.
_NAMED = 4


class CheckedPolicy:
    """``policy``, of which every error is a ConfigError that names it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.name = policy.name
        self.failure: ConfigError | None = None
        self.has_failed = False

    def resize(self, num_keys: int) -> None:
        """As the policy's; what that raises is kept."""
        try:
            self.policy.resize(num_keys)
        except Exception as error:
            self._keep("resize", error)

    def record_access(self, key: int, position: int) -> None:
        """As the policy's; what that raises is kept."""
        try:
            self.policy.record_access(key, position)
        except Exception as error:
            self._keep("record_access", error)

    def record_evict(self, keys: IntArray) -> None:
        """As the policy's; what that raises is kept."""
        try:
            self.policy.record_evict(keys)
        except Exception as error:
            self._keep("record_evict", error)

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        """As the policy's. Raises ConfigError for what it raised, here or before, and for a wrong answer."""
        self.raise_failure()
        try:
            answer = self.policy.eviction_order(candidates.copy(), next_use.copy())
        except Exception as error:
            raise self._failed("eviction_order", error) from error
        return self._checked(answer, candidates)

    def raise_failure(self) -> None:
        """Raise, once, what was kept."""
        if self.failure is not None:
            error, self.failure = self.failure, None
            try:
                raise error
            finally:
                del error  # it and its traceback would keep each other alive

    def _keep(self, method: str, error: Exception) -> None:
        failure = self._failed(method, error)
        failure.__cause__ = error
        self.failure = self.failure or failure

    def _failed(self, method: str, error: Exception) -> ConfigError:
        return self._complaint(f"raised {type(error).__name__} in {method}(): {error}")

    def _complaint(self, what: str) -> ConfigError:
        self.has_failed = True
        return ConfigError(f"eviction policy {self.name!r} {what}. {_WAY_OUT}")

    def _checked(self, answer: object, candidates: IntArray) -> IntArray:
        try:
            order = np.asarray(answer)
            whole = order.ndim == 1 and (order.size == 0 or np.issubdtype(order.dtype, np.integer))
        except Exception:  # a ragged list, an object that makes no array
            whole = False
        if not whole:
            raise self._complaint(
                f"answered eviction_order() with {repr(answer)[:80]}; expected the candidates' keys (int64), in one row"
            )
        keys, counts = np.unique(order, return_counts=True)
        wrong = [
            f"{what} {_named(which)}"
            for what, which in (
                ("repeats", keys[counts > 1]),
                ("adds, unasked,", np.setdiff1d(keys, candidates)),
                ("leaves out", np.setdiff1d(candidates, keys)),
            )
            if len(which)
        ]
        if wrong:
            raise self._complaint(
                f"answered eviction_order() with no permutation of its {len(candidates)} candidates: it "
                + ", ".join(wrong)
            )
        return order.astype(np.int64, copy=False)


_WAY_OUT = 'Correct it, or set another one at once: model.pager.set(eviction="lru")'


def _named(keys: IntArray) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"key{'s' * (len(keys) > 1)} {', '.join(map(str, keys[:_NAMED].tolist()))}{more}"
