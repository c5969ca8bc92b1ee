"""The simulator: steps whose time can be worked out, and what no schedule may do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pager.graph.access_trace import IntArray
from pager.graph.arena_walk import Placement, StepKnobs
from pager.graph.bound import BytesPerParameter, StepCeilings, step_bound
from pager.graph.step_model import StepModel
from pager.graph.task_timing import MachineRates
from pager.policies.belady import Belady
from pager.policies.clock import Clock
from pager.policies.lru import Lru
from tests.graph.step_builders import ROUND_RATES, make_step, run

NUM = 6
WEIGHTS = NUM * 100 * 2
STATES = NUM * 100 * 10


def test_what_stays_costs_nothing() -> None:
    result = run(make_step(), stays=True, keeps_states=True)
    assert result.seconds == pytest.approx(18.0)
    assert (result.page_in_bytes, result.page_out_bytes, result.stall_seconds) == (0, 0, {})


def test_states_stream_in_backward_at_the_links_rate() -> None:
    """Both directions carry all states once; the forward only brings the first slots."""
    result = run(make_step(), stays=True)
    assert (result.page_in_bytes, result.page_out_bytes) == (STATES, STATES)
    # 6000 bytes at 8 each way are 750 s, of which four slots of 500 come in during the forward, at 10 alone.
    assert 650 < result.seconds < 770
    assert result.forward_seconds == pytest.approx(6.0, abs=0.1)
    assert list(result.stall_seconds) == ["states in"]


def test_a_long_computation_hides_the_states() -> None:
    result = run(make_step(tick_seconds=100.0), stays=True)
    assert result.seconds == pytest.approx(1800.0, rel=0.07)
    assert result.stall_share < 0.07


def test_updates_at_step_stream_under_the_next_forward() -> None:
    result = run(make_step(), stays=True, update_at="step")
    assert (result.page_in_bytes, result.page_out_bytes) == (STATES, STATES)
    assert result.forward_seconds > 600
    assert result.backward_seconds == pytest.approx(12.0, abs=0.1)


def test_gradients_that_find_no_room_go_home_and_come_back_with_their_states() -> None:
    # Weights stay (1200), slots take 2400; of the gradients' 1200 bytes half have room.
    result = run(make_step(), stays=True, update_at="step", arena=1200 + 2400 + 600)
    sent = result.page_out_bytes - STATES
    assert 600 <= sent <= 1000
    assert result.page_in_bytes - STATES == sent


def test_parameters_stream_for_forward_backward_and_home() -> None:
    result = run(make_step(), keeps_states=True, arena=STATES + 2400 + 500, prefetch=0)
    # Two weights are there at once; each comes for forward and backward but for those around the turn.
    assert WEIGHTS < result.page_in_bytes <= 2 * WEIGHTS
    assert result.page_out_bytes == WEIGHTS
    assert "parameter in" in result.stall_seconds


def test_the_cpu_updates_beside_the_link() -> None:
    on_cpu = np.arange(NUM) >= 3
    result = run(make_step(), stays=True, on_cpu=on_cpu)
    assert result.cpu_share == 0.5
    # Gradients out, weights in.
    assert result.page_out_bytes == STATES // 2 + WEIGHTS // 2
    assert result.page_in_bytes == STATES // 2 + WEIGHTS // 2
    assert result.busy_seconds["cpu update"] == pytest.approx(300.0)
    # Three updates of a hundred parameters each at one a second, and the next forward needs the last parameter last.
    assert result.cpu_parameters_per_second == pytest.approx(1.0)


def test_the_disk_is_passed_on_the_way() -> None:
    result = run(make_step(), stays=True, states_on_disk=True)
    assert (result.disk_read_bytes, result.disk_write_bytes) == (STATES, STATES)
    assert result.seconds == pytest.approx(STATES / 2.0, rel=0.2)  # the disk reads 2 bytes a second
    assert result.tier_bytes["disk"] == STATES
    assert result.tier_bytes["host"] == WEIGHTS


class Soonest(Belady):
    """Belady's opposite: what is needed next goes first."""

    name = "soonest"

    def eviction_order(self, candidates: IntArray, next_use: IntArray) -> IntArray:
        return super().eviction_order(candidates, next_use)[::-1]


