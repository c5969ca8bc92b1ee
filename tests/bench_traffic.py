"""Bytes a step moves on the simulated device, and what the plan predicts. ``python tests/bench_traffic.py``

Prints one JSON line per model: `tiny` and `small` of ``pager train`` with a device budget of a quarter of their
training state. Traffic, not time: the same bytes would move on a GPU. pagerd runs inline, so that a run can be
repeated to the byte. The numbers stand in docs/decisions.md, 3 and 8.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pager
from pager.config import Checks
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS
from pager.tools.text import TextBatches, read_text

BATCH = 2
SEQ = 64
WARM_UP_STEPS = 3  # the first step also writes the optimizer's states for the first time


def run(name: str, *, page_size: str, share: float, num_steps: int) -> dict[str, Any]:
    """Train ``name`` with ``share`` of its state as the device budget; bytes per step after the warm-up."""
    sizes = PRESETS[name]
    model: Any = make_model(sizes, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [
        (torch.from_numpy(inputs), torch.from_numpy(targets))
        for inputs, targets in islice(
            TextBatches(read_text(), batch=BATCH, seq=SEQ, seed=0), WARM_UP_STEPS + num_steps
        )
    ]
    pager.manage(
        model,
        optimizer,
        device="cpu",
        device_budget=int(sizes.state_bytes * share),
        page_size=page_size,
        example_inputs=batches[0],
        checks=Checks(daemon="inline"),
    )
    before = model.pager.statistics()
    for step, batch in enumerate(batches):
        if step == WARM_UP_STEPS:
            before = model.pager.statistics()
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    after = model.pager.statistics()
    predicted = model.pager.plan.predicted
    model.pager.close()
    return {
        "model": name,
        "page_size": page_size,
        "state_bytes": sizes.state_bytes,
        "device_budget_bytes": after.device_budget_bytes,
        "page_in_bytes": (after.page_in_bytes - before.page_in_bytes) // num_steps,
        "page_out_bytes": (after.page_out_bytes - before.page_out_bytes) // num_steps,
        "predicted_page_in_bytes": predicted.page_in_bytes,
        "predicted_page_out_bytes": predicted.page_out_bytes,
    }


def main() -> None:
    """Run each model once and print its line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="tiny,small", help="comma-separated presets (default: tiny,small)"
    )
    parser.add_argument("--page-size", default="16KiB")
    parser.add_argument("--share", type=float, default=0.25, help="device budget / state (default: 0.25)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default: 3)")
    options = parser.parse_args()
    for name in options.models.split(","):
        result = run(name, page_size=options.page_size, share=options.share, num_steps=options.steps)
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
