"""One suite for every back end and every adaptor: what `pager.tiers.base` promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pager.device.simulated import SimulatedDevice
from pager.errors import PagerClosed, PagerInternalError, TierFull
from pager.tiers.adaptors import CountedTier, FaultyTier, LimitedTier
from pager.tiers.base import BackingTier
from pager.tiers.disk_file import DiskFile
from pager.tiers.host_arena import HostArena

PAGE = 16384
NUM_FRAMES = 12
NUM_BYTES = PAGE * NUM_FRAMES


def make_host(folder: Path) -> BackingTier:
    arena = HostArena(PAGE, SimulatedDevice(), NUM_BYTES)
    arena.grow(NUM_FRAMES)
    return arena


def make_disk(folder: Path, **knobs: Any) -> BackingTier:
    return DiskFile(folder, PAGE, NUM_FRAMES, **knobs)


BACK_ENDS: dict[str, Callable[[Path], BackingTier]] = {
    "host": make_host,
    "disk": make_disk,
    "disk with checksums": lambda folder: make_disk(folder, checksum=True),
    "disk with compression": lambda folder: make_disk(folder, compression=1),
    "disk with compression and checksums": lambda folder: make_disk(folder, compression=1, checksum=True),
    "limited host": lambda folder: LimitedTier(make_host(folder), NUM_BYTES),
    "counted disk": lambda folder: CountedTier(make_disk(folder)),
    "faulty host without faults": lambda folder: FaultyTier(make_host(folder)),
    "counted faulty limited disk": lambda folder: CountedTier(
        FaultyTier(LimitedTier(make_disk(folder), NUM_BYTES))
    ),
}


@pytest.fixture(params=BACK_ENDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BackingTier]:
    made = BACK_ENDS[request.param](tmp_path)
    yield made
    made.close()


def make_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """bf16 numbers: a tier that compresses has something to do."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(-(-num_bytes // 2), generator=generator).bfloat16()
    return numbers.view(torch.uint8)[:num_bytes].clone()


def read(tier: BackingTier, first: int, num_bytes: int) -> torch.Tensor:
    out = torch.zeros(num_bytes, dtype=torch.uint8)
    tier.read(first, out)
    return out


def test_it_is_a_tier(tier: BackingTier) -> None:
    assert isinstance(tier, BackingTier)
    assert (tier.page_size, tier.budget_bytes, tier.used_bytes, tier.peak_bytes) == (PAGE, NUM_BYTES, 0, 0)


def test_ranges_do_not_overlap_and_fill_the_tier(tier: BackingTier) -> None:
    frames: list[int] = []
    for size in (3, 1, 5, 2, 1):
        first = tier.allocate(size)
        frames += range(first, first + size)
    assert sorted(frames) == list(range(NUM_FRAMES))
    assert tier.used_bytes == NUM_BYTES


def test_a_full_tier_says_so_and_stays_as_it_was(tier: BackingTier) -> None:
    first = tier.allocate(10)
    with pytest.raises(TierFull):
        tier.allocate(3)
    assert (tier.used_bytes, tier.peak_bytes) == (10 * PAGE, 10 * PAGE)
    tier.allocate(2)
    tier.free(first, 10)
    assert tier.used_bytes == 2 * PAGE
    assert tier.allocate(10) == first
    assert tier.peak_bytes == NUM_BYTES


def test_parts_may_be_freed(tier: BackingTier) -> None:
    first = tier.allocate(NUM_FRAMES)
    tier.free(first + 4, 3)
    assert tier.allocate(3) == first + 4
    tier.free(first, NUM_FRAMES)
    assert tier.used_bytes == 0


@pytest.mark.parametrize("num_bytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_what_is_written_is_read(tier: BackingTier, num_bytes: int) -> None:
    before, first, after = tier.allocate(1), tier.allocate(3), tier.allocate(1)
    data, other = make_bytes(num_bytes), make_bytes(PAGE, seed=1)
    tier.write(before, other)
    tier.write(after, other)
    tier.write(first, data)
    assert torch.equal(read(tier, first, num_bytes), data)
    assert torch.equal(read(tier, before, PAGE), other)
    assert torch.equal(read(tier, after, PAGE), other)
    tier.write(first, data.flip(0))
    assert torch.equal(read(tier, first, num_bytes), data.flip(0))


def test_parts_of_a_range_are_read_and_written(tier: BackingTier) -> None:
    first = tier.allocate(4)
    data = make_bytes(4 * PAGE - 100)
    tier.write(first, data)
    new = make_bytes(PAGE, seed=1)
    tier.write(first + 1, new)
    expected = data.clone()
    expected[PAGE : 2 * PAGE] = new
    assert torch.equal(read(tier, first, len(data)), expected)
    assert torch.equal(read(tier, first + 2, PAGE + 10), expected[2 * PAGE : 3 * PAGE + 10])
    assert torch.equal(read(tier, first + 3, 7), expected[3 * PAGE : 3 * PAGE + 7])


def test_views_are_written_and_read_where_they_are(tier: BackingTier) -> None:
    first = tier.allocate(1)
    data = make_bytes(3 * PAGE)
    tier.write(first, data[100 : 100 + PAGE])
    out = torch.zeros(3 * PAGE, dtype=torch.uint8)
    tier.read(first, out[PAGE : 2 * PAGE])
    assert torch.equal(out[PAGE : 2 * PAGE], data[100 : 100 + PAGE])
    assert out[:PAGE].sum() == out[2 * PAGE :].sum() == 0


def test_misuse_is_a_bug_of_ours(tier: BackingTier) -> None:
    first = tier.allocate(NUM_FRAMES)
    with pytest.raises(PagerInternalError):
        tier.free(first + 10, 3)
    with pytest.raises(PagerInternalError):
        tier.write(first, make_bytes(NUM_BYTES + 1))
    with pytest.raises(PagerInternalError):
        tier.read(first + NUM_FRAMES, torch.zeros(1, dtype=torch.uint8))
    for wrong in (
        torch.zeros(8),
        torch.zeros(4, 2, dtype=torch.uint8),
        torch.zeros(8, dtype=torch.uint8)[::2],
    ):
        with pytest.raises(PagerInternalError, match="uint8"):
            tier.write(first, wrong)
        with pytest.raises(PagerInternalError, match="uint8"):
            tier.read(first, wrong)
    tier.free(first, NUM_FRAMES)
    with pytest.raises(PagerInternalError):
        tier.free(first, 1)
    assert tier.used_bytes == 0


def test_after_close_it_is_closed(tier: BackingTier) -> None:
    first = tier.allocate(2)
    tier.write(first, make_bytes(10))
    tier.close()
    tier.close()
    for use in (
        lambda: tier.allocate(1),
        lambda: tier.free(first, 1),
        lambda: tier.write(first, make_bytes(1)),
        lambda: read(tier, first, 1),
    ):
        with pytest.raises(PagerClosed):
            use()
    assert tier.peak_bytes == 2 * PAGE


def test_threads_share_it(tier: BackingTier) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(30):
                # Two others hold two frames each at most, so of the twelve there are always two in a row.
                size = 1 + (seed + turn) % 2
                first = tier.allocate(size)
                data = make_bytes(size * PAGE, seed=100 * seed + turn)
                tier.write(first, data)
                assert torch.equal(read(tier, first, len(data)), data)
                tier.free(first, size)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert tier.used_bytes == 0
