"""The hooks a managed model carries: for its first batch, for tied names in state dicts, and for
``load_state_dict(assign=True)``.

Hooks live in the module's dictionaries, so they are copied and pickled with it. A copy of a managed model is
an ordinary one: its hooks must do nothing and need nothing of ours. So ours copy to an inert function of the
standard library.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from pager.runtime import Runtime

logger = logging.getLogger("pager.model_hooks")


def _inert(*args: Any) -> None:
    return


class _Hook:
    """A hook whose copies do nothing."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _inert

    def __reduce__(self) -> Any:
        # Takes any arguments and returns None, wherever it is unpickled.
        return functools.partial, (contextlib.nullcontext.__exit__, contextlib.nullcontext())


class _FirstBatch(_Hook):
    """Captures the plan from the first batch, before the model runs on it."""

    handle: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        import torch

        if not module.training or not torch.is_grad_enabled():
            return  # an evaluation; the first training step is what the plan is about
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint around the whole model recomputes it: the real step shows that, and is recorded
        if not self._runtime.manages_parameter_of(module):
            return  # torch.func.functional_call put other tensors in their place
        try:
            self._runtime.capture(args, kwargs)
        except Exception:
            self.handle.remove()
            raise
        self.handle.remove()  # after an interrupt the next batch is captured


class _Loaded(_Hook):
    """After ``load_state_dict``: parameters that were replaced (``assign=True``) become managed again."""

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        paged = self._runtime.paged
        for name, param in paged.find_new():
            paged.replace(name, param)
        if not incompatible_keys.missing_keys:
            self._runtime.torn.clear()


class _Saved(_Hook):
    """After ``state_dict()``: the names of one parameter share one tensor's memory, so that it is saved once. Who saves
    a torn model is told: the usual ``except: torch.save(...)`` would put it over the last good one.
    """

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if self._runtime.in_backward is not None:
            self._runtime.in_backward.look_for_tear()
        if self._runtime.torn:
            logger.warning(
                "this state dict is of a model that is torn: %s It mixes two steps; do not save it over the last one",
                self._runtime.torn,
            )
        first: dict[int, str] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            known = first.setdefault(id(param), prefix + name)
            if known != prefix + name and known in state and state.get(prefix + name) is not param:
                state[prefix + name] = state[known].detach()


class ModelHooks:
    """Registers the hooks on the root module and takes them off again."""

    def __init__(self, runtime: Runtime, *, wait_for_batch: bool) -> None:
        model = runtime.model
        self._handles = [
            model.register_load_state_dict_post_hook(_Loaded(runtime)),
            model.register_state_dict_post_hook(_Saved(runtime)),
        ]
        if wait_for_batch:
            first = _FirstBatch(runtime)
            first.handle = model.register_forward_pre_hook(first, with_kwargs=True)
            self._handles.append(first.handle)

    def remove(self) -> None:
        """Take the hooks off. Idempotent."""
        for handle in self._handles:
            handle.remove()
