"""Counters and what users see of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from pager.statistics import Counters, Statistics


def test_the_hit_rate_counts_accesses() -> None:
    statistics = Statistics(hits=6, minor_faults=1, major_faults=1)
    assert (statistics.num_accesses, statistics.hit_rate) == (8, 0.75)
    assert Statistics().hit_rate == 1.0


def test_a_snapshot_cannot_be_changed() -> None:
    statistics = Statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.hits = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        Statistics(1)  # type: ignore[call-arg]


def test_names_are_plain_floats_under_one_prefix() -> None:
    values = Statistics(hits=3, stall_seconds=0.5).as_dict()
    assert {type(value) for value in values.values()} == {float}
    assert all(name.startswith("pager/") for name in values)
    assert values["pager/hits"] == 3.0
    assert values["pager/stall_seconds"] == 0.5
    assert values["pager/hit_rate"] == 1.0
    assert values.keys() == {f"pager/{field.name}" for field in dataclasses.fields(Statistics)} | {
        "pager/hit_rate"
    }


def test_names_carry_their_unit_or_are_counts() -> None:
    counts = {
        "hits",
        "minor_faults",
        "major_faults",
        "refaults",
        "prefetch_late",
        "prefetch_unused",
        "num_steps",
        "deviations",
    }
    for field in dataclasses.fields(Statistics):
        assert field.name in counts or field.name.endswith(("_bytes", "_seconds"))


def test_every_counter_is_a_statistic() -> None:
    counters = Counters()
    counters.page_in_bytes += 5
    fields = counters.as_fields()
    assert fields["page_in_bytes"] == 5
    assert fields.keys() <= {field.name for field in dataclasses.fields(Statistics)}
    assert Statistics(**fields).page_in_bytes == 5  # type: ignore[arg-type]


def test_additions_of_two_threads_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads a counter, the other adds in between: made to meet by a lock that tells when it is wanted."""
    counters = Counters()
    inner = counters._lock
    entered, other_came = threading.Event(), threading.Event()

    class Met:
        def __enter__(self) -> None:
            if entered.is_set():
                other_came.set()
            inner.acquire()

        def __exit__(self, *error: object) -> None:
            inner.release()

    class Slow(int):
        """Between the reading and the writing of the counter the other thread gets its turn."""

        def __add__(self, other: int) -> int:
            entered.set()
            assert other_came.wait(20)
            return int(self) + other

    monkeypatch.setattr(counters, "_lock", Met())
    counters.page_in_bytes = Slow(1)
    first = threading.Thread(target=lambda: counters.add(page_in_bytes=10))
    first.start()
    assert entered.wait(20)
    second = threading.Thread(target=lambda: counters.add(page_in_bytes=100, stall_seconds=0.5))
    second.start()
    first.join(20)
    second.join(20)
    assert counters.page_in_bytes == 111
    assert counters.stall_seconds == 0.5


def test_the_history_keeps_the_latest_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counters, "HISTORY_SAMPLES", 3)
    counters = Counters()
    for resident_bytes in range(5):
        counters.sample_resident(resident_bytes)
    history = counters.resident_history()
    assert [resident for _, resident in history] == [2, 3, 4]
    times = [seconds for seconds, _ in history]
    assert times == sorted(times)
    assert times[0] >= 0


def test_all_of_it_goes_to_a_summary_writer() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[str, tuple[float, int]] = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name] = (value, step)

    writer, statistics = Writer(), Statistics(hits=3)
    statistics.log_to(writer, 7)
    assert writer.scalars == {name: (value, 7) for name, value in statistics.as_dict().items()}