def test_the_policy_that_is_handed_in_decides_what_leaves() -> None:
    moved = {
        policy.name: run(make_step(12), arena=2400 + 1300, policy=policy, prefetch=0).page_in_bytes
        for policy in (Belady(), Lru(), Clock(), Soonest())
    }
    assert moved["belady"] == min(moved.values())
    assert moved["belady"] < moved["soonest"]


def test_bringing_ahead_moves_no_more_than_bringing_when_asked() -> None:
    for room in (500, 700, 900, 1200):
        step, arena = make_step(12), 12 * 100 * 10 + 2400 + room
        when_asked, ahead = (
            run(step, keeps_states=True, arena=arena, prefetch=distance) for distance in (0, 4)
        )
        assert ahead.page_in_bytes <= when_asked.page_in_bytes + 2 * 400
        assert ahead.seconds <= when_asked.seconds * 1.001


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_beats_the_bound_or_passes_the_arena(update_at: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    step = dataclasses.replace(
        make_step(8, tick_seconds=float(generator.uniform(1, 60))),
        num_elements=generator.integers(20, 150, 8),
    )
    stays = generator.random(8) < 0.5
    keeps = generator.random(8) < 0.2
    on_cpu = (generator.random(8) < 0.4) & ~keeps
    rates = dataclasses.replace(
        ROUND_RATES, host_dram_bytes_per_second=30.0, cpu_update_parameters_per_second=2.0
    )
    fixed = int((step.num_elements * 2)[stays].sum() + (step.num_elements * 10)[keeps].sum())
    arena = fixed + 2400 + int(generator.integers(700, 2000))
    result = run(
        step, stays=stays, keeps_states=keeps, on_cpu=on_cpu, update_at=update_at, rates=rates, arena=arena
    )
    assert result.waveform.peak_pages_bytes <= arena
    forward, backward = step.phase_seconds()
    least = step_bound(
        num_parameters=step.num_parameters,
        ceilings=StepCeilings(
            forward_seconds=forward,
            backward_seconds=backward,
            device_update_parameters_per_second=rates.device_update_parameters_per_second,
            link_in_bytes_per_second=10.0,
            link_out_bytes_per_second=10.0,
            link_both_bytes_per_second=8.0,
            host_dram_bytes_per_second=30.0,
            cpu_update_parameters_per_second=2.0,
        ),
        device_bytes=arena,
        update_at="backward",
    )
    assert result.seconds >= least.seconds * (1 - 1e-6)
    assert sum(result.stall_seconds.values()) == pytest.approx(
        result.seconds - result.compute_seconds, rel=1e-6, abs=1e-6
    )


def test_the_waveform_shows_pages_and_activations() -> None:
    step = make_step(live_bytes=70)
    result = run(step, keeps_states=True, arena=STATES + 2400 + 500)
    wave = result.waveform
    assert np.all(np.diff(wave.seconds) >= 0)
    assert wave.pages.min() >= STATES + 2400
    assert wave.peak_pages_bytes > STATES + 2400
    assert wave.activations.max() == 70
    assert wave.peak_bytes == wave.peak_pages_bytes + 70


def test_tasks_are_kept_for_a_trace_only_on_request() -> None:
    assert run(make_step(), stays=True).tasks == ()
    tasks = run(make_step(), stays=True, keep_tasks=True).tasks
    moved = sum(task.work for task in tasks if task.engine == "slots in" and task.begin_seconds >= 0)
    assert 0 < moved <= STATES + 500
    assert {task.engine for task in tasks} >= {"compute", "slots in", "slots out"}
    assert all(task.subject.startswith("w") for task in tasks if task.engine == "slots in")


def test_spans_say_what_is_on_the_device_and_when() -> None:
    step = make_step()
    result = run(step, keep_tasks=True, arena=2400 + 800)
    for kind, num_bytes in ((0, WEIGHTS), (2, STATES)):
        own = [span for span in result.spans if span.kind == kind]
        covered = {(span.parameter, span.first_element) for span in own}
        assert len(covered) * {0: 200, 2: 500}[kind] == num_bytes
        assert all(0 <= span.begin_seconds < span.end_seconds <= result.seconds + 1e-9 for span in own)
    # At no time more slices of states than slots.
    states = [span for span in result.spans if span.kind == 2]
    for span in states:
        at = [s for s in states if s.begin_seconds <= span.begin_seconds < s.end_seconds - 1e-9]
        assert len(at) <= 4
    assert run(step, arena=2400 + 800, prefetch=0).hit_rate < result.hit_rate <= 1
    assert run(step, stays=True).hit_rate == 1


def test_a_slot_is_filled_again_only_when_its_states_have_gone_home() -> None:
    rates = dataclasses.replace(ROUND_RATES, link_out_bytes_per_second=2.0)
    tasks = run(make_step(), stays=True, num_slots=2, rates=rates, keep_tasks=True).tasks
    gone = {round(task.end_seconds, 6) for task in tasks if task.kind == "states out"}
    brought = {round(task.begin_seconds, 6) for task in tasks if task.kind == "states in"}
    assert len(brought) >= 2 * NUM - 1
    assert brought <= gone  # home is slow here: each copy in begins as one out has ended


def test_the_hosts_time_can_be_the_wall() -> None:
    rates = dataclasses.replace(ROUND_RATES, host_unit_seconds=100.0)
    result = run(make_step(), stays=True, keeps_states=True, rates=rates)
    assert result.seconds == pytest.approx(NUM * 2 * 100.0, rel=0.05)  # two slices each
    assert next(iter(result.stall_seconds)) == "host"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"stays": True, "arena": 3000}, "pass the arena's 3000"),
        ({"keeps_states": True, "arena": STATES + 2400 + 150}, "w0 needs 200 bytes of an arena that has 150"),
        ({"stays": True, "num_slots": 0}, "finds no slot"),
        ({"stays": True, "update_at": "step", "arena": WEIGHTS + 2400 + 100}, "the gradient of w5 needs 200"),
    ],
)
def test_what_cannot_fit_is_an_error(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_step(), **knobs)  # type: ignore[arg-type]


