"""Staging beside ordinary accesses against a dictionary: random programs over the same segments.

A unit is fetched, perhaps long before it is taken, computed and sent home, given back, or forgotten, while others
read, write, store and evict the segments that it is about, and slots come and go. Whatever the program, under late and
early streams with poisoned frames and the happens-before checker: everybody sees the newest bytes, homes have them at
the end, and no frame is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pager.engine.pagerd import Pagerd
from pager.engine.run import Run
from pager.engine.staging import Range
from pager.errors import BudgetError
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from tests.engine_rig import PAGE, Bytes, Rig, make_values

SIZES = [PAGE, 3 * PAGE, 2 * PAGE - 100, PAGE]
SLOT_FRAMES = 4
MAX_SLOTS = 3
# (segment, first page, pages) of each unit; slices of one segment are different units.
UNITS = [
    [(0, 0, 1), (1, 0, 1)],
    [(1, 1, 2), (2, 0, 2)],
    [(1, 0, 3)],
    [(3, 0, 1)],
    [(2, 0, 1), (3, 0, 1), (0, 0, 1)],
]
segments = st.sampled_from(range(len(SIZES)))
units = st.sampled_from(range(len(UNITS)))
seeds = st.integers(0, 2**16)


@dataclass(eq=False)
class Taken:
    """A unit that is being computed in its slot."""

    number: int
    runs: list[Run]


class StagingModel(RuleBasedStateMachine):
    """Random programs; see the head of this file."""

    rig: Rig

    @initialize(
        streams=st.sampled_from(["late", "early"]),
        spare_frames=st.integers(0, 8),
        num_slots=st.integers(0, MAX_SLOTS),
        trace=st.lists(segments, min_size=1, max_size=8),
    )
    def start(self, streams: str, spare_frames: int, num_slots: int, trace: list[int]) -> None:
        """All segments have a value; pagerd follows a trace that need not come true."""
        self.rig = Rig(SIZES, arena_frames=4 + spare_frames + num_slots * SLOT_FRAMES, streams=streams)  # type: ignore[arg-type]
        self.newest: list[Bytes | None] = []
        for index, size in enumerate(SIZES):
            value = make_values(size, index)
            self.rig.store(index, value)
            self.newest.append(value)
        self.holders = [object() for _ in UNITS]
        self.taken: Taken | None = None
        rows = [
            AccessRow(tick, index, 0, self.rig.segments[index].num_pages, False, Phase.FORWARD)
            for tick, index in enumerate(trace)
        ]
        self.rig.engine.timeline.follow(AccessTrace.from_rows(rows))
        self.rig.engine.streamed = {segment.index for segment in self.rig.segments}
        self.pagerd = Pagerd(self.rig.engine, 2, threaded=False)
        self.rig.engine.staging.reserve(num_slots, SLOT_FRAMES)
        self.rig.engine.give_up_kept = self.rig.engine.staging.release

    def teardown(self) -> None:
        """At the end every home has the newest bytes, and every frame can be had again."""
        if not hasattr(self, "rig"):
            return
        staging = self.rig.engine.staging
        if self.taken is not None:
            staging.give_back(self.holders[self.taken.number])
        staging.release()
        for index, newest in enumerate(self.newest):
            if newest is not None:
                np.testing.assert_array_equal(self.rig.home_value(index), newest)
        self.rig.evict(*range(len(SIZES)))
        assert self.rig.arena.resident_bytes == 0
        self.rig.close()

    # -- helpers -----------------------------------------------------------------------------------------------

    def in_compute(self, index: int) -> bool:
        """Whether a unit of this segment is being computed: nobody else may touch it then."""
        return self.taken is not None and any(index == found for found, *_ in UNITS[self.taken.number])

    def ranges(self, number: int) -> list[Range]:
        """A unit's pages."""
        return [
            Range(self.rig.segments[index], first, num_pages) for index, first, num_pages in UNITS[number]
        ]

    def can_stage(self, number: int) -> bool:
        """Whether all of a unit's segments have values, at home (sent there if need be)."""
        if any(self.in_compute(index) for index, *_ in UNITS[number]):
            return False
        if any(self.newest[index] is None for index, *_ in UNITS[number]):
            return False
        self.rig.evict(*(index for index, *_ in UNITS[number]))
        return not any(self.rig.engine.runs_of(self.rig.segments[index]) for index, *_ in UNITS[number])

    def slices(self, number: int) -> list[Bytes]:
        """The newest bytes of a unit's pages."""
        found = []
        for index, first, num_pages in UNITS[number]:
            newest = self.newest[index]
            assert newest is not None
            found.append(newest[first * PAGE : (first + num_pages) * PAGE])
        return found

    def attempt(self, operation: Callable[[], object]) -> bool:
        """Run it; False if there was no room: then a unit is being computed, so that slots had to stay."""
        try:
            operation()
        except BudgetError:
            assert self.taken is not None
            return False
        return True

    # -- ordinary accesses -------------------------------------------------------------------------------------

    @rule(index=segments)
    def read(self, index: int) -> None:
        """Reading gives the newest bytes."""
        newest = self.newest[index]
        if newest is not None and not self.in_compute(index):
            self.attempt(lambda: np.testing.assert_array_equal(self.rig.read(index), newest))

    @rule(index=segments, seed=seeds, how=st.sampled_from(["write", "overwrite", "store"]))
    def change(self, index: int, seed: int, how: str) -> None:
        """A new value, in place, without reading, or at the home."""
        if self.in_compute(index) or (self.newest[index] is None and how == "write"):
            return
        value = make_values(SIZES[index], seed)
        if self.attempt(lambda: getattr(self.rig, how)(index, value)):
            self.newest[index] = value

    @rule(index=segments)
    def discard(self, index: int) -> None:
        """Drop the value."""
        if not self.in_compute(index):
            self.rig.engine.discard(self.rig.segments[index])
            self.newest[index] = None

    @rule(indices=st.lists(segments, min_size=1, max_size=3), how=st.sampled_from(["evict", "flush"]))
    def send_home(self, indices: list[int], how: str) -> None:
        """Write some back."""
        if how == "evict":
            self.rig.evict(*indices)
        else:
            self.rig.engine.flush([self.rig.segments[index] for index in indices])

    @rule(index=segments)
    def look_at_the_home(self, index: int) -> None:
        """The home has the newest bytes, whatever stands in slots."""
        newest = self.newest[index]
        if newest is not None and not self.in_compute(index):
            np.testing.assert_array_equal(self.rig.home_value(index), newest)

    # -- units -------------------------------------------------------------------------------------------------

    @rule(number=units)
    def fetch(self, number: int) -> None:
        """Ahead of its compute."""
        staging = self.rig.engine.staging
        if staging.holds(self.holders[number]) or not self.can_stage(number):
            return
        had = staging.has_free_slot
        assert staging.fetch(self.holders[number], self.ranges(number)) == had

    @precondition(lambda self: self.__dict__.get("taken") is None)
    @rule(number=units)
    def take(self, number: int) -> None:
        """Begin to compute; what the slot shows is the newest."""
        staging = self.rig.engine.staging
        if not staging.holds(self.holders[number]) and not self.can_stage(number):
            return
        runs = staging.take(self.holders[number], self.ranges(number))
        if runs is None:
            assert not staging.num_bytes
            return
        self.taken = Taken(number, runs)
        for run, expected in zip(runs, self.slices(number), strict=True):
            np.testing.assert_array_equal(staging.bytes_of(run).numpy(), expected)

    @precondition(lambda self: self.__dict__.get("taken") is not None)
    @rule(seed=seeds, last_is_read_only=st.booleans())
    def write_back(self, seed: int, last_is_read_only: bool) -> None:
        """The end of a unit; its last range may have been read only, as a gradient is."""
        assert self.taken is not None
        staging, number, runs = self.rig.engine.staging, self.taken.number, self.taken.runs
        written = runs[: len(runs) - last_is_read_only]
        for place, run in enumerate(written):
            index, first, num_pages = UNITS[number][place]
            value = make_values(run.num_bytes, seed + place)
            staging.bytes_of(run).copy_(torch.from_numpy(value))
            newest = self.newest[index]
            assert newest is not None
            newest = newest.copy()
            newest[first * PAGE : (first + num_pages) * PAGE] = value
            self.newest[index] = newest
        staging.write_back(self.holders[number], written)
        self.taken = None
        self.forget_slices(number)

    def forget_slices(self, number: int) -> None:
        """Units over the same pages are not about at once: the update has each slice in one unit."""
        changed = {index for index, *_ in UNITS[number]}
        for other, ranges in enumerate(UNITS):
            if any(index in changed for index, *_ in ranges):
                self.rig.engine.staging.give_back(self.holders[other])

    @rule(number=units)
    def give_back(self, number: int) -> None:
        """A unit that will not be done; what was computed in its slot is worth nothing."""
        if self.taken is not None and self.taken.number == number:
            for run in self.taken.runs:
                self.rig.engine.staging.bytes_of(run).fill_(0x55)
            self.taken = None
        self.rig.engine.staging.give_back(self.holders[number])

    @rule(index=segments)
    def forget(self, index: int) -> None:
        """What is computed stays, what was only fetched goes."""
        staging = self.rig.engine.staging
        staging.forget(self.rig.segments[index])
        for number, holder in enumerate(self.holders):
            if any(found == index for found, *_ in UNITS[number]) and staging.holds(holder):
                assert self.taken is not None
                assert self.taken.number == number

    @rule()
    def release(self) -> None:
        """The arena shrinks: no slots any more, unless one is computed in."""
        staging = self.rig.engine.staging
        had = bool(staging.num_bytes)
        assert staging.release() == (had and self.taken is None)

    @rule(num_slots=st.integers(1, MAX_SLOTS))
    def reserve(self, num_slots: int) -> None:
        """Slots, as many as there is room for."""
        staging = self.rig.engine.staging
        before = staging.num_bytes
        assert staging.reserve(num_slots, SLOT_FRAMES) * SLOT_FRAMES * PAGE == staging.num_bytes >= before

    # -- invariants --------------------------------------------------------------------------------------------

    @invariant()
    def a_unit_under_way_is_undisturbed(self) -> None:
        """Its slot shows what it showed when it was taken."""
        taken = self.__dict__.get("taken")
        if taken is None:
            return
        for run, expected in zip(taken.runs, self.slices(taken.number), strict=True):
            np.testing.assert_array_equal(self.rig.engine.staging.bytes_of(run).numpy(), expected)

    @invariant()
    def frames_are_slots_residents_or_free(self) -> None:
        """The arena's books agree with the slots' and the engine's."""
        if not hasattr(self, "rig"):
            return
        staging, engine = self.rig.engine.staging, self.rig.engine
        owners = [block.owner for block in self.rig.arena._slabs[0].blocks if block.owner is not None]
        assert {id(owner) for owner in owners} == {id(run) for run in engine.resident_runs()} | {
            id(slot) for slot in staging._slots
        }
        held = {id(slot.holder) for slot in staging._slots if slot.holder is not None}
        assert held == set(staging._held)
        assert all(bool(slot.runs) == (slot.holder is not None) for slot in staging._slots)
        assert sum(slot.taken for slot in staging._slots) == (self.taken is not None)


TestStagingModel = StagingModel.TestCase
TestStagingModel.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
