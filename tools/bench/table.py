"""The bench's rows as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pager.units import format_bytes

__all__ = ["format_ceilings", "format_rows"]

COLUMNS = (
    "system",
    "batch",
    "clip",
    "s/step",
    "spread",
    "tokens/s",
    "TFLOP/s",
    "allocator",
    "process",
    "host",
    "stall",
    "in/step",
    "out/step",
    "loss",
    "set-up",
    "bound",
    "of bound",
)


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a measured row under a head, then one for each system without numbers, then notes and walls."""
    measured = [row for row in rows if row["status"] == "ok"]
    lines = []
    if measured:
        cells = [COLUMNS, *(_cells(row) for row in measured)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for number, line in enumerate(cells):
            lines.append(
                "  ".join(
                    f"{cell:<{widths[0]}}" if not i else f"{cell:>{widths[i]}}" for i, cell in enumerate(line)
                )
            )
            if not number:
                lines.append("-" * len(lines[0]))
        lines.append("")
    lines += [f"{_name(row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    notes = {f"{row['system']}: {row['state']}; cap on {row['cap_on']}{_note(row)}": None for row in measured}
    return "\n".join([*lines, *notes, *_walls(measured)])


def _walls(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets each bound that occurs, with the systems it stands for."""
    systems: dict[str, list[str]] = {}
    for row in rows:
        if row.get("bound"):
            busy = ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["bound_loads_seconds"].items())
            text = f"batch {row['batch']}: bound {row['bound']:.3f} s: wall {row['bound_wall']}; seconds busy: {busy}"
            names = systems.setdefault(text, [])
            if row["system"] not in names:
                names.append(row["system"])
    return [f"{text} ({', '.join(names)})" for text, names in systems.items()]


def _note(row: Mapping[str, Any]) -> str:
    return f"; {row['note']}" if row["note"] else ""


def _name(row: Mapping[str, Any]) -> str:
    batch, clip = row.get("batch"), row.get("clip")
    text = str(row["system"]) if batch is None else f"{row['system']} at batch {batch}"
    return f"{text} with clipping at {clip:g}" if clip is not None else text


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = row["seconds_spread"]
    first, last = row["losses"]
    return (
        row["system"],
        str(row["batch"]),
        "-" if row["clip"] is None else f"{row['clip']:g}",
        f"{row['seconds_per_step']:.3f}",
        f"{low:.3f}-{high:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['model_tflops']:.1f}",
        _bytes(row["allocator_peak_bytes"]),
        _bytes(row["process_peak_bytes"]),
        _bytes(row["host_bytes"]),
        "-" if row["stall_share"] is None else f"{row['stall_share']:.0%}",
        _bytes(row["h2d_bytes_per_step"]),
        _bytes(row["d2h_bytes_per_step"]),
        f"{first:.3f} -> {last:.3f}",
        f"{row['setup_seconds']:.1f} s",
        "-" if row["bound"] is None else f"{row['bound']:.3f}",
        "-" if row["of_bound"] is None else f"{row['of_bound']:.2f}",
    )


def _bytes(number: float | None) -> str:
    return "-" if number is None else format_bytes(number)


def format_ceilings(ceilings: Sequence[Mapping[str, float]]) -> str:
    """What the machine can do, on two lines and one for each batch."""
    c = ceilings[0]
    link = " / ".join(f"{c[f'link_{name}_bytes_per_second'] / 1e9:.1f}" for name in ("in", "out", "both"))
    lines = [
        f"link {link} GB/s in / out / each way at once; host DRAM {c['host_dram_bytes_per_second'] / 1e9:.0f} GB/s"
        + (f"; disk {c['disk_bytes_per_second'] / 1e9:.2f} GB/s" if "disk_bytes_per_second" in c else ""),
        f"AdamW {c['cpu_update_parameters_per_second'] / 1e9:.2f} G parameters/s on the CPU (streaming "
        f"{c['cpu_update_streaming_parameters_per_second'] / 1e9:.2f}), "
        f"{c['device_update_parameters_per_second'] / 1e9:.1f} on the device",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"batch {c['batch']}: forward {c['forward_seconds']:.3f} s, backward {c['backward_seconds']:.3f} s, "
                f"activations {format_bytes(c['activation_bytes'])}, context {format_bytes(c['workspace_bytes'])}"
                for c in ceilings
            ),
        ]
    )
