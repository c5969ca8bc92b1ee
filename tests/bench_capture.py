"""Capture of the zoo at real sizes: way, ticks, pages, seconds. ``python tests/bench_capture.py [--out FILE]``

Each model is built on meta, so no weights are made, and its training step is captured once, after a small one that
loads what torch loads late. Beside it: whether the tiny copy's real step (`tests/graph/test_zoo.py`) shows the captured
order to the door. Prints a line of JSON for each model, then the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pager.graph.capture import capture
from pager.units import ceil_div, parse_size
from tests import models, zoo
from tests.graph.test_zoo import SHARE, train

PAGE_BYTES = parse_size("128KiB")
STATE_COPIES = 4  # weight, gradient and AdamW's two moments, in the weight's dtype


@dataclass(frozen=True)
class Real:
    """A model of the zoo at a size that people train, and what it is called then."""

    name: str
    title: str
    sizes: dict[str, Any]


def _decoder(hidden: int, feed: int, layers: int, heads: int, kv: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": feed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "dtype": torch.bfloat16,
        "batch": 1,
        "length": 2048,
    }


_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "batch": 8,
}
_MIXTRAL = {**_decoder(4096, 14336, 32, 32, 8, 32000), "num_local_experts": 8}

REAL = (
    Real("llama", "Llama 7B", _decoder(4096, 11008, 32, 32, 32, 32000)),
    Real("qwen2", "Qwen2 7B", {**_decoder(3584, 18944, 28, 28, 4, 152064), "tie_word_embeddings": False}),
    Real("qwen3", "Qwen3 8B", {**_decoder(4096, 12288, 36, 32, 8, 151936), "head_dim": 128}),
    Real("mistral", "Mistral 7B", {**_decoder(4096, 14336, 32, 32, 8, 32000), "sliding_window": 4096}),
    Real("mixtral", "Mixtral 8x7B, experts by grouped_mm", _MIXTRAL),
    Real("mixtral_float", "the same in fp32", {**_MIXTRAL, "dtype": torch.float32}),
    Real("mixtral_loop", "the same in bf16, experts in a loop", _MIXTRAL),
    Real(
        "gpt2",
        "GPT-2 small",
        {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
        | {"batch": 8, "length": 1024},
    ),
    Real(
        "t5",
        "T5 small",
        {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
        | {"batch": 8, "length": 512},
    ),
    Real(
        "bert",
        "BERT base",
        {**_BASE, "vocab_size": 30522, "max_position_embeddings": 512, "length": 512},
    ),
    Real("vit", "ViT-B/16", {**_BASE, "image_size": 224, "patch_size": 16, "num_labels": 1000}),
    Real(
        "resnet",
        "ResNet-50",
        {"depths": (3, 4, 6, 3), "width": 64, "num_classes": 1000, "size": 224, "batch": 8},
    ),
    Real("transformer", "nn.Transformer, width 512, 2 + 2 layers", {"width": 512, "num_heads": 8}),
    Real(
        "unet",
        "diffusion UNet, 64 x 64",
        {"width": 192, "multiples": (1, 2, 3, 4), "depth": 3, "num_heads": 8, "groups": 32, "size": 64}
        | {"batch": 8},
    ),
    Real(
        "dit",
        "DiT-XL/2",
        {"width": 1152, "depth": 28, "num_heads": 16, "size": 32, "patch": 2, "num_classes": 1000}
        | {"batch": 8},
    ),
)


def options_of(real: Real) -> dict[str, Any]:
    """What the builder takes: sizes that are the config's, not its own, go together."""
    if real.name.split("_")[0] not in zoo.HUGGING_FACE:
        return real.sizes
    own = {key: value for key, value in real.sizes.items() if key in ("batch", "length", "dtype")}
    return {**own, "sizes": {key: value for key, value in real.sizes.items() if key not in own}}


def order_of_tiny(build: Callable[[], models.Case], share: float) -> str:
    """Two real steps of the tiny copy, in words."""
    run = train(build(), share=share)
    if run.expected[0] is None:
        again = "equal" if run.seen[1] == run.expected[1] else "other visits"
        return f"recorded, then {again}"
    return "equal" if run.seen == run.expected else "different"


def measure(real: Real) -> dict[str, Any]:
    """Capture one model at its real size on meta, and train its tiny copy."""
    build = zoo.ZOO[real.name]
    with torch.device("meta"):
        case = build(**options_of(real))
    inputs = case.make_batch(0)
    paged = [p for p in case.model.parameters() if p.nbytes >= PAGE_BYTES]
    begin = time.perf_counter()
    found = capture(case.model, {p: index for index, p in enumerate(paged)}, *inputs)
    seconds = time.perf_counter() - begin
    tiny = build
    if real.name == "mixtral_loop":  # few tokens, so that not every expert has one
        tiny = functools.partial(build, batch=1, length=3, sizes={"num_local_experts": 8})
    return {
        "model": real.name,
        "title": real.title,
        "num_parameters": sum(p.numel() for p in case.model.parameters()),
        "dtype": str(paged[0].dtype).removeprefix("torch."),
        "way": found.way,
        "reason": found.reason,
        "num_accesses": len(found.rows),
        "num_ticks": found.num_ticks,
        "weight_pages": sum(ceil_div(p.nbytes, PAGE_BYTES) for p in paged),
        "state_pages": STATE_COPIES * sum(ceil_div(p.nbytes, PAGE_BYTES) for p in paged),
        "flops": float(found.flops.sum()),
        "peak_activation_bytes": found.peak_activation_bytes,
        "capture_seconds": round(seconds, 2),
        "tiny_order": order_of_tiny(tiny, SHARE),
    }


def row_of(result: dict[str, Any]) -> str:
    """A line of the table."""
    ticks = f"{result['num_ticks']:,}" if result["num_ticks"] else "-"
    cells = (
        result["title"],
        f"{result['num_parameters'] / 1e6:,.0f} M, {result['dtype']}",
        result["way"],
        ticks,
        f"{result['weight_pages']:,}",
        f"{result['state_pages']:,}",
        f"{result['capture_seconds']:.1f}",
        result["tiny_order"],
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure the models and print what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="comma-separated names of the zoo (default: all)")
    parser.add_argument("--out", type=Path, help="a file to which the JSON lines are appended")
    options = parser.parse_args()
    names = options.models.split(",") if options.models else list(zoo.ZOO)
    warm = models.make_decoder()
    capture(warm.model, {p: index for index, p in enumerate(warm.model.parameters())}, *warm.make_batch(0))
    results = []
    for real in REAL:
        if real.name in names:
            results.append(measure(real))
            line = json.dumps(results[-1]) + "\n"
            sys.stdout.write(line)
            sys.stdout.flush()
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line)
    sys.stdout.write("".join(f"{row_of(result)}\n" for result in results))


if __name__ == "__main__":
    main()
