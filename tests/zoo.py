"""Tiny copies of the architectures that people train. Each builder gives a `Case`, as those of `tests.models` do.

Hugging Face models come from a config, so without weights to download. What would need another package (torchvision's
ResNet, a diffusion UNet, a DiT) stands here in plain torch, in the shape in which it is usually written. The same
builders make the real sizes (`tests/bench_capture.py`): on meta, under ``torch.device("meta")``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Case, _generator, make_encoder_decoder

Batch = tuple[tuple[Any, ...], dict[str, Any]]


def _draw(seed: int, make: Callable[[torch.Generator], Batch]) -> Callable[[int], Batch]:
    def make_batch(step: int) -> Batch:
        # A generator of the CPU gives nothing to meta: the model may be built there, inputs are real.
        with torch.device("cpu"):
            return make(_generator(seed, step))

    return make_batch


def _own_loss(output: Any, batch: Batch) -> Tensor:
    del batch
    loss: Tensor = output.loss
    return loss


# -- Hugging Face ----------------------------------------------------------------------------------


def _next_token(config: Any, batch: int, length: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(config.vocab_size, (batch, length), generator=generator)
    return (), {"input_ids": ids, "labels": ids}


def _masked_token(config: Any, batch: int, length: int, generator: torch.Generator) -> Batch:
    """A fifth of the tokens to guess, and rows of which the last has padding at its end."""
    ids = torch.randint(config.vocab_size, (batch, length), generator=generator)
    labels = ids.masked_fill(torch.rand(batch, length, generator=generator) > 0.2, -100)
    labels[:, 0] = ids[:, 0]
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0
    return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _sequence_pair(config: Any, batch: int, length: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(2, config.vocab_size, (batch, length), generator=generator)
    labels = torch.randint(2, config.vocab_size, (batch, max(length // 2, 1)), generator=generator)
    return (), {"input_ids": ids, "labels": labels}


def _image(config: Any, batch: int, length: int, generator: torch.Generator) -> Batch:
    del length
    shape = batch, config.num_channels, config.image_size, config.image_size
    labels = torch.randint(config.num_labels, (batch,), generator=generator)
    return (), {"pixel_values": torch.randn(*shape, generator=generator), "labels": labels}


@dataclass(frozen=True)
class Recipe:
    """A model of `transformers`: its classes, what it is fed, and the sizes of its tiny copy."""

    config: str
    model: str
    make_inputs: Callable[[Any, int, int, torch.Generator], Batch]
    tiny: dict[str, Any]


_DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_NO_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
# Wide enough that in half precision, too, each matrix but the router's has a page of 16 KiB.
_EXPERTS = {
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}

HUGGING_FACE: dict[str, Recipe] = {
    "llama": Recipe("LlamaConfig", "LlamaForCausalLM", _next_token, _DECODER),
    "qwen2": Recipe(
        "Qwen2Config", "Qwen2ForCausalLM", _next_token, {**_DECODER, "tie_word_embeddings": True}
    ),
    "qwen3": Recipe("Qwen3Config", "Qwen3ForCausalLM", _next_token, {**_DECODER, "head_dim": 16}),
    "mistral": Recipe("MistralConfig", "MistralForCausalLM", _next_token, {**_DECODER, "sliding_window": 8}),
    "mixtral": Recipe("MixtralConfig", "MixtralForCausalLM", _next_token, {**_DECODER, **_EXPERTS}),
    "gpt2": Recipe(
        "GPT2Config",
        "GPT2LMHeadModel",
        _next_token,
        {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, **_NO_SPECIAL},
    ),
    "t5": Recipe(
        "T5Config",
        "T5ForConditionalGeneration",
        _sequence_pair,
        {
            "vocab_size": 96,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": Recipe(
        "BertConfig",
        "BertForMaskedLM",
        _masked_token,
        {"vocab_size": 96, "max_position_embeddings": 64, **_ENCODER},
    ),
    "vit": Recipe(
        "ViTConfig",
        "ViTForImageClassification",
        _image,
        {"image_size": 16, "patch_size": 4, "num_labels": 10, **_ENCODER},
    ),
}


def make_hugging_face(
    name: str,
    *,
    batch: int = 2,
    length: int = 16,
    dtype: torch.dtype = torch.float32,
    experts: str | None = None,
    sizes: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Case:
    """A model of HUGGING_FACE in training mode; ``sizes`` replace those of its tiny copy.

    ``experts``: how a mixture runs them, "grouped_mm" (one product over all of them) or "eager" (a loop over those that
    some token was sent to).
    """
    import transformers

    torch.manual_seed(seed)
    recipe = HUGGING_FACE[name]
    config = getattr(transformers, recipe.config)(**recipe.tiny | dict(sizes or {}))
    model: Any = getattr(transformers, recipe.model)(config).to(dtype).train()
    if experts is not None:
        model.set_experts_implementation(experts)
    make = functools.partial(recipe.make_inputs, config, batch, length)
    return Case(name, model, _draw(seed, make), _own_loss)


# -- ResNet ----------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with batch norm around a shortcut; the last gives four times ``width``."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        result: Tensor = self.relu(self.bn3(self.conv3(out)).add_(self.shortcut(x)))
        return result


class ResNet(nn.Module):
    """A residual network for images, (batch, 3, height, width) in, (batch, num_classes) out."""

    def __init__(self, depths: Sequence[int], width: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(self.stem(images)).mean((2, 3)))
        return result


def make_resnet(
    *,
    depths: Sequence[int] = (1, 2, 1),
    width: int = 16,
    num_classes: int = 10,
    size: int = 32,
    batch: int = 2,
    seed: int = 0,
) -> Case:
    """A ResNet with bottleneck blocks, images (batch, 3, size, size), cross entropy."""
    torch.manual_seed(seed)
    labels = torch.arange(batch, device="cpu") % num_classes

    def make(generator: torch.Generator) -> Batch:
        return (torch.randn(batch, 3, size, size, generator=generator),), {}

    def loss(output: Any, _: Batch) -> Tensor:
        return F.cross_entropy(output, labels)

    return Case("resnet", ResNet(depths, width, num_classes), _draw(seed, make), loss)


# -- diffusion -------------------------------------------------------------------------------------


def embed_time(steps: Tensor, width: int) -> Tensor:
    """Sines and cosines of (batch,) step numbers at ``width // 2`` frequencies each: (batch, width) float32."""
    half = width // 2
    frequencies = torch.exp(torch.arange(half, device=steps.device) * (-math.log(10_000.0) / half))
    angles = steps.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Residual(nn.Module):
    """Two convolutions; the time's embedding is added between them."""

    def __init__(self, channels: int, out_channels: int, time_width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.norm2 = nn.GroupNorm(groups, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out_channels:
            self.shortcut = nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        out = out + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(out)))
        return result


