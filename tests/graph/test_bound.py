"""The least seconds of a step: against a grid of schedules written down by hand, limits, and monotony."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pager.graph.bound import BytesPerParameter, StepBound, StepCeilings, step_bound

N = 1_000_000_000
GIB = 2**30
FREE = 1e15  # a rate that is no limit

# One H200 as measured (DESIGN, section 5), 6.7 B parameters, batch 1.
H200 = StepCeilings(
    forward_seconds=0.070,
    backward_seconds=0.218,
    device_update_parameters_per_second=113e9,
    link_in_bytes_per_second=55.1e9,
    link_out_bytes_per_second=55.4e9,
    link_both_bytes_per_second=50.4e9,
    host_dram_bytes_per_second=135e9,
    cpu_update_parameters_per_second=4.75e9,
)
SEVEN_B = 6_738_415_616

# Per parameter: bytes kept on the device, gradient kept; then in, out, CPU updates, device updates of forward and
# of backward. Written from the table of costs in words, not from the code.
BY_HAND = {
    ("resident weight", "resident state", "in backward"): (12, 0, (0, 0, 0, 0), (0, 0, 0, 1)),
    ("resident weight", "streamed state", "in backward"): (2, 0, (0, 0, 0, 0), (10, 10, 0, 1)),
    ("streamed weight", "streamed state", "in backward"): (0, 0, (2, 0, 0, 0), (12, 12, 0, 1)),
    ("resident weight", "cpu", "in backward"): (2, 0, (0, 0, 0, 0), (2, 2, 1, 0)),
    ("streamed weight", "cpu", "in backward"): (0, 0, (2, 0, 0, 0), (2, 2, 1, 0)),
    ("resident weight", "cpu", "gradient sent"): (2, 0, (2, 0, 1, 0), (0, 2, 0, 0)),
    ("streamed weight", "cpu", "gradient sent"): (0, 0, (2, 0, 1, 0), (2, 2, 0, 0)),
    ("streamed weight", "cpu", "gradient kept"): (0, 2, (2, 2, 1, 0), (2, 0, 0, 0)),
    ("resident weight", "cpu", "gradient kept"): (2, 2, (2, 2, 1, 0), (0, 0, 0, 0)),
    ("streamed weight", "streamed state", "gradient kept"): (0, 2, (12, 12, 0, 1), (2, 0, 0, 0)),
    ("resident weight", "streamed state", "gradient kept"): (2, 2, (10, 10, 0, 1), (0, 0, 0, 0)),
    ("resident weight", "streamed state", "gradient sent"): (2, 0, (12, 10, 0, 1), (0, 2, 0, 0)),
    ("streamed weight", "streamed state", "gradient sent"): (0, 0, (14, 12, 0, 1), (2, 2, 0, 0)),
    ("resident weight", "resident state", "gradient kept"): (12, 2, (0, 0, 0, 1), (0, 0, 0, 0)),
    ("resident weight", "resident state", "gradient sent"): (12, 0, (2, 0, 0, 1), (0, 2, 0, 0)),
}


def seconds_by_hand(
    shares: np.ndarray, names: list[tuple[str, str, str]], c: StepCeilings, num_parameters: int, cap: float
) -> np.ndarray:
    """Seconds of schedules (rows of ``shares``), infinite where they do not fit ``cap``."""
    table = [BY_HAND[name] for name in names]
    resident = shares @ np.array([row[0] for row in table], float) * num_parameters
    kept = shares @ np.array([row[1] for row in table], float) * num_parameters
    total = np.zeros(len(shares))
    for phase, compute in ((2, c.forward_seconds), (3, c.backward_seconds)):
        loads = np.array([row[phase] for row in table], float)
        into, out, cpu, device = (shares @ loads[:, column] * num_parameters for column in range(4))
        both = c.link_both_bytes_per_second
        spare_in, spare_out = np.maximum(into - out, 0), np.maximum(out - into, 0)
        link = np.minimum(into, out) / both
        link += spare_in / c.link_in_bytes_per_second + spare_out / c.link_out_bytes_per_second
        dram = (into + out + 26 * cpu) / c.host_dram_bytes_per_second
        busy = (
            compute + device / c.device_update_parameters_per_second,
            link,
            dram,
            cpu / c.cpu_update_parameters_per_second,
        )
        total += np.max(busy, axis=0)
    return np.where(resident + kept <= cap * (1 + 1e-9), total, np.inf)


def bound_of(c: StepCeilings = H200, **options: Any) -> StepBound:
    settings: dict[str, Any] = {"num_parameters": SEVEN_B, "device_bytes": 21 * GIB, **options}
    return step_bound(ceilings=c, **settings)


def compositions(total: int, parts: int) -> np.ndarray:
    """All ways to share ``total`` units among ``parts``, as shares of 1."""
    bars = np.array(list(itertools.combinations(range(total + parts - 1), parts - 1)))
    edges = np.hstack((np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), total + parts - 1)))
    return (np.diff(edges, axis=1) - 1) / total


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("cap_gib", [2, 8, 21, 40])
@pytest.mark.parametrize("compute", [0.2, 1.0, 6.0])
def test_no_schedule_of_a_grid_is_faster_and_some_come_near(
    update_at: str, cap_gib: int, compute: float
) -> None:
    ceilings = dataclasses.replace(H200, forward_seconds=compute / 4, backward_seconds=compute * 3 / 4)
    found = bound_of(ceilings, device_bytes=cap_gib * GIB, update_at=update_at)
    names = [name for name in BY_HAND if update_at == "backward" or name[2] != "in backward"]
    best = np.inf
    for chosen in itertools.combinations(names, 4):
        seconds = seconds_by_hand(compositions(10, 4), list(chosen), ceilings, SEVEN_B, cap_gib * GIB)
        best = min(best, float(seconds.min()))
    assert found.seconds <= best * (1 + 1e-9)
    assert best <= found.seconds * 1.15


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("cap_gib", [4, 12, 21])
def test_the_shares_it_gives_reach_it(update_at: str, cap_gib: int) -> None:
    found = bound_of(device_bytes=cap_gib * GIB, update_at=update_at)
    names = list(found.shares)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert set(names) <= BY_HAND.keys()
    shares = np.array([[found.shares[name] for name in names]])
    assert seconds_by_hand(shares, names, H200, SEVEN_B, cap_gib * GIB * 1.0001) == pytest.approx(
        found.seconds
    )


def test_what_fits_takes_its_compute_and_nothing_moves() -> None:
    found = bound_of(device_bytes=100 * GIB, update_on="device")
    assert found.seconds == pytest.approx(0.288 + SEVEN_B / 113e9)
    assert found.share("resident state") == pytest.approx(1.0)
    assert found.loads_seconds["link_in"] == found.loads_seconds["host_dram"] == 0.0
    assert found.wall == "compute"
    # Without a cap it is the same.
    assert step_bound(num_parameters=SEVEN_B, ceilings=H200, update_on="device").seconds == found.seconds


@pytest.mark.parametrize(
    ("update_at", "bytes_in"),
    # Weights twice, states, at "step" the gradient back; nothing may stay on the device.
    [("backward", 2 + 2 + 10), ("step", 2 + 2 + 10 + 2)],
)
def test_without_a_cpu_and_without_room_it_is_the_link(update_at: str, bytes_in: int) -> None:
    ceilings = dataclasses.replace(
        H200,
        forward_seconds=0.0,
        backward_seconds=0.0,
        device_update_parameters_per_second=FREE,
        host_dram_bytes_per_second=FREE,
        link_in_bytes_per_second=50e9,
        link_out_bytes_per_second=50e9,
        link_both_bytes_per_second=50e9,
    )
    found = step_bound(
        num_parameters=N, ceilings=ceilings, device_bytes=0, update_at=update_at, update_on="device"
    )
    assert found.seconds == pytest.approx(bytes_in * N / 50e9, rel=1e-4)
    assert found.wall == "link"
    assert found.gains["link"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("slow", "wall", "seconds"),
    [
        ({"cpu_update_parameters_per_second": 1e9}, "cpu_update", 1.0),
        # States, weight and gradient on the CPU, weight twice in, gradient out.
        ({"host_dram_bytes_per_second": 32e9}, "host_dram", 1.0),
        ({"backward_seconds": 5.0}, "compute", 5.0),
    ],
)
def test_on_the_cpu_it_is_what_is_slow(slow: dict[str, float], wall: str, seconds: float) -> None:
    free = StepCeilings(
        forward_seconds=0.0,
        backward_seconds=0.0,
        device_update_parameters_per_second=FREE,
        link_in_bytes_per_second=FREE,
        link_out_bytes_per_second=FREE,
        link_both_bytes_per_second=FREE,
        host_dram_bytes_per_second=FREE,
        cpu_update_parameters_per_second=FREE,
    )
    found = step_bound(
        num_parameters=N, ceilings=dataclasses.replace(free, **slow), device_bytes=0, update_on="cpu"
    )
    assert found.seconds == pytest.approx(seconds, rel=1e-4)
    assert found.wall == wall


def test_the_measured_machine_reaches_about_a_second() -> None:
    """DESIGN's arithmetic for 7b, cap 24 GiB, batch 1, all resources used: 1.0-1.1 s; the fluid is a little faster."""
    found = bound_of(activation_bytes=GIB, workspace_bytes=GIB, device_bytes=24 * GIB)
    assert 0.85 < found.seconds < 1.1
    assert found.wall == "host_dram"
    assert 0.1 < found.share("cpu") < 0.4


