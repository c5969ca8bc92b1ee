"""A 3.4 B decoder in bf16, managed within a device budget against all of it on the GPU: losses, weights,
memory, seconds.

    python tests/gpu/bench_3b.py --budget 12GiB --steps 6 --out runs/bench-3b

Each run is a process of its own. The plain one leaves its first weights in a file, so that both start equal.
What the process takes on the device is sampled every few milliseconds as NVML sees it. Prints one JSON line
per run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import pager
from pager.config import Checks
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS


def handle_of(model: nn.Module) -> Any:
    """The model's handle; torch types every attribute of a module as a tensor or a module."""
    return model.pager


class Sampler(threading.Thread):
    """The most bytes this process was seen to take on the device."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._stop_it = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop_it.wait(0.004):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.usedGpuMemory:
                    self.peak_bytes = max(self.peak_bytes, process.usedGpuMemory)

    def stop(self) -> int:
        """Stop sampling; the peak."""
        self._stop_it.set()
        self.join()
        return self.peak_bytes


def checksums(model: nn.Module) -> dict[str, int]:
    """CRC-32 of each parameter's bytes."""
    return {
        name: zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        for name, tensor in model.state_dict().items()
    }


def train(model: nn.Module, optimizer: Any, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Losses and seconds of each step on random tokens."""
    losses, seconds = [], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        tokens = torch.randint(32000, (2, args.batch, args.seq), generator=generator).cuda()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(tokens[0], tokens[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def run_plain(args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(PRESETS[args.model], seed=0, device="cuda")
    torch.save(model.state_dict(), args.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, seconds = train(model, optimizer, args)
    return {"losses": losses, "seconds": seconds, "crc": checksums(model)}


def run_managed(args: argparse.Namespace) -> dict[str, Any]:
    model = make_model(PRESETS[args.model], seed=0, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    example = torch.zeros(2, args.batch, args.seq, dtype=torch.long)
    began = time.perf_counter()
    pager.manage(
        model,
        optimizer,
        device="cuda",
        device_budget=args.budget,
        prefetch_distance=args.distance,
        example_inputs=(example[0], example[1]),
        init=lambda module: None,
        checks=Checks(daemon=args.daemon),
    )
    managed = time.perf_counter()
    model.load_state_dict(torch.load(args.weights, mmap=True, weights_only=True, map_location="cpu"))
    loaded = time.perf_counter()
    losses, seconds = train(model, optimizer, args)
    statistics = handle_of(model).statistics().as_dict()
    plan = handle_of(model).plan
    result = {
        "losses": losses,
        "seconds": seconds,
        "manage_seconds": managed - began,
        "load_seconds": loaded - managed,
        "statistics": statistics,
        "arena_bytes": plan.budgets["device"],
        "way": plan.way,
        "predicted_page_in_bytes": plan.predicted.page_in_bytes,
        "predicted_page_out_bytes": plan.predicted.page_out_bytes,
    }
    result["crc"] = checksums(model)
    return result


def child(args: argparse.Namespace) -> None:
    torch.use_deterministic_algorithms(True)
    sampler = Sampler()
    sampler.start()
    result = run_plain(args) if args.child == "plain" else run_managed(args)
    result["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    result["peak_process_bytes"] = sampler.stop()
    Path(args.result).write_text(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="3b")
    parser.add_argument("--budget", default="12GiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--distance", type=int, default=8)
    parser.add_argument("--daemons", default="thread")
    parser.add_argument("--daemon", default="thread")
    parser.add_argument("--out", default="runs/bench-3b")
    parser.add_argument("--weights", default="/tmp/pager-bench-weights.pt")
    parser.add_argument("--child")
    parser.add_argument("--result")
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    budget = pager.parse_size(args.budget)
    results: dict[str, Any] = {}
    failed = False
    for name in ["plain", *args.daemons.split(",")]:
        path = out / f"{name}.json"
        command = [sys.executable, __file__, *sys.argv[1:], "--result", str(path)]
        command += ["--child", "plain"] if name == "plain" else ["--child", "managed", "--daemon", name]
        began = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        if code:
            print(json.dumps({"run": name, "failed": code}), flush=True)
            failed = True
            continue
        result = results[name] = json.loads(path.read_text())
        line = {key: value for key, value in result.items() if key != "crc"}
        line |= {"run": name, "wall_seconds": time.perf_counter() - began}
        if name != "plain" and "plain" in results:
            line["losses_equal"] = result["losses"] == results["plain"]["losses"]
            line["weights_equal"] = result["crc"] == results["plain"]["crc"]
            line["within_budget"] = max(result["peak_process_bytes"], result["peak_reserved_bytes"]) <= budget
            failed |= not (line["losses_equal"] and line["weights_equal"] and line["within_budget"])
        print(json.dumps(line), flush=True)
    Path(args.weights).unlink(missing_ok=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
