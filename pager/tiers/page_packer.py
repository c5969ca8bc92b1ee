"""Pages made smaller on their way to a disk, by zstandard: what fits of them, and how long each is.

The problem: half of a number's bytes are noise. What compresses in a training state is the upper byte of a float (its
sign and exponent), and zstandard finds that badly while it stands between mantissas (docs/benchmarks.md). So the bytes
of a page are sorted into planes first: all first bytes of four, all second ones, and so on. bf16 has its upper byte
in the second and the fourth plane, fp32 in the fourth; a plane that does not shrink is kept as it is.

A packed page stands where the page would stand, in fewer blocks: the file's capacity is what it was, the disk moves
and wears less. It is one of its own, so that any range of pages can be read or written, and fail, by itself; where
compression pays, on slow disks, a request for a page more or less costs nothing (docs/decisions.md, 44). A page that
would not save ``LEAST_SAVED`` of its bytes is not packed: reading it would cost time for nothing.

::

    bytes 0..4     plain bytes of the page (uint32, little endian, as all here)
    bytes 4..20    bytes of each plane in what follows; as many as plain ones: it is plain
    then           the planes: zstandard frames without content size and checksum, or plain bytes

How many blocks a page takes is kept in memory (2 bytes a page): the file is one run's. Threads have buffers of their
own, two pages each. zstandard and numpy let other threads run while they work.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pager.tiers.host_arena import map_memory
from pager.units import ceil_div

if TYPE_CHECKING:
    import zstandard

# Bytes of the widest number there is much of; narrower ones of two bytes have two planes each.
NUM_PLANES = 4
_HEADER = struct.Struct(f"<{1 + NUM_PLANES}I")
# Of a page, in parts: what is saved less is not worth the time of unpacking.
LEAST_SAVED = 8
# The planes by what can be told from them. Where the upper byte of a float is as random as the others nothing shrinks.
_ORDER = (3, 1, 2, 0)
# A plane of exponents is a skewed mixture without repetitions: all that helps is the entropy coding. Matches that are
# found by chance cost time, and bytes; with a table this small level 1 finds few, is twice as fast, and packs such a
# plane by a twentieth more (docs/benchmarks.md). Higher levels look for matches as they always do.
_MIN_MATCH = 7
_FAST_HASH_LOG = 6
_FAST_LEVELS = (1, 2)


class BadPage(ValueError):
    """A packed page that cannot be unpacked: not what was written."""


class PagePacker:
    """Packs and unpacks pages, and knows how long those in ``num_frames`` frames are. Safe to call from any thread.

    ``level``: of zstandard, from 1 to 22. ``block_bytes``: what lengths in the file are multiples of.
    """

    def __init__(self, page_size: int, num_frames: int, level: int, *, block_bytes: int) -> None:
        if page_size % block_bytes or page_size % NUM_PLANES or page_size // block_bytes >= 2**16:
            raise ValueError(f"pages of {page_size} bytes cannot be packed into blocks of {block_bytes}")
        self._page_size = page_size
        self._level = level
        self._block_bytes = block_bytes
        self._lock = threading.Lock()  # growing copies the column
        self._num_blocks: npt.NDArray[np.uint16] = np.zeros(num_frames, dtype=np.uint16)
        self._own = threading.local()

    @staticmethod
    def buffer_bytes(page_size: int) -> int:
        """Host memory that one thread takes."""
        return 2 * page_size

    # -- lengths -----------------------------------------------------------------------------------

    def grow(self, num_frames: int) -> None:
        """So many frames more, with nothing in them."""
        with self._lock:
            self._num_blocks = np.concatenate([self._num_blocks, np.zeros(num_frames, dtype=np.uint16)])

    def note(self, first_frame: int, num_frames: int, num_bytes: int) -> None:
        """What was written to these frames: a packed page of ``num_bytes``, 0: plain pages, or nothing."""
        with self._lock:
            self._num_blocks[first_frame : first_frame + num_frames] = num_bytes // self._block_bytes

    def packed_bytes(self, frame: int) -> int:
        """Bytes of the packed page in a frame; 0 where it is plain."""
        return int(self._num_blocks[frame]) * self._block_bytes

    # -- bytes -------------------------------------------------------------------------------------

    def buffer(self, num_bytes: int) -> memoryview:
        """The calling thread's buffer for a packed page; good until it packs or reads another."""
        return self._mine().packed.data[:num_bytes]

    def pack(self, page: memoryview) -> memoryview | None:
        """The page in whole blocks, in the calling thread's buffer; None if it would not save enough."""
        num_bytes = len(page)
        length, rest = divmod(num_bytes, NUM_PLANES)
        limit = num_bytes - max(ceil_div(num_bytes // LEAST_SAVED, self._block_bytes), 1) * self._block_bytes
        if rest or num_bytes % self._block_bytes or limit <= 0:
            return None
        mine = self._mine()
        numbers = np.frombuffer(page, np.uint8).reshape(length, NUM_PLANES)
        planes = mine.planes[:num_bytes].reshape(NUM_PLANES, length)
        lengths = [length] * NUM_PLANES
        end = _HEADER.size
        for place in _ORDER:
            planes[place] = numbers[:, place]
            part = mine.compressor.compress(planes[place].data)
            if len(part) >= length:
                part = planes[place].data
            lengths[place] = len(part)
            if end + len(part) > limit or (place == _ORDER[0] and len(part) == length):
                return None
            mine.packed[end : end + len(part)] = np.frombuffer(part, np.uint8)
            end += len(part)
        _HEADER.pack_into(mine.packed.data, 0, num_bytes, *lengths)
        whole = ceil_div(end, self._block_bytes) * self._block_bytes
        mine.packed[end:whole] = 0
        return mine.packed.data[:whole]

    def unpack(self, packed: memoryview, out: memoryview) -> None:
        """The plain page, or as much of it as ``out`` takes. Raises BadPage for what `pack` has not made."""
        num_bytes, *lengths = _HEADER.unpack_from(packed)
        length = num_bytes // NUM_PLANES
        is_sane = 0 < num_bytes <= self._page_size and num_bytes % self._block_bytes == 0
        if not is_sane or max(lengths) > length or _HEADER.size + sum(lengths) > len(packed):
            raise BadPage(f"its header tells of {num_bytes} bytes in planes of {lengths}")
        mine = self._mine()
        # What is read of its beginning goes through the whole: a plane has a byte of each of its numbers.
        whole = mine.planes[:num_bytes] if len(out) < num_bytes else np.frombuffer(out, np.uint8)[:num_bytes]
        numbers = whole.reshape(length, NUM_PLANES)
        end = _HEADER.size
        for place in _ORDER:
            part = packed[end : end + lengths[place]]
            end += lengths[place]
            plane: Any = part if len(part) == length else mine.decompress(part, length)
            numbers[:, place] = np.frombuffer(plane, np.uint8)
        if len(out) < num_bytes:
            np.frombuffer(out, np.uint8)[:] = whole[: len(out)]

    def _mine(self) -> _Workspace:
        mine: _Workspace | None = getattr(self._own, "space", None)
        if mine is None:
            mine = self._own.space = _Workspace(self._page_size, self._level)
        return mine


class _Workspace:
    """What one thread packs with: zstandard's contexts are not for two at a time."""

    def __init__(self, page_size: int, level: int) -> None:
        import zstandard

        self._zstd: Any = zstandard
        self.planes: npt.NDArray[np.uint8] = map_memory(page_size).numpy()
        self.packed: npt.NDArray[np.uint8] = map_memory(
            page_size
        ).numpy()  # direct input and output wants it aligned
        options: dict[str, int] = {"hash_log": _FAST_HASH_LOG} if level in _FAST_LEVELS else {}
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level,
            source_size=page_size // NUM_PLANES,
            min_match=_MIN_MATCH,
            write_content_size=False,
            **options,
        )
        self.compressor: zstandard.ZstdCompressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor: zstandard.ZstdDecompressor = zstandard.ZstdDecompressor()

    def decompress(self, part: memoryview, length: int) -> bytes:
        """``length`` bytes. Raises BadPage."""
        try:
            # A frame that names its size would have as much memory as it says, whatever the limit.
            if self._zstd.frame_content_size(part) != -1:
                raise BadPage("a frame names another size than was written")
            plane: bytes = self._decompressor.decompress(part, max_output_size=length, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise BadPage(str(error)) from error
        if len(plane) != length:
            raise BadPage(f"a plane of {length} bytes has {len(plane)}")
        return plane
