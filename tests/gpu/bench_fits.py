"""A model that fits: managed against plain, seconds per step, in turns in one process (pager first and last).

    python tests/gpu/bench_fits.py

Prints one JSON line; ``ratio`` is the median managed step over the median plain one.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from torch import nn

import pager
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS

NUM_STEPS = 40
NUM_ROUNDS = 3


def handle_of(model: nn.Module) -> Any:
    """The model's handle; torch types every attribute of a module as a tensor or a module."""
    return model.pager


def make_step(managed: bool) -> Any:
    """A model on the GPU with its optimizer, and a function that trains it by one step."""
    model = make_model(PRESETS["small"], seed=0, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if managed:
        pager.manage(model, optimizer, device="cuda")
    tokens = torch.randint(0, 256, (2, 8, 256), device="cuda")

    def step() -> None:
        model(tokens[0], tokens[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def time_steps(step: Any) -> list[float]:
    """Seconds of each of ``NUM_STEPS`` steps."""
    seconds = []
    for _ in range(NUM_STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    managed_model, managed = make_step(True)
    _, plain = make_step(False)
    for step in (managed, plain):
        for _ in range(10):
            step()
    seconds: dict[str, list[float]] = {"managed": [], "plain": []}
    for _ in range(NUM_ROUNDS):
        seconds["managed"] += time_steps(managed)
        seconds["plain"] += time_steps(plain)
    seconds["managed"] += time_steps(managed)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    counters = handle_of(managed_model).statistics()
    line = {
        **{f"{name}_seconds": value for name, value in medians.items()},
        "ratio": medians["managed"] / medians["plain"],
        "page_in_bytes": counters.page_in_bytes,
        "page_out_bytes": counters.page_out_bytes,
        "num_steps": counters.num_steps,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
