"""The paging file with compression: the same bytes through fewer blocks, in every way that the system can refuse."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pager.errors import CorruptPage, TierIOError
from pager.tiers import disk_file
from pager.tiers.disk_file import BLOCK_BYTES, DiskFile
from pager.tiers.disk_probe import EXTENT_BYTES, measure_rate
from tests.tiers.test_disk_file import fail, make_bytes, make_system, turn_byte

PAGE = 32 * 2**10
# Of a page of bf16 numbers, as `make_numbers` makes them.
PACKED = 6 * BLOCK_BYTES


def make_numbers(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """bf16 numbers as bytes: what shrinks."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(-(-num_bytes // 2), generator=generator).bfloat16()
    return numbers.view(torch.uint8)[:num_bytes].clone()


def make_file(folder: Path, num_frames: int = 8, **knobs: Any) -> DiskFile:
    return DiskFile(folder, PAGE, num_frames, compression=1, **knobs)


def read(file: DiskFile, first: int, num_bytes: int) -> torch.Tensor:
    out = torch.zeros(num_bytes, dtype=torch.uint8)
    file.read(first, out)
    return out


def watch_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(what, offset, bytes) of each call of the system's."""
    calls: list[tuple[str, int, int]] = []

    def watched(what: str, call: Callable[..., int]) -> Callable[..., int]:
        def move(file: DiskFile, view: memoryview, offset: int) -> int:
            calls.append((what, offset, len(view)))
            return call(file, view, offset)

        return move

    monkeypatch.setattr(DiskFile, "_pread", watched("read", DiskFile._pread))
    monkeypatch.setattr(DiskFile, "_pwrite", watched("write", DiskFile._pwrite))
    return calls


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_packed_pages_keep_their_places_and_plain_neighbours_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, checksum: bool
) -> None:
    file = make_file(tmp_path, direct=direct, checksum=checksum)
    file.allocate(1)
    first = file.allocate(7)
    noise, numbers = make_bytes(2 * PAGE), make_numbers(PAGE)
    data = torch.cat([noise, numbers, numbers, noise[:PAGE], numbers, noise[: PAGE // 2]])
    calls = watch_calls(monkeypatch)
    places = [(0, 2 * PAGE), (2, PACKED), (3, PACKED), (4, PAGE), (5, PACKED), (6, PAGE // 2)]
    moved = sum(num_bytes for _, num_bytes in places)
    assert file.write(first, data) == moved
    assert calls == [("write", (first + place) * PAGE, num_bytes) for place, num_bytes in places]
    calls.clear()
    out = torch.zeros_like(data)
    assert file.read(first, out) == moved
    assert torch.equal(out, data)
    assert calls == [("read", (first + place) * PAGE, num_bytes) for place, num_bytes in places]
    file.close()


def test_parts_of_a_range_are_read_and_written(tmp_path: Path) -> None:
    """A page is one of its own: what stands beside it is neither read nor written."""
    file = make_file(tmp_path, checksum=True)
    first, data = file.allocate(4), make_numbers(4 * PAGE)
    file.write(first, data)
    for new in (make_numbers(PAGE, seed=1), make_bytes(PAGE), make_numbers(2 * PAGE, seed=2)):
        file.write(first + 1, new)
        data[PAGE : PAGE + len(new)] = new
        assert torch.equal(read(file, first, 4 * PAGE), data)
    assert torch.equal(read(file, first + 2, PAGE + 10), data[2 * PAGE : 3 * PAGE + 10])
    assert torch.equal(read(file, first + 3, 7), data[3 * PAGE : 3 * PAGE + 7])
    file.close()


def test_a_page_that_was_packed_is_plain_when_it_no_longer_shrinks(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    first = file.allocate(1)
    for data, moved in ((make_numbers(PAGE), PACKED), (make_bytes(PAGE), PAGE), (make_numbers(PAGE), PACKED)):
        assert file.write(first, data) == moved
        assert torch.equal(read(file, first, PAGE), data)
    file.close()


@pytest.mark.parametrize("num_bytes", [1, 100, BLOCK_BYTES, PAGE - 1, PAGE + 1, 2 * PAGE + 3 * BLOCK_BYTES])
@pytest.mark.parametrize("direct", [True, False])
def test_lengths_that_are_no_pages(tmp_path: Path, num_bytes: int, direct: bool) -> None:
    file = make_file(tmp_path, direct=direct, checksum=True)
    first, data = file.allocate(3), make_numbers(num_bytes)
    file.write(first, make_numbers(3 * PAGE, seed=1))
    file.write(first, data)
    assert torch.equal(read(file, first, num_bytes), data)
    file.close()


@pytest.mark.parametrize("step", [1, 1000, 5000, PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_short_counts_are_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, direct: bool
) -> None:
    make_system(
        monkeypatch,
        preadv=lambda fd, views, offset: os.preadv(fd, views, offset) and min(step, len(views[0])),
        pwritev=lambda fd, views, offset: os.pwritev(fd, views, offset) and min(step, len(views[0])),
    )
    file = make_file(tmp_path, direct=direct, checksum=True)
    first, data = file.allocate(2), torch.cat([make_numbers(PAGE), make_bytes(PAGE)])
    file.write(first, data)
    assert torch.equal(read(file, first, 2 * PAGE), data)
    file.close()


@pytest.mark.parametrize("checksum", [True, False])
def test_damage_in_a_packed_page_is_corrupt_with_path_and_place(tmp_path: Path, checksum: bool) -> None:
    file = make_file(tmp_path, checksum=checksum)
    file.allocate(2)
    first = file.allocate(3)
    data = make_numbers(3 * PAGE)
    file.write(first, data)
    frame = first + 1
    turn_byte(file, frame * PAGE + 8)  # the length of a plane
    with pytest.raises(CorruptPage, match=f"frame {frame} .*, at byte {frame * PAGE} of .*unpacked") as info:
        read(file, first, 3 * PAGE)
    assert str(tmp_path) in str(info.value)
    assert torch.equal(read(file, first, PAGE), data[:PAGE]), "its neighbours are well"
    turn_byte(file, frame * PAGE + 8)
    assert torch.equal(read(file, first, 3 * PAGE), data)
    file.close()


@pytest.mark.parametrize("offset", [0, 20, 5000, PACKED - BLOCK_BYTES])
def test_one_wrong_bit_is_found_and_the_frame_named(tmp_path: Path, offset: int) -> None:
    """The checksum is that of the plain bytes: it finds what unpacks well and is wrong."""
    file = make_file(tmp_path, checksum=True)
    first = file.allocate(2)
    file.write(first, make_numbers(2 * PAGE))
    turn_byte(file, PAGE + offset)
    with pytest.raises(CorruptPage, match="frame 1 "):
        read(file, first, 2 * PAGE)
    file.close()


@pytest.mark.parametrize("old", [make_numbers, make_bytes])
@pytest.mark.parametrize("new", [make_numbers, make_bytes])
@pytest.mark.parametrize("num_written", [0, BLOCK_BYTES, PAGE])
def test_a_page_torn_by_a_failed_write_is_corrupt_until_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: Any, new: Any, num_written: int
) -> None:
    file = make_file(tmp_path, checksum=True)
    first = file.allocate(2)
    file.write(first, old(2 * PAGE))
    left = num_written

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = os.pwritev(fd, [views[0][:left]], offset)
        left -= count
        return count

    make_system(monkeypatch, pwritev=pwritev)
    with pytest.raises(TierIOError):
        file.write(first, new(2 * PAGE, seed=1))
    monkeypatch.undo()
    if num_written:
        with pytest.raises(CorruptPage, match="frame 0 "):
            read(file, first, 2 * PAGE)
    else:
        assert torch.equal(read(file, first, 2 * PAGE), old(2 * PAGE))
    file.write(first, new(2 * PAGE, seed=2))
    assert torch.equal(read(file, first, 2 * PAGE), new(2 * PAGE, seed=2))
    file.close()


def test_errors_of_the_system_keep_number_and_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_file(tmp_path)
    first, data = file.allocate(1), make_numbers(PAGE)
    file.write(first, data)
    make_system(monkeypatch, preadv=fail(errno.EIO), pwritev=fail(errno.EIO))
    for use in (lambda: file.write(first, make_numbers(PAGE, seed=1)), lambda: read(file, first, PAGE)):
        with pytest.raises(TierIOError) as info:
            use()
        assert (info.value.errno, info.value.filename) == (errno.EIO, str(tmp_path))
    monkeypatch.undo()
    assert torch.equal(read(file, first, PAGE), data)
    file.close()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    first = file.allocate(2)
    file.write(first, make_numbers(2 * PAGE))
    os.ftruncate(file._fd, PAGE + BLOCK_BYTES)
    with pytest.raises(TierIOError, match="ends too early"):
        read(file, first, 2 * PAGE)
    file.close()


def test_it_grows_and_forgets_what_was_freed(tmp_path: Path) -> None:
    file = make_file(tmp_path, 2, budget_bytes=6 * PAGE, checksum=True)
    first, data = file.allocate(2), make_numbers(2 * PAGE)
    file.write(first, data)
    file.grow(4)
    second, other = file.allocate(4), make_numbers(4 * PAGE, seed=1)
    file.write(second, other)
    assert torch.equal(read(file, first, 2 * PAGE), data)
    assert torch.equal(read(file, second, 4 * PAGE), other)
    assert os.fstat(file._fd).st_blocks * 512 >= 6 * PAGE, "the place of each page is kept for it"
    file.free(first, 2)
    out = torch.zeros(PAGE, dtype=torch.uint8)
    assert file.read(file.allocate(2), out) == PAGE, "nothing is known of a frame that was freed"
    file.close()


def test_memory_does_not_grow(tmp_path: Path) -> None:
    page, num_frames = 128 * 2**10, 8
    file = DiskFile(tmp_path, page, num_frames, compression=1)
    first = file.allocate(num_frames)
    data = [make_numbers(num_frames * page, seed) for seed in range(4)]
    out = torch.zeros_like(data[0])
    taken = []
    for turn in range(120):
        file.write(first, data[turn % 4])
        file.read(first, out)
        taken.append(psutil.Process().memory_info().rss)
    assert torch.equal(out, data[119 % 4])
    assert taken[-1] - taken[40] < 2**20
    file.close()


def test_the_depth_is_measured_with_what_does_not_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = 128 * 2**10
    file = DiskFile(tmp_path, page, 2 * EXTENT_BYTES // page, compression=1)
    calls = watch_calls(monkeypatch)
    assert measure_rate(file, 1, seconds=0.01) > 0
    assert {num_bytes for _, _, num_bytes in calls} == {EXTENT_BYTES}
    file.close()


def test_pages_that_are_no_blocks_cannot_be_packed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="cannot be packed into blocks of 4096"):
        DiskFile(tmp_path, disk_file.BLOCK_BYTES + 8, 4, compression=1)
    assert len(os.listdir("/proc/self/fd")) == before
