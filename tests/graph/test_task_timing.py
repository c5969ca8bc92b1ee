"""Engines that share a machine: rates alone and together, order, and late tasks, by numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pager.graph.task_timing import Clock, Engine, MachineRates, TaskList, Timing, run_tasks
from tests.graph.step_builders import ROUND_RATES


def make_tasks(*rows: tuple[Engine, float, tuple[int, ...]]) -> TaskList:
    tasks = TaskList()
    for engine, work, waits in rows:
        tasks.add(engine, work, waits)
    return tasks


def ends(timing: Timing) -> list[float]:
    return [round(end, 6) for end in timing.end.tolist()]


def test_an_engine_does_one_task_at_a_time_in_order() -> None:
    # The second copy is ready at once, the first after 3 seconds: a stream does not overtake.
    tasks = make_tasks((Engine.COMPUTE, 3.0, ()), (Engine.LINK_IN, 10.0, (0,)), (Engine.LINK_IN, 20.0, ()))
    assert ends(run_tasks(tasks, ROUND_RATES)) == [3.0, 4.0, 6.0]


def test_a_direction_is_slower_while_the_other_runs() -> None:
    tasks = make_tasks((Engine.LINK_IN, 16.0, ()), (Engine.LINK_OUT, 36.0, ()))
    # Two seconds together at 8, then 20 bytes alone at 10.
    assert ends(run_tasks(tasks, ROUND_RATES)) == [2.0, 4.0]


def test_a_disk_is_slower_each_way_while_it_reads_and_writes() -> None:
    rates = dataclasses.replace(ROUND_RATES, disk_both_bytes_per_second=1.0)
    tasks = make_tasks((Engine.DISK_READ, 3.0, ()), (Engine.DISK_WRITE, 11.0, ()))
    # Three seconds together at 1 each, then 8 bytes alone at 4.
    assert ends(run_tasks(tasks, rates)) == [3.0, 5.0]


def test_host_memory_slows_all_who_use_it_in_proportion() -> None:
    rates = dataclasses.replace(
        ROUND_RATES,
        host_dram_bytes_per_second=21.0,
        cpu_bytes_per_parameter=26.0,
        cpu_thread_parameters_per_second=1.0,
        disk_read_bytes_per_second=100.0,
    )
    # Both directions ask for 16 bytes a second, the CPU for 26: 42 of which there are 21.
    tasks = make_tasks(
        (Engine.LINK_IN, 8.0, ()),
        (Engine.LINK_OUT, 8.0, ()),
        (Engine.CPU_UPDATE, 1.0, ()),
        (Engine.COMPUTE, 1.0, ()),
    )
    timing = run_tasks(tasks, rates)
    assert ends(timing) == [2.0, 2.0, 2.0, 1.0]
    assert timing.dram_bytes == pytest.approx(42.0)


def test_the_measured_sharing_of_host_memory_is_met() -> None:
    """DESIGN, section 5: 4.75 G parameters/s alone, 2.8 beside the link, which drops to 31.5 GB/s each way."""
    rates = MachineRates(
        cpu_update_parameters_per_second=4.75e9,
        cpu_bytes_per_parameter=28.0,
        link_both_bytes_per_second=50.4e9,
        host_dram_bytes_per_second=141e9,  # of that machine, by these numbers
    )
    tasks = make_tasks(
        (Engine.LINK_IN, 50.4e9, ()), (Engine.LINK_OUT, 50.4e9, ()), (Engine.CPU_UPDATE, 4.75e9, ())
    )
    seconds = run_tasks(tasks, rates).end
    assert 4.75e9 / seconds[2] == pytest.approx(2.8e9, rel=0.05)
    assert 50.4e9 / seconds[0] == pytest.approx(31.5e9, rel=0.08)


def test_a_late_task_holds_nobody_up() -> None:
    tasks = TaskList()
    update = tasks.add(Engine.CPU_UPDATE, 1.0)
    late = tasks.add(Engine.LINK_IN, 10.0, (update,), late=True)
    first = tasks.add(Engine.LINK_IN, 20.0)
    second = tasks.add(Engine.LINK_IN, 10.0)
    # The update is done after one second; what was added in order and is ready goes first.
    end = run_tasks(tasks, ROUND_RATES).end
    assert (end[first], end[second], end[late]) == pytest.approx((2.0, 3.0, 4.0))
    tasks = TaskList()
    update = tasks.add(Engine.CPU_UPDATE, 1.0)
    blocked = tasks.add(Engine.LINK_IN, 10.0, (tasks.add(Engine.COMPUTE, 9.0),))
    late = tasks.add(Engine.LINK_IN, 10.0, (update,), late=True)
    end = run_tasks(tasks, ROUND_RATES).end
    assert (end[late], end[blocked]) == pytest.approx((2.0, 10.0))


def test_two_streams_of_a_direction_share_its_rate() -> None:
    tasks = make_tasks((Engine.LINK_IN, 10.0, ()), (Engine.SLOTS_IN, 30.0, ()))
    # Two seconds at 5 each, then the 20 that are left at 10.
    assert ends(run_tasks(tasks, ROUND_RATES)) == [2.0, 4.0]
    # The other direction slows both of them down alike.
    tasks = make_tasks((Engine.LINK_IN, 8.0, ()), (Engine.SLOTS_IN, 8.0, ()), (Engine.SLOTS_OUT, 16.0, ()))
    assert ends(run_tasks(tasks, ROUND_RATES)) == [2.0, 2.0, 2.0]


def test_a_copy_that_waits_for_its_slot_holds_up_no_weight() -> None:
    tasks = make_tasks((Engine.COMPUTE, 6.0, ()), (Engine.SLOTS_IN, 10.0, (0,)), (Engine.LINK_IN, 20.0, ()))
    assert ends(run_tasks(tasks, ROUND_RATES)) == [6.0, 7.0, 2.0]


def test_two_streams_of_the_device_compute_no_faster_than_one() -> None:
    tasks = make_tasks((Engine.COMPUTE, 3.0, ()), (Engine.BESIDE, 1.0, ()))
    assert ends(run_tasks(tasks, ROUND_RATES)) == [4.0, 2.0]


def test_the_cpu_serves_first_what_is_due_first_by_as_many_threads_as_it_has_slices() -> None:
    rates = dataclasses.replace(
        ROUND_RATES, cpu_threads=4, cpu_thread_parameters_per_second=1.0, cpu_update_parameters_per_second=3.0
    )
    tasks = TaskList()
    later = tasks.add(Engine.CPU_UPDATE, 6.0, due=2, slices=4)
    sooner = tasks.add(Engine.CPU_UPDATE, 2.0, (tasks.add(Engine.COMPUTE, 1.0),), due=1, slices=2)
    # One second alone on four threads, 3 of 6 done. Then two of the four go to the other: 1.5 a second each.
    end = run_tasks(tasks, rates).end
    assert end[sooner] == pytest.approx(1 + 2 / 1.5)
    # 2 of the later one's last 3 are done by then; the last one takes four threads a third of a second.
    assert end[later] == pytest.approx(1 + 2 / 1.5 + 1 / 3)


def test_a_limit_counts_from_the_end_of_the_task_that_sets_it() -> None:
    rates = dataclasses.replace(
        ROUND_RATES, cpu_threads=4, cpu_thread_parameters_per_second=1.0, cpu_update_parameters_per_second=4.0
    )
    tasks = TaskList()
    update = tasks.add(Engine.CPU_UPDATE, 8.0)
    limit = tasks.add(Engine.HOST, 1.0)
    tasks.limits[limit] = 1
    rest = tasks.add(Engine.HOST, 2.0)
    tasks.limits[rest] = 4
    # A second of four threads, two of one, and the last 2 by four.
    assert run_tasks(tasks, rates).end[update] == pytest.approx(3.5)


def test_tasks_may_be_added_while_time_passes() -> None:
    tasks = TaskList()
    clock = Clock(tasks, ROUND_RATES)
    host, copy = tasks.add(Engine.HOST, 2.0), tasks.add(Engine.LINK_IN, 10.0)
    long = tasks.add(Engine.LINK_OUT, 100.0)
    assert clock.is_over(copy, at=host)
    assert not clock.is_over(long, at=host)
    # Asking again lets no time pass, and what is added now begins no earlier.
    assert not clock.is_over(long, at=host)
    next_one = tasks.add(Engine.COMPUTE, 1.0, (copy,))
    timing = clock.run()
    assert timing.begin[next_one] == pytest.approx(2.0)
    assert timing.end[long] == pytest.approx(10.25)  # 1.25 s with the copy in, at 8, and 90 alone at 10


def test_a_circle_is_an_error() -> None:
    # The copy waits for a computation that stands behind one which waits for the copy.
    tasks = make_tasks((Engine.COMPUTE, 1.0, (1,)), (Engine.LINK_IN, 1.0, (2,)), (Engine.COMPUTE, 1.0, ()))
    with pytest.raises(ValueError, match="3 of 3 tasks wait for each other"):
        run_tasks(tasks, ROUND_RATES)


def test_work_is_conserved_in_any_program() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        tasks = TaskList()
        for number in range(60):
            engine = Engine(int(generator.integers(len(Engine))))
            waits = generator.integers(-1, number, size=2).tolist() if number else []
            tasks.add(engine, float(generator.uniform(0.1, 5.0)), waits)
        timing = run_tasks(tasks, ROUND_RATES)
        assert np.all(timing.end > timing.begin)
        for task in range(60):
            assert all(timing.begin[task] >= timing.end[before] - 1e-9 for before in tasks.waits(task))
        for engine in Engine:
            if engine == Engine.CPU_UPDATE:
                continue  # by due, several at once
            own = [task for task in range(60) if tasks.engine[task] == engine]
            assert np.all(np.diff(timing.begin[own]) > 0)
            assert np.all(timing.begin[own][1:] >= timing.end[own][:-1] - 1e-9)
        least = sum(w for w, e in zip(tasks.work, tasks.engine, strict=True) if e == Engine.COMPUTE)
        assert timing.end.max() >= least - 1e-9


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="link_in_bytes_per_second is 0"):
        MachineRates(link_in_bytes_per_second=0)
