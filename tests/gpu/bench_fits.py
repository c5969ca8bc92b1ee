"""A model that fits: managed against plain, seconds per step, step by step in turns in one process.

    python tests/gpu/bench_fits.py

Prints one JSON line; ``ratio`` is the median managed step over the median plain one, ``control_ratio`` that of a
second plain model, which shows what the order of the turns does.
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

NUM_TURNS = 150
NUM_WARM_UP = 20


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


def time_step(step: Any) -> float:
    """Seconds of one step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    plain, managed, again = make_step(False), make_step(True), make_step(False)
    steps = {"plain": plain[1], "managed": managed[1], "plain_again": again[1]}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(NUM_TURNS):
        for name, step in steps.items():
            taken = time_step(step)
            if turn >= NUM_WARM_UP:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    counters = handle_of(managed[0]).statistics()
    line = {
        **{f"{name}_seconds": value for name, value in medians.items()},
        "ratio": medians["managed"] / medians["plain"],
        "control_ratio": medians["plain_again"] / medians["plain"],
        "page_in_bytes": counters.page_in_bytes,
        "page_out_bytes": counters.page_out_bytes,
        "num_steps": counters.num_steps,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
