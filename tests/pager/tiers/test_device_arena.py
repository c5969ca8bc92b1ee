"""Runs of frames on the device: best fit, the cheapest window against brute force, fences, and the books."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pager.device.base import Region
from pager.device.simulated import SimulatedDevice
from pager.errors import PagerInternalError, RaceError
from pager.tiers.device_arena import DeviceArena, Fence, merge_fence

PAGE = 512


@dataclass(eq=False)
class Owner:
    """What stands in a run; ``rank`` is its place in the eviction order, None if it may not go."""

    num_frames: int
    frame: int = -1
    rank: int | None = None


def make_arena(*slabs: int, device: SimulatedDevice | None = None) -> DeviceArena:
    """An arena with slabs of these numbers of frames."""
    arena = DeviceArena(device or SimulatedDevice(), PAGE, sum(slabs) * PAGE)
    for num_frames in slabs:
        arena.add_slab(num_frames)
    return arena


def take(arena: DeviceArena, num_frames: int, rank: int | None = None) -> Owner:
    """A run that is taken; fails the test if there is no room."""
    owner = Owner(num_frames, rank=rank)
    taken = arena.take_free(num_frames, owner)
    assert taken is not None
    owner.frame = taken[0]
    return owner


# -- the window ------------------------------------------------------------------------------------------------


def brute_force(arena: DeviceArena, num_frames: int) -> tuple[int, int] | None:
    """(dearest rank, frames evicted) of the best window of neighbouring blocks, by looking at all of them."""
    best: tuple[int, int] | None = None
    for slab in arena._slabs:
        blocks = slab.blocks
        for begin in range(len(blocks)):
            for end in range(begin + 1, len(blocks) + 1):
                window = blocks[begin:end]
                owners = [block.owner for block in window if block.owner is not None]
                if sum(block.length for block in window) < num_frames or any(
                    owner.rank is None for owner in owners
                ):
                    continue
                cost = (
                    max((owner.rank for owner in owners), default=-1),
                    sum(owner.num_frames for owner in owners),
                )
                best = cost if best is None else min(best, cost)
    return best


ranks = st.one_of(st.none(), st.integers(0, 6))


@given(
    slabs=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.booleans(), ranks), min_size=1, max_size=9),
        min_size=1,
        max_size=3,
    ),
    num_frames=st.integers(1, 12),
)
def test_the_window_is_as_cheap_as_brute_force_finds(
    slabs: list[list[tuple[int, bool, int | None]]], num_frames: int
) -> None:
    arena = make_arena(*(sum(length for length, _, _ in blocks) for blocks in slabs))
    # One slab at a time, in order: best fit takes each block where it belongs.
    owners: list[tuple[Owner, bool]] = []
    for slab, blocks in zip(arena._slabs, slabs, strict=True):
        for length, is_free, rank in blocks:
            owner = Owner(length, rank=rank)
            owner.frame = arena._take(slab, len(slab.blocks) - 1, length, owner)[0]
            owners.append((owner, is_free))
    for owner, is_free in owners:
        if is_free:
            arena.free(owner.frame, {})
    found = arena.cheapest_window(num_frames)
    expected = brute_force(arena, num_frames)
    if found is None:
        assert expected is None
        return
    assert expected == (
        max((owner.rank for owner in found), default=-1),
        sum(owner.num_frames for owner in found),
    )
    for owner in found:
        arena.free(owner.frame, {})
    assert arena.take_free(num_frames, "new") is not None


def test_a_window_behind_one_that_ends_before_a_block_that_stays() -> None:
    arena = make_arena(7)
    dear, cheap = take(arena, 1, rank=9), take(arena, 5, rank=0)
    take(arena, 1, rank=None)
    assert arena.cheapest_window(5) == [cheap]
    assert arena.cheapest_window(6) == [dear, cheap]
    assert arena.cheapest_window(7) is None


def test_of_equally_dear_windows_the_smaller_goes() -> None:
    arena = make_arena(5)
    take(arena, 3, rank=1)
    small = take(arena, 2, rank=1)
    assert arena.cheapest_window(2) == [small]


def test_free_frames_next_to_a_victim_count() -> None:
    arena = make_arena(4)
    first, middle, last = take(arena, 1, rank=5), take(arena, 2, rank=0), take(arena, 1, rank=5)
    arena.free(last.frame, {})
    assert arena.cheapest_window(3) == [middle]
    assert arena.cheapest_window(4) == [first, middle]


def test_nothing_to_evict_where_free_frames_suffice() -> None:
    arena = make_arena(2, 3)
    take(arena, 2, rank=None)
    assert arena.cheapest_window(3) == []
    assert arena.cheapest_window(4) is None


# -- the books -------------------------------------------------------------------------------------------------


@given(st.data())
def test_frames_are_resident_or_free_and_fences_cover_them(data: st.DataObject) -> None:
    device = SimulatedDevice(check_races=False)
    slabs = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    arena = make_arena(*slabs, device=device)
    taken: list[Owner] = []
    known: dict[int, Fence] = defaultdict(dict)  # frame -> events of its former users
    most = 0
    for _ in range(data.draw(st.integers(1, 25))):
        wants_to_free: int = data.draw(st.integers(0, 1))
        if taken and wants_to_free:
            owner = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            stream = (device.compute, device.h2d, device.d2h)[data.draw(st.integers(0, 2))]
            fence: Fence = {stream.index: stream.record()}
            arena.free(owner.frame, fence)
            for frame in range(owner.frame, owner.frame + owner.num_frames):
                known[frame] = dict(fence)
        else:
            owner = Owner(data.draw(st.integers(1, 5)))
            largest = arena.largest_free_frames(lambda owner: False)
            result = arena.take_free(owner.num_frames, owner)
            assert (result is not None) == (owner.num_frames <= largest)
            if result is None:
                continue
            owner.frame, fence = result
            taken.append(owner)
            for frame in range(owner.frame, owner.frame + owner.num_frames):
                for index, event in known[frame].items():
                    assert fence[index].number >= event.number
        used = [frame for owner in taken for frame in range(owner.frame, owner.frame + owner.num_frames)]
        assert len(used) == len(set(used))
        assert arena.resident_bytes == len(used) * PAGE
        most = max(most, len(used))
        blocks = [block for slab in arena._slabs for block in slab.blocks]
        assert sum(block.length for block in blocks) == sum(slabs)
        for slab in arena._slabs:
            free = [block.owner is None for block in slab.blocks]
            assert not any(one and other for one, other in itertools.pairwise(free)), "free neighbours join"
    assert arena.peak_resident_bytes == most * PAGE


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    arena = make_arena(8)
    owners = [take(arena, length) for length in (3, 1, 2, 2)]
    arena.free(owners[0].frame, {})
    arena.free(owners[2].frame, {})
    assert take(arena, 2).frame == owners[2].frame
    assert take(arena, 2).frame == owners[0].frame
    assert arena.take_free(2, "none") is None


def test_of_two_events_on_one_stream_the_later_stays() -> None:
    device = SimulatedDevice()
    early, late, other = device.h2d.record(), device.h2d.record(), device.d2h.record()
    fence: Fence = {1: late}
    merge_fence(fence, {1: early, 2: other})
    assert fence == {1: late, 2: other}
    fence = {1: early}
    merge_fence(fence, {1: late})
    assert fence == {1: late}


@pytest.mark.parametrize("frame", [1, 3, 99])
def test_only_a_run_can_be_freed(frame: int) -> None:
    arena = make_arena(4)
    take(arena, 2)
    with pytest.raises(PagerInternalError, match="no (run|frame)"):
        arena.free(frame, {})
    assert arena.resident_bytes == 2 * PAGE


def test_freeing_twice_is_a_bug() -> None:
    arena = make_arena(4)
    owner = take(arena, 2)
    arena.free(owner.frame, {})
    with pytest.raises(PagerInternalError, match="no run starts at frame 0"):
        arena.free(owner.frame, {})
    assert arena.resident_bytes == 0


# -- slabs -----------------------------------------------------------------------------------------------------


def test_slabs_stay_within_the_budget() -> None:
    arena = DeviceArena(SimulatedDevice(), PAGE, 5 * PAGE)
    arena.add_slab(3)
    with pytest.raises(PagerInternalError, match="a slab of 3 frames would exceed the budget"):
        arena.add_slab(3)
    arena.add_slab(2)
    assert (arena.capacity_bytes, arena.largest_slab_frames, arena.num_slabs) == (5 * PAGE, 3, 2)


def test_numbers_of_a_returned_slab_do_not_come_back() -> None:
    arena = make_arena(2, 2)
    first = take(arena, 2)
    arena.remove_slab(1)
    assert (arena.num_slabs, arena.capacity_bytes, arena.num_frames) == (1, 2 * PAGE, 4)
    arena.add_slab(2)
    assert take(arena, 1).frame == 4
    assert arena.slab_owners(0) == [first]
    assert arena.slab_bytes(1) == 2 * PAGE
    with pytest.raises(PagerInternalError, match="no frame 2"):
        arena.bytes_of(2, 1)


def test_a_slab_that_holds_a_run_stays() -> None:
    arena = make_arena(2)
    take(arena, 1)
    with pytest.raises(PagerInternalError, match="still holds runs"):
        arena.remove_slab(0)
    assert arena.num_slabs == 1


def test_closing_before_the_work_is_over_is_a_race() -> None:
    device = SimulatedDevice()
    arena = make_arena(2, device=device)
    device.h2d.fill(arena.bytes_of(0, PAGE), 1, writes=Region("device", 0, 1))
    with pytest.raises(RaceError, match="host access on host writes them"):
        arena.close()
    device.h2d.synchronize()
    arena.close()
    assert arena.num_slabs == 0


# -- memory ----------------------------------------------------------------------------------------------------


def test_a_lease_sees_the_frames_and_tells_when_its_last_view_dies() -> None:
    arena = make_arena(3)
    owner = take(arena, 2)
    told: list[int] = []
    lease = arena.lease(owner.frame, 2 * PAGE - 10, lambda: told.append(1))
    lease.fill_(7)
    assert arena.bytes_of(owner.frame, 2 * PAGE - 10).tolist() == [7] * (2 * PAGE - 10)
    view = lease[5:].view(torch.uint8)
    del lease
    assert told == []
    assert view.sum() == 7 * len(view)
    del view
    assert told == [1]


def test_two_leases_are_two_storages_over_one_memory() -> None:
    arena = make_arena(1)
    one, other = (arena.lease(0, PAGE, lambda: None) for _ in range(2))
    one.fill_(3)
    assert other.tolist() == [3] * PAGE
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert one.data_ptr() == other.data_ptr()
    assert one.data_ptr() % 512 == 0


def test_frames_of_two_slabs_are_not_side_by_side() -> None:
    arena = make_arena(4, 3)
    assert arena.is_one_slab(0, 4)
    assert arena.is_one_slab(4, 3)
    assert arena.is_one_slab(5, 2)
    assert not arena.is_one_slab(3, 2)
    assert not arena.is_one_slab(0, 7)
