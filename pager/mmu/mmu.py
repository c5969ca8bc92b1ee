"""The memory-management unit: what happens to a paged tensor when an operation names it.

One operation, in order: the segments it names are noted in the timeline and acquired (faults, waits, pins);
each tensor is pointed at its frames; the operation runs; the tensors are pointed back at their phantoms. What
the operation returns may be a view of the frames; the storage's owner then keeps them pinned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pager.errors import ConfigError, PagerClosed
from pager.graph.access import can_hook, current_phase, pop_hooks, push_hooks
from pager.graph.access_trace import Phase
from pager.interrupts import uninterrupted
from pager.mmu.binding import Binding, NoTorchFunction, strided_view
from pager.mmu.clipping import Clipping
from pager.mmu.modes import in_forward_mode, in_transform, ordinary_tensors, without_dispatch_modes
from pager.mmu.saved_tensors import saving_frames
from pager.mmu.values import HomeAliases, cpu_tensor
from pager.mmu.view import VIEWS_UNSEEN, View, add_frames, count_writes, mark_views, run_on_views
from pager.page_table import PageState

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.engine import Engine
    from pager.engine.run import Run
    from pager.mmu.gradient import Gradients


# Torch's operations that write in place, not differentiable, and leave version counters as they were:
# GradScaler's unscaling, and the fused optimizer steps. They write to every tensor in their lists.
_WRITES_UNCOUNTED = ("_amp_foreach_", "_fused_")


_Tensor = torch.Tensor


class Mmu:
    """Bindings and accesses of one managed model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.closed = False
        self.bindings: dict[int, Binding] = {}
        # Interrupted optimizer steps: each is finished before anything reads or writes a value.
        self.unfinished: list[Callable[[], None]] = []
        self.aliases = HomeAliases(self)
        self.gradients: Gradients
        # Called where a step has let go of memory.
        self.look_at_heap: Callable[[], None] = lambda: None
        self.clipping = Clipping(self)
        # Where a segment's next forward use lies in the trace; the order of the optimizer's update.
        self.update_order: Callable[[int], int] = lambda segment: segment
        # Set by the paged model: give a binding another value (`pager.mmu.replacing`), or a segment of another dtype or
        # layout; undo a refused move.
        self.replace: Callable[[Binding, torch.Tensor], None]
        self.renew: Callable[[Binding, torch.Tensor], None]
        self.undo_move: Callable[[], None]
        # Whether parameters are the rounded values of masters: loading the same values again must not lose those.
        self.keeps_masters = False
        self._held: list[torch.Tensor] = []

    def bind(self, binding: Binding) -> None:
        """Make a binding known to the MMU and its segment to the engine."""
        self.bindings[binding.segment.index] = binding
        self.engine.register(binding.segment, binding.version)

    def unbind(self, segment: Segment) -> None:
        """Forget a segment that is no more."""
        self.bindings.pop(segment.index, None)
        self.engine.unregister(segment)

    # -- one operation -----------------------------------------------------------------------------

    def run(
        self,
        bindings: Sequence[Binding],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        views: Sequence[View] = (),
    ) -> Any:
        """Run ``func`` with the bound tensors resident; ``views`` of such, which it names too, are. Called with torch
        functions enabled; disables them inside.
        """
        name = getattr(func, "__name__", "an operation")
        use = object()
        leases: list[torch.Tensor] = []
        pushed: list[Any] = []
        try:
            if bindings:
                leases += self.enter(bindings, name, use)
            with NoTorchFunction():
                if name.startswith(_WRITES_UNCOUNTED):
                    return count_writes(bindings, views, func, args, kwargs)
                if not torch.is_grad_enabled():
                    result = func(*args, **kwargs)
                elif can_hook() and not (in_transform() and in_forward_mode()):
                    frames = {
                        lease.data_ptr(): binding for lease, binding in zip(leases, bindings, strict=True)
                    }
                    if views:
                        add_frames(frames, views)
                    push_hooks(saving_frames(frames), pushed)
                    result = func(*args, **kwargs)
                else:  # torch.func allows no hooks, or shows them wrappers
                    result = run_on_views(func, args, kwargs)
                # Asked here, since this is the way of every operation: nearly none makes a view.
                if type(result) is not _Tensor or result._is_view() or name in VIEWS_UNSEEN:
                    mark_views(result, leases, bindings, views, name)
                return result
        finally:
            if pushed:
                pop_hooks()
            self.exit(bindings, use)
            leases.clear()  # a traceback may keep this frame alive
            if self.aliases:
                self.aliases.follow([*bindings, *(frames.binding for _, frames in views)])

    def before_access(self, bindings: Sequence[Binding]) -> None:
        """Finish optimizer steps that were interrupted, updates of these tensors that waited for this, and the clipping
        of these gradients: nobody sees or disturbs half a step.
        """
        if self.unfinished:
            for finish in tuple(self.unfinished):
                finish()
        for binding in bindings:
            owner = binding.owner
            if owner.pending is not None:
                owner.pending.run(owner)
            if binding.scale is not None:
                self.clipping.apply(binding)

    def enter(self, bindings: Sequence[Binding], what: str, use: object) -> list[torch.Tensor]:
        """Make the tensors resident and point them at their frames; returns the leases that hold them.

        ``use`` stands for the operation until ``exit``, which must be called even if this raises.
        """
        self._check_open()
        with without_dispatch_modes():
            return self._enter(bindings, what, use)

    def _enter(self, bindings: Sequence[Binding], what: str, use: object) -> list[torch.Tensor]:
        self.before_access(bindings)
        if self.engine.transfers.has_sent:
            self.engine.transfers.forget_sent()
        if self.aliases:
            self.aliases.settle(bindings)
        self.note(bindings, current_phase())
        leases = self._use_fixed(bindings, use)
        absent = [binding for binding, lease in zip(bindings, leases, strict=True) if lease is None]
        if absent:
            self._check_values(absent, what)
            found = iter(self._bring(absent, what, use))
            leases = [next(found) if lease is None else lease for lease in leases]
        return [lease for lease in leases if lease is not None]

    def _use_fixed(self, bindings: Sequence[Binding], use: object) -> list[torch.Tensor | None]:
        """The leases of those that stay on the device, None for the others."""
        leases: list[torch.Tensor | None] = []
        for binding in bindings:
            # First the use, then the look: `unfix` in another thread looks in the other order.
            binding.users.add(use)
            lease, run = binding.fixed, binding.run
            if lease is None or run is None:
                binding.users.discard(use)
                leases.append(None)
                continue
            self.engine.use_again(run)
            leases.append(lease)
        return leases

    def point(self, binding: Binding, use: object) -> None:
        """Point a tensor of which a view is used at its frames until ``exit``: no access, the view is what is read."""
        with without_dispatch_modes():
            self._bring([binding], f"a view of {binding.name}", use)

    def _bring(self, bindings: Sequence[Binding], what: str, use: object) -> list[torch.Tensor]:
        """Leases on tensors that are somewhere, or nowhere yet, pointed at their frames."""
        wanted = [(binding.segment, 0, binding.segment.num_pages, False) for binding in bindings]
        with uninterrupted(), ordinary_tensors():
            runs = self.engine.acquire_all(wanted, what)
            leases = [self.engine.lease(run) for run in runs]
            with self.lock:
                for binding, run, lease in zip(bindings, runs, leases, strict=True):
                    binding.users.add(use)
                    if not binding.pointed:
                        binding.point_at(binding.typed(lease))
                        binding.pointed = True
                    if binding.keep and binding.fixed is None:
                        self._fix(binding, run, lease)
        return leases

    # -- what stays --------------------------------------------------------------------------------

    def _fix(self, binding: Binding, run: Run, lease: torch.Tensor) -> None:
        if not run.covers(0, binding.segment.num_pages):
            return
        run.stays = True
        self.engine.share(run, lease)
        binding.users.add(binding)
        binding.run, binding.fixed = run, lease

    def fix(self, bindings: Sequence[Binding]) -> None:
        """Bring these tensors, all of which have values, to where they stay from now on."""
        for binding in bindings:
            binding.keep = True
            use = object()
            try:
                self._bring([binding], f"placing {binding.name}", use)
            finally:
                self.exit([binding], use)

    def unfix(self, binding: Binding) -> None:
        """The tensor may be evicted again, once nobody uses it. Where it is to stay, its next use brings it back."""
        run = binding.run
        binding.fixed = binding.run = None
        if run is not None:
            run.stays = False
        self.exit([binding], binding)

    def exit(self, bindings: Sequence[Binding], use: object) -> None:
        """Point the tensors that nobody else uses back at their phantoms. Does nothing a second time."""
        for binding in bindings:
            binding.users.discard(use)
        if all(binding.fixed is not None for binding in bindings):
            return
        with uninterrupted(), self.lock:
            for binding in bindings:
                if not binding.users and binding.pointed:
                    binding.pointed = False
                    binding.point_at(binding.phantom)

    def note(self, bindings: Sequence[Binding], phase: int, *, write: bool = False) -> None:
        """Tell the timeline of one operation's accesses to whole segments."""
        engine = self.engine
        with engine.lock:
            engine.timeline.new_tick()
            for binding in bindings:
                engine.timeline.access(
                    binding.segment.index, 0, binding.segment.num_pages, write=write, phase=phase
                )

    def _check_values(self, bindings: Sequence[Binding], what: str) -> None:
        for binding in bindings:
            segment = binding.segment
            if int(self.engine.table.state[segment.first_page]) == PageState.EMPTY:
                raise ConfigError(
                    f"{what} reads {segment.kind} {segment.name!r}, which has no value: "
                    + (
                        "load a state dict, or pass init= to pager.manage, before using a model made on meta"
                        if segment.kind == "parameter"
                        else "it was set to None"
                    )
                )

    # -- single tensors ----------------------------------------------------------------------------

    def fault(
        self, binding: Binding, phase: int, *, overwrite: bool = False, what: str = "an access"
    ) -> tuple[Run, torch.Tensor]:
        """One whole tensor as an ordinary tensor over a fresh lease."""
        self._check_open()
        if self.aliases:
            self.aliases.settle([binding])
        self.note([binding], phase, write=overwrite or phase == Phase.GRADIENT)
        segment = binding.segment
        with uninterrupted(), ordinary_tensors(), without_dispatch_modes():
            run = self.engine.acquire_all([(segment, 0, segment.num_pages, overwrite)], what)[0]
            return run, binding.typed(self.engine.lease(run))

    def fault_saved(
        self, binding: Binding, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """What autograd saved of a tensor, on the device again."""
        with without_dispatch_modes():
            return self._fault_saved(binding, dtype, size, stride, offset)

    def _fault_saved(
        self, binding: Binding, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        self.before_access([binding])
        if self.aliases:
            self.aliases.settle([binding])
        segment = binding.segment
        self.note([binding], Phase.BACKWARD)
        use = object()
        fixed = self._use_fixed([binding], use)[0]
        if fixed is not None:
            # The view holds the frames; it need not be pointed at them.
            self.exit([binding], use)
            return strided_view(fixed.untyped_storage(), dtype, size, stride, offset)
        what = f"backward through {segment.name}"
        with uninterrupted(), ordinary_tensors():
            run = self.engine.acquire_all([(segment, 0, segment.num_pages, False)], what)[0]
            lease = self.engine.lease(run)
            self.engine.share(run, lease)
            return strided_view(lease.untyped_storage(), dtype, size, stride, offset)

    def escape(self, binding: Binding) -> torch.Tensor:
        """An ordinary tensor over the frames whose writes nobody counts: the pages are dirty as long as it
        lives.
        """
        self.before_access([binding])
        self._check_values([binding], "an access")
        run, tensor = self.fault(binding, current_phase())
        run.escaped = True
        binding.norm = None
        self.engine.share(run, tensor)
        return tensor

    def ordinary_copy(self, binding: Binding) -> torch.Tensor:
        """An ordinary tensor on the CPU with the values, of the class the tensor had before it was managed."""
        copied = cpu_tensor(self, binding, alias=False)
        if issubclass(binding.original_class, torch.nn.Parameter):
            with NoTorchFunction():
                return torch.nn.Parameter(copied, requires_grad=binding.tensor.requires_grad)
        return copied

    def hold_until_step(self, tensor: torch.Tensor) -> None:
        """Keep a lease to the end of the step, for a raw pointer that was given out."""
        self._held.append(tensor)

    def end_step(self) -> None:
        """Drop what was held to the end of the step; show its values in state dicts that are held."""
        self.release_held()
        self.gradients.end_step()
        self.clipping.end_step()
        self.aliases.refresh()

    def release_held(self) -> None:
        """Drop what was held to the end of the step."""
        self._held.clear()

    @contextlib.contextmanager
    def resident(self, bindings: Sequence[Binding]) -> Iterator[None]:
        """The tensors stay on the device and pointed at their frames; writes by raw pointer are kept."""
        use = object()
        leases: list[torch.Tensor] = []
        try:
            leases += self.enter(bindings, "resident()", use)
            with self.engine.lock:
                for binding, lease in zip(bindings, leases, strict=True):
                    for run in self.engine.runs_of(binding.segment):
                        run.escaped = True
                        self.engine.share(run, lease)
            yield
        finally:
            self.exit(bindings, use)
            leases.clear()
            self.engine.drain()

    def _check_open(self) -> None:
        if self.closed:
            raise PagerClosed("this model's pager is closed; call pager.manage(model) to page it again")
