"""What each adaptor adds to the contract (which ``test_contract`` checks for all of them)."""

from __future__ import annotations

import errno

import pytest
import torch

from pager.device.simulated import SimulatedDevice
from pager.errors import TierFull, TierIOError
from pager.tiers.adaptors import CountedTier, Fault, FaultyTier, LimitedTier, TierStatistics
from pager.tiers.host_arena import HostArena

PAGE = 16384


def make_host(num_frames: int = 8) -> HostArena:
    arena = HostArena(PAGE, SimulatedDevice(), num_frames * PAGE)
    arena.grow(num_frames)
    return arena


def make_data() -> torch.Tensor:
    return torch.arange(PAGE, dtype=torch.int32).to(torch.uint8)


def test_limited_keeps_its_limit_and_gives_room_back() -> None:
    inner = make_host()
    tier = LimitedTier(inner, 5 * PAGE)
    first = tier.allocate(3)
    with pytest.raises(TierFull, match=r"48.00 KiB more than the 48.00 KiB in use .* limit of 80.00 KiB"):
        tier.allocate(3)
    tier.allocate(2)
    tier.free(first, 3)
    assert (tier.used_bytes, tier.peak_bytes, tier.budget_bytes) == (2 * PAGE, 5 * PAGE, 5 * PAGE)
    assert (inner.used_bytes, inner.peak_bytes) == (2 * PAGE, 5 * PAGE)


def test_limited_does_not_count_what_the_inner_tier_refused() -> None:
    tier = LimitedTier(make_host(2), 100 * PAGE)
    with pytest.raises(TierFull, match="no run of 3"):
        tier.allocate(3)
    assert (tier.used_bytes, tier.budget_bytes) == (0, 2 * PAGE)


def test_two_limits_over_one_tier_are_separate() -> None:
    inner = make_host()
    one, other = LimitedTier(inner, 4 * PAGE), LimitedTier(inner, 4 * PAGE)
    one.allocate(4)
    other.allocate(4)
    assert (one.used_bytes, other.used_bytes, inner.used_bytes) == (4 * PAGE, 4 * PAGE, 8 * PAGE)


def test_counted_counts_what_succeeded() -> None:
    tier = CountedTier(FaultyTier(make_host(), [Fault(operation="write", at=2)]))
    before = tier.statistics()
    first = tier.allocate(2)
    tier.write(first, make_data())
    with pytest.raises(TierIOError):
        tier.write(first, make_data())
    with pytest.raises(TierFull):
        tier.allocate(100)
    tier.read(first, torch.zeros(100, dtype=torch.uint8))
    tier.free(first, 1)
    assert tier.statistics() == TierStatistics(
        num_allocations=1,
        num_frees=1,
        num_reads=1,
        num_writes=1,
        num_errors=2,
        allocated_bytes=2 * PAGE,
        freed_bytes=PAGE,
        read_bytes=100,
        write_bytes=PAGE,
    )
    assert before == TierStatistics()


@pytest.mark.parametrize("operation", ["allocate", "free", "read", "write"])
@pytest.mark.parametrize("lasting", [False, True])
def test_the_nth_call_fails(operation: str, lasting: bool) -> None:
    fault = Fault(operation=operation, at=2, lasting=lasting)  # type: ignore[arg-type]
    tier = FaultyTier(make_host(), [fault])
    frames = [tier.inner.allocate(1) for _ in range(4)]
    uses = {
        "allocate": lambda frame: tier.allocate(1),
        "free": lambda frame: tier.free(frame, 1),
        "read": lambda frame: tier.read(frame, make_data()),
        "write": lambda frame: tier.write(frame, make_data()),
    }
    failed = []
    for number, frame in enumerate(frames, start=1):
        try:
            uses[operation](frame)
        except TierFull:
            assert operation == "allocate"
            failed.append(number)
        except TierIOError:
            assert operation != "allocate"
            failed.append(number)
    assert failed == ([2, 3, 4] if lasting else [2])
    assert tier.calls[operation] == 4


def test_the_error_may_be_chosen() -> None:
    tier = FaultyTier(
        make_host(), [Fault(operation="read", at=1, error=TierIOError(errno.ENXIO, "gone", "/x"))]
    )
    with pytest.raises(TierIOError, match="gone") as info:
        tier.read(tier.allocate(1), make_data())
    assert info.value.errno == errno.ENXIO


def test_a_write_may_be_torn() -> None:
    tier = FaultyTier(make_host(), [Fault(operation="write", at=2, num_bytes=1000)])
    first, out = tier.allocate(1), torch.zeros(PAGE, dtype=torch.uint8)
    tier.write(first, torch.zeros(PAGE, dtype=torch.uint8))
    with pytest.raises(TierIOError):
        tier.write(first, torch.ones(PAGE, dtype=torch.uint8))
    tier.read(first, out)
    assert out.tolist() == [1] * 1000 + [0] * (PAGE - 1000)


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_byte_may_be_wrong_and_the_callers_data_is_not_touched(operation: str) -> None:
    tier = FaultyTier(make_host(), [Fault(operation=operation, at=1, wrong_byte=7)])  # type: ignore[arg-type]
    first, data, out = tier.allocate(1), make_data(), torch.zeros(PAGE, dtype=torch.uint8)
    tier.write(first, data)
    tier.read(first, out)
    assert torch.equal(data, make_data())
    assert (out != data).nonzero().tolist() == [[7]]
    assert int(out[7]) == 7 ^ 0xFF


def test_latency_goes_through_the_clock_that_is_given() -> None:
    slept: list[float] = []
    tier = FaultyTier(make_host(), latency_seconds=0.25, sleep=slept.append)
    first = tier.allocate(1)
    tier.write(first, make_data())
    tier.read(first, make_data())
    tier.free(first, 1)
    assert slept == [0.25, 0.25]


def test_what_is_beyond_the_contract_is_passed_through() -> None:
    tier = CountedTier(LimitedTier(make_host(), 8 * PAGE))
    tier.view(tier.allocate(1), PAGE).fill_(3)
    out = torch.zeros(PAGE, dtype=torch.uint8)
    tier.read(0, out)
    assert out.tolist() == [3] * PAGE
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = tier.no_such_thing


@pytest.mark.parametrize(
    "options",
    [
        {"operation": "fly", "at": 1},
        {"operation": "read", "at": 0},
        {"operation": "free", "at": 1, "wrong_byte": 3},
    ],
)
def test_faults_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="operation|first call|moves no bytes"):
        Fault(**options)  # type: ignore[arg-type]
