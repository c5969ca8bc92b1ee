"""The paging file: its bytes past the page cache and through it, and every way the system can refuse."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pager.errors import CorruptPage, DiskFull, TierFull, TierIOError
from pager.tiers import disk_file, disk_folder
from pager.tiers.disk_file import DiskFile

PAGE = 16384


def make_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def make_system(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """``os`` as the module sees it, with these functions replaced."""
    for module in (disk_file, disk_folder):
        monkeypatch.setattr(module, "os", SimpleNamespace(**{**vars(os), **replaced}))


def fail(number: int) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def test_a_dropped_file_closes_its_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        DiskFile(tmp_path, PAGE, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_without_room_is_full_with_numbers(tmp_path: Path) -> None:
    """A real answer of the system: no disk has an exbibyte."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((TierFull, TierIOError), match=r"cannot reserve 1048576\.00 TiB in"):
        DiskFile(tmp_path, 2**22, 2**38)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_at_construction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    make_system(monkeypatch, posix_fallocate=fail(number))
    with pytest.raises(
        DiskFull, match=r"cannot reserve 128.00 KiB in .* (GiB|TiB|MiB) are free there; lower disk_budget"
    ) as info:
        DiskFile(tmp_path, PAGE, 8)
    assert (info.value.errno, info.value.filename) == (number, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_another_failure_at_construction_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_system(monkeypatch, posix_fallocate=fail(errno.EFBIG))
    with pytest.raises(TierIOError) as info:
        DiskFile(tmp_path, PAGE, 8)
    assert (info.value.errno, info.value.filename) == (errno.EFBIG, str(tmp_path))


@pytest.mark.parametrize("step", [1, 1000, PAGE])
def test_short_counts_are_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    calls = {"read": 0, "write": 0}

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        calls["read"] += 1
        return os.preadv(fd, [views[0][:step]], offset)

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        calls["write"] += 1
        return os.pwritev(fd, [views[0][:step]], offset)

    make_system(monkeypatch, preadv=preadv, pwritev=pwritev)
    file = DiskFile(tmp_path, PAGE, 4, direct=False)
    first = file.allocate(2)
    data, out = make_bytes(PAGE + 100), torch.zeros(PAGE + 100, dtype=torch.uint8)
    file.write(first, data)
    file.read(first, out)
    file.close()
    assert torch.equal(out, data)
    assert calls == {"read": -(-(PAGE + 100) // step), "write": -(-(PAGE + 100) // step)}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENXIO])
def test_input_and_output_errors_keep_number_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = DiskFile(tmp_path, PAGE, 4)
    first = file.allocate(1)
    file.write(first, make_bytes(PAGE))
    make_system(monkeypatch, preadv=fail(number), pwritev=fail(number))
    for use in (lambda: file.write(first, make_bytes(1)), lambda: file.read(first, make_bytes(1))):
        with pytest.raises(TierIOError, match="the paging file") as info:
            use()
        assert (info.value.errno, info.value.filename) == (number, str(tmp_path))
    monkeypatch.undo()
    out = torch.zeros(PAGE, dtype=torch.uint8)
    file.read(first, out)
    assert torch.equal(out, make_bytes(PAGE))
    file.close()


def test_no_space_while_writing_is_tier_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 4)
    first = file.allocate(1)
    make_system(monkeypatch, pwritev=fail(errno.ENOSPC))
    with pytest.raises(DiskFull, match="No space left on device. .* are free there") as info:
        file.write(first, make_bytes(PAGE))
    assert (info.value.errno, info.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert file.used_bytes == PAGE
    file.close()


def test_a_count_of_zero_does_not_loop_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 1)
    first = file.allocate(1)
    make_system(monkeypatch, preadv=lambda *a: 0, pwritev=lambda *a: 0)
    for use in (file.write, file.read):
        with pytest.raises(TierIOError) as info:
            use(first, make_bytes(10))
        assert info.value.errno == errno.EIO
    file.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_cut_short_is_an_error(tmp_path: Path, direct: bool) -> None:
    file = DiskFile(tmp_path, PAGE, 4, direct=direct)
    first = file.allocate(4)
    file.write(first, make_bytes(4 * PAGE))
    os.ftruncate(file._fd, 2 * PAGE + 5)
    with pytest.raises(TierIOError, match="ends too early"):
        file.read(first, torch.zeros(4 * PAGE, dtype=torch.uint8))
    file.close()


def turn_byte(file: DiskFile, offset: int) -> None:
    """Past the file's own descriptor, as a faulty disk would."""
    fd = os.open(f"/proc/self/fd/{file._fd}", os.O_RDWR)
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ 1]), offset)
    os.close(fd)


