"""Metadata of a 70 B model: page table columns, trace, distances, plan. ``python tests/bench_metadata.py``

Prints one JSON line: the seconds of each part, their sum, and the peak resident set of the process. A
benchmark, not a timed test: what it must reach (20 s and 2 GiB on two cores) is recorded in
docs/benchmarks.md.

The shape is Llama 3 70 B: 80 layers, hidden 8192, feed-forward 28672, 64 heads with 8 key-value heads,
vocabulary 128256, 70.6 G parameters. Training state per parameter: bf16 weight and gradient, fp32 master and
both moments of Adam, 16 bytes, which is 8.6 M pages of 128 KiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec
from pager.graph.cost_model import estimate_tick_seconds
from pager.graph.plan import Plan, make_plan
from pager.graph.reuse_distance import miss_ratio_curve
from pager.policies.placement import place
from pager.policies.protocol import make_eviction_policy

PAGE_SIZE = 128 * 1024
EXTENT_PAGES = 64 * 2**20 // PAGE_SIZE
LAYERS, HIDDEN, FEED_FORWARD, KEY_VALUE, VOCABULARY = 80, 8192, 28672, 1024, 128256
BYTES_PER_ELEMENT = {"weight": 2, "gradient": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
KINDS = {
    "weight": "parameter",
    "gradient": "gradient",
    "master": "master",
    "exp_avg": "state",
    "exp_avg_sq": "state",
}


def parameter_shapes(num_layers: int) -> Iterator[tuple[str, int]]:
    """(name, elements) of every weight of a page or more, in the order of the forward."""
    yield "embed_tokens", VOCABULARY * HIDDEN
    for layer in range(num_layers):
        yield f"layers.{layer}.self_attn.q_proj", HIDDEN * HIDDEN
        yield f"layers.{layer}.self_attn.k_proj", HIDDEN * KEY_VALUE
        yield f"layers.{layer}.self_attn.v_proj", HIDDEN * KEY_VALUE
        yield f"layers.{layer}.self_attn.o_proj", HIDDEN * HIDDEN
        yield f"layers.{layer}.mlp.gate_proj", HIDDEN * FEED_FORWARD
        yield f"layers.{layer}.mlp.up_proj", HIDDEN * FEED_FORWARD
        yield f"layers.{layer}.mlp.down_proj", HIDDEN * FEED_FORWARD
    yield "lm_head", VOCABULARY * HIDDEN


def make_segments(num_layers: int) -> list[SegmentSpec]:
    """Weight, gradient, master and both moments of every parameter, in that order, pages without gaps."""
    segments: list[SegmentSpec] = []
    first_page = 0
    for name, elements in parameter_shapes(num_layers):
        for part, width in BYTES_PER_ELEMENT.items():
            num_bytes = elements * width
            num_pages = -(-num_bytes // PAGE_SIZE)
            segments.append(
                SegmentSpec(
                    index=len(segments),
                    name=f"{name}.{part}",
                    kind=KINDS[part],
                    num_bytes=num_bytes,
                    first_page=first_page,
                    num_pages=num_pages,
                )
            )
            first_page += num_pages
    return segments


def make_trace(segments: list[SegmentSpec], num_layers: int) -> AccessTrace:
    """Forward, per layer recompute and backward with its gradients, update by extents of 64 MiB of fp32."""
    parts = len(BYTES_PER_ELEMENT)
    num_parameters = len(segments) // parts
    rows: list[AccessRow] = []
    tick = -1

    def access(segment: int, phase: Phase, *, write: bool = False) -> None:
        rows.append(AccessRow(tick, segment, 0, segments[segment].num_pages, write, phase))

    for parameter in range(num_parameters):
        tick += 1
        access(parameter * parts, Phase.FORWARD)
    blocks = [[num_parameters - 1]]
    blocks += [list(range(1 + 7 * layer, 8 + 7 * layer)) for layer in reversed(range(num_layers))]
    blocks += [[0]]
    for block in blocks:
        if len(block) > 1:
            for parameter in block:
                tick += 1
                access(parameter * parts, Phase.RECOMPUTE)
        for parameter in reversed(block):
            tick += 1
            access(parameter * parts, Phase.BACKWARD)
            access(parameter * parts + 1, Phase.GRADIENT, write=True)
    for parameter in range(num_parameters):
        group = segments[parameter * parts : (parameter + 1) * parts]
        pages = group[2].num_pages
        for begin in range(0, pages, EXTENT_PAGES):
            tick += 1
            end = min(begin + EXTENT_PAGES, pages)
            for spec in group:
                low = begin * spec.num_pages // pages
                high = end * spec.num_pages // pages
                rows.append(
                    AccessRow(tick, spec.index, low, high - low, spec.kind != "gradient", Phase.UPDATE)
                )
    return AccessTrace.from_rows(rows)


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make_page_table(segments: list[SegmentSpec]) -> dict[str, np.ndarray]:
    """The columns a page table needs beside the plan: state, frame, pins, tier, version."""
    num_pages = sum(spec.num_pages for spec in segments)
    columns = {"state": np.uint8, "tier": np.uint8, "pins": np.int32, "frame": np.int64, "version": np.int32}
    table = {name: np.zeros(num_pages, dtype=dtype) for name, dtype in columns.items()}
    table["segment"] = np.repeat(
        np.arange(len(segments), dtype=np.int32), [spec.num_pages for spec in segments]
    )
    return table


def run(num_layers: int, write: bool) -> dict[str, float | int | str | None]:
    """Time every part once; bytes and counts beside the seconds."""
    seconds: dict[str, float] = {}
    began = last = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[f"{part}_seconds"] = round(now - last, 3)
        last = now

    segments = make_segments(num_layers)
    table = make_page_table(segments)
    lap("segments_and_page_table")
    trace = make_trace(segments, num_layers)
    trace = trace.with_seconds(estimate_tick_seconds(trace, PAGE_SIZE))
    lap("trace")
    plan = build_plan(segments, trace)
    lap("placement_distances_and_plan")
    pages = plan.pages()
    lap("pages")
    assert plan.access_distances is not None
    assert plan.accesses is not None
    accessed = plan.atoms.num_pages[plan.accesses.atom] * PAGE_SIZE
    curve = miss_ratio_curve(plan.access_distances.bytes, accessed, np.linspace(0, 2**41, 64))
    text = str(plan)
    lap("miss_ratio_curve_and_table")
    total_seconds = time.perf_counter() - began
    if write:
        with tempfile.TemporaryDirectory() as folder:
            plan.to_csv(Path(folder) / "plan.csv")
            lap("to_csv")
            plan.to_json(Path(folder) / "plan.json")
            lap("to_json")
    return {
        "num_pages": len(pages),
        "num_segments": len(segments),
        "num_accesses": len(trace),
        "num_atoms": len(plan.atoms),
        "num_atom_accesses": len(plan.accesses),
        "table_lines": text.count("\n") + 1,
        "page_table_bytes": sum(column.nbytes for column in table.values()),
        "pages_bytes": pages.nbytes,
        "page_in_bytes": plan.predicted.page_in_bytes,
        "miss_ratio_without_cache": float(curve[0]),
        **seconds,
        "total_seconds": round(total_seconds, 3),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def build_plan(segments: list[SegmentSpec], trace: AccessTrace) -> Plan:
    """Homes on an 80 GiB device, a 1 TiB host and a disk; Belady simulated in the 24 GiB that are left."""
    sizes = np.array([spec.num_pages * PAGE_SIZE for spec in segments])
    traffic = np.bincount(trace.segment, trace.num_pages.astype(np.int64) * PAGE_SIZE, len(segments))
    position = np.full(len(segments), len(trace))
    np.minimum.at(position, trace.segment, np.arange(len(trace)))
    rank = np.array([("parameter", "gradient", "master", "state").index(spec.kind) for spec in segments])
    homes = place(
        num_bytes=sizes,
        traffic_bytes_if_streamed=traffic.astype(np.int64),
        position=position,
        kind_rank=rank,
        device_capacity=56 * 2**30,
        host_capacity=2**40,
        disk_capacity=2**40,
    )
    return make_plan(
        segments,
        trace,
        page_size=PAGE_SIZE,
        homes=homes,
        budgets={"device": 80 * 2**30, "host": 2**40, "disk": 2**40},
        policy=make_eviction_policy("belady"),
    )


def main() -> None:
    """Run once and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layers", type=int, default=LAYERS, help="transformer blocks (default: %(default)s)"
    )
    parser.add_argument("--write", action="store_true", help="also time writing the plan as CSV and JSON")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(run(options.layers, options.write)) + "\n")


if __name__ == "__main__":
    main()
