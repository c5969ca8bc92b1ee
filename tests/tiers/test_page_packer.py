"""Pages in fewer blocks: every bit comes back, noise is left alone, and what was not packed here is told."""

from __future__ import annotations

import contextlib
import struct
import threading

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.tiers.page_packer import BadPage, PagePacker

PAGE = 32 * 2**10
BLOCK = 4096
Bytes = npt.NDArray[np.uint8]


def make_packer(level: int = 1, *, num_frames: int = 4, page: int = PAGE, block: int = BLOCK) -> PagePacker:
    return PagePacker(page, num_frames, level, block_bytes=block)


def make_page(kind: str, num_bytes: int = PAGE) -> Bytes:
    generator = np.random.default_rng(0)
    if kind == "noise":
        return generator.integers(0, 256, num_bytes, dtype=np.uint8)
    if kind == "zeros":
        return np.zeros(num_bytes, dtype=np.uint8)
    if kind == "one value":
        return np.full(num_bytes, 7, dtype=np.uint8)
    if kind == "low half int16":
        return generator.integers(-(2**15), 2**15, num_bytes // 2, dtype=np.int16).view(np.uint8)
    numbers = generator.normal(0, 0.02, num_bytes // 4).astype(np.float32)
    if kind == "bf16":
        both = np.concatenate([numbers, numbers * 3]).astype(np.float32)
        return (both.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    assert kind == "fp32"
    return numbers.view(np.uint8)


KINDS = ("noise", "zeros", "one value", "low half int16", "bf16", "fp32")


def pack(packer: PagePacker, page: Bytes) -> bytes | None:
    packed = packer.pack(page.data)
    return None if packed is None else bytes(packed)


def unpack(packer: PagePacker, packed: bytes, num_bytes: int = PAGE) -> Bytes:
    out = np.full(num_bytes, 0xAA, dtype=np.uint8)
    packer.unpack(memoryview(packed), out.data)
    return out


@pytest.mark.parametrize("level", [1, 3, 22])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_comes_back(kind: str, level: int) -> None:
    packer = make_packer(level, page=4 * PAGE)
    page = make_page(kind, 4 * PAGE)
    packed = pack(packer, page)
    if kind in ("noise", "low half int16"):
        assert packed is None
        return
    assert packed is not None
    assert len(packed) % BLOCK == 0
    assert len(packed) <= 4 * PAGE * 7 // 8
    assert np.array_equal(unpack(packer, packed, 4 * PAGE), page)


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.72), ("fp32", 0.88), ("zeros", 0.04)])
def test_the_exponents_are_what_shrinks(kind: str, most: float) -> None:
    packed = pack(make_packer(page=4 * PAGE), make_page(kind, 4 * PAGE))
    assert packed is not None
    assert len(packed) <= most * 4 * PAGE


@pytest.mark.parametrize("num_bytes", [1, 4, BLOCK, PAGE - BLOCK, PAGE - 1, PAGE])
def test_the_beginning_of_a_page_can_be_had_alone(num_bytes: int) -> None:
    packer, page = make_packer(), make_page("bf16")
    packed = pack(packer, page)
    assert packed is not None
    assert np.array_equal(unpack(packer, packed, num_bytes), page[:num_bytes])