@pytest.mark.parametrize("offset", [0, PAGE - 1, PAGE, 2 * PAGE + 99])
def test_one_wrong_bit_is_found_and_the_frame_named(tmp_path: Path, offset: int) -> None:
    file = DiskFile(tmp_path, PAGE, 8, checksum=True)
    file.allocate(2)
    first = file.allocate(3)
    data = make_bytes(2 * PAGE + 100)
    file.write(first, data)
    turn_byte(file, first * PAGE + offset)
    with pytest.raises(CorruptPage, match=f"frame {first + offset // PAGE} "):
        file.read(first, torch.zeros_like(data))
    turn_byte(file, first * PAGE + offset)
    file.read(first, torch.zeros_like(data))
    file.close()


def test_a_wrong_bit_of_a_page_is_found_when_only_its_beginning_is_read(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 4, checksum=True)
    first = file.allocate(2)
    data = make_bytes(2 * PAGE)
    file.write(first, data)
    out = torch.zeros(PAGE + 10, dtype=torch.uint8)
    file.read(first, out)
    assert torch.equal(out, data[: PAGE + 10])
    turn_byte(file, 2 * PAGE - 1)
    with pytest.raises(CorruptPage, match="frame 1 "):
        file.read(first, out)
    file.close()


@pytest.mark.parametrize("num_written", [0, 1, PAGE])
def test_a_page_torn_by_a_failed_write_is_corrupt_until_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    file = DiskFile(tmp_path, PAGE, 4, checksum=True, direct=False)
    first = file.allocate(2)
    file.write(first, make_bytes(2 * PAGE))

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        if len(views[0]) == 2 * PAGE and num_written:
            return os.pwritev(fd, [views[0][:num_written]], offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    make_system(monkeypatch, pwritev=pwritev)
    with pytest.raises(TierIOError):
        file.write(first, make_bytes(2 * PAGE, seed=1))
    monkeypatch.undo()
    out = torch.zeros(2 * PAGE, dtype=torch.uint8)
    if num_written:
        with pytest.raises(CorruptPage, match="frame 0 "):
            file.read(first, out)
    else:
        file.read(first, out)
        assert torch.equal(out, make_bytes(2 * PAGE))
    file.write(first, make_bytes(2 * PAGE, seed=2))
    file.read(first, out)
    assert torch.equal(out, make_bytes(2 * PAGE, seed=2))
    file.close()


def test_freed_frames_have_no_checksum(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 1, checksum=True)
    file.write(file.allocate(1), make_bytes(PAGE))
    turn_byte(file, 0)
    file.free(0, 1)
    out = torch.zeros(PAGE, dtype=torch.uint8)
    file.read(file.allocate(1), out)  # nothing was written to the frame since it was allocated
    assert int(out[0]) == int(make_bytes(PAGE)[0]) ^ 1
    file.close()


def test_without_checksums_wrong_bytes_pass(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 1)
    first = file.allocate(1)
    data, out = make_bytes(PAGE), torch.zeros(PAGE, dtype=torch.uint8)
    file.write(first, data)
    turn_byte(file, 3)
    file.read(first, out)
    assert (out != data).nonzero().tolist() == [[3]]
    file.close()


@pytest.mark.parametrize(("page_size", "num_frames"), [(0, 1), (PAGE, 0), (PAGE, -1)])
def test_sizes_are_positive(tmp_path: Path, page_size: int, num_frames: int) -> None:
    with pytest.raises(ValueError, match="a disk file of"):
        DiskFile(tmp_path, page_size, num_frames)


@pytest.mark.parametrize("checksum", [False, True])
def test_it_grows_up_to_its_budget_and_keeps_what_it_has(tmp_path: Path, checksum: bool) -> None:
    file = DiskFile(tmp_path, PAGE, 0, budget_bytes=6 * PAGE, checksum=checksum)
    assert (file.num_frames, file.largest_free, file.budget_bytes) == (0, 0, 6 * PAGE)
    with pytest.raises(TierFull):
        file.allocate(1)
    file.grow(2)
    first, data = file.allocate(2), make_bytes(2 * PAGE)
    file.write(first, data)
    file.grow(4)
    second, other = file.allocate(4), make_bytes(4 * PAGE, seed=1)
    file.write(second, other)
    assert os.fstat(file._fd).st_blocks * 512 >= 6 * PAGE
    for frame, expected in ((first, data), (second, other)):
        found = torch.empty_like(expected)
        file.read(frame, found)
        assert torch.equal(found, expected)
    assert (file.used_bytes, file.num_free) == (6 * PAGE, 0)
    with pytest.raises(TierFull, match=r"16.00 KiB more than the 96.00 KiB reserved .*; raise disk_budget"):
        file.grow(1)
    file.close()


def test_a_disk_without_room_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 1, budget_bytes=6 * PAGE)
    make_system(monkeypatch, posix_fallocate=fail(errno.ENOSPC))
    with pytest.raises(TierFull, match="cannot reserve 32.00 KiB .* or take another folder"):
        file.grow(2)
    assert (file.num_frames, file.allocate(1)) == (1, 0)
    file.close()


