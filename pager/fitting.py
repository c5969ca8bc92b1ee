"""A model whose whole training state fits the device: nothing is paged, and nothing stands in the way.

Full residency costs nothing only if the door comes off too: parameters stay ordinary ones on the compute device,
their updates are the optimizer's own. What remains is the handle: a plan (every page has its home on the device),
statistics, step boundaries, and ``close()``. The optimizer's steps are seen through torch's global hooks, at the
cost of a set lookup.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from pager.bill import ASSUMED_STATES
from pager.graph.access_trace import AccessRow, Phase
from pager.homes import Homes
from pager.optim.shadow import move_state
from pager.page_table import Home
from pager.step_boundary import Round

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.model_checks import Parameters


class FittingModel:
    """The segments of a model that fits, for its plan, and the watch on its optimizers' steps."""

    def __init__(
        self, parameters: Parameters, homes: Homes, device: torch.device, end_step: Callable[[], None]
    ) -> None:
        self.segment_of: dict[nn.Parameter, int] = {}
        self.gradient_of: dict[int, int] = {}
        self.num_bytes = 0
        self._updated_together: list[list[Segment]] = []
        self._device = device
        self._end_step = end_step
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._round = Round()
        self._own: set[int] = {id(param) for _, param in (*parameters.paged, *parameters.small)}
        for name, param in parameters.paged:
            self._make_segments(name, param, homes)
        # torch's hooks live as long as the process: they must not keep a dropped model's runtime alive.
        before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        handles = [
            register_optimizer_step_pre_hook(lambda *call: _if_alive(before, *call)),
            register_optimizer_step_post_hook(lambda *call: _if_alive(after, *call)),
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    def _make_segments(self, name: str, param: nn.Parameter, homes: Homes) -> None:
        layout: dict[str, Any] = {"size": param.size(), "stride": param.stride(), "dtype": param.dtype}
        own = homes.new_segment(name=name, kind="parameter", home=Home.DEVICE, **layout)
        self.segment_of[param] = own.index
        made = [own]
        if param.requires_grad:
            gradient = homes.new_segment(name=name, kind="gradient", home=Home.DEVICE, **layout)
            self.gradient_of[own.index] = gradient.index
            states = [f"{name}.state{index}" for index in range(ASSUMED_STATES)]
            made += [
                gradient,
                *(homes.new_segment(name=s, kind="state", home=Home.DEVICE, **layout) for s in states),
            ]
        if len(made) > 1:
            self._updated_together.append(made)
        self.num_bytes += sum(segment.num_pages * segment.page_size for segment in made)

    def expected_rows(self) -> list[AccessRow]:
        """The accesses of an optimizer step, one tick a parameter."""
        return [
            AccessRow(tick, segment.index, 0, segment.num_pages, True, Phase.UPDATE)
            for tick, segments in enumerate(self._updated_together)
            for segment in segments
        ]

    def adopt(self, optimizers: Iterable[Optimizer]) -> None:
        """Bring the optimizers' existing states to where the parameters are."""
        for optimizer in optimizers:
            move_state(optimizer, self._device)
            self._optimizers.add(optimizer)

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        return any(id(param) in self._own for group in optimizer.param_groups for param in group["params"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers and self._holds_ours(optimizer):
            self.adopt([optimizer])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._optimizers and self._round.is_over(optimizer, self._optimizers):
            self._end_step()

    def close(self) -> None:
        """Stop watching; the optimizers' states follow the parameters to the CPU."""
        self._remove_hooks()
        for optimizer in self._optimizers:
            move_state(optimizer, torch.device("cpu"))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _if_alive(method: weakref.WeakMethod[Callable[..., None]], *call: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*call)
