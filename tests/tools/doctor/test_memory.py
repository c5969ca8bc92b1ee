"""DRAM by the number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from pager.tools.doctor import memory


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12])]
)
def test_thread_counts_end_with_all_cores(cores: int, counts: list[int]) -> None:
    assert list(memory.thread_counts(cores)) == counts


def test_threads_copy_and_end() -> None:
    assert memory.measure_dram(2, block_bytes=2**16, seconds=0.01) > 0


def test_too_little_memory_is_raised_and_no_thread_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(np, "ones", refuse)
    with pytest.raises(MemoryError, match="no room"):
        memory.measure_dram(3, block_bytes=2**16, seconds=0.01)


@pytest.mark.parametrize(
    ("rates", "verdict", "found"),
    [
        ({1: 20e9, 2: 40e9, 4: 70e9, 16: 130e9}, "ok", "20 with 1, 40 with 2, 70 with 4, 130 with 16"),
        ({1: 10e9, 2: 20e9}, "slow", "less than one memory channel"),
        ({1: 25e9, 2: 26e9, 4: 24e9}, "slow", "more threads bring nothing"),
        ({1: 25e9, 2: 26e9}, "ok", "25 with 1"),
    ],
)
def test_dram(rates: dict[int, float], verdict: str, found: str) -> None:
    result = memory.check_dram(rates)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict == "slow")
    assert list(result.values["bytes_per_second"]) == [str(threads) for threads in rates]