@given(
    name=st.sampled_from([field.name for field in dataclasses.fields(StepCeilings)]),
    factor=st.floats(1.0, 8.0),
    cap_gib=st.floats(0.5, 60.0),
    update_at=st.sampled_from(["step", "backward"]),
    update_on=st.sampled_from(["device", "auto", "cpu"]),
)
def test_a_better_machine_is_never_slower(
    name: str, factor: float, cap_gib: float, update_at: str, update_on: str
) -> None:
    knobs: dict[str, Any] = {"update_at": update_at, "update_on": update_on, "device_bytes": cap_gib * GIB}
    better = getattr(H200, name) * (factor if "per_second" in name else 1 / factor)
    plain = bound_of(**knobs).seconds
    assert bound_of(dataclasses.replace(H200, **{name: better}), **knobs).seconds <= plain * (1 + 1e-9)
    assert bound_of(**{**knobs, "device_bytes": cap_gib * factor * GIB}).seconds <= plain * (1 + 1e-9)
    assert bound_of(**knobs, activation_bytes=cap_gib * GIB / 4).seconds >= plain * (1 - 1e-9)


@pytest.mark.parametrize("cap_gib", [2, 12, 21, 60])
def test_more_freedom_is_never_slower(cap_gib: int) -> None:
    cap = cap_gib * GIB
    for update_on in ("device", "auto", "cpu"):
        at_step = bound_of(device_bytes=cap, update_at="step", update_on=update_on).seconds
        assert bound_of(device_bytes=cap, update_on=update_on).seconds <= at_step * (1 + 1e-9)
    for update_at in ("step", "backward"):
        auto = bound_of(device_bytes=cap, update_at=update_at).seconds
        for update_on in ("device", "cpu"):
            own = bound_of(device_bytes=cap, update_at=update_at, update_on=update_on).seconds
            assert auto <= own * (1 + 1e-9)


