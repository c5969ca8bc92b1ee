"""Running a user's optimizer class on other tensors than its own.

A *shadow* is an object of the optimizer's class that never saw ``__init__``: it has the optimizer's
attributes, groups with the same values, and whatever parameters and state it is given. Its class's ``step``,
without torch's profiling and hook wrapper, does to those tensors exactly what it would do to the user's.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pager.optim.books import HOOKS, SHADOW, Books


def raw_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's own ``step``, a function of ``self``, without the wrapper torch puts around it for hooks."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def may_wait(optimizer_class: type) -> bool:
    """Whether updates by this class may run later than ``step()``: its step must not depend on values."""
    return optimizer_class.__module__.startswith("torch.optim")


def is_shadow(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` is one of ours (a subclass's step may call its parent's wrapped step on it)."""
    return bool(optimizer.__dict__.get(SHADOW, False))


def snapshot_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes a shadow starts from, as they are now."""
    attributes = dict(optimizer.__dict__)
    for name in (
        "step",
        "state",
        "param_groups",
    ):  # a scheduler's patched bound method; what a shadow has its own of
        attributes.pop(name, None)
    attributes = _own_containers(attributes)
    for name in HOOKS:
        attributes[name] = OrderedDict()
    attributes[SHADOW] = True
    return attributes


def _own_containers(value: Any) -> Any:
    """``value`` with lists, dicts, sets and scalar tensors of its own: what a class appends to or counts in."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _own_containers(item)) for key, item in value.items())
    if kind is list:
        return [_own_containers(item) for item in value]
    if kind in (set, deque):
        return value.copy()
    if kind is torch.Tensor and value.dim() == 0:
        return value.clone()
    return value


class GroupValues(dict[str, Any]):
    """The values of a parameter group as they were; nobody changes them, so what follows from them may be kept."""

    __slots__ = ("probe_keys",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        # Of `pager.optim.probe.probe_key`, by dtype.
        self.probe_keys: dict[torch.dtype, tuple[Any, ...]] = {}


def snapshot_group(group: Mapping[str, Any]) -> GroupValues:
    """The values of a parameter group without its parameters; tensors (a tensor lr) are cloned."""
    return GroupValues(
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
    )


def make_shadow(
    cls: type[Optimizer],
    attributes: Mapping[str, Any],
    groups: Sequence[tuple[Mapping[str, Any], Sequence[torch.Tensor]]],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> Optimizer:
    """A shadow of ``cls`` over these (group values, parameters) and state dicts (kept by reference)."""
    shadow: Optimizer = object.__new__(cls)
    shadow.__dict__.update(_own_containers(attributes))
    shadow.param_groups = [{**values, "params": list(params)} for values, params in groups]
    full: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    full.update(state)
    shadow.state = full
    return shadow


def shadow_with(
    cls: type[Optimizer],
    books: Books,
    params: Mapping[int, Sequence[torch.Tensor]],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> Optimizer:
    """A shadow that begins with copies of ``books``: all groups, with the parameters (by the group's index) of some."""
    shadow: Optimizer = object.__new__(cls)
    own = books.copied(shadow)
    shadow.__dict__.update(own.attributes)
    shadow.__dict__.update({name: OrderedDict() for name in HOOKS})
    shadow.__dict__[SHADOW] = True
    shadow.param_groups = [
        {**values, "params": list(params.get(index, ()))} for index, values in enumerate(own.groups)
    ]
    shadow.state = defaultdict(dict, {**own.entries, **state})
    return shadow


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move the optimizer's ordinary state tensors to ``device``; scalars such as Adam's step stay where it put them."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, dict) else ():
            if type(value) is torch.Tensor and value.dim() > 0:
                state[key] = value.to(device)
