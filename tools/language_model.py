"""A decoder language model over bytes, in the shape of Llama: plain PyTorch, nothing here knows pager."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pager.tools.model_sizes import ModelSizes

__all__ = ["DecoderModel", "make_model"]

# With checkpointing the loss is taken over so many tokens at a time: logits of 32000 entries for 16 Ki tokens
# would be the largest tensors of the step by far.
LOSS_CHUNK_TOKENS = 2048


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotary_table(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (length, width / 2), of rotary positions (Su et al. 2021, base 10000)."""
    exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), 10000.0**-exponents)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm and added to the stream (batch, seq, hidden)."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        hidden, ffn = sizes.hidden, sizes.ffn
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            projection(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(-2))
        normed = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class DecoderModel(nn.Module):
    """Tokens and targets, int64 (batch, seq), in; mean cross-entropy out, in nats per byte."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cosine, sine = _rotary_table(tokens.shape[1], self.sizes.hidden // self.sizes.heads, x)
        for block in self.blocks:
            if self.sizes.checkpoint:
                x = checkpoint(block, x, cosine, sine, use_reentrant=False)
            else:
                x = block(x, cosine, sine)
        return self._loss(self.norm(x).flatten(0, 1), targets.flatten())

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        if not self.sizes.checkpoint:
            return self._summed_loss(x, targets) / targets.numel()
        chunks = zip(x.split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS), strict=True)
        losses = [checkpoint(self._summed_loss, part, wanted, use_reentrant=False) for part, wanted in chunks]
        return torch.stack(losses).sum() / targets.numel()

    def _summed_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x).float(), targets, reduction="sum")


def make_model(sizes: ModelSizes, *, seed: int, device: str = "cpu") -> DecoderModel:
    """A model in ``sizes`` with weights drawn from ``seed``; on ``"meta"`` they are left to be drawn later.

    Sets torch's global seed, so that dropout-like draws of the training that follows are fixed too.
    """
    torch.manual_seed(seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, sizes.dtype))
    try:
        with torch.device(device):
            return DecoderModel(sizes)
    finally:
        torch.set_default_dtype(default)
