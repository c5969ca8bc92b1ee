"""Where segments live: wired by traffic per byte, evenly along the trace; disk for what can wait."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.policies.placement import Home, PlacementError, choose_leaving, choose_returning, place


def make_place(sizes: list[int], **more: object) -> list[int]:
    """``place`` with equal traffic per byte, positions in order and one kind, unless given."""
    arguments: dict = {
        "num_bytes": sizes,
        "traffic_bytes_if_streamed": [4 * size for size in sizes],
        "position": list(range(len(sizes))),
        "kind_rank": [0] * len(sizes),
        "device_capacity": 0,
        "host_capacity": 10**9,
    }
    return place(**{**arguments, **more}).tolist()


def test_what_fits_is_wired_whole() -> None:
    assert make_place([5, 7, 0, 8], device_capacity=20, host_capacity=0) == [Home.DEVICE] * 4


def test_traffic_saved_per_byte_decides_first() -> None:
    homes = make_place([10, 10, 10, 10], traffic_bytes_if_streamed=[10, 40, 20, 40], device_capacity=30)
    assert homes == [Home.HOST, Home.DEVICE, Home.DEVICE, Home.DEVICE]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.25, [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]),
        (0.5, [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]),
        (0.75, [1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]),
    ],
)
def test_ties_are_spread_evenly(share: float, expected: list[int]) -> None:
    homes = make_place([8] * 12, device_capacity=int(8 * 12 * share))
    assert [int(home == Home.DEVICE) for home in homes] == expected


def test_spreading_follows_positions_not_indices() -> None:
    position = [3, 0, 2, 1]
    homes = make_place([8] * 4, position=position, device_capacity=16)
    along = [homes[index] for index in np.argsort(position)]
    assert along == [Home.DEVICE, Home.HOST, Home.DEVICE, Home.HOST]


@settings(max_examples=100, deadline=None)
@given(st.integers(10, 80), st.integers(1, 79))
def test_no_stretch_streams_much_more_than_another(num: int, wired: int) -> None:
    wired = min(wired, num - 1)
    homes = np.array(make_place([4] * num, device_capacity=4 * wired))
    assert np.count_nonzero(homes == Home.DEVICE) == wired
    along = np.cumsum(homes == Home.DEVICE)
    assert np.all(np.abs(along - wired / num * np.arange(1, num + 1)) <= 1.0)


def test_disk_takes_optimizer_pages_first_and_the_last_needed_of_them() -> None:
    homes = make_place(
        [10] * 6,
        kind_rank=[0, 2, 1, 0, 2, 1],
        traffic_bytes_if_streamed=[40, 20, 20, 40, 20, 20],
        host_capacity=40,
        disk_capacity=100,
    )
    assert homes == [Home.HOST, Home.DISK, Home.HOST, Home.HOST, Home.DISK, Home.HOST]
    homes = make_place([10] * 4, kind_rank=[2] * 4, host_capacity=20, disk_capacity=100)
    assert homes == [Home.HOST, Home.HOST, Home.DISK, Home.DISK]
    homes = make_place(
        [10] * 3,
        kind_rank=[2] * 3,
        traffic_bytes_if_streamed=[10, 20, 20],
        host_capacity=20,
        disk_capacity=99,
    )
    assert homes == [Home.DISK, Home.HOST, Home.HOST]
    homes = make_place([10, 10], kind_rank=[0, 2], host_capacity=0, disk_capacity=20)
    assert homes == [Home.DISK, Home.DISK]


def test_missing_bytes_are_named() -> None:
    with pytest.raises(ValueError, match="17 bytes are missing") as caught:
        make_place([20, 20, 20], device_capacity=10, host_capacity=20, disk_capacity=13)
    assert isinstance(caught.value, PlacementError)
    assert caught.value.missing_bytes == 17
    assert pickle.loads(pickle.dumps(caught.value)).missing_bytes == 17


def test_whole_segments_may_not_fit_though_the_sum_does() -> None:
    with pytest.raises(PlacementError, match="not as whole segments") as caught:
        make_place([10, 10, 10], device_capacity=9, host_capacity=11, disk_capacity=15)
    assert caught.value.missing_bytes == 9


def test_bad_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length: 2, 2, 1, 2"):
        make_place([1, 2], position=[0])
    with pytest.raises(ValueError, match="cannot be negative"):
        make_place([1, -2])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5), st.integers(0, 2)), max_size=14),
    st.tuples(st.integers(0, 150), st.integers(0, 150), st.integers(0, 150)),
)
def test_no_tier_is_ever_overfull(
    segments: list[tuple[int, int, int]], capacities: tuple[int, int, int]
) -> None:
    sizes = np.array([size for size, _, _ in segments], dtype=np.int64)
    homes = try_place(segments, capacities)
    if homes is None:
        # Less than the largest segment may be wasted on each of disk and device.
        assert sizes.sum() + 2 * sizes.max() > sum(capacities)
        return
    for tier, capacity in enumerate(capacities):
        assert sizes[homes == tier].sum() <= capacity
    if sizes.sum() <= capacities[0]:
        assert np.all(homes == Home.DEVICE)


def try_place(segments: list[tuple[int, int, int]], capacities: tuple[int, int, int]) -> np.ndarray | None:
    """Homes of (size, traffic per byte, rank), or None if they do not fit."""
    try:
        homes = make_place(
            [size for size, _, _ in segments],
            traffic_bytes_if_streamed=[size * times for size, times, _ in segments],
            kind_rank=[rank for _, _, rank in segments],
            device_capacity=capacities[0],
            host_capacity=capacities[1],
            disk_capacity=capacities[2],
        )
    except PlacementError:
        return None
    return np.array(homes)


# -- another host budget -----------------------------------------------------------------------------------------------

# Two layers: parameter, gradient, state; sizes, where they are used next, and what kind they are.
LAYERS = {
    "num_bytes": [10, 10, 20, 10, 10, 20],
    "traffic_bytes_if_streamed": [40, 20, 40, 40, 20, 40],
    "position": [0, 0, 0, 7, 7, 7],
    "kind_rank": [0, 1, 2, 0, 1, 2],
}


@pytest.mark.parametrize(
    ("excess", "chosen"),
    [
        (0, []),
        (1, [5]),
        (20, [5]),
        (21, [5, 2]),
        (41, [5, 2, 4]),
        (61, [5, 2, 4, 1, 3]),
        (80, [5, 2, 4, 1, 3, 0]),
    ],
)
def test_states_leave_first_and_parameters_last_the_farthest_next_use_first(
    excess: int, chosen: list[int]
) -> None:
    found = choose_leaving(**LAYERS, excess_bytes=excess, disk_capacity=1000)
    assert found.tolist() == chosen


def test_what_the_disk_has_no_room_for_stays_and_the_next_goes() -> None:
    assert choose_leaving(**LAYERS, excess_bytes=30, disk_capacity=35).tolist() == [5, 4]
    with pytest.raises(PlacementError, match="10 bytes stay too many") as caught:
        choose_leaving(**LAYERS, excess_bytes=40, disk_capacity=35)
    assert caught.value.missing_bytes == 10
    with pytest.raises(PlacementError) as caught:
        choose_leaving(**LAYERS, excess_bytes=100, disk_capacity=1000)
    assert caught.value.missing_bytes == 20
    nothing: dict[str, list[int]] = {name: [] for name in LAYERS}
    with pytest.raises(PlacementError, match="5 bytes stay too many"):
        choose_leaving(**nothing, excess_bytes=5, disk_capacity=1000)
    assert choose_leaving(**nothing, excess_bytes=-5, disk_capacity=0).tolist() == []


@pytest.mark.parametrize(
    ("room", "at_most", "chosen"),
    [
        (1000, 1000, [0, 3, 1, 4, 2, 5]),
        (25, 1000, [0, 3]),
        (1000, 25, [0, 3]),
        (1000, 1, [0]),
        (9, 1000, []),
        (0, 1000, []),
        (45, 1000, [0, 3, 1, 4]),
    ],
)
def test_what_left_last_comes_back_first(room: int, at_most: int, chosen: list[int]) -> None:
    found = choose_returning(**LAYERS, host_capacity=room, at_most_bytes=at_most)
    assert found.tolist() == chosen


def test_one_that_is_larger_than_the_quota_comes_alone() -> None:
    states = {name: [values[2], values[0]] for name, values in LAYERS.items()}
    assert choose_returning(**states, host_capacity=100, at_most_bytes=5).tolist() == [1]
    large = {name: [values[2]] for name, values in LAYERS.items()}
    assert choose_returning(**large, host_capacity=100, at_most_bytes=5).tolist() == [0]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        choose_leaving(**{**LAYERS, "position": [1]}, excess_bytes=1, disk_capacity=1)
