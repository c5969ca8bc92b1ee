"""What stays: error diffusion, Belady, and how an arena is shared out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pager.policies.staying import (
    belady,
    is_worth_lending,
    lent_gradient_bytes,
    room_for_gradients,
    room_for_staying,
    share_arena,
    share_wired,
    spread,
    usually_wired_bytes,
    wired_bytes,
)

SIZES = st.lists(st.integers(0, 50), max_size=30)


def taken(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(mask).tolist()


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, []),
        (10, [4]),  # one stands in the middle
        (20, [2, 7]),
        (50, [0, 2, 4, 6, 8]),
        (99, list(range(9))),
        (100, list(range(10))),
    ],
)
def test_equal_tensors_are_spread_evenly(room: int, expected: list[int]) -> None:
    assert taken(spread([10] * 10, room)) == expected


def test_every_stretch_streams_the_same_share() -> None:
    sizes = np.random.default_rng(0).integers(1, 20, 400)
    mask = spread(sizes, int(sizes.sum()) * 0.3)
    ahead = np.cumsum(np.where(mask, sizes, 0)) - 0.3 * np.cumsum(sizes)
    assert np.abs(ahead).max() <= 20


def test_belady_streams_what_is_needed_farthest() -> None:
    assert taken(belady([10] * 5, [4, 0, 3, 1, 2], 30)) == [1, 3, 4]
    # What does not fit is passed over; a smaller one farther on is taken.
    assert taken(belady([10, 50, 10], [0, 1, 2], 25)) == [0, 2]
    assert taken(belady([10] * 3, [7, 7, 7], 20)) == [0, 1]


def test_belady_needs_a_use_of_each() -> None:
    with pytest.raises(ValueError, match="2 entries and next_use 1"):
        belady([1, 2], [1], 3)


@given(sizes=SIZES, room=st.integers(-5, 600))
def test_neither_takes_more_than_the_room_or_leaves_what_would_fit(sizes: list[int], room: int) -> None:
    for mask in (spread(sizes, room), belady(sizes, range(len(sizes)), room)):
        used = int(np.array(sizes, np.int64)[mask].sum())
        assert used <= max(room, 0)
        assert all(size > room - used for size in np.array(sizes, np.int64)[~mask])


@pytest.mark.parametrize(
    ("arena", "least", "activations", "slots"),
    [
        (10 * 2**30, 2**20, 0, (4, 256 * 2**20)),  # a sixth is capped at 1 GiB
        (3 * 2**30, 2**20, 0, (4, 128 * 2**20)),
        (100 * 2**20, 8 * 2**20, 0, (2, 8 * 2**20)),  # no slot smaller than a unit
        (100 * 2**20, 17 * 2**20, 0, (0, 0)),
        (10 * 2**30, 0, 0, (0, 0)),
        (10 * 2**30, 2**20, 8 * 2**30, (5, 384 * 2**20)),  # a quarter of the activations, up to 2 GiB
        (3 * 2**30, 2**20, 8 * 2**30, (4, 256 * 2**20)),  # and a third of the arena
        (10 * 2**30, 2**20, 2**30, (4, 256 * 2**20)),  # but no fewer than without
    ],
)
def test_slots_are_a_part_of_the_arena(
    arena: int, least: int, activations: int, slots: tuple[int, int]
) -> None:
    found = share_arena(arena, 2**17, least_slot_bytes=least, in_backward=True, activation_bytes=activations)
    assert found == slots


@pytest.mark.parametrize("activations", [0, 8 * 2**30])
def test_in_the_forward_slots_are_more_and_smaller_whatever_activations_take(activations: int) -> None:
    mib = 2**20
    for arena, slots in ((10 * 2**30, (5, 204.75 * mib)), (3 * 2**30, (5, 102.375 * mib))):
        assert share_arena(arena, 2**17, least_slot_bytes=mib, activation_bytes=activations) == slots
    assert share_arena(100 * mib, 2**17, least_slot_bytes=8 * mib) == (2, 8 * mib)


@pytest.mark.parametrize(
    ("wired", "least", "slots"),
    [
        (0, 2**20, (4, 256 * 2**20)),
        (2**31, 2**20, (4, 2**20 * 1024 // 3 // 4 // 2**17 * 2**17)),  # a third of the GiB that is left
        (2**31, 400 * 2**20, (2, 400 * 2**20)),  # slots are worth more than room
        (4 * 2**30, 2**20, (4, 256 * 2**20)),
    ],
)
def test_slots_leave_room_beside_what_is_wired(wired: int, least: int, slots: tuple[int, int]) -> None:
    found = share_arena(
        3 * 2**30,
        2**17,
        least_slot_bytes=least,
        in_backward=True,
        activation_bytes=8 * 2**30,
        wired_bytes=wired,
    )
    assert found == slots


def test_room_for_staying_leaves_what_streaming_needs() -> None:
    assert room_for_staying(1600, 100, 10) == 1600 - 100 - 100
    assert room_for_staying(1600, 100, 50) == 1600 - 150 - 100
    # Inside backward no gradients are on their way; without slots, states pass through the arena.
    assert room_for_staying(1600, 100, 10, in_backward=True) == 1600 - 20 - 100
    assert room_for_staying(1600, 0, 10, in_backward=True) == 1600 - 100


@pytest.mark.parametrize(
    ("activations", "arena", "lent"),
    [(0, 2**33, 0), (6 * 2**30, 2**32, 384 * 2**20), (2**36, 2**32, 2**29)],
)
def test_gradients_are_lent_by_what_activations_take_but_by_no_more_than_a_part_of_the_arena(
    activations: int, arena: int, lent: int
) -> None:
    assert lent_gradient_bytes(activations, arena) == lent


def test_gradients_have_what_weights_and_slots_leave_but_for_one() -> None:
    assert room_for_gradients(1000, 100, 500, 50) == 350
    assert room_for_gradients(1000, 100, 900, 50) == 0


def test_few_gradients_are_not_worth_lending() -> None:
    assert is_worth_lending(25, 100)
    assert not is_worth_lending(26, 100)
    assert not is_worth_lending(1, 0)


@pytest.mark.parametrize(
    ("host", "wires", "wired"),
    [
        (60, True, 7),
        (57, True, 7),
        (56, True, 8),
        # What streaming needs: four of the largest, and slots of half of that.
        (53, True, 10),
        (0, True, 10),
        (64, False, 0),
        (60, False, 4),
        (0, False, 10),
    ],
)
def test_what_host_memory_lacks_is_wired_up_to_what_streaming_needs(
    host: int, wires: bool, wired: int
) -> None:
    mib = 2**20
    found = wired_bytes(
        16 * mib,
        2**14,
        total_bytes=64 * mib,
        largest_bytes=mib,
        largest_whole_bytes=mib,
        host_bytes=host * mib,
        wires=wires,
    )
    assert found // mib == wired
    assert usually_wired_bytes(16 * mib, mib) == 7 * mib


def test_what_is_never_there_as_a_whole_needs_no_room_as_a_whole() -> None:
    """And the slots that are found later are those that were left room for."""
    mib, page = 2**20, 2**14
    known: dict[str, Any] = {
        "total_bytes": 64 * mib,
        "largest_bytes": 2 * mib,
        "host_bytes": 0,
        "wires": True,
    }
    assert wired_bytes(48 * mib, page, largest_whole_bytes=2 * mib, **known) == 36 * mib
    wired = wired_bytes(48 * mib, page, largest_whole_bytes=mib, **known)
    assert wired == 42 * mib
    slots = share_arena(48 * mib, page, least_slot_bytes=page, wired_bytes=wired)
    assert 2 * mib - 5 * page < slots.num_slots * slots.slot_bytes <= 2 * mib
    # A little of a large arena stays free even if the largest tensor is small.
    assert wired_bytes(48 * mib, page, largest_whole_bytes=page, **known) == 48 * mib - 1.125 * mib


def test_the_largest_are_wired_first_where_streaming_needs_less_then() -> None:
    mib, page = 2**20, 2**14
    known: dict[str, Any] = {"total_bytes": 200 * mib, "largest_bytes": 2 * mib, "wires": True}
    parameters = [mib, 2 * mib, mib, 2 * mib, *[mib // 2] * 160]
    # Four of what streams, and slots of half of that.
    share = share_wired(
        48 * mib, page, parameter_bytes=parameters, largest_other_bytes=0, host_bytes=0, **known
    )
    assert share == (45 * mib, mib // 2)
    # A gradient is never wired: what is as large as it need not come first.
    share = share_wired(
        48 * mib, page, parameter_bytes=parameters, largest_other_bytes=mib, host_bytes=0, **known
    )
    assert share == (42 * mib, mib)
    # Where the rest has room below, nothing is in the way of spreading.
    share = share_wired(
        48 * mib, page, parameter_bytes=parameters, largest_other_bytes=0, host_bytes=178 * mib, **known
    )
    assert share == (22 * mib, 2 * mib)
    # All of those that are large do not fit: then none comes first.
    share = share_wired(
        48 * mib, page, parameter_bytes=[2 * mib] * 40, largest_other_bytes=0, host_bytes=0, **known
    )
    assert share == (36 * mib, 2 * mib)


def test_a_small_arena_is_nobodys_only_home() -> None:
    assert usually_wired_bytes(4 * 2**20, 2**20) == 0
    known = {"total_bytes": 2**30, "largest_bytes": 2**20, "largest_whole_bytes": 2**20, "host_bytes": 0}
    assert wired_bytes(4 * 2**20, 2**14, wires=True, **known) == 0
