"""The rule book of ``pager tune``: what is tried next, what counts as a gain, and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pager.tools.tuner import MAX_RUNS, Measurement, Setting, Tuning, moves_of, spread_of, tune

KIB = 1024
START = Setting(page_bytes=128 * KIB, prefetch_distance=4)
WAITING: dict[str, Any] = {"busy_share": 0.3, "peak_share": 0.99}


def setting(kib: int, distance: int) -> Setting:
    return Setting(page_bytes=kib * KIB, prefetch_distance=distance)


def tuned(seconds: Callable[[int, int], float], **more: Any) -> tuple[Tuning, list[tuple[int, int]]]:
    """The tuning of a machine whose step takes ``seconds(kib, distance)``, and what was run after the start."""
    found = tune(
        START,
        lambda s: Measurement(seconds=seconds(s.page_bytes // KIB, s.prefetch_distance), **(WAITING | more)),
        repeat=False,
    )
    return found, [(t.setting.page_bytes // KIB, t.setting.prefetch_distance) for t in found.trials[1:]]


@pytest.mark.parametrize(
    ("start", "measured", "expected"),
    [
        # Waiting for copies: longer distance, then pages.
        ((128, 4), {"busy_share": 0.69}, [(128, 8), (512, 4), (32, 4), (128, 2)]),
        # Busy: the rule book has nothing, also with a full arena.
        ((128, 4), {"busy_share": 0.7, "peak_share": 1.0}, []),
        # Near the limit and throwing out what came ahead: shorter distance, and never a longer one.
        (
            (128, 4),
            {"busy_share": 0.9, "peak_share": 0.95, "wasted_share": 0.01},
            [(128, 2), (512, 4), (32, 4)],
        ),
        ((128, 4), {"busy_share": 0.9, "peak_share": 0.94, "wasted_share": 0.5}, []),
        # The ends of what Config takes.
        ((4096, 64), {}, [(1024, 64), (4096, 32)]),
        ((16, 1), {}, [(16, 2), (64, 1)]),
    ],
)
def test_the_rule_book(
    start: tuple[int, int], measured: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    moves = moves_of(setting(*start), Measurement(seconds=1.0, **measured))
    assert [move.setting for move in moves] == [setting(*pair) for pair in expected]


def test_what_gains_is_gone_on_with() -> None:
    found, runs = tuned(lambda kib, distance: 2 - min(distance, 32) / 64)
    assert runs[:4] == [(128, 8), (128, 16), (128, 32), (128, 64)]
    assert found.best is not None
    assert found.best.setting == setting(128, 32)
    assert found.gain == pytest.approx(1 - 1.5 / (2 - 4 / 64))
    assert found.stopped == "nothing else gains more than the noise (0.5%)"


def test_pages_come_after_the_distance_and_one_knob_is_turned_at_a_time() -> None:
    found, runs = tuned(lambda kib, distance: 1.0 if kib == 512 else 2.0)
    assert runs[:3] == [(128, 8), (512, 4), (2048, 4)]
    assert found.best is not None
    assert found.best.setting == setting(512, 4)
    before = START
    for trial in found.trials[1:]:
        changed = [
            name for name in Setting.__slots__ if getattr(trial.setting, name) != getattr(before, name)
        ]
        assert len(changed) == 1
        before = trial.setting if trial.better else before


def test_the_rules_second_guess_is_tried_too() -> None:
    found, _ = tuned(lambda kib, distance: 1 + distance / 10)
    assert found.best is not None
    assert found.best.setting == setting(128, 1)


def test_nothing_is_run_twice() -> None:
    _, runs = tuned(lambda kib, distance: 1 + abs(distance - 16) + abs(kib - 512))
    assert len(set(runs)) == len(runs)
    assert (128, 4) not in runs


def test_a_busy_device_ends_it_at_once() -> None:
    found, runs = tuned(lambda kib, distance: 1.0, busy_share=0.82)
    assert runs == []
    assert found.stopped == "the device is busy 82% of a step: the computation is the wall"


def test_a_gain_within_the_noise_of_the_steps_does_not_count() -> None:
    def seconds(kib: int, distance: int) -> float:
        return {8: 0.96, 4: 1.0}.get(distance, 1.1)

    quiet, _ = tuned(seconds, noise=0.02)  # together 0.028
    loud, _ = tuned(seconds, noise=0.03)  # together 0.042
    assert quiet.best is not None
    assert loud.best is not None
    assert (quiet.best.setting.prefetch_distance, loud.best.setting.prefetch_distance) == (8, 4)


def test_a_loud_run_does_not_spoil_the_others() -> None:
    def measure(s: Setting) -> Measurement:
        times = {4: (1.0, 0.0), 8: (1.2, 0.5)}
        seconds, noise = times.get(s.prefetch_distance, (0.9, 0.001))
        return Measurement(
            seconds=seconds if s.page_bytes == START.page_bytes else 2.0, noise=noise, **WAITING
        )

    found = tune(START, measure, repeat=False)
    assert found.best is not None
    assert found.best.setting == setting(128, 2)


def test_the_noise_between_runs_is_measured_by_repeating_the_first() -> None:
    times = iter([1.0, 1.1, *[0.95] * MAX_RUNS])
    found = tune(START, lambda s: Measurement(seconds=next(times), **WAITING))
    assert [trial.better for trial in found.trials[:3]] == [True, False, False]
    assert found.trials[1].setting == START
    assert found.noise == pytest.approx(0.1)
    assert found.best is not None
    assert found.best.measurement.seconds == pytest.approx(1.05)
    assert found.stopped.endswith("(10.0%)")


def test_a_faster_repeat_is_no_gain() -> None:
    times = iter([1.0, 0.5, *[0.74] * MAX_RUNS])
    found = tune(START, lambda s: Measurement(seconds=next(times), **WAITING))
    assert not any(trial.better for trial in found.trials[1:])
    assert found.gain == 0


def test_a_setting_that_cannot_be_is_passed_over_at_every_distance() -> None:
    def measure(s: Setting) -> Measurement:
        if s.page_bytes > START.page_bytes:
            return Measurement(reason="no room")
        return Measurement(seconds=2 - min(s.prefetch_distance, 16) / 32, **WAITING)

    found = tune(START, measure, repeat=False)
    assert found.best is not None
    assert found.best.setting == setting(128, 16)
    assert [trial.setting.page_bytes for trial in found.trials].count(512 * KIB) == 1


def test_no_run_at_all_says_so() -> None:
    found = tune(START, lambda s: Measurement(reason="everything fits"))
    assert found.best is None
    assert found.gain == 0
    assert (len(found.trials), found.stopped) == (1, "no run could be made")


def test_what_the_simulator_chose_is_tried_first() -> None:
    wanted = setting(512, 8)
    seen: list[Setting] = []

    def measure(s: Setting) -> Measurement:
        seen.append(s)
        return Measurement(seconds=1.0 if s == wanted else 2.0, **WAITING)

    found = tune(START, measure, candidates=[(START, "again"), (wanted, "the simulator's choice")])
    assert seen[:3] == [START, START, wanted]
    assert found.best is not None
    assert (found.best.setting, found.best.why) == (wanted, "the simulator's choice")


def test_it_ends_after_so_many_runs() -> None:
    seconds = iter(range(1000, 0, -1))
    found = tune(START, lambda s: Measurement(seconds=float(next(seconds)), **WAITING), repeat=False)
    assert len(found.trials) <= MAX_RUNS
    endless = iter(0.5**n for n in range(1000))
    found = tune(setting(16, 1), lambda s: Measurement(seconds=next(endless), busy_share=0.0), repeat=False)
    assert found.stopped == f"{MAX_RUNS} runs were made"
    assert len(found.trials) == MAX_RUNS


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([1.0, 1.0, 1.0], 0.0), ([1.0, 2.0, 3.0], 1.25 * 1.48 / 3**0.5 / 2), ([2.0, 4.0], 1.85 / 2**0.5 / 3)],
)
def test_the_spread_of_steps(seconds: list[float], expected: float) -> None:
    assert spread_of(seconds) == pytest.approx(expected)
