"""What an eviction policy is: the one small interface, and how a policy is found by name.

A policy decides, it does not act. It sees integers and arrays, so it cannot block, cannot see a tensor and
cannot fail half way; the runtime, the planner's simulation and a notebook use the same object. Keys are small
dense integers (segments in the runtime, runs of pages in the planner's simulation); a policy owns whatever it
keeps about them.

The split between an order and a choice is deliberate. ``eviction_order`` only *ranks*, and changes nothing:
reclaim may drop candidates that got pinned meanwhile, or ask again. What really left is told afterwards by
``record_evict``. ``choose_victims`` cuts the ranking where enough bytes are found, all or nothing, so that a
half-done eviction does not exist.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

EVICTION_POLICY_NAMES = ("belady", "clock", "lru")

_METHODS = ("resize", "record_access", "record_evict", "eviction_order")


@runtime_checkable
class EvictionPolicy(Protocol):
    """Ranks what is resident by who should leave first.

    Called by one thread at a time. A caller that pages in ahead of the use either keeps what has not been
    used yet out of the candidates or calls ``record_access`` at the page in: a policy that looks at the past
    only would otherwise throw out first what was just brought in.
    """

    name: str

    def resize(self, num_keys: int) -> None:
        """Keys are ``0 .. num_keys-1`` from now on. Called before the first access; may grow later."""

    def record_access(self, key: int, position: int) -> None:
        """``key`` was used (a hit, or the use after a page in) at ``position`` of the cyclic trace."""

    def record_evict(self, keys: IntArray) -> None:
        """``keys`` have left the device."""

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        """A permutation of ``candidates`` (int64 keys), first to go first. Changes no state.

        ``next_use[i]``: ticks (int64) until ``candidates[i]`` is used again.
        """


class VictimQueue(Protocol):
    """A ranking of what is resident that is kept up to date from use to use, instead of made anew for each miss.

    A policy may offer one by a method ``victim_queue(num_keys)``, which gives a new, empty queue; a replay of a step
    at many sizes then takes time O(n log n) each. It must take the keys in just the order in which the policy's
    ``eviction_order`` would rank them. A subclass that changes the ranking and not the queue is asked for its ranking.
    """

    def use(self, key: int, next_use: int) -> None:
        """``key`` is resident (new or not) and was used; ``next_use``: the absolute position of its next use."""

    def pop(self) -> int:
        """The resident key to go first; it has left with this."""


def make_eviction_policy(spec: str | EvictionPolicy) -> EvictionPolicy:
    """The policy named ``"belady"``, ``"lru"`` or ``"clock"``, new; or ``spec`` itself where it is a policy.

    Raises ValueError for an unknown name (it lists the known ones), TypeError for an object that lacks a
    method of ``EvictionPolicy`` (it lists the missing ones).
    """
    if isinstance(spec, str):
        from pager.policies import belady, clock, lru

        known: dict[str, Any] = {"belady": belady.Belady, "clock": clock.Clock, "lru": lru.Lru}
        if spec.lower() not in known:
            names = ", ".join(repr(name) for name in EVICTION_POLICY_NAMES)
            raise ValueError(f"unknown eviction policy {spec!r}; known are {names}, or pass a policy object")
        policy: EvictionPolicy = known[spec.lower()]()
        return policy
    if isinstance(spec, type):
        raise TypeError(
            f"eviction policy is the class {spec.__name__}; pass an object of it: {spec.__name__}()"
        )
    missing = [name for name in _METHODS if not callable(getattr(spec, name, None))]
    if not isinstance(getattr(spec, "name", None), str):
        missing.insert(0, "name")
    if missing:
        raise TypeError(
            f"eviction policy {spec!r} lacks {', '.join(missing)}; see pager.policies.protocol.EvictionPolicy"
        )
    return spec


def choose_victims(order: IntArray, sizes: IntArray, need: int) -> IntArray | None:
    """The keys to evict so that at least ``need`` bytes come free: enough, or nothing.

    ``order``: keys, first to go first; ``sizes``: int64 bytes of each, aligned with ``order``. Takes the
    shortest prefix that suffices, then spares, from its end, every key that the others make unnecessary (one
    large last victim often does), so no victim can be left out. Returns an empty array if ``need <= 0`` and
    None if all candidates together are too small. Raises ValueError if the two arrays differ in length.
    """
    if len(order) != len(sizes):
        raise ValueError(f"order has {len(order)} keys but sizes has {len(sizes)} entries")
    if need <= 0:
        return np.empty(0, dtype=np.int64)
    freed = np.cumsum(sizes)
    if len(order) == 0 or freed[-1] < need:
        return None
    num_victims = int(np.searchsorted(freed, need)) + 1
    surplus = int(freed[num_victims - 1]) - need
    taken = np.ones(num_victims, dtype=bool)
    for index in range(num_victims - 2, -1, -1):
        size = int(sizes[index])
        if size <= surplus:
            taken[index] = False
            surplus -= size
    return np.asarray(order[:num_victims], dtype=np.int64)[taken]
