"""The twin: a copy of a model and its inputs in which no tensor has data (see `pager.graph.capture`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

# An operation on real integers whose result would be larger gives a tensor without data instead: attention
# masks grow with the square of the sequence. Control flow looks at small tensors.
REAL_LIMIT_BYTES = 16 << 20


class _DataFreeCopies(TorchFunctionMode):
    """While `copy.deepcopy` runs: tensors are replaced by `make(tensor)`, wherever they are found."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._make(tensor))
        if func is Tensor.clone:  # a Parameter that is in no module copies itself by clone
            return self._make(args[0])
        return func(*args, **(kwargs or {}))


def empty_twin(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor without data, from metadata alone."""
    twin = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device)
    return twin.requires_grad_(tensor.requires_grad)


def empty_on_meta(tensor: Tensor) -> Tensor:
    return empty_twin(tensor, torch.device("meta"))


def meta_twin(tensor: Tensor) -> Tensor:
    counts = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    if counts and tensor.nbytes <= REAL_LIMIT_BYTES:
        return tensor.detach().to("cpu", copy=True)
    return empty_on_meta(tensor)


def _take_off_hooks(model: nn.Module, owners: Iterable[object]) -> None:
    """Remove the module hooks that are one of `owners` or a method of one."""
    ids = {id(owner) for owner in owners}
    for module in model.modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key, hook in list(hooks.items()):
                    if id(hook) in ids or id(getattr(hook, "__self__", None)) in ids:
                        del hooks[key]


def make_twin(
    model: nn.Module,
    managed: Mapping[nn.Parameter, int],
    inputs: tuple[Any, Any],
    make: Callable[[Tensor], Tensor],
    empty: Callable[[Tensor], Tensor],
    shared: Iterable[object],
) -> tuple[nn.Module, Any, Any, list[tuple[Tensor, int | None]]]:
    """Copies of model and inputs: parameters by `empty`, all other tensors by `make`; the new parameters."""
    shared = tuple(shared)
    memo: dict[int, Any] = {id(item): item for item in shared}
    segments = {id(p): segment for p, segment in managed.items()}
    parameters: list[tuple[Tensor, int | None]] = []
    for parameter in model.parameters():
        twin = empty(parameter)
        if not isinstance(twin, FakeTensor):
            twin = nn.Parameter(twin.detach(), requires_grad=parameter.requires_grad)
        twin._is_param = True
        memo[id(parameter)] = twin
        parameters.append((twin, segments.get(id(parameter))))
    with _DataFreeCopies(make):
        twin_model = copy.deepcopy(model, memo)
        args, kwargs = copy.deepcopy(inputs, memo)
    _take_off_hooks(twin_model, shared)
    return twin_model, args, kwargs, parameters
