"""What the host's thread enqueues: updates beside the backward, the CPU's part, and how far it runs ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.step_schedule import Schedule
from pager.graph.task_timing import Engine, MachineRates, run_tasks
from pager.policies.belady import Belady
from tests.graph.step_builders import ROUND_RATES, make_step, run

NUM = 6
GRADIENT = 200  # bytes


def walked(
    *,
    steps: int = 1,
    num_slots: int = 4,
    rates: MachineRates = ROUND_RATES,
    is_over: Callable[..., bool] | None = None,
    knobs: dict[str, Any] | None = None,
    **placement: Any,
) -> Schedule:
    """A walk over a step of six parameters whose weights stay, updates in backward."""
    schedule = Schedule(
        make_step(),
        Placement.of(NUM, stays=True, **placement),
        DeviceShares(arena_bytes=10**6, num_slots=num_slots, slot_bytes=600),
        StepKnobs(update_at="backward", **(knobs or {})),
        Belady(),
        rates,
        is_over=is_over,
    )
    for _ in range(steps):
        schedule.run_step()
    return schedule


def numbers(schedule: Schedule, engine: Engine, kind: str = "") -> list[int]:
    tasks = schedule.tasks
    return [t for t in range(len(tasks)) if tasks.engine[t] == engine and kind in ("", tasks.kind[t])]


# -- updates beside the backward --------------------------------------------------------------------


def test_an_update_beside_the_backward_stops_it_only_at_its_end() -> None:
    result = run(make_step(), stays=True, beside=True, knobs={"lent_bytes": NUM * GRADIENT}, keep_tasks=True)
    own = [task for task in result.tasks if task.engine == "compute" and task.kind == "compute"]
    # Forward, recompute and backward in one go; then the compute waits for all updates, and these for their states.
    assert own[-1].end_seconds == pytest.approx(18.0)
    assert own[-1].end_seconds < result.seconds
    assert {task.kind for task in result.tasks if task.engine == "beside"} == {"update"}
    assert list(result.stall_seconds) == ["states in"]
    assert result.stall_seconds["states in"] == pytest.approx(result.seconds - 18.0)


def test_of_too_many_loans_the_compute_waits_for_the_oldest() -> None:
    """Two gradients may be lent: what comes after the third waits for the first one's update, and so on."""
    schedule = walked(beside=True, knobs={"lent_bytes": 2 * GRADIENT})
    timing = run_tasks(schedule.tasks, ROUND_RATES)
    updates = numbers(schedule, Engine.BESIDE)
    ends = timing.end[updates[1::2]]  # two slices each
    ticks = schedule.steps[0].ticks[6:]
    # Gradient n comes with tick 2 n + 1 of the backward.
    for number in range(2, NUM - 1):
        assert timing.begin[ticks[2 * number + 2]] == pytest.approx(ends[number - 2])
    free = walked(beside=True, knobs={"lent_bytes": NUM * GRADIENT})
    begins = run_tasks(free.tasks, ROUND_RATES).begin[free.steps[0].ticks]
    assert begins.tolist() == pytest.approx(list(range(18)))


def test_without_leave_to_lend_updates_are_the_computes() -> None:
    schedule = walked(knobs={"lent_bytes": NUM * GRADIENT})
    assert not numbers(schedule, Engine.BESIDE)
    assert len(numbers(schedule, Engine.COMPUTE, "update")) == 2 * NUM


# -- slots ------------------------------------------------------------------------------------------


def test_states_have_streams_of_their_own() -> None:
    schedule = walked()
    assert {schedule.tasks.kind[task] for task in numbers(schedule, Engine.SLOTS_IN)} == {"states in"}
    assert {schedule.tasks.kind[task] for task in numbers(schedule, Engine.SLOTS_OUT)} == {"states out"}
    assert not numbers(schedule, Engine.LINK_IN) + numbers(schedule, Engine.LINK_OUT)


# -- the CPU's part ---------------------------------------------------------------------------------


