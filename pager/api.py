"""The public face: :func:`manage` and the :class:`Handle` it leaves at ``model.pager``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pager.config import Config
from pager.engine.checked_policy import CheckedPolicy
from pager.errors import ConfigError
from pager.graph.plan import Plan
from pager.model_hooks import ModelHooks
from pager.policies.protocol import make_eviction_policy
from pager.runtime import Runtime
from pager.statistics import Statistics

M = TypeVar("M", bound=nn.Module)


def manage(model: M, optimizer: Any = None, *, config: Config | None = None, **knobs: Any) -> M:
    """Page the parameters, gradients and optimizer state of ``model``; the same module comes back.

    ``optimizer``: a torch optimizer over the model's parameters, or several with disjoint ones, or None: an
    optimizer made before or after is found at its first step. ``config`` and ``knobs``: see
    :class:`pager.Config`; knobs win. The model may be on the CPU (its tensors move into pages one by one), on
    the compute device, or on meta (each module's own ``reset_parameters``, or ``init=``, gives its values;
    what has neither waits for ``load_state_dict``).

    The handle is ``model.pager``. Raises ConfigError (a ValueError) or TypeError for a model, optimizer or
    knob that cannot work, BudgetError where a budget cannot hold it; the model is then as it was.
    """
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is a {type(config).__name__}; expected a pager.Config")
    settings = (config or Config()).replace(**knobs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"pager.manage() takes a torch.nn.Module, not a {type(model).__name__}")
    present = getattr(model, "pager", None)
    if isinstance(present, Handle):
        raise ConfigError(
            "this model is managed already; call model.pager.close() first, or model.pager.set() for knobs"
        )
    if present is not None:
        raise ConfigError(
            "the model has an attribute 'pager' of its own, where the handle would go; rename it"
        )
    optimizers = _list_optimizers(optimizer)
    _check_optimizers(model, optimizers)
    runtime = Runtime(model, settings, optimizers)
    handle = Handle(runtime)
    model.pager = handle  # type: ignore[assignment]
    return model


def _list_optimizers(optimizer: Any) -> list[Optimizer]:
    """The optimizers in what the user passed: None, one, or several."""
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for item in found:
        if not isinstance(item, Optimizer):
            raise TypeError(
                f"optimizer is a {type(item).__name__}; expected a torch.optim.Optimizer, or a list of them"
            )
    return found


def _check_optimizers(model: nn.Module, optimizers: list[Any]) -> None:
    own = {id(param) for param in model.parameters()}
    for optimizer in optimizers:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(id(param) in own for param in params):
            raise ConfigError(
                f"none of the {len(params)} parameters of {type(optimizer).__name__} is a parameter of this "
                f"{type(model).__name__}; pass the model the optimizer was made for"
            )


class Handle:
    """What ``model.pager`` is: the plan, statistics, knobs, and the way out. Methods raise PagerClosed after
    ``close()``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._hooks = ModelHooks(runtime, wait_for_batch=runtime.planner.trace is None)

    @property
    def config(self) -> Config:
        """The knobs in force."""
        self._runtime.check_open()
        return self._runtime.boundary.config

    @property
    def plan(self) -> Plan:
        """The page-distance plan as it stands. Without ``example_inputs`` it waits for the first batch, and
        says so.
        """
        self._runtime.check_open()
        runtime = self._runtime
        return runtime.planner.plan(
            budgets={
                "device": runtime.page_bytes_on_device(),
                "host": runtime.host_cap.budget_bytes,
                "disk": runtime.disk.budget_bytes if runtime.disk is not None else None,
            },
            # A fresh one: what the running one knows of the past would colour the prediction.
            policy=CheckedPolicy(make_eviction_policy(runtime.boundary.config.eviction)),
        )

    def statistics(self) -> Statistics:
        """What happened since ``manage()``: an immutable snapshot."""
        self._runtime.check_open()
        return self._runtime.statistics()

    def resident_history(self) -> list[tuple[float, int]]:
        """(seconds since ``manage()``, resident device bytes) at each change, the latest 65536 of them."""
        self._runtime.check_open()
        return self._runtime.counters.resident_history()

    def set(self, **knobs: Any) -> None:
        """Change ``prefetch_distance`` or ``eviction`` at the next step boundary (at once where the policy had failed),
        or ``host_budget``: now where it holds what is in use once the pageable part is given back; a smaller one at the
        next step boundary, where homes move to the disk. With a larger one they come back, a part at each boundary.

        Raises ConfigError or TypeError at once for values that cannot work and for knobs that cannot change,
        BudgetError, before anything changes, for a host budget that cannot be had even so; it names the least that can.
        If the disk fails at the boundary the budget stays what it was, and the next access raises the TierIOError.
        """
        self._runtime.check_open()
        self._runtime.boundary.set(**knobs)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """With ``update_at="backward"``: a micro-batch that is not the last of its step. Its backward only adds to the
        gradients; the backward after it, outside, updates. Does nothing with ``update_at="step"``.
        """
        self._runtime.check_open()
        in_backward = self._runtime.in_backward
        if in_backward is None or in_backward.accumulating:
            yield
            return
        in_backward.accumulating = True
        try:
            yield
        finally:
            in_backward.accumulating = False

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients of all parameters by their total norm; returns that norm, a 0-dim tensor on the device.

        The same bits as ``torch.nn.utils.clip_grad_norm_(model.parameters(), ..., foreach=False)``, which works too,
        but pages gradients in and out. Here norms are taken as gradients arrive (from the second call on; a gradient
        that was changed since, as by ``GradScaler.unscale_``, is read again) and the update does the scaling.

        Raises ConfigError with ``update_at="backward"``, RuntimeError for a norm that is not finite if
        ``error_if_nonfinite`` (which waits for the device).
        """
        self._runtime.check_open()
        if self._runtime.in_backward is not None:
            raise ConfigError(
                "clip_grad_norm_() needs all gradients before the first update, but with update_at='backward' each is "
                "used up as soon as it is final. Manage the model with update_at='step' to clip."
            )
        return self._runtime.mmu.clipping.clip(
            self._runtime.model.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @contextlib.contextmanager
    def resident(self, module: nn.Module) -> Iterator[None]:
        """Keep ``module``'s parameters on the device, for code that bypasses Python dispatch (C++ extensions,
        raw pointers).

        Raises BudgetError if they do not fit together, ConfigError if none of them is managed here.
        """
        self._runtime.check_open()
        bindings = self._runtime.bindings_of(module)
        if not bindings and not self._runtime.paged.holds_small(module):
            raise ConfigError(f"{type(module).__name__} has no parameters that are managed here")
        with self._runtime.mmu.resident(bindings):
            yield

    def close(self) -> None:
        """Make model and optimizers ordinary again, on the CPU, values intact.

        After an exception (Ctrl-C, a disk that failed) call it again: it goes on from where it stood. When all is
        done a further call does nothing. A failure in the background is raised at the end.
        """
        runtime = self._runtime
        try:
            runtime.close()
        finally:
            if runtime.closed:
                self._hooks.remove()
                if runtime.model.__dict__.get("pager") is self:
                    del runtime.model.__dict__["pager"]

    def __repr__(self) -> str:
        state = "closed" if self._runtime.closed else f"{len(self._runtime.paged.bindings)} paged parameters"
        return f"<pager.Handle: {state}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a managed model is an ordinary one; it has no handle."""
        return None

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(None), ()
