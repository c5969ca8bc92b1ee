"""``optimizer.state_dict()`` and ``load_state_dict()`` of an adopted optimizer, through torch's own hooks.

Out: states shaped like their parameter become ordinary CPU tensors. In: torch would copy every state to the
parameter's device whole; so before it does, such tensors are hidden in an opaque object that it passes
through, and afterwards each goes into its pages, in the dtype torch would have given it.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from pager.mmu import values
from pager.mmu.parameter import PagedTensor
from pager.optim.masters import LOW, MASTER, stepped_dtype

if TYPE_CHECKING:
    from pager.optim.adopted import AdoptedOptimizer


class _Hidden:
    """A tensor that torch's ``load_state_dict`` does not see."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def install(adopted: AdoptedOptimizer) -> list[Any]:
    """Register the hooks; the handles that remove them."""

    def show(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        adopted.finish()
        return _shown(adopted, state_dict)

    def hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        adopted.finish()
        return _hidden(adopted, state_dict)

    def take(optimizer: Optimizer) -> None:
        _take(adopted)

    optimizer = adopted.optimizer
    return [
        optimizer.register_state_dict_post_hook(show),
        optimizer.register_load_state_dict_pre_hook(hide),
        optimizer.register_load_state_dict_post_hook(take),
    ]


def _shown(adopted: AdoptedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    shown = dict(state_dict)
    shown["state"] = {
        index: {
            key: values.cpu_tensor(adopted.mmu, value._pager, alias=True)
            if type(value) is PagedTensor
            else value
            for key, value in state.items()
        }
        if isinstance(state, dict)
        else state
        for index, state in state_dict["state"].items()
    }
    if adopted.masters.enabled:
        _show_masters(adopted, shown)
    return shown


def _show_masters(adopted: AdoptedOptimizer, shown: dict[str, Any]) -> None:
    params = chain.from_iterable(group["params"] for group in adopted.optimizer.param_groups)
    for index, param in enumerate(params):
        state = shown["state"].get(index, {})
        binding = adopted.binding_of(param)
        if not isinstance(state, dict):
            continue
        if binding is not None and adopted.masters.has(binding) and (state or adopted.masters.knows(binding)):
            shown["state"][index] = {**state, MASTER: adopted.masters.whole(binding)}
        elif (
            binding is None
            and adopted.masters.has_small(param)
            and (state or adopted.masters.knows_small(param))
        ):
            shown["state"][index] = {**state, MASTER: adopted.masters.small(param).to("cpu", copy=True)}


def _hidden(adopted: AdoptedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    ours = chain.from_iterable(group["params"] for group in adopted.optimizer.param_groups)
    params = dict(zip(saved, ours, strict=False))
    hidden = dict(state_dict)
    hidden["state"] = {}
    for index, state in state_dict["state"].items():
        param = params.get(index)
        binding = adopted.binding_of(param) if isinstance(param, torch.Tensor) else None
        if isinstance(state, dict) and isinstance(param, torch.Tensor) and adopted.masters.enabled:
            # Torch would give it the parameter's dtype.
            state = {key: _Hidden(value) if _keeps_dtype(value) else value for key, value in state.items()}
        if binding is None or not isinstance(state, dict):
            hidden["state"][index] = state
            continue
        hidden["state"][index] = {
            key: _Hidden(value) if adopted.is_param_shaped(binding, value) else value
            for key, value in state.items()
        }
    return hidden


def _take(adopted: AdoptedOptimizer) -> None:
    if adopted.masters.enabled:
        _take_small(adopted)
    for binding in adopted.bindings():
        state = adopted.optimizer.state.get(binding.tensor, {})
        master = state.pop(MASTER, None) if adopted.masters.has(binding) else None
        if isinstance(master, _Hidden):
            adopted.masters.load(binding, master.tensor)
        for key, value in state.items():
            if isinstance(value, _Hidden):
                # torch gives every state but "step" the dtype of a floating parameter.
                stepped = adopted.stepped_dtype(binding)
                dtype = stepped if stepped.is_floating_point else value.tensor.dtype
                if adopted.is_param_shaped(binding, value.tensor):
                    state[key] = adopted.page_state(binding, key, value.tensor, dtype)
                else:
                    device = adopted.engine.device.torch_device
                    state[key] = value.tensor.to(device, dtype, copy=True)
        for key, old in adopted.paged_states(binding).items():
            if key not in state and key != LOW:
                adopted.engine.discard(old.segment)
    adopted.torn.clear()


def _keeps_dtype(value: Any) -> bool:
    """Whether torch would give a state the parameter's dtype, where it is to have that of the master."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.is_floating_point()


def _take_small(adopted: AdoptedOptimizer) -> None:
    """States and masters of ordinary parameters, in the dtype in which they are stepped."""
    for group in adopted.optimizer.param_groups:
        for param in group["params"]:
            if adopted.binding_of(param) is not None:
                continue
            state = adopted.optimizer.state.get(param, {})
            for key, value in list(state.items()):
                if isinstance(value, _Hidden):
                    dtype = stepped_dtype(param.dtype, master=True)
                    state[key] = value.tensor.to(param.device, dtype, copy=True)
            master = state.pop(MASTER, None)
            if master is not None and adopted.masters.has_small(param):
                adopted.masters.load_small(param, master)
