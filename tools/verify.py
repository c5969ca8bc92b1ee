"""Train a few steps with pager and without it, from the same seeds, and compare every bit of every loss, gradient,
parameter and optimizer state.

MODEL gets weights drawn from the seed; a preset or a config gets inputs drawn from it too, a function brings its own.
Deterministic algorithms are on. Without a GPU the device is simulated. Where something differs, the run is repeated
with one of the things that are on off at a time, and what makes the difference is named. Exit code 0: all bits are the
same; 1: not, or a run was refused; 2: wrong use.

    pager verify small --update-at backward
    pager verify mine.py:make --device-budget 2GiB --update-on auto --json"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pager.tools.errors import InputError
from pager.tools.verify_switches import PAGING, switches_of
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.statistics import Statistics
    from pager.tools.verifier import Verdict
    from pager.tools.verify_run import TensorRow, Work

__all__ = ["add_arguments", "run"]

SHOWN_ROWS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager verify``."""
    from pager.tools.model_source import HELP

    parser.add_argument("model", metavar="MODEL", help=HELP)
    work = parser.add_argument_group("the work")
    work.add_argument("--steps", type=int, default=3, help="(default: 3)")
    work.add_argument("--batch", type=int, default=1, help="sequences a step (default: 1)")
    work.add_argument(
        "--seq",
        type=int,
        help="tokens of a sequence (default: 2048, or all of a model's positions; small models 128)",
    )
    work.add_argument("--seed", type=int, default=0, help="of weights, inputs and dropout (default: 0)")
    work.add_argument("--optimizer", choices=("adamw", "adam", "sgd"), default="adamw")
    work.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    work.add_argument(
        "--no-checkpoint", action="store_true", help="a Hugging Face model keeps its activations in forward"
    )
    knobs = parser.add_argument_group("knobs of pager.Config, each a thing that can be switched off")
    knobs.add_argument("--device", default="auto", help="auto, cuda, cuda:1, or cpu: the simulated device")
    knobs.add_argument(
        "--device-budget", metavar="SIZE", help="(default: pages get a quarter of the training state)"
    )
    knobs.add_argument("--host-budget", metavar="SIZE", default="0.85")
    knobs.add_argument("--disk", metavar="DIR", help="folder of a third tier (default: none)")
    knobs.add_argument("--disk-budget", metavar="SIZE", help="(default: 90 %% of what is free there)")
    knobs.add_argument(
        "--disk-compression", metavar="LEVEL", help="zstd, or a level from 1 to 22 (default: none)"
    )
    knobs.add_argument("--page-size", metavar="SIZE", default="128KiB")
    knobs.add_argument("--prefetch-distance", type=int, default=4, help="extents kept in flight (default: 4)")
    knobs.add_argument("--eviction", choices=("belady", "clock", "lru"), default="belady")
    knobs.add_argument("--update-at", choices=("step", "backward"), default="step")
    knobs.add_argument("--update-on", choices=("device", "auto", "cpu"), default="device")
    knobs.add_argument(
        "--master", choices=("float32",), help="compared with a loop of bf16 weights and fp32 masters"
    )
    knobs.add_argument("--no-paging", action="store_true", help="the budget holds everything")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """``pager verify``; 0 if every bit is the same, else 1."""
    # Read by cuBLAS when it starts; without it torch refuses deterministic products on CUDA.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    knobs = knobs_from(arguments)
    from pager.tools.model_source import load_model
    from pager.tools.training import deterministic
    from pager.tools.verifier import Verifier
    from pager.tools.verify_run import Work

    _say("drawing the weights ...")
    source = load_model(
        arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        checkpoint=not arguments.no_checkpoint,
        seed=arguments.seed,
    )
    work = Work(
        source=source,
        steps=arguments.steps,
        seed=arguments.seed,
        optimizer=arguments.optimizer,
        lr=arguments.lr,
        keeps_gradients=arguments.update_at == "step",
    )
    verifier = Verifier(work, arguments.device, say=_say)
    try:
        with deterministic(True):
            verdict = verifier.verify(knobs)
        where = str(verifier.torch_device)
    finally:
        verifier.close()
    if arguments.json:
        print(json.dumps(as_dict(work, where, knobs, verdict)))
    else:
        print("\n".join(text_of(work, where, knobs, verdict)))
    return 0 if verdict.equal else 1


def knobs_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """The knobs of the run, and ``paging``. InputError or ConfigError for what cannot be."""
    from pager.config import Config
    from pager.tools.train import parse_budget, parse_compression

    for name, lowest in (("steps", 1), ("batch", 1), ("seq", 2), ("seed", 0)):
        value = getattr(arguments, name)
        if value is not None and not lowest <= value < 2**63:
            raise InputError(f"--{name} is {value}; expected at least {lowest}, and 64 bits")
    if not 0 <= arguments.lr < float("inf"):
        raise InputError(f"--lr is {arguments.lr}; expected a number from 0 up")
    if arguments.no_paging and arguments.device_budget is not None:
        raise InputError("--no-paging and --device-budget contradict each other; give one")
    if arguments.disk is not None and not os.path.isdir(arguments.disk):
        raise InputError(f"--disk {arguments.disk}: there is no such folder; make it or name another")
    names = (
        "page_size",
        "prefetch_distance",
        "eviction",
        "update_at",
        "update_on",
        "master",
        "disk",
        "disk_budget",
    )
    knobs: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    budget = arguments.device_budget
    knobs |= {
        "device_budget": None if budget is None else parse_budget(budget),
        "host_budget": parse_budget(arguments.host_budget),
        "disk_compression": parse_compression(arguments.disk_compression),
    }
    Config(**knobs, device=arguments.device)
    return knobs | {PAGING: not arguments.no_paging}


