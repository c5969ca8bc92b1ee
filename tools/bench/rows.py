"""Rows of the bench: what a child measured, in the units that are compared, and how far it is from the bound."""

from __future__ import annotations

import math
import statistics
from typing import Any

from pager.graph.bound import BytesPerParameter, StepBound, StepCeilings, step_bound
from pager.tools.bench.job import SYSTEMS, StepJob

__all__ = ["add_bound", "failed_row", "measured_rows"]


def _head(job: StepJob, system: str) -> dict[str, Any]:
    facts = SYSTEMS[system]
    row: dict[str, Any] = {
        "system": system,
        "cap_bytes": job.cap_bytes if facts.cap_on != "nothing" else None,
        "cap_on": facts.cap_on,
        "state": facts.state,
        "note": facts.note,
    }
    if facts.is_pager:
        row["knobs"] = job.knobs_of(system)
    return row


def failed_row(job: StepJob, system: str, status: str, reason: str) -> dict[str, Any]:
    """A system without numbers. ``status``: skipped, refused or failed."""
    return {**_head(job, system), "status": status, "reason": reason}


def measured_rows(job: StepJob, system: str, result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per batch and clip that the child came to."""
    rows = []
    for run in result.get("runs", ()):
        if "refused" in run:
            where = {key: run[key] for key in ("batch", "clip")}
            rows.append({**failed_row(job, system, "refused", run["refused"]), **where})
            continue
        row = {**_head(job, system), "status": "ok", **_numbers(job, system, run)}
        row["state"] = result.get("state") or row["state"]
        row |= {key: result.get(key) for key in ("setup_seconds", "threads", "torch")}
        if result.get("facts"):
            row["facts"] = result["facts"]
        rows.append(row)
    return rows


def _numbers(job: StepJob, system: str, run: dict[str, Any]) -> dict[str, Any]:
    kept = run["seconds"][job.num_dropped :]
    seconds = statistics.median(kept)
    tokens = run["batch"] * job.seq
    stall = run["stall_seconds_per_step"]
    return {
        "batch": run["batch"],
        "clip": run["clip"],
        "seconds_per_step": seconds,
        "seconds_spread": [min(kept), max(kept)],
        "seconds": run["seconds"],
        "tokens_per_second": tokens / seconds,
        "model_tflops": 6 * job.num_parameters * tokens / seconds / 1e12,
        "holds_cap": _holds_cap(job, system, run),
        "allocator_peak_bytes": run["allocator_peak_bytes"],
        "process_peak_bytes": run["process_peak_bytes"],
        "host_bytes": run["host_bytes"],
        "host_resident_bytes": run["host_resident_bytes"],
        "stall_share": None if stall is None else stall / statistics.mean(kept),
        "h2d_bytes_per_step": run["h2d_bytes_per_step"],
        "d2h_bytes_per_step": run["d2h_bytes_per_step"],
        "losses": [run["losses"][0], run["losses"][-1]],
    }


def _holds_cap(job: StepJob, system: str, run: dict[str, Any]) -> bool | None:
    """Whether the process, where that is what the cap bounds, or else torch's allocator stayed within the workload's
    cap, also for a system that knows none.
    """
    is_of_process = SYSTEMS[system].cap_on == "process" and run["process_peak_bytes"] is not None
    peak = run["process_peak_bytes" if is_of_process else "allocator_peak_bytes"]
    return None if peak is None or job.cap_bytes is None else peak <= job.cap_bytes


def add_bound(row: dict[str, Any], job: StepJob, ceilings: dict[str, float] | None) -> None:
    """Put ``bound`` (seconds), its terms, and ``of_bound`` into a measured row.

    The bound is that of fp32 states for the row's cap and ``update_at``, wherever the updates run; for a system that
    is not pager ``update_at`` is "step". ``bound_of_knobs`` is that of the row's own ``update_on``.
    """
    if row["status"] != "ok":
        return
    row |= {"bound": None, "of_bound": None}
    if not ceilings:
        return
    knobs = row.get("knobs") or {}
    update_at = knobs.get("update_at", "step")
    best = _bound(row, job, ceilings, update_at, "auto")
    if best is None:
        return
    row["bound"], row["of_bound"] = best.seconds, best.seconds / row["seconds_per_step"]
    row["bound_wall"] = best.wall
    row["bound_gains"] = dict(best.gains)
    row["bound_loads_seconds"] = dict(best.loads_seconds)
    row["bound_shares"] = {", ".join(names): share for names, share in best.shares.items()}
    if SYSTEMS[row["system"]].is_pager:
        own = _bound(row, job, ceilings, update_at, knobs.get("update_on", "device"))
        row["bound_of_knobs"] = None if own is None else own.seconds


def _bound(
    row: dict[str, Any], job: StepJob, measured: dict[str, float], update_at: str, update_on: str
) -> StepBound | None:
    """None where the workload's activations alone pass the cap."""
    names = StepCeilings.__dataclass_fields__
    size = BytesPerParameter()
    if job.sizes.dtype == "float32":
        size = BytesPerParameter(weight=4, gradient=4, state=8)
    try:
        return step_bound(
            num_parameters=job.num_parameters,
            ceilings=StepCeilings(**{name: measured[name] for name in names if name in measured}),
            host_bytes=measured.get("host_budget_bytes", math.inf),
            device_bytes=math.inf if row["cap_bytes"] is None else row["cap_bytes"],
            # On the simulated device the cap is for pages only.
            activation_bytes=measured["activation_bytes"] if job.device == "cuda" else 0.0,
            workspace_bytes=measured["workspace_bytes"],
            update_at=update_at,
            update_on=update_on,
            size=size,
        )
    except ValueError:
        return None
