"""Plan a training step without running it: where every page lives, when it is used next, and how the step would go on
a machine, simulated.

The model is built on meta and captured, no weights and no GPU are needed. Prints a table per segment, the predicted
step, miss ratios by device memory and policy, working sets, and a verdict. With --out: plan.html (one page that needs
nothing else), plan.png, plan.json and trace.json, which opens in ui.perfetto.dev.

    pager plan 7b --device-budget 24GiB --update-at backward --update-on auto --out plan7b
    pager plan path/to/config.json --batch 4 --json"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pager.tools.errors import CommandFailed
from pager.tools.plan_options import (
    add_shared_options,
    capture_from,
    default_budget,
    make_folder,
    parse_budget,
    plain,
    wanted_from,
)
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.graph.plan import Plan
    from pager.tools.captured import CapturedModel
    from pager.tools.plan_locality import Locality
    from pager.tools.prediction import Prediction

__all__ = ["add_arguments", "make_plan_of", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager plan``."""
    add_shared_options(parser)
    parser.add_argument(
        "--device-budget",
        metavar="SIZE",
        help='"24GiB", or a fraction such as 0.9 of the device (default: room for a quarter of the training state)',
    )
    parser.add_argument(
        "--out", metavar="DIR", help="write plan.html, plan.png, plan.json and trace.json there"
    )
    parser.add_argument(
        "--pages", choices=("csv", "json"), help="with --out: every page too, as pages.csv or in plan.json"
    )


def make_plan_of(captured: CapturedModel, prediction: Prediction) -> Plan:
    """The plan of a captured model with the simulated step as its prediction."""
    from pager.graph.plan import Predicted, make_plan

    specs, trace = captured.plan_segments()
    staged, shares = captured.step.size.staged(prediction.wanted.update_at), prediction.shares
    unit = shares.slot_bytes // staged if shares is not None and shares.num_slots else 0
    trace = trace.with_update(captured.update_rows(specs, unit))
    result = prediction.step
    plan = make_plan(
        specs,
        trace,
        page_size=captured.page_size,
        homes=_homes(captured, prediction),
        budgets={"device": prediction.wanted.budget_bytes, "host": prediction.wanted.host_bytes},
        way=captured.way,
        note=captured.note,
    )
    if result is None:
        return plan
    return dataclasses.replace(
        plan,
        predicted=Predicted(
            tier_bytes=plan.predicted.tier_bytes,
            wired_bytes=plan.predicted.wired_bytes,
            largest_tick_bytes=plan.predicted.largest_tick_bytes,
            policy=str(getattr(prediction.wanted.eviction, "name", prediction.wanted.eviction)),
            page_in_bytes=result.page_in_bytes,
            page_out_bytes=result.page_out_bytes,
            disk_read_bytes=result.disk_read_bytes,
            disk_write_bytes=result.disk_write_bytes,
            hit_rate=result.hit_rate,
            peak_resident_bytes=result.waveform.peak_pages_bytes,
        ),
    )


def _homes(captured: CapturedModel, prediction: Prediction) -> list[int]:
    """Per segment: 0 device, 1 host, 2 disk."""
    import numpy as np

    placement, count = prediction.placement, len(captured.segments)
    kinds = 2 + len(captured.states)
    if placement is None:
        return [0 if prediction.fits else 1] * (count * kinds)
    weights = np.where(placement.stays, 0, np.where(placement.weight_on_disk, 2, 1))
    states = np.where(placement.keeps_states, 0, np.where(placement.states_on_disk, 2, 1))
    columns = [weights, np.ones(count, np.int64), *[states] * len(captured.states)]
    return [int(home) for home in np.concatenate(columns)]


def run(arguments: argparse.Namespace) -> int:
    """``pager plan``; 0 if the step can be run within the budget, else 1."""
    from pager.tools.plan_locality import locality_of
    from pager.tools.prediction import predict
    from pager.tools.verdict import verdict_of

    folder = make_folder(arguments.out) if arguments.out else None
    _say("capturing a step on meta ...")
    captured, machine = capture_from(arguments)
    budget = (
        default_budget(captured, machine)
        if arguments.device_budget is None
        else parse_budget(arguments.device_budget, machine)
    )
    _say("simulating ...")
    prediction = predict(
        captured, machine, wanted_from(arguments, captured, machine, budget), keep_tasks=folder is not None
    )
    verdict = verdict_of(prediction, captured.step)
    plan = make_plan_of(captured, prediction)
    figures = figures_of(captured, prediction, machine.name)
    _say("carrying the step out at other sizes ...")
    locality = locality_of(plan, prediction.arena_bytes or budget, fine=folder is not None)
    if folder is not None:
        _say(f"writing to {folder} ...")
        _write(folder, plan, captured, prediction, verdict.text, figures, locality, arguments.pages)
    if arguments.json:
        found = as_dict(captured, prediction, verdict.kind, verdict.text) | locality.as_dict()
        print(json.dumps(plain(found)))
    else:
        print(plan)
        print()
        width = max(len(name) for name, _ in figures)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in figures))
        for heading, lines in locality.sections():
            print("\n".join(("", heading, *lines)))
        print(f"\n{verdict.text}")
    return 0 if prediction.fits or prediction.step is not None else 1


