"""Sizes: what users may write, what they read, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pager.units import ceil_div, even_slices, format_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("128KiB", 128 * 2**10),
        ("128k", 128 * 2**10),
        ("128 kib", 128 * 2**10),
        ("128KB", 128_000),
        ("1.5 GiB", 3 * 2**29),
        (".5MiB", 2**19),
        ("24GB", 24 * 10**9),
        ("2T", 2**41),
        ("  8GiB  ", 2**33),
    ],
)
def test_text_is_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 GiBs", "eight", "-1GiB", "1e9", "1,5GiB", "1..5M", "8GiB!"])
def test_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="host_budget is"):
        parse_size(text, name="host_budget")


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="size is -1; a size in bytes cannot be negative"):
        parse_size(-1)


@pytest.mark.parametrize("value", [None, True, 1.5, b"8GiB", ["8GiB"]])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="page_size is .* expected bytes"):
        parse_size(value, name="page_size")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (128 * 2**10, "128.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (5 * 2**50, "5120.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_an_int_is_bytes_whether_as_number_or_text(num_bytes: int) -> None:
    assert parse_size(num_bytes) == num_bytes
    # Text goes through a float, which holds integers up to 2**53 exactly.
    assert parse_size(str(num_bytes)) == pytest.approx(num_bytes, rel=2**-52)


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_written_reads_back_within_its_two_decimals(num_bytes: int) -> None:
    assert parse_size(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@given(st.integers(min_value=0, max_value=2**60), st.integers(min_value=1, max_value=2**40))
def test_ceil_div_is_the_smallest_cover(numerator: int, denominator: int) -> None:
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


@given(st.integers(0, 10**12), st.integers(0, 10**10), st.integers(1, 10**6))
def test_even_slices_are_as_few_as_can_be_and_none_is_much_longer(total: int, most: int, align: int) -> None:
    allowed = max(most // align, 1) * align
    length = even_slices(total, most, align)
    assert length % align == 0
    assert length <= allowed
    if total:
        number = ceil_div(total, allowed)
        assert ceil_div(total, length) == number
        assert length < total / number + align


def test_slices_are_even() -> None:
    assert even_slices(45, 33) == 23
    assert even_slices(45, 33, 8) == 24
    assert even_slices(45, 50, 8) == 48
    assert even_slices(45, 3, 8) == 8