def test_a_gradient_that_finds_no_home_is_the_devices() -> None:
    """Homes for two of six gradients, and no update done before the next gradient comes."""
    schedule = walked(on_cpu=True, is_over=lambda task, *, at: False, knobs={"home_bytes": 2 * GRADIENT})
    assert [schedule.tasks.subject[task] for task in numbers(schedule, Engine.CPU_UPDATE)] == [5, 4]
    assert schedule.steps[0].num_refused_elements == 4 * 100
    # Nothing was fetched ahead for those that the device does in the CPU's stead.
    assert {schedule.tasks.subject[task] for task in numbers(schedule, Engine.SLOTS_IN)} == {0, 1, 2, 3}
    done = walked(on_cpu=True, is_over=lambda task, *, at: True, knobs={"home_bytes": 2 * GRADIENT})
    assert len(numbers(done, Engine.CPU_UPDATE)) == NUM
    assert done.steps[0].num_refused_elements == 0


def test_a_refused_gradient_takes_the_slot_of_what_was_fetched_last() -> None:
    on_cpu = np.arange(NUM) == 5
    schedule = walked(on_cpu=on_cpu, num_slots=2, steps=2, knobs={"home_bytes": 0})
    # Two slices were on their way for the next parameter; one of them is brought again.
    brought = [schedule.tasks.subject[task] for task in numbers(schedule, Engine.SLOTS_IN)]
    assert brought.count(4) > 2 * len(schedule.steps)


def test_the_clock_says_whether_a_home_is_free() -> None:
    """A gradient is 20 s on its way home and the CPU takes 100: all but the first find the only home taken."""
    schedule = walked(on_cpu=True, knobs={"home_bytes": GRADIENT})
    assert len(numbers(schedule, Engine.CPU_UPDATE)) == 1
    fast = dataclasses.replace(
        ROUND_RATES,
        link_out_bytes_per_second=1e6,
        link_both_bytes_per_second=1e6,
        cpu_update_parameters_per_second=1e6,
        cpu_thread_parameters_per_second=1e6,
        host_access_seconds=1.0,
    )
    assert (
        len(numbers(walked(on_cpu=True, rates=fast, knobs={"home_bytes": GRADIENT}), Engine.CPU_UPDATE))
        == NUM
    )


def test_what_is_used_first_is_due_first() -> None:
    schedule = walked(on_cpu=True)
    due = {schedule.tasks.subject[task]: schedule.tasks.jobs[task][0] for task in schedule.tasks.jobs}
    assert due == {parameter: 18 + parameter for parameter in range(NUM)}


def test_late_updates_run_beside_the_next_forward_in_its_order() -> None:
    late = np.arange(NUM) >= 4  # used last in the forward
    schedule = walked(steps=2, late=late)
    tasks = schedule.tasks
    first, second = schedule.steps
    beside = [task for task in numbers(schedule, Engine.BESIDE, "update") if task < second.first_task]
    assert [tasks.subject[task] for task in beside] == [4, 4, 5, 5]  # in two slices each
    assert first.ticks[-1] < beside[0]
    # Whoever uses w4 next waits for its update; w3 does not.
    assert beside[1] in tasks.waits(second.ticks[4])
    assert not set(beside) & set(tasks.waits(second.ticks[3]))
    # Of the others, updates are in backward, and their states come while it runs.
    others = [task for task in numbers(schedule, Engine.COMPUTE, "update") if task < second.first_task]
    assert sorted({tasks.subject[task] for task in others}) == [0, 1, 2, 3]


def test_where_updates_are_late_the_link_does_not_rest() -> None:
    late = np.arange(NUM) == NUM - 1
    schedule = walked(on_cpu=~late, late=late, knobs={"cpu_threads": 1})
    assert list(schedule.tasks.limits.values()) == [1, 1]
    assert schedule.steps[0].link_rests < 0


def test_all_threads_are_at_it_while_the_link_rests() -> None:
    schedule = walked(on_cpu=True, steps=2, knobs={"cpu_threads": 1, "cpu_slices": (2,) * NUM})
    assert list(schedule.tasks.limits.values()) == [1, 1, 4, 1, 4]
    first, second = schedule.steps
    for marks in (first, second):
        assert schedule.tasks.limits[marks.first_gradient] == 1
        assert schedule.tasks.limits[marks.link_rests] == 4
        # Before the first gradient is sent home, and after the last computation.
        assert marks.ticks[7] < marks.first_gradient < marks.ticks[8]
        assert marks.link_rests > marks.ticks[-1]
    assert {slices for _, slices in schedule.tasks.jobs.values()} == {2}


