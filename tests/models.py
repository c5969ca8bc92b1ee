"""Small models that the tests share. Each builder gives a `Case`, equal in every bit for the same seed.

Widths are chosen so that most matrices exceed a page of 16 KiB (the smallest page size) while norms and
biases stay under one, and a training step on the CPU takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH = 4
VOCABULARY = 96
CHECKPOINTING = ("none", "reentrant", "nonreentrant")


@dataclass(frozen=True)
class Case:
    """A model with its data: `make_batch(step)` gives `(args, kwargs)`, `loss(output, batch)` a scalar.

    `blocks`: names of the modules a user would checkpoint ("" is the whole model), each with a tensor output.
    """

    name: str
    model: nn.Module
    make_batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any, tuple[tuple[Any, ...], dict[str, Any]]], Tensor]
    blocks: tuple[str, ...] = ("",)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 100_003 + step)


def _floats(seed: int, *shape: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda step: ((torch.randn(*shape, generator=_generator(seed, step)),), {})


def _tokens(seed: int, *shapes: tuple[int, int]) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def make_batch(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = _generator(seed, step)
        return tuple(torch.randint(VOCABULARY, shape, generator=generator) for shape in shapes), {}

    return make_batch


def _square_loss(output: Any, batch: Any) -> Tensor:
    del batch
    result: Tensor = output.float().square().mean()
    return result


def _next_token_loss(output: Any, batch: Any) -> Tensor:
    tokens = batch[0][-1].to(output.device)
    return F.cross_entropy(output[:, :-1].reshape(-1, output.shape[-1]).float(), tokens[:, 1:].reshape(-1))


def make_mlp(seed: int = 0, width: int = 96, depth: int = 4) -> Case:
    """Linear layers with GELU, (BATCH, width) float32 in and out."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, width))
    blocks = tuple(str(2 * index) for index in range(depth))
    return Case("mlp", model, _floats(seed, BATCH, width), _square_loss, blocks)


def make_cnn(seed: int = 0, channels: int = 32) -> Case:
    """Convolutions with batch norm and dropout, (BATCH, 3, 12, 12) float32 in, (BATCH, 64) out."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * channels, 64),
    )
    return Case("cnn", model, _floats(seed, BATCH, 3, 12, 12), _square_loss)


class DecoderBlock(nn.Module):
    """Pre-norm causal attention and feed-forward, (batch, length, width) in and out."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, width)))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))))
        return result


class Decoder(nn.Module):
    """A decoder language model with tied head, (batch, length) int64 in, (batch, length, VOCABULARY) out."""

    def __init__(self, width: int, depth: int, num_heads: int, dropout: float, checkpointing: str) -> None:
        super().__init__()
        if checkpointing not in CHECKPOINTING:
            raise ValueError(f"checkpointing must be one of {CHECKPOINTING}, not {checkpointing!r}")
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.position = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(DecoderBlock(width, num_heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        result: Tensor = self.head(self.norm(x))
        return result


def make_decoder(
    checkpointing: str = "none",
    seed: int = 0,
    width: int = 64,
    depth: int = 3,
    num_heads: int = 4,
    dropout: float = 0.1,
) -> Case:
    """A pre-norm decoder, tokens (BATCH, 16) int64; `checkpointing` per block is one of CHECKPOINTING."""
    torch.manual_seed(seed)
    model = Decoder(width, depth, num_heads, dropout, checkpointing)
    name = "decoder" if checkpointing == "none" else f"decoder_{checkpointing}"
    blocks = tuple(f"blocks.{index}" for index in range(depth))
    return Case(name, model, _tokens(seed, (BATCH, 16)), _next_token_loss, blocks)


class AttentionModel(nn.Module):
    """nn.MultiheadAttention between two linear layers, (batch, length, width) in, 3 * width out.

    The attention is one operation that names all its weights; the others make it fit a quarter of the state.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, num_heads, dropout=0.1, batch_first=True)
        self.leave = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.enter(x))
        mixed, _ = self.attention(x, x, x, need_weights=False)
        result: Tensor = self.leave(x + mixed)
        return result


def make_attention(seed: int = 0, width: int = 80, num_heads: int = 4) -> Case:
    """nn.MultiheadAttention with dropout on its weights, (BATCH, 10, width) float32 in, 3 * width out."""
    torch.manual_seed(seed)
    return Case("attention", AttentionModel(width, num_heads), _floats(seed, BATCH, 10, width), _square_loss)


class LSTMModel(nn.Module):
    """A two-layer nn.LSTM, a linear head on the last step; (batch, length, width) in, 10 * width out.

    The LSTM is one operation that names all its weights; the wide head makes it fit a quarter of the state.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, 10 * width)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        result: Tensor = self.head(states[:, -1])
        return result


def make_lstm(seed: int = 0, width: int = 64) -> Case:
    """A two-layer LSTM with dropout, (BATCH, 6, width) float32 in, (BATCH, 10 * width) out."""
    torch.manual_seed(seed)
    return Case("lstm", LSTMModel(width), _floats(seed, BATCH, 6, width), _square_loss)


class EncoderDecoder(nn.Module):
    """nn.Transformer over token embeddings, two (batch, length) int64 in, (batch, length, VOCABULARY) out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, width)
        self.target = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(
            width, num_heads, 2, 2, dim_feedforward=2 * width, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        states = self.transformer(self.source(source), self.target(target), tgt_mask=mask)
        result: Tensor = self.head(states)
        return result


def make_encoder_decoder(seed: int = 0, width: int = 64, num_heads: int = 4) -> Case:
    """nn.Transformer with two encoder and two decoder layers; tokens (BATCH, 9) and (BATCH, 7) int64."""
    torch.manual_seed(seed)
    model = EncoderDecoder(width, num_heads)
    blocks = tuple(
        f"transformer.{half}.layers.{index}" for half in ("encoder", "decoder") for index in range(2)
    )
    return Case("encoder_decoder", model, _tokens(seed, (BATCH, 9), (BATCH, 7)), _next_token_loss, blocks)


class CalledTwice(nn.Module):
    """One linear layer called twice in a forward, with others between, (batch, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.shared = nn.Linear(width, width)
        self.between = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.enter(x))))
        result: Tensor = self.shared(torch.tanh(self.between(x)))
        return result


def make_called_twice(seed: int = 0, width: int = 96) -> Case:
    """A module called twice in one forward, (BATCH, width) float32 in and out."""
    torch.manual_seed(seed)
    blocks = ("enter", "shared")
    return Case("called_twice", CalledTwice(width), _floats(seed, BATCH, width), _square_loss, blocks)


class OutsideUse(nn.Module):
    """The parent uses its child's weight and a bare parameter of its own, (batch, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = torch.tanh(F.linear(x, self.a.weight))
        return x @ self.c.t()


def make_outside_use(seed: int = 0, width: int = 96) -> Case:
    """Parameters used outside their module, (BATCH, width) float32 in and out."""
    torch.manual_seed(seed)
    return Case("outside_use", OutsideUse(width), _floats(seed, BATCH, width), _square_loss)


BUILDERS: dict[str, Callable[[], Case]] = {
    "mlp": make_mlp,
    "cnn": make_cnn,
    "decoder": make_decoder,
    "decoder_reentrant": lambda: make_decoder("reentrant"),
    "decoder_nonreentrant": lambda: make_decoder("nonreentrant"),
    "attention": make_attention,
    "lstm": make_lstm,
    "encoder_decoder": make_encoder_decoder,
    "called_twice": make_called_twice,
    "outside_use": make_outside_use,
}
"""Every shipped model by name, for `pytest.mark.parametrize`."""
