"""The way out of a managed model, in an order in which it can stop anywhere and be taken up again.

1. pagerd ends, interrupted updates are finished;
2. optimizer states, then parameters and their gradients, become ordinary tensors, one by one; each is struck off the
   list when it is out;
3. only then are memory, file and caps given back: until then they hold values that exist nowhere else.

What can pass (Ctrl-C, a full disk) is raised from where it happened, and the next ``close()`` goes on from there. A
bug of ours would happen again: the value is read as it lies instead, everything is given back, and the first of such
errors is raised at the end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pager.errors import PagerInternalError
from pager.mmu import values
from pager.mmu.binding import strided_view
from pager.optim import stand_in
from pager.page_table import Home
from pager.policies.protocol import make_eviction_policy

if TYPE_CHECKING:
    from pager.mmu.binding import Binding
    from pager.runtime import Runtime


logger = logging.getLogger("pager")


class Closing:
    """Takes one runtime apart. Safe to call from several threads: the others wait for the first."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.RLock()
        self._inside = False
        self._failure: BaseException | None = None
        self._to_release: list[Callable[[], None]] | None = None

    def close(self) -> None:
        """Ordinary tensors on the CPU, nothing of ours left. Goes on where an earlier call was interrupted.

        Raises, when all is done, what failed in the background since the last step.
        """
        with self._lock:
            runtime = self._runtime
            if runtime.closed or self._inside:  # inside: called by a hook or finalizer of the user's
                return
            self._inside = True
            try:
                # Before anything is taken apart: a write to a held state dict may be refused here.
                runtime.mmu.aliases.settle_all()
                self._tell_of_tear()
                self._stop()
                self._take_out()
                self._release()
                runtime.closed = True
            finally:
                self._inside = False
            self._raise_failure()

    def _tell_of_tear(self) -> None:
        """Who trains on without pager should know: nobody refuses it then."""
        runtime = self._runtime
        if runtime.in_backward is not None:
            runtime.in_backward.look_for_tear()
        if runtime.torn:
            logger.warning(
                "closing a model that is torn: %s Load a state dict before training on", runtime.torn
            )

    def _stop(self) -> None:
        runtime = self._runtime
        runtime.pagerd.close()
        # The way out must not depend on a policy of the user's.
        runtime.engine.set_policy(make_eviction_policy("lru"))
        try:
            runtime.engine.raise_failure()
        except BaseException as error:  # raised at the end, when everything is out
            self._note(error)
        for adopted in runtime.optimizers:
            if not adopted.alive:
                continue
            try:
                adopted.finish()
            except PagerInternalError as error:
                self._note(error)
                adopted.give_up(error)
        if runtime.on_cpu is not None:
            runtime.on_cpu.close()

    def _take_out(self) -> None:
        runtime = self._runtime
        for adopted in runtime.optimizers:
            if adopted.alive:
                adopted.close(self._value)
        if runtime.fitting is not None:
            runtime.fitting.close()
        for binding in runtime.mmu.bindings.values():
            runtime.mmu.unfix(binding)
        runtime.paged.take_out_model(self._value)

    def _value(self, binding: Binding) -> torch.Tensor:
        try:
            return values.cpu_tensor(self._runtime.mmu, binding, alias=True)
        except PagerInternalError as error:
            self._note(error)
            return self._as_it_lies(binding)

    def _as_it_lies(self, binding: Binding) -> torch.Tensor:
        """The value past the engine: the bytes at home, under those on the device."""
        engine = self._runtime.engine
        segment = binding.segment
        self._synchronize()
        data = torch.zeros(segment.num_bytes, dtype=torch.uint8)
        home = Home(int(engine.table.home[segment.first_page]))
        if home == Home.HOST:
            frame = int(engine.table.home_frame[segment.first_page])
            data.copy_(self._runtime.host.view(frame, segment.num_bytes))
        elif home == Home.DISK:
            data.copy_(engine.transfers.read_disk_home(segment))
        for run in engine.runs_of(segment):
            if run.frame >= 0:
                begin = run.first * segment.page_size
                resident = engine.arena.bytes_of(run.frame, run.num_bytes)
                data[begin : begin + run.num_bytes].copy_(resident)
        value = strided_view(data.untyped_storage(), segment.dtype, segment.size, segment.stride)
        scale = binding.scale
        return value if scale is None or scale.factor is None else value.mul_(scale.factor.cpu())

    def _release(self) -> None:
        """Give everything back, whatever fails on the way."""
        runtime = self._runtime
        if self._to_release is None:
            self._to_release = [
                lambda: stand_in.unwatch(runtime.mmu),
                self._shut_the_door,
                runtime.engine.drain,
                runtime.budget.close,
                runtime.engine.transfers.stop,
                self._synchronize,
                runtime.engine.transfers.close,
                runtime.host.close,
                *([runtime.disk.close] if runtime.disk is not None else []),
                runtime.arena.close,
                runtime.device.close,
            ]
        while self._to_release:
            try:
                self._to_release[0]()
            except Exception as error:
                self._note(error)
            del self._to_release[0]

    def _shut_the_door(self) -> None:
        self._runtime.mmu.closed = True
        self._runtime.mmu.release_held()

    def _synchronize(self) -> None:
        device = self._runtime.device
        for stream in (device.current_stream(), *device.own_streams):
            stream.synchronize()

    def _note(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _raise_failure(self) -> None:
        error, self._failure = self._failure, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it and its traceback would keep each other alive
