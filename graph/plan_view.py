"""How a plan is shown: as text, JSON, CSV and a picture. No decision is made here.

Files of nine million rows are written without a loop over pages: all pages of an atom share every column but
their number, so the rest of the line is made once per atom and ``str.join`` puts it between the numbers of a
chunk.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import TIER_NAMES, FloatArray, IntArray
from pager.graph.reuse_distance import NEVER

if TYPE_CHECKING:
    from pager.graph.plan import Plan

MAX_ROWS = 60  # a table longer than this folds what differs in numbers only
CHUNK_PAGES = 65536  # lines in memory at a time: some MiB of text

_DISTANCE_COLUMNS = tuple(
    f"{prefix}_{unit}" for prefix in ("next_use", "reuse_distance") for unit in ("ticks", "bytes", "seconds")
)


def _format_bytes(num_bytes: float) -> str:
    """``num_bytes`` in binary units, as ``pager.units`` prints them: this room may not import the runtime."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Seconds with a fitting unit: ``"1.20 s"``, ``"3.40 ms"``, ``"12.0 us"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def render(plan: Plan) -> str:
    """The plan as text: a header, the prediction, and a table per segment (folded if long) with totals."""
    return "\n".join([*_header(plan), "", *_table(plan)])


def _header(plan: Plan) -> list[str]:
    total = plan.num_pages * plan.page_size
    lines = [
        f"plan: {len(plan.segments)} segments, {plan.num_pages} pages of {_format_bytes(plan.page_size)}"
        f" ({_format_bytes(total)}); {plan.way}"
    ]
    if plan.trace is None:
        lines.append(
            "no trace yet: next use and reuse distance are unknown until a step has been captured or recorded"
        )
    else:
        trace = plan.trace
        lines.append(
            f"trace: {len(trace)} accesses in {trace.num_ticks} ticks, "
            f"{format_seconds(trace.step_seconds)} a step"
        )
    for tier, used in plan.predicted.tier_bytes.items():
        limit = plan.budgets.get(tier)
        of_limit = "" if limit is None else f" of a budget of {_format_bytes(limit)}"
        if used or limit is not None:
            lines.append(f"{tier}: home of {_format_bytes(used)}{of_limit}")
    lines.append(_prediction(plan))
    if plan.note:
        lines.append(f"note: {plan.note}")
    return lines


def _prediction(plan: Plan) -> str:
    predicted = plan.predicted
    if predicted.page_in_bytes is None or predicted.hit_rate is None or predicted.peak_resident_bytes is None:
        return f"transfers not predicted: {predicted.reason}"
    text = (
        f"predicted per step with {predicted.policy}: page in {_format_bytes(predicted.page_in_bytes)}, "
        f"page out {_format_bytes(predicted.page_out_bytes or 0)}, hit rate {predicted.hit_rate:.1%}, "
        f"peak resident {_format_bytes(predicted.peak_resident_bytes)}"
    )
    if predicted.tier_bytes["disk"]:
        text += (
            f", disk read {_format_bytes(predicted.disk_read_bytes or 0)}, "
            f"disk write {_format_bytes(predicted.disk_write_bytes or 0)}"
        )
        seconds = 0.0 if plan.trace is None else plan.trace.step_seconds
        if predicted.disk_write_bytes and seconds > 0:
            # For the disk's endurance; in the units that disks are sold in.
            text += f" ({predicted.disk_write_bytes * 86400 / seconds / 1e12:.3g} TB a day)"
    return text


def _table(plan: Plan) -> list[str]:
    """One line per segment, or per group of segments whose names differ in numbers only."""
    figures = segment_figures(plan)
    fold = len(plan.segments) > MAX_ROWS
    groups: dict[tuple[str, str, int], list[int]] = {}
    for index, spec in enumerate(plan.segments):
        name = re.sub(r"\d+", "*", spec.name) if fold else f"{spec.name}\0{index}"
        groups.setdefault((name, spec.kind, int(plan.homes[index])), []).append(index)
    head = ("segment", "kind", "home", "bytes", "pages", "wired", "next use", "", "", "reuse distance")
    units = ("", "", "", "", "", "", "ticks", "bytes", "time", "bytes")
    rows: list[tuple[str, ...]] = [head, units]
    for (name, kind, home), members in list(groups.items())[:MAX_ROWS]:
        label = f"{name} ({len(members)})" if fold and len(members) > 1 else plan.segments[members[0]].name
        where = np.array(members)
        rows.append(
            (
                label,
                kind,
                TIER_NAMES[home],
                _format_bytes(sum(plan.segments[index].num_bytes for index in members)),
                str(sum(plan.segments[index].num_pages for index in members)),
                "yes" if home == 0 else "no",
                *_soonest(figures, where),
            )
        )
    if len(groups) > MAX_ROWS:
        rows.append((f"... {len(groups) - MAX_ROWS} more", *[""] * 9))
    num_bytes = sum(spec.num_bytes for spec in plan.segments)
    num_wired = int(np.count_nonzero(plan.wired))
    everything = _soonest(figures, np.arange(len(plan.segments)))
    rows.append(("total", "", "", _format_bytes(num_bytes), str(plan.num_pages), f"{num_wired}", *everything))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    left = {0, 1, 2, 5}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _soonest(figures: dict[str, Any], members: Any) -> tuple[str, str, str, str]:
    """Next use (ticks, bytes, time) of the member used soonest, and the largest reuse distance."""
    used = members[figures["next_use_ticks"][members] >= 0]
    if len(used) == 0:
        return ("-", "-", "-", "-")
    first = used[np.argmin(figures["next_use_bytes"][used])]
    return (
        str(int(figures["next_use_ticks"][first])),
        _format_bytes(int(figures["next_use_bytes"][first])),
        format_seconds(float(figures["next_use_seconds"][first])),
        _format_bytes(int(figures["reuse_distance_bytes"][used].max())),
    )


