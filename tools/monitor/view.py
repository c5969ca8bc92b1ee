"""A run as some lines of text, and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pager.statistics import Statistics
from pager.tools.monitor.recorded import RecordedRun
from pager.units import format_bytes

__all__ = ["Glyphs", "as_dict", "glyphs_for", "render", "spark"]

BAR = 24
SPARK = 48
LINKS = ("page_in_bytes", "page_out_bytes", "disk_read_bytes", "disk_write_bytes")


class Glyphs(NamedTuple):
    """Characters of a bar and of a small chart, from empty to full."""

    bar: str
    levels: str


UNICODE = Glyphs("·█", "▁▂▃▄▅▆▇█")
ASCII = Glyphs(".#", "_.-=*#")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Blocks where the terminal's encoding has them, else plain letters."""
    try:
        "".join(UNICODE).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def spark(values: Sequence[int], highest: int, glyphs: Glyphs, *, width: int = SPARK) -> str:
    """A chart one line high: ``values`` against ``highest``, thinned evenly."""
    if not values or highest <= 0:
        return ""
    shown = list(values)
    if len(values) > width:
        shown = [values[place * (len(values) - 1) // (width - 1)] for place in range(width)]
    top = len(glyphs.levels) - 1
    return "".join(glyphs.levels[min(max(round(value / highest * top), 0), top)] for value in shown)


def _last_step(run: RecordedRun) -> tuple[Statistics, Statistics, float]:
    """Counters before and after the last step, and its seconds."""
    if run.last is None:
        return Statistics(), Statistics(), 0.0
    before = run.recent[-2].statistics if len(run.recent) > 1 else Statistics()
    return before, run.last.statistics, run.last.seconds


def as_dict(run: RecordedRun) -> dict[str, Any]:
    """The last step, the tiers and the diagnosis as plain values."""
    before, now, seconds = _last_step(run)
    found = run.diagnosis()
    accesses = now.num_accesses - before.num_accesses
    device_bytes = now.resident_bytes
    device_peak = now.peak_device_process_bytes or now.peak_resident_bytes
    return {
        "model": run.model,
        "status": run.status,
        "steps_done": 0 if run.last is None else run.last.step,
        "steps_asked": run.steps_asked,
        "loss": None if run.last is None else run.last.loss,
        "step_seconds": seconds,
        "tokens_per_second": run.tokens_per_step / seconds if seconds else 0.0,
        "tiers": {
            "device": _tier(device_bytes, device_peak, now.device_budget_bytes),
            "host": _tier(now.host_bytes, now.peak_host_bytes, now.host_budget_bytes),
            "disk": _tier(now.disk_bytes, now.peak_disk_bytes, now.disk_budget_bytes),
        },
        "wired_bytes": now.wired_bytes,
        "hit_rate": (now.hits - before.hits) / accesses if accesses else 1.0,
        "minor_faults": now.minor_faults - before.minor_faults,
        "major_faults": now.major_faults - before.major_faults,
        "refaults": now.refaults - before.refaults,
        "prefetch_late": now.prefetch_late - before.prefetch_late,
        "prefetch_unused": now.prefetch_unused - before.prefetch_unused,
        "stall_seconds": now.stall_seconds - before.stall_seconds,
        "links": {
            name.replace("_bytes", "_bytes_per_second"): (getattr(now, name) - getattr(before, name))
            / seconds
            if seconds
            else 0.0
            for name in LINKS
        },
        "diagnosis": {
            "kind": found.kind,
            "text": found.text,
            "peak_bytes": found.peak_bytes,
            "valley_bytes": found.valley_bytes,
            "teeth_per_step": found.teeth_per_step,
            "tooth_bytes": found.tooth_bytes,
        },
    }


def _tier(num_bytes: int, peak: int, budget: int) -> dict[str, int]:
    return {"bytes": num_bytes, "peak_bytes": peak, "budget_bytes": budget}


def render(run: RecordedRun, glyphs: Glyphs) -> list[str]:
    """The view: the step, a line per tier, accesses, waits, links, the last step's waveform, the diagnosis."""
    values = as_dict(run)
    if run.last is None:
        return [f"{run.model}: {run.status}, no step was logged{'' if run.is_over else ' yet'}"]
    seconds = values["step_seconds"]
    asked = f" of {run.steps_asked}" if run.steps_asked else ""
    loss = "nan" if values["loss"] is None else f"{values['loss']:.3f}"
    lines = [
        f"{run.model}: {run.status}, step {values['steps_done']}{asked}, {seconds:.3f} s, "
        f"{values['tokens_per_second']:,.0f} tokens/s, loss {loss}"
    ]
    for name, tier in values["tiers"].items():
        note = f", {format_bytes(values['wired_bytes'])} wired" if name == "device" else ""
        lines.append(f"{name:<9}{_bar(tier, glyphs)}{note if tier['budget_bytes'] else ''}")
    lines += [
        f"{'accesses':<9}{values['hit_rate']:.1%} hits, {values['minor_faults']} minor and "
        f"{values['major_faults']} major faults, {values['refaults']} refaults; prefetch "
        f"{values['prefetch_late']} late, {values['prefetch_unused']} unused",
        f"{'stall':<9}{values['stall_seconds']:.3f} s, {values['stall_seconds'] / max(seconds, 1e-9):.1%} of the step",
        f"{'links':<9}"
        + ", ".join(
            f"{name.removesuffix('_bytes_per_second').replace('_', ' ')} {rate / 1e9:.2f} GB/s"
            for name, rate in values["links"].items()
        ),
    ]
    chart = spark([size for _, size in run.last.resident], values["tiers"]["device"]["budget_bytes"], glyphs)
    if chart:
        lines.append(f"{'resident':<9}{chart}")
    lines.append(values["diagnosis"]["text"])
    return lines


def _bar(tier: dict[str, int], glyphs: Glyphs) -> str:
    budget = tier["budget_bytes"]
    if not budget:
        return "-"
    filled = min(round(tier["bytes"] / budget * BAR), BAR)
    return (
        f"{glyphs.bar[1] * filled}{glyphs.bar[0] * (BAR - filled)} {format_bytes(tier['bytes'])} of "
        f"{format_bytes(budget)}, peak {format_bytes(tier['peak_bytes'])}"
    )
