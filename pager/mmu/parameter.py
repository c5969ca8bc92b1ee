"""The door: tensor classes whose every torch operation passes through the MMU.

`manage` sets the class of each managed parameter to `PagedParameter`: the same object, so hooks, optimizer
references and `state_dict` keys stay. Gradients and optimizer state are `PagedTensor`s behind the same door.
A call falls into one of

- metadata (shape, dtype ...): answered by the phantom; strides by a meta twin;
- special (`.grad`, `.data`, raw pointers, autograd.grad ...): see `pager.mmu.special`;
- an access: everything else. The tensors named anywhere in the arguments become resident, the operation runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pager.graph.access import LAYOUT, METADATA, collect_tensors, ordinary_views
from pager.mmu import foreach
from pager.mmu.binding import Binding, NoTorchFunction, set_data
from pager.mmu.modes import in_dispatch_mode

if TYPE_CHECKING:
    from pager.mmu.view import View

# func -> handler(func, args, kwargs); filled by pager.mmu.special
SPECIAL: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}


class Managed(torch.Tensor):
    """What passes through the door: paged tensors, and views of their frames (`pager.mmu.view`)."""

    _pager: Any  # of a view None


class Paged(Managed):
    """What paged parameters and paged tensors share. Never made by users."""

    _pager: Binding

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """The one method that torch does not send through ``__torch_function__``."""
        func = torch.Tensor.set_
        return SPECIAL[func](func, (self, *args), kwargs)

    def __hash__(self) -> int:
        """As torch's, which goes through ``__torch_function__``: optimizers look their states up by parameter."""
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation that names a paged tensor arrives here."""
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if func in METADATA:
            if func in LAYOUT:
                args = tuple(arg._pager.meta if isinstance(arg, Paged) else arg for arg in args)
            with NoTorchFunction():
                return func(*args, **kwargs)
        return access(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor on the CPU with the same values: a copy of a managed model is not managed."""
        if id(self) not in memo:
            memo[id(self)] = self._pager.mmu.ordinary_copy(self._pager)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor on the CPU."""
        return self._pager.mmu.ordinary_copy(self._pager).__reduce_ex__(protocol)


class PagedParameter(Paged, nn.Parameter):
    """A parameter whose storage is paged. `isinstance(p, nn.Parameter)` holds."""


class PagedTensor(Paged):
    """A gradient or a piece of optimizer state whose storage is paged."""


def access(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that touches the elements of the paged tensors, or views of such, that it names."""
    found = collect_tensors(Managed, args, kwargs)
    # A view may be an ordinary tensor for a moment, in another thread (`ordinary_views`).
    bindings: list[Any] = [getattr(tensor, "_pager", None) for tensor in found]
    if not bindings or None in bindings:
        return _access_views(func, args, kwargs, found)
    mmu = bindings[0].mmu
    if len(bindings) > 1:
        if any(binding.mmu is not mmu for binding in bindings):
            return _access_of_several_models(func, args, kwargs, bindings, ())
        parts = foreach.split(func, args, kwargs, bindings)
        if parts is not None:
            return foreach.join([access(func, part_args, kwargs) for part_args in parts])
    return mmu.run(bindings, func, args, kwargs)


def _access_views(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[Managed]) -> Any:
    """An operation that names ``found``: views, and perhaps paged tensors too."""
    bindings: list[Binding] = []
    views: list[View] = []
    stale = False
    for tensor in found:
        binding = getattr(tensor, "_pager", None)
        if binding is not None:
            bindings.append(binding)
            continue
        frames = getattr(tensor, "_pager_view", None)
        if frames is not None:
            views.append((tensor, frames))
            stale = stale or frames.is_stale()
    if not bindings and not views:
        with NoTorchFunction():
            return func(*args, **kwargs)
    mmu = (bindings[0] if bindings else views[0][1].binding).mmu
    if len(bindings) > 1:
        parts = foreach.split(func, args, kwargs, bindings)
        if parts is not None:
            return foreach.join([access(func, part_args, kwargs) for part_args in parts])
    one_model = all(binding.mmu is mmu for binding in bindings)
    if one_model and not stale and not in_dispatch_mode():
        return mmu.run(bindings, func, args, kwargs, views)
    use = object()
    pointed: list[Binding] = []
    try:
        for view, frames in views:
            frames.point_base(view, use, pointed)
        # Dispatch modes refuse classes that they do not know, and a view is of torch's own to them.
        with ordinary_views(Managed, args, kwargs) if in_dispatch_mode() else contextlib.nullcontext():
            if one_model:
                return mmu.run(bindings, func, args, kwargs, views)
            return _access_of_several_models(func, args, kwargs, bindings, views)
    finally:
        for binding in pointed:
            binding.mmu.exit([binding], use)


def _access_of_several_models(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bindings: list[Binding], views: Sequence[View]
) -> Any:
    """An operation on tensors of more than one managed model, such as an average of two."""
    mmu = bindings[0].mmu
    own = [binding for binding in bindings if binding.mmu is mmu]
    others = [binding for binding in bindings if binding.mmu is not mmu]
    use = object()
    leases: list[torch.Tensor] = []
    try:
        leases += mmu.enter(own, getattr(func, "__name__", "an operation"), use)
        return others[0].mmu.run(others, func, args, kwargs, views)
    finally:
        mmu.exit(own, use)
        leases.clear()
        mmu.aliases.follow(own)


def page_tensor(binding: Binding, cls: type[Paged]) -> None:
    """Turn ``binding.tensor`` into a paged tensor, in place: same object, its data the phantom."""
    tensor = binding.tensor
    binding.point_at(binding.phantom)
    tensor.__class__ = cls
    tensor._pager = binding  # type: ignore[attr-defined]


def unpage_tensor(binding: Binding, data: torch.Tensor) -> None:
    """Undo :func:`page_tensor`: an ordinary tensor again, holding ``data``."""
    make_ordinary(binding.tensor, binding.original_class, data)


def make_ordinary(tensor: torch.Tensor, cls: type, data: torch.Tensor) -> None:
    """Take a paged tensor's door off: it is of ``cls`` and holds ``data``."""
    set_data(tensor, data)
    tensor.__class__ = cls  # from here on it is out, whatever interrupts us
    del tensor._pager  # type: ignore[attr-defined]
