"""Calls on paged tensors that are neither plain metadata nor a plain access."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pager.errors import ConfigError
from pager.mmu import values
from pager.mmu.binding import NoTorchFunction
from pager.mmu.parameter import SPECIAL, Paged, access

_SAVES_STATE = nn.Module._save_to_state_dict.__code__
# These look whether there is a gradient, to drop it.
_ZEROES_GRADIENTS = (
    inspect.unwrap(torch.optim.Optimizer.zero_grad).__code__,
    inspect.unwrap(nn.Module.zero_grad).__code__,
)
# This converts a gradient along with its parameter, if there is one.
_CONVERTS = nn.Module._apply.__code__
_MAKES_PARAMETER = nn.Parameter.__new__.__code__

# torch's stubs do not know that class attributes are descriptors.
_Tensor: Any = torch.Tensor
_Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _handles(*functions: Any) -> Callable[[_Call], _Call]:
    def register(handler: _Call) -> _Call:
        for function in functions:
            if function is not None:
                SPECIAL[function] = handler
        return handler

    return register


def _method(name: str) -> Any:
    return getattr(torch.Tensor, name, None)


# -- .grad -----------------------------------------------------------------------------------------


@_handles(_Tensor.grad.__get__, _Tensor._grad.__get__)
def _get_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient as a paged tensor, or None."""
    binding = args[0]._pager
    if binding.mmu.gradients.in_backward is not None and binding.segment.kind == "parameter":
        caller = sys._getframe(2).f_code
        if caller is _CONVERTS:
            return binding.mmu.gradients.get(binding)
        if caller not in _ZEROES_GRADIENTS:
            raise ConfigError(
                f"{binding.name}: .grad was asked for, but with update_at='backward' each gradient is used up as soon "
                "as it is final. Clipping, GradScaler.unscale_ and whatever else needs gradients before the step "
                "work with update_at='step'."
            )
        # One that is there after all (of micro-batches, of a backward before the optimizer was known) goes.
        binding.mmu.gradients.set(binding, None)
        return None
    return binding.mmu.gradients.get(binding)


@_handles(_Tensor.grad.__set__, _Tensor._grad.__set__)
def _set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    binding = args[0]._pager
    binding.mmu.gradients.set(binding, args[1])


@_handles(_Tensor.grad.__delete__, _Tensor._grad.__delete__)
def _delete_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    binding = args[0]._pager
    binding.mmu.gradients.set(binding, None)


@_handles(_Tensor.requires_grad_, _Tensor.requires_grad.__set__)
def _set_requires_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Freezing and unfreezing: an unfrozen parameter needs a place for its gradient."""
    with NoTorchFunction():
        result = func(*args, **kwargs)
    binding = args[0]._pager
    if binding.segment.kind == "parameter":
        binding.mmu.gradients.prepare(binding)
    return result


# -- data that leaves the door ---------------------------------------------------------------------


@_handles(_Tensor.data.__get__)
def _get_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An alias whose writes are not counted by the parameter's version."""
    binding = args[0]._pager
    return binding.mmu.escape(binding)


@_handles(_method("detach"))
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``state_dict()`` asks for detached parameters: it gets the homes, so that a whole model need not fit.

    torch offers no hook before it detaches, and a flag set by a hook could be left behind by an exception; so
    the caller is looked at. Everybody else gets an alias on the device, as of any tensor.
    """
    binding = args[0]._pager
    caller = sys._getframe(2).f_code
    if binding.segment.kind == "parameter" and caller is _SAVES_STATE:
        return values.cpu_tensor(binding.mmu, binding, alias=True)
    if caller is _MAKES_PARAMETER:
        raise ConfigError(
            f"{binding.name}: nn.Parameter(...) of a managed parameter would share its pages. Give it a copy, "
            "p.detach().clone(), or do this before pager.manage()"
        )
    return access(func, args, kwargs)


@_handles(_method("copy_"))
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Loading a state dict copies whole tensors: those go straight to the home, past the device."""
    target: Any = args[0]
    source: Any = args[1] if len(args) > 1 else kwargs.get("src", kwargs.get("other"))
    if isinstance(target, Paged) and type(source) in (torch.Tensor, torch.nn.Parameter):
        binding = target._pager
        with NoTorchFunction():
            writable = not torch.is_grad_enabled() or not target.requires_grad
        same = source.shape == binding.segment.size and source.layout is torch.strided
        if writable and same and values.holds_already(binding.mmu, binding, source.detach()):
            return target
        if (
            writable
            and same
            and (values.can_store(binding.mmu, binding) or not values.has_value(binding.mmu, binding))
        ):
            values.store(binding.mmu, binding, source.detach().to(binding.segment.dtype))
            return target
    return access(func, args, kwargs)