def as_dict(work: Work, where: str, knobs: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    """All figures as plain values; a number that is none (NaN) is text."""
    return {
        "model": work.source.name,
        "device": where,
        "steps": work.steps,
        "seed": work.seed,
        "optimizer": work.optimizer,
        "knobs": knobs,
        "equal": verdict.equal,
        "num_different": sum(not row.equal for row in verdict.rows),
        "explanation": verdict.text,
        "trials": [
            {"without": str(trial.switch), "equal": trial.equal, "reason": trial.reason}
            for trial in verdict.trials
        ],
        "page_in_bytes": verdict.statistics.page_in_bytes,
        "page_out_bytes": verdict.statistics.page_out_bytes,
        "disk_read_bytes": verdict.statistics.disk_read_bytes,
        "disk_write_bytes": verdict.statistics.disk_write_bytes,
        "disk_saved_bytes": verdict.statistics.disk_saved_bytes,
        "tensors": [
            {
                key: str(value) if isinstance(value, float) and not abs(value) < float("inf") else value
                for key, value in asdict(row).items()
            }
            for row in verdict.rows
        ],
    }


def text_of(work: Work, where: str, knobs: dict[str, Any], verdict: Verdict) -> list[str]:
    """A table of groups of tensors, those that differ, and the verdict."""
    statistics = verdict.statistics
    on = ", ".join(map(str, switches_of(knobs))) or "nothing"
    paged = (
        f"paged in {format_bytes(statistics.page_in_bytes)}, out {format_bytes(statistics.page_out_bytes)}, "
        f"hit rate {statistics.hit_rate:.1%}"
        if statistics.page_in_bytes
        else "nothing was paged: the budget holds everything, so this says little"
    )
    simulated = " (the simulated device)" if where == "cpu" else ""
    lines = [
        f"{work.source.name}: {work.steps} steps of {work.optimizer} with and without pager on {where}{simulated}, "
        f"seed {work.seed}",
        f"switched on: {on}",
        paged,
        *_about_disk(knobs, statistics),
        "",
        *_table([_HEAD, *(_cells(group, rows) for group, rows in _groups(verdict.rows))]),
    ]
    different = [row for row in verdict.rows if not row.equal]
    if not different:
        return [*lines, "", f"bit-equal: {len(verdict.rows)} tensors, every bit of every step"]
    lines += ["", f"different: {len(different)} of {len(verdict.rows)} tensors"]
    lines += [
        f"  {row.kind} {row.name}: from step {row.first_step} on, "
        + (row.note or f"by at most {row.max_difference:.3g}")
        for row in different[:SHOWN_ROWS]
    ]
    if len(different) > SHOWN_ROWS:
        lines.append(f"  and {len(different) - SHOWN_ROWS} more (--json has all)")
    return [*lines, "", *verdict.text]


def _about_disk(knobs: dict[str, Any], statistics: Statistics) -> list[str]:
    if knobs["disk"] is None:
        return []
    if not statistics.peak_disk_bytes:
        return [
            "the disk had no effect: device and host memory hold everything; a lower --host-budget uses it"
        ]
    read, written = map(format_bytes, (statistics.disk_read_bytes, statistics.disk_write_bytes))
    saved = statistics.disk_saved_bytes
    spared = f"; compression spared it {format_bytes(saved)}" if saved else ""
    return [f"read {read} from the disk, wrote {written}{spared}"]


_HEAD = ("tensor", "kind", "shape", "norm", "without pager", "largest difference", "")


def _groups(rows: list[TensorRow]) -> list[tuple[str, list[TensorRow]]]:
    """Rows of one kind and shape whose names differ in numbers only."""
    groups: dict[tuple[Any, ...], list[TensorRow]] = {}
    for row in rows:
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", row.name)
        groups.setdefault((row.kind, pattern, row.shape, row.dtype), []).append(row)
    return [(key[1] if len(found) > 1 else found[0].name, found) for key, found in groups.items()]


def _cells(name: str, rows: list[TensorRow]) -> tuple[str, ...]:
    first, wrong = rows[0], sum(not row.equal for row in rows)
    norms = [sum(value**2 for value in values) ** 0.5 for values in _norms(rows)]
    shape = "x".join(map(str, first.shape)) or "scalar"
    return (
        f"{name} ({len(rows)})" if len(rows) > 1 else name,
        first.kind,
        f"{shape} {first.dtype}",
        *(f"{norm:.6g}" for norm in norms),
        f"{max(row.max_difference for row in rows):.3g}",
        "bit-equal" if not wrong else f"{wrong} of {len(rows)} differ" if len(rows) > 1 else "differs",
    )


def _norms(rows: list[TensorRow]) -> tuple[list[float], list[float]]:
    return [row.norm for row in rows], [row.plain_norm for row in rows]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _say(message: str) -> None:
    """Progress, for people who watch: on stderr, and only there."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)
