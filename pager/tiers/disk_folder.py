"""A run's place in the folder of the third tier: a locked manifest, and the file that the pages are in.

The problem: a hundred gigabytes that no listing shows, or that a killed run left behind, are the folder's owner's
trouble; and two runs, or a run and its own child, must never take each other's file for a leftover.

The protocol. A run makes ``pager-<pid>-<token>.run``, a small manifest (who, since when, how many bytes), and holds an
exclusive lock on it for life. Only then it makes its file: without a name where the file system has nameless files
(``O_TMPFILE``: the kernel frees its blocks however the process ends), else beside the manifest as ``.pages``. Whoever
comes next tries the lock of each manifest it finds. It gets the lock only if the run is over: then manifest and file
are removed. A manifest that was made and not yet locked may be struck so; its maker sees, once it has the lock, that
the name is gone, and makes another. Where the file system has no locks nothing of others is ever removed.

All is done relative to the folder's descriptor: what was checked is what is used. The folder must not be a symbolic
link and must belong to this user or to root. All files are made with mode 0600 and closed on exec.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import time
import weakref

from pager.errors import TierIOError
from pager.units import format_bytes

logger = logging.getLogger("pager.tiers.disk_folder")

# Answers of file systems and kernels that have no nameless files.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
# Answers of file systems that have no locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_PREFIX = "pager-"
MANIFEST_SUFFIX = ".run"
FILE_SUFFIX = ".pages"
_MADE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class RunFolder:
    """One run in ``directory``: ``fd`` is its file, empty at first. Leftovers of runs that are over are removed.

    Raises TierIOError (with errno and path) for a folder that is missing, a symbolic link, another user's, or
    read-only.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        with contextlib.ExitStack() as undo:
            folder = _open_folder(directory)
            undo.callback(os.close, folder)
            _remove_leftovers(folder, directory)
            try:
                self.manifest, self._lock = _make_manifest(folder)
                undo.callback(os.close, self._lock)
                undo.callback(_unlink, folder, self.manifest)
                name = self.manifest.removesuffix(MANIFEST_SUFFIX) + FILE_SUFFIX
                self.fd, self.file = _make_file(folder, name)
                undo.callback(os.close, self.fd)
            except OSError as error:
                message = f"disk: cannot make the paging file: {error.strerror}"
                raise TierIOError(error.errno, message, directory) from error
            undo.callback(_unlink, folder, self.file)
            self.describe(0)
            undo.pop_all()
        self._finalizer = weakref.finalize(
            self, _leave, os.getpid(), folder, [self.file, self.manifest], [self.fd, self._lock]
        )

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has not been called."""
        return self._finalizer.alive

    def describe(self, num_bytes: int) -> None:
        """Write the manifest: for people who wonder what fills the disk. Never raises: nothing depends on it."""
        facts = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "num_bytes": num_bytes,
            "file": self.file or "nameless: its blocks are freed when the process ends",
        }
        text = (json.dumps(facts, indent=1) + "\n").encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._lock, text, 0)
            os.ftruncate(self._lock, len(text))

    def close(self) -> None:
        """Remove the run's files and close them. Idempotent."""
        self._finalizer()


def _open_folder(directory: str) -> int:
    try:
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        hint = ""
        if os.path.islink(directory):
            hint = " (it is a symbolic link; name the folder it leads to)"
        message = f"disk: cannot use the folder for the paging file: {error.strerror}{hint}"
        raise TierIOError(error.errno, message, directory) from error
    owner = os.fstat(folder).st_uid
    if owner not in (os.geteuid(), 0):
        os.close(folder)
        message = f"disk: the folder for the paging file belongs to user {owner}, not to {os.geteuid()}"
        raise TierIOError(errno.EPERM, message, directory)
    return folder


def _make_manifest(folder: int) -> tuple[str, int]:
    """Name and descriptor of a new manifest that is locked, where there are locks."""
    while True:
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{MANIFEST_SUFFIX}"
        fd = os.open(name, _MADE, 0o600, dir_fd=folder)
        try:
            if _try_lock(fd) is False or not _is_at(folder, name, fd):
                os.close(fd)  # somebody took it for a leftover in between, and removes it
                continue
        except BaseException:
            os.close(fd)
            raise
        return name, fd


def _try_lock(fd: int) -> bool | None:
    """Whether the lock was free and is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _is_at(folder: int, name: str, fd: int) -> bool:
    """Whether the file behind ``fd`` still has this name."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _make_file(folder: int, name: str) -> tuple[int, str]:
    """Descriptor and name of the file; the name is empty where it needs none."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder), ""
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    return os.open(name, _MADE, 0o600, dir_fd=folder), name


def _remove_leftovers(folder: int, directory: str) -> None:
    """Remove manifest and file of each run of ours that is over."""
    try:
        names = os.listdir(folder)
    except OSError:
        return  # a folder that may be written to and not read
    for name in names:
        if name.startswith(_PREFIX) and name.endswith(MANIFEST_SUFFIX):
            with contextlib.suppress(OSError):  # another user's, a link, or gone meanwhile
                _remove_leftover(folder, name, directory)


def _remove_leftover(folder: int, name: str, directory: str) -> None:
    fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or not _try_lock(fd):
            return
        file = name.removesuffix(MANIFEST_SUFFIX) + FILE_SUFFIX
        num_bytes = _regular_bytes(folder, file)
        # The file first: a manifest without one is no loss, a file without one would stay for ever.
        if num_bytes is not None:
            _unlink(folder, file)
            logger.info("removed %s, left in %s by a run that was killed", format_bytes(num_bytes), directory)
        _unlink(folder, name)
    finally:
        os.close(fd)


def _regular_bytes(folder: int, name: str) -> int | None:
    """Bytes on disk of a regular file of ours; None if it is anything else, or not there."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return status.st_blocks * 512 if is_ours else None


def _unlink(folder: int, name: str) -> None:
    if name:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def _leave(pid: int, folder: int, names: list[str], descriptors: list[int]) -> None:
    """Remove the names, unless this is a child of the run, and close everything."""
    for name in names if os.getpid() == pid else ():
        _unlink(folder, name)
    for fd in (*descriptors, folder):
        os.close(fd)
