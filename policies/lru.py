"""LRU: evict what was used longest ago.

Where the future is unknown, the past stands in for it: if accesses repeat locally, the time since the last
use estimates the time to the next one, and the farthest next use is likely the oldest last use. Ranking by
last use does not depend on the size of the cache, so a larger cache always holds what a smaller one holds
(inclusion): misses never rise with the budget and one pass over the reuse distances gives the misses at every
budget (Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970).

On a loop that is longer than the cache LRU is the worst choice there is: it evicts each key just before its
turn and misses always. A forward pass followed by the next forward pass is such a loop, which is why this is
here for comparison and for programs whose next step cannot be predicted.

Positions in the cyclic trace start again with every step, so recency is counted by a clock of our own.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from pager.policies.protocol import IntArray


class Lru:
    """Oldest last use first; what was never used goes before everything, by smaller key."""

    name = "lru"

    def __init__(self) -> None:
        self._now = 0
        self._last_use: IntArray = np.empty(0, dtype=np.int64)

    def resize(self, num_keys: int) -> None:
        """Make room for keys up to ``num_keys - 1``; what is known of the others stays."""
        grown = np.zeros(num_keys, dtype=np.int64)
        kept = min(num_keys, len(self._last_use))
        grown[:kept] = self._last_use[:kept]
        self._last_use = grown

    def record_access(self, key: int, position: int) -> None:
        """``key`` is now the most recently used."""
        self._now += 1
        self._last_use[key] = self._now

    def record_evict(self, keys: IntArray) -> None:
        """Recency is a property of the history of uses; leaving the device does not change it."""

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        """``candidates`` by rising time of last use."""
        candidates = np.asarray(candidates, dtype=np.int64)
        return candidates[np.lexsort((candidates, self._last_use[candidates]))]

    def victim_queue(self, num_keys: int) -> OldestFirst:
        """The same order for a replay that sees every access: see ``protocol.VictimQueue``."""
        return OldestFirst()


class OldestFirst:
    """The order of ``Lru`` kept up to date: a list by last use."""

    def __init__(self) -> None:
        self._keys: OrderedDict[int, None] = OrderedDict()

    def use(self, key: int, next_use: int) -> None:
        """``key`` is there and is now the most recently used."""
        self._keys[key] = None
        self._keys.move_to_end(key)

    def pop(self) -> int:
        """The key to go first, which goes."""
        return self._keys.popitem(last=False)[0]
