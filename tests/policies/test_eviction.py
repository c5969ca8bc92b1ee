"""Eviction policies against brute force: golden misses, optimality, inclusion, purity, choice of victims."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph.cost_model import simulate_step
from pager.policies.belady import Belady
from pager.policies.clock import Clock
from pager.policies.lru import Lru
from pager.policies.protocol import (
    EVICTION_POLICY_NAMES,
    EvictionPolicy,
    IntArray,
    choose_victims,
    make_eviction_policy,
)

NUM_KEYS = 64
BUDGETS = (4, 8, 12, 16, 24, 32, 48, 60)

# Misses in the second of two steps of golden_trace(), one column per budget.
GOLDEN = {
    "belady": (946, 786, 675, 579, 436, 315, 128, 32),
    "lru": (1102, 1009, 911, 823, 651, 469, 182, 34),
    "clock": (1103, 1013, 915, 830, 650, 483, 238, 131),
}


def golden_trace() -> list[int]:
    """1200 accesses to 64 keys: runs up and down the keys, as a step makes them, and a skewed random part."""
    state = 12345
    keys: list[int] = []
    for _ in range(4):
        keys += [*range(NUM_KEYS), *reversed(range(NUM_KEYS))]
        for _ in range(172):
            state = (1103515245 * state + 12345) % 2**31
            keys.append((state >> 16) % (1 + (state >> 8) % NUM_KEYS))
    return keys


def oracle_misses(name: str, keys: list[int], budget: int, steps: int = 2) -> int:
    """Misses in the last of ``steps`` steps, by the textbook: lists, scans, no numpy."""
    run = {"belady": oracle_belady, "lru": oracle_lru, "clock": oracle_clock}[name]
    missed = run(keys * steps, budget, len(keys))
    return sum(missed[len(keys) * (steps - 1) :])


def oracle_belady(keys: list[int], budget: int, period: int) -> list[bool]:
    """Scan ahead from every miss for the key used latest. The sequence goes on periodically."""
    held: list[int] = []
    missed = []
    for now, key in enumerate(keys):
        missed.append(key not in held)
        if key in held:
            continue
        if len(held) == budget:
            future: dict[int, int] = {}
            for ahead in range(now + 1, now + period + 1):
                future.setdefault(keys[ahead % period], ahead)
            held.remove(max(held, key=lambda resident: (future[resident], resident)))
        held.append(key)
    return missed


def oracle_lru(keys: list[int], budget: int, period: int) -> list[bool]:
    """A list in order of use."""
    held: list[int] = []
    missed = []
    for key in keys:
        missed.append(key not in held)
        if key in held:
            held.remove(key)
        elif len(held) == budget:
            held.pop(0)
        held.append(key)
    return missed


def oracle_clock(keys: list[int], budget: int, period: int) -> list[bool]:
    """Slots in a circle with a bit each, and a hand that really turns."""
    slots: list[int] = []
    bits: list[bool] = []
    hand = 0
    missed = []
    for key in keys:
        missed.append(key not in slots)
        if key in slots:
            bits[slots.index(key)] = True
        elif len(slots) < budget:
            slots.append(key)
            bits.append(True)
        else:
            while bits[hand]:
                bits[hand] = False
                hand = (hand + 1) % budget
            slots[hand], bits[hand] = key, True
            hand = (hand + 1) % budget
    return missed


def run_misses(policy: EvictionPolicy, keys: list[int], budget: int, warm_up: int = 1) -> int:
    """Misses of ``policy`` with unit sizes and one access per tick."""
    traffic = simulate_step(
        key=keys,
        tick=np.arange(len(keys)),
        key_bytes=np.ones(max(keys) + 1, dtype=np.int64),
        budget_bytes=budget,
        policy=policy,
        num_warm_up_steps=warm_up,
    )
    return traffic.misses


class Random:
    """A custom policy: any order at all."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def resize(self, num_keys: int) -> None:
        pass

    def record_access(self, key: int, position: int) -> None:
        pass

    def record_evict(self, keys: IntArray) -> None:
        pass

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        return self.generator.permutation(candidates)


