"""The model that a command is asked about: a preset, a file of sizes, a Hugging Face config, or a function in a file.

All are built on meta: no weights are needed, and none are made. Token ids are real zeros: programs look at them, and
capture wants those that are. Whoever wants to train it gives a seed: then weights and inputs are drawn, on the CPU.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pager.tools.errors import InputError, closest
from pager.tools.model_sizes import PRESETS, load_sizes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HELP", "ModelSource", "load_model", "show"]

HELP = (
    f"{', '.join(PRESETS)}; a JSON or YAML file of sizes; the config.json of a Hugging Face model; or "
    "FILE.py:FUNCTION, which returns a model, or a model and its inputs"
)

DEFAULT_SEQ = 2048

# Keys of Hugging Face configs that say how large a model is: of these one of each row must be there.
_SIZE_KEYS = (
    ("hidden_size", "n_embd", "d_model", "dim", "hidden_sizes", "embed_dim"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "depths"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model, on meta or drawn, with the inputs of one step. ``tokens``: of a step."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    dtype: str


def load_model(
    spec: str, *, batch: int, seq: int | None, checkpoint: bool = True, seed: int | None = None
) -> ModelSource:
    """Build the model named ``spec`` on meta. ``seq``: tokens of a sequence (None: 2048, small models 128; a Hugging
    Face model with fewer positions: as many).

    ``checkpoint``: a Hugging Face model recomputes its blocks in backward, as the presets do. ``seed``: build it on the
    CPU with weights and inputs drawn from it (torch's global seed is set); a function's own inputs stay as they are,
    but those on meta. Raises InputError for what is not known, cannot be read, says no sizes, or raises (its traceback
    goes to stderr first).
    """
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    path, colon, function = spec.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_function(Path(path), function, batch=batch, seq=seq, seed=seed)
    if Path(spec).suffix.lower() == ".json" and Path(spec).is_file():
        content = _read_json(Path(spec))
        if "model_type" in content or "architectures" in content:
            return _from_config(Path(spec), content, batch=batch, seq=seq, checkpoint=checkpoint, seed=seed)
    if spec.endswith(".py"):
        raise InputError(f"{spec} names no function; write {spec}:FUNCTION")
    return _from_sizes(spec, batch=batch, seq=seq, seed=seed)


def _from_sizes(spec: str, *, batch: int, seq: int | None, seed: int | None) -> ModelSource:
    name, sizes = load_sizes(spec)
    from pager.tools.language_model import make_model

    length = seq or (DEFAULT_SEQ if sizes.checkpoint else 128)
    model = make_model(sizes, seed=seed or 0, device=_device(seed))
    inputs, targets = (_token_ids((batch, length), sizes.vocabulary, seed) for _ in range(2))
    return ModelSource(
        name=name,
        model=model,
        args=(inputs, targets),
        kwargs={},
        tokens=batch * length,
        dtype=sizes.dtype,
    )


def _device(seed: int | None) -> str:
    return "meta" if seed is None else "cpu"


def _token_ids(shape: tuple[int, int], vocabulary: int, seed: int | None) -> Any:
    """Zeros where nothing is drawn, else ids below ``vocabulary`` from torch's generator."""
    import torch

    if seed is None:
        return torch.zeros(shape, dtype=torch.int64)
    return torch.randint(vocabulary, shape)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}; expected a mapping")
    return content


