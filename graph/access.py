"""What counts as an access to a parameter: one answer for capture's recorder and for the runtime's door.

Both are tensor subclasses with `__torch_function__`. Each call that arrives there either reads or writes
elements of the tensors it names (an *access*: it costs a tick, and pages must be on the device) or only asks
about them (shape, dtype, autograd bookkeeping). If the two sides classified differently, the captured trace
would not be the one the runtime sees; so the table stands here, once.

The rule is one of exclusion: whatever is not listed is an access. Forgetting a getter costs a needless fault,
never a wrong number. That is also why what takes a second tensor's values (`new_tensor`) is not listed.

Calls arrive in three shapes: getters and setters as bound slots (`torch.Tensor.shape.__get__`; two such
objects are equal and hash alike), methods as the descriptor or function of the class (`torch.Tensor.size`),
functions as themselves (`torch.is_complex`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=torch.Tensor)

_GETTERS = (
    "shape dtype device layout ndim itemsize nbytes name names "
    "requires_grad is_leaf grad_fn _grad_fn grad_dtype output_nr retains_grad volatile "
    "_version _base _cdata _backward_hooks _post_accumulate_grad_hooks "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse "
    "is_sparse_csr is_vulkan is_xla is_xpu"
)
_SETTERS = "requires_grad grad_dtype names _backward_hooks _post_accumulate_grad_hooks"
_METHODS = (
    "size dim ndimension numel nelement element_size get_device "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed is_same_size "
    "_is_view _is_zerotensor has_names is_pinned is_shared "
    "sparse_dim dense_dim is_coalesced _nnz _dimI _dimV "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook "
    "__len__ __hash__ __dir__ __dlpack_device__ "
    # These take only dtype and device from the tensor, and a phantom has the right ones. The *_like functions
    # also copy its strides, so they stay accesses.
    "new_empty new_empty_strided new_zeros new_ones"
)
_FUNCTIONS = (
    "is_tensor is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed "
    "is_same_size numel get_device result_type can_cast _is_zerotensor _has_compatible_shallow_copy_type"
)
_LAYOUT_METHODS = "stride storage_offset is_contiguous dim_order"
_LAYOUT_FUNCTIONS = "_debug_has_internal_overlap"


def _slots(names: str, slot: str) -> Iterable[Callable[..., Any]]:
    descriptors = (getattr(torch.Tensor, name, None) for name in names.split())
    return (getattr(descriptor, slot) for descriptor in descriptors if hasattr(descriptor, slot))


def _members(owner: object, names: str) -> Iterable[Callable[..., Any]]:
    # Names come and go between torch 2.6 and today (named tensors went): an absent one cannot be called.
    return (getattr(owner, name) for name in names.split() if hasattr(owner, name))


LAYOUT: frozenset[Callable[..., Any]] = frozenset(
    [*_members(torch.Tensor, _LAYOUT_METHODS), *_members(torch, _LAYOUT_FUNCTIONS)]
)
"""Metadata whose answer depends on strides or offset: an expanded phantom's are not the parameter's."""

METADATA: frozenset[Callable[..., Any]] = LAYOUT.union(
    _slots(_GETTERS, "__get__"),
    _slots(_SETTERS, "__set__"),
    _members(torch.Tensor, _METHODS),
    _members(torch, _FUNCTIONS),
)
"""Torch callables, as `__torch_function__` receives them, that touch no element. Contains LAYOUT."""

GRADIENT: frozenset[Callable[..., Any]] = frozenset(
    [*_slots("grad _grad", "__get__"), *_slots("grad _grad", "__set__"), *_slots("grad _grad", "__delete__")]
)
"""Reading, assigning, deleting `.grad`: no access to the parameter, yet not METADATA: a tensor comes or goes."""


def is_access(func: Callable[..., Any]) -> bool:
    """Whether a call of `func`, as `__torch_function__` gets it, touches elements of the parameters it names."""
    return func not in METADATA and func not in GRADIENT


def collect_tensors(cls: type[T], args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> list[T]:
    """The instances of `cls` (or a subclass) in `args`, `kwargs` and lists, tuples and dicts within, at any depth.

    Each once, in the order of first appearance. Runs on the door's path, once per torch operation: so no
    isinstance on tensors, since the metaclass of nn.Parameter answers that in Python.
    """
    found: dict[int, T] = {}
    _collect(cls, args, found)
    if kwargs:
        _collect(cls, kwargs.values(), found)
    return list(found.values())


def _collect(cls: type[T], values: Iterable[Any], found: dict[int, T]) -> None:
    for value in values:
        kind = type(value)
        if kind is cls or cls in kind.__mro__:
            found.setdefault(id(value), value)
        elif kind is torch.Tensor or kind is int or kind is float:
            continue
        elif isinstance(value, (list, tuple)):
            _collect(cls, value, found)
        elif isinstance(value, dict):
            _collect(cls, value.values(), found)


def current_phase() -> int:
    """Phase.FORWARD (0), or Phase.RECOMPUTE (1) where this thread stands inside autograd's backward pass.

    Inside it, an operation in Python is a checkpoint's recomputation, a hook or a custom Function's backward.
    """
    return 0 if torch._C._current_graph_task_id() == -1 else 1