class MostRecent(Lru):
    """A custom policy: the best one on a loop, without knowing the future."""

    name = "mru"

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        return super().eviction_order(candidates, next_use)[::-1]


@pytest.mark.parametrize("name", EVICTION_POLICY_NAMES)
def test_golden_misses(name: str) -> None:
    keys = golden_trace()
    expected = tuple(oracle_misses(name, keys, budget) for budget in BUDGETS)
    assert expected == GOLDEN[name]
    assert tuple(run_misses(make_eviction_policy(name), keys, budget) for budget in BUDGETS) == GOLDEN[name]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 3))
def test_policies_equal_brute_force_on_any_trace(keys: list[int], budget: int, steps: int) -> None:
    for name in EVICTION_POLICY_NAMES:
        expected = oracle_misses(name, keys, budget, steps)
        assert run_misses(make_eviction_policy(name), keys, budget, steps - 1) == expected, name


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 5))
def test_belady_misses_least(keys: list[int], budget: int, seed: int) -> None:
    best = run_misses(Belady(), keys, budget, warm_up=0)
    others: list[Any] = [Lru(), Clock(), MostRecent(), Random(seed)]
    for policy in others:
        assert best <= run_misses(policy, keys, budget, warm_up=0), policy.name


def held_after_each(policy: EvictionPolicy, keys: list[int], budget: int) -> list[set[int]]:
    """What is resident after each access, driving the policy by hand as the runtime does."""
    policy.resize(max(keys) + 1)
    held: set[int] = set()
    history = []
    for position, key in enumerate(keys):
        if key not in held and len(held) == budget:
            candidates = np.array(sorted(held), dtype=np.int64)
            order = policy.eviction_order(candidates, np.ones(len(candidates), dtype=np.int64))
            victims = choose_victims(order, np.ones(len(order), dtype=np.int64), 1)
            assert victims is not None
            assert len(victims) == 1
            policy.record_evict(victims)
            held -= set(victims.tolist())
        held.add(key)
        policy.record_access(key, position)
        history.append(set(held))
    return history


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 8))
def test_lru_inclusion(keys: list[int], budget: int) -> None:
    small, large = held_after_each(Lru(), keys, budget), held_after_each(Lru(), keys, budget + 1)
    assert all(less <= more for less, more in zip(small, large, strict=True))


def test_belady_orders_by_next_use_and_ties_by_larger_key() -> None:
    order = Belady().eviction_order(np.array([3, 1, 7, 5]), np.array([10, 40, 10, 2]))
    assert order.tolist() == [1, 7, 3, 5]


def test_lru_order_counts_its_own_time() -> None:
    policy = Lru()
    policy.resize(4)
    for key, position in ((2, 90), (0, 91), (1, 0), (2, 1)):  # positions start again with the next step
        policy.record_access(key, position)
    assert policy.eviction_order(np.arange(4), np.ones(4, dtype=np.int64)).tolist() == [3, 0, 1, 2]


def test_clock_gives_a_second_chance() -> None:
    policy = Clock()
    policy.resize(4)
    for key in (0, 1, 2, 3):
        policy.record_access(key, key)
    policy.record_evict(np.array([0]))  # a whole turn: all bits are clear, the hand stands at 1
    policy.record_access(1, 4)
    assert policy.eviction_order(np.array([1, 2, 3]), np.ones(3, dtype=np.int64)).tolist() == [2, 3, 1]


def test_clock_takes_many_victims_at_once_as_one_by_one() -> None:
    def filled() -> Clock:
        policy = Clock()
        policy.resize(8)
        for key in range(8):
            policy.record_access(key, key)
        policy.record_evict(np.array([0]))
        for key in (1, 4, 6):
            policy.record_access(key, key)
        return policy

    together, single = filled(), filled()
    candidates = np.arange(1, 8)
    order = together.eviction_order(candidates, candidates)
    assert order.tolist() == [2, 3, 5, 7, 1, 4, 6]
    together.record_evict(order[:3])
    for key in order[:3]:
        single.record_evict(np.array([key]))
    left = np.array([1, 4, 6, 7])
    assert together.eviction_order(left, left).tolist() == single.eviction_order(left, left).tolist()
    assert together.eviction_order(left, left).tolist() == [7, 1, 4, 6]


