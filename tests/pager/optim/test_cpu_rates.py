"""What is measured of the CPU's updates, on a clock of the test's own."""

from __future__ import annotations

import pytest

from pager.optim import cpu_rates
from pager.optim.cpu_rates import CpuRates


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu_rates, "time", clock)
    return clock


def test_jobs_that_overlap_are_counted_once(clock: Clock) -> None:
    """Two that could begin at once, done after 1 and 3 seconds: 30 elements in 3 seconds."""
    rates = CpuRates()
    began = clock.now
    clock.now = began + 1
    rates.count(began, 10)
    clock.now = began + 3
    rates.count(began, 20)
    rates.end_step(100)
    assert rates.per_second == pytest.approx(10)
    assert rates.alone_per_second == 0
    # A step without any leaves the rate as it was.
    rates.end_step(100)
    assert rates.per_second == pytest.approx(10)


def test_alone_is_what_was_done_while_the_link_rested(clock: Clock) -> None:
    rates = CpuRates()
    clock.now = 110.0
    rates.count(100.0, 10)  # beside the link: one a second
    rates.backward_ended(link_rests=True)
    clock.now = 112.0
    rates.count(101.0, 10)  # began long ago; since the link rests, five a second
    rates.first_gradient()
    clock.now = 120.0
    rates.count(112.0, 8)
    rates.end_step(100)
    assert rates.per_second == pytest.approx(28 / 20)
    assert rates.alone_per_second == pytest.approx(5)
    # The next step's rate alone is 15: half of the way.
    rates.backward_ended(link_rests=True)
    clock.now = 122.0
    rates.count(120.0, 30)
    rates.end_step(100)
    assert rates.alone_per_second == pytest.approx(10)


def test_the_link_rests_from_the_end_of_a_step_to_the_first_gradient_but_for_what_was_waited_for(
    clock: Clock,
) -> None:
    rates = CpuRates()
    rates.end_step(100)
    rates.was_waited_for(0.5)
    clock.now += 2
    rates.first_gradient()
    assert rates.rest_seconds == pytest.approx(1.5)
    rates.end_step(100)
    clock.now += 0.5
    rates.first_gradient()
    assert rates.rest_seconds == pytest.approx(1.0)


def test_before_the_first_step_nothing_rested(clock: Clock) -> None:
    """It was the time since the machine's start once, and half of that in each of the next steps."""
    rates = CpuRates()
    rates.first_gradient()
    assert rates.rest_seconds == 0
    rates.end_step(100)
    clock.now += 0.25
    rates.first_gradient()
    assert rates.rest_seconds == pytest.approx(0.25)


def test_what_the_cpu_was_late_by_counts_after_the_first_steps(clock: Clock) -> None:
    rates = CpuRates()
    clock.now = 101.0
    rates.count(100.0, 10)
    found = []
    for _ in range(6):
        rates.was_waited_for(0.4)
        rates.end_step(100)
        found.append(rates.less)
        rates.num_steps += 1
    # Four elements of a hundred, half of it at a time.
    assert found == pytest.approx([0, 0, 0, 0, 0.02, 0.04])
    rates.was_refused(10)
    rates.end_step(100)
    assert rates.less == pytest.approx(0.09)
    rates.end_step(100)
    assert rates.less < 0.09
