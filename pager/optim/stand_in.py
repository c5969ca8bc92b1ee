"""Finding users' optimizers at their ``step()``, and redirecting it.

torch calls global hooks around every optimizer's step. Ours looks whether the optimizer holds paged
parameters; if so, the class's own ``step`` is run not on the user's object but on a *stand-in*: an object of
a subclass that shares the user's ``__dict__`` (so counters, ``grad_scale`` and the like are the user's) and
differs only in ``param_groups``. Reading those runs the paged update, once, and answers groups without
parameters; so the class does its bookkeeping, evaluates a closure when it would, and finds nothing left to
update.

Nothing is replaced on the user's object: ``step`` stays what schedulers, GradScaler and wrappers made of it,
hooks fire once and in their order, and an optimizer made before, after or without ``manage`` is found all the
same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pager.mmu.parameter import PagedParameter
from pager.optim.shadow import is_shadow

if TYPE_CHECKING:
    from pager.optim.adopted import AdoptedOptimizer

# Answers the adopted optimizer for a user's optimizer whose parameters it manages, adopting it if need be.
Adopt = Callable[[Optimizer], "AdoptedOptimizer"]


class _StandIn:
    """Mixed into the user's optimizer class; the instance shares the user's ``__dict__``."""

    __slots__ = ("pager_call",)
    pager_call: _Call

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Empty groups; reading them updates the paged parameters, once the closure (if any) was evaluated."""
        return self.pager_call.groups()

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups


class _Call:
    """One call of ``step``: when to update, and which group values the class changed."""

    def __init__(self, adopted: AdoptedOptimizer, closure: Callable[[], Any] | None) -> None:
        self.adopted = adopted
        self._closure = closure
        self._ready = closure is None
        self._empty_groups: list[dict[str, Any]] | None = None

    def closure(self) -> Any:
        """The user's closure; after it the gradients are the ones to use."""
        assert self._closure is not None
        result = self._closure()
        self._ready = True
        return result

    def groups(self) -> list[dict[str, Any]]:
        if not self._ready:
            return self.adopted.optimizer.param_groups
        if self._empty_groups is None:
            # Not before: the user's own hooks before the step may still change gradients and group values.
            self.adopted.begin_step()
            self.adopted.finish(in_step=True)
            self._empty_groups = [{**group, "params": []} for group in self.adopted.optimizer.param_groups]
        return self._empty_groups

    def end(self) -> None:
        """The class's step returned: keep what it changed in its groups, and end the step."""
        if self.adopted.update is None:
            self.adopted.begin_step()
        for group, seen in zip(self.adopted.optimizer.param_groups, self._empty_groups or [], strict=False):
            for key, value in seen.items():
                if key != "params" and group.get(key) is not value:
                    group[key] = value
        self.adopted.end_step()


_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
# Weak, so that a model nobody closed can be collected.
_adopters: list[tuple[weakref.ref[Any], weakref.WeakMethod[Adopt]]] = []
_handles: list[Any] = []
_calls: weakref.WeakKeyDictionary[Optimizer, _Call] = weakref.WeakKeyDictionary()


def watch(mmu: Any, adopt: Adopt) -> None:
    """Redirect the steps of optimizers over parameters of ``mmu``."""
    _adopters.append((weakref.ref(mmu), weakref.WeakMethod(adopt)))
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def unwatch(mmu: Any) -> None:
    """Undo :func:`watch`; with the last one torch's global hooks are ours no more."""
    _adopters[:] = [(ref, adopt) for ref, adopt in _adopters if ref() is not None and ref() is not mmu]
    if not _adopters:
        while _handles:
            _handles.pop().remove()


def _adopter_of(optimizer: Optimizer) -> Adopt | None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if type(param) is PagedParameter:
                for ref, adopt in _adopters:
                    if ref() is param._pager.mmu:
                        return adopt()
    return None


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(optimizer, _StandIn) or is_shadow(optimizer):
        return None
    adopt = _adopter_of(optimizer)
    if adopt is None:
        return None
    adopted = adopt(optimizer)
    adopted.torn.check()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    call = _Call(adopted, closure)
    if closure is not None:
        kwargs = {**kwargs, "closure": call.closure}
        args = (args[0], *args[2:])
    _calls[optimizer] = call
    return (_make_stand_in(optimizer, call), *args[1:]), kwargs


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = _calls.pop(optimizer, None)
    if call is not None:
        call.end()


def _make_stand_in(optimizer: Optimizer, call: _Call) -> Optimizer:
    cls = type(optimizer)
    mixed = _classes.get(cls)
    if mixed is None:
        mixed = type(cls.__name__, (_StandIn, cls), {"__module__": cls.__module__})
        _classes[cls] = mixed
    stand_in: Any = object.__new__(mixed)
    stand_in.__dict__ = optimizer.__dict__
    stand_in.pager_call = call
    result: Optimizer = stand_in
    return result