class SpatialAttention(nn.Module):
    """Self-attention over the pixels of (batch, channels, height, width)."""

    def __init__(self, channels: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(
            batch, 3, self.num_heads, channels // self.num_heads, height * width
        )
        query, key, value = qkv.transpose(-1, -2).unbind(1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = x + self.project(mixed.transpose(-1, -2).reshape(x.shape))
        return result


class UNet(nn.Module):
    """A denoiser: (batch, 3, height, width) and (batch,) step numbers in, the noise out.

    Each level halves the image. What the way down gives is kept, and concatenated on the way up.
    """

    def __init__(self, width: int, multiples: Sequence[int], depth: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.width = width
        time_width = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.SiLU(), nn.Linear(time_width, time_width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        channels, kept = width, [width]
        last = len(multiples) - 1
        for level, multiple in enumerate(multiples):
            for _ in range(depth):
                block = nn.ModuleList([Residual(channels, width * multiple, time_width, groups)])
                channels = width * multiple
                if level:
                    block.append(SpatialAttention(channels, num_heads, groups))
                self.down.append(block)
                kept.append(channels)
            if level < last:
                self.down.append(nn.ModuleList([nn.Conv2d(channels, channels, 3, 2, padding=1)]))
                kept.append(channels)
        self.middle = nn.ModuleList(
            [
                Residual(channels, channels, time_width, groups),
                SpatialAttention(channels, num_heads, groups),
                Residual(channels, channels, time_width, groups),
            ]
        )
        for level, multiple in reversed(list(enumerate(multiples))):
            for index in range(depth + 1):
                block = nn.ModuleList([Residual(channels + kept.pop(), width * multiple, time_width, groups)])
                channels = width * multiple
                if level:
                    block.append(SpatialAttention(channels, num_heads, groups))
                if level and index == depth:
                    block.append(nn.Upsample(scale_factor=2.0, mode="nearest"))
                    block.append(nn.Conv2d(channels, channels, 3, padding=1))
                self.up.append(block)
        self.norm = nn.GroupNorm(groups, channels)
        self.leave = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        time = self.time(embed_time(steps, self.width))
        x = self.enter(x)
        kept = [x]
        for block in self.down:
            x = self._run(block, x, time)
            kept.append(x)
        x = self._run(self.middle, x, time)
        for block in self.up:
            x = self._run(block, torch.cat([x, kept.pop()], dim=1), time)
        result: Tensor = self.leave(F.silu(self.norm(x)))
        return result

    @staticmethod
    def _run(block: Any, x: Tensor, time: Tensor) -> Tensor:
        for layer in block:
            x = layer(x, time) if isinstance(layer, Residual) else layer(x)
        return x


class ModulatedBlock(nn.Module):
    """A transformer block whose norms have no weights: shift, scale and gate come from the condition (adaLN)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulate(condition)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        result: Tensor = x + gate2 * self.feed(self.norm2(x) * (1 + scale2) + shift2)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.project(mixed.transpose(1, 2).reshape(x.shape))
        return result


class DiT(nn.Module):
    """A denoising transformer over patches: (batch, channels, size, size), (batch,) steps, (batch,) classes in."""

    def __init__(
        self, width: int, depth: int, num_heads: int, channels: int, size: int, patch: int, num_classes: int
    ) -> None:
        super().__init__()
        self.width, self.patch = width, patch
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.register_buffer("positions", embed_time(torch.arange((size // patch) ** 2), width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(ModulatedBlock(width, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.leave = nn.Linear(width, patch * patch * channels)

    def forward(self, x: Tensor, steps: Tensor, classes: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        condition = self.time(embed_time(steps, 256)) + self.classes(classes)
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulate(condition)[:, None].chunk(2, dim=-1)
        tokens = self.leave(self.norm(tokens) * (1 + scale) + shift)
        rows, columns = height // self.patch, width // self.patch
        tokens = tokens.view(batch, rows, columns, self.patch, self.patch, channels)
        return tokens.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


def _noise_loss(output: Any, batch: Batch) -> Tensor:
    # The target must only be the same in each run: the input itself will do.
    return F.mse_loss(output, batch[0][0])


def make_unet(
    *,
    width: int = 32,
    multiples: Sequence[int] = (1, 2),
    depth: int = 1,
    num_heads: int = 4,
    groups: int = 8,
    size: int = 8,
    batch: int = 2,
    seed: int = 0,
) -> Case:
    """A diffusion UNet with attention below the first level, images (batch, 3, size, size)."""
    torch.manual_seed(seed)

    def make(generator: torch.Generator) -> Batch:
        steps = torch.randint(1000, (batch,), generator=generator)
        return (torch.randn(batch, 3, size, size, generator=generator), steps), {}

    return Case("unet", UNet(width, multiples, depth, num_heads, groups), _draw(seed, make), _noise_loss)


def make_dit(
    *,
    width: int = 64,
    depth: int = 2,
    num_heads: int = 4,
    channels: int = 4,
    size: int = 8,
    patch: int = 2,
    num_classes: int = 80,
    batch: int = 2,
    seed: int = 0,
) -> Case:
    """A DiT with adaLN blocks on (batch, channels, size, size) latents."""
    torch.manual_seed(seed)

    def make(generator: torch.Generator) -> Batch:
        steps = torch.randint(1000, (batch,), generator=generator)
        classes = torch.randint(num_classes, (batch,), generator=generator)
        return (torch.randn(batch, channels, size, size, generator=generator), steps, classes), {}

    model = DiT(width, depth, num_heads, channels, size, patch, num_classes)
    return Case("dit", model, _draw(seed, make), _noise_loss)


ZOO: dict[str, Callable[..., Case]] = {
    **{name: functools.partial(make_hugging_face, name) for name in HUGGING_FACE if name != "mixtral"},
    "mixtral": functools.partial(make_hugging_face, "mixtral", experts="grouped_mm", dtype=torch.bfloat16),
    "mixtral_float": functools.partial(make_hugging_face, "mixtral", experts="grouped_mm"),
    "mixtral_loop": functools.partial(make_hugging_face, "mixtral", experts="eager"),
    "resnet": make_resnet,
    "transformer": make_encoder_decoder,
    "unet": make_unet,
    "dit": make_dit,
}
"""Every architecture by name, for `pytest.mark.parametrize`."""