def test_wrong_columns_and_words_are_refused() -> None:
    with pytest.raises(ValueError, match="stays has shape"):
        Placement.of(3, stays=[True, False])
    with pytest.raises(TypeError, match="unknown columns"):
        Placement.of(3, pinned=True)
    with pytest.raises(ValueError, match="update_at is 'later'"):
        StepKnobs(update_at="later")


def test_the_result_is_plain_values_on_request() -> None:
    values = run(make_step(), stays=True).to_dict()
    assert values["seconds"] > 0
    assert values["tier_bytes"]["host"] == WEIGHTS + STATES
    assert "tasks" not in values
    assert isinstance(values["stall_seconds"], dict)


def test_what_is_wired_has_no_home_below() -> None:
    assert run(make_step(), stays=True, wired=True).tier_bytes["host"] == STATES
    assert run(make_step(), stays=True, update_at="step").tier_bytes["host"] == STATES + 2 * WEIGHTS


def test_a_step_is_scaled_to_what_was_measured() -> None:
    step = make_step()
    assert step.scaled_to(36.0).compute_seconds == pytest.approx(36.0)
    with pytest.raises(ValueError, match="nothing to scale"):
        make_step(tick_seconds=0.0).scaled_to(1.0)


def test_a_model_of_bytes_only_needs_no_more_tasks_for_larger_tensors() -> None:
    large = StepModel(
        **{
            name: getattr(make_step(), name)
            for name in StepModel.__slots__
            if name not in ("num_elements", "size")
        },
        num_elements=np.full(NUM, 10**11, np.int64),
        size=BytesPerParameter(),
    )
    result = run(large, stays=True, arena=2 * 10**12, slot=10**12 // 4, num_slots=2, rates=MachineRates())
    assert result.page_in_bytes == NUM * 10**12
