"""The part of an optimizer step that waits until its parameters are used next.

``optimizer.step()`` owes the user new values, not their computation. So a parameter whose update can stream is only
marked: the step's group values and gradients are kept, and whoever touches the parameter (or its gradient, or its
states) next finishes its update first, on the stream where it is needed. In a training loop that is the next
forward, so the states stream underneath its compute, in the order in which the forward needs the parameters.

What must be seen at once is: values of the state that are not shaped like the parameter (Adam's ``step``) move on
before ``step()`` returns, by running the user's class on one-element stand-ins.

Nothing is lost by waiting: a state dict, another step, ``close()`` finish what is left. A gradient that the user
drops meanwhile (``zero_grad()``) is kept, unseen, until its update has run.

A view of the parameter or of a state that somebody holds shows, in torch, the new values as soon as ``step()`` is
over, and nobody asks before it is read. So an update waits only where there is none.

Only torch's own optimizers wait. A class of the user's may look at values and raise; that belongs into ``step()``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from pager.interrupts import uninterrupted
from pager.mmu.binding import num_storage_users
from pager.mmu.modes import apart
from pager.optim.units import make_stand_ins, show_scalars

if TYPE_CHECKING:
    from pager.mmu.binding import Binding
    from pager.optim.streamed import StreamedUnit
    from pager.optim.update import Update
    from pager.optim.update_stream import UpdateStream


def is_viewed(binding: Binding) -> bool:
    """Whether somebody may hold a view of the tensor's frames."""
    engine = binding.mmu.engine
    lease = binding.fixed
    num_leases = sum(run.pins for run in engine.runs_of(binding.segment))
    if lease is None:
        return num_leases > 0
    if num_leases > 1:
        return True
    # Views of what stays share the storage of its one lease, beside the tensor that is pointed at it. Where nobody
    # tells how many, nothing that stays waits.
    users = num_storage_users(lease)
    return users is None or users > 2


class Deferred:
    """The waiting units of one step, by parameter, in the order of the next forward."""

    def __init__(self, update: Update, units: list[StreamedUnit]) -> None:
        self._update = update
        self._units: dict[Binding, list[StreamedUnit]] = {}
        for unit in units:
            self._units.setdefault(unit.progress.binding, []).append(unit)
        self._released: set[Binding] = set()
        self._lock = threading.RLock()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not self._units

    def begin(self) -> None:
        """``step()`` is about to return: what the user can see moves on, and the first states are on their way."""
        with isolated(self._update):
            # Before all else: the host may be far ahead of the device, and the link has nothing to do until then.
            self._fetch_ahead()
            for progress, new in self._new_scalars():
                progress.new_scalars = new
            with uninterrupted():
                show_scalars(self._update, [units[0].progress for units in self._units.values()])
                for binding, units in self._units.items():
                    for unit in units:
                        unit.note(self._update.adopted)
                    # For autograd the parameter has changed now: it must refuse a graph from before the step.
                    binding.bump_version()
                    self._update.adopted.masters.written(binding)
                    binding.pending = self

    def _new_scalars(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        update = self._update
        by_group: dict[int, list[Any]] = {}
        for units in self._units.values():
            by_group.setdefault(units[0].progress.group_index, []).append(units[0].progress)
        for group_index, members in by_group.items():
            new = update.run_class(group_index, *make_stand_ins(update, members))
            for progress, state in zip(members, new, strict=True):
                yield progress, {key: value for key, value in state.items() if key in progress.scalars}

    def is_released(self, binding: Binding) -> bool:
        """Whether the user has dropped the gradient that the waiting update still needs."""
        return binding in self._released

    def release(self, binding: Binding) -> None:
        """The user drops the gradient: it goes when the update has run."""
        self._released.add(binding)

    def run(self, binding: Binding) -> None:
        """Finish the update of one parameter; does nothing where it is done."""
        with self._lock:
            units = self._units.get(binding)
            if units is None:
                return
            update = self._update
            try:
                with isolated(update):
                    while units:
                        units[0].run(update)
                        del units[0]
                        self._fetch_ahead()
            except Exception as error:
                if update.refused:
                    self.give_up()
                    update.adopted.torn.gave_up(update.optimizer_class, error, half_done=True)
                raise
            with uninterrupted():
                self._forget(binding)

    def run_all(self) -> None:
        """Finish all that is left, in order."""
        while self._units:
            self.run(next(iter(self._units)))

    def run_beside(self, stream: UpdateStream) -> None:
        """Enqueue all of it, in order, on the stream beside the compute."""
        for binding, units in list(self._units.items()):
            scalars = [
                value for value in units[0].progress.scalars.values() if isinstance(value, torch.Tensor)
            ]
            with stream.lend(None, scalars):
                self.run(binding)

    def give_back(self) -> None:
        """What was fetched ahead is not wanted now."""
        for units in self._units.values():
            for unit in units:
                self._update.adopted.engine.staging.give_back(unit)

    def give_up(self) -> None:
        """Drop all that is left."""
        self.give_back()
        for binding in list(self._units):
            self._forget(binding)

    def _forget(self, binding: Binding) -> None:
        del self._units[binding]
        binding.pending = None
        if binding in self._released and binding.gradient is not None:
            self._update.adopted.engine.discard(binding.gradient.segment)
        if not self._units:
            self._update.end()

    def _fetch_ahead(self) -> None:
        adopted = self._update.adopted
        if not adopted.engine.staging.has_free_slot:
            return
        for units in self._units.values():
            for unit in units:
                if not unit.fetch(adopted):
                    return


def isolated(update: Update) -> contextlib.AbstractContextManager[Any]:
    """Run an update from inside whatever the user is doing: a forward under autocast, in inference mode, under a
    dispatch mode of a checkpoint. None of it may see, or change, the update.
    """
    return apart(update.adopted.engine.device.torch_device.type)