def segment_figures(plan: Plan) -> dict[str, npt.NDArray[Any]]:
    """Per segment: its soonest next use (ticks, bytes, seconds) and its largest reuse distance (bytes).

    NEVER and NaN for a segment that the step does not touch, or while there is no trace.
    """
    num = len(plan.segments)
    figures: dict[str, npt.NDArray[Any]] = {
        "next_use_ticks": np.full(num, NEVER, dtype=np.int64),
        "next_use_bytes": np.full(num, NEVER, dtype=np.int64),
        "next_use_seconds": np.full(num, np.nan, dtype=np.float64),
        "reuse_distance_bytes": np.full(num, NEVER, dtype=np.int64),
    }
    used = np.flatnonzero(plan.next_use.ticks != NEVER)
    # Sorted by (segment, next use): the first atom of each segment is the one used soonest.
    order = used[np.lexsort((plan.next_use.bytes[used], plan.atoms.segment[used]))]
    segment, begins = np.unique(plan.atoms.segment[order], return_index=True)
    soonest = order[begins]
    for unit in ("ticks", "bytes", "seconds"):
        figures[f"next_use_{unit}"][segment] = getattr(plan.next_use, unit)[soonest]
    np.maximum.at(figures["reuse_distance_bytes"], plan.atoms.segment[used], plan.reuse.bytes[used])
    return figures


def page_weighted_distances(plan: Plan) -> tuple[IntArray, IntArray, FloatArray]:
    """Per atom access: reuse distance in bytes, accessed bytes, and the second at which it happens."""
    if plan.trace is None or plan.accesses is None or plan.access_distances is None:
        raise ValueError(f"this plan has no trace yet: {plan.way}")
    num_bytes = plan.atoms.num_pages[plan.accesses.atom] * plan.page_size
    when = plan.trace.tick_start_seconds[plan.trace.tick[plan.accesses.row]]
    return plan.access_distances.bytes, num_bytes, when


def _atom_chunks(plan: Plan) -> Iterator[tuple[int, list[str]]]:
    """(atom, page numbers as text) of all pages, at most CHUNK_PAGES at a time."""
    for atom in range(len(plan.atoms)):
        first = int(plan.atoms.first_page[atom])
        stop = first + int(plan.atoms.num_pages[atom])
        for begin in range(first, stop, CHUNK_PAGES):
            yield atom, np.arange(begin, min(begin + CHUNK_PAGES, stop)).astype(np.str_).tolist()


def _distance_values(plan: Plan, atom: int) -> list[int | float | None]:
    """The six distances of an atom; None where unknown."""
    values: list[int | float | None] = []
    for distances in (plan.next_use, plan.reuse):
        if int(distances.ticks[atom]) < 0:
            values += [None, None, None]
        else:
            values += [int(distances.ticks[atom]), int(distances.bytes[atom]), float(distances.seconds[atom])]
    return values


