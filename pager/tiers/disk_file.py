"""One file of frames, preallocated, that dies with the run (`pager.tiers.disk_folder`).

All its blocks are reserved when it is made or grown: the disk cannot fill up in the middle of a step. It is read and
written past the page cache (``O_DIRECT``) where the file system has that: what passes through here is used once a step,
so caching it would cost host memory outside the budget and a copy. Where it has not (some tmpfs, overlayfs, network
file systems) one warning says so. ``O_DIRECT`` wants memory, offsets and lengths in blocks of 4 KiB; who brings
anything else (the engine does not) has it copied once.

Reads and writes go on after short counts and interrupts. With ``checksum`` a CRC-32 of every page is kept in
memory (8 bytes a page) and compared on every read. That is a loop over pages, but over pages whose 128 KiB
are each read by ``zlib.crc32``, which lets other threads run meanwhile; docs/benchmarks.md has its cost.

With ``compression`` a page that shrinks is written packed, to the place it has anyway (`pager.tiers.page_packer`), each
by a request of its own; plain neighbours still go together. The checksum is that of the plain bytes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pager.errors import CorruptPage, DiskFull, PagerClosed, PagerInternalError, TierFull, TierIOError
from pager.tiers.base import check_host_bytes
from pager.tiers.disk_folder import RunFolder
from pager.tiers.page_packer import BadPage, PagePacker
from pager.tiers.ranges import FrameRanges
from pager.units import ceil_div, format_bytes

logger = logging.getLogger("pager.tiers.disk_file")

# A full disk and a full quota.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# What O_DIRECT wants memory, offsets and lengths to be multiples of; the largest block of disks in use.
BLOCK_BYTES = 4096


class DiskFile:
    """``num_frames`` frames of ``page_size`` bytes in a file in ``directory``, which must exist and be ours.

    ``grow`` adds more, up to ``budget_bytes`` (None: there is no growing). ``direct``: past the page cache, if that
    can be. ``compression``: level of zstandard, from 1 to 22, or None.

    Raises DiskFull (a TierFull) where the disk has no room, TierIOError for everything else that the system refuses: a
    folder that is missing, read-only, a symbolic link, or another user's. Both have ``errno`` and ``filename``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        page_size: int,
        num_frames: int,
        *,
        checksum: bool = False,
        compression: int | None = None,
        budget_bytes: int | None = None,
        direct: bool = True,
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
        self._packer: PagePacker | None = None
        if compression is not None:
            self._packer = PagePacker(page_size, num_frames, compression, block_bytes=BLOCK_BYTES)
        self._folder = RunFolder(self.directory)
        self._fd = self._folder.fd
        try:
            if num_frames:
                _reserve(self._fd, 0, num_frames * page_size, self.directory)
                self._folder.describe(num_frames * page_size)
        except BaseException:
            self._folder.close()
            raise
        self.is_direct = direct and page_size % BLOCK_BYTES == 0 and self._go_direct()

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
            self._folder.describe(begin + num_bytes)
            with self._lock:
                self._ranges.grow(num_frames)
                for column in (self._checksums, self._packer):
                    if column is not None:
                        column.grow(num_frames)
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
            if self._packer is not None:
                self._packer.note(first_frame, num_frames, 0)

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """Fill ``out`` (contiguous 1-D uint8 on the CPU) from the frames; blocks the calling thread. The bytes read.

        Raises TierIOError, or CorruptPage where a page is not what was written to it (with ``checksum``; without, where
        a packed page cannot be unpacked).
        """
        check_host_bytes(out, "out")
        self._check_range(first_frame, out.numel())
        target = _aligned(out.numel()) if self._needs_copy(out) else out
        view = _memory_of(target)
        moved = self._load(first_frame, view)
        if self._checksums is not None:
            self._verify(first_frame, view[: out.numel()])
        if target is not out:
            out.copy_(target[: out.numel()])
        return moved

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """Put ``data`` (contiguous 1-D uint8 on the CPU) into the frames; blocks the calling thread. The bytes written.

        Raises DiskFull or TierIOError; the frames written to are undefined then, and nothing else is changed.
        The checksums stay the old ones until all is written, so that a page torn half way is a CorruptPage.
        """
        check_host_bytes(data, "data")
        self._check_range(first_frame, data.numel())
        source = data
        if self._needs_copy(data):
            source = _aligned(data.numel())
            source[: data.numel()].copy_(data)
        moved = self._store(first_frame, _memory_of(source))
        if self._checksums is not None:
            self._checksums.note(first_frame, self._split(_memory_of(data)))
        return moved

    def close(self) -> None:
        """Close the file, which frees its blocks. No read or write may be under way. Idempotent."""
        with self._lock:
            self._folder.close()

    # -- past the page cache -----------------------------------------------------------------------

    def _go_direct(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
        except (OSError, AttributeError) as error:  # some systems have no such flag
            self._warn(getattr(error, "strerror", None) or "no O_DIRECT")
            return False
        return True

    def _go_through_the_cache(self, why: str) -> None:
        with self._lock:
            if not self.is_direct:
                return
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self.is_direct = False
        self._warn(why)

    def _warn(self, why: str) -> None:
        logger.warning(
            "disk: no direct input and output in %s (%s): pages go through the system's page cache, which costs a copy "
            "and host memory that host_budget does not count. A folder on a local disk (ext4, xfs) has it",
            self.directory,
            why,
        )

    def _needs_copy(self, memory: torch.Tensor) -> bool:
        return self.is_direct and bool(memory.data_ptr() % BLOCK_BYTES or memory.numel() % BLOCK_BYTES)

    # -- pages, packed or plain ---------------------------------------------------------------------

    def _load(self, first_frame: int, view: memoryview) -> int:
        """Fill ``view`` from the frames; the bytes read."""
        offset, packer = first_frame * self.page_size, self._packer
        moved = begin = 0  # from ``begin`` on pages are plain, and read together
        for at in range(0, len(view), self.page_size) if packer is not None else ():
            assert packer is not None
            frame = first_frame + at // self.page_size
            num_bytes = packer.packed_bytes(frame)
            if not num_bytes:
                continue
            moved += self._read(offset + begin, view[begin:at])
            begin = at + self.page_size
            packed = packer.buffer(num_bytes)
            moved += self._read(offset + at, packed)
            try:
                packer.unpack(packed, view[at:begin])
            except BadPage as error:
                raise self._corrupt(frame, f"it cannot be unpacked: {error}") from error
        return moved + self._read(offset + begin, view[begin:])

    def _store(self, first_frame: int, view: memoryview) -> int:
        """Write ``view`` to the frames; the bytes written. What a page is noted as follows its write."""
        packer = self._packer
        if packer is None:
            return self._write(first_frame * self.page_size, view)
        moved = begin = 0
        for at in range(0, len(view), self.page_size):
            packed = packer.pack(view[at : at + self.page_size])
            if packed is None:
                continue
            moved += self._store_plain(packer, first_frame, view, begin, at)
            moved += self._write(first_frame * self.page_size + at, packed)
            packer.note(first_frame + at // self.page_size, 1, len(packed))
            begin = at + self.page_size
        return moved + self._store_plain(packer, first_frame, view, begin, len(view))

    def _store_plain(
        self, packer: PagePacker, first_frame: int, view: memoryview, begin: int, end: int
    ) -> int:
        moved = self._write(first_frame * self.page_size + begin, view[begin:end])
        packer.note(first_frame + begin // self.page_size, ceil_div(moved, self.page_size), 0)
        return moved

    # -- bytes -------------------------------------------------------------------------------------

    def _pread(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [view], offset)

    def _pwrite(self, view: memoryview, offset: int) -> int:
        return os.pwritev(self._fd, [view], offset)

    def _read(self, offset: int, view: memoryview) -> int:
        return self._move("read", self._pread, offset, view, "the file ends too early")

    def _write(self, offset: int, view: memoryview) -> int:
        return self._move("write to", self._pwrite, offset, view, "the system took no byte")

    def _move(self, what: str, call: Any, offset: int, view: memoryview, nothing: str) -> int:
        """All of ``view``, however few bytes the system moves at a time; its bytes."""
        done = 0
        while done < len(view):
            direct = self.is_direct
            try:
                count = call(view[done:], offset + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    self._go_through_the_cache(str(error.strerror))  # a file system that promised too much
                    continue
                raise self._failure(what, error) from error
            if count == 0:
                raise self._failure(what, OSError(errno.EIO, nothing))
            if direct and done + count < len(view) and count % BLOCK_BYTES:
                if count < BLOCK_BYTES:
                    self._go_through_the_cache(f"{count} bytes at a time")
                    continue
                count -= count % BLOCK_BYTES
            done += count
        return len(view)

    def _verify(self, first_frame: int, view: memoryview) -> None:
        assert self._checksums is not None
        for frame, page in enumerate(self._split(view), first_frame):
            num_bytes = self._checksums.length(frame)
            if num_bytes > len(page):
                # Only part of the last page was asked for; the checksum is that of all that was written to
                # it.
                page = _memory_of(_aligned(num_bytes))
                self._load(frame, page)
            if not self._checksums.matches(frame, page[:num_bytes]):
                raise self._corrupt(frame, f"CRC-32 of {num_bytes} bytes")

    def _corrupt(self, frame: int, why: str) -> CorruptPage:
        return CorruptPage(
            f"disk: frame {frame} in {self.directory} is not what was written to it, at byte "
            f"{frame * self.page_size} of the paging file ({why})"
        )

    def _split(self, view: memoryview) -> list[memoryview]:
        return [view[start : start + self.page_size] for start in range(0, len(view), self.page_size)]

    def _check_open(self) -> None:
        if not self._folder.is_open:
            raise PagerClosed(f"the disk file in {self.directory} was closed")

    def _check_range(self, first_frame: int, num_bytes: int) -> None:
        num_frames = max(-(-num_bytes // self.page_size), 1)
        with self._lock:
            self._check_open()
            if not self._ranges.is_used(first_frame, num_frames):
                raise PagerInternalError(
                    f"disk: frames {first_frame}..{first_frame + num_frames} are not in use"
                )

    def _failure(self, what: str, error: OSError) -> TierIOError:
        if error.errno in _NO_ROOM:
            return DiskFull(
                error.errno,
                f"disk: cannot {what} {self.directory}: {error.strerror}. {_room(self.directory)}; free some, or "
                "name another folder with disk=PATH",
                self.directory,
            )
        return TierIOError(
            error.errno, f"disk: cannot {what} the paging file: {error.strerror}", self.directory
        )


def _aligned(num_bytes: int) -> torch.Tensor:
    """Zeros for at least so many bytes, as direct input and output wants them: whole pages of the system's."""
    memory = mmap.mmap(-1, max(ceil_div(num_bytes, BLOCK_BYTES), 1) * BLOCK_BYTES)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


class _Checksums:
    """CRC-32 and length of what each page was last written. Length 0 is "nothing known"."""

    def __init__(self, num_frames: int) -> None:
        self._lock = (
            threading.Lock()
        )  # growing copies the columns: nobody may write to the old ones meanwhile
        self._crc: npt.NDArray[np.uint32] = np.zeros(num_frames, dtype=np.uint32)
        self._length: npt.NDArray[np.int32] = np.zeros(num_frames, dtype=np.int32)

    def grow(self, num_frames: int) -> None:
        with self._lock:
            self._crc = np.concatenate([self._crc, np.zeros(num_frames, dtype=np.uint32)])
            self._length = np.concatenate([self._length, np.zeros(num_frames, dtype=np.int32)])

    def forget(self, first_frame: int, num_frames: int) -> None:
        with self._lock:
            self._length[first_frame : first_frame + num_frames] = 0

    def note(self, first_frame: int, pages: list[memoryview]) -> None:
        crc = np.fromiter(map(zlib.crc32, pages), np.uint32, len(pages))
        length = np.fromiter(map(len, pages), np.int32, len(pages))
        with self._lock:
            self._crc[first_frame : first_frame + len(pages)] = crc
            self._length[first_frame : first_frame + len(pages)] = length

    def length(self, frame: int) -> int:
        return int(self._length[frame])

    def matches(self, frame: int, page: memoryview) -> bool:
        return len(page) == 0 or zlib.crc32(page) == int(self._crc[frame])


def _reserve(fd: int, begin: int, num_bytes: int, directory: str) -> None:
    """Blocks for ``num_bytes`` of the file from byte ``begin`` on."""
    try:
        os.posix_fallocate(fd, begin, num_bytes)
    except OSError as error:
        asked = f"disk: cannot reserve {format_bytes(num_bytes)} in {directory}: {error.strerror}"
        if error.errno in _NO_ROOM:
            message = f"{asked}. {_room(directory)}; lower disk_budget or take another folder"
            raise DiskFull(error.errno, message, directory) from error
        raise TierIOError(error.errno, asked, directory) from error


def _room(directory: str) -> str:
    try:
        figures = os.statvfs(directory)
    except OSError:
        return "How much is free there cannot be told"
    return f"{format_bytes(figures.f_bavail * figures.f_frsize)} are free there"
