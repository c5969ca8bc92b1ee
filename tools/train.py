"""Train a byte-level decoder language model on real text with its whole state (parameters, gradients, Adam)
at least four times the device budget. Without a GPU the device is simulated.

Results go to <out>/<time>-<model>/: losses.json, config.yaml, plan.txt, plan.json, statistics.json,
resident.csv, resident.png, steps.jsonl (a line a step, while it runs: see pager monitor), and check.json
after --check. Ctrl-C ends the run after the step that runs and leaves the results so far."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from pager.tools.errors import InputError
from pager.tools.model_sizes import PRESETS, ModelSizes, load_sizes

__all__ = ["Job", "add_arguments", "check_disk_folder", "make_job", "run"]

# The whole state is four times the budget. On a GPU the budget also holds the CUDA context, its libraries and
# the activations, so there a small model still gets room for those.
STATE_PER_BUDGET = 4
MIN_GPU_BUDGET_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Options that follow from the model where the user gives none."""

    steps: int
    batch: int
    seq: int
    lr: float


# `pager train` on two busy cores (load 2 to 4), the device simulated: 83 s of steps, 95 s with start, capture and
# plot; loss 5.80 -> 1.86 nats/byte.
SMALL = Defaults(steps=100, batch=8, seq=128, lr=1e-3)
# On the smallest GPU budget for it (a quarter of the state) longer sequences leave no room for the logits.
ONE_BILLION = Defaults(steps=20, batch=1, seq=512, lr=3e-4)
DEFAULTS = {"tiny": Defaults(steps=100, batch=4, seq=64, lr=3e-3), "small": SMALL, "1b": ONE_BILLION}
LARGE = Defaults(steps=20, batch=1, seq=2048, lr=3e-4)


def _number(kind: type[int] | type[float], lowest: float) -> Callable[[str], float]:
    # torch takes whole numbers of 64 bits, for seeds and for sizes.
    highest = 2**63 - 1 if kind is int else sys.float_info.max

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not lowest <= value <= highest:
            upper = "up" if value < lowest or kind is float else f"to {highest}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {lowest:g} {upper}")
        return value

    return parse


def _distance(text: str) -> int | str:
    return text if text == "auto" else int(_number(int, 0)(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager train``."""
    model = parser.add_argument_group("what is trained")
    model.add_argument(
        "--model",
        help=f"{', '.join(PRESETS)}, or a JSON or YAML file of sizes (default: small; on a GPU 1b)",
    )
    model.add_argument(
        "--text",
        metavar="FILE|DIR",
        help="text to train on (default: the documentation that comes with Python)",
    )
    model.add_argument("--steps", type=_number(int, 1), help="optimizer steps (default: by model, small 100)")
    model.add_argument("--batch", type=_number(int, 1), help="windows per step (default: by model, small 8)")
    model.add_argument("--seq", type=_number(int, 2), help="bytes per window (default: by model, small 128)")
    model.add_argument(
        "--lr", type=_number(float, 0), help="learning rate of AdamW (default: by model, small 1e-3)"
    )
    model.add_argument("--seed", type=_number(int, 0), default=0, help="of weights and batches (default: 0)")
    memory = parser.add_argument_group("memory (the knobs of pager.Config)")
    memory.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, or cpu for the simulated device"
    )
    memory.add_argument(
        "--device-budget",
        default="auto",
        metavar="SIZE",
        help='bytes, "24GiB", or a fraction such as 0.9 (default: a quarter of the training state)',
    )
    memory.add_argument(
        "--host-budget", default="0.85", metavar="SIZE", help="the same, of host memory (default: 0.85)"
    )
    memory.add_argument("--disk", metavar="DIR", help="folder for a third tier (default: none)")
    memory.add_argument(
        "--disk-compression",
        metavar="LEVEL",
        help="zstd, or a level from 1 to 22: pages that shrink go to the disk compressed (default: none)",
    )
    memory.add_argument(
        "--page-size",
        default="128KiB",
        metavar="SIZE",
        help="a power of two, 16KiB to 4MiB (default: 128KiB)",
    )
    memory.add_argument(
        "--prefetch-distance",
        type=_distance,
        default=4,
        help="upcoming extents in flight, or auto (default: 4)",
    )
    memory.add_argument("--eviction", default="belady", help="belady, lru or clock (default: belady)")
    result = parser.add_argument_group("result")
    result.add_argument("--out", default="runs", metavar="DIR", help="folder of all runs (default: runs)")
    result.add_argument(
        "--check",
        action="store_true",
        help="train the same model unmanaged too and compare losses and parameters bit by bit",
    )


def parse_budget(text: str) -> int | float | str:
    """A budget as ``pager.Config`` takes it: a fraction for "0.9", bytes for "1000000", else the text."""
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def parse_compression(text: str | None) -> int | str | None:
    """``disk_compression`` as ``pager.Config`` takes it, which says what is wrong with it."""
    return text if text is None or not text.removeprefix("-").isdecimal() else int(text)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The options with everything decided: what config.yaml records."""

    model: str
    sizes: ModelSizes
    text: str | None
    steps: int
    batch: int
    seq: int
    lr: float
    seed: int
    check: bool
    out: str
    knobs: dict[str, Any]


def make_job(arguments: argparse.Namespace) -> Job:
    """Decide every option that was left open. Raises InputError or ConfigError for what cannot work."""
    from pager.config import Config
    from pager.device.cuda import num_devices

    on_gpu = arguments.device.startswith("cuda") or (arguments.device == "auto" and num_devices() > 0)
    name, sizes = load_sizes(("1b" if on_gpu else "small") if arguments.model is None else arguments.model)
    defaults = DEFAULTS.get(name, LARGE if name in PRESETS else SMALL)
    given = {key: getattr(arguments, key) for key in ("steps", "batch", "seq", "lr")}
    chosen = {key: getattr(defaults, key) if value is None else value for key, value in given.items()}
    budget = parse_budget(arguments.device_budget)
    if budget == "auto":
        budget = max(sizes.state_bytes // STATE_PER_BUDGET, MIN_GPU_BUDGET_BYTES if on_gpu else 0)
    knobs = {
        "device": arguments.device,
        "device_budget": budget,
        "host_budget": parse_budget(arguments.host_budget),
        "disk": arguments.disk,
        "disk_compression": parse_compression(arguments.disk_compression),
        "page_size": arguments.page_size,
        "prefetch_distance": arguments.prefetch_distance,
        "eviction": arguments.eviction,
    }
    try:
        Config(**knobs)
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    if arguments.disk is not None:
        check_disk_folder(arguments.disk)
    return Job(
        model=name,
        sizes=sizes,
        text=arguments.text,
        seed=arguments.seed,
        check=arguments.check,
        out=arguments.out,
        knobs=knobs,
        **chosen,
    )


def check_disk_folder(folder: str) -> None:
    """Raises InputError for a folder that no tier can be in. What its file system can do is found later."""
    if not os.path.isdir(folder):
        what = "is not a folder" if os.path.exists(folder) else "there is no such folder"
        raise InputError(f"--disk {folder}: {what}; make it or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--disk {folder}: you may not write there; name another folder")


def run(arguments: argparse.Namespace) -> int:
    """Carry out ``pager train``; returns the exit code."""
    job = make_job(arguments)
    from pager.tools.train_job import run_job

    return run_job(job)
