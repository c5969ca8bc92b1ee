"""Training steps of one workload by several systems, one after another on this machine: pager, all of it on the
GPU, and the usual ways to train with the optimizer state in host memory.

Each system runs in a process of its own with its own time limit; one that is not installed, crashes or is too slow
gets a line with the reason. Before them the machine's ceilings are measured, and from those the least seconds any
schedule could take (the bound). Results are printed and appended to OUT/bench.jsonl, one JSON line a row.

    pager bench step --workload 3b --batch 1,8 --systems pager-backward,pager-step,fsdp2 --out runs/bench

"pager" has the knobs named here; pager-step has update_at="step", update_on="device", pager-backward has
update_at="backward", update_on="auto", both with fp32 masters where a knob here does not say otherwise."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pager.tools.bench.job import (
    DEFAULT_SYSTEMS,
    LEAST_DROPPED_STEPS,
    StepJob,
    load_workload,
    parse_systems,
)
from pager.tools.errors import InputError
from pager.units import parse_size

__all__ = ["add_arguments", "make_job", "run"]

CLIPS: dict[str, tuple[float | None, ...]] = {"none": (None,), "1.0": (1.0,), "both": (None, 1.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what can be measured: ``step``."""
    kinds = parser.add_subparsers(title="what is measured", metavar="WHAT", required=True)
    step = kinds.add_parser(
        "step", help="whole training steps", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    step.description = __doc__
    work = step.add_argument_group("the work")
    work.add_argument("--workload", default="3b", help="3b, 7b, small, or another model or FILE of sizes")
    work.add_argument(
        "--batch", default="1", help="sequences a step; 1,8: both, one after another (default: 1)"
    )
    work.add_argument("--seq", type=int, help="tokens of a sequence (default: 2048; small models 128)")
    work.add_argument(
        "--steps", type=int, default=9, help="a third of them, at least two, is dropped (default: 9)"
    )
    work.add_argument(
        "--clip", choices=CLIPS, default="none", help="gradient norm; both: one after another (default: none)"
    )
    work.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms")
    systems = step.add_argument_group("the systems")
    systems.add_argument("--systems", default=DEFAULT_SYSTEMS, help=f"in order (default: {DEFAULT_SYSTEMS})")
    systems.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="cpu: simulated")
    systems.add_argument(
        "--cap",
        metavar="SIZE",
        help="device memory (default: 3b 12GiB, 7b and 13b 24GiB, else a quarter of the state)",
    )
    systems.add_argument("--timeout", type=float, default=180.0, help="seconds a system (default: 180)")
    systems.add_argument("--ceilings", action="store_true", help="measure the machine only, no system")
    knobs = step.add_argument_group("knobs of pager.Config, handed on where named")
    knobs.add_argument("--host-budget", metavar="SIZE")
    knobs.add_argument("--disk", metavar="FOLDER", help="a third tier; its speed is one of the ceilings then")
    knobs.add_argument("--disk-budget", metavar="SIZE")
    knobs.add_argument("--disk-compression", metavar="LEVEL", help="zstd, or 1 to 22")
    knobs.add_argument("--update-at", choices=("step", "backward"))
    knobs.add_argument("--update-on", choices=("device", "auto", "cpu"))
    knobs.add_argument("--master", choices=("float32", "none"))
    step.add_argument(
        "--out", default="runs/bench", help="folder of bench.jsonl and logs (default: runs/bench)"
    )
    step.add_argument("--json", action="store_true", help="print the JSON lines instead of the table")


def make_job(arguments: argparse.Namespace, *, has_gpu: bool) -> StepJob:
    """The job in the options; InputError where they do not go together."""
    workload, sizes, cap = load_workload(arguments.workload)
    if arguments.device == "cuda" and not has_gpu:
        raise InputError("--device cuda: torch sees no GPU here; --device cpu simulates one")
    for name, lowest in (("steps", LEAST_DROPPED_STEPS + 1), ("seq", 2)):
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise InputError(f"--{name} is {value}; expected at least {lowest}")
    if arguments.cap is not None:
        cap = parse_size(arguments.cap, name="--cap")
    on_gpu = has_gpu and arguments.device != "cpu"
    names = ("host_budget", "disk", "disk_budget", "disk_compression", "update_at", "update_on", "master")
    knobs: dict[str, Any] = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    if "disk_compression" in knobs:
        from pager.tools.train import parse_compression

        knobs["disk_compression"] = parse_compression(knobs["disk_compression"])
    if knobs.get("master") == "none":
        knobs["master"] = None
    return StepJob(
        workload=workload,
        sizes=sizes,
        batches=_batches(arguments.batch),
        seq=arguments.seq or (2048 if sizes.checkpoint else 128),
        systems=() if arguments.ceilings else parse_systems(arguments.systems),
        cap_bytes=cap if cap is not None else sizes.state_bytes // 4,
        steps=arguments.steps,
        clips=CLIPS[arguments.clip],
        knobs=knobs,
        deterministic=arguments.deterministic,
        timeout=arguments.timeout,
        device="cuda" if on_gpu else "cpu",
    )


def _batches(text: str) -> tuple[int, ...]:
    """Ascending, so that what a process was seen to take grows from run to run."""
    try:
        batches = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise InputError(f"--batch is {text!r}; expected a number, or several as in 1,8") from error
    if batches[0] < 1:
        raise InputError(f"--batch is {batches[0]}; expected at least 1")
    return batches


def run(arguments: argparse.Namespace) -> int:
    """``pager bench step``; 0 if at least one system gave numbers (or the ceilings did), else 1."""
    from pager.device.cuda import num_devices
    from pager.tools.bench.conductor import conduct

    job = make_job(arguments, has_gpu=num_devices() > 0)
    out = Path(arguments.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}") from error
    return conduct(job, out, as_json=arguments.json)