@pytest.mark.parametrize("name", EVICTION_POLICY_NAMES)
def test_ranking_changes_nothing(name: str) -> None:
    policy = make_eviction_policy(name)
    policy.resize(6)
    for position, key in enumerate((0, 3, 1, 3, 5)):
        policy.record_access(key, position)
    before = pickle.dumps(policy)
    candidates, next_use = np.array([5, 0, 3, 1]), np.array([4, 9, 4, 1])
    first = policy.eviction_order(candidates, next_use)
    assert pickle.dumps(policy) == before
    assert first.tolist() == policy.eviction_order(candidates, next_use).tolist()
    assert sorted(first.tolist()) == [0, 1, 3, 5]
    assert candidates.tolist() == [5, 0, 3, 1]


@pytest.mark.parametrize("name", EVICTION_POLICY_NAMES)
def test_growing_keeps_what_is_known(name: str) -> None:
    small, large = make_eviction_policy(name), make_eviction_policy(name)
    small.resize(4)
    large.resize(9)
    for policy in (small, large):
        for position, key in enumerate((2, 0, 3, 1, 2)):
            policy.record_access(key, position)
    small.resize(9)
    small.record_access(8, 5)
    large.record_access(8, 5)
    keys = np.array([0, 1, 2, 3, 8])
    assert small.eviction_order(keys, keys).tolist() == large.eviction_order(keys, keys).tolist()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-3, 150))
def test_victims_are_enough_or_nothing(sizes: list[int], need: int) -> None:
    order = np.arange(100, 100 + len(sizes))[::-1].copy()
    victims = choose_victims(order, np.array(sizes, dtype=np.int64), need)
    if need > sum(sizes):
        assert victims is None
        return
    assert victims is not None
    size_of = dict(zip(order.tolist(), sizes, strict=True))
    chosen = victims.tolist()
    freed = sum(size_of[key] for key in chosen)
    assert len(set(chosen)) == len(chosen)
    assert chosen == [key for key in order.tolist() if key in chosen]
    assert freed >= need
    assert all(freed - size_of[key] < need for key in chosen)
    # No candidate is taken from beyond the shortest prefix that suffices.
    before_last = order.tolist().index(chosen[-1]) if chosen else 0
    assert not chosen or sum(sizes[:before_last]) < need


def test_victims_spare_what_one_large_victim_makes_unnecessary() -> None:
    victims = choose_victims(np.array([4, 2, 9]), np.array([3, 5, 100]), 104)
    assert victims is not None
    assert victims.tolist() == [2, 9]


def test_victims_need_sizes_for_all() -> None:
    with pytest.raises(ValueError, match="order has 2 keys but sizes has 1"):
        choose_victims(np.array([1, 2]), np.array([3]), 1)


def test_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'lfu'.*'belady', 'clock', 'lru'"):
        make_eviction_policy("lfu")


def test_custom_policy_object_is_accepted() -> None:
    policy = MostRecent()
    assert make_eviction_policy(policy) is policy
    loop = list(range(10))
    assert run_misses(copy.deepcopy(policy), loop, 5) < run_misses(Lru(), loop, 5) == 10


def test_policy_without_its_methods_is_refused() -> None:
    class Half:
        def resize(self, num_keys: int) -> None:
            pass

    with pytest.raises(TypeError, match="lacks name, record_access, record_evict, eviction_order"):
        make_eviction_policy(Half())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass an object of it: Lru\(\)"):
        make_eviction_policy(Lru)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EVICTION_POLICY_NAMES)
def test_named_policies_follow_the_protocol(name: str) -> None:
    policy = make_eviction_policy(name.upper())
    assert isinstance(policy, EvictionPolicy)
    assert policy.name == name
