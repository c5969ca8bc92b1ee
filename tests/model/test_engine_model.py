"""The engine against a dictionary: random programs over all homes, with leases kept alive and a disk that fails.

The model of a segment is its newest bytes, or None. Whatever the program, under late and early streams with poisoned
frames and the happens-before checker: reads give the newest bytes, failures change nothing, every page with a value
has a good copy, frames are resident or free, pins count leases, and the budget holds.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pager.engine.pagerd import Pagerd
from pager.engine.run import Run
from pager.errors import BudgetError, TierIOError
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.page_table import Home, PageState
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Bytes, Rig, make_values

# Bytes and homes of the segments: whole and ragged pages, every tier, and a wired one.
SEGMENTS = [
    (PAGE, Home.HOST),
    (3 * PAGE, Home.HOST),
    (2 * PAGE - 100, Home.HOST),
    (PAGE + 1, Home.DISK),
    (3 * PAGE, Home.DISK),
    (PAGE, Home.DEVICE),
]
WIRED = 5
PAGED = range(WIRED)
segments = st.sampled_from(PAGED)
seeds = st.integers(0, 2**16)


@dataclass(eq=False)
class Held:
    """A lease kept alive; ``frozen`` is what it shows once its segment has dropped the value."""

    index: int
    run: Run
    lease: torch.Tensor
    frozen: Bytes | None = None


class EngineModel(RuleBasedStateMachine):
    """Random programs; see the head of this file."""

    rig: Rig

    @initialize(
        streams=st.sampled_from(["late", "early"]),
        eviction=st.sampled_from(["belady", "lru", "clock"]),
        spare_frames=st.integers(0, 4),
        trace=st.lists(segments, min_size=1, max_size=12),
        distance=st.integers(0, 3),
        disk=st.sampled_from(["late", "early"]),
        ring=st.tuples(st.integers(1, 3), st.integers(2, 4)),
        spare_pages=st.sampled_from([0, 3, 100]),
        packs=st.booleans(),
    )
    def start(
        self,
        streams: str,
        eviction: str,
        spare_frames: int,
        trace: list[int],
        distance: int,
        disk: str,
        ring: tuple[int, int],
        spare_pages: int,
        packs: bool,
    ) -> None:
        """All segments are EMPTY but the wired one."""
        self.folder = tempfile.TemporaryDirectory()
        self.rig = Rig(
            [size for size, _ in SEGMENTS],
            homes=[home for _, home in SEGMENTS],
            arena_frames=4 + spare_frames,
            disk_folder=self.folder.name,
            streams=streams,  # type: ignore[arg-type]
            eviction=eviction,
            disk_inline=disk,
            ring=ring,
            spare_pages=spare_pages,
            packs=packs,
        )
        self.packs = packs
        self.newest: dict[int, Bytes | None] = dict.fromkeys(range(len(SEGMENTS)))
        self.held: list[Held] = []
        self.distance = distance
        rows = [
            AccessRow(tick, index, 0, self.rig.segments[index].num_pages, False, Phase.FORWARD)
            for tick, index in enumerate(trace)
        ]
        self.rig.engine.timeline.follow(AccessTrace.from_rows(rows))
        self.pagerd = Pagerd(self.rig.engine, distance, threaded=False)
        self.newest[WIRED] = self.value(WIRED, 0)
        self.rig.store(WIRED, self.value(WIRED, 0))
        self.rig.engine.wire(self.rig.segments[WIRED])

    def teardown(self) -> None:
        """At the end every home has the newest bytes."""
        if not hasattr(self, "rig"):
            return
        self.held.clear()
        self.heal()
        self.everything_has_a_good_copy()
        for index in PAGED:
            newest = self.newest[index]
            if newest is not None:
                np.testing.assert_array_equal(self.rig.home_value(index), newest)
        self.rig.engine.drain()
        assert not self.rig.table.pins.any()
        self.rig.close()
        self.folder.cleanup()

    # -- helpers -----------------------------------------------------------------------------------------------

    def value(self, index: int, seed: int) -> Bytes:
        """Random bytes for a segment; of each half a byte where the disk is to have something to compress."""
        return make_values(SEGMENTS[index][0], seed) & np.uint8(0x0F if self.packs else 0xFF)

    def holds(self, index: int) -> bool:
        """Whether a lease of the segment's present value is alive."""
        return any(held.index == index and held.frozen is None for held in self.held)

    def attempt(self, operation: Callable[[], object]) -> bool:
        """Run it; False if the disk failed, now or in the background before, or if with leases in the way there was no
        room: nothing has changed then.
        """
        try:
            operation()
        except TierIOError:
            if self.pagerd._closed:
                self.pagerd = Pagerd(self.rig.engine, self.distance, threaded=False)
            return False
        except BudgetError:
            assert self.held, "there was no room, though nothing is in use"
            return False
        return True

    def heal(self) -> None:
        """The disk works again, and pagerd too."""
        assert self.rig.disk is not None
        self.rig.disk.faults = ()
        with contextlib.suppress(TierIOError):
            self.rig.engine.raise_failure()

    def note(self, index: int) -> None:
        """Tell the timeline of an access, as the MMU does."""
        self.rig.engine.timeline.new_tick()
        self.rig.engine.timeline.access(
            index, 0, self.rig.segments[index].num_pages, write=False, phase=Phase.FORWARD
        )

    # -- rules -------------------------------------------------------------------------------------------------

    @rule(index=st.sampled_from(range(len(SEGMENTS))))
    def read(self, index: int) -> None:
        """Reading gives the newest bytes."""
        newest = self.newest[index]
        if newest is None:
            return
        self.note(index)

        def read() -> None:
            np.testing.assert_array_equal(self.rig.read(index), newest)

        self.attempt(read)

    @rule(index=segments, first=st.integers(0, 2), num_pages=st.integers(1, 3))
    def read_part(self, index: int, first: int, num_pages: int) -> None:
        """So does reading some of the pages, whatever stands on the device in pieces or whole."""
        newest = self.newest[index]
        num_pages = min(num_pages, self.rig.segments[index].num_pages - first)
        if newest is None or num_pages <= 0 or self.holds(index):
            return

        def read() -> None:
            run, lease = self.rig.lease(index, pages=(first, num_pages))
            begin = (first - run.first) * PAGE
            expected = newest[first * PAGE : (first + num_pages) * PAGE]
            np.testing.assert_array_equal(lease.numpy()[begin : begin + len(expected)], expected)

        self.attempt(read)

    @rule(index=st.sampled_from(range(len(SEGMENTS))), seed=seeds)
    def write(self, index: int, seed: int) -> None:
        """Write in place, counted by the version alone."""
        if self.newest[index] is None:
            return
        self.note(index)
        if self.attempt(lambda: self.rig.write(index, self.value(index, seed))):
            self.newest[index] = self.value(index, seed)

    @rule(index=segments, seed=seeds)
    def overwrite(self, index: int, seed: int) -> None:
        """Write every byte without reading."""
        if self.attempt(lambda: self.rig.overwrite(index, self.value(index, seed))):
            self.newest[index] = self.value(index, seed)

    @rule(index=segments, seed=seeds)
    def store(self, index: int, seed: int) -> None:
        """Load a value at the home; views of the old one keep it."""
        self.freeze(index)
        done = self.attempt(lambda: self.rig.store(index, self.value(index, seed)))
        self.newest[index] = self.value(index, seed) if done else None

    @rule(index=segments)
    def discard(self, index: int) -> None:
        """Drop the value; views keep it."""
        self.freeze(index)
        self.rig.engine.discard(self.rig.segments[index])
        self.newest[index] = None

    def freeze(self, index: int) -> None:
        """Leases of this segment show its present value from now on."""
        for held in self.held:
            if held.index == index and held.frozen is None:
                held.frozen = self.newest[index]

    @rule(index=segments, ticks=st.integers(0, 8))
    def prefetch(self, index: int, ticks: int) -> None:
        """Bring it ahead of its use, if there is room."""
        if self.newest[index] is not None:
            self.attempt(lambda: self.rig.prefetch(index, ticks_ahead=ticks))

    @rule(indices=st.lists(segments, min_size=1, max_size=3))
    def evict(self, indices: list[int]) -> None:
        """Send some home."""
        self.attempt(lambda: self.rig.evict(*indices))

    @rule(indices=st.lists(segments, min_size=1, max_size=3))
    def flush(self, indices: list[int]) -> None:
        """Write some back; they stay."""
        self.attempt(lambda: self.rig.engine.flush([self.rig.segments[index] for index in indices]))

    @rule(index=segments)
    def look_at_the_home(self, index: int) -> None:
        """The home has the newest bytes once they are written back."""
        newest = self.newest[index]
        if newest is None:
            return

        def look() -> None:
            np.testing.assert_array_equal(self.rig.home_value(index), newest)

        self.attempt(look)

    @rule(index=segments)
    def hold(self, index: int) -> None:
        """Keep a lease alive."""
        if self.newest[index] is None or len(self.held) >= 3:
            return

        def hold() -> None:
            run, lease = self.rig.lease(index)
            self.held.append(Held(index, run, lease))

        self.attempt(hold)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 2), seed=seeds)
    def write_through_a_held_lease(self, number: int, seed: int) -> None:
        """A view that is kept is written to; the version tells when it ends, or at a flush."""
        held = self.held[number % len(self.held)]
        if held.frozen is None:
            self.newest[held.index] = self.value(held.index, seed)
            self.rig.write_through(held.index, held.lease, self.value(held.index, seed))

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 2))
    def drop(self, number: int) -> None:
        """Let a lease go."""
        self.held.pop(number % len(self.held))
        gc.collect(0)

    @rule(num_pages=st.integers(0, 12), settle=st.booleans())
    def set_host_budget(self, num_pages: int, settle: bool) -> None:
        """Homes move between host memory and the disk; what fails on the way leaves each page where it was."""
        self.attempt(lambda: self.rig.set_host_budget(num_pages, settle=settle))
        assert self.rig.host.reserved_bytes == self.rig.host.used_bytes, (
            "no memory is kept that no home is in"
        )

    @rule(
        operation=st.sampled_from(["read", "write"]),
        calls=st.integers(1, 2),
        torn_bytes=st.sampled_from([0, 100]),
        lasting=st.booleans(),
    )
    def break_the_disk(self, operation: str, calls: int, torn_bytes: int, lasting: bool) -> None:
        """The next, or the next but one, read or write of the disk fails, perhaps half way; or all from there on."""
        disk = self.rig.disk
        assert disk is not None
        num_bytes = torn_bytes if operation == "write" else 0
        disk.faults = (
            Fault(
                operation=operation,  # type: ignore[arg-type]
                at=disk.calls[operation] + calls,
                num_bytes=num_bytes,
                lasting=lasting,
            ),
        )

    @rule()
    def repair_the_disk(self) -> None:
        """It works again."""
        assert self.rig.disk is not None
        self.rig.disk.faults = ()

    @rule()
    def everything_has_a_good_copy(self) -> None:
        """With all copies done, homes of clean and absent pages are good, and so are the frames of dirty ones."""
        rig = self.rig
        rig.engine.drain()
        rig.device.h2d.synchronize()
        rig.device.d2h.synchronize()
        on_their_way = {
            page for run in rig.engine.resident_runs() if not run.issued for page in range(run.begin, run.end)
        }
        for index, newest in self.newest.items():
            segment = rig.segments[index]
            if newest is None:
                assert rig.state(index) == [PageState.EMPTY] * segment.num_pages
                continue
            for page, state in enumerate(rig.state(index)):
                expected = newest[page * PAGE : (page + 1) * PAGE]
                number = segment.first_page + page
                if state in (PageState.ABSENT, PageState.CLEAN, PageState.ARRIVING) and not self.is_written(
                    index
                ):
                    np.testing.assert_array_equal(self.at_home(number, len(expected)), expected)
                if state != PageState.ABSENT and number not in on_their_way:
                    frame = rig.arena.bytes_of(int(rig.table.frame[number]), len(expected))
                    np.testing.assert_array_equal(frame.numpy(), expected)

    def is_written(self, index: int) -> bool:
        """Whether a held lease may have been written to since its pages were last called clean."""
        return any(
            held.run.version != self.rig.versions[index]
            for held in self.held
            if held.index == index and held.frozen is None
        )

    def at_home(self, page: int, num_bytes: int) -> Bytes:
        """Bytes of a page at its home, looked at from outside."""
        frame = int(self.rig.table.home_frame[page])
        if int(self.rig.table.home[page]) == Home.HOST:
            return self.rig.host.view(frame, num_bytes).numpy()
        assert self.rig.disk is not None
        assert self.rig.transfers._disk is not None
        for write in reversed(self.rig.transfers._disk.queue._held):
            if write.begin <= frame < write.end:
                # The ring has it as long as the disk has not.
                begin = (frame - write.begin) * PAGE
                return write.slot.memory[begin : begin + num_bytes].numpy()
        out = torch.empty(num_bytes, dtype=torch.uint8)
        self.rig.disk.inner.read(frame, out)
        return out.numpy()

    # -- invariants --------------------------------------------------------------------------------------------

    @invariant()
    def held_leases_show_their_value(self) -> None:
        """A view shows the newest bytes, or those that its segment dropped."""
        for held in self.__dict__.get("held", []):
            expected = self.newest[held.index] if held.frozen is None else held.frozen
            np.testing.assert_array_equal(held.lease.numpy(), expected)

    @invariant()
    def frames_are_resident_or_free(self) -> None:
        """Every frame belongs to one run or none, and the books say the same."""
        if not hasattr(self, "rig"):
            return
        arena = self.rig.arena
        blocks = arena._slabs[0].blocks
        taken = [block for block in blocks if block.owner is not None]
        assert sum(block.length for block in blocks) * PAGE == arena.capacity_bytes
        assert sum(block.length for block in taken) * PAGE == arena.resident_bytes <= arena.budget_bytes
        assert [block.start for block in blocks] == list(
            np.cumsum([0] + [block.length for block in blocks])[:-1]
        )
        runs = {id(run) for run in self.rig.engine.resident_runs()}
        assert {id(block.owner) for block in taken if not block.owner.orphan} == runs
        assert all(
            (block.owner.frame, block.owner.num_pages) == (block.start, block.length) for block in taken
        )

    @invariant()
    def every_page_has_one_home(self) -> None:
        """A frame in use, in host memory or on the disk, is the home of one page, and nothing else is in use."""
        if not hasattr(self, "rig"):
            return
        table, disk = self.rig.table, self.rig.disk
        assert disk is not None
        for home, tier in ((Home.HOST, self.rig.host), (Home.DISK, disk)):
            frames = table.home_frame[: table.num_pages][table.home[: table.num_pages] == home]
            assert len(set(frames.tolist())) == len(frames) == tier.used_bytes // PAGE
        assert not self.rig.engine.being_written

    @invariant()
    def pins_count_leases(self) -> None:
        """The table's pins are the runs' pins, and never negative."""
        if not hasattr(self, "rig"):
            return
        self.rig.engine.drain()
        table = self.rig.table
        expected = np.zeros_like(table.pins)
        for run in self.rig.engine.resident_runs():
            expected[run.begin : run.end] += run.pins
            assert list(table.frame[run.begin : run.end]) == list(range(run.frame, run.frame + run.num_pages))
        np.testing.assert_array_equal(table.pins, expected)
        assert sum(run.pins for run in self.rig.engine.resident_runs()) + sum(
            held.frozen is not None for held in self.held
        ) == len(self.held)


TestEngineModel = EngineModel.TestCase
TestEngineModel.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
