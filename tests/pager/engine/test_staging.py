"""Staging slots: what they bring, take home, drop and give back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from pager.engine.staging import Range
from tests.engine_rig import PAGE, Bytes, Rig, make_filled, make_values
from tests.races.scenarios import check_bytes

# One page, three pages, and two of which the second is partly used.
SIZES = [PAGE, 3 * PAGE, 2 * PAGE - 100]


def whole(rig: Rig, index: int, *, is_new: bool = False) -> Range:
    """All pages of a segment."""
    segment = rig.segments[index]
    return Range(segment, 0, segment.num_pages, is_new)


def make(num_slots: int = 2, slot_frames: int = 4, **knobs: Any) -> tuple[Rig, list[Bytes]]:
    """A filled rig with slots, and four frames for everybody else."""
    rig, values = make_filled(SIZES, arena_frames=4 + num_slots * slot_frames, **knobs)
    assert rig.engine.staging.reserve(num_slots, slot_frames) == num_slots
    return rig, values


def taken(rig: Rig, holder: object, ranges: list[Range]) -> list[torch.Tensor]:
    """The bytes of a unit, to be computed on."""
    runs = rig.engine.staging.take(holder, ranges)
    assert runs is not None
    return [rig.engine.staging.bytes_of(run) for run in runs]


def free_frames(rig: Rig) -> int:
    return (rig.arena.capacity_bytes - rig.arena.resident_bytes) // PAGE


@pytest.mark.parametrize("streams", ["late", "early"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_unit_comes_is_changed_and_goes_home(streams: Any, ahead: bool) -> None:
    rig, values = make(streams=streams)
    staging, unit = rig.engine.staging, object()
    ranges = [whole(rig, 0), whole(rig, 1)]
    if ahead:
        assert staging.fetch(unit, ranges)
        assert staging.holds(unit)
    found = taken(rig, unit, ranges)
    check_bytes(found[0].numpy(), values[0], "first")
    check_bytes(found[1].numpy(), values[1], "second")
    for one in found:
        one.bitwise_not_()
    staging.write_back(unit, staging._held[id(unit)].runs)
    assert not staging.holds(unit)
    assert rig.state(0) == rig.state(1)[:1] == [rig.state(2)[0]]
    for index in (0, 1):
        check_bytes(rig.home_value(index), ~values[index], f"home of {index}")
        check_bytes(rig.read(index), ~values[index], f"segment {index}")
    rig.close()


def test_what_was_not_written_stays_what_it_was_at_home() -> None:
    rig, values = make()
    staging, unit = rig.engine.staging, object()
    found = taken(rig, unit, [whole(rig, 0), whole(rig, 2)])
    for one in found:
        one.bitwise_not_()
    staging.write_back(unit, staging._held[id(unit)].runs[1:])
    check_bytes(rig.home_value(0), values[0], "read only")
    check_bytes(rig.home_value(2), ~values[2], "written")
    rig.close()


def test_slices_of_a_segment_go_through_slots_of_their_own() -> None:
    rig, values = make(slot_frames=2)
    staging, units = rig.engine.staging, [object(), object()]
    pieces = [Range(rig.segments[1], 0, 1), Range(rig.segments[1], 1, 2)]
    for unit, piece in zip(units, pieces, strict=True):
        assert staging.fetch(unit, [piece])
    assert not staging.has_free_slot
    for unit, piece in zip(units, pieces, strict=True):
        taken(rig, unit, [piece])[0].bitwise_not_()
        staging.write_back(unit, staging._held[id(unit)].runs)
    check_bytes(rig.home_value(1), ~values[1], "both")
    rig.close()


def test_pages_without_a_value_are_not_read_but_go_home() -> None:
    rig = Rig(SIZES, arena_frames=8)
    staging, unit = rig.engine.staging, object()
    assert staging.reserve(1, 4) == 1
    segment = rig.segments[2]
    before = rig.counters.page_in_bytes if hasattr(rig.counters, "page_in_bytes") else 0
    found = taken(rig, unit, [whole(rig, 2, is_new=True)])[0]
    after = rig.counters.page_in_bytes if hasattr(rig.counters, "page_in_bytes") else 0
    assert before == after
    value = make_values(segment.num_bytes, 7)
    found.copy_(torch.from_numpy(value))
    staging.write_back(unit, staging._held[id(unit)].runs)
    rig.table.store_home(segment.first_page, segment.last_page)
    check_bytes(rig.read(2), value, "new")
    rig.close()


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_the_next_unit_waits_for_the_last_whatever_is_new_in_it(order: tuple[int, int], poison: bool) -> None:
    """In a first step the states are new and the gradient is read: both come behind the unit that had the slot."""
    rig, values = make(num_slots=1, poison=poison)
    first, second = object(), object()
    for found in taken(rig, first, [whole(rig, 0), whole(rig, 1)]):
        found.bitwise_not_()
    rig.engine.staging.write_back(first, rig.engine.staging._held[id(first)].runs)
    ranges = [whole(rig, index, is_new=index == 0) for index in order]
    by_index = dict(zip(order, taken(rig, second, ranges), strict=True))
    check_bytes(by_index[2].numpy(), values[2], "read")
    by_index[0].copy_(torch.from_numpy(values[0]))
    new = [run for run in rig.engine.staging._held[id(second)].runs if run.segment is rig.segments[0]]
    rig.engine.staging.write_back(second, new)
    check_bytes(rig.home_value(0), values[0], "made by the second")
    check_bytes(rig.home_value(1), ~values[1], "sent home by the first")
    rig.close()


def test_giving_back_leaves_the_home_alone() -> None:
    rig, values = make(num_slots=1)
    staging, unit = rig.engine.staging, object()
    taken(rig, unit, [whole(rig, 1)])[0].zero_()
    staging.give_back(unit)
    staging.give_back(unit)
    assert not staging.holds(unit)
    assert staging.has_free_slot
    check_bytes(rig.home_value(1), values[1], "never done")
    check_bytes(taken(rig, unit, [whole(rig, 1)])[0].numpy(), values[1], "again")
    staging.give_back(unit)
    rig.close()


@pytest.mark.parametrize("change", ["write", "overwrite", "store"])
def test_what_was_fetched_before_a_change_is_fetched_again(change: str) -> None:
    rig, values = make()
    staging, unit, other = rig.engine.staging, object(), object()
    assert staging.fetch(unit, [whole(rig, 1)])
    assert staging.fetch(other, [whole(rig, 0)])
    getattr(rig, change)(1, ~values[1])
    assert not staging.holds(unit)
    assert staging.holds(other)
    rig.evict(1)
    check_bytes(taken(rig, unit, [whole(rig, 1)])[0].numpy(), ~values[1], "changed")
    check_bytes(taken(rig, other, [whole(rig, 0)])[0].numpy(), values[0], "untouched")
    for each in (unit, other):
        staging.give_back(each)
    rig.close()


def test_a_discarded_segment_is_not_kept_in_a_slot() -> None:
    rig, _ = make()
    unit = object()
    assert rig.engine.staging.fetch(unit, [whole(rig, 1)])
    rig.engine.discard(rig.segments[1])
    assert not rig.engine.staging.holds(unit)
    rig.close()


def test_a_unit_that_is_computed_is_not_dropped() -> None:
    rig, values = make()
    staging, unit = rig.engine.staging, object()
    found = taken(rig, unit, [whole(rig, 1)])[0]
    staging.forget(rig.segments[1])
    assert staging.holds(unit)
    assert not staging.release()
    check_bytes(found.numpy(), values[1], "in use")
    staging.give_back(unit)
    assert staging.release()
    rig.close()


def test_who_needs_a_slot_now_gets_that_of_the_unit_fetched_last() -> None:
    rig, values = make()
    staging, first, last, now = rig.engine.staging, object(), object(), object()
    assert staging.fetch(first, [whole(rig, 0)])
    assert staging.fetch(last, [whole(rig, 1)])
    assert not staging.fetch(now, [whole(rig, 2)])
    check_bytes(taken(rig, now, [whole(rig, 2)])[0].numpy(), values[2], "now")
    assert staging.holds(first)
    assert not staging.holds(last)
    staging.give_back(now)
    rig.close()


@pytest.mark.parametrize("num_slots", [0, 2])
def test_nothing_is_taken_where_others_compute_in_all_slots(num_slots: int) -> None:
    rig, _ = make(num_slots=num_slots)
    staging, units = rig.engine.staging, [object() for _ in range(num_slots)]
    for unit in units:
        taken(rig, unit, [whole(rig, 0)])
    assert staging.take(object(), [whole(rig, 1)]) is None
    assert all(staging.holds(unit) for unit in units)
    for unit in units:
        staging.give_back(unit)
    rig.close()


def test_no_more_slots_than_there_is_room_for() -> None:
    rig, values = make_filled(SIZES, arena_frames=10)
    staging = rig.engine.staging
    assert staging.slot_bytes == staging.num_bytes == 0
    assert not staging.release()
    assert staging.reserve(4, 4) == 2
    assert staging.slot_bytes == 4 * PAGE
    assert staging.num_bytes == 8 * PAGE
    assert free_frames(rig) == 2
    assert staging.reserve(2, 4) == 2
    assert free_frames(rig) == 2
    rig.read(0)
    assert staging.release()
    assert free_frames(rig) == 9
    check_bytes(rig.read(1), values[1], "in frames that were a slot's")
    assert staging.reserve(1, 6) == 0
    rig.close()


def test_slots_are_never_evicted() -> None:
    rig, values = make(num_slots=1)
    staging, unit = rig.engine.staging, object()
    assert staging.fetch(unit, [whole(rig, 0)])
    for index in (1, 2, 1, 2, 1):
        check_bytes(rig.read(index), values[index], f"segment {index}, in turn")
    assert staging.holds(unit)
    assert staging.num_bytes == 4 * PAGE
    rig.close()


@pytest.mark.parametrize("streams", ["late", "early"])
def test_a_slot_is_used_over_and_over_without_waiting_for_the_link(streams: Any) -> None:
    """The checker sees a copy home that is overtaken by the next one in, in the same frames."""
    rig, values = make(num_slots=1, streams=streams)
    staging = rig.engine.staging
    for turn in range(6):
        index = turn % 3
        unit = object()
        found = taken(rig, unit, [whole(rig, index)])[0]
        values[index] = ~values[index]
        found.bitwise_not_()
        staging.write_back(unit, staging._held[id(unit)].runs)
    for index in range(3):
        check_bytes(rig.home_value(index), values[index], f"segment {index}")
    rig.close()


def test_released_with_copies_under_way_in_both_directions() -> None:
    """The frames' next owners wait for the copies that left the slots and for those that came into them."""
    rig, values = make(num_slots=2)
    staging, out, into = rig.engine.staging, object(), object()
    taken(rig, out, [whole(rig, 1)])[0].bitwise_not_()
    staging.write_back(out, staging._held[id(out)].runs)
    assert staging.fetch(into, [whole(rig, 2)])
    assert staging.release()
    for index in (0, 2):
        check_bytes(rig.read(index), values[index], f"segment {index}")
    check_bytes(rig.read(1), ~values[1], "written")
    rig.close()


