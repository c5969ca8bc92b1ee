"""Sizes of the decoder language model: presets and files. No torch here: ``pager --help`` stays quick."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pager.tools.errors import InputError, closest

__all__ = ["PRESETS", "ModelSizes", "load_sizes", "num_parameters"]

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """A decoder in the shape of Llama: RMSNorm, rotary positions, SwiGLU, causal attention, untied head.

    ``vocabulary`` counts tokens; text is read as bytes, so that anything from 256 up works and the rest of a
    larger table is there for its size only. ``checkpoint`` recomputes each block in backward instead of
    keeping its activations.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int = 256
    dtype: str = "float32"
    checkpoint: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "ffn", "vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"model size {name} is {value!r}; expected a whole number of at least 1")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise InputError(
                f"model size hidden is {self.hidden} with {self.heads} heads; hidden / heads must be a "
                "whole, even number (rotary positions turn pairs of channels)"
            )
        if self.vocabulary < 256:
            raise InputError(
                f"model size vocabulary is {self.vocabulary}; text is read as bytes, so at least 256"
            )
        if self.dtype not in BYTES_PER_ELEMENT:
            raise InputError(f"model dtype is {self.dtype!r}{closest(str(self.dtype), BYTES_PER_ELEMENT)}")
        if not isinstance(self.checkpoint, bool):
            raise InputError(f"model size checkpoint is {self.checkpoint!r}; expected true or false")

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and Adam's two moments, all in the model's dtype."""
        return 4 * num_parameters(self) * BYTES_PER_ELEMENT[self.dtype]


def num_parameters(sizes: ModelSizes) -> int:
    """Elements of all parameters of ``language_model.DecoderModel`` in these sizes."""
    attention = 4 * sizes.hidden * sizes.hidden
    feed_forward = 3 * sizes.hidden * sizes.ffn
    norms = 2 * sizes.hidden
    ends = 2 * sizes.vocabulary * sizes.hidden + sizes.hidden
    return sizes.layers * (attention + feed_forward + norms) + ends


def _large(hidden: int, layers: int, heads: int, ffn: int) -> ModelSizes:
    # The vocabulary of Llama: a byte-level table would make these smaller than the models they stand for.
    return ModelSizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=ffn,
        vocabulary=32000,
        dtype="bfloat16",
        checkpoint=True,
    )


PRESETS: Mapping[str, ModelSizes] = {
    # Weights of at least one page of 128 KiB each: smaller ones are wired, and nothing would be left to move.
    "tiny": ModelSizes(hidden=192, layers=2, heads=4, ffn=512),
    "small": ModelSizes(hidden=256, layers=6, heads=4, ffn=704),
    "1b": _large(2048, 22, 32, 5632),
    "3b": _large(3072, 28, 24, 8192),
    "7b": _large(4096, 32, 32, 11008),
    "13b": _large(5120, 40, 40, 13824),
    "30b": _large(6656, 60, 52, 17920),
    # Hidden size and depth of the published models of that size, where groups of heads share keys and values; here each
    # head has its own, and the feed-forward is narrower by as much.
    "70b": _large(8192, 80, 64, 24576),
    "405b": _large(16384, 126, 128, 43520),
    "1t": _large(25600, 128, 160, 68096),
}


def load_sizes(model: str) -> tuple[str, ModelSizes]:
    """The short name and the sizes of ``model``, a preset's name or the path of a JSON or YAML file of sizes.

    A file is a mapping of the fields of :class:`ModelSizes`. Raises InputError for an unknown preset, an
    unreadable file, unknown or missing keys, and values that make no model.
    """
    if model in PRESETS:
        return model, PRESETS[model]
    path = Path(model)
    if path.suffix.lower() not in (".json", ".yaml", ".yml"):
        raise InputError(
            f"unknown model {model!r}{closest(model, PRESETS)} (or give a .json or .yaml file of sizes)"
        )
    return path.stem, _from_mapping(_read_mapping(path), path)


def _read_mapping(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the model sizes in {path}: {error}") from error
    try:
        content = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(
            f"{path} holds {type(content).__name__}; expected a mapping such as {{hidden: 256, ...}}"
        )
    return content


def _from_mapping(content: Mapping[str, Any], path: Path) -> ModelSizes:
    fields = {field.name: field for field in dataclasses.fields(ModelSizes)}
    for key in content:
        if key not in fields:
            raise InputError(f"{path}: unknown model size {key!r}{closest(key, fields)}")
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in content]
    if missing:
        raise InputError(f"{path}: missing model sizes {', '.join(missing)}")
    try:
        return ModelSizes(**content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
