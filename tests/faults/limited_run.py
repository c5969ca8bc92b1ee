"""Trains under whatever memory limit is around this process; a JSON line says how it went.

    python -m tests.faults.limited_run FOLDER [--join CGROUP] [--limit-file ROOT] [--plain]

The process goes into the cgroup before it imports torch. ``--limit-file``: a folder that plays ``/sys/fs/cgroup``.
``--plain``: torch alone, for the values.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

WIDTH, NUM_LAYERS, NUM_STEPS = 1024, 96, 3
# Weight, gradient, and AdamW's two states.
STATE_BYTES = 16 * WIDTH * WIDTH * NUM_LAYERS
DEVICE_BYTES = 160 * 2**20


def init(module: nn.Module) -> None:
    """Weights that keep their input's size, the same each time."""
    import torch

    for param in module.parameters(recurse=False):
        torch.manual_seed(0)
        param.data.normal_(std=WIDTH**-0.5)


def make_model(device: str) -> nn.Module:
    """Layers in a row, (batch, WIDTH) in and out."""
    import torch
    from torch import nn

    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(NUM_LAYERS)]
    model = nn.Sequential(*(layer for linear in layers for layer in (linear, nn.Tanh())))
    if device != "meta":
        with torch.no_grad():
            for layer in layers:
                init(layer)
    return model


def train(model: nn.Module, optimizer: Any) -> list[float]:
    """The losses of some steps."""
    import torch

    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, WIDTH).repeat(2, 1) * (step + 1)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def managed(folder: str, limit_file: str | None) -> dict[str, Any]:
    """Train within the limit, with the rest on disk."""
    import torch

    import pager
    from pager import bill, host_cap, host_limit

    if limit_file is not None:
        root = Path(limit_file)

        def limit_bytes() -> int:
            return host_limit.host_limit_bytes(root, root / "membership")

        for module in (bill, host_cap):
            module.host_limit_bytes = limit_bytes  # type: ignore[attr-defined]
    model: Any = make_model("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    pager.manage(model, optimizer, device="cpu", device_budget=DEVICE_BYTES, disk=folder, init=init)
    losses = train(model, optimizer)
    found = model.pager.statistics()
    sums = [float(param.detach().double().sum()) for param in model.parameters()]
    return {
        "losses": losses,
        "sums": sums,
        "host_budget_bytes": found.host_budget_bytes,
        "disk_bytes": found.disk_bytes,
        "disk_read_bytes": found.disk_read_bytes,
    }


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--join")
    parser.add_argument("--limit-file")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if options.join:
        Path(options.join, "cgroup.procs").write_text(str(os.getpid()))
    import torch

    torch.set_num_threads(1)
    if options.plain:
        model = make_model("cpu")
        losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
        row: dict[str, Any] = {"losses": losses}
        row["sums"] = [float(param.detach().double().sum()) for param in model.parameters()]
    else:
        row = managed(options.folder, options.limit_file)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    row |= {
        "peak_bytes": int(status["VmHWM"].split()[0]) * 1024,
        "swapped_bytes": int(status["VmSwap"].split()[0]) * 1024,
    }
    json.dump(row, sys.stdout)


if __name__ == "__main__":
    main()
