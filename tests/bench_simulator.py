"""Predictions beside measurements, placements beside each other, and machines for large models: docs/benchmarks.md.

    python tests/bench_simulator.py measured|streams|launches|placement|scale [--out FILE]

No GPU: everything is simulated, for one H200 whose rates were measured. Prints tables; ``--out`` appends JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pager
from pager.device.base import Stream
from pager.optim.streamed import StreamedUnit
from pager.tools import cpu_part, placing
from pager.tools.captured import CapturedModel, capture_model
from pager.tools.language_model import make_model
from pager.tools.machine import Machine
from pager.tools.model_sizes import ModelSizes
from pager.tools.model_source import load_model
from pager.tools.plan import make_plan_of
from pager.tools.prediction import Prediction, Wanted, predict

GIB = 2**30
MACHINE = Machine()


@dataclass(frozen=True)
class Measured:
    """A step that was measured (docs/benchmarks.md): seconds; GB in and out, and the CPU's share as it was set, where
    they are known. ``before``: what the simulator said that knew one stream a direction. ``pages_gb``: the most that
    pages took. ``older``: with 0.2 to 2 GB less for pages (than allocator segments that grow; inside backward, than
    decision 62); the others were measured since. ``late``: some updates inside backward wait for its end.
    """

    model: str
    gib: int
    batch: int
    update_at: str
    update_on: str
    seconds: float
    gb: float | None = None
    cpu_share: float | None = None
    before: float | None = None
    pages_gb: float | None = None
    older: bool = False
    late: bool = False


# Compute alone, in the runtime, with the recomputation.
COMPUTE_SECONDS = {("3b", 1): 0.121, ("3b", 8): 0.834, ("7b", 1): 0.202, ("7b", 8): 1.594}

MEASURED = (
    Measured("3b", 12, 1, "backward", "device", 0.756, 32.4, before=0.750, older=True),
    Measured("3b", 12, 1, "backward", "auto", 0.641, 25.5, pages_gb=9.42, older=True),
    Measured("3b", 12, 1, "backward", "auto", 0.614, 27.6, pages_gb=10.01, late=True),
    Measured("3b", 12, 8, "backward", "auto", 1.025, older=True),
    Measured("7b", 24, 1, "backward", "device", 1.41, 61.9, before=1.411, older=True),
    Measured("7b", 24, 1, "backward", "auto", 1.126, 47.0, pages_gb=20.91, older=True),
    Measured("7b", 24, 1, "step", "device", 1.582, 73.3, pages_gb=22.06),
    Measured("7b", 24, 8, "backward", "device", 1.947, 74.5, before=2.255, older=True),
    Measured("7b", 24, 8, "backward", "auto", 1.872, 65.4, 0.15, before=1.985, older=True),
    Measured("7b", 24, 8, "backward", "auto", 1.796, 57.0, 0.25, before=1.971, older=True),
    Measured("7b", 24, 8, "backward", "auto", 1.872, 57.7, pages_gb=15.2, older=True),
    Measured("7b", 24, 8, "step", "device", 2.843, 81.5, pages_gb=15.92),
)


@cache
def captured(model: str, batch: int) -> CapturedModel:
    return capture_model(load_model(model, batch=batch, seq=2048), MACHINE, page_size=2**17)


def predicted(row: Measured, **knobs: Any) -> Prediction:
    """The prediction of a measured row."""
    return predict(captured(row.model, row.batch), MACHINE, wanted(row, **knobs))


def wanted(row: Measured, **knobs: Any) -> Wanted:
    values: dict[str, Any] = {
        "budget_bytes": row.gib * GIB,
        "host_bytes": MACHINE.host_bytes,
        "update_at": row.update_at,
        "update_on": row.update_on,
        "cpu_share": row.cpu_share,
        "late": row.late,
        "compute_seconds": COMPUTE_SECONDS.get((row.model, row.batch)),
    }
    return Wanted(**(values | knobs))


def show(columns: list[str], rows: list[list[str]]) -> None:
    for row in (columns, ["---"] * len(columns), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")


def measured() -> list[dict[str, Any]]:
    lines, rows = [], []
    for row in MEASURED:
        step = predicted(row).step
        assert step is not None
        peak = step.waveform.peak_pages_bytes / 1e9
        off = step.seconds / row.seconds - 1
        share = "-" if row.update_on == "device" else f"{step.cpu_share:.2f}"
        rows.append(
            [
                f"{row.model}, {row.gib} GiB, batch {row.batch}"
                + " (older)" * row.older
                + ", late" * row.late,
                f"{row.update_at}, {row.update_on}" + (f" ({row.cpu_share})" if row.cpu_share else ""),
                f"{row.seconds:.3f}",
                "-" if row.before is None else f"{row.before:.3f}",
                f"{step.seconds:.3f}",
                f"{off:+.1%}",
                f"{step.page_in_bytes / 1e9:.1f}, {step.page_out_bytes / 1e9:.1f} ({row.gb or '-'})",
                f"{peak:.2f} ({row.pages_gb or '-'})",
                share,
                ", ".join(
                    f"{cause} {seconds:.2f}" for cause, seconds in list(step.stall_seconds.items())[:2]
                ),
            ]
        )
        lines.append(row.__dict__ | {"predicted": step.to_dict(), "off": off})
    show(
        [
            *("step", "`update_at`, `update_on`", "measured s", "predicted before", "predicted now", "off"),
            *(
                "GB in, out (measured, each way)",
                "GB of pages at most (measured)",
                "CPU's share",
                "waits for, s",
            ),
        ],
        rows,
    )
    return lines


STREAMS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "2026-11-30-streams.jsonl"


def streams() -> list[dict[str, Any]]:
    """The steps with updates beside the backward, or not, as they were set by hand: on five threads, as it was then."""
    lines, rows = [], []
    measured_lines = [json.loads(line) for line in STREAMS.read_text(encoding="utf-8").splitlines()]
    for line in measured_lines:
        if line["build"] != "slots on streams of their own":
            continue
        model, gib, batch = line["model"], int(line["budget"].removesuffix("GiB")), line["batch"]
        row = Measured(model, gib, batch, "backward", "auto", statistics.median(line["seconds"]))
        with (
            mock.patch.object(placing, "is_worth_lending", return_value=line["beside"]),
            mock.patch.object(cpu_part, "num_threads_beside_link", return_value=5),
        ):
            step = predicted(row, cpu_share=line["share"]).step
        assert step is not None
        moved = f"{step.page_in_bytes / 1e9:.1f}, {step.page_out_bytes / 1e9:.1f}"
        rows.append(
            [
                f"{model}, {gib} GiB, batch {batch}",
                "beside" if line["beside"] else "compute stream",
                f"{line['share']}",
                f"{row.seconds:.3f}",
                f"{step.seconds:.3f}",
                f"{step.seconds / row.seconds - 1:+.1%}",
                f"{moved} ({line['in_GB']}, {line['out_GB']})",
            ]
        )
        lines.append(line | {"predicted": step.to_dict()})
    show(["step", "updates", "share", "measured s", "predicted s", "off", "GB in, out (measured)"], rows)
    return lines


def launches() -> list[dict[str, Any]]:
    """What an access and a unit of the update put on the compute stream: kernels (calls that make no view), events."""
    sizes = ModelSizes(hidden=128, layers=4, heads=4, ffn=384, vocabulary=512, dtype="bfloat16")
    model = make_model(sizes, seed=0)
    tokens = torch.randint(512, (2, 1, 64))
    with _Calls() as calls:
        model(tokens[0], tokens[1])
    accesses = 7 * sizes.layers + 2
    found = {"kernels_an_access": calls.number / accesses}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    budget = sum(param.numel() for param in model.parameters()) * 6
    knobs: dict[str, Any] = {"page_size": "16KiB", "master": "float32", "update_at": "backward"}
    pager.manage(
        model, optimizer, device="cpu", device_budget=budget, example_inputs=(tokens[0], tokens[1]), **knobs
    )
    units = kernels = events = 0
    original, wait, record = StreamedUnit.run, Stream.wait, Stream.record

    def run(unit: StreamedUnit, update: Any) -> None:
        nonlocal units, kernels
        with _Calls() as calls:
            original(unit, update)
        units, kernels = units + 1, kernels + calls.number

    def counted(call: Any) -> Any:
        def wrapped(stream: Stream, *arguments: Any, **named: Any) -> Any:
            nonlocal events
            events += stream.name == "compute"
            return call(stream, *arguments, **named)

        return wrapped

    for number in range(4):
        with contextlib.ExitStack() as stack:
            if number == 3:
                stack.enter_context(mock.patch.object(StreamedUnit, "run", run))
                stack.enter_context(mock.patch.object(Stream, "wait", counted(wait)))
                stack.enter_context(mock.patch.object(Stream, "record", counted(record)))
            model(tokens[0], tokens[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Among the calls are some of the simulated device's copies, which are on other streams.
    found |= {"calls_a_unit": kernels / units, "events_a_unit": events / units}
    show(list(found), [[f"{value:.1f}" for value in found.values()]])
    return [found]


class _Calls(TorchDispatchMode):
    """Counts calls that compute something."""

    views = frozenset(
        (
            *(
                "view",
                "_unsafe_view",
                "alias",
                "detach",
                "expand",
                "t",
                "transpose",
                "permute",
                "slice",
                "select",
            ),
            *("split", "unbind", "as_strided", "unsqueeze", "squeeze", "set_", "resize_", "lift_fresh"),
            *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size"),
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func._schema.name.split("::")[1] not in self.views
        return func(*args, **(kwargs or {}))


# Model, cap, batch, update_at, update_on; the knob that is compared, its values.
PLACEMENTS = (
    *(("7b", gib, batch, "step", "device", "weights") for gib, batch in ((10, 1), (12, 1), (16, 1), (24, 8))),
    *(("3b", gib, 1, "step", "device", "weights") for gib in (6, 8)),
    *(("7b", gib, batch, "backward", "device", "weights") for gib, batch in ((8, 1), (12, 1), (24, 8))),
    *(("7b", gib, batch, "backward", "device", "states") for gib, batch in ((24, 1), (32, 1), (32, 8))),
    *(("3b", gib, batch, "backward", "device", "states") for gib, batch in ((12, 1), (16, 8))),
    *(
        ("7b", gib, batch, "backward", "auto", "cpu_lead")
        for gib, batch in ((8, 1), (24, 1), (24, 8), (32, 8))
    ),
    *(
        ("3b", gib, batch, "backward", "auto", "cpu_lead")
        for gib, batch in ((8, 1), (12, 1), (12, 8), (16, 8))
    ),
    *(("7b", gib, batch, "step", "auto", "cpu_lead") for gib, batch in ((24, 1), (32, 8))),
)
VALUES = {
    "weights": ("spread", "belady"),
    "states": ("belady", "spread"),
    "cpu_lead": (0.6, 1.0),
}


def placement() -> list[dict[str, Any]]:
    lines, rows = [], []
    for model, gib, batch, update_at, update_on, knob in PLACEMENTS:
        row = Measured(model, gib, batch, update_at, update_on, 0.0)
        found = {value: predicted(row, **{knob: value}) for value in VALUES[knob]}
        cells = [
            f"{value} {prediction.seconds:.3f}" if prediction.seconds is not None else f"{value}: -"
            for value, prediction in found.items()
        ]
        first, second = (prediction.seconds for prediction in found.values())
        change = f"{second / first - 1:+.1%}" if first and second else "-"
        rows.append([f"{model}, {gib} GiB, batch {batch}", f"{update_at}, {update_on}", knob, *cells, change])
        lines.append(
            {
                "model": model,
                "gib": gib,
                "batch": batch,
                "update_at": update_at,
                "update_on": update_on,
                "knob": knob,
            }
            | {"seconds": {value: prediction.seconds for value, prediction in found.items()}}
        )
    show(["step", "knobs", "what is chosen", "today, s", "the other, s", "change"], rows)
    return lines


# Model, batch, machines, host memory of each for homes, whether the rest may go to a disk.
SCALE = (
    *(
        ("70b", 8, machines, host, disk)
        for machines, host, disk in ((1, 1.0, False), (1, 0.5, True), (8, 0.5, False))
    ),
    *(
        ("405b", 2, machines, host, disk)
        for machines, host, disk in ((1, 6.0, False), (1, 2.0, True), (8, 2.0, False))
    ),
    *(
        ("1t", 1, machines, host, disk)
        for machines, host, disk in ((1, 14.0, False), (1, 2.0, True), (32, 3.0, False))
    ),
)
FAST_DISK = dataclasses.replace(
    MACHINE.rates,
    disk_read_bytes_per_second=12e9,
    disk_write_bytes_per_second=8e9,
    disk_both_bytes_per_second=8e9,
)


def one_scale(row: tuple[str, int, int, float, bool]) -> dict[str, Any]:
    """Plan and simulate one row of `SCALE`; what it took this process is in it."""
    model, batch, machines, host_tib, disk = row
    began = time.perf_counter()
    machine = dataclasses.replace(MACHINE, rates=FAST_DISK)
    found = captured(model, batch)
    wants = Wanted(
        budget_bytes=120 * GIB,
        host_bytes=int(host_tib * 1024 * GIB),
        disk_bytes=100 * 1024 * GIB if disk else 0,
        update_at="backward",
        update_on="auto",
        num_machines=machines,
    )
    prediction = predict(found, machine, wants)
    plan = make_plan_of(found, prediction)
    step = prediction.step
    if step is None:
        raise RuntimeError(f"{row}: {prediction.reason}")
    return {
        "model": model,
        "batch": batch,
        "machines": machines,
        "num_parameters": found.num_parameters,
        "num_pages": plan.num_pages,
        "tokens": found.step.tokens * machines,
        "compute_seconds": found.step.compute_seconds,
        "seconds": prediction.seconds,
        "network_seconds": prediction.network_seconds,
        "of_bound": step.of_bound,
        "stall_seconds": dict(step.stall_seconds),
        "host_bytes": step.tier_bytes["host"],
        "disk_bytes": step.tier_bytes["disk"],
        "plan_seconds": time.perf_counter() - began,
        "plan_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def scale() -> list[dict[str, Any]]:
    # Each in a process of its own: its time and memory are figures too.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        lines = pool.map(one_scale, SCALE, chunksize=1)
    show(
        [
            *("model", "pages", "machines", "host memory of each", "disk of each", "tokens a step"),
            *("computation, s", "step, s", "of the bound", "waits most for", "planned in, peak"),
        ],
        [
            [
                f"{line['model']}, batch {line['batch']}",
                f"{line['num_pages'] / 1e6:.0f} M",
                str(line["machines"]),
                f"{line['host_bytes'] / 2**40:.2f} TiB",
                f"{line['disk_bytes'] / 2**40:.2f} TiB" if line["disk_bytes"] else "-",
                f"{line['tokens']:,}",
                f"{line['compute_seconds']:.0f}",
                f"{line['seconds']:.0f}",
                f"{line['of_bound']:.2f}" if line["of_bound"] else "-",
                next(iter(line["stall_seconds"]), "-"),
                f"{line['plan_seconds']:.0f} s, {line['plan_peak_bytes'] / GIB:.2f} GiB",
            ]
            for line in lines
        ],
    )
    return lines


BENCHES = {
    "measured": measured,
    "streams": streams,
    "launches": launches,
    "placement": placement,
    "scale": scale,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=tuple(BENCHES))
    parser.add_argument("--out")
    arguments = parser.parse_args()
    began = time.perf_counter()
    lines = BENCHES[arguments.what]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stderr.write(f"{time.perf_counter() - began:.1f} s, {peak / GIB:.2f} GiB\n")
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"bench": arguments.what} | line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