def write_csv(plan: Plan, path: str | os.PathLike[str]) -> None:
    """One line per page: page, segment, name, kind, tier and the distances; empty where unknown."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(",".join(("page", "segment", "name", "kind", "tier", *_DISTANCE_COLUMNS)) + "\n")
        for atom, numbers in _atom_chunks(plan):
            segment = int(plan.atoms.segment[atom])
            spec = plan.segments[segment]
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerow(
                (
                    segment,
                    spec.name,
                    spec.kind,
                    TIER_NAMES[plan.homes[segment]],
                    *_distance_values(plan, atom),
                )
            )
            rest = "," + buffer.getvalue()
            file.write(rest.join(numbers))
            file.write(rest)


def write_json(plan: Plan, path: str | os.PathLike[str], *, pages: bool = True) -> None:
    """The plan as one JSON object; ``pages`` is a list of lists in the order of ``page_columns``."""
    with open(path, "w", encoding="utf-8") as file:
        head = json.dumps(_json_head(plan), indent=1)
        if not pages:
            file.write(head + "\n")
            return
        columns = json.dumps(["page", "segment", "kind", "tier", *_DISTANCE_COLUMNS])
        file.write(head[:-2] + f',\n "page_columns": {columns},\n "pages": [\n')
        comma = ""
        for atom, numbers in _atom_chunks(plan):
            segment = int(plan.atoms.segment[atom])
            fields = [
                plan.segments[segment].kind,
                TIER_NAMES[plan.homes[segment]],
                *_distance_values(plan, atom),
            ]
            rest = f",{segment},{json.dumps(fields, separators=(',', ':'))[1:]}"
            file.write(f"{comma}[")
            file.write(f"{rest},\n[".join(numbers))
            file.write(rest)
            comma = ",\n"
        file.write("\n]}\n")


def _json_head(plan: Plan) -> dict[str, Any]:
    """All but the pages, as plain Python values."""
    figures = segment_figures(plan)
    predicted = {
        name: getattr(plan.predicted, name) for name in plan.predicted.__slots__ if name != "resident_bytes"
    }
    resident = plan.predicted.resident_bytes
    predicted["resident_bytes"] = None if resident is None else resident.tolist()
    return {
        "page_size": plan.page_size,
        "num_pages": plan.num_pages,
        "way": plan.way,
        "note": plan.note,
        "budgets": plan.budgets,
        "predicted": predicted,
        "num_ticks": None if plan.trace is None else plan.trace.num_ticks,
        "step_seconds": None if plan.trace is None else plan.trace.step_seconds,
        "segments": [
            {
                "index": spec.index,
                "name": spec.name,
                "kind": spec.kind,
                "home": TIER_NAMES[plan.homes[spec.index]],
                "num_bytes": spec.num_bytes,
                "first_page": spec.first_page,
                "num_pages": spec.num_pages,
                **{
                    name: None if figures["next_use_ticks"][spec.index] < 0 else values[spec.index].item()
                    for name, values in figures.items()
                },
            }
            for spec in plan.segments
        ],
    }


def draw(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Pages over time, predicted resident bytes, and reuse distances by bytes, to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install torch-pager[plot]") from error
    if plan.trace is None:
        raise ValueError(f"there is nothing to plot: {plan.way}")
    distance, num_bytes, _ = page_weighted_distances(plan)
    # A figure of our own with its own canvas: pyplot and the user's backend stay as they are.
    figure = Figure(figsize=(10, 11), layout="constrained")
    FigureCanvasAgg(figure)
    pages_axes, resident_axes, distance_axes = figure.subplots(3, 1, height_ratios=(3, 2, 2))
    touched, num_pages = _touched_map(plan)
    extent = (0, plan.trace.num_ticks, 0, num_pages)
    pages_axes.imshow(
        touched, origin="lower", aspect="auto", extent=extent, cmap="Greys", interpolation="nearest"
    )
    pages_axes.set(title="accesses", xlabel="tick", ylabel="page")
    resident = plan.predicted.resident_bytes
    budget = plan.budgets.get("device")
    scale, unit = _scale(max(budget or 0, 0 if resident is None else int(resident.max(initial=0))))
    if resident is not None:
        ticks = np.arange(plan.trace.num_ticks)
        resident_axes.step(ticks, resident / scale, where="post", label="resident (predicted)")
    if budget is not None:
        resident_axes.axhline(budget / scale, linestyle="--", color="tab:red", label="device budget")
    if resident is not None or budget is not None:
        resident_axes.legend(loc="lower right")
    resident_axes.set(title="predicted resident memory", xlabel="tick", ylabel=unit)
    resident_axes.set_ylim(bottom=0)
    scale, unit = _scale(int(distance.max(initial=0)))
    mass_scale, mass_unit = _scale(int(num_bytes.sum()))
    distance_axes.hist(distance / scale, bins=64, weights=num_bytes / mass_scale)
    distance_axes.set(
        title="reuse distance of the accessed bytes",
        xlabel=f"distinct {unit} touched in between",
        ylabel=f"{mass_unit} accessed",
    )
    figure.savefig(path, dpi=120)


def _scale(num_bytes: int) -> tuple[float, str]:
    """The largest binary unit not above ``num_bytes``, and its name."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            return float(1024**power), unit
    return 1.0, "B"


def _touched_map(plan: Plan, num_lines: int = 512, num_columns: int = 1024) -> tuple[Any, int]:
    """(lines x columns) float64: accesses to any page of a line in a column of ticks; and the pages shown."""
    trace, accesses, atoms = plan.trace, plan.accesses, plan.atoms
    assert trace is not None
    assert accesses is not None
    num_pages = max(int((atoms.first_page + atoms.num_pages).max(initial=1)), 1)
    num_lines, num_columns = min(num_lines, num_pages), min(num_columns, max(trace.num_ticks, 1))
    low = atoms.first_page * num_lines // num_pages
    high = (atoms.first_page + atoms.num_pages - 1) * num_lines // num_pages + 1
    column = trace.tick[accesses.row].astype(np.int64) * num_columns // max(trace.num_ticks, 1)
    edges = np.zeros((num_lines + 1, num_columns))
    np.add.at(edges, (low[accesses.atom], column), 1.0)
    np.add.at(edges, (high[accesses.atom], column), -1.0)
    return np.log1p(np.cumsum(edges, axis=0)[:-1]), num_pages
