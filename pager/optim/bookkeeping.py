"""One step's books (`pager.optim.books`): what each unit begins with, and what the step leaves.

1. ``step()`` is called; the user's hooks run. Then, before the class does anything, its books are kept (`Opening`).
2. The class runs on the user's own attributes without parameters (`pager.optim.stand_in`), and reads its groups.
3. Only now can gradients and group values not change any more: the update is made, its units run. Each begins with
   copies of the books; it must leave what a run without parameters leaves, else it is refused before it is committed.
4. The class's run ends: attributes and group values are what it made of them.

An exception in 3 puts the attributes back as they were at 1, so that the step, if it is called again, begins as it did.
Where the units are finished by something else than ``step()``, nobody runs the class to its end: then the user's
optimizer is given what the run without parameters has left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pager.errors import ConfigError
from pager.optim.books import Books, differences, kept, put, read
from pager.optim.held import check_states
from pager.optim.shadow import shadow_with

__all__ = ["Bookkeeping", "Opening"]


class Opening:
    """What a call of ``step()`` begins with: books, and the arguments that each unit is called with too."""

    def __init__(
        self, optimizer: Optimizer, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.books = kept(optimizer)
        self.args = args
        self.kwargs = dict(kwargs or {})

    def hand_on(self, closure: Any, result: Callable[[], Any]) -> None:
        """The closure was called: units are called with one that gives its result."""
        self.args = tuple(result if value is closure else value for value in self.args)
        self.kwargs = {key: result if value is closure else value for key, value in self.kwargs.items()}

    def undo(self, optimizer: Optimizer) -> None:
        """Attributes and entries are as they were; group values are not touched."""
        put(optimizer, self.books)


class Bookkeeping:
    """The books of one step of a user's class."""

    def __init__(self, optimizer: Optimizer, step: Callable[..., Any], opening: Opening | None) -> None:
        """``opening``: None for updates inside backward, which come before ``step()`` and begin with the books as they
        are then.
        """
        self._cls = type(optimizer)
        self._step = step
        self.opening = opening or Opening(optimizer)
        # Group values may have been changed by a closure since.
        self._before = self.opening.books.with_groups(optimizer)
        self._after: Books | None = None

    @property
    def after(self) -> Books:
        """What a run without parameters leaves. Raises what the class raises."""
        if self._after is None:
            shadow = shadow_with(self._cls, self._before, {}, {})
            self.run(shadow)
            self._after = read(shadow)
        return self._after

    def shadow(
        self,
        group_index: int,
        params: Sequence[torch.Tensor],
        states: Mapping[torch.Tensor, dict[str, Any]],
    ) -> Optimizer:
        """The optimizer as the step began with it, over these tensors."""
        return shadow_with(self._cls, self._before, {group_index: params}, states)

    def run(self, shadow: Optimizer) -> None:
        """The class's step, called as the user called it."""
        self._step(shadow, *self.opening.args, **self.opening.kwargs)

    def check(self, shadow: Optimizer, params: Sequence[torch.Tensor]) -> None:
        """``shadow`` has stepped ``params``. Raise ConfigError if it kept what it must not."""
        found = differences(self.after, read(shadow), values=False)
        if found:
            raise ConfigError(depends_on_parameters(self._cls, found))
        check_states(self._cls.__name__, (shadow.state[param] for param in params), params)

    def undo(self, optimizer: Optimizer) -> None:
        """Give the user's optimizer what the step began with: it is about to go on."""
        self.opening.undo(optimizer)

    def settle(self, optimizer: Optimizer) -> None:
        """Give the user's optimizer what the step leaves."""
        put(optimizer, self.after, since=self._before, groups=True)


def depends_on_parameters(cls: type[Optimizer], names: Sequence[str]) -> str:
    """The message for a class whose books depend on the parameters it sees."""
    return (
        f"{cls.__name__} cannot be managed: what its step() leaves in {', '.join(names)} depends on the parameters and "
        "gradients, and pager runs it on one parameter at a time. Keep what belongs to a parameter p in "
        "self.state[p]. A value that all parameters have a part in cannot be computed inside step(): compute it from "
        "the gradients before step() and put it into the parameter groups, or leave the optimizer's parameters out of "
        "pager.manage()."
    )
