"""One file of frames, preallocated, without a name, that dies with the process.

The file has no name from the first moment (``O_TMPFILE``), or loses it right after it is opened where the
file system knows no nameless files. So a process that is killed leaves nothing behind, and nobody else can
open it. All its blocks are reserved when it is made or grown: the disk cannot fill up in the middle of a step.

Reads and writes go on after short counts and interrupts. With ``checksum`` a CRC-32 of every page is kept in
memory (4 bytes a page) and compared on every read. That is a loop over pages, but over pages whose 128 KiB
are each read by ``zlib.crc32``: some 40 us a page against under 1 us for the loop.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
import zlib
from typing import Any

import numpy as np
import torch

from pager.errors import CorruptPage, PagerClosed, PagerInternalError, TierFull, TierIOError
from pager.tiers.base import check_host_bytes
from pager.tiers.ranges import FrameRanges
from pager.units import format_bytes

# Answers of file systems and kernels that have no nameless files.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
# A full disk and a full quota.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskFile:
    """``num_frames`` frames of ``page_size`` bytes in a file in ``directory``, which must exist and be ours.

    ``grow`` adds more, up to ``budget_bytes`` (None: there is no growing).

    Raises TierFull where the disk has no room, TierIOError (with ``errno`` and ``filename``) for everything
    else that the system refuses: a folder that is missing, read-only, a symbolic link, or another user's.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        page_size: int,
        num_frames: int,
        *,
        checksum: bool = False,
        budget_bytes: int | None = None,
    ) -> None:
        if page_size <= 0 or num_frames < 0 or (num_frames == 0 and budget_bytes is None):
            raise ValueError(f"a disk file of {num_frames} frames of {page_size} bytes")
        self.directory = os.fspath(directory)
        self.page_size = page_size
        self.num_frames = num_frames
        self.budget_bytes = num_frames * page_size if budget_bytes is None else budget_bytes
        self.peak_bytes = 0
        self._lock = threading.Lock()
        # One grows at a time; reads, writes and allocations go on meanwhile.
        self._growing = threading.Lock()
        self._ranges = FrameRanges(num_frames)
        self._checksums = _Checksums(num_frames) if checksum else None
        self._fd = _open_nameless(self.directory, num_frames * page_size)
        self._finalizer = weakref.finalize(self, os.close, self._fd)

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames handed out."""
        return self._ranges.num_used * self.page_size

    @property
    def num_free(self) -> int:
        """Frames that are reserved and not handed out."""
        return self._ranges.num_free

    @property
    def largest_free(self) -> int:
        """The most frames that one ``allocate`` can give now."""
        return self._ranges.largest_free

    def grow(self, num_frames: int) -> None:
        """Reserve ``num_frames`` more frames, contiguous among themselves.

        Raises TierFull beyond the budget or where the disk has no room, TierIOError else; nothing is added then.
        """
        if num_frames <= 0:
            raise ValueError(f"cannot grow by {num_frames} frames")
        with self._growing:
            self._check_open()
            begin, num_bytes = self.num_frames * self.page_size, num_frames * self.page_size
            if begin + num_bytes > self.budget_bytes:
                raise TierFull(
                    f"disk: {format_bytes(num_bytes)} more than the {format_bytes(begin)} reserved in "
                    f"{self.directory} would pass its {format_bytes(self.budget_bytes)}; raise disk_budget or free "
                    "space there"
                )
            _reserve(self._fd, begin, num_bytes, self.directory)
            with self._lock:
                self._ranges.grow(num_frames)
                if self._checksums is not None:
                    self._checksums.grow(num_frames)
                self.num_frames += num_frames

    def allocate(self, num_frames: int) -> int:
        """The first of ``num_frames`` contiguous frames. TierFull where there is no such run."""
        with self._lock:
            self._check_open()
            first = self._ranges.allocate(num_frames)
            if first is None:
                raise TierFull(
                    f"disk: no run of {num_frames} frames of {format_bytes(self.page_size)} in "
                    f"{self.directory}; {self._ranges.num_free} of {self.num_frames} are free, "
                    f"{self._ranges.largest_free} at most in a row; raise disk_budget"
                )
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return first

    def free(self, first_frame: int, num_frames: int) -> None:
        """Take back frames in use. The blocks stay reserved until ``close``."""
        with self._lock:
            self._check_open()
            self._ranges.free(first_frame, num_frames)
            if self._checksums is not None:
                self._checksums.forget(first_frame, num_frames)

    def read(self, first_frame: int, out: torch.Tensor) -> None:
        """Fill ``out`` (contiguous 1-D uint8 on the CPU) from the frames; blocks the calling thread.

        Raises TierIOError, or CorruptPage where a page is not what was written to it (with ``checksum``).
        """
        check_host_bytes(out, "out")
        self._check_range(first_frame, out.numel())
        view = _memory_of(out)
        self._read(first_frame * self.page_size, view)
        if self._checksums is not None:
            self._verify(first_frame, view)

    def write(self, first_frame: int, data: torch.Tensor) -> None:
        """Put ``data`` (contiguous 1-D uint8 on the CPU) into the frames; blocks the calling thread.

        Raises TierFull or TierIOError; the frames written to are undefined then, and nothing else is changed.
        The checksums stay the old ones until all is written, so that a page torn half way is a CorruptPage.
        """
        check_host_bytes(data, "data")
        self._check_range(first_frame, data.numel())
        view = _memory_of(data)
        done = 0
        while done < len(view):
            try:
                count = self._pwrite(view[done:], first_frame * self.page_size + done)
            except OSError as error:
                raise self._failure("write to", error) from error
            if count == 0:
                raise self._failure("write to", OSError(errno.EIO, "the system took no byte"))
            done += count
        if self._checksums is not None:
            for frame, page in self._pages(first_frame, view):
                self._checksums.note(frame, page)

    def close(self) -> None:
        """Close the file, which frees its blocks. No read or write may be under way. Idempotent."""
        with self._lock:
            self._finalizer()

    def _pread(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [view], offset)

    def _pwrite(self, view: memoryview, offset: int) -> int:
        return os.pwrite(self._fd, view, offset)

    def _read(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            try:
                count = self._pread(view[done:], offset + done)
            except OSError as error:
                raise self._failure("read", error) from error
            if count == 0:
                raise self._failure("read", OSError(errno.EIO, "the file ends too early"))
            done += count

    def _verify(self, first_frame: int, view: memoryview) -> None:
        assert self._checksums is not None
        for frame, page in self._pages(first_frame, view):
            num_bytes = self._checksums.length(frame)
            if num_bytes > len(page):
                # Only part of the last page was asked for; the checksum is that of all that was written to
                # it.
                page = memoryview(bytearray(num_bytes))
                self._read(frame * self.page_size, page)
            if not self._checksums.matches(frame, page[:num_bytes]):
                raise CorruptPage(
                    f"disk: frame {frame} in {self.directory} is not what was written to it "
                    f"(CRC-32 of {num_bytes} bytes)"
                )

    def _pages(self, first_frame: int, view: memoryview) -> list[tuple[int, memoryview]]:
        starts = range(0, len(view), self.page_size)
        return [(first_frame + i, view[start : start + self.page_size]) for i, start in enumerate(starts)]

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise PagerClosed(f"the disk file in {self.directory} was closed")

    def _check_range(self, first_frame: int, num_bytes: int) -> None:
        num_frames = max(-(-num_bytes // self.page_size), 1)
        with self._lock:
            self._check_open()
            if not self._ranges.is_used(first_frame, num_frames):
                raise PagerInternalError(
                    f"disk: frames {first_frame}..{first_frame + num_frames} are not in use"
                )

    def _failure(self, what: str, error: OSError) -> TierFull | TierIOError:
        if error.errno in _NO_ROOM:
            return TierFull(
                f"disk: cannot {what} {self.directory}: {error.strerror}. {_room(self.directory)}; free some, or "
                "name another folder with disk=PATH"
            )
        return TierIOError(
            error.errno, f"disk: cannot {what} the paging file: {error.strerror}", self.directory
        )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


class _Checksums:
    """CRC-32 and length of what each page was last written. Length 0 is "nothing known"."""

    def __init__(self, num_frames: int) -> None:
        self._crc = np.zeros(num_frames, dtype=np.uint32)
        self._length = np.zeros(num_frames, dtype=np.int32)

    def grow(self, num_frames: int) -> None:
        self._crc = np.concatenate([self._crc, np.zeros(num_frames, dtype=np.uint32)])
        self._length = np.concatenate([self._length, np.zeros(num_frames, dtype=np.int32)])

    def forget(self, first_frame: int, num_frames: int) -> None:
        self._length[first_frame : first_frame + num_frames] = 0

    def note(self, frame: int, page: memoryview) -> None:
        self._crc[frame] = zlib.crc32(page)
        self._length[frame] = len(page)

    def length(self, frame: int) -> int:
        return int(self._length[frame])

    def matches(self, frame: int, page: memoryview) -> bool:
        return len(page) == 0 or zlib.crc32(page) == int(self._crc[frame])


def _open_nameless(directory: str, num_bytes: int) -> int:
    """A descriptor of a new file of ``num_bytes`` that has no name, mode 0600, closed on exec."""
    try:
        # The folder is opened once and the file made relative to it: what was checked is what is used.
        folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        hint = ""
        if os.path.islink(directory):
            hint = " (it is a symbolic link; name the folder it leads to)"
        message = f"disk: cannot use the folder for the paging file: {error.strerror}{hint}"
        raise TierIOError(error.errno, message, directory) from error
    try:
        owner = os.fstat(folder).st_uid
        if owner not in (os.geteuid(), 0):
            message = f"disk: the folder for the paging file belongs to user {owner}, not to {os.geteuid()}"
            raise TierIOError(errno.EPERM, message, directory)
        fd = _create(folder, directory)
    finally:
        os.close(folder)
    try:
        if num_bytes:
            _reserve(fd, 0, num_bytes, directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, begin: int, num_bytes: int, directory: str) -> None:
    """Blocks for ``num_bytes`` of the file from byte ``begin`` on."""
    try:
        os.posix_fallocate(fd, begin, num_bytes)
    except OSError as error:
        asked = f"disk: cannot reserve {format_bytes(num_bytes)} in {directory}: {error.strerror}"
        if error.errno in _NO_ROOM:
            raise TierFull(
                f"{asked}. {_room(directory)}; lower disk_budget or take another folder"
            ) from error
        raise TierIOError(error.errno, asked, directory) from error


def _create(folder: int, directory: str) -> int:
    try:
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
            except OSError as error:
                if error.errno not in _NO_TMPFILE:
                    raise
        name = f".pager-{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            os.unlink(name, dir_fd=folder)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        message = f"disk: cannot make the paging file: {error.strerror}"
        raise TierIOError(error.errno, message, directory) from error


def _room(directory: str) -> str:
    try:
        figures = os.statvfs(directory)
    except OSError:
        return "How much is free there cannot be told"
    return f"{format_bytes(figures.f_bavail * figures.f_frsize)} are free there"
