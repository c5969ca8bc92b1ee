"""Belady: evict what is needed latest.

Take any schedule of evictions that is optimal and the first place where it evicts a key that is used sooner
than another resident one. Evicting that other one instead costs nothing until the sooner use, where the
changed schedule hits and the old one missed; afterwards both caches can be made equal with no more misses. So
some optimal schedule always evicts the farthest next use. (L. A. Belady, "A study of replacement algorithms
for a virtual-storage computer", IBM Systems Journal 5(2), 1966; the exchange argument is Mattson et al.,
1970.)

The proof is for keys of one size. For extents of different sizes the optimum is NP-hard; the farthest next
use is still within the choice everybody takes, and the choice of victims drops what it need not have evicted.

A cache normally does not know the future. A training step is a cycle, so the next use is always known:
nothing has to be remembered here, the caller's ``next_use`` is the whole policy.
"""

from __future__ import annotations

import heapq

import numpy as np

from pager.policies.protocol import IntArray


class Belady:
    """Farthest next use first; equal next uses by larger key, so that the order is the same in every run."""

    name = "belady"

    def resize(self, num_keys: int) -> None:
        """Nothing is kept per key."""

    def record_access(self, key: int, position: int) -> None:
        """The past does not matter."""

    def record_evict(self, keys: IntArray) -> None:
        """The past does not matter."""

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        """``candidates`` by falling ``next_use`` (ticks), then by falling key."""
        candidates = np.asarray(candidates, dtype=np.int64)
        return candidates[np.lexsort((-candidates, -np.asarray(next_use, dtype=np.int64)))]

    def victim_queue(self, num_keys: int) -> FarthestFirst:
        """The same order for a replay that sees every access: see ``protocol.VictimQueue``."""
        return FarthestFirst(num_keys)


class FarthestFirst:
    """The order of ``Belady`` kept up to date: a heap by next use.

    An entry of a past use names a next use that has come by now, so it lies below the entries of all that is
    there and never reaches the top before them.
    """

    def __init__(self, num_keys: int) -> None:
        self._num_keys = num_keys
        self._heap: list[int] = []

    def use(self, key: int, next_use: int) -> None:
        """``key`` is there and was used; it is used again at ``next_use``."""
        heapq.heappush(self._heap, -(next_use * self._num_keys + key))

    def pop(self) -> int:
        """The key to go first, which goes."""
        return -heapq.heappop(self._heap) % self._num_keys
