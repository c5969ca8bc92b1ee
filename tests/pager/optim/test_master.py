"""A master and its two halves: against arithmetic on bits in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pager.optim.master import join, split

# Lower halves at which rounding changes its mind, and their neighbours.
LOWER_HALVES = (0x0000, 0x0001, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF)


def make_master(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int32).numpy().view(np.uint32)


def oracle(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight bits, low, and the bits of the master that comes back; for what is not NaN."""
    wide = bits.astype(np.int64)
    lower, is_odd = wide & 0xFFFF, (wide >> 16) & 1
    goes_up = (lower > 0x8000) | ((lower == 0x8000) & (is_odd == 1))
    high = (wide >> 16) + goes_up
    difference = wide - (high << 16)
    low = np.minimum(difference, 0x7FFF)
    return high, low, wide - (difference - low)


def check_split(bits: np.ndarray) -> None:
    master = make_master(bits)
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    low = torch.empty(master.shape, dtype=torch.int16)
    split(master, weight, low)
    back = join(weight, low, torch.empty_like(master))

    nan = torch.isnan(master).numpy()
    assert torch.equal(torch.isnan(weight), torch.isnan(master))
    assert torch.equal(torch.isnan(back), torch.isnan(master))
    high, expected_low, expected_back = (values[~nan] for values in oracle(bits))
    rounded = master.to(torch.bfloat16)
    assert np.array_equal(weight.view(torch.int16).numpy()[~nan], rounded.view(torch.int16).numpy()[~nan])
    assert np.array_equal(weight.view(torch.int16).numpy().view(np.uint16)[~nan], high)
    assert np.array_equal(low.numpy()[~nan], expected_low)
    assert np.array_equal(bits_of(back)[~nan], expected_back)
    assert np.array_equal(low.numpy()[~nan] == 0, (weight.float() == master).numpy()[~nan])
    assert np.array_equal(bits_of(master), bits)

    again_weight, again_low = torch.empty_like(weight), torch.empty_like(low)
    split(back, again_weight, again_low)
    assert np.array_equal(again_low.numpy()[~nan], low.numpy()[~nan])
    assert torch.equal(again_weight[~torch.from_numpy(nan)], weight[~torch.from_numpy(nan)])


@pytest.mark.parametrize("lower", LOWER_HALVES, ids=hex)
def test_every_upper_half(lower: int) -> None:
    check_split((np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(lower))


def test_every_lower_half() -> None:
    for upper in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x8000, 0xBF80, 0xFF7F):
        check_split((np.uint32(upper) << 16) | np.arange(1 << 16, dtype=np.uint32))


@given(hnp.arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1)))
def test_any_master(bits: np.ndarray) -> None:
    check_split(bits)


def test_more_than_a_block_and_every_kind_of_scratch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 3 * (1 << 16) + 77, dtype=np.uint32)
    check_split(bits)
    master = make_master(bits)
    wanted = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split(master, *wanted)
    for scratch in (torch.empty_like(master), torch.empty(master.shape, dtype=torch.int32), master):
        weight, low = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
        split(master, weight, low, scratch)
        assert torch.equal(low, wanted[1])
        assert torch.equal(weight.view(torch.int16), wanted[0].view(torch.int16))


def test_shapes_are_kept() -> None:
    master = torch.linspace(-1, 1, 24).view(2, 3, 4)
    weight, low = torch.empty(2, 3, 4, dtype=torch.bfloat16), torch.empty(2, 3, 4, dtype=torch.int16)
    split(master, weight, low)
    out = torch.empty(2, 3, 4)
    assert join(weight, low, out) is out
    assert torch.equal(out, master)


def test_zeroed_low_is_the_weight() -> None:
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.empty(1000)
    join(weight, torch.zeros(1000, dtype=torch.int16), out)
    assert torch.equal(out, weight.float())


def test_the_tie_moves_the_master_by_one_ulp_and_never_the_weight() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0xBF808000], np.uint32)
    master = make_master(bits)
    weight, low = torch.empty(3, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int16)
    split(master, weight, low)
    assert low.tolist() == [0x7FFF, -0x8000, 0x7FFF]
    assert torch.equal(weight, master.to(torch.bfloat16))
    assert bits_of(join(weight, low, torch.empty(3))).tolist() == [0x3F807FFF, 0x3F818000, 0xBF807FFF]


def test_what_does_not_fit_is_refused() -> None:
    weight, low, master = (
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.int16),
        torch.zeros(4),
    )
    with pytest.raises(TypeError, match="weight, low and master must be"):
        join(weight.float(), low, master)
    with pytest.raises(ValueError, match="low has 3 elements on cpu, the master 4 on cpu"):
        join(weight, low[:3], master)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        split(master, torch.zeros(8, dtype=torch.bfloat16)[::2], low)
    with pytest.raises(TypeError, match="scratch of split must be"):
        split(master, weight, low, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="scratch has 5 elements"):
        split(master, weight, low, torch.zeros(5))
