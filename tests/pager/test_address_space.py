"""Layouts of tensors in pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pager.address_space import AddressSpace, Segment, is_dense, span_elements
from pager.errors import PagerInternalError

PAGE = 16384


def add(
    space: AddressSpace, *size: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None
) -> Segment:
    """One more contiguous segment, unless ``stride`` says otherwise."""
    shape = torch.Size(size)
    return space.add(
        name=f"t{len(space.segments)}",
        kind="parameter",
        size=shape,
        stride=stride or torch.empty(shape, device="meta").stride(),
        dtype=dtype,
    )


@given(st.data())
def test_span_and_density_agree_with_the_set_of_offsets(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 4), max_size=4))
    stride = [data.draw(st.integers(0, 7)) for _ in size]
    offsets = [0]
    for extent, step in zip(size, stride, strict=True):
        offsets = [offset + step * index for offset in offsets for index in range(extent)]
    assert span_elements(size, stride) == (max(offsets) + 1 if offsets else 0)
    if offsets:
        assert is_dense(size, stride) == (sorted(offsets) == list(range(len(offsets))))


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((), (), True),
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((2, 3, 4, 5), (60, 1, 15, 3), True),  # channels last
        ((3, 4), (5, 1), False),
        ((3, 4), (0, 1), False),
        ((1, 4), (99, 1), True),  # the stride of one element says nothing
    ],
)
def test_dense_layouts(size: tuple[int, ...], stride: tuple[int, ...], dense: bool) -> None:
    assert is_dense(size, stride) is dense


def test_segments_follow_one_another_and_end_in_a_ragged_page() -> None:
    space = AddressSpace(PAGE)
    one = add(space, 5000)
    other = add(space, 4096, dtype=torch.bfloat16)
    assert (one.index, one.first_page, one.num_pages, one.last_page) == (0, 0, 2, 2)
    assert (other.index, other.first_page, other.num_pages, other.last_page) == (1, 2, 1, 3)
    assert (one.num_bytes, one.num_elements, other.num_bytes) == (20000, 5000, 8192)
    assert space.num_pages == 3
    assert space.segments == [one, other]


def test_a_strided_tensor_takes_its_span() -> None:
    segment = add(AddressSpace(PAGE), 3, 4, stride=(5, 1))
    assert (segment.num_elements, segment.num_bytes, segment.dense) == (14, 56, False)


def test_a_segment_says_what_it_is() -> None:
    assert repr(add(AddressSpace(PAGE), 10)) == "Segment(0, parameter 't0', 40 bytes, 1 pages)"


def test_a_tensor_without_elements_has_no_segment() -> None:
    space = AddressSpace(PAGE)
    with pytest.raises(PagerInternalError, match=r"'t0' of size \(3, 0\) has no bytes"):
        add(space, 3, 0)
    assert space.segments == []
