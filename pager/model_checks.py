"""Which parameters of a model can be paged, and clear errors for those models that cannot be managed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from pager.address_space import span_elements
from pager.errors import ConfigError
from pager.mmu.parameter import Paged

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pager.optim.adopted import AdoptedOptimizer

# Wrappers that own their parameters' storage or gradients, by name so that torch.distributed need not be
# imported.
_WRAPPERS = {
    "DistributedDataParallel": "Manage the model first and leave DDP out; several GPUs come later",
    "FullyShardedDataParallel": "Use either FSDP or pager on a model, not both",
    "DataParallel": "Manage the plain module (model.module) instead",
}

# Parameters under a page that belong to a managed model: they stay ordinary, so nothing on them tells.
MANAGED_SMALL: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """A model's distinct parameters: ``paged`` ones (name, parameter) and ``small`` ones that stay ordinary."""

    paged: list[tuple[str, nn.Parameter]]
    small: list[tuple[str, nn.Parameter]]


def sort_parameters(model: nn.Module, page_size: int) -> Parameters:
    """Check the model and sort its parameters. Raises ConfigError or TypeError with the name and the remedy."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"pager.manage() takes a torch.nn.Module, not a {type(model).__name__}")
    _check_modules(model)
    paged: list[tuple[str, nn.Parameter]] = []
    small: list[tuple[str, nn.Parameter]] = []
    for name, param in model.named_parameters():
        _check_parameter(name, param)
        num_bytes = span_elements(param.size(), param.stride()) * param.element_size()
        (small if num_bytes < page_size else paged).append((name, param))
    if not paged and not small:
        raise ConfigError(f"{type(model).__name__} has no parameters; there is nothing to page")
    _check_storages(paged + small)
    return Parameters(paged=paged, small=small)


def held_twice(optimizer: Optimizer, others: Iterable[AdoptedOptimizer]) -> str | None:
    """A parameter of ``optimizer`` that another one holds too."""
    taken = {id(binding) for known in others for binding in known.bindings()}
    params = (param for group in optimizer.param_groups for param in group["params"])
    found = (p._pager for p in params if isinstance(p, Paged) and id(p._pager) in taken)
    return next((binding.name for binding in found), None)


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in _WRAPPERS:
            raise ConfigError(f"module {name or '(the model)'} is wrapped in {kind}. {_WRAPPERS[kind]}.")
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise ConfigError(
                f"module {name or '(the model)'} is sharded by FSDP2. Use either FSDP or pager, not both."
            )
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ConfigError(
                f"module {name or '(the model)'} is TorchScript, whose operations read weights without asking for "
                "them. Give pager the module that it was made from"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"module {name or '(the model)'} has sparse gradients, which cannot be paged yet; "
                "make it with sparse=False"
            )


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if isinstance(param, UninitializedParameter):
        raise ConfigError(f"parameter {name!r} is lazy; run one forward pass before pager.manage()")
    if isinstance(param, Paged) or param in MANAGED_SMALL:
        raise ConfigError(
            f"parameter {name!r} is managed already; call close() on its handle first, or share the module instead of "
            "the parameter"
        )
    if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
        raise ConfigError(
            f"parameter {name!r} is a {type(param.data).__name__}; tensor subclasses of other libraries (DTensor, "
            "quantised weights) cannot be paged. Leave its module out of the managed one."
        )
    if param.layout is not torch.strided:
        raise ConfigError(
            f"parameter {name!r} is {param.layout}; only strided tensors can be paged. Use a dense one."
        )
    if param.is_quantized:
        raise ConfigError(f"parameter {name!r} is quantized; dequantize it before pager.manage()")
    if not param.is_leaf:
        raise ConfigError(
            f"parameter {name!r} is not a leaf of the autograd graph; detach it before pager.manage()"
        )
    for extent, step in zip(param.size(), param.stride(), strict=True):
        if step == 0 and extent > 1:
            raise ConfigError(
                f"parameter {name!r} is expanded (stride 0), so its elements share memory; make it contiguous first"
            )


def _check_storages(named: list[tuple[str, nn.Parameter]]) -> None:
    """Two parameters over one memory would come apart when they move."""
    spans: list[tuple[int, int, str]] = []
    for name, param in named:
        if param.device.type == "meta" or param.numel() == 0:
            continue
        begin = param.data_ptr()
        num_bytes = span_elements(param.size(), param.stride()) * param.element_size()
        spans.append((begin, begin + num_bytes, name))
    spans.sort(key=lambda span: span[:2])
    last_end, last_name = 0, ""
    for begin, end, name in spans:
        if begin < last_end:
            raise ConfigError(
                f"parameters {last_name!r} and {name!r} are different objects over the same memory; tie them by "
                "assigning the same Parameter object to both"
            )
        if end > last_end:
            last_end, last_name = end, name
