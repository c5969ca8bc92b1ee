"""What clipping costs in a managed step: none, ``model.pager.clip_grad_norm_``, torch's own; in turns in one process.

    python tests/gpu/bench_clip.py --workload 3b --cap 12GiB

Prints one JSON line; each ratio is the median clipped step over the median step without clipping.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import pager
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS

MAX_NORM = 1.0
NUM_WARM_UP = 2


def handle_of(model: nn.Module) -> Any:
    """The model's handle; torch types every attribute of a module as a tensor or a module."""
    return model.pager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="3b")
    parser.add_argument("--cap", default="12GiB")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    sizes = PRESETS[args.workload]
    model = make_model(sizes, seed=0, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=args.device == "cuda" or None)
    example = torch.zeros(2, 1, args.seq, dtype=torch.long)
    pager.manage(
        model,
        optimizer,
        device=args.device,
        device_budget=args.cap,
        master="float32",
        example_inputs=(example[0], example[1]),
    )
    handle = handle_of(model)
    ways: dict[str, Callable[[], object]] = {
        "none": lambda: None,
        "pager": lambda: handle.clip_grad_norm_(MAX_NORM),
        "torch": lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = torch.randint(0, 256, (2, 1, args.seq), device=args.device)
    for turn in range(NUM_WARM_UP + args.turns):
        for name, clip in ways.items():
            # Two steps of a kind: the first one's update runs beneath the second's forward.
            for is_timed in (False, True):
                began = time.perf_counter()
                loss = model(tokens[0], tokens[1])
                loss.backward()
                clip()
                optimizer.step()
                optimizer.zero_grad()
                loss.item()
                if is_timed and turn >= NUM_WARM_UP:
                    seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    line = {
        "workload": args.workload,
        "cap": args.cap,
        **{f"{name}_seconds": value for name, value in medians.items()},
        **{f"{name}_ratio": medians[name] / medians["none"] for name in ("pager", "torch")},
        "spread": {name: [min(values), max(values)] for name, values in seconds.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
