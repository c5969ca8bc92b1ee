"""Estimate what training a model would take: memory by tier with and without pager, step time and tokens per second by
device budget, what would hide the copies, and a verdict in words. Nothing is run; no weights and no GPU are needed.

    pager estimate 7b --update-at backward --update-on auto
    pager estimate 70b --device-budget 80GiB --host-budget 1TiB --json"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pager.tools.plan_options import (
    add_shared_options,
    capture_from,
    columns_of,
    default_budget,
    is_small,
    parse_budget,
    plain,
    wanted_from,
)
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.graph.step_model import StepModel
    from pager.tools.captured import CapturedModel
    from pager.tools.machine import Machine
    from pager.tools.prediction import Prediction

__all__ = ["add_arguments", "memory_of", "run"]

SECONDS_PER_DAY = 86400
BUDGETS_GIB = (8, 12, 16, 24, 32, 40, 48, 80, 120)
KINDS = ("parameters", "gradients", "master", "moments", "activations", "workspace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager estimate``."""
    add_shared_options(parser)
    parser.add_argument(
        "--device-budget",
        metavar="SIZE",
        action="append",
        help="may be given several times (default: the usual sizes of devices up to the machine's)",
    )


def memory_of(captured: CapturedModel, prediction: Prediction | None) -> dict[str, dict[str, int]]:
    """Bytes of each kind: ``plain`` (all of it on the device, as without pager), and by tier with pager. What stays on
    the device is counted there and at its home.

    Without pager a half-precision model that is stepped in fp32 keeps a whole fp32 master; with pager its low half.
    """
    step, size = captured.step, captured.step.size
    count = captured.num_parameters
    has_master = len(captured.states) == 3
    moments = sum(width for width, name in captured.states if name.startswith("exp"))
    plain_bytes = {
        "parameters": count * size.weight,
        "gradients": count * size.gradient,
        "master": count * 4 if has_master else 0,
        "moments": count * moments,
        "activations": captured.activation_bytes,
        "workspace": 0,
    }
    table = {kind: {"plain": plain_bytes[kind], "device": 0, "host": 0, "disk": 0} for kind in KINDS}
    if prediction is None or prediction.placement is None or prediction.step is None:
        return table
    placement, elements = prediction.placement, step.num_elements
    trained = step.gradient_tick >= 0

    def add(kind: str, where: str, width: int, chosen: Any) -> None:
        table[kind][where] += int(elements[chosen].sum()) * width

    # What stays on the device keeps its home below, unless it is wired.
    add("parameters", "device", size.weight, placement.stays)
    add("parameters", "host", size.weight, ~placement.weight_on_disk & ~placement.wired)
    add("parameters", "disk", size.weight, placement.weight_on_disk)
    at_home = trained & (placement.on_cpu | (prediction.wanted.update_at == "step"))
    add("gradients", "host", size.gradient, at_home)
    for width, name in captured.states:
        kind = "moments" if name.startswith("exp") else "master"
        add(kind, "device", width, placement.keeps_states)
        add(kind, "host", width, trained & ~placement.states_on_disk)
        add(kind, "disk", width, trained & placement.states_on_disk)
    table["activations"]["device"] = captured.activation_bytes
    used = sum(table[kind]["device"] for kind in KINDS)
    table["workspace"]["device"] = max(prediction.wanted.budget_bytes - used, 0)
    return table


def run(arguments: argparse.Namespace) -> int:
    """``pager estimate``; 0 if a step can be run within at least one budget, else 1."""
    captured, machine = capture_from(arguments)
    rows = predictions_of(arguments, captured, machine)
    shown = _most_telling(rows, captured.step)
    table = memory_of(captured, shown)
    if arguments.json:
        print(json.dumps(plain(as_dict(captured, machine, rows, shown, table))))
    else:
        print("\n".join(_text(captured, machine, rows, shown, table)))
    return 0 if any(row.fits or row.step is not None for row in rows) else 1


