"""What of a training state compresses, and how fast: JSON lines, one for each kind of page, level and layout.

    python tests/bench_compression.py [--steps 300] [--levels=-5,1,3] [--piece-kib 128,4096]

Trains a byte-level decoder on real text (bf16 weights with fp32 masters, as ``master="float32"`` does), then
compresses what a disk would hold of it with zstandard, in pieces of so many KiB, as the bytes come ("plain") and with
the bytes of the numbers sorted into planes first ("planes": all first bytes, all second ones, ...), and, of a page of
128 KiB, as `pager.tiers.page_packer` does it ("packed": four planes, each for itself). ``share`` is compressed bytes
over plain ones in blocks of 4 KiB, rates are of plain bytes a second
of one core's time, with the sorting.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from pager.optim.master import split
from pager.tiers.page_packer import PagePacker
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes
from pager.tools.text import TextBatches, read_text

Bytes = npt.NDArray[np.uint8]
BLOCK_BYTES = 4096
PAGE_BYTES = 128 * 2**10


def train(options: argparse.Namespace) -> dict[str, tuple[int, Bytes]]:
    """Bytes per number, and the bytes, of each kind, after so many steps; the two tables apart from the blocks."""
    sizes = ModelSizes(
        hidden=options.hidden,
        layers=options.layers,
        heads=4,
        ffn=options.hidden * 11 // 4 // 8 * 8,
        dtype="bfloat16",
    )
    model = make_model(sizes, seed=0)
    params = [(name, param) for name, param in model.named_parameters() if param.dim() == 2]
    masters = {name: param.detach().float().requires_grad_() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=options.lr)
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    text = TextBatches(read_text(None), batch=8, seq=128, seed=0)
    for inputs, targets in islice(text, options.steps):
        loss = model(torch.from_numpy(inputs), torch.from_numpy(targets))
        loss.backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            gradients[name] = param.grad
            masters[name].grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        losses.append(loss.item())
    sys.stderr.write(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}\n")
    found: dict[str, list[torch.Tensor]] = {}
    for name, param in params:
        state = optimizer.state[masters[name]]
        low = torch.empty(param.shape, dtype=torch.int16)
        split(masters[name].detach().clone(), torch.empty_like(param), low)
        where = "" if name.startswith("blocks") else ", tables"
        for kind, values in (
            ("weight bf16", param.detach()),
            ("low half int16", low),
            ("weight fp32", masters[name].detach()),
            ("gradient bf16", gradients[name]),
            ("exp_avg fp32", state["exp_avg"]),
            ("exp_avg_sq fp32", state["exp_avg_sq"]),
            ("exp_avg bf16", state["exp_avg"].bfloat16()),
            ("exp_avg_sq bf16", state["exp_avg_sq"].bfloat16()),
        ):
            found.setdefault(kind + where, []).append(values)
    return {
        kind: (
            parts[0].element_size(),
            torch.cat([part.flatten() for part in parts]).view(torch.uint8).numpy(),
        )
        for kind, parts in found.items()
    }


def planes(piece: Bytes, width: int) -> Bytes:
    """The bytes of numbers of ``width`` bytes, sorted by their place in the number."""
    out = np.empty_like(piece).reshape(width, -1)
    numbers = piece.reshape(-1, width)
    for place in range(width):
        out[place] = numbers[:, place]
    return out.reshape(-1)


def numbers(piece: Bytes, width: int) -> Bytes:
    """The inverse of `planes`."""
    out = np.empty_like(piece).reshape(-1, width)
    for place, plane in enumerate(piece.reshape(width, -1)):
        out[:, place] = plane
    return out.reshape(-1)


def rate_of(work: Callable[[], object], num_bytes: int) -> float:
    """GB/s of a core's own time, the best of three: who else is on the machine counts little."""
    best = float("inf")
    for _ in range(3):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return num_bytes / best / 1e9


def measure(data: Bytes, width: int, level: int, piece_bytes: int) -> Iterator[dict[str, object]]:
    """Plain, and in planes."""
    pieces = [data[at : at + piece_bytes] for at in range(0, len(data) // 4096 * 4096, piece_bytes)]
    total = sum(map(len, pieces))
    if piece_bytes == PAGE_BYTES and level >= 1:
        yield measure_packer(pieces, level)
    packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    for layout in ("plain", "planes"):

        def pack(layout: str = layout) -> list[bytes]:
            return [packer.compress((planes(p, width) if layout == "planes" else p).data) for p in pieces]

        packed = pack()

        def unpack(layout: str = layout, packed: list[bytes] = packed) -> list[Bytes]:
            plain = [np.frombuffer(unpacker.decompress(each), np.uint8) for each in packed]
            return [numbers(each, width) for each in plain] if layout == "planes" else plain

        assert all(np.array_equal(*both) for both in zip(unpack(), pieces, strict=True))
        blocks = [-(-len(each) // BLOCK_BYTES) * BLOCK_BYTES for each in packed]
        yield {
            "layout": layout,
            "share": round(sum(map(min, blocks, map(len, pieces))) / total, 3),
            "pack_gb_per_second": round(rate_of(pack, total), 3),
            "unpack_gb_per_second": round(rate_of(unpack, total), 3),
        }


def measure_packer(pieces: list[Bytes], level: int) -> dict[str, object]:
    """What the library does; pages that would not save an eighth are neither packed nor unpacked."""
    packer = PagePacker(PAGE_BYTES, 1, level, block_bytes=BLOCK_BYTES)
    total = sum(map(len, pieces))
    packed = [(piece, bytes(found)) for piece in pieces if (found := packer.pack(piece.data)) is not None]
    saved = sum(len(piece) - len(each) for piece, each in packed)
    out = np.empty(PAGE_BYTES, np.uint8)

    def unpack() -> None:
        for _, each in packed:
            packer.unpack(memoryview(each), out.data)

    for piece, each in packed:
        packer.unpack(memoryview(each), out.data)
        assert np.array_equal(out[: len(piece)], piece)
    return {
        "layout": "packed",
        "share": round(1 - saved / total, 3),
        "pack_gb_per_second": round(rate_of(lambda: [packer.pack(piece.data) for piece in pieces], total), 3),
        "unpack_gb_per_second": round(rate_of(unpack, total), 3) if packed else None,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--levels", default="-5,1,3")
    parser.add_argument("--piece-kib", default="128,4096")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind, (width, data) in train(options).items():
        for piece_bytes in (int(text) * 2**10 for text in options.piece_kib.split(",")):
            for level in map(int, options.levels.split(",")):
                for found in measure(data, width, level, piece_bytes):
                    line = {"kind": kind, "piece_bytes": piece_bytes, "level": level, **found}
                    sys.stdout.write(json.dumps({**line, "num_bytes": len(data)}) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
