"""The queue of the disk: order among requests, who waits for whom, and what a failure leaves behind."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pager.device.simulated import SimulatedDevice
from pager.engine.disk_queue import DiskQueue
from pager.engine.disk_requests import Extent, Job
from pager.engine.ring import Ring
from pager.errors import PagerClosed, PagerInternalError, TierIOError
from pager.page_table import Home, PageState
from pager.statistics import Counters
from pager.tiers.adaptors import Fault, FaultyTier
from pager.tiers.disk_file import DiskFile
from pager.tiers.page_packer import PagePacker
from tests.engine_rig import PAGE, make_filled
from tests.races.gates import Gate, Worker

FRAMES = 32


class Bench:
    """A queue over a real file, with slots of two frames."""

    def __init__(
        self, folder: Path, *, inline: str | None = "late", slots: int = 4, threads: int = 2, room: int = 0
    ) -> None:
        self.device = SimulatedDevice("early")
        self.disk = FaultyTier(
            DiskFile(folder, PAGE, FRAMES, checksum=True), sleep=self._stop, latency_seconds=1
        )
        self.disk.allocate(FRAMES)
        self.ring = Ring(self.device, 2 * PAGE, slots)
        self.counters = Counters()
        self.gate: Gate | None = None
        self.queue = DiskQueue(
            self.disk,
            self.ring,
            self.device,
            self.counters,
            num_threads=threads,
            spare_room=lambda: room,
            inline=inline,
        )

    def _stop(self, seconds: float) -> None:
        if self.gate is not None:
            self.gate.stop()

    def write(self, frame: int, value: int, num_pages: int = 1, **knobs: Any) -> Any:
        """Write pages full of one value."""

        def fill(buffer: torch.Tensor, region: Any) -> None:
            buffer.fill_(value)

        return self.queue.write(frame, num_pages * PAGE, fill, **knobs)

    def begin_read(self, frame: int, num_pages: int = 1, *, urgent: bool = False) -> tuple[Job, list[int]]:
        """Begin to read pages; their first bytes come into the list."""
        found = [-1] * num_pages

        def use(offset: int, buffer: torch.Tensor, region: Any) -> None:
            for page in range(-(-buffer.numel() // PAGE)):
                found[offset // PAGE + page] = int(buffer[page * PAGE])

        job = Job(use, is_urgent=urgent)
        self.queue.read(
            job,
            [Extent(frame + at, min(2, num_pages - at) * PAGE, at * PAGE) for at in range(0, num_pages, 2)],
        )
        return job, found

    def read(self, frame: int, num_pages: int = 1) -> list[int]:
        """Read pages and wait for them."""
        job, found = self.begin_read(frame, num_pages)
        self.queue.join(job)
        return found

    def close(self) -> None:
        """End the threads and give everything back."""
        self.queue.stop()
        self.ring.close()
        self.disk.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_read_sees_the_writes_before_it_and_no_later_one(bench: Bench) -> None:
    bench.write(0, 1)
    first, found = bench.begin_read(0)
    bench.write(0, 2)
    second, later = bench.begin_read(0)
    bench.queue.settle()
    bench.queue.join(second)
    bench.queue.join(first)
    assert (found, later) == ([1], [2])
    assert bench.read(0) == [2]


def test_what_is_still_in_the_ring_is_not_read_from_the_disk(bench: Bench) -> None:
    bench.write(0, 1, 2)
    bench.queue.settle()
    bench.write(1, 5)
    bench.write(2, 6)
    assert bench.read(0, 3) == [1, 5, 6]
    assert bench.counters.disk_read_bytes == PAGE, "the one page that no slot has"
    bench.queue.settle()
    assert bench.read(0, 3) == [1, 5, 6]
    assert bench.counters.disk_read_bytes == 4 * PAGE


def test_what_moves_is_counted_and_what_compression_spares_apart(bench: Bench) -> None:
    block = 256
    file: Any = bench.disk.inner
    file._go_through_the_cache("blocks as small as these")
    file._packer = PagePacker(PAGE, FRAMES, 1, block_bytes=block)
    bench.write(0, 1, 2)
    bench.queue.settle()
    counters = bench.counters
    assert (counters.disk_write_bytes, counters.disk_saved_bytes) == (2 * block, 2 * (PAGE - block))
    assert bench.read(0, 2) == [1, 1]
    assert (counters.disk_read_bytes, counters.disk_saved_bytes) == (2 * block, 4 * (PAGE - block))


def test_a_write_of_pages_that_are_read_waits_for_the_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path, inline=None)
    bench.write(0, 1)
    bench.queue.settle()
    bench.gate = gate = Gate()
    job, found = bench.begin_read(0)
    gate.wait_until_reached()
    write = bench.write(0, 2)
    other = bench.write(5, 3)
    bench.queue.wait_for_writes([other])
    assert not write.is_done, "the read of its page is under way"
    gate.open()
    bench.queue.join(job)
    bench.queue.settle()
    assert (found, bench.read(0)) == ([1], [2])
    bench.close()


def test_two_writes_of_a_page_go_one_after_the_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, inline=None)
    bench.gate = gate = Gate()
    bench.write(0, 1)
    gate.wait_until_reached()
    second, other = bench.write(0, 2), bench.write(5, 3)
    bench.queue.wait_for_writes([other])
    assert bench.disk.calls["write"] == 2
    assert not second.is_done
    gate.open()
    bench.queue.settle()
    assert bench.read(0) == [2]
    bench.close()


def test_reads_and_writes_overlap(tmp_path: Path) -> None:
    """While one thread stands in a read the other writes, and the other way round."""
    for first, second in (("read", "write"), ("write", "read")):
        folder = tmp_path / first
        folder.mkdir()
        bench = Bench(folder, inline=None)
        bench.write(0, 1)
        bench.queue.settle()
        bench.gate = gate = Gate()
        job = bench.begin_read(0)[0] if first == "read" else None
        write = bench.write(8, 7) if first == "write" else None
        gate.wait_until_reached()
        if second == "read":
            assert bench.read(0) == [1]
            assert write is not None
            assert not write.is_done
        else:
            bench.queue.wait_for_writes([bench.write(9, 7)])
            assert job is not None
            assert not job.is_done
        gate.open()
        bench.queue.settle()
        bench.close()


def test_who_stands_still_comes_first(bench: Bench) -> None:
    order: list[int] = []
    jobs = []
    for frame in range(3):

        def use(offset: int, buffer: torch.Tensor, region: Any, frame: int = frame) -> None:
            order.append(frame)

        job = Job(use)
        bench.queue.read(job, [Extent(frame, PAGE, 0)])
        jobs.append(job)
    urgent = Job(lambda offset, buffer, region: order.append(3), is_urgent=True)
    bench.queue.read(urgent, [Extent(3, PAGE, 0)])
    bench.queue.join(jobs[2])
    while bench.queue.advance():
        pass
    assert order == [2, 3, 0, 1]


def test_writes_leave_a_slot_to_reads(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=2)
    bench.write(0, 1)
    assert bench.read(5) == [0]
    assert bench.disk.calls == {"allocate": 1, "free": 0, "read": 1, "write": 0}
    bench.write(1, 2)  # waits for the slot of the first, and does its work
    assert bench.disk.calls["write"] == 1
    bench.close()


def test_a_cancelled_job_hands_nothing_on(bench: Bench) -> None:
    finished: list[Job] = []
    job, found = bench.begin_read(0, 4)
    job.finish = finished.append
    job.cancel()
    bench.queue.join(job)
    assert (found, finished, bench.disk.calls["read"]) == ([-1] * 4, [], 0)


def test_a_failed_read_fails_its_job_and_no_other(bench: Bench) -> None:
    bench.disk.faults = (Fault(operation="read", at=2),)
    good, _ = bench.begin_read(0)
    bad, _ = bench.begin_read(2, 6)
    also_good, found = bench.begin_read(10)
    bench.queue.join(good)
    with pytest.raises(TierIOError, match="injected: cannot read"):
        bench.queue.join(bad)
    bench.queue.join(also_good)
    assert found == [0]
    assert bench.disk.calls["read"] == 3, "the rest of the failed job is not read"


def fail_writes(bench: Bench) -> None:
    bench.disk.faults = (Fault(operation="write", at=bench.disk.calls["write"] + 1, lasting=True),)


def test_a_failed_write_is_told_once_and_served_from_its_slot(bench: Bench) -> None:
    bench.write(0, 1)
    bench.queue.settle()
    fail_writes(bench)
    bench.write(0, 2)
    while bench.queue.advance():
        pass
    error = bench.queue.take_failure()
    assert isinstance(error, TierIOError)
    assert error.errno == errno.EIO
    assert bench.queue.take_failure() is None
    assert bench.read(0) == [2]
    with pytest.raises(TierIOError):
        bench.write(1, 3)
    assert bench.read(1) == [0], "what was refused is nowhere"
    bench.disk.faults = ()
    bench.write(1, 3)
    bench.queue.settle()
    assert bench.queue.take_failure() is None
    assert bench.read(0, 2) == [2, 3]
    assert bench.ring.spare_bytes == 0


def test_with_room_writes_to_a_sick_disk_are_kept_and_all_go_out_when_it_is_well(tmp_path: Path) -> None:
    bench = Bench(tmp_path, slots=3, room=6 * PAGE)
    fail_writes(bench)
    for frame in range(8):
        bench.write(frame, frame + 1)
        while bench.queue.advance():
            pass
    assert bench.ring.spare_bytes == 6 * PAGE, "two in the ring, six beyond"
    with pytest.raises(TierIOError):
        bench.write(8, 9)
    assert isinstance(bench.queue.take_failure(), TierIOError | None)  # told by the refusal
    bench.write(8, 9, must=True)
    assert bench.read(0, 9) == list(range(1, 10))
    bench.disk.faults = ()
    bench.write(9, 10)
    while bench.queue.advance():
        pass
    assert bench.queue._held == [], "one success has all the others tried again"
    assert bench.ring.spare_bytes == 0
    assert bench.read(0, 10) == list(range(1, 11))
    assert bench.counters.disk_read_bytes == 10 * PAGE
    bench.close()


def test_of_a_page_that_a_sick_disk_does_not_take_the_newest_value_is_kept(tmp_path: Path) -> None:
    """Else each step of a training that goes on would keep one more."""
    bench = Bench(tmp_path, slots=3, room=6 * PAGE)
    fail_writes(bench)
    for value in range(1, 30):
        bench.write(0, value, num_pages=2)
        while bench.queue.advance():
            pass
        bench.queue.take_failure()
    assert bench.ring.spare_bytes <= 2 * PAGE
    assert len(bench.queue._held) <= 2
    job, before = bench.begin_read(0, 2)
    bench.write(0, 30, num_pages=2)  # it comes after the read, which waits still
    bench.queue.join(job)
    assert before == [29, 29]
    assert bench.read(0, 2) == [30, 30]
    bench.disk.faults = ()
    bench.queue.settle()
    assert bench.read(0, 2) == [30, 30]
    assert bench.ring.spare_bytes == 0
    assert bench.queue._num_taken_for_writes == 0
    bench.close()


def test_a_disk_that_was_well_in_between_is_told_of_again(bench: Bench) -> None:
    for _ in range(2):
        fail_writes(bench)
        bench.write(0, 1)
        while bench.queue.advance():
            pass
        assert isinstance(bench.queue.take_failure(), TierIOError)
        bench.disk.faults = ()
        bench.queue.settle()


def test_a_write_that_was_tried_again_by_another_ends_the_sickness(tmp_path: Path) -> None:
    bench = Bench(tmp_path, room=8 * PAGE)
    for round_ in range(2):
        bench.disk.faults = (Fault(operation="write", at=bench.disk.calls["write"] + 1),)
        bench.write(0, round_)
        while bench.queue.advance():
            pass
        assert isinstance(bench.queue.take_failure(), TierIOError), f"round {round_}"
        bench.write(1, 7)  # has the failed one tried again
        while bench.queue.advance():
            pass
        assert bench.queue._held == []
    bench.close()


def test_writes_that_are_waited_for_are_given_up_when_they_fail(bench: Bench) -> None:
    fail_writes(bench)
    with pytest.raises(TierIOError):
        bench.queue.wait_for_writes([bench.write(0, 1), bench.write(2, 1)])
    assert bench.queue._held == []
    assert bench.queue.take_failure() is None
    assert bench.read(0) == [0]


def test_dropped_pages_are_not_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, inline=None, threads=1)
    bench.gate = gate = Gate()
    bench.write(0, 1)
    gate.wait_until_reached()
    waiting = bench.write(2, 1)
    bench.queue.drop(2, 2)
    assert waiting.is_done
    dropper = Worker(lambda: bench.queue.drop(0, 1))
    gate.open()
    dropper.result()
    bench.queue.settle()
    assert bench.disk.calls["write"] == 1
    assert bench.queue._num_taken_for_writes == 0
    bench.close()


def test_after_stop_nothing_is_taken(bench: Bench) -> None:
    bench.write(0, 1)
    bench.queue.stop()
    with pytest.raises(PagerClosed):
        bench.write(1, 1)
    with pytest.raises(PagerClosed):
        bench.read(0)
    with pytest.raises(PagerClosed):
        bench.queue.settle()


def test_a_wait_for_nothing_is_a_bug_and_does_not_hang(bench: Bench) -> None:
    with pytest.raises(PagerInternalError, match="waits for nothing"):
        bench.queue._wait_until(bool)


def test_threads_end_with_who_holds_the_queue(tmp_path: Path) -> None:
    rig, values = make_filled(
        [PAGE], arena_frames=1, homes=[Home.DISK], disk_folder=tmp_path, disk_inline=None
    )
    np.testing.assert_array_equal(rig.read(0), values[0])
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("pager-disk")]
    assert len(threads) == 3
    del rig
    import gc

    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


# -- the engine over it ----------------------------------------------------------------------------------------------


def test_nobody_waits_for_a_page_that_is_not_needed_now(tmp_path: Path) -> None:
    """The disk stands still: pages go out and come in all the same, until one is needed that only the disk has."""
    rig, values = make_filled(
        [PAGE] * 4,
        arena_frames=3,
        homes=[Home.DISK] * 4,
        disk_folder=tmp_path,
        disk_inline=None,
        streams="early",
    )
    for index in (0, 1):
        rig.overwrite(index, ~values[index])
    assert rig.disk is not None
    gate = Gate()
    rig.disk._latency_seconds = 1.0

    def stand_still(seconds: float) -> None:
        gate.stop()
        gate.opened.wait(20)

    rig.disk._sleep = stand_still
    rig.evict(0, 1)
    assert rig.arena.resident_bytes == 0, "frames are free as soon as the ring has their bytes"
    assert rig.prefetch(2)
    np.testing.assert_array_equal(rig.read(0), ~values[0])  # from the ring
    assert rig.counters.stall_seconds < 5
    assert rig.state(2) == [PageState.ARRIVING]
    reader = Worker(lambda: rig.read(2))
    assert reader.is_running
    gate.open()
    np.testing.assert_array_equal(reader.result(), values[2])
    assert rig.counters.minor_faults == 1
    rig.transfers.settle()
    np.testing.assert_array_equal(rig.home_value(1), ~values[1])
    rig.close()


def test_a_page_on_its_way_comes_first_once_somebody_stands_still_for_it(tmp_path: Path) -> None:
    rig, values = make_filled(
        [PAGE] * 3, arena_frames=3, homes=[Home.DISK] * 3, disk_folder=tmp_path, disk_inline="late"
    )
    assert rig.disk is not None
    for index in range(3):
        assert rig.prefetch(index)
    np.testing.assert_array_equal(rig.read(2), values[2])
    assert rig.disk.calls["read"] == 1
    assert rig.state(0) == rig.state(1) == [PageState.ARRIVING]
    for index in (0, 1):
        np.testing.assert_array_equal(rig.read(index), values[index])
    rig.close()


def test_a_prefetch_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    rig, values = make_filled(
        [PAGE], arena_frames=1, homes=[Home.DISK], disk_folder=tmp_path, disk_inline=None
    )
    assert rig.disk is not None
    told = threading.Event()

    def tell(error: BaseException) -> None:
        rig.engine.fail(error)
        told.set()

    rig.engine.on_late_failure = tell
    rig.disk.faults = (Fault(operation="read", at=rig.disk.calls["read"] + 1),)
    assert rig.prefetch(0)
    assert told.wait(20)
    assert rig.state(0) == [PageState.ABSENT]
    assert (rig.engine.num_prefetched_extents, rig.engine.moves, rig.arena.resident_bytes) == (0, 0, 0)
    with pytest.raises(TierIOError, match="injected: cannot read"):
        rig.read(0)
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()
