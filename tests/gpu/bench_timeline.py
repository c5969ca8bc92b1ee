"""Steps of a managed decoder, timed, and what the link and the device did in one more of them.

    python tests/gpu/bench_timeline.py 7b --budget 24GiB --batch 1 --update-at backward --update-on auto --steps 12

bf16 with fp32 master and moments, AdamW, sequence 2048 (``--seq``), random tokens. Each step ends with the device idle.
Prints JSON lines: the steps (seconds in all; median seconds of forward, backward, ``step()`` and of waiting for the
device, as the host saw them), and the timeline: percent of each of 24 parts of a step in which kernels ran, copies came
in, went out, and both. The timeline needs a GPU; without one the simulated device shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import pager
from pager.tools.bench.system import fill_module
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS
from tests.trace_intervals import intersection, length, merged, read_trace

NUM_PARTS = 24
# Steps whose median is given: the last ones.
NUM_TIMED = 6


class Loop:
    """The managed model and its training loop."""

    def __init__(self, options: argparse.Namespace) -> None:
        sizes = replace(PRESETS[options.model], dtype="bfloat16")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.vocabulary, self.shape = sizes.vocabulary, (2, options.batch, options.seq)
        self.generator = torch.Generator().manual_seed(0)
        self.model: Any = make_model(sizes, seed=0, device="meta")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        paths = {id(module): path for path, module in self.model.named_modules()}
        example = torch.zeros(self.shape, dtype=torch.long)
        began = time.perf_counter()
        pager.manage(
            self.model,
            self.optimizer,
            device=str(self.device),
            device_budget=options.budget,
            master="float32",
            update_at=options.update_at,
            update_on=options.update_on,
            example_inputs=(example[0], example[1]),
            init=lambda module: fill_module(
                module, paths[id(module)], seed=0, dtype=sizes.dtype, device=self.device
            ),
        )
        self.manage_seconds = time.perf_counter() - began

    def wait(self) -> float:
        """Until the device is idle; the time then."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self) -> list[float]:
        """Seconds of forward, backward, step, and of the device's rest."""
        tokens = torch.randint(self.vocabulary, self.shape, generator=self.generator).to(self.device)
        times = [self.wait()]
        loss = self.model(tokens[0], tokens[1])
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        times.append(self.wait())
        return [after - before for before, after in pairwise(times)]


def steps(loop: Loop, num_steps: int) -> dict[str, Any]:
    """Run them; what the last ones took and moved."""
    handle = loop.model.pager
    phases: list[list[float]] = []
    before = handle.statistics()
    num_timed = min(NUM_TIMED, num_steps)
    for number in range(num_steps):
        if number == num_steps - num_timed:
            before = handle.statistics()
        phases.append(loop.step())
    after = handle.statistics()
    timed = phases[-num_timed:]
    num_parameters = sum(param.numel() for param in loop.model.parameters())
    return {
        "manage_seconds": round(loop.manage_seconds, 1),
        "seconds": [round(sum(phase), 3) for phase in phases],
        "median": round(statistics.median(map(sum, timed)), 3),
        "forward_backward_step_rest": [
            round(statistics.median(part), 3) for part in zip(*timed, strict=True)
        ],
        "page_in_gb": round((after.page_in_bytes - before.page_in_bytes) / 1e9 / num_timed, 1),
        "page_out_gb": round((after.page_out_bytes - before.page_out_bytes) / 1e9 / num_timed, 1),
        "peak_device_process_bytes": after.peak_device_process_bytes,
        "host_bytes_per_parameter": round(after.host_bytes / num_parameters, 2),
    }


def timeline(loop: Loop) -> dict[str, Any]:
    """Percent of each part of a step, and seconds in all, in which kernels ran and copies came and went."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            loop.step()  # what the profiler sets up at its first events is not ours
            with record_function("timeline"):
                loop.step()
        profiled.export_chrome_trace(str(path))
        trace = read_trace(path)
    ((begin, end),) = trace.marked("timeline")
    part = (end - begin) / NUM_PARTS
    busy = {
        "kernels": merged(trace.kernels),
        "in": merged(trace.h2d.intervals),
        "out": merged(trace.d2h.intervals),
    }
    busy["both"] = intersection(busy["in"], busy["out"])
    shares = {
        name: [
            round(100 * length(intersection(times, [(begin + i * part, begin + (i + 1) * part)])) / part)
            for i in range(NUM_PARTS)
        ]
        for name, times in busy.items()
    }
    seconds = {
        name: round(length(intersection(times, [(begin, end)])) / 1e6, 3) for name, times in busy.items()
    }
    return {"part_seconds": round(part / 1e6, 4), "percent": shares, "seconds": seconds}


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=sorted(PRESETS))
    parser.add_argument("--budget", required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--update-at", default="step", choices=["step", "backward"])
    parser.add_argument("--update-on", default="device", choices=["device", "auto", "cpu"])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    loop = Loop(options)
    sys.stdout.write(json.dumps(vars(options) | steps(loop, options.steps)) + "\n")
    sys.stdout.flush()
    if loop.device.type == "cuda":
        sys.stdout.write(json.dumps({"timeline": timeline(loop)}) + "\n")
    loop.model.pager.close()


if __name__ == "__main__":
    main()
