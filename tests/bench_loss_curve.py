"""The loss of 200 steps on real text, beside a loop that knows nothing of pager. ``python tests/bench_loss_curve.py``

A byte-level decoder in bf16 with fp32 masters and fp32 moments, the same weights, batches and AdamW for all:

    plain                   ordinary PyTorch: bf16 weights, a list of independent fp32 masters, results rounded back
    plain, ties moved       the same, but a master half way between two weights moves by one ulp towards its weight
    pager step              update_at="step"
    pager backward          update_at="backward"
    pager backward cpu      update_at="backward", update_on="cpu"

Prints one JSON line per system: the loss of every 20th step, the mean of the last 20, and how curve, last weights and
last masters compare with those of the plain loops. pager's device budget is a part of the training state (on a GPU
the arena is that small: the context alone would not fit). The numbers stand in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import pager
from pager.config import Checks
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes, num_parameters
from pager.tools.text import TextBatches, read_text

# bf16 weight, 16 low bits and two fp32 moments of each parameter; gradients are not counted.
STATE_BYTES_PER_PARAMETER = 12
# The final loss is a mean over so many steps, and the loss of every so many steps is printed.
WINDOW = 20

KNOBS: dict[str, dict[str, Any]] = {
    "pager step": {"update_at": "step"},
    "pager backward": {"update_at": "backward"},
    "pager backward cpu": {"update_at": "backward", "update_on": "cpu"},
}
PLAIN, TIES = "plain", "plain, ties moved"


@dataclass(kw_only=True)
class Run:
    """What one system did."""

    losses: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def batches(options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and targets of each step, int64 (batch, seq), on the device."""
    text = TextBatches(read_text(options.text), batch=options.batch, seq=options.seq, seed=options.seed)
    for inputs, targets in islice(text, options.steps):
        yield torch.from_numpy(inputs).to(options.device), torch.from_numpy(targets).to(options.device)


def run_plain(sizes: ModelSizes, options: argparse.Namespace, *, moves_ties: bool) -> Run:
    """A user's own loop with masters."""
    result = Run()
    model = make_model(sizes, seed=options.seed).to(options.device)
    params = list(model.parameters())
    masters = [param.detach().float().requires_grad_() for param in params]
    optimizer = torch.optim.AdamW(masters, lr=options.lr)
    num_ties = 0
    for tokens, targets in batches(options):
        loss = model(tokens, targets)
        loss.backward()
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                # What is smaller than a page stays an ordinary tensor with an ordinary master.
                if moves_ties and param.nbytes >= pager.parse_size(options.page_size):
                    num_ties += move_ties(param, master)
        result.losses.append(loss.item())
    if moves_ties:
        result.facts["ties_moved"] = num_ties
    result.weights = [param.detach().cpu() for param in params]
    result.masters = [master.detach().cpu() for master in masters]
    return result


def move_ties(param: Tensor, master: Tensor) -> int:
    """Move each master that is half a unit above its weight down by one ulp, as 16 low bits ask for; how many."""
    bits = master.view(torch.int32)
    ties = bits - (param.view(torch.int16).int() << 16) == 0x8000
    bits -= ties.int()
    return int(ties.sum())


def run_pager(sizes: ModelSizes, options: argparse.Namespace, name: str, budget: int) -> Run:
    """The loop of the README, with the knobs of ``name``."""
    result = Run()
    model: Any = make_model(sizes, seed=options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    example = next(batches(options))
    on_gpu = options.device != "cpu"
    pager.manage(
        model,
        optimizer,
        device=options.device,
        device_budget=None if on_gpu else budget,
        page_size=options.page_size,
        master="float32",
        example_inputs=tuple(tensor.cpu() for tensor in example),
        checks=Checks(arena_bytes=budget if on_gpu else None),
        **KNOBS[name],
    )
    for tokens, targets in batches(options):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result.losses.append(loss.item())
    seen = model.pager.statistics()
    in_bytes = seen.page_in_bytes // options.steps
    result.facts |= {"page_in_bytes": in_bytes, "page_out_bytes": seen.page_out_bytes // options.steps}
    assert in_bytes > 0, f"{name}: nothing moved"
    on_cpu = model.pager._runtime.in_backward.on_cpu if name.startswith("pager backward") else None
    if on_cpu is not None:
        total = sum(param.numel() for param in model.parameters())
        assigned = sum(binding.segment.num_elements for binding in on_cpu.assigned)
        assert assigned > 0, f"{name}: the CPU updates nothing"
        result.facts |= {"tensors_on_cpu": len(on_cpu.assigned), "share_on_cpu": round(assigned / total, 3)}
    result.weights = [tensor.clone() for tensor in model.state_dict().values()]
    states = optimizer.state_dict()["state"]
    result.masters = [states[index]["master"].clone() for index in range(len(states))]
    model.pager.close()
    return result


def describe(name: str, run: Run, references: dict[str, Run]) -> dict[str, Any]:
    """The line of one system."""
    final = statistics.mean(run.losses[-WINDOW:])
    return {
        "system": name,
        **run.facts,
        "losses": [round(loss, 4) for loss in run.losses[WINDOW - 1 :: WINDOW]],
        "final_mean": final,
        "against": {word: compare(run, other) for word, other in references.items() if other is not run},
    }


def compare(run: Run, other: Run) -> dict[str, Any]:
    """How far a run is from another one; steps count from 1."""
    differences = [abs(ours - theirs) for ours, theirs in zip(run.losses, other.losses, strict=True)]
    weights = zip(run.weights, other.weights, strict=True)
    masters = zip(run.masters, other.masters, strict=True)
    return {
        "losses_bit_equal": run.losses == other.losses,
        "weights_bit_equal": all(torch.equal(ours, theirs) for ours, theirs in weights),
        "masters_differing": sum(int((ours != theirs).sum()) for ours, theirs in masters),
        "largest_difference": max(differences),
        "first_different_step": next((step for step, far in enumerate(differences, 1) if far), None),
        "final_mean_difference": statistics.mean(run.losses[-WINDOW:])
        - statistics.mean(other.losses[-WINDOW:]),
    }


def main() -> None:
    """Run the systems one after the other, then print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help='"cpu" is the simulated device (default)')
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64, help="bytes (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", help="a file or a folder (default: the topics of Python's documentation)")
    parser.add_argument("--page-size", default="16KiB")
    parser.add_argument("--share", type=float, default=0.3, help="device budget / state (default: 0.3)")
    options = parser.parse_args()
    if not 0 < options.share <= 1 / 3:
        parser.error("--share must be at most a third, so that the state streams")
    # Some backwards on a GPU differ from themselves; curves can be compared bit by bit only without those.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    sizes = ModelSizes(
        hidden=options.hidden,
        layers=options.layers,
        heads=options.heads,
        ffn=options.ffn,
        dtype="bfloat16",
        checkpoint=True,
    )
    state_bytes = STATE_BYTES_PER_PARAMETER * num_parameters(sizes)
    budget = int(options.share * state_bytes)
    runs = {name: run_plain(sizes, options, moves_ties=name == TIES) for name in (PLAIN, TIES)}
    runs |= {name: run_pager(sizes, options, name, budget) for name in KNOBS}
    setting = {
        "device": options.device,
        "torch": str(torch.__version__),
        "steps": options.steps,
        "parameters": num_parameters(sizes),
        "state_bytes": state_bytes,
        "device_budget_bytes": budget,
    }
    for name, run in runs.items():
        line = describe(name, run, {word: runs[word] for word in (PLAIN, TIES)})
        sys.stdout.write(json.dumps(setting | line) + "\n")


if __name__ == "__main__":
    main()
