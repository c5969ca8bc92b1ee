"""The paging file: where it may be, that it leaves nothing behind, and every way the system can refuse."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pager.errors import CorruptPage, TierFull, TierIOError
from pager.tiers import disk_file
from pager.tiers.disk_file import DiskFile

PAGE = 16384


def make_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def make_system(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """``os`` as the module sees it, with these functions replaced."""
    monkeypatch.setattr(disk_file, "os", SimpleNamespace(**{**vars(os), **replaced}))


def fail(number: int) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def test_the_file_has_no_name_is_ours_alone_and_all_its_blocks(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 64)
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(file._fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_size) == (0, 0o600, 64 * PAGE)
    assert status.st_blocks * 512 >= 64 * PAGE
    assert not os.get_inheritable(file._fd)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_without_nameless_files_it_is_unlinked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    names: list[str] = []

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        names.append(path)
        return os.open(path, flags, *arguments, **options)

    make_system(monkeypatch, open=open_)
    files = [DiskFile(tmp_path, PAGE, 2) for _ in range(2)]
    assert len(set(names[1::2])) == 2
    assert list(tmp_path.iterdir()) == []
    for file in files:
        status = os.fstat(file._fd)
        assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o600)
        assert not os.get_inheritable(file._fd)
        file.close()


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """Case 29."""
    script = (
        "import sys, torch, signal, os\n"
        "from pager.tiers.disk_file import DiskFile\n"
        f"file = DiskFile(sys.argv[1], {PAGE}, 256)\n"
        f"file.write(file.allocate(256), torch.ones(256 * {PAGE}, dtype=torch.uint8))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=root, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_file_closes_its_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        DiskFile(tmp_path, PAGE, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_missing_folder(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(TierIOError, match="No such file or directory") as info:
        DiskFile(missing, PAGE, 1)
    assert (info.value.errno, info.value.filename) == (errno.ENOENT, str(missing))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierIOError, match="Not a directory") as info:
        DiskFile(tmp_path / "file", PAGE, 1)
    assert info.value.errno == errno.ENOTDIR


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(TierIOError, match="it is a symbolic link") as info:
        DiskFile(tmp_path / "link", PAGE, 1)
    assert info.value.filename == str(tmp_path / "link")
    below = tmp_path / "link" / "below"
    below.mkdir()
    DiskFile(below, PAGE, 1).close()  # only the last part matters: mount points are often reached by links


@pytest.mark.parametrize(("owner", "is_ours"), [(1234, False), (0, True), (4321, True)])
def test_another_users_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, is_ours: bool
) -> None:
    make_system(monkeypatch, geteuid=lambda: 4321, fstat=lambda fd: SimpleNamespace(st_uid=owner))
    before = len(os.listdir("/proc/self/fd"))
    if is_ours:
        DiskFile(tmp_path, PAGE, 1).close()
    else:
        with pytest.raises(TierIOError, match="belongs to user 1234, not to 4321"):
            DiskFile(tmp_path, PAGE, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the system's answer is put in its mouth."""

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return os.open(path, flags, *arguments, **options)

    make_system(monkeypatch, open=open_)
    with pytest.raises(TierIOError, match="cannot make the paging file: Read-only file system") as info:
        DiskFile(tmp_path, PAGE, 1)
    assert (info.value.errno, info.value.filename) == (errno.EROFS, str(tmp_path))


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
        TierFull, match=r"cannot reserve 128.00 KiB in .* (GiB|TiB|MiB) are free there; lower disk_budget"
    ):
        DiskFile(tmp_path, PAGE, 8)
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

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        calls["write"] += 1
        return os.pwrite(fd, view[:step], offset)

    make_system(monkeypatch, preadv=preadv, pwrite=pwrite)
    file = DiskFile(tmp_path, PAGE, 4)
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
    make_system(monkeypatch, preadv=fail(number), pwrite=fail(number))
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
    make_system(monkeypatch, pwrite=fail(errno.ENOSPC))
    with pytest.raises(TierFull, match="No space left on device. .* are free there"):
        file.write(first, make_bytes(PAGE))
    assert file.used_bytes == PAGE
    file.close()


def test_a_count_of_zero_does_not_loop_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 1)
    first = file.allocate(1)
    make_system(monkeypatch, preadv=lambda *a: 0, pwrite=lambda *a: 0)
    for use in (file.write, file.read):
        with pytest.raises(TierIOError) as info:
            use(first, make_bytes(10))
        assert info.value.errno == errno.EIO
    file.close()


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 4)
    first = file.allocate(4)
    file.write(first, make_bytes(4 * PAGE))
    os.ftruncate(file._fd, 2 * PAGE + 5)
    with pytest.raises(TierIOError, match="ends too early"):
        file.read(first, torch.zeros(4 * PAGE, dtype=torch.uint8))
    file.close()


def turn_byte(file: DiskFile, offset: int) -> None:
    byte = os.pread(file._fd, 1, offset)
    os.pwrite(file._fd, bytes([byte[0] ^ 1]), offset)


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
    file = DiskFile(tmp_path, PAGE, 4, checksum=True)
    first = file.allocate(2)
    file.write(first, make_bytes(2 * PAGE))

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if len(view) == 2 * PAGE and num_written:
            return os.pwrite(fd, view[:num_written], offset)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    make_system(monkeypatch, pwrite=pwrite)
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
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 1, budget_bytes=6 * PAGE)
    make_system(monkeypatch, posix_fallocate=fail(errno.ENOSPC))
    with pytest.raises(TierFull, match="cannot reserve 32.00 KiB .* or take another folder"):
        file.grow(2)
    assert (file.num_frames, file.allocate(1)) == (1, 0)
    file.close()
