"""What an optimizer's class keeps beside the states of its parameters: its *books*.

These are the attributes of the object, the values of its groups, and entries of ``state`` that belong to no parameter.
A class of the user's may count there, and may make values of what it counts. In torch its ``step`` runs once a step;
here it runs once for each unit of the update. So every unit begins with copies of the books as they were when
``step()`` began, and the user's own change once, by the run that has no parameters (`pager.optim.stand_in`). That is
exact where the class leaves the same books whatever parameters it sees, which is looked at before the first step
(`pager.optim.probe`) and in each unit.

torch's own classes keep no books, but for the values of their groups, which they leave as they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["HOOKS", "SHADOW", "Books", "copy_of", "differences", "is_same", "kept", "put", "read"]

# Instance attributes that hold hooks; each of them fires once per user step, so no copy of an optimizer has any.
HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
SHADOW = "_is_pager_shadow"
# Beside hooks: what every optimizer has its own of, and a bound method that a scheduler put over the class's.
_OWN = frozenset({*HOOKS, SHADOW, "step", "state", "param_groups"})
# torch's own note of whether a fused step has looked at the parameters: no value hangs on it.
_NOTES = frozenset({"_need_device_dtype_check_for_fused"})
_ATOMS = frozenset(
    {NoneType, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size}
    | {FunctionType, BuiltinFunctionType, ModuleType}
)


@dataclass(frozen=True, slots=True)
class Books:
    """attributes: by name. groups: their values, without parameters. entries: of ``state``, but for parameters'.

    owner: the optimizer that bound methods and helper objects among the values refer to.
    """

    attributes: dict[str, Any]
    groups: list[dict[str, Any]]
    entries: dict[Any, Any]
    owner: Any

    def copied(self, owner: Any) -> Books:
        """The same values, for ``owner``: nothing that can be changed is shared with these."""
        memo = {id(self.owner): owner}
        return Books(
            {name: copy_of(value, memo) for name, value in self.attributes.items()},
            [{key: copy_of(value, memo) for key, value in group.items()} for group in self.groups],
            {key: copy_of(value, memo) for key, value in self.entries.items()},
            owner,
        )

    def with_groups(self, optimizer: Optimizer) -> Books:
        """The same, but with the group values that ``optimizer`` has now."""
        memo = {id(optimizer): self.owner}
        groups = [
            {key: copy_of(value, memo) for key, value in values_of(group).items()}
            for group in optimizer.param_groups
        ]
        return Books(self.attributes, groups, self.entries, self.owner)


class _Nobody:
    """Owns books that are only kept."""


def read(optimizer: Optimizer) -> Books:
    """The optimizer's books as they stand: its own objects."""
    return Books(
        {name: value for name, value in optimizer.__dict__.items() if name not in _OWN},
        [values_of(group) for group in optimizer.param_groups],
        {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)},
        optimizer,
    )


