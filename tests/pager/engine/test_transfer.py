"""Bytes between the device and their homes: which copies, in which extents, ordered how, counted where."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pager.device.simulated import SimulatedStream
from pager.engine.run import Run
from pager.engine.staging import Range
from pager.errors import CorruptPage, TierIOError
from pager.page_table import Home, PageState
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Rig, make_filled

LOWER = [Home.HOST, Home.DISK]


def make_rig(home: Home, folder: Path, *sizes: int, **knobs: Any) -> tuple[Rig, list[np.ndarray]]:
    """A rig with room for everything and all homes in one tier."""
    frames = sum(-(-size // PAGE) for size in sizes)
    return make_filled(sizes, arena_frames=frames, homes=[home] * len(sizes), disk_folder=folder, **knobs)


def h2d_of(rig: Rig) -> SimulatedStream:
    """The stream towards the device."""
    stream = rig.device.h2d
    assert isinstance(stream, SimulatedStream)
    return stream


@pytest.mark.parametrize("home", LOWER)
@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, 2 * PAGE + 7])
def test_a_round_trip_of_any_size(home: Home, size: int, tmp_path: Path) -> None:
    rig, values = make_rig(home, tmp_path, size)
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.write(0, ~values[0])
    rig.evict(0)
    assert rig.state(0) == [PageState.ABSENT] * rig.segments[0].num_pages
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    assert (rig.counters.page_in_bytes, rig.counters.page_out_bytes) == (2 * size, size)
    on_disk = home is Home.DISK
    assert rig.counters.disk_read_bytes == (2 * size if on_disk else 0)
    assert rig.counters.disk_write_bytes == (2 * size if on_disk else 0), "the store, and the page out"
    rig.close()


@pytest.mark.parametrize(("home", "num_copies"), [(Home.HOST, 1), (Home.DISK, 3)])
def test_a_run_goes_in_one_copy_or_in_extents_of_the_disk(
    home: Home, num_copies: int, tmp_path: Path
) -> None:
    rig, values = make_rig(home, tmp_path, 5 * PAGE + 9, ring=(2, 4))
    puts = h2d_of(rig).num_put
    np.testing.assert_array_equal(rig.read(0), values[0])
    copies = h2d_of(rig).num_put - puts
    assert copies == 1 if num_copies == 1 else copies >= num_copies
    rig.write(0, ~values[0])
    rig.evict(0)
    np.testing.assert_array_equal(rig.home_value(0), ~values[0])
    rig.close()


def test_a_part_of_a_segment_goes_to_its_part_of_the_home(tmp_path: Path) -> None:
    rig, values = make_rig(Home.HOST, tmp_path, 4 * PAGE)
    run, lease = rig.lease(0, pages=(1, 2))
    np.testing.assert_array_equal(lease.numpy(), values[0][PAGE : 3 * PAGE])
    lease.fill_(9)
    rig.engine.mark_dirty(run)
    del lease
    rig.evict(0)
    expected = values[0].copy()
    expected[PAGE : 3 * PAGE] = 9
    np.testing.assert_array_equal(rig.home_value(0), expected)
    rig.close()


def test_the_bytes_of_a_host_home_are_the_home_itself(tmp_path: Path) -> None:
    rig, values = make_rig(Home.HOST, tmp_path, PAGE)
    view = rig.transfers.home_bytes(rig.segments[0], write=True)
    assert view is not None
    view.copy_(torch.from_numpy(~values[0]))
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    rig.close()


def test_a_disk_home_is_read_as_a_copy(tmp_path: Path) -> None:
    rig, values = make_rig(Home.DISK, tmp_path, 2 * PAGE + 5)
    assert rig.transfers.home_bytes(rig.segments[0], write=False) is None
    copy = rig.transfers.read_disk_home(rig.segments[0])
    copy.fill_(0)
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()


def test_the_disks_time_is_stall(tmp_path: Path) -> None:
    rig, _ = make_rig(Home.DISK, tmp_path, PAGE)
    before = rig.counters.stall_seconds
    rig.read(0)
    assert rig.counters.stall_seconds > before
    rig.close()


def test_a_failed_read_leaves_the_page_absent_and_its_frames_free(tmp_path: Path) -> None:
    rig, values = make_rig(Home.DISK, tmp_path, 3 * PAGE)
    assert rig.disk is not None
    rig.disk.faults = (Fault(operation="read", at=1),)
    with pytest.raises(TierIOError, match="injected: cannot read"):
        rig.read(0)
    assert rig.state(0) == [PageState.ABSENT] * 3
    assert rig.arena.resident_bytes == 0
    assert rig.engine.moves == 0
    np.testing.assert_array_equal(rig.read(0), values[0])
    rig.close()


def test_a_failed_write_keeps_the_page_in_the_ring(tmp_path: Path) -> None:
    rig, values = make_rig(Home.DISK, tmp_path, PAGE, PAGE)
    assert rig.disk is not None
    rig.write(0, ~values[0])
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1, num_bytes=100, lasting=True),)
    rig.evict(0)
    with pytest.raises(TierIOError, match="injected: cannot write") as info:
        rig.read(1)
    assert (info.value.errno, info.value.filename) == (errno.EIO, "faulty tier")
    np.testing.assert_array_equal(rig.read(0), ~values[0])
    with pytest.raises(TierIOError, match="injected: cannot write"):
        rig.transfers.settle()
    rig.disk.faults = ()
    rig.write(1, ~values[1])
    rig.evict(0, 1)
    rig.transfers.settle()
    for index in (0, 1):
        np.testing.assert_array_equal(rig.home_value(index), ~values[index])
    rig.close()


def test_bytes_that_came_back_wrong_are_not_used(tmp_path: Path) -> None:
    rig, values = make_rig(Home.DISK, tmp_path, PAGE)
    assert rig.disk is not None
    rig.write(0, ~values[0])
    # The file takes the checksum of what it was given, so the wrong byte goes in behind it.
    rig.evict(0)
    frame = int(rig.table.home_frame[0])
    fd = os.open(f"/proc/self/fd/{rig.disk._fd}", os.O_RDWR)
    os.pwrite(fd, values[0].tobytes(), frame * PAGE)
    os.close(fd)
    with pytest.raises(CorruptPage):
        rig.read(0)
    assert rig.state(0) == [PageState.ABSENT]
    rig.close()


def test_forgetting_a_segment_twice_is_nothing(tmp_path: Path) -> None:
    rig, _ = make_rig(Home.HOST, tmp_path, PAGE)
    rig.read(0)
    for _ in range(2):
        rig.transfers.forget(rig.segments[0])
    assert h2d_of(rig).num_pending == 0
    rig.close()


def test_last_events_imply_all_that_use_a_run() -> None:
    rig, _ = make_filled([PAGE], arena_frames=1)
    run, lease = rig.lease(0)
    assert isinstance(run, Run)
    ready = run.ready
    assert ready is not None
    del lease
    rig.engine.drain()
    assert run.last_events() == {0: run.uses[0], ready.stream.index: ready}
    rig.close()


def test_a_new_value_does_not_wait_for_an_old_one_that_failed(tmp_path: Path) -> None:
    """A write waits for earlier ones of its frames: also for one that nobody tries again, if it is not dropped."""
    rig, values = make_rig(Home.DISK, tmp_path, PAGE, spare_pages=8)
    assert rig.disk is not None
    rig.write(0, ~values[0])
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1),)
    rig.evict(0)
    rig.store(0, values[0])
    rig.transfers.settle()
    np.testing.assert_array_equal(rig.home_value(0), values[0])
    rig.close()


def test_two_threads_that_write_parts_of_a_home_on_two_streams_are_both_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot sends the first page home just while the second one is written back: each on its own stream."""
    rig, values = make_filled([2 * PAGE], arena_frames=3, poison=False)
    staging, unit, segment = rig.engine.staging, object(), rig.segments[0]
    assert staging.reserve(1, 1) == 1
    new = ~values[0]
    _, lease = rig.lease(0, overwrite=True, pages=(1, 1))
    lease.copy_(torch.from_numpy(new[PAGE:]))
    del lease
    copy = rig.device.d2h.copy

    def meanwhile(*args: Any, **kwargs: Any) -> None:
        copy(*args, **kwargs)
        monkeypatch.undo()
        runs = staging.take(unit, [Range(segment, 0, 1)])
        assert runs is not None
        staging.bytes_of(runs[0]).copy_(torch.from_numpy(new[:PAGE]))
        staging.write_back(unit, runs)

    monkeypatch.setattr(rig.device.d2h, "copy", meanwhile)
    rig.evict(0)
    np.testing.assert_array_equal(rig.read(0), new)
    rig.close()