def num_copies(rig: Rig, ranges: list[Range]) -> list[int]:
    """Copies in and out of a unit that is changed, and checked once it is home."""
    staging, unit = rig.engine.staging, object()
    into, out = rig.device.slots_in.copy, rig.device.slots_out.copy
    copies = [0, 0]

    def count(direction: int, copy: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> None:
            copies[direction] += 1
            copy(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.device.slots_in, "copy", count(0, into))
        patch.setattr(rig.device.slots_out, "copy", count(1, out))
        before = [bytes_.clone() for bytes_ in taken(rig, unit, ranges)]
        runs = staging._held[id(unit)].runs
        for run in runs:
            staging.bytes_of(run).bitwise_not_()
        staging.write_back(unit, runs)
    for wanted, old in zip(ranges, before, strict=True):
        check_bytes(rig.read(rig.segments.index(wanted.segment))[: old.numel()], ~old.numpy(), "changed")
    return copies


@pytest.mark.parametrize(
    ("pieces", "copies"),
    [
        pytest.param([(0, 1), (1, 3)], 1, id="side by side"),
        pytest.param([(1, 3), (0, 1)], 2, id="at home in the other order"),
        pytest.param([(0, 1), (2, 2)], 2, id="at home something stands between"),
        pytest.param([(1, 1), (2, 2)], 2, id="only a part of what stands before"),
    ],
)
def test_what_lies_side_by_side_at_both_ends_is_one_copy(pieces: list[tuple[int, int]], copies: int) -> None:
    rig, _ = make()
    assert num_copies(rig, [Range(rig.segments[index], 0, num) for index, num in pieces]) == [copies, copies]
    rig.close()


def test_what_follows_a_page_that_is_partly_used_is_a_copy_of_its_own() -> None:
    rig, _ = make_filled([2 * PAGE - 100, PAGE], arena_frames=12)
    assert rig.engine.staging.reserve(1, 4) == 1
    assert num_copies(rig, [whole(rig, 0), whole(rig, 1)]) == [2, 2]
    rig.close()


def test_homes_in_two_pieces_are_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their frames have numbers in a row, their memory may be anywhere."""
    monkeypatch.setattr("pager.tiers.host_arena.HostArena.is_one_piece", lambda arena, first, num: False)
    rig, _ = make()
    assert num_copies(rig, [whole(rig, 0), whole(rig, 1)]) == [2, 2]
    rig.close()


def test_a_failed_fetch_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, values = make(num_slots=1)
    staging, unit = rig.engine.staging, object()
    copy, calls = rig.device.slots_in.copy, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("unplugged")
        return copy(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(rig.device.slots_in, "copy", failing)
        with pytest.raises(OSError, match="unplugged"):
            # Not side by side at home, so that they are two copies.
            staging.fetch(unit, [whole(rig, 1), whole(rig, 0)])
    assert len(calls) == 2
    assert not staging.holds(unit)
    assert staging.has_free_slot
    found = taken(rig, unit, [whole(rig, 2), whole(rig, 0)])
    check_bytes(found[0].numpy(), values[2], "afterwards")
    check_bytes(found[1].numpy(), values[0], "afterwards, its second")
    staging.give_back(unit)
    assert staging.release()
    check_bytes(rig.read(1), values[1], "in the same frames")
    rig.close()


def test_slots_and_pages_are_taken_by_two_threads_at_once() -> None:
    """The arena's books are the engine's, and stay right."""
    rig, values = make_filled(SIZES, arena_frames=12, check_races=False, poison=False, streams="early")
    staging, errors = rig.engine.staging, []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                for index in range(3):
                    check_bytes(rig.read(index), values[index], f"segment {index}")
                rig.evict(0, 1, 2)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(1500):
        staging.reserve(2, 2)
        staging.release()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
    blocks = rig.arena._slabs[0].blocks
    assert [block.start for block in blocks] == list(np.cumsum([0] + [block.length for block in blocks])[:-1])
    assert sum(block.length for block in blocks if block.owner is not None) * PAGE == rig.arena.resident_bytes
    rig.close()
