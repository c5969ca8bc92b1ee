"""The update on the CPU beside torch's fused one and beside memory. ``python tests/bench_cpu_update.py``

Prints one JSON line per number of threads: G parameters/s (median of the rounds) of the pool's update with a split
master, and with everything fp32; of torch's fused AdamW, fp32; GB/s of a plain in-place scaling; and their ratios.
The systems take turns in each round, so that a change of the machine's load meets all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pager.core_limit import core_limit
from pager.optim.adamw_cpu import AdamValues, CpuAdam
from pager.optim.cpu_pool import UpdatePool, cut_into_slices

SPLIT_BYTES, FP32_BYTES, SCALE_BYTES = 26, 28, 8


def make_update(num_elements: int, *, split: bool) -> CpuAdam:
    dtype = torch.bfloat16 if split else torch.float32
    low = torch.zeros(num_elements, dtype=torch.int16) if split else None
    moments = torch.zeros(num_elements), torch.zeros(num_elements)
    return CpuAdam(torch.randn(num_elements).to(dtype), low, *moments, torch.randn(num_elements).to(dtype))


def run_pooled(pool: UpdatePool, update: CpuAdam, extent: int) -> None:
    """One step in jobs of ``extent`` elements."""
    values = AdamValues(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=3)
    scalars = values.scalars()
    for first in range(0, update.num_elements, extent):
        pieces = cut_into_slices(min(extent, update.num_elements - first), pool.num_threads)
        handle = pool.submit(
            [partial(update.run, first + begin, first + end, scalars) for begin, end in pieces]
        )
    handle.result()


def run(num_threads: int, num_elements: int, extent: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(num_threads)
    pool = UpdatePool(num_threads)
    updates = {name: make_update(num_elements, split=name == "split") for name in ("split", "fp32")}
    param = torch.randn(num_elements, requires_grad=True)
    param.grad = torch.randn(num_elements)
    optimizer = torch.optim.AdamW([param], fused=True)
    buffer = torch.randn(num_elements)
    systems: dict[str, Callable[[], object]] = {
        "split": partial(run_pooled, pool, updates["split"], extent),
        "torch": optimizer.step,
        "fp32": partial(run_pooled, pool, updates["fp32"], extent),
        "scale": partial(buffer.mul_, 1.0001),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for round_number in range(rounds + 1):
        for name, system in systems.items():
            begin = time.perf_counter()
            system()
            if round_number:  # the first touches the memory
                seconds[name].append(time.perf_counter() - begin)
    pool.close()
    rate = {name: num_elements / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return {
        "threads": num_threads,
        "split_g_per_s": rate["split"],
        "fp32_g_per_s": rate["fp32"],
        "torch_fused_fp32_g_per_s": rate["torch"],
        "scale_gb_per_s": SCALE_BYTES * rate["scale"],
        "split_of_torch": rate["split"] / rate["torch"],
        "fp32_of_torch": rate["fp32"] / rate["torch"],
        "split_bytes_of_scale": SPLIT_BYTES * rate["split"] / (SCALE_BYTES * rate["scale"]),
        "torch_bytes_of_scale": FP32_BYTES * rate["torch"] / (SCALE_BYTES * rate["scale"]),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="*", help="default: 1, and the cores allowed")
    parser.add_argument("--elements", type=int, default=1 << 26, help="parameters (default: %(default)s)")
    parser.add_argument(
        "--extent", type=int, default=1 << 23, help="parameters of a job (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    options = parser.parse_args()
    for num_threads in options.threads or sorted({1, core_limit()}):
        figures = run(num_threads, options.elements, options.extent, options.rounds)
        line = {name: round(value, 3) for name, value in figures.items()}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
