"""Host memory: its exact size, page-locking and what happens without, and how long views live."""

from __future__ import annotations

import gc
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pager.device.simulated import SimulatedDevice
from pager.errors import PagerInternalError, TierError, TierFull
from pager.tiers import host_arena
from pager.tiers.host_arena import HostArena

PAGE = 16384


class RecordingDevice(SimulatedDevice):
    """Notes what is registered; ``refuse`` makes every registration from that one on fail."""

    def __init__(self, refuse: int | None = None) -> None:
        super().__init__()
        self.registered: dict[int, int] = {}
        self.num_calls = 0
        self.refuse = refuse

    def register_host(self, address: int, num_bytes: int) -> None:
        self.num_calls += 1
        if self.refuse is not None and self.num_calls >= self.refuse:
            raise TierError("cudaHostRegister refused 1 GiB: CUDA error 2")
        super().register_host(address, num_bytes)
        assert address not in self.registered
        self.registered[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        super().unregister_host(address)
        del self.registered[address]


def make_arena(num_frames: int, device: SimulatedDevice | None = None, **options: int) -> HostArena:
    arena = HostArena(PAGE, device or RecordingDevice(), options.pop("budget_bytes", 1 << 40), **options)
    arena.grow(num_frames)
    return arena


def mapped_bytes(address: int) -> int | None:
    """Size of the mapping that begins at ``address``, as the kernel has it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return end - begin
    return None


def test_locked_bytes_are_within_one_percent_of_what_is_asked() -> None:
    """Case 1: a (18944, 3584) fp16 tensor; a power of two would be 256 MiB."""
    num_bytes = 18944 * 3584 * 2
    device = RecordingDevice()
    arena = make_arena(-(-num_bytes // PAGE), device)
    assert num_bytes <= arena.locked_bytes <= 1.01 * num_bytes
    assert sum(device.registered.values()) == arena.locked_bytes == arena.reserved_bytes
    arena.close()
    assert device.registered == {}


def test_pieces_are_limited_and_ranges_stay_inside_one() -> None:
    device = RecordingDevice()
    arena = make_arena(10, device, max_piece_bytes=4 * PAGE)
    assert sorted(device.registered.values()) == [2 * PAGE, 4 * PAGE, 4 * PAGE]
    assert arena.largest_free == 4
    with pytest.raises(
        TierFull,
        match=r"no run of 5 frames of 16.00 KiB; 10 of 10 are free, 4 at most in a row; .*; raise host_budget",
    ):
        arena.allocate(5)
    firsts = [arena.allocate(size) for size in (4, 4, 2)]
    for first, size in zip(firsts, (4, 4, 2), strict=True):
        arena.view(first, size * PAGE).fill_(first + 1)
    assert [int(arena.view(frame, 1)[0]) for frame in range(10)] == [1] * 4 + [5] * 4 + [9] * 2
    with pytest.raises(PagerInternalError, match="not in one piece"):
        arena.view(3, 2 * PAGE)
    arena.close()


def test_the_limit_of_a_piece_is_64_gib() -> None:
    assert host_arena.MAX_PIECE_BYTES == 64 * 2**30
    assert HostArena(PAGE, RecordingDevice(), 1)._frames_per_piece * PAGE == 64 * 2**30


def test_growing_adds_frames_with_new_numbers() -> None:
    arena = make_arena(2)
    first = arena.allocate(2)
    arena.view(first, 2 * PAGE).fill_(7)
    arena.grow(3)
    second = arena.allocate(3)
    arena.view(second, 3 * PAGE).fill_(8)
    assert int(arena.view(first, 2 * PAGE).sum()) == 7 * 2 * PAGE
    assert (arena.num_frames, arena.reserved_bytes, arena.used_bytes) == (5, 5 * PAGE, 5 * PAGE)
    arena.close()


def test_the_budget_is_hard() -> None:
    device = RecordingDevice()
    arena = make_arena(3, device, budget_bytes=5 * PAGE)
    with pytest.raises(
        TierFull, match=r"host: 48.00 KiB more than the 48.00 KiB .* host budget of 80.00 KiB"
    ):
        arena.grow(3)
    assert (arena.reserved_bytes, len(device.registered)) == (3 * PAGE, 1)
    arena.grow(2)
    assert arena.peak_reserved_bytes == 5 * PAGE
    arena.close()


def test_memory_that_the_system_does_not_give_is_tier_full() -> None:
    arena = HostArena(PAGE, RecordingDevice(), 1 << 62, max_piece_bytes=1 << 62)
    with pytest.raises(TierFull, match="the system gives no .*; lower host_budget"):
        arena.grow((1 << 61) // PAGE)
    assert arena.reserved_bytes == 0
    arena.grow(1)
    arena.close()
    assert arena.peak_reserved_bytes == PAGE


def test_without_page_locking_it_warns_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Case 3: the first piece is locked, the others are refused."""
    device = RecordingDevice(refuse=2)
    with caplog.at_level(logging.WARNING, "pager"):
        arena = make_arena(10, device, max_piece_bytes=4 * PAGE)
        arena.grow(4)
    assert len(caplog.records) == 1
    assert "CUDA error 2" in caplog.text
    assert "8 instead of 55 GB/s" in caplog.text
    assert (arena.locked_bytes, arena.reserved_bytes) == (4 * PAGE, 14 * PAGE)
    first = arena.allocate(4)
    arena.view(first, 4 * PAGE).fill_(1)
    arena.close()
    assert device.registered == {}


def test_an_unexpected_error_while_growing_undoes_it() -> None:
    device = RecordingDevice()
    arena = HostArena(PAGE, device, 20 * PAGE, max_piece_bytes=4 * PAGE)
    original = device.register_host

    def interrupted(address: int, num_bytes: int) -> None:
        if len(device.registered) == 1:
            raise KeyboardInterrupt
        original(address, num_bytes)

    device.register_host = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        arena.grow(10)
    assert (device.registered, arena.reserved_bytes) == ({}, 0)
    device.register_host = original  # type: ignore[method-assign]
    arena.grow(20)
    arena.close()


def test_a_long_registration_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Case 6, with the second shortened and the registration held until the line is there."""
    seen = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.set()

    class SlowDevice(RecordingDevice):
        def register_host(self, address: int, num_bytes: int) -> None:
            assert seen.wait(20)
            super().register_host(address, num_bytes)

    logger, handler = logging.getLogger("pager.tiers.host_arena"), Handler()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "pager"):
            arena = HostArena(PAGE, SlowDevice(), 1 << 30, progress_after_seconds=0.001)
            arena.grow(64)
            arena.close()
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage()[:35] for record in caplog.records] == ["page-locking 1.00 MiB of host memor"]


def test_a_short_registration_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pager"):
        make_arena(4).close()
    assert caplog.records == []


def test_views_alias_the_arena_and_keep_it_mapped_after_close() -> None:
    arena = make_arena(8)
    first = arena.allocate(8)
    view = arena.view(first + 1, 2 * PAGE)
    address = view.data_ptr()
    assert address == arena.view(first, 1).data_ptr() + PAGE
    view.fill_(3)
    assert int(arena.view(first + 1, 1)[0]) == 3
    deeper = view.view(torch.float32).view(64, -1)[1:]
    arena.close()
    del view, arena
    gc.collect()
    assert mapped_bytes(address) is not None
    assert int(deeper.view(torch.uint8).to(torch.int64).sum()) == 3 * (2 * PAGE - 2 * PAGE // 64)


def test_close_and_trim_give_the_memory_back_to_the_system() -> None:
    num_frames = 4096  # 64 MiB: large enough that no other mapping takes its place unseen
    device = RecordingDevice()
    arena = make_arena(num_frames, device)
    address = arena.view(0, 1).data_ptr()
    size = mapped_bytes(address)
    assert size is not None
    assert size >= num_frames * PAGE
    kept = arena.allocate(1)
    assert arena.trim() == 0
    arena.free(kept, 1)
    assert arena.trim() == num_frames * PAGE
    gc.collect()
    left = mapped_bytes(address)
    assert left is None or left < num_frames * PAGE
    assert (arena.reserved_bytes, device.registered) == (0, {})
    arena.grow(1)
    assert arena.allocate(1) == num_frames
    arena.close()


def test_trim_keeps_pieces_in_use() -> None:
    device = RecordingDevice()
    arena = make_arena(12, device, max_piece_bytes=4 * PAGE)
    first, second = arena.allocate(4), arena.allocate(4)
    arena.view(second, 4 * PAGE).fill_(9)
    arena.free(first, 4)
    assert arena.trim() == 8 * PAGE
    assert int(arena.view(second, 1)[0]) == 9
    with pytest.raises(PagerInternalError):
        arena.view(first, 1)
    assert list(device.registered.values()) == [4 * PAGE]
    arena.close()


def resident_kib(address: int, num_bytes: int) -> int:
    """KiB of the mappings in this range that the process has, as the kernel counts them."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            inside = begin < address + num_bytes and address < end
        elif inside and fields[0] == "Rss:":
            total += int(fields[1])
    return total


@pytest.mark.parametrize("refuse", [None, 1])
def test_shrinking_gives_the_system_what_lies_between_homes(refuse: int | None) -> None:
    """Registered or not: nothing moves, the rest stays registered piece by piece, and the memory really goes."""
    num_frames = 4096  # 64 MiB
    device = RecordingDevice(refuse)
    arena = make_arena(num_frames, device)
    homes = [arena.allocate(size) for size in (100, 2000, 50, 1900, 46)]
    base = arena.view(0, 1).data_ptr()
    for number, (frame, size) in enumerate(zip(homes, (100, 2000, 50, 1900, 46), strict=True), 1):
        arena.view(frame, size * PAGE).fill_(number)
    kept = arena.view(homes[2], 50 * PAGE)
    assert arena.untouched_bytes == 0
    arena.free(homes[1], 2000)
    arena.free(homes[3], 1900)
    before = resident_kib(base, num_frames * PAGE)
    assert arena.shrink() == 3900 * PAGE
    left = 196 * PAGE
    # Beside it, at most the zeros of a huge page at each border.
    assert before - resident_kib(base, num_frames * PAGE) >= (3900 * PAGE - 8 * 2**21) // 1024
    assert (arena.reserved_bytes, arena.used_bytes, arena.largest_free) == (left, left, 0)
    assert arena.locked_bytes == (left if refuse is None else 0)
    assert sorted(device.registered.values()) == (
        [46 * PAGE, 50 * PAGE, 100 * PAGE] if refuse is None else []
    )
    for number, frame, size in ((1, homes[0], 100), (3, homes[2], 50), (5, homes[4], 46)):
        assert arena.view(frame, size * PAGE).unique().tolist() == [number]
        assert arena.view(frame, 1).data_ptr() == base + frame * PAGE
    kept.fill_(9)
    assert arena.view(homes[2], PAGE).unique().tolist() == [9]
    with pytest.raises(PagerInternalError, match="not in one piece"):
        arena.view(homes[1], 1)
    assert arena.shrink() == 0
    arena.free(homes[2], 50)
    assert arena.shrink() == 50 * PAGE
    arena.free(homes[0] + 10, 20)
    assert arena.shrink() == 20 * PAGE, "a piece that was cut can be cut again"
    assert arena.view(homes[0] + 30, PAGE).unique().tolist() == [1]
    arena.grow(3)
    assert arena.allocate(3) == arena.end_frame - 3 == num_frames
    arena.close()
    assert device.registered == {}


def test_what_is_cut_out_is_given_back_whoever_holds_the_rest_of_the_mapping() -> None:
    """A piece that was cut goes with its frames, though the mapping lives on, with a home that a user has a view of."""
    arena = make_arena(2048)
    first, second = arena.allocate(1000), arena.allocate(1000)
    arena.view(first, 1000 * PAGE).fill_(1)
    arena.view(second, 1000 * PAGE).fill_(2)
    users = arena.view(second, 1000 * PAGE).view(torch.float32)
    arena.free(first + 990, 10)
    assert arena.shrink() == 58 * PAGE
    arena.free(first, 990)
    address = users.data_ptr() - 1000 * PAGE
    before = resident_kib(address, 2000 * PAGE)
    assert arena.trim() == 990 * PAGE
    assert before - resident_kib(address, 2000 * PAGE) >= (990 * PAGE - 4 * 2**21) // 1024
    arena.close()
    assert users.view(torch.uint8).unique().tolist() == [2]


def test_what_was_never_written_to_is_not_there_yet() -> None:
    arena = make_arena(256, SimulatedDevice())
    assert arena.untouched_bytes == 256 * PAGE
    arena.view(arena.allocate(256), 256 * PAGE).fill_(1)
    assert arena.untouched_bytes == 0
    arena.close()


def test_memory_that_the_user_locked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlockall` lets the system take nothing back: the frames are gone, the memory is not."""
    arena = make_arena(8)
    kept = arena.allocate(4)
    arena.view(kept, PAGE).fill_(5)

    class Locked:
        def __init__(self, mapping: object) -> None:
            self.mapping = mapping

        def madvise(self, *arguments: int) -> None:
            raise OSError(22, "Invalid argument")

        def __len__(self) -> int:
            return 8 * PAGE

    piece = arena._pieces[0]
    arena._pieces[0] = replace(piece, mapping=Locked(piece.mapping))  # type: ignore[arg-type]
    assert arena.shrink() == 0
    assert arena.reserved_bytes == 4 * PAGE
    assert arena.view(kept, PAGE).unique().tolist() == [5]
    arena.close()


@pytest.mark.parametrize("page_size", [0, -1, 1000, 4097])
def test_pages_are_whole_pages_of_the_system(page_size: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        HostArena(page_size, RecordingDevice(), 1 << 20)


def test_copies_between_arena_and_slab_need_no_living_view() -> None:
    device = SimulatedDevice("late")
    arena = make_arena(2, device)
    slab = device.allocate_slab(2 * PAGE)
    first = arena.allocate(2)
    arena.view(first, 2 * PAGE).fill_(4)
    device.h2d.copy(slab, arena.view(first, 2 * PAGE), reads=None, writes=None)
    device.h2d.synchronize()
    assert int(slab.to(torch.int64).sum()) == 4 * 2 * PAGE
    arena.close()


def test_frames_of_two_pieces_are_not_side_by_side() -> None:
    """A device copies them in two."""
    arena = make_arena(4)
    arena.grow(3)
    assert arena.is_one_piece(0, 4)
    assert arena.is_one_piece(5, 2)
    assert not arena.is_one_piece(3, 2)
    assert not arena.is_one_piece(7, 1), "there is no such frame"
    arena.close()