def test_the_host_waits_for_the_update_of_what_it_uses() -> None:
    """w5 is used as F begins. Its gradient is there at F + 3, at home at F + 23, updated at F + 123, and back at
    F + 143, when the next one begins. A step ends at F + 13, and the host is at w5 at once: late by 110 s. The host had
    launched all of the step as soon as the update was done, at F - 20: by then the link rests, it thinks.
    """
    result = run(make_step(), stays=True, keeps_states=True, on_cpu=np.arange(NUM) == 5)
    assert result.seconds == pytest.approx(143.0)
    assert result.late_seconds == pytest.approx(110.0)
    assert result.rest_seconds == pytest.approx(143.0 - 110.0)


# -- the host ---------------------------------------------------------------------------------------


def test_the_host_runs_no_farther_ahead_than_the_driver_queues() -> None:
    rates = dataclasses.replace(ROUND_RATES, queued_launches=12, access_launches=6)
    schedule = walked(keeps_states=True, rates=rates)
    timing = run_tasks(schedule.tasks, rates)
    ticks = schedule.steps[0].ticks
    issued = [max(schedule.tasks.waits(tick)) for tick in ticks[:6]]
    # Two accesses are queued behind the one that runs: the fourth is launched when the first is done.
    assert timing.end[issued].tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0, 2.0, 3.0], abs=1e-6)
    free = walked(keeps_states=True)
    begins = run_tasks(free.tasks, ROUND_RATES).begin[numbers(free, Engine.HOST, "host")]
    assert begins.tolist() == pytest.approx([0.0] * len(begins), abs=1e-6)


# -- gradients that wait for the step ------------------------------------------------------------------------------


def at_step(sends_gradient: Any, *, arena_bytes: int = 10**6) -> Schedule:
    """Two steps with updates in the forward."""
    schedule = Schedule(
        make_step(),
        Placement.of(NUM, stays=True, sends_gradient=sends_gradient),
        DeviceShares(arena_bytes=arena_bytes, num_slots=2, slot_bytes=1400),
        StepKnobs(),
        Belady(),
        ROUND_RATES,
    )
    for _ in range(2):
        schedule.run_step()
    return schedule


def test_a_gradient_that_is_sent_takes_no_frames_and_comes_with_its_states() -> None:
    sends = np.array([False, True] * 3)
    # Weights of 1200 bytes, slots, and three gradients of six: more would have to leave.
    schedule = at_step(sends, arena_bytes=1200 + 2800 + 3 * GRADIENT)
    tasks = schedule.tasks
    sent = numbers(schedule, Engine.LINK_OUT, "gradient out")
    assert [tasks.subject[task] for task in sent] == [5, 3, 1] * 2
    begin = schedule.steps[1].first_task
    brought = [(tasks.subject[t], tasks.work[t]) for t in numbers(schedule, Engine.SLOTS_IN) if t > begin]
    # The first two come as the step before ends, and in the end those of the next one.
    assert sorted(brought) == [(p, 1000 + GRADIENT * sends[p]) for p in range(NUM)]


def test_of_too_many_gradients_on_their_way_the_compute_waits_for_the_oldest() -> None:
    """The largest may be; equal ones go one after the other."""
    schedule = at_step(True)
    tasks = schedule.tasks
    sent = numbers(schedule, Engine.LINK_OUT, "gradient out")[:NUM]
    waited = [[t for t in numbers(schedule, Engine.COMPUTE) if task in tasks.waits(t)][:1] for task in sent]
    next_made = [min(t for t in numbers(schedule, Engine.COMPUTE) if t > task) for task in sent[1:]]
    assert waited[:-1] == [[task] for task in next_made]


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_step_takes_the_host_time_for_each_parameter(update_at: str) -> None:
    """With updates at the step the ring fills meanwhile."""
    rates = dataclasses.replace(ROUND_RATES, host_step_seconds=7.0)
    schedule = Schedule(
        make_step(),
        Placement.of(NUM, stays=True),
        DeviceShares(arena_bytes=10**6, num_slots=2, slot_bytes=1400),
        StepKnobs(update_at=update_at),
        Belady(),
        rates,
    )
    schedule.run_step()
    tasks = schedule.tasks
    longest = max(numbers(schedule, Engine.HOST), key=lambda task: tasks.work[task])
    assert tasks.work[longest] == 7.0 * NUM
    fetched = [t for t in numbers(schedule, Engine.SLOTS_IN) if t > schedule.last_compute]
    assert len(fetched) == 2
    assert all((task < longest) == (update_at == "step") for task in fetched)