def predictions_of(
    arguments: argparse.Namespace, captured: CapturedModel, machine: Machine
) -> list[Prediction]:
    """One for each budget."""
    from pager.tools.prediction import predict

    if arguments.device_budget:
        budgets = [parse_budget(text, machine) for text in arguments.device_budget]
    elif is_small(captured):
        budgets = [default_budget(captured, machine) * share // 4 for share in (2, 4, 8, 17)]
    else:
        budgets = [gib * 2**30 for gib in BUDGETS_GIB if gib * 2**30 <= machine.device_bytes]
    rows = []
    for place, budget in enumerate(budgets):
        if sys.stderr.isatty():
            print(
                f"\rsimulating {place + 1} of {len(budgets)} budgets ...", end="", file=sys.stderr, flush=True
            )
        rows.append(predict(captured, machine, wanted_from(arguments, captured, machine, budget)))
    if sys.stderr.isatty():
        print("\r" + " " * 40 + "\r", end="", file=sys.stderr)
    return rows


def _most_telling(rows: list[Prediction], step: StepModel) -> Prediction:
    """The budget whose memory and verdict are shown: the least that is just over, else the largest that streams."""
    from pager.tools.verdict import verdict_of

    streaming = [row for row in rows if row.step is not None]
    close = [row for row in streaming if verdict_of(row, step).kind == "just over"]
    return close[0] if close else (streaming or rows)[-1]


def _disk_bytes_per_day(row: Prediction) -> float:
    if row.step is None:
        return 0.0
    return row.step.disk_write_bytes * SECONDS_PER_DAY / row.step.seconds


def _text(
    captured: CapturedModel,
    machine: Machine,
    rows: list[Prediction],
    shown: Prediction,
    table: dict[str, dict[str, int]],
) -> list[str]:
    from pager.tools.verdict import tokens_to_hide, verdict_of

    step = captured.step
    lines = [
        f"{captured.name}: {captured.num_parameters / 1e9:.3g} G parameters ({captured.dtype}), {step.tokens:,} tokens "
        f"a step, on {machine.name}",
        f"computation {step.compute_seconds:.3f} s a step; {captured.way}",
        "",
        f"memory: without pager, and with a device budget of {format_bytes(shown.wanted.budget_bytes)}",
    ]
    cells: list[tuple[str, ...]] = [("", "without pager", "device", "host", "disk")]
    cells += [
        (kind, *(_size(table[kind][where]) for where in ("plain", "device", "host", "disk")))
        for kind in KINDS
    ]
    totals = [sum(table[kind][where] for kind in KINDS) for where in ("plain", "device", "host", "disk")]
    cells.append(("all", *map(_size, totals)))
    lines += columns_of(cells)
    lines += ["", "by device budget"]
    cells = [("budget", "seconds a step", "tokens/s", "of the bound", "waits", "disk a day", "")]
    for row in rows:
        kind = verdict_of(row, step).kind
        if row.step is None:
            cells.append((format_bytes(row.wanted.budget_bytes), "-", "-", "-", "-", "-", kind))
            continue
        of_bound = "-" if row.step.of_bound is None else f"{row.step.of_bound:.0%}"
        disk = _disk_bytes_per_day(row)
        cells.append(
            (
                format_bytes(row.wanted.budget_bytes),
                f"{row.step.seconds:.3f}",
                f"{step.tokens / row.step.seconds:,.0f}",
                of_bound,
                f"{row.step.stall_share:.0%}",
                format_bytes(disk) if disk else "-",
                kind,
            )
        )
    lines += columns_of(cells)
    hide = tokens_to_hide(shown, step)
    if hide:
        lines += ["", f"tokens a step that would hide ({step.tokens:,} now)"]
        lines += columns_of([(engine, f"{tokens:,}") for engine, tokens in hide.items()])
    lines += ["", verdict_of(shown, step).text]
    return lines


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def as_dict(
    captured: CapturedModel,
    machine: Machine,
    rows: list[Prediction],
    shown: Prediction,
    table: dict[str, dict[str, int]],
) -> dict[str, Any]:
    """All figures as plain values."""
    from pager.tools.verdict import tokens_to_hide, verdict_of

    step = captured.step
    return {
        "model": captured.name,
        "num_parameters": captured.num_parameters,
        "dtype": captured.dtype,
        "tokens": step.tokens,
        "machine": machine.name,
        "compute_seconds": step.compute_seconds,
        "activation_bytes": captured.activation_bytes,
        "memory": table,
        "memory_budget_bytes": shown.wanted.budget_bytes,
        "budgets": [
            {
                "budget_bytes": row.wanted.budget_bytes,
                "fits": row.fits,
                "reason": row.reason,
                "seconds": row.seconds,
                "tokens_per_second": None if row.step is None else step.tokens / row.step.seconds,
                "bound": None if row.step is None else row.step.bound,
                "of_bound": None if row.step is None else row.step.of_bound,
                "stall_share": None if row.step is None else row.step.stall_share,
                "host_bytes": None if row.step is None else row.step.tier_bytes["host"],
                "disk_bytes": None if row.step is None else row.step.tier_bytes["disk"],
                "disk_write_bytes_per_day": _disk_bytes_per_day(row),
                "verdict": verdict_of(row, step).kind,
            }
            for row in rows
        ],
        "tokens_to_hide": tokens_to_hide(shown, step),
        "verdict": verdict_of(shown, step).kind,
        "verdict_text": verdict_of(shown, step).text,
    }
