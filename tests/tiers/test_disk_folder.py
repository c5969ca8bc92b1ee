"""The folder of the third tier: whose it may be, that runs do not meet in it, and that nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import json
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

from pager.errors import TierIOError
from pager.tiers import disk_folder
from pager.tiers.disk_file import DiskFile
from pager.tiers.disk_folder import RunFolder

PAGE = 16384
ROOT = Path(__file__).resolve().parents[2]


def make_system(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """``os`` as the module sees it, with these functions replaced."""
    monkeypatch.setattr(disk_folder, "os", SimpleNamespace(**{**vars(os), **replaced}))


def without_nameless_files(number: int = errno.EOPNOTSUPP) -> Any:
    """``os.open`` of a file system that knows no ``O_TMPFILE``."""

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return os.open(path, flags, *arguments, **options)

    return open_


def names_in(folder: Path) -> list[str]:
    """The kinds of files in a folder, in order."""
    return sorted(path.suffix for path in folder.iterdir())


def test_the_file_has_no_name_is_ours_alone_and_all_its_blocks(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 64)
    assert names_in(tmp_path) == [".run"]
    status = os.fstat(file._fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode), status.st_size) == (0, 0o600, 64 * PAGE)
    assert status.st_blocks * 512 >= 64 * PAGE
    assert not os.get_inheritable(file._fd)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_says_who_and_how_much(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, 2, budget_bytes=8 * PAGE)
    file.grow(3)
    (manifest,) = tmp_path.iterdir()
    assert stat.S_IMODE(manifest.stat().st_mode) == 0o600
    facts = json.loads(manifest.read_text())
    assert (facts["pid"], facts["num_bytes"]) == (os.getpid(), 5 * PAGE)
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_without_nameless_files_it_stands_beside_its_manifest_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    make_system(monkeypatch, open=without_nameless_files(number))
    files = [DiskFile(tmp_path, PAGE, 2) for _ in range(2)]
    assert names_in(tmp_path) == [".pages", ".pages", ".run", ".run"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    for file in files:
        assert not os.get_inheritable(file._fd)
        file.close()
    assert list(tmp_path.iterdir()) == []


# The data file is made to have a name, then the run is killed.
KILLED = """
import os, sys, signal, torch
if sys.argv[2] == "named":
    del os.O_TMPFILE
from pager.tiers.disk_file import DiskFile
file = DiskFile(sys.argv[1], 16384, 256)
file.write(file.allocate(256), torch.ones(256 * 16384, dtype=torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_a_run(folder: Path, how: str) -> None:
    """A run that wrote 4 MiB and was killed in the middle of its life."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), how], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("how", ["nameless", "named"])
def test_the_next_run_cleans_what_a_killed_one_left(tmp_path: Path, how: str) -> None:
    """Case 29: disk use does not grow."""
    for _ in range(2):
        kill_a_run(tmp_path, how)
        named = [path for path in tmp_path.iterdir() if path.suffix == ".pages"]
        assert len(named) == (how == "named"), "the second killed run has cleaned after the first"
        assert sum(path.stat().st_blocks * 512 for path in named) == len(named) * 256 * PAGE
    file = DiskFile(tmp_path, PAGE, 1)
    assert names_in(tmp_path) == [".run"]
    file.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nameless", [True, False])
def test_two_runs_in_one_folder_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool
) -> None:
    if not nameless:
        make_system(monkeypatch, open=without_nameless_files())
    one, other = DiskFile(tmp_path, PAGE, 4), DiskFile(tmp_path, PAGE, 4)
    for file, value in ((one, 1), (other, 2)):
        file.write(file.allocate(4), torch.full((4 * PAGE,), value, dtype=torch.uint8))
    other.close()
    RunFolder(str(tmp_path)).close()  # a third, which looks for leftovers
    out = torch.zeros(4 * PAGE, dtype=torch.uint8)
    one.read(0, out)
    assert out.unique().tolist() == [1]
    assert names_in(tmp_path) == ([".run"] if nameless else [".pages", ".run"])
    one.close()


def test_what_looks_like_a_leftover_and_is_not_ours_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").write_text("user's")
    (tmp_path / "pager-1-link.run").symlink_to(tmp_path / "precious")
    (tmp_path / "pager-1-folder.run").mkdir()
    (tmp_path / "pager-notes.txt").write_text("user's")
    (tmp_path / "pager-2-ours.run").touch()
    (tmp_path / "pager-2-ours.pages").symlink_to(tmp_path / "precious")
    RunFolder(str(tmp_path)).close()
    assert (tmp_path / "precious").read_text() == "user's"
    assert {path.name for path in tmp_path.iterdir()} == {
        "precious",
        "pager-1-link.run",
        "pager-1-folder.run",
        "pager-notes.txt",
        "pager-2-ours.pages",
    }
    (tmp_path / "pager-3-others.run").touch()
    make_system(
        monkeypatch,
        geteuid=lambda: 4321,
        fstat=lambda fd: SimpleNamespace(**{**_facts(os.fstat(fd)), "st_uid": 0}),
    )
    RunFolder(str(tmp_path)).close()
    assert (tmp_path / "pager-3-others.run").exists()


def _facts(status: os.stat_result) -> dict[str, Any]:
    return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}


def test_a_manifest_that_was_struck_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run looks for leftovers between the making of a manifest and its lock."""
    made: list[str] = []

    def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        fd = os.open(path, flags, *arguments, **options)
        if str(path).endswith(".run") and flags & os.O_EXCL:
            made.append(path)
            if len(made) == 1:
                disk_folder._remove_leftovers(options["dir_fd"], str(tmp_path))
        return fd

    make_system(monkeypatch, open=open_)
    folder = RunFolder(str(tmp_path))
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir()] == [made[1]] == [folder.manifest]
    folder.close()


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pager-1-who.run").touch()

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk_folder, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": flock}))
    folder = RunFolder(str(tmp_path))
    assert names_in(tmp_path) == [".run", ".run"]
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["pager-1-who.run"]


def test_a_child_of_the_run_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, 1)
    pid = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(disk_folder, "os", SimpleNamespace(**{**vars(os), "getpid": lambda: pid + 1}))
        file.close()
    assert names_in(tmp_path) == [".run"]


def test_a_deleted_file_is_used_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_system(monkeypatch, open=without_nameless_files())
    file = DiskFile(tmp_path, PAGE, 4)
    for path in list(tmp_path.iterdir()):
        path.unlink()
    first, data = file.allocate(4), torch.arange(4 * PAGE).to(torch.uint8)
    file.write(first, data)
    out = torch.zeros_like(data)
    file.read(first, out)
    assert torch.equal(out, data)
    file.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


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
    def fstat(fd: int) -> Any:
        return SimpleNamespace(**{**_facts(os.fstat(fd)), "st_uid": owner})

    make_system(monkeypatch, geteuid=lambda: 4321, fstat=fstat)
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
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierIOError, match="cannot make the paging file: Read-only file system") as info:
        DiskFile(tmp_path, PAGE, 1)
    assert (info.value.errno, info.value.filename) == (errno.EROFS, str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
