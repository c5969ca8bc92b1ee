"""The least seconds any schedule of a training step could take, given what the machine's parts can do.

A measured step means little by itself: is 1.4 s slow, or is it all the link allows? ``step_bound`` answers with a
number no schedule can beat under the measured ceilings, and with the resource that sets it.

The model. A step has two phases, forward and backward (recompute included), each with its own compute seconds.
Parameters are a fluid: every share of them follows one of the *activities* below, and all shares of a phase
overlap perfectly, so that a phase lasts as long as its busiest resource. What a parameter costs (bytes; AdamW with
split master weights in bf16: weight 2, gradient 2, states 10 = low half 2 and moments 8):

- its weight is *resident*, or *streamed*: read over the link once in forward and once in backward;
- its update runs on the device with *resident* states, on the device with *streamed* states (10 in, 10 out), or on
  the *cpu*. A streamed weight updated on the device is written out once; a resident one updated on the CPU is
  read in once;
- its update runs *in backward*, as soon as the gradient is final (``update_at="backward"`` only), or later, under
  the next forward. A gradient that waits does so on the device (*kept*) or on the host (*sent*: out in backward,
  in again in forward). For the CPU it goes out, in backward, or in forward if it was kept.

Resources of each phase: compute (with updates on the device on top), the link (in, out, and the rate each way
while both run: what it can do is the polygon through these three points), host DRAM (every byte over the link
once, and for each parameter updated on the CPU states read and written, weight read and written, gradient read:
26 bytes), the CPU's update rate. Of the step: the device's memory, less activations while forward ends, less kept
gradients while backward ends, less workspace at both times.

Where there is a disk, states may have their home there: read and written once a step, at any time of it, and once
more through host DRAM each way. Then host memory has room for so many homes only: of weights that stream or are
updated on the CPU, of states that stream, of gradients that are sent.

What it leaves out makes it optimistic only, but for two things: activations are taken off as if they stood at
their peak whenever weights are (a schedule could cache a little more while they are few), and updates on the
device are added to the compute although the two could share it. Latency, dependences inside a phase, ragged sizes
and the memory of the transfer windows (unless given as workspace) are not in it.

The optimum over all shares is a linear program (`graph.linear_program`) of at most 32 variables.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from pager.graph.linear_program import FloatArray, Infeasible, minimise

__all__ = ["BytesPerParameter", "StepBound", "StepCeilings", "step_bound"]

# How much one ceiling is raised to see whether it is the wall.
_NUDGE = 1.01


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCeilings:
    """What the machine's parts can do, measured. Rates in bytes or parameters per second.

    ``link_both_bytes_per_second`` is the rate each way while both directions run. ValueError for a rate that is not
    positive and for negative seconds.
    """

    forward_seconds: float
    backward_seconds: float
    device_update_parameters_per_second: float
    link_in_bytes_per_second: float
    link_out_bytes_per_second: float
    link_both_bytes_per_second: float
    host_dram_bytes_per_second: float
    cpu_update_parameters_per_second: float
    # Read and written, together; infinite where there is no disk.
    disk_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 if field.name.endswith("_seconds") else value > 0):
                raise ValueError(f"{field.name} is {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesPerParameter:
    """What one parameter takes. The defaults: bf16 with an fp32 master split in halves, fp32 moments.

    ``state`` is all that the update reads and writes besides weight and gradient.
    """

    weight: int = 2
    gradient: int = 2
    state: int = 10

    @property
    def cpu_update(self) -> int:
        """Bytes of host DRAM traffic of one update on the CPU, without what crosses the link."""
        return 2 * self.state + 2 * self.weight + self.gradient

    def staged(self, update_at: str) -> int:
        """Bytes that a slot of the update holds: states, and the gradient unless backward brings it."""
        return self.state if update_at == "backward" and self.state else self.gradient + self.state


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBound:
    """The optimum: seconds, what sets them, and how the parameters are spread.

    ``loads_seconds``: how long each resource is busy in all; ``gains``: by what part the bound falls for each
    per cent that the ceiling is raised (0 where it is not the wall); ``wall``: the largest of them. ``shares``: of
    the parameters by activity, named (weight, update, when), none below 1e-6.
    """

    seconds: float
    forward_seconds: float
    backward_seconds: float
    wall: str
    gains: Mapping[str, float]
    loads_seconds: Mapping[str, float]
    shares: Mapping[tuple[str, str, str], float]

    def share(self, part: str) -> float:
        """Sum of the shares whose activity has ``part`` in its name, such as "cpu" or "resident weight"."""
        return sum(share for activity, share in self.shares.items() if part in activity)

    def __str__(self) -> str:
        named = {", ".join(names): share for names, share in self.shares.items() if share >= 0.005}
        spread = ", ".join(f"{share:.0%} {name}" for name, share in named.items())
        return f"at least {self.seconds:.3f} s (wall: {self.wall}); {spread}"


@dataclass(slots=True)
class _Phase:
    """Per parameter in one phase: link bytes, updates."""

    link_in: float = 0.0
    link_out: float = 0.0
    cpu_updates: float = 0.0
    device_updates: float = 0.0


@dataclass(slots=True)
class _Activity:
    """One way to treat a parameter: name, what each phase costs, bytes on the device all along / as backward ends, at
    home in host memory, and read and written on a disk.
    """

    name: tuple[str, str, str]
    forward: _Phase
    backward: _Phase
    resident: float = 0.0
    kept: float = 0.0
    host: float = 0.0
    disk: float = 0.0


_IN_BACKWARD, _KEPT, _SENT = "in backward", "gradient kept", "gradient sent"


_ON_DISK = "state on disk"
_CPU_ON_DISK = "cpu, state on disk"


def _activities(
    size: BytesPerParameter, update_at: str, update_on: str, *, has_disk: bool
) -> Iterator[_Activity]:
    updates: dict[str, tuple[str, ...]] = {"device": ("resident state", "streamed state"), "cpu": ("cpu",)}
    if has_disk:
        updates = {"device": (*updates["device"], _ON_DISK), "cpu": (*updates["cpu"], _CPU_ON_DISK)}
    updates["auto"] = (*updates["device"], *updates["cpu"])
    times = (_KEPT, _SENT) if update_at == "step" else (_IN_BACKWARD, _KEPT, _SENT)
    for name in itertools.product(("resident weight", "streamed weight"), updates[update_on], times):
        yield _make_activity(name, size)


def _make_activity(name: tuple[str, str, str], size: BytesPerParameter) -> _Activity:
    weight, update, when = name
    activity = _Activity(name, _Phase(), _Phase())
    forward, backward = activity.forward, activity.backward
    now = backward if when == _IN_BACKWARD else forward
    on_cpu = update in ("cpu", _CPU_ON_DISK)
    if weight == "streamed weight" or on_cpu:
        activity.host += size.weight
    if update in (_ON_DISK, _CPU_ON_DISK):
        activity.disk += 2 * size.state
    elif update != "resident state":
        activity.host += size.state
    if when == _SENT:
        activity.host += size.gradient
    if weight == "resident weight":
        activity.resident += size.weight
    else:
        forward.link_in += size.weight
        backward.link_in += size.weight
    if when == _KEPT:
        activity.kept += size.gradient
    if on_cpu:
        now.cpu_updates += 1
        (forward if when == _KEPT else backward).link_out += size.gradient
        if weight == "resident weight":
            now.link_in += size.weight
        return activity
    now.device_updates += 1
    if when == _SENT:
        backward.link_out += size.gradient
        forward.link_in += size.gradient
    if weight == "streamed weight":
        now.link_out += size.weight
    if update == "resident state":
        activity.resident += size.state
    else:
        now.link_in += size.state
        now.link_out += size.state
    return activity


def step_bound(
    *,
    num_parameters: int,
    ceilings: StepCeilings,
    device_bytes: float = math.inf,
    activation_bytes: float = 0.0,
    workspace_bytes: float = 0.0,
    update_at: str = "backward",
    update_on: str = "auto",
    size: BytesPerParameter | None = None,
    host_bytes: float = math.inf,
) -> StepBound:
    """The least seconds of a step of ``num_parameters`` within ``device_bytes``. See the head of this file.
    ``host_bytes``: for homes in host memory, where there is a disk for the rest.

    ``activation_bytes``: their peak, as forward ends; ``workspace_bytes``: context, windows, what else is always
    taken. ``update_at``: "step" or "backward"; ``update_on``: "device", "cpu" or "auto". Raises ValueError for other
    words, for no parameters, and where activations and workspace alone pass ``device_bytes``.
    """
    if update_at not in ("step", "backward") or update_on not in ("device", "cpu", "auto"):
        raise ValueError(f"update_at is {update_at!r} and update_on {update_on!r}")
    if num_parameters < 1:
        raise ValueError(f"num_parameters is {num_parameters}")
    has_disk = math.isfinite(ceilings.disk_bytes_per_second)
    activities = list(_activities(size or BytesPerParameter(), update_at, update_on, has_disk=has_disk))
    cpu_bytes = (size or BytesPerParameter()).cpu_update
    rooms = (device_bytes - workspace_bytes - activation_bytes, device_bytes - workspace_bytes)
    if min(rooms) < 0:
        raise ValueError(
            f"activations ({activation_bytes:.0f} bytes) and workspace ({workspace_bytes:.0f}) alone pass "
            f"device_bytes ({device_bytes:.0f})"
        )

    def solve(limits: StepCeilings, factor: float = 1.0, host_factor: float = 1.0) -> FloatArray:
        room = tuple(device_bytes * (factor - 1.0) + part if math.isfinite(part) else part for part in rooms)
        host = host_bytes * host_factor if has_disk else math.inf
        return _solve(activities, num_parameters, limits, (*room, host), cpu_bytes)

    solution = solve(ceilings)
    seconds = float(solution[-2:].sum())
    gains = {}
    for name, raised in _raised(ceilings).items():
        gains[name] = (seconds - float(solve(raised)[-2:].sum())) / seconds / (_NUDGE - 1.0)
    more = {"device_memory": (_NUDGE, 1.0), "host_memory": (1.0, _NUDGE)}
    for name, factors in more.items() if has_disk else [("device_memory", more["device_memory"])]:
        gains[name] = (seconds - float(solve(ceilings, *factors)[-2:].sum())) / seconds / (_NUDGE - 1.0)
    gains = {name: gain if gain > 1e-6 else 0.0 for name, gain in gains.items()}
    return StepBound(
        seconds=seconds,
        forward_seconds=float(solution[-2]),
        backward_seconds=float(solution[-1]),
        wall=max(gains, key=lambda name: gains[name]),
        gains=gains,
        loads_seconds=_loads(activities, solution, num_parameters, ceilings, cpu_bytes),
        shares={
            activity.name: float(share)
            for activity, share in zip(activities, solution, strict=False)
            if share > 1e-6
        },
    )


def _solve(
    activities: list[_Activity],
    num_parameters: int,
    ceilings: StepCeilings,
    rooms: tuple[float, ...],
    cpu_bytes: float,
) -> FloatArray:
    """Shares of ``activities`` (of 1), then seconds of forward and of backward.

    ``rooms``: on the device as forward and as backward ends, and in host memory.
    """
    into, out, both = _link(ceilings)
    rows, limits = [], []
    for phase, compute in enumerate((ceilings.forward_seconds, ceilings.backward_seconds)):
        loads = [(activity.forward, activity.backward)[phase] for activity in activities]
        link_in = np.array([load.link_in for load in loads])
        link_out = np.array([load.link_out for load in loads])
        on_cpu = np.array([load.cpu_updates for load in loads])
        on_device = np.array([load.device_updates for load in loads])
        for seconds_per_parameter, at_least in (
            (on_device / ceilings.device_update_parameters_per_second, compute),
            # The sides of the polygon through (in, 0), (both, both) and (0, out).
            (link_in / into + link_out * (1 / both - 1 / into), 0.0),
            (link_in * (1 / both - 1 / out) + link_out / out, 0.0),
            ((link_in + link_out + on_cpu * cpu_bytes) / ceilings.host_dram_bytes_per_second, 0.0),
            (on_cpu / ceilings.cpu_update_parameters_per_second, 0.0),
        ):
            rows.append([*(num_parameters * seconds_per_parameter), *((-1.0, 0.0), (0.0, -1.0))[phase]])
            limits.append(-at_least)
    resident = np.array([activity.resident for activity in activities])
    kept = np.array([activity.kept for activity in activities])
    at_home = np.array([activity.host for activity in activities])
    for bytes_per_parameter, room in zip((resident, resident + kept, at_home), rooms, strict=True):
        if math.isfinite(room):
            unit = max(room, float(num_parameters))
            rows.append([*(num_parameters * bytes_per_parameter / unit), 0.0, 0.0])
            limits.append(room / unit)
    if math.isfinite(ceilings.disk_bytes_per_second):
        disk = np.array([activity.disk for activity in activities])
        dram = disk + [_dram_bytes(activity, cpu_bytes) for activity in activities]
        for bytes_per_parameter, rate in (
            (disk, ceilings.disk_bytes_per_second),
            (dram, ceilings.host_dram_bytes_per_second),
        ):
            rows.append([*(num_parameters * bytes_per_parameter / rate), -1.0, -1.0])
            limits.append(0.0)
    rows.append([*([-1.0] * len(activities)), 0.0, 0.0])  # every parameter is updated somewhere
    limits.append(-1.0)
    try:
        return minimise([*([0.0] * len(activities)), 1.0, 1.0], rows, limits)
    except Infeasible as error:
        raise ValueError(f"no schedule fits {rooms[0]:.0f} bytes with these knobs") from error


def _dram_bytes(activity: _Activity, cpu_bytes: float) -> float:
    """Of host DRAM, in both phases, without what the disk takes."""
    return sum(
        phase.link_in + phase.link_out + phase.cpu_updates * cpu_bytes
        for phase in (activity.forward, activity.backward)
    )


def _link(ceilings: StepCeilings) -> tuple[float, float, float]:
    """Rates in, out, and each way at once: never above the single ones, never below taking turns."""
    into, out = ceilings.link_in_bytes_per_second, ceilings.link_out_bytes_per_second
    both = min(ceilings.link_both_bytes_per_second, into, out)
    return into, out, max(both, into * out / (into + out))


def _raised(ceilings: StepCeilings) -> dict[str, StepCeilings]:
    """The ceilings with one resource a per cent better, by the resource's name."""
    resources = {
        "compute": ("forward_seconds", "backward_seconds", "device_update_parameters_per_second"),
        "link": ("link_in_bytes_per_second", "link_out_bytes_per_second", "link_both_bytes_per_second"),
        "host_dram": ("host_dram_bytes_per_second",),
        "cpu_update": ("cpu_update_parameters_per_second",),
    }
    if math.isfinite(ceilings.disk_bytes_per_second):
        resources["disk"] = ("disk_bytes_per_second",)
    changed = {}
    for resource, names in resources.items():
        values = {
            name: getattr(ceilings, name) * (_NUDGE if "per_second" in name else 1 / _NUDGE) for name in names
        }
        changed[resource] = dataclasses.replace(ceilings, **values)
    return changed