def test_a_page_that_was_written_in_part_leaves_the_rest_alone() -> None:
    packer, page = make_packer(), make_page("bf16", PAGE // 2)
    packed = pack(packer, page)
    assert packed is not None
    out = unpack(packer, packed)
    assert np.array_equal(out[: PAGE // 2], page)
    assert (out[PAGE // 2 :] == 0xAA).all()


@pytest.mark.parametrize("num_bytes", [1, 100, BLOCK - 1, BLOCK, BLOCK + 1, PAGE - 4])
def test_what_is_no_whole_blocks_or_just_one_is_left_plain(num_bytes: int) -> None:
    assert pack(make_packer(), make_page("zeros", num_bytes)) is None


def test_an_eighth_must_be_saved() -> None:
    """Of eight blocks one must go: header and all. A page whose upper plane alone is zero loses just under two."""
    packer = make_packer()
    page = make_page("noise").reshape(-1, 4)
    page[:, 3] = 0
    packed = pack(packer, page.reshape(-1))
    assert packed is not None
    assert len(packed) == PAGE - BLOCK
    page[: PAGE // 4 * 9 // 16, 3] = make_page("noise")[: PAGE // 4 * 9 // 16]
    assert pack(packer, page.reshape(-1)) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["bf16", "fp32", "zeros"]), st.data())
def test_damage_is_told_or_gives_a_page(kind: str, data: st.DataObject) -> None:
    """Never another error, never more memory than a page: whether the page is right is for checksums to say."""
    packer = make_packer()
    page = make_page(kind)
    good = pack(packer, page)
    if good is None:
        good = pack(packer, make_page("zeros"))
    assert good is not None
    bad = bytearray(good)
    places = st.one_of(st.integers(0, 63), st.integers(0, len(bad) - 1))
    for place in data.draw(st.lists(places, min_size=1, max_size=6)):
        bad[place] = data.draw(st.integers(0, 255))
    out = np.empty(PAGE, dtype=np.uint8)
    with contextlib.suppress(BadPage):
        packer.unpack(memoryview(bad), out.data)
    assert np.array_equal(unpack(packer, good), page if pack(packer, page) else make_page("zeros")), (
        "the next page is well"
    )


def damaged(packed: bytes, lengths: tuple[int, ...], num_bytes: int = PAGE) -> bytes:
    """The same with another header."""
    header = struct.pack("<5I", num_bytes, *lengths)
    return header + packed[len(header) :]


@pytest.mark.parametrize(
    ("num_bytes", "lengths"),
    [
        (0, (1, 1, 1, 1)),
        (2**31, (1, 1, 1, 1)),
        (PAGE + BLOCK, (1, 1, 1, 1)),
        (PAGE - 1, (1, 1, 1, 1)),
        (PAGE, (PAGE // 4 + 1, 1, 1, 1)),
        (PAGE, (PAGE // 4, PAGE // 4, PAGE // 4, PAGE // 4)),
        (PAGE, (0, 0, 0, 0)),
    ],
)
def test_a_header_that_cannot_be_is_not_believed(num_bytes: int, lengths: tuple[int, ...]) -> None:
    packer = make_packer()
    packed = pack(packer, make_page("bf16"))
    assert packed is not None
    with pytest.raises(BadPage):
        unpack(packer, damaged(packed, lengths, num_bytes))


@pytest.mark.parametrize("size", [PAGE // 4, 2**40])
def test_a_frame_cannot_ask_for_memory(size: int) -> None:
    """A frame may name its size, and zstandard would have that much, whatever the limit."""
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(PAGE // 4)))
    assert zstandard.frame_content_size(bytes(frame)) == PAGE // 4
    # An eight bytes long size in place of the two of this one.
    frame = frame[:4] + bytes([frame[4] | 0xC0]) + size.to_bytes(8, "little") + frame[7:]
    assert zstandard.frame_content_size(bytes(frame)) == size
    packed = struct.pack("<5I", PAGE, *[len(frame)] * 4) + bytes(frame) * 4
    with pytest.raises(BadPage, match="names another size"):
        unpack(make_packer(), packed)


def test_a_plane_that_ends_too_early_is_told() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(PAGE // 4 - 1))
    packed = struct.pack("<5I", PAGE, *[len(frame)] * 4) + frame * 4
    with pytest.raises(BadPage, match=f"a plane of {PAGE // 4} bytes has {PAGE // 4 - 1}"):
        unpack(make_packer(), packed)


def test_the_lengths_of_frames_grow_with_them_and_are_forgotten() -> None:
    packer = make_packer(num_frames=2)
    packer.note(1, 1, 3 * BLOCK)
    packer.grow(2)
    packer.note(2, 2, BLOCK)
    assert [packer.packed_bytes(frame) for frame in range(4)] == [0, 3 * BLOCK, BLOCK, BLOCK]
    packer.note(1, 2, 0)
    assert [packer.packed_bytes(frame) for frame in range(4)] == [0, 0, 0, BLOCK]


@pytest.mark.parametrize(("page", "block"), [(PAGE + 2, 2), (PAGE, 3000), (2**20, 16)])
def test_sizes_that_cannot_be_packed(page: int, block: int) -> None:
    with pytest.raises(ValueError, match="cannot be packed into blocks"):
        make_packer(page=page, block=block)


def test_threads_have_buffers_of_their_own() -> None:
    packer = make_packer()
    kinds = ("bf16", "fp32", "zeros", "one value")
    wrong: list[str] = []
    start = threading.Barrier(len(kinds))

    def work(kind: str) -> None:
        page = make_page(kind)
        start.wait()
        for _ in range(50):
            packed = packer.pack(page.data)
            if packed is None:
                continue
            out = np.empty_like(page)
            packer.unpack(packed, out.data)
            if not np.array_equal(out, page):
                wrong.append(kind)

    threads = [threading.Thread(target=work, args=(kind,)) for kind in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_buffer_is_aligned_for_direct_input_and_output() -> None:
    packer = make_packer()
    assert np.frombuffer(packer.buffer(BLOCK), np.uint8).ctypes.data % 4096 == 0
    packed = packer.pack(make_page("zeros").data)
    assert packed is not None
    assert np.frombuffer(packed, np.uint8).ctypes.data % 4096 == 0