# -- past the page cache -----------------------------------------------------------------------------------------------


def is_cached(file: DiskFile, num_bytes: int) -> bool:
    """Whether the system keeps any of the file in memory."""
    import ctypes
    import mmap

    with mmap.mmap(file._fd, num_bytes) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0
        return any(page & 1 for page in pages)


@pytest.mark.parametrize("direct", [True, False])
def test_pages_go_past_the_cache_where_they_can(tmp_path: Path, direct: bool) -> None:
    file = DiskFile(tmp_path, PAGE, 4, direct=direct)
    assert file.is_direct is direct, "run the tests on a file system that has O_DIRECT (ext4, xfs)"
    first, data = file.allocate(4), make_bytes(4 * PAGE)
    file.write(first, data)
    out = torch.zeros_like(data)
    file.read(first, out)
    assert torch.equal(out, data)
    assert is_cached(file, 4 * PAGE) is not direct
    file.close()


def test_a_file_system_without_direct_access_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 28: as some tmpfs and overlayfs answer."""

    def fcntl_(fd: int, what: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fcntl.fcntl(fd, what, flags)

    monkeypatch.setattr(disk_file, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": fcntl_}))
    file = DiskFile(tmp_path, PAGE, 4)
    check_it_works_with_one_warning(file, caplog)


def test_a_file_system_that_promised_too_much_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the flag, and refuses the reads and writes."""

    def refuse(call: Any) -> Any:
        def moved(fd: int, views: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return int(call(fd, views, offset))

        return moved

    make_system(monkeypatch, preadv=refuse(os.preadv), pwritev=refuse(os.pwritev))
    file = DiskFile(tmp_path, PAGE, 4)
    assert file.is_direct
    check_it_works_with_one_warning(file, caplog)


@pytest.mark.parametrize("step", [1, 5000])
def test_short_counts_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A system that stops within a block: what follows would not be aligned."""
    make_system(
        monkeypatch,
        preadv=lambda fd, views, offset: os.preadv(fd, views, offset) and min(step, len(views[0])),
        pwritev=lambda fd, views, offset: os.pwritev(fd, views, offset) and min(step, len(views[0])),
    )
    file = DiskFile(tmp_path, PAGE, 4)
    first, data = file.allocate(2), make_bytes(PAGE + 100)
    out = torch.zeros_like(data)
    file.write(first, data)
    file.read(first, out)
    assert torch.equal(out, data)
    assert file.is_direct is (step > 4096)
    file.close()


def check_it_works_with_one_warning(file: DiskFile, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes go and come, through the cache, and that is said once."""
    first, data = file.allocate(4), make_bytes(4 * PAGE)
    for _ in range(2):
        file.write(first, data)
        out = torch.zeros_like(data)
        file.read(first, out)
        assert torch.equal(out, data)
    assert not file.is_direct
    assert [record.message.count("no direct input and output in") for record in caplog.records] == [1]
    file.close()