def test_other_precisions_cost_their_bytes() -> None:
    assert BytesPerParameter().cpu_update == 26
    assert BytesPerParameter(weight=4, gradient=4, state=8).cpu_update == 28
    assert bound_of(size=BytesPerParameter(state=4)).seconds < bound_of().seconds


def test_two_directions_are_no_slower_than_taking_turns() -> None:
    turns = dataclasses.replace(H200, link_both_bytes_per_second=1.0)
    halves = dataclasses.replace(H200, link_both_bytes_per_second=55.1e9 * 55.4e9 / (55.1e9 + 55.4e9))
    assert bound_of(turns).seconds == pytest.approx(bound_of(halves).seconds)


def test_it_can_be_read() -> None:
    text = str(bound_of(device_bytes=100 * GIB, update_on="device"))
    assert text == "at least 0.348 s (wall: compute); 100% resident weight, resident state, in backward"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_at": "never"}, "update_at is 'never'"),
        ({"update_on": "disk"}, "update_on 'disk'"),
        ({"num_parameters": 0}, "num_parameters is 0"),
        ({"activation_bytes": 20 * GIB, "workspace_bytes": 2 * GIB}, "alone pass device_bytes"),
    ],
)
def test_what_has_no_bound_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound_of(**options)


@pytest.mark.parametrize(("name", "value"), [("link_in_bytes_per_second", 0.0), ("forward_seconds", -1.0)])
def test_ceilings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(H200, **{name: value})