def _from_config(
    path: Path, content: Mapping[str, Any], *, batch: int, seq: int | None, checkpoint: bool, seed: int | None
) -> ModelSource:
    """A model of ``transformers`` from its config, with its own loss where it has one."""
    kind = content.get("model_type")
    if kind is None:
        raise InputError(f"{path} names no model_type; a Hugging Face config does")
    nested = [content, *(value for value in content.values() if isinstance(value, Mapping))]
    for keys in _SIZE_KEYS:
        if not any(key in part for part in nested for key in keys):
            raise InputError(
                f"{path} says no sizes: none of {', '.join(keys)} is in it (transformers would fill in those of its "
                "smallest published model)"
            )
    try:
        import torch
        import transformers
    except ImportError as error:
        raise InputError(
            f"{path} is a Hugging Face config; reading it takes the package transformers (pip install transformers)"
        ) from error
    try:
        config = transformers.AutoConfig.for_model(**{**content, "use_cache": False})
        dtype = str(content.get("dtype") or content.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise InputError(f"{path}: dtype is {dtype!r}; expected a floating type such as bfloat16")
        with torch.device(_device(seed)):
            model = _auto_class(transformers, content).from_config(config, dtype=torch_dtype)
    except InputError:
        raise
    except Exception as error:
        show(error)
        raise InputError(
            f"{path}: transformers {transformers.__version__} makes no model of it "
            f"({type(error).__name__}: {_first_line(error)})"
        ) from error
    model.train()
    if checkpoint and getattr(model, "supports_gradient_checkpointing", False):
        # By its name of today, or that of before.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    most = _num_positions(model, config)
    if seq is not None and most is not None and seq > most:
        raise InputError(
            f"{path}: a sequence has {seq} tokens, and the model {most} positions; pass --seq {most} or less"
        )
    length = seq or min(DEFAULT_SEQ, most or DEFAULT_SEQ)
    kwargs, tokens = _inputs_of(model, content, batch, length, seed)
    # Every published config is called config.json; the model's name is its folder's.
    folder = path.resolve().parent.name if path.name == "config.json" else ""
    return ModelSource(
        name=str(content.get("_name_or_path") or folder or path.stem).rsplit("/", 1)[-1] or str(kind),
        model=model,
        args=(),
        kwargs=kwargs,
        tokens=tokens,
        dtype=dtype,
    )


def _auto_class(transformers: Any, content: Mapping[str, Any]) -> Any:
    """The class that trains such a model: by the config's own word, else a causal language model, else the bare one."""
    architecture = (content.get("architectures") or [""])[0]
    if content.get("is_encoder_decoder") or architecture.endswith("ForConditionalGeneration"):
        return transformers.AutoModelForSeq2SeqLM
    if architecture.endswith("ForMaskedLM"):
        return transformers.AutoModelForMaskedLM
    if architecture.endswith("ForImageClassification"):
        return transformers.AutoModelForImageClassification
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForCausalLM if content["model_type"] in mapping else transformers.AutoModel


def _num_positions(model: nn.Module, config: Any) -> int | None:
    """The most tokens of a sequence, where a model looks positions up in a table; None where it computes them."""
    from torch import nn

    tables = [
        # With a row for padding the positions begin behind that one.
        module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and any(part in name.rpartition(".")[2] for part in ("pos", "wpe"))
    ]
    # Some have rows before the first position.
    configured = getattr(config, "max_position_embeddings", None)
    return min([*tables, configured] if configured else tables) if tables else None


def _inputs_of(
    model: Any, content: Mapping[str, Any], batch: int, seq: int, seed: int | None
) -> tuple[dict[str, Any], int]:
    import torch

    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = content.get("image_size", 224)
        channels = content.get("num_channels", 3)
        dtype = next(model.parameters()).dtype
        pixels = torch.empty(batch, channels, side, side, dtype=dtype, device="meta")
        return {"pixel_values": pixels if seed is None else _drawn(pixels)}, batch
    vocabulary = model.get_input_embeddings().num_embeddings if seed is not None else 1
    kwargs = {"input_ids": _token_ids((batch, seq), vocabulary, seed)}
    if "labels" in inspect.signature(model.forward).parameters:
        kwargs["labels"] = _token_ids((batch, seq), vocabulary, seed)
    if content.get("is_encoder_decoder"):
        kwargs["decoder_input_ids"] = _token_ids((batch, seq), vocabulary, seed)
    return kwargs, batch * seq


def _from_function(
    path: Path, function: str, *, batch: int, seq: int | None, seed: int | None
) -> ModelSource:
    import torch
    from torch import nn

    if not path.is_file():
        raise InputError(f"{path}: there is no such file")
    made = _call(path, _function_of(path, function), batch, seq, _device(seed))
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{path}:{function} returned {type(made).__name__}; expected a torch.nn.Module, or a pair of one and its "
            "inputs"
        )
    if inputs is None:
        raise InputError(
            f"{path}:{function} returned a model without inputs, so its step cannot be captured; return "
            "(model, inputs): a tuple of positional ones, or a dict of keywords"
        )
    args = (
        () if isinstance(inputs, dict) else tuple(inputs if isinstance(inputs, (tuple, list)) else (inputs,))
    )
    kwargs = dict(inputs) if isinstance(inputs, dict) else {}
    real = _real_indices if seed is None else _drawn
    args, kwargs = tuple(map(real, args)), {name: real(value) for name, value in kwargs.items()}
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    # Rows of the first input, or its tokens where it holds indices.
    first = tensors[0] if tensors else None
    tokens = 1 if first is None else (first.numel() if not first.is_floating_point() else len(first))
    parameters = list(model.parameters())
    if not parameters:
        raise InputError(f"{path}:{function}: the model has no parameters")
    if seed is not None and any(p.is_meta for p in parameters):
        raise InputError(
            f"{path}:{function} puts its parameters on meta itself, so they have no values; leave the device out"
        )
    dtype = str(max(parameters, key=lambda p: p.numel()).dtype).removeprefix("torch.")
    return ModelSource(name=function, model=model, args=args, kwargs=kwargs, tokens=tokens, dtype=dtype)


def _real_indices(value: Any) -> Any:
    """Zeros instead of an integer tensor without values."""
    import torch

    if (
        isinstance(value, torch.Tensor)
        and value.is_meta
        and not (value.is_floating_point() or value.is_complex())
    ):
        return torch.zeros(value.shape, dtype=value.dtype)
    return value


def _drawn(value: Any) -> Any:
    """Numbers from torch's generator instead of a tensor without values: normal ones; zeros for integers."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_meta and value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype, device="cpu")
    return _real_indices(value)


def _function_of(path: Path, function: str) -> Callable[..., Any]:
    name = f"_pager_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its own folder first, as for a script; pickles and dataclasses look the module up by name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        show(error)
        raise InputError(f"{path} raised {type(error).__name__}: {_first_line(error)}") from error
    finally:
        sys.path.pop(0)
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"{path} has no function {function!r}{closest(function, known)}")
    made: Callable[..., Any] = found
    return made


def _call(path: Path, function: Callable[..., Any], batch: int, seq: int | None, device: str) -> Any:
    """Call the user's function on ``device``, with ``batch`` and ``seq`` where it takes them."""
    import torch

    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        names = {}  # type: ignore[assignment]
    given = {"batch": batch} if "batch" in names else {}
    if "seq" in names and (seq is not None or names["seq"].default is inspect.Parameter.empty):
        given["seq"] = DEFAULT_SEQ if seq is None else seq
    try:
        with torch.device(device):
            return function(**given)
    except Exception as error:
        show(error)
        raise InputError(
            f"{path}:{function.__name__} raised {type(error).__name__}: {_first_line(error)}"
        ) from error


def show(error: Exception) -> None:
    """The user's traceback; the line that says what it means to us comes after it."""
    traceback.print_exception(error, file=sys.stderr)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