def figures_of(captured: CapturedModel, prediction: Prediction, machine: str) -> list[tuple[str, str]]:
    """What is worth a line each: name and value."""
    step, result = captured.step, prediction.step
    forward, backward = step.phase_seconds()
    rows = [
        ("model", f"{captured.name}, {captured.num_parameters / 1e9:.3g} G parameters, {captured.dtype}"),
        ("machine", machine),
        (
            "device budget",
            format_bytes(prediction.wanted.budget_bytes)
            + (" for pages alone, as on the simulated device" if prediction.wanted.simulated else ""),
        ),
        ("activations", format_bytes(captured.activation_bytes)),
        ("computation", f"{forward:.3f} s forward, {backward:.3f} s backward"),
    ]
    if result is None:
        return rows
    rows += [
        (
            "arena",
            f"{format_bytes(prediction.arena_bytes)}, of which slots {format_bytes(_ring(prediction))}",
        ),
        ("step", f"{result.seconds:.3f} s ({step.tokens / result.seconds:,.0f} tokens/s)"),
    ]
    if result.bound is not None and prediction.bound is not None:
        rows.append(
            (
                "least possible",
                f"{result.bound:.3f} s, {result.of_bound:.0%} of it (wall: {prediction.bound.wall})",
            )
        )
    stalls = ", ".join(
        f"{cause} {seconds:.3f} s" for cause, seconds in result.stall_seconds.items() if seconds > 5e-4
    )
    rows += [
        ("waits", f"{result.stall_share:.0%} of the step{': ' if stalls else ''}{stalls}"),
        ("link", f"{result.page_in_bytes / 1e9:.1f} GB in, {result.page_out_bytes / 1e9:.1f} GB out"),
        ("updated on the CPU", f"{result.cpu_share:.0%} of the parameters"),
        ("device, most", f"{format_bytes(result.waveform.peak_bytes)} of pages and activations"),
        ("host", format_bytes(result.tier_bytes["host"])),
    ]
    if result.tier_bytes["disk"]:
        rows.append(
            (
                "disk",
                f"{format_bytes(result.tier_bytes['disk'])}; {result.disk_read_bytes / 1e9:.1f} GB read, "
                f"{result.disk_write_bytes / 1e9:.1f} GB written a step",
            )
        )
    return rows


def _ring(prediction: Prediction) -> int:
    return 0 if prediction.shares is None else prediction.shares.ring_bytes


def as_dict(captured: CapturedModel, prediction: Prediction, kind: str, verdict: str) -> dict[str, Any]:
    """All figures as plain values."""
    wanted = dataclasses.asdict(prediction.wanted)
    wanted["eviction"] = str(wanted["eviction"])
    forward, backward = captured.step.phase_seconds()
    return {
        "model": captured.name,
        "way": captured.way,
        "num_parameters": captured.num_parameters,
        "dtype": captured.dtype,
        "num_ticks": captured.step.num_ticks,
        "num_segments": len(captured.segments) * (2 + len(captured.states)),
        "page_size": captured.page_size,
        "activation_bytes": captured.activation_bytes,
        "flops": captured.flops,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "tokens": captured.step.tokens,
        "wanted": wanted,
        "fits": prediction.fits,
        "reason": prediction.reason,
        "arena_bytes": prediction.arena_bytes,
        "step": None if prediction.step is None else prediction.step.to_dict(),
        "bound_wall": None if prediction.bound is None else prediction.bound.wall,
        "verdict": kind,
        "verdict_text": verdict,
    }


def _write(
    folder: Path,
    plan: Plan,
    captured: CapturedModel,
    prediction: Prediction,
    verdict: str,
    figures: list[tuple[str, str]],
    locality: Locality,
    pages: str | None,
) -> None:
    from pager.graph.chrome_trace import write_chrome_trace
    from pager.tools.plan_figures import draw_plan
    from pager.tools.plan_page import render_page

    picture = io.BytesIO()
    draw_plan(picture, plan, captured, prediction, locality)
    title = f"{captured.name} within {format_bytes(prediction.wanted.budget_bytes)}"
    page = render_page(
        title=title,
        verdict=verdict,
        figures=figures,
        sections=locality.sections(),
        table=str(plan),
        png=picture.getvalue(),
    )
    try:
        (folder / "plan.png").write_bytes(picture.getvalue())
        (folder / "plan.html").write_text(page, encoding="utf-8")
        plan.to_json(folder / "plan.json", pages=pages == "json")
        if pages == "csv":
            plan.to_csv(folder / "pages.csv")
        if prediction.step is not None:
            write_chrome_trace(prediction.step, folder / "trace.json", name=title)
    except OSError as error:
        raise CommandFailed(f"cannot write to {folder}: {error.strerror or error}") from error


def _say(message: str) -> None:
    """Progress, for people who watch: on stderr, and only there."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)