# -- a disk --------------------------------------------------------------------------------------------


def with_disk(rate: float, **changes: float) -> StepCeilings:
    return dataclasses.replace(H200, disk_bytes_per_second=rate, **changes)


def test_what_host_memory_cannot_hold_is_read_and_written_on_the_disk_once() -> None:
    """Weights and a quarter of the states have room: three quarters of 10 bytes, both ways, are the step."""
    found = bound_of(with_disk(1e9), device_bytes=0, host_bytes=SEVEN_B * (2 + 10 / 4))
    assert found.seconds == pytest.approx(SEVEN_B * 0.75 * 20 / 1e9, rel=1e-3)
    assert found.share("state on disk") + found.share("cpu, state on disk") == pytest.approx(0.75)
    assert found.wall == "disk"
    assert found.loads_seconds["disk"] == pytest.approx(found.seconds, rel=1e-6)
    assert found.gains["host_memory"] > 0.3


def test_a_disk_that_is_not_needed_changes_nothing() -> None:
    without = bound_of()
    assert bound_of(with_disk(1e9)).seconds == pytest.approx(without.seconds)
    assert "disk" not in bound_of(with_disk(1e9)).loads_seconds
    assert "host_memory" not in without.gains


def test_its_bytes_cross_host_memory_too() -> None:
    """With a disk and a link without limit each byte on the disk is two of host memory: from the disk, to the link."""
    found = bound_of(
        with_disk(
            1e15,
            host_dram_bytes_per_second=100e9,
            forward_seconds=0.0,
            backward_seconds=0.0,
            device_update_parameters_per_second=FREE,
            link_in_bytes_per_second=1e15,
            link_out_bytes_per_second=1e15,
            link_both_bytes_per_second=1e15,
        ),
        device_bytes=0,
        host_bytes=SEVEN_B * 2,
        update_on="device",
    )
    # The weight twice in and once out, states in and out, both again for the disk.
    assert found.seconds == pytest.approx(SEVEN_B * (2 + 2 + 2 + 20 + 20) / 100e9, rel=1e-3)


def test_states_that_fit_neither_are_refused() -> None:
    with pytest.raises(ValueError, match="no schedule fits"):
        bound_of(with_disk(1e9), device_bytes=0, host_bytes=SEVEN_B)


@given(rate=st.floats(1e8, 1e11), share=st.floats(0.3, 1.5), more=st.floats(1.0, 4.0))
def test_a_faster_disk_or_more_memory_is_never_slower(rate: float, share: float, more: float) -> None:
    room = SEVEN_B * 12 * share
    found = bound_of(with_disk(rate), host_bytes=room).seconds
    assert bound_of(with_disk(rate * more), host_bytes=room).seconds <= found * (1 + 1e-9)
    assert bound_of(with_disk(rate), host_bytes=room * more).seconds <= found * (1 + 1e-9)