def _loads(
    activities: list[_Activity],
    solution: FloatArray,
    num_parameters: int,
    ceilings: StepCeilings,
    cpu_bytes: float,
) -> dict[str, float]:
    """Seconds that each resource is busy, both phases together, at its ceiling by itself."""
    counted = dict.fromkeys(("link_in", "link_out", "cpu_updates", "device_updates"), 0.0)
    for activity, share in zip(activities, solution, strict=False):
        for phase, name in itertools.product((activity.forward, activity.backward), counted):
            counted[name] += getattr(phase, name) * float(share) * num_parameters
    disk = sum(
        activity.disk * float(share) * num_parameters
        for activity, share in zip(activities, solution, strict=False)
    )
    dram = counted["link_in"] + counted["link_out"] + counted["cpu_updates"] * cpu_bytes + disk
    on_disk = {"disk": disk / ceilings.disk_bytes_per_second} if disk else {}
    return on_disk | {
        "compute": ceilings.forward_seconds
        + ceilings.backward_seconds
        + counted["device_updates"] / ceilings.device_update_parameters_per_second,
        "link_in": counted["link_in"] / ceilings.link_in_bytes_per_second,
        "link_out": counted["link_out"] / ceilings.link_out_bytes_per_second,
        "host_dram": dram / ceilings.host_dram_bytes_per_second,
        "cpu_update": counted["cpu_updates"] / ceilings.cpu_update_parameters_per_second,
    }
