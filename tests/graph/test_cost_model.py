"""Seconds from ceilings, and bytes that move when a step is carried out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.graph.cost_model import (
    Ceilings,
    estimate_tick_seconds,
    largest_tick_bytes,
    operation_seconds,
    simulate_step,
)
from pager.policies.protocol import EVICTION_POLICY_NAMES, IntArray, make_eviction_policy

LIMITS = Ceilings(flops_per_second=100.0, device_memory_bytes_per_second=10.0)


def test_an_operation_takes_the_slower_of_arithmetic_and_memory() -> None:
    assert operation_seconds([100, 400, 0], [20, 20, 5], LIMITS).tolist() == [2.0, 4.0, 0.5]
    assert operation_seconds(5.0e14, 0).item() == 1.0


def test_ticks_count_pages_and_updates_write_what_they_read() -> None:
    trace = AccessTrace.from_rows(
        [
            AccessRow(0, 0, 0, 2, False, Phase.FORWARD),
            AccessRow(0, 1, 0, 1, True, Phase.GRADIENT),
            AccessRow(1, 0, 0, 2, True, Phase.UPDATE),
            AccessRow(1, 1, 0, 1, False, Phase.UPDATE),
        ]
    )
    assert estimate_tick_seconds(trace, 10, ceilings=LIMITS).tolist() == [3.0, 5.0]
    flops = [1000.0, 0.0]
    assert estimate_tick_seconds(trace, 10, flops_per_tick=flops, ceilings=LIMITS).tolist() == [10.0, 5.0]
    moved = [0.0, 900.0]
    assert estimate_tick_seconds(trace, 10, moved_bytes_per_tick=moved, ceilings=LIMITS).tolist() == [
        3.0,
        90.0,
    ]
    with pytest.raises(ValueError, match=r"flops_per_tick has shape \(1,\) for 2 ticks"):
        estimate_tick_seconds(trace, 10, flops_per_tick=[1.0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_rates_must_be_positive(value: float) -> None:
    with pytest.raises(ValueError, match="disk_read_bytes_per_second"):
        Ceilings(disk_read_bytes_per_second=value)


def make_simulation(**more: Any) -> Any:
    """Keys 0, 1, 2 of 10, 20 and 30 bytes in turn, in 50 bytes, under Belady."""
    arguments: dict[str, Any] = {
        "key": [0, 1, 2],
        "tick": [0, 1, 2],
        "key_bytes": [10, 20, 30],
        "budget_bytes": 50,
        "policy": make_eviction_policy("belady"),
    }
    return simulate_step(**{**arguments, **more})


def test_bytes_in_and_out_of_a_step() -> None:
    # First step: 2 comes and 1, used after 0, goes. Second: 0 hits; 1 comes and 0 goes; 2 hits.
    traffic = make_simulation(write=[True, True, False])
    assert (traffic.hits, traffic.misses, traffic.miss_bytes, traffic.accessed_bytes) == (2, 1, 20, 60)
    assert traffic.page_in_bytes_of_key.tolist() == [0, 20, 0]
    assert traffic.page_out_bytes_of_key.tolist() == [10, 0, 0]
    assert (traffic.page_in_bytes, traffic.page_out_bytes, traffic.peak_resident_bytes) == (20, 10, 50)
    assert traffic.resident_bytes.tolist() == [40, 50, 50]


def test_a_key_is_written_back_once_for_one_write() -> None:
    # 0 and 2 push each other out at every turn; only the first of two visits of 0 writes to it.
    traffic = make_simulation(
        key=[0, 2, 0, 2], tick=[0, 1, 2, 3], write=[True, False, False, False], budget_bytes=30
    )
    assert (traffic.misses, traffic.page_in_bytes) == (4, 80)
    assert traffic.page_out_bytes_of_key.tolist() == [10, 0, 0]


def test_all_fits_nothing_moves() -> None:
    traffic = make_simulation(budget_bytes=60, write=[True] * 3)
    assert (traffic.misses, traffic.page_in_bytes, traffic.page_out_bytes) == (0, 0, 0)
    assert traffic.resident_bytes.tolist() == [60, 60, 60]
    cold = make_simulation(budget_bytes=60, num_warm_up_steps=0)
    assert (cold.misses, cold.page_in_bytes, cold.resident_bytes.tolist()) == (3, 60, [10, 30, 60])


def test_a_gradient_is_born_and_dies_without_a_transfer() -> None:
    traffic = make_simulation(
        key=[0, 1, 1],
        write=[False, True, False],
        born=[False, True, False],
        dies=[False, False, True],
    )
    assert (traffic.page_in_bytes, traffic.page_out_bytes) == (0, 0)
    assert traffic.resident_bytes.tolist() == [10, 30, 30]
    assert (traffic.hits, traffic.misses) == (2, 1)


def test_keys_of_a_tick_are_held_together_and_counted_once() -> None:
    # 0 and 1 are next used together: the tie goes to the larger key, whose second access made it dirty.
    traffic = make_simulation(key=[0, 1, 1, 2], tick=[0, 0, 0, 1], write=[0, 0, 1, 0])
    assert traffic.hits + traffic.misses == 3
    assert traffic.page_out_bytes_of_key.tolist() == [0, 20, 0]
    assert largest_tick_bytes(np.array([0, 1, 0, 2]), np.array([0, 0, 0, 1]), np.array([10, 20, 30])) == 30
    with pytest.raises(ValueError, match="tick 0 needs 1 bytes more than the budget of 29 bytes"):
        make_simulation(key=[0, 1, 0, 2], tick=[0, 0, 0, 1], budget_bytes=29)


def test_an_order_that_leaves_candidates_out_is_noticed() -> None:
    class Stingy:
        name = "stingy"

        def resize(self, num_keys: int) -> None:
            pass

        def record_access(self, key: int, position: int) -> None:
            pass

        def record_evict(self, keys: IntArray) -> None:
            pass

        def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
            return candidates[:0]

    with pytest.raises(ValueError, match=r"'stingy' finds 0 bytes to evict"):
        make_simulation(policy=Stingy())
    with pytest.raises(ValueError, match="ticks must not fall"):
        make_simulation(tick=[1, 0, 2])


class Witness:
    """A policy that checks what it is told against what it was told before."""

    name = "witness"

    def __init__(self) -> None:
        self.held: set[int] = set()

    def resize(self, num_keys: int) -> None:
        self.num_keys = num_keys

    def record_access(self, key: int, position: int) -> None:
        assert 0 <= key < self.num_keys
        self.held.add(key)

    def record_evict(self, keys: IntArray) -> None:
        assert set(keys.tolist()) <= self.held
        self.held -= set(keys.tolist())

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        assert set(candidates.tolist()) <= self.held
        assert np.all(next_use > 0)
        return np.sort(candidates)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1), st.booleans()), min_size=1, max_size=40),
    st.lists(st.integers(1, 9), min_size=7, max_size=7),
    st.integers(0, 30),
)
def test_the_budget_holds_and_only_resident_keys_leave(
    accesses: list[tuple[int, int, bool]], sizes: list[int], spare: int
) -> None:
    keys = [key for key, _, _ in accesses]
    ticks = np.concatenate(([0], np.cumsum([gap for _, gap, _ in accesses])[:-1])).tolist()
    write = [dirty for _, _, dirty in accesses]
    budget = largest_tick_bytes(np.array(keys), np.array(ticks), np.array(sizes)) + spare
    arguments: dict[str, Any] = {
        "key": keys,
        "tick": ticks,
        "key_bytes": sizes,
        "budget_bytes": budget,
        "write": write,
    }
    traffic = simulate_step(policy=Witness(), **arguments)
    assert traffic.peak_resident_bytes <= budget
    assert traffic.resident_bytes.max() == traffic.peak_resident_bytes
    assert traffic.page_in_bytes == traffic.miss_bytes
    for name in EVICTION_POLICY_NAMES:
        named = simulate_step(policy=make_eviction_policy(name), **arguments)
        assert named.hits + named.misses == traffic.hits + traffic.misses
        assert named.peak_resident_bytes <= budget
        never_written = set(keys) - {key for key, dirty in zip(keys, write, strict=True) if dirty}
        assert all(named.page_out_bytes_of_key[key] == 0 for key in never_written)
