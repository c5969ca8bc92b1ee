"""Host memory of exactly the size that is asked for, page-locked where the system allows.

Torch's pinned allocator rounds up to a power of two and takes four times as long to register (DESIGN, section
5). So a piece is an anonymous private mapping, huge pages advised, registered with the device as it is. A
piece has at most 64 GiB: registering more at once has failed in the field, and a copy must not span two
registrations, which is why a range of frames never spans two pieces.

A piece is unmapped when the arena has dropped it *and* the last view of it is gone: views share one storage,
which owns the mapping. So a tensor handed to a user (``state_dict``) stays valid after ``close``.

``shrink`` gives back free frames also where others of their piece are in use. A registration cannot be cut, so the
piece's is undone, the system takes the memory of the holes, and what is left is registered anew as pieces of its own,
over the same mapping: nothing is copied, and addresses and frame numbers stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from pager.device.base import Device, Region
from pager.errors import PagerClosed, PagerInternalError, TierError, TierFull
from pager.interrupts import whole
from pager.tiers.base import check_host_bytes
from pager.tiers.ranges import FrameRanges
from pager.tiers.views import Views
from pager.units import format_bytes

logger = logging.getLogger("pager.tiers.host_arena")

MAX_PIECE_BYTES = 64 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    begin: int  # first frame
    end: int
    memory: torch.Tensor  # the only long-lived tensor over the piece; its storage owns the mapping
    mapping: mmap.mmap
    is_registered: bool
    offset: int = 0  # bytes from the mapping's begin: a piece that was cut has only a part of it

    @property
    def num_bytes(self) -> int:
        return int(self.memory.numel())

    def drop_pages(self, offset: int, num_bytes: int) -> int:
        """The system takes this memory back; it is zeros when it is used again. The bytes, 0 if it does not."""
        try:
            self.mapping.madvise(mmap.MADV_DONTNEED, self.offset + offset, num_bytes)
        except OSError:  # the user has locked all of the process's memory
            return 0
        return num_bytes


class HostArena:
    """Frames in host memory. Starts without any; ``grow`` adds pieces, ``trim`` gives unused ones back.

    ``page_size`` in bytes; ``device`` registers the memory; ``budget_bytes`` bounds what is mapped.
    ``max_piece_bytes`` and ``progress_after_seconds`` are for tests.
    """

    def __init__(
        self,
        page_size: int,
        device: Device,
        budget_bytes: int,
        *,
        max_piece_bytes: int = MAX_PIECE_BYTES,
        progress_after_seconds: float = 1.0,
    ) -> None:
        if page_size <= 0 or page_size % mmap.PAGESIZE:
            raise ValueError(f"page_size is {page_size} bytes; expected a multiple of {mmap.PAGESIZE}")
        self.page_size = page_size
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self.peak_reserved_bytes = 0
        self._device = device
        self._frames_per_piece = max(max_piece_bytes // page_size, 1)
        self._progress_after_seconds = progress_after_seconds
        self._lock = threading.Lock()
        self._ranges = FrameRanges()
        self._pieces: dict[int, _Piece] = {}
        self._views = Views()
        self._reserving_bytes = 0
        self._is_closed = False
        self._has_warned = False

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames handed out."""
        return self._ranges.num_used * self.page_size

    @property
    def reserved_bytes(self) -> int:
        """Bytes mapped, handed out or not; never more than ``budget_bytes``."""
        return self._ranges.num_frames * self.page_size

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked."""
        with self._lock:
            return sum(piece.num_bytes for piece in self._pieces.values() if piece.is_registered)

    @property
    def untouched_bytes(self) -> int:
        """Bytes that are reserved and that the system has not given yet, since nobody has written to them."""
        with self._lock:
            # Page-locking has the system give all of it; the simulated device only notes that it was asked.
            pieces = [p for p in self._pieces.values() if self._device.is_simulated or not p.is_registered]
        return sum(piece.num_bytes - resident_bytes(piece.memory) for piece in pieces)

    @property
    def num_frames(self) -> int:
        """Frames there are, free or used. Frame numbers may be higher once pieces were trimmed."""
        return self._ranges.num_frames

    @property
    def end_frame(self) -> int:
        """One past the highest frame number ever given."""
        return self._ranges.end

    @property
    def largest_free(self) -> int:
        """The most frames that one ``allocate`` can give now."""
        return self._ranges.largest_free

    def grow(self, num_frames: int) -> None:
        """Map and page-lock ``num_frames`` more frames, in as few pieces as the limit of 64 GiB allows.

        Raises TierFull, and adds nothing, beyond the budget or where the system gives no memory. Where it
        refuses to page-lock, the memory is used as it is: one warning says what that costs.
        """
        if num_frames <= 0:
            raise ValueError(f"cannot grow by {num_frames} frames")
        num_bytes = num_frames * self.page_size
        with self._lock:
            self._check_open()
            reserved = self.reserved_bytes + self._reserving_bytes
            if reserved + num_bytes > self.budget_bytes:
                raise TierFull(
                    f"host: {format_bytes(num_bytes)} more than the {format_bytes(reserved)} reserved would "
                    f"pass the host budget of {format_bytes(self.budget_bytes)}; raise host_budget"
                )
            self._reserving_bytes += num_bytes
        mapped: list[tuple[mmap.mmap, torch.Tensor, bool]] = []
        try:
            with self._progress(num_bytes):
                while num_frames:
                    size = min(num_frames, self._frames_per_piece)
                    mapping = _map(size * self.page_size)
                    memory = _tensor_over(mapping)
                    mapped.append((mapping, memory, self._register(memory)))
                    num_frames -= size
        except BaseException:
            for _, memory, is_registered in mapped:
                if is_registered:
                    self._device.unregister_host(memory.data_ptr())
            with self._lock:
                self._reserving_bytes -= num_bytes
            raise
        with self._lock:
            self._reserving_bytes -= num_bytes
            for mapping, memory, is_registered in mapped:
                size = memory.numel() // self.page_size
                begin = self._ranges.grow(size)
                self._pieces[begin] = _Piece(
                    begin=begin,
                    end=begin + size,
                    memory=memory,
                    mapping=mapping,
                    is_registered=is_registered,
                )
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def allocate(self, num_frames: int) -> int:
        """The first of ``num_frames`` contiguous frames of one piece. TierFull where there is no such run."""
        with self._lock:
            self._check_open()
            first = self._ranges.allocate(num_frames)
            if first is None:
                raise TierFull(
                    f"host: no run of {num_frames} frames of {format_bytes(self.page_size)}; "
                    f"{self._ranges.num_free} of {self._ranges.num_frames} are free, "
                    f"{self._ranges.largest_free} at most in a row; "
                    f"{format_bytes(self.reserved_bytes)} of {format_bytes(self.budget_bytes)} reserved; "
                    "raise host_budget"
                )
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return first

    def free(self, first_frame: int, num_frames: int) -> None:
        """Take back frames in use. The memory stays reserved until ``trim``."""
        with self._lock:
            self._check_open()
            self._ranges.free(first_frame, num_frames)

    def trim(self) -> int:
        """Give pieces that are wholly free back to the system; the bytes given back."""
        with self._lock:
            self._check_open()
            pieces = [self._pieces.pop(begin) for begin in self._ranges.free_pieces()]
            self._views.clear()
            for piece in pieces:
                self._ranges.remove(piece.begin)
        for piece in pieces:
            self._drop(piece)
            if piece.num_bytes < len(piece.mapping):
                piece.drop_pages(0, piece.num_bytes)  # others keep the mapping alive
        return sum(piece.num_bytes for piece in pieces)

    @whole
    def shrink(self) -> int:
        """Give the memory of all free frames back to the system, by ``trim`` and by cutting pieces that are partly
        used; the bytes given back. See the head of this file.

        No copy from or to the arena may be under way. Where the system does not page-lock what is left again, it stays
        pageable, with a warning. An interrupt comes when all is done: page-locking takes 60 ms for each GiB.
        """
        released = self.trim()
        with self._lock:
            self._check_open()
            found = (self._ranges.piece_of(begin) for begin, _ in self._ranges.holes())
            begins = sorted({piece[0] for piece in found if piece is not None})
        for begin in begins:
            released += self._cut(begin)
        return released

    def _cut(self, begin: int) -> int:
        """Take the free frames of a piece out of it; their bytes."""
        with self._lock:
            whole_piece = self._pieces.pop(begin)
            self._views.clear()
            pieces = []
            for first, end in self._ranges.cut_holes(begin):
                at = (first - whole_piece.begin) * self.page_size
                pieces.append(
                    _Piece(
                        begin=first,
                        end=end,
                        memory=whole_piece.memory[at : at + (end - first) * self.page_size],
                        mapping=whole_piece.mapping,
                        is_registered=False,
                        offset=whole_piece.offset + at,
                    )
                )
            self._pieces.update((piece.begin, piece) for piece in pieces)
        # All of it is locked anew, so a copy of what stays is as wrong as one of a hole.
        self._device.host_touch(Region("host", whole_piece.begin, whole_piece.end), write=True)
        if whole_piece.is_registered:
            self._device.unregister_host(whole_piece.memory.data_ptr())
        released, at = 0, whole_piece.begin
        for first, end in [
            *((piece.begin, piece.end) for piece in pieces),
            (whole_piece.end, whole_piece.end),
        ]:
            if first > at:
                offset = (at - whole_piece.begin) * self.page_size
                released += whole_piece.drop_pages(offset, (first - at) * self.page_size)
            at = end
        if whole_piece.is_registered:
            with self._progress(sum(piece.num_bytes for piece in pieces)):
                locked = [replace(piece, is_registered=self._register(piece.memory)) for piece in pieces]
            with self._lock:
                self._pieces.update((piece.begin, piece) for piece in locked)
        return released

    def release_free(self) -> int:
        """Give the memory behind free frames back to the system where it is pageable; it stays reserved, and is zeros
        when it is used again. The bytes given back; page-locked memory goes by ``shrink`` alone.
        """
        released = 0
        with self._lock:
            self._check_open()
            for begin, end in self._ranges.holes():
                found = self._ranges.piece_of(begin)
                assert found is not None
                piece = self._pieces[found[0]]
                if not piece.is_registered:
                    num_bytes = (end - begin) * self.page_size
                    released += piece.drop_pages((begin - piece.begin) * self.page_size, num_bytes)
        return released

    def view(self, first_frame: int, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` from ``first_frame`` on: a uint8 1-D tensor aliasing the arena, also after close."""
        view = self._views.get((first_frame, num_bytes))
        if view is not None:
            return view
        with self._lock:
            self._check_open()
            found = self._ranges.piece_of(first_frame)
            if (
                found is None
                or num_bytes < 0
                or first_frame * self.page_size + num_bytes > found[1] * self.page_size
            ):
                raise PagerInternalError(
                    f"host: {num_bytes} bytes from frame {first_frame} on are not in one piece"
                )
            piece = self._pieces[found[0]]
            offset = (first_frame - piece.begin) * self.page_size
            return self._views.keep(first_frame, num_bytes, piece.memory[offset : offset + num_bytes])

    def is_one_piece(self, first_frame: int, num_frames: int) -> bool:
        """Whether so many frames lie side by side in memory."""
        with self._lock:
            piece = self._ranges.piece_of(first_frame)
        return piece is not None and first_frame + num_frames <= piece[1]

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """Copy from the frames into ``out`` (contiguous 1-D uint8 on the CPU) on the calling thread; its bytes."""
        check_host_bytes(out, "out")
        out.copy_(self.view(first_frame, out.numel()))
        return out.numel()

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """Copy ``data`` (contiguous 1-D uint8 on the CPU) into the frames on the calling thread; its bytes."""
        check_host_bytes(data, "data")
        self.view(first_frame, data.numel()).copy_(data)
        return data.numel()

    def close(self) -> None:
        """Unlock everything and let go of it. Views still alive keep their piece mapped. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._views.clear()
            pieces, self._pieces = list(self._pieces.values()), {}
            self._ranges = FrameRanges()
        for piece in pieces:
            self._drop(piece)

    def __del__(self) -> None:
        # A model that nobody closed: its memory must not stay registered with the device.
        if getattr(self, "_is_closed", True) or not self._pieces or sys.is_finalizing():
            return
        self._device.close()  # copies may be under way
        for piece in self._pieces.values():
            if piece.is_registered:
                self._device.unregister_host(piece.memory.data_ptr())

    def _check_open(self) -> None:
        if self._is_closed:
            raise PagerClosed("the host arena was closed")

    def _drop(self, piece: _Piece) -> None:
        # Whoever gets the memory next may write to it at once.
        self._device.host_touch(Region("host", piece.begin, piece.end), write=True)
        if piece.is_registered:
            self._device.unregister_host(piece.memory.data_ptr())

    def _register(self, memory: torch.Tensor) -> bool:
        try:
            self._device.register_host(memory.data_ptr(), memory.numel())
        except (TierError, OSError, RuntimeError) as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "host memory could not be page-locked (%s) and stays pageable: copies run at about 8 "
                    "instead of 55 GB/s and block the host meanwhile. Raise the locked-memory limit "
                    "(ulimit -l) or the container's memory limit.",
                    error,
                )
            return False
        return True

    @contextlib.contextmanager
    def _progress(self, num_bytes: int) -> Iterator[None]:
        """One INFO line if the body takes longer than a second: large registrations look like a hang."""
        text = "page-locking %s of host memory (about 16 GiB a second)"
        timer = threading.Timer(self._progress_after_seconds, logger.info, (text, format_bytes(num_bytes)))
        timer.name = "pager-progress"
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def map_memory(num_bytes: int) -> torch.Tensor:
    """New memory of exactly this size from the system, zeros, aligned to its pages. Raises TierFull."""
    return _tensor_over(_map(num_bytes))


def _map(num_bytes: int) -> mmap.mmap:
    try:
        # Private: a shared anonymous mapping is shmem, which counts against /dev/shm's limits in containers.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TierFull(
            f"host: the system gives no {format_bytes(num_bytes)}: {error.strerror}; lower host_budget or "
            "device_budget, or raise the process's memory limit (ulimit -v, the container's)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _tensor_over(mapping: mmap.mmap) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))


def resident_bytes(memory: torch.Tensor) -> int:
    """How much of ``memory``, from the begin of a page of the system's, was given; all of it, where nobody can tell."""
    num_bytes = int(memory.numel())
    pages = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    try:
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(num_bytes), ctypes.c_void_p(pages.ctypes.data)
        )
    except (OSError, AttributeError):  # a C library without it
        failed = -1
    return num_bytes if failed else min(int((pages & 1).sum()) * mmap.PAGESIZE, num_bytes)