@_handles(_Tensor.data.__set__)
def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p.data = tensor``: the segment takes the values, and whoever looks at the old ones keeps them
    (`pager.mmu.replacing`); another dtype or layout makes it a new one.

    That is how ``model.half()`` and ``.to(memory_format=...)`` work, tensor by tensor. Moving to another
    device is refused, and what such a move already did to small tensors and buffers is undone.
    """
    tensor, value = args
    binding = tensor._pager
    if value is tensor:
        return
    binding.mmu.before_access([binding])
    segment = binding.segment
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        what = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
        raise ConfigError(f"{segment.name}: .data of a managed tensor is a dense tensor, not {what}")
    if value.shape != segment.size:
        raise ConfigError(
            f"{segment.name}: a managed tensor of {tuple(segment.size)} cannot take data of {tuple(value.shape)}; "
            "call model.pager.close() first"
        )
    if value.device.type != binding.phantom.device.type:
        binding.mmu.undo_move()
        raise ConfigError(
            f"{segment.name}: a managed model computes on {binding.phantom.device}; it cannot be moved to "
            f"{value.device}. Call model.pager.close() first, or pass device= to pager.manage()."
        )
    if value.dtype != segment.dtype and binding.mmu.keeps_masters and segment.kind == "parameter":
        raise ConfigError(
            f"{segment.name}: a model managed with master={'float32'!r} keeps its dtypes; call model.pager.close() "
            "before converting it"
        )
    if value.dtype != segment.dtype or (value.stride() != segment.stride and not isinstance(value, Paged)):
        binding.mmu.renew(binding, value)
        return
    binding.mmu.replace(binding, value.detach())


@_handles(getattr(torch, "_has_compatible_shallow_copy_type", None))
def _can_take_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asked by ``module.to(...)`` before it assigns ``.data``, or, where that cannot be, another parameter."""
    for tensor, other in (args, args[::-1]):
        if isinstance(tensor, Paged) and other.device.type == "meta":
            binding = tensor._pager
            binding.mmu.undo_move()
            raise ConfigError(
                f"{binding.name}: a managed model cannot be moved to meta. Call model.pager.close() first."
            )
    with NoTorchFunction():
        return func(*args, **kwargs)


@_handles(
    _method("numpy"),
    _method("__array__"),
    _method("__dlpack__"),
    _method("untyped_storage"),
    _method("storage"),
    _method("_typed_storage"),
)
def _escape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is returned may be written to without anyone counting; it keeps the frames pinned while it lives."""
    binding = args[0]._pager
    forced = bool(kwargs.get("force", len(args) > 1 and args[1]))
    with NoTorchFunction():
        needs_detach = args[0].requires_grad and torch.is_grad_enabled() and func is _method("numpy")
    if needs_detach and not forced:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return func(binding.mmu.escape(binding), *args[1:], **kwargs)


@_handles(_method("data_ptr"), _method("const_data_ptr"), _method("mutable_data_ptr"))
def _data_ptr(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A raw address is good to the end of the step."""
    binding = args[0]._pager
    tensor = binding.mmu.escape(binding)
    binding.mmu.hold_until_step(tensor)
    return func(tensor, *args[1:], **kwargs)


