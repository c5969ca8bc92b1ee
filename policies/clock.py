"""CLOCK: a second chance instead of a date (F. J. Corbato's paging experiment in Multics, 1968).

LRU needs an order of all last uses. One bit per key is nearly as good: keys stand in a circle; a use sets the
key's bit; the hand goes round, and where it finds the bit set it clears it and passes on, where it finds it
clear it evicts. A key that is used once per turn of the hand therefore always survives, one that is not used
for a whole turn goes. A new key enters right behind the hand, so it has a full turn before it is looked at.

The circle is kept as a row of numbers: ``_place`` rises from the key just before the hand to the key just
behind it. The hand passing a key is that key moving to the end of the row. So ranking is: keys with a clear
bit in order of place, then, since the hand has by then cleared the others, keys with a set bit in order of
place. Ranking moves nothing; ``record_evict`` replays what the hand must have passed to take those keys.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from pager.policies.protocol import IntArray

_ABSENT = -1


class Clock:
    """First the keys whose bit is clear, then those whose bit is set, each from the hand onwards."""

    name = "clock"

    def __init__(self) -> None:
        self._end = 0  # the next place behind the hand
        self._place: IntArray = np.empty(0, dtype=np.int64)
        self._referenced: npt.NDArray[np.bool_] = np.empty(0, dtype=bool)

    def resize(self, num_keys: int) -> None:
        """Make room for keys up to ``num_keys - 1``; what is known of the others stays."""
        kept = min(num_keys, len(self._place))
        place = np.full(num_keys, _ABSENT, dtype=np.int64)
        referenced = np.zeros(num_keys, dtype=bool)
        place[:kept], referenced[:kept] = self._place[:kept], self._referenced[:kept]
        self._place, self._referenced = place, referenced

    def record_access(self, key: int, position: int) -> None:
        """Set the bit of ``key``; a key that is not in the circle enters it behind the hand."""
        if self._place[key] == _ABSENT:
            self._place[key] = self._end
            self._end += 1
        self._referenced[key] = True

    def record_evict(self, keys: IntArray) -> None:
        """Turn the hand past ``keys``: clear the bits it met, put what it passed behind it, drop ``keys``."""
        keys = np.asarray(keys, dtype=np.int64)
        keys = keys[self._place[keys] != _ABSENT]
        if len(keys) == 0:
            return
        referenced = self._referenced[keys]
        whole_turn = bool(referenced.any())
        # After a whole turn every bit is clear and the hand stops behind the last key that had its bit set.
        stop = int(self._place[keys[referenced]].max() if whole_turn else self._place[keys].max())
        self._place[keys] = _ABSENT
        passed = np.flatnonzero((self._place != _ABSENT) & (self._place < stop))
        self._referenced[slice(None) if whole_turn else passed] = False
        self._referenced[keys] = False
        self._place[passed[np.argsort(self._place[passed])]] = self._end + np.arange(len(passed))
        self._end += len(passed)

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        """``candidates`` in the order in which the hand would take them if nothing were used meanwhile."""
        candidates = np.asarray(candidates, dtype=np.int64)
        return candidates[np.lexsort((candidates, self._place[candidates], self._referenced[candidates]))]

    def victim_queue(self, num_keys: int) -> SecondChance:
        """The same order for a replay that sees every access: see ``protocol.VictimQueue``."""
        return SecondChance(num_keys)


class SecondChance:
    """The order of ``Clock`` kept up to date: the circle itself, cut open at the hand."""

    def __init__(self, num_keys: int) -> None:
        self._circle: deque[int] = deque()
        self._present = [False] * num_keys
        self._referenced = [False] * num_keys

    def use(self, key: int, next_use: int) -> None:
        """``key`` is there and was used; one that is new enters behind the hand."""
        if not self._present[key]:
            self._present[key] = True
            self._circle.append(key)
        self._referenced[key] = True

    def pop(self) -> int:
        """The key to go first, which goes: the hand turns until it meets a clear bit."""
        while True:
            key = self._circle.popleft()
            if not self._referenced[key]:
                self._present[key] = False
                return key
            self._referenced[key] = False
            self._circle.append(key)