def test_what_is_known_of_a_homes_copies_does_not_change_under_who_reads_it() -> None:
    """Another thread may be walking over it."""
    rig, _ = make_filled([PAGE], arena_frames=2)
    staging, unit, segment = rig.engine.staging, object(), rig.segments[0]
    assert staging.reserve(1, 1) == 1
    rig.read(0)
    rig.evict(0)
    before = rig.transfers._home_read[segment.index]
    seen = dict(before)
    assert staging.fetch(unit, [Range(segment, 0, 1)])
    assert before == seen
    assert len(rig.transfers._home_read[segment.index]) == 2
    staging.give_back(unit)
    rig.close()


def test_gradients_on_their_way_home_take_no_more_memory_than_they_may(tmp_path: Path) -> None:
    """However far the host is ahead of the link: late streams copy nothing before somebody waits for it."""
    sizes = [PAGE, 2 * PAGE, PAGE, 3 * PAGE, PAGE, PAGE]
    rig, values = make_rig(Home.HOST, tmp_path, *sizes)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    for segment, value in zip(rig.segments, values, strict=True):
        gradient = torch.from_numpy(~value)
        kept.append(weakref.ref(gradient))
        rig.transfers.send_home(segment, gradient, at_most_bytes=3 * PAGE)
        del gradient
        alive.append(sum(size for size, ref in zip(sizes, kept, strict=False) if ref() is not None) // PAGE)
    assert alive == [1, 3, 3, 3, 1, 2], "all that fit, and the newest in any case"
    for index, value in enumerate(values):
        np.testing.assert_array_equal(rig.home_value(index), ~value)
    rig.transfers.forget_sent()
    assert not any(ref() is not None for ref in kept)
    rig.close()


def test_two_threads_let_go_of_a_gradient_once(tmp_path: Path) -> None:
    """The user's, that trains on, and autograd's, that sends the next one."""
    rig, values = make_rig(Home.HOST, tmp_path, PAGE, PAGE)
    rig.transfers.send_home(rig.segments[0], torch.from_numpy(~values[0]), at_most_bytes=PAGE)
    rig.transfers._sent[0].event.synchronize()
    other_is_done, errors = threading.Event(), []

    def let_go() -> None:
        try:
            rig.transfers.forget_sent()
        except IndexError as error:
            errors.append(error)
        other_is_done.set()

    other = threading.Thread(target=let_go)

    class Over:
        """An event that is over; between the look and the deed of one thread comes the other, if it can."""

        def query(self) -> bool:
            if threading.current_thread() is not other:
                other.start()
                other_is_done.wait(0.5)
            return True

    over: Any = Over()
    rig.transfers._sent[0] = rig.transfers._sent[0]._replace(event=over)
    rig.transfers.forget_sent()
    other.join()
    assert not errors
    assert (len(rig.transfers._sent), rig.transfers._sent_bytes) == (0, 0)
    rig.close()