@_handles(_method("set_"))
def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``p.set_(tensor)`` of the same kind, as parametrizations do, gives it the values as ``p.data = tensor`` does, but
    counts as a write; else it is refused.
    """
    target = args[0]
    source = args[1] if len(args) == 2 else kwargs.get("source")
    segment = target._pager.segment
    if not isinstance(source, torch.Tensor) or source.shape != segment.size or source.dtype != segment.dtype:
        return _refuse(func, args, kwargs)
    with torch.no_grad():
        binding = target._pager
        binding.mmu.replace(binding, source.detach())
        binding.bump_version()
    return target


@_handles(_method("resize_"), _method("resize_as_"), _method("share_memory_"), _method("swap_"))
def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    binding = args[0]._pager if isinstance(args[0], Paged) else args[1]._pager
    raise ConfigError(
        f"{binding.name}: {name} would replace the storage of a managed tensor. Call model.pager.close() first."
    )


@_handles(
    *(
        _method(f"{name}_")
        for name in ["t", "transpose", "swapaxes", "swapdims", "unsqueeze", "squeeze", "as_strided"]
    )
)
def _refuse_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    binding = args[0]._pager
    raise ConfigError(
        f"{binding.name}: {func.__name__} would give a managed tensor another shape in place. Use "
        f"{func.__name__.rstrip('_')}, or call model.pager.close() first."
    )


# -- autograd --------------------------------------------------------------------------------------


@_handles(torch.autograd.grad)
def _autograd_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` with paged tensors among its arguments.

    Not an access to the inputs: the graph only needs to know them. So torch's own function is called with
    their gradient edges, and with torch functions enabled, since backward runs recomputation and hooks on
    this thread.
    """
    return _grad(*args, **kwargs)


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    if materialize_grads and allow_unused is False:
        raise ValueError("Expected allow_unused to be True or not passed when materialize_grads=True")
    given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    result = torch.autograd.grad(
        _ordinary(outputs),
        [_edge(tensor) if isinstance(tensor, Paged) else tensor for tensor in given],
        _ordinary(grad_outputs),
        retain_graph=retain_graph,
        create_graph=create_graph,
        only_inputs=only_inputs,
        allow_unused=bool(allow_unused or materialize_grads),
        is_grads_batched=is_grads_batched,
    )
    for tensor in given:
        if isinstance(tensor, Paged):
            tensor._pager.check_graph()
    if materialize_grads:
        return tuple(
            torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if grad is None else grad
            for tensor, grad in zip(given, result, strict=True)
        )
    return tuple(result)


@_handles(torch.autograd.backward)
def _autograd_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.backward` with paged tensors among its arguments, such as ``loss.backward(inputs=[...])``."""
    return _backward(*args, **kwargs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    if inputs is not None:
        given = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        inputs = [_edge(tensor) if isinstance(tensor, Paged) else tensor for tensor in given]
    torch.autograd.backward(
        _ordinary(tensors), _ordinary(grad_tensors), retain_graph, create_graph, grad_variables, inputs
    )


@_handles(torch.Tensor.backward)
def _tensor_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward that begins at a paged tensor, or is given one."""
    return func(*(_ordinary(arg) for arg in args), **{k: _ordinary(value) for k, value in kwargs.items()})


@_handles(F.triplet_margin_with_distance_loss)
def _with_distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """It calls a function of the user's, which must find the door open."""
    return _tensor_backward(func, args, kwargs)


def _edge(tensor: Paged) -> Any:
    with NoTorchFunction():
        if not tensor.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        return torch.autograd.graph.get_gradient_edge(tensor)


def _ordinary(values: Any) -> Any:
    """Paged tensors among ``values`` as ordinary views of their frames, which autograd's engine can read."""
    if isinstance(values, Paged):
        return values.view_as(values)
    if isinstance(values, (list, tuple)) and any(isinstance(value, Paged) for value in values):
        return [_ordinary(value) for value in values]
    return values
