"""What an optimizer must not hold where pager runs its class on copies, one parameter at a time.

Attributes that hold parameters, or values by parameter, would be those of the model and not of the copies; an inner
optimizer would be stepped once for each of them. A state that is the parameter (or a view of it, or its gradient)
shows in torch whatever is written there later, and here the value it had.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pager.errors import ConfigError
from pager.mmu.parameter import Managed, PagedParameter
from pager.optim.books import read

__all__ = ["check_holds", "check_states", "tensors_in"]

_LEAVES = (str, bytes, int, float, complex, type, FunctionType, ModuleType, torch.dtype, torch.device)


def check_holds(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose attributes hold parameters, or what belongs to them, a module or another optimizer; or
    whose state holds a parameter.

    Raises ConfigError that says where, and what to do.
    """
    name = type(optimizer).__name__
    params = [param for group in optimizer.param_groups for param in group["params"]]
    search = _Search(optimizer, params)
    books = read(optimizer)
    for values, path in ((books.attributes, "self.{}"), (books.entries, "self.state[{!r}]")):
        for key, value in values.items():
            for where, what in search.under(value, path.format(key)):
                raise ConfigError(f"{name} cannot be managed: {where} {_explained(what)}")
    # Reading the gradient of a paged parameter is an access, and no ordinary tensor shares its memory.
    plain = [param for param in params if not isinstance(param, Managed)]
    check_states(name, (optimizer.state.get(param, {}) for param in params), plain)


def _explained(what: str) -> str:
    if what == "optimizer":
        return (
            "is another optimizer, whose step() would run once for each parameter. Pass that one to pager.manage(), "
            "and let what wraps it be no torch.optim.Optimizer, or not be stepped itself."
        )
    if what == "module":
        return (
            "is a module, and the class is run on one parameter at a time, apart from any module. Keep what the step "
            "needs of it in self.state[p] or in the parameter groups, or leave its parameters out of pager.manage()."
        )
    return (
        "holds parameters, or values by parameter, outside of self.state, and the class is run on copies of one "
        "parameter at a time. Keep what belongs to a parameter p in self.state[p]."
    )


class _Search:
    """Walks through values for what must not be there."""

    def __init__(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._ids = set(map(id, params))
        self._storages = _storages(params)
        groups = [[param.shape for param in group["params"]] for group in optimizer.param_groups]
        self._shapes = [shapes for shapes in (*groups, [param.shape for param in params]) if shapes]
        self._seen: dict[int, Any] = {}

    def under(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        """(where, what) of each find."""
        if value is None or isinstance(value, _LEAVES) or id(value) in self._seen or value is self._optimizer:
            return
        self._seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, torch.Tensor):
            if self._is_parameter(value):
                yield path, "parameter"
        elif isinstance(value, Optimizer):
            yield path, "optimizer"
        elif isinstance(value, nn.Module):
            yield path, "module"
        elif isinstance(value, Mapping):
            yield from self._mapping(value, path)
        elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "maxlen"):
            if self._is_parallel(list(value)):
                yield path, "parameter"
            for index, item in enumerate(value):
                yield from self.under(item, f"{path}[{index}]")
        elif isinstance(value, MethodType):
            yield from self.under(value.__self__, path)
        elif hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                yield from self.under(item, f"{path}.{name}")

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
        if any(id(key) in self._ids or (type(key) is int and key in self._ids) for key in value):
            yield path, "parameter"
        if self._is_parallel(list(value.values())):
            yield path, "parameter"
        for key, item in value.items():
            yield from self.under(item, f"{path}[{key!r}]")

    def _is_parameter(self, value: torch.Tensor) -> bool:
        if id(value) in self._ids or isinstance(value, Managed):
            return True
        return bool(_storages([value]) & self._storages)

    def _is_parallel(self, values: list[Any]) -> bool:
        """Whether these are tensors in the shapes of the parameters, one for each."""
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            return False
        return [value.shape for value in values] in self._shapes


def _storages(tensors: Sequence[torch.Tensor]) -> set[int]:
    plain = (t for t in tensors if type(t) in (torch.Tensor, nn.Parameter) and t.layout == torch.strided)
    return {t.untyped_storage().data_ptr() for t in plain if t.numel()}


def check_states(name: str, states: Iterable[Mapping[str, Any]], params: Sequence[torch.Tensor]) -> None:
    """Refuse states that hold one of these parameters, its gradient or a view. ``name``: the optimizer's class."""
    others = [*params, *(param.grad for param in params if param.grad is not None)]
    places = sorted(place for place in map(_place, others) if place is not None)
    begins = [begin for begin, _ in places]
    for state in states:
        for key, value in state.items():
            for tensor in tensors_in(value):
                place = _place(tensor)
                # Of those that begin before it ends, the last reaches furthest: parameters do not overlap.
                before = 0 if place is None else bisect_left(begins, place[1])
                overlaps = before > 0 and place is not None and places[before - 1][1] > place[0]
                if overlaps or isinstance(tensor, PagedParameter):
                    raise ConfigError(
                        f"{name} cannot be managed: it keeps a parameter or a gradient itself (or a view of it) in "
                        f"self.state[p][{key!r}], and the class is run on copies. Keep a copy there: .clone()."
                    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state's value, which may be a container."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)) or hasattr(value, "maxlen"):
        for item in value:
            yield from tensors_in(item)


def _place(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where an ordinary tensor's elements lie, from the first byte to behind the last."""
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.layout != torch.strided
        or not tensor.numel()
    ):
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (reach + 1) * tensor.element_size()
