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

from pager.errors import ConfigError
from pager.mmu.parameter import PagedParameter
from pager.optim.bookkeeping import Opening
from pager.optim.books import is_same, values_of
from pager.optim.shadow import is_shadow, may_wait

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

    def __init__(
        self,
        adopted: AdoptedOptimizer,
        closure: Callable[[], Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """``args``, ``kwargs``: what ``step`` is called with, the closure among it."""
        self.adopted = adopted
        self._closure = closure
        self._arguments = args, kwargs
        self._ready = closure is None
        self._empty_groups: list[dict[str, Any]] | None = None
        # Of a class of the user's: what it begins with, and whether it takes up a step that was interrupted.
        self.opening: Opening | None = None
        self._resumes = False

    def begin(self) -> None:
        """The user's hooks have run, and the class is next."""
        self._resumes = self.adopted.take_up(may_resume=self._closure is None)
        self.opening = Opening(self.adopted.optimizer, *self._arguments)

    def closure(self) -> Any:
        """The user's closure; after it the gradients are the ones to use."""
        assert self._closure is not None
        opening = self.opening
        for group, seen in zip(self.adopted.optimizer.param_groups, self._empty_groups or (), strict=False):
            if not is_same(values_of(group), values_of(seen)):
                raise ConfigError(
                    f"{type(self.adopted.optimizer).__name__} changes its parameter groups before it calls the "
                    "closure, which may still change what they are. Let it call the closure first."
                )
        result = self._closure()
        if opening is not None:
            opening.hand_on(self._closure, lambda: result)
        self._ready, self._empty_groups = True, None
        return result

    def groups(self) -> list[dict[str, Any]]:
        groups = self.adopted.optimizer.param_groups
        if not self._ready and self._empty_groups is None:
            none_yet = _NoneYet(type(self.adopted.optimizer).__name__)
            self._empty_groups = [{**group, "params": none_yet} for group in groups]
        if self._empty_groups is None:
            # Not before: the user's own hooks before the step may still change gradients and group values.
            try:
                self.adopted.begin_step(self.opening)
                self.adopted.finish(in_step=True)
            except BaseException:
                if self.opening is not None:
                    self.opening.undo(self.adopted.optimizer)
                raise
            self._empty_groups = [{**group, "params": []} for group in groups]
        return self._empty_groups

    def end(self) -> None:
        """The class's step returned: keep what it changed in its groups, and end the step."""
        adopted = self.adopted
        if adopted.update is None:
            adopted.begin_step(self.opening)
        if self._resumes and adopted.update is not None:
            # Whatever finished it in between has done this already, or not.
            adopted.update.settle_books()
            self._empty_groups = None
        for group, seen in zip(adopted.optimizer.param_groups, self._empty_groups or [], strict=False):
            for key, value in seen.items():
                if key != "params" and group.get(key) is not value:
                    group[key] = value
        adopted.end_step()


class _NoneYet(list[Any]):
    """The parameters of a group before the closure was called, when the update has not begun."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _refuse(self, *args: Any) -> Any:
        raise ConfigError(
            f"{self._name} looks at its parameters before it calls the closure that step() was given, or does not call "
            "it. pager updates them after it. Let the class call the closure first, or call step() without one."
        )

    __iter__ = __len__ = __bool__ = __getitem__ = __contains__ = __add__ = __radd__ = _refuse


_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
# Weak, so that a model nobody closed can be collected.
_adopters: list[tuple[weakref.ref[Any], weakref.WeakMethod[Adopt]]] = []
_handles: list[Any] = []
# The key of our hook among an optimizer's own, which are numbered.
_LAST = "pager"
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
    call = _Call(adopted, closure, args[1:], kwargs)
    if not may_wait(type(optimizer)):
        for value in (*args[1:], *kwargs.values()):
            _check_argument(optimizer, value, closure)
        # The last of the hooks before the step, also if one that raised has left it among them; torch goes through
        # them after this.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.pop(_LAST, None)
        hooks[_LAST] = _last_before
    if closure is not None:
        args = tuple(call.closure if value is closure else value for value in args)
        kwargs = {key: call.closure if value is closure else value for key, value in kwargs.items()}
    _calls[optimizer] = call
    return (_make_stand_in(optimizer, call), *args[1:]), kwargs


def _check_argument(optimizer: Optimizer, value: Any, closure: Any) -> None:
    if value is not closure and not isinstance(value, (bool, int, float, str, type(None))):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() was given a {type(value).__name__}; pager runs it on one parameter at "
            "a time, and can hand on a closure, numbers and strings. Put the value into the parameter groups."
        )


def _last_before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = _calls.get(optimizer)
    if call is not None and call.opening is None:
        call.begin()


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._optimizer_step_pre_hooks.pop(_LAST, None)  # type: ignore[call-overload]
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