def kept(optimizer: Optimizer) -> Books:
    """The optimizer's books as they are now, to be kept."""
    return read(optimizer).copied(_Nobody())


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_of(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that shares nothing that can be changed. ``memo``: copies by the original's id, as for `copy.deepcopy`.

    What cannot be copied (a lock, a file, a stream) is shared.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    result: Any
    if kind in (list, deque):
        result = memo[id(value)] = value.copy()
        if not _all_atoms(value):
            for index, item in enumerate(value):
                result[index] = copy_of(item, memo)
    elif kind in (dict, OrderedDict, defaultdict):
        result = memo[id(value)] = value.copy()
        if not _all_atoms(value.values()):
            for key, item in value.items():
                result[key] = copy_of(item, memo)
    elif kind is tuple and _all_atoms(value):
        result = value
    elif kind is torch.Tensor:
        result = memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
    else:
        try:
            result = copy.deepcopy(value, memo)
        except (TypeError, RuntimeError, NotImplementedError, copy.Error):
            result = memo[id(value)] = value
    return result


def _all_atoms(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= _ATOMS


def is_same(left: Any, right: Any, *, values: bool = True) -> bool:
    """Whether two copies of one value still agree. ``values``: of tensors on an accelerator too, for which the host
    waits; else those have been written equally often.
    """
    return _Comparison(values).agree(left, right)


class _Comparison:
    def __init__(self, values: bool) -> None:
        self._values = values
        # Pairs under comparison, for structures that contain themselves.
        self._open: set[tuple[int, int]] = set()

    def agree(self, left: Any, right: Any) -> bool:
        kind = type(left)
        if left is right:
            return True
        if kind is not type(right):
            return False
        if kind in _ATOMS:
            return bool(left == right or (left != left and right != right))
        if isinstance(left, Optimizer):
            return True  # each copy refers to its own owner
        if (id(left), id(right)) in self._open:
            return True
        self._open.add((id(left), id(right)))
        try:
            return self._agree(kind, left, right)
        finally:
            self._open.discard((id(left), id(right)))

    def _agree(self, kind: type, left: Any, right: Any) -> bool:
        if isinstance(left, torch.Tensor):
            return self._tensors_agree(left, right)
        if issubclass(kind, dict):
            return (
                len(left) == len(right)
                and all(key in right and self.agree(item, right[key]) for key, item in left.items())
                and self._vars_agree(left, right)
            )
        if issubclass(kind, (list, tuple, deque)):
            return len(left) == len(right) and all(map(self.agree, left, right))
        if issubclass(kind, (set, frozenset)):
            return bool(left == right)
        if kind is MethodType:
            return left.__func__ is right.__func__ and self.agree(left.__self__, right.__self__)
        if kind is torch.Generator:
            return torch.equal(left.get_state(), right.get_state())
        try:
            return self.agree(_parts(left), _parts(right))
        except (TypeError, NotImplementedError):  # what cannot be taken apart
            return self._vars_agree(left, right)

    def _vars_agree(self, left: Any, right: Any) -> bool:
        return self.agree(getattr(left, "__dict__", None), getattr(right, "__dict__", None))

    def _tensors_agree(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if (left.shape, left.dtype, left.device) != (right.shape, right.dtype, right.device):
            return False
        if left.device.type != "cpu" and not self._values:
            return left._version == right._version
        if torch.equal(left, right):
            return True
        # Not a number is no difference where both are.
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())


def _parts(value: Any) -> list[Any]:
    """What `copy` would make the object again from."""
    reduced = value.__reduce_ex__(4)
    if not isinstance(reduced, tuple):
        return [reduced]
    # The first three are a function, its arguments and a state; iterators over items of lists and dicts follow.
    return [*reduced[:3], *(list(items) for items in reduced[3:5] if items is not None)]


def differences(left: Books, right: Books, *, values: bool = True) -> list[str]:
    """Where two books differ, as a user would write it (``self.n``); ``values`` as for `is_same`."""
    attributes = _differ(left.attributes, right.attributes, values)
    found = [f"self.{name}" for name in attributes if name not in _NOTES]
    if len(left.groups) != len(right.groups):
        found.append("self.param_groups")
    for mine, other in zip(left.groups, right.groups, strict=False):
        found += [f"group[{key!r}]" for key in _differ(mine, other, values)]
    found += [f"self.state[{key!r}]" for key in _differ(left.entries, right.entries, values)]
    return list(dict.fromkeys(found))


def _differ(left: Mapping[Any, Any], right: Mapping[Any, Any], values: bool) -> Iterator[Any]:
    for key in dict.fromkeys((*left, *right)):
        if key not in left or key not in right or not is_same(left[key], right[key], values=values):
            yield key


def put(optimizer: Optimizer, books: Books, *, since: Books | None = None, groups: bool = False) -> None:
    """Give the user's optimizer these attributes and entries, and with ``groups`` these group values too: only what
    differs, or with ``since`` what differs between these two. Containers and tensors stay the same objects if they can.
    """
    live = read(optimizer)
    before = live if since is None else since
    memo = {id(books.owner): optimizer}
    _put(optimizer.__dict__, before.attributes, books.attributes, memo)
    _put(optimizer.state, before.entries, books.entries, memo)
    if groups:
        for target, old, new in zip(optimizer.param_groups, before.groups, books.groups, strict=False):
            _put(target, old, new, memo)


def _put(
    target: dict[Any, Any], before: Mapping[Any, Any], wanted: Mapping[Any, Any], memo: dict[int, Any]
) -> None:
    for key in list(_differ(before, wanted, True)):
        if key not in wanted:
            target.pop(key, None)
            continue
        value: Any = copy_of(wanted[key], memo)
        held: Any = target.get(key)
        if type(held) is not type(value) or held is value:
            target[key] = value
        elif isinstance(held, (dict, set)):
            held.clear()
            held.update(value)
        elif isinstance(held, (list, deque)):
            held.clear()
            held.extend(value)
        elif type(held) is torch.Tensor and (held.shape, held.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                held.copy_(value)
        else:
            target[key] = value
