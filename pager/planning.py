"""From a captured or recorded step to the trace the engine follows and the plan users look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec
from pager.graph.capture import Capture, capture
from pager.graph.cost_model import Ceilings, estimate_tick_seconds
from pager.graph.plan import WAITING, Plan, make_plan
from pager.page_table import Home

if TYPE_CHECKING:
    from pager.address_space import AddressSpace, Segment
    from pager.page_table import PageTable
    from pager.policies.protocol import EvictionPolicy

RECORDED = "recorded first step"
_WAYS = {"meta": "captured on meta", "fake": "captured on fake tensors", "recorded": RECORDED}


class Planner:
    """Keeps the one-micro-batch trace of a managed model and makes plans of it."""

    def __init__(self, model: nn.Module, space: AddressSpace, table: PageTable, page_size: int) -> None:
        self._model = model
        self._space = space
        self._segments: Sequence[Segment] = space.segments
        self._table = table
        self._page_size = page_size
        self.trace: AccessTrace | None = None
        self.way = WAITING
        self.note = ""
        self.wrong_inputs: str | None = None
        self.peak_activation_bytes: int | None = None
        self._capture: Capture | None = None
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._plan: Plan | None = None
        self._planned = (0, 0)  # segments, and retired ones, that the plan was made for
        self._digraph: Any = None
        # What estimated seconds are multiplied by, once a step was measured.
        self.is_measured = False
        self._scale = 1.0
        self._num_gradients: dict[int, int] = {}
        self._first_use: dict[int, int] = {}

    def capture(
        self,
        managed: dict[nn.Parameter, int],
        gradients: Mapping[int, int],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        device: torch.device,
        shared: Sequence[object],
    ) -> AccessTrace | None:
        """Run one step without data; the trace of its forward and backward, None if the model cannot do that.

        ``managed``: the segment of each parameter; ``gradients``: that of its gradient, by the parameter's.
        """
        own = {id(param) for param in self._model.parameters()}
        managed = {param: index for param, index in managed.items() if id(param) in own}
        if not managed:
            return None
        found = capture(self._model, managed, args, kwargs, device=device, shared=shared)
        self.way = _WAYS[found.way]
        self.note = found.reason or ""
        self.wrong_inputs = found.wrong_inputs
        self._plan = None
        if found.way == "recorded":
            return None
        self._capture = found
        self._digraph = None
        self._inputs = tree_map_only(torch.Tensor, _without_data, (tuple(args), dict(kwargs)))
        self.peak_activation_bytes = found.peak_activation_bytes
        segment = found.rows["segment"].astype(np.int64)
        is_gradient = found.rows["phase"] == Phase.GRADIENT
        segment[is_gradient] = [gradients.get(int(index), int(index)) for index in segment[is_gradient]]
        pages = np.array([s.num_pages for s in self._segments], np.int64)
        trace = AccessTrace(
            tick=found.rows["tick"],
            segment=segment,
            first_page=np.zeros(len(segment), np.int64),
            num_pages=pages[segment],
            write=found.rows["write"] | is_gradient,
            phase=found.rows["phase"],
        )
        # Of one backward; a recording may have several.
        columns = np.unique(segment[is_gradient], return_counts=True)
        self._num_gradients = dict(zip(*(column.tolist() for column in columns), strict=True))
        self._set(trace)
        return self.trace

    def with_update(self, rows: Sequence[AccessRow]) -> AccessTrace | None:
        """Add what the optimizer step accesses; the trace of the whole step."""
        if self.trace is None:
            return None
        self._set(self.trace.with_update(renumbered(rows)))
        return self.trace

    def record(self, rows: Sequence[AccessRow]) -> AccessTrace:
        """Replace the trace by what a real step did."""
        order = [row for row in rows if row.phase != Phase.UPDATE] + [
            row for row in rows if row.phase == Phase.UPDATE
        ]
        self.way = RECORDED
        self._capture = None
        self._set(AccessTrace.from_rows(renumbered(order)))
        assert self.trace is not None
        return self.trace

    def _set(self, trace: AccessTrace) -> None:
        flops = moved = None
        if self._capture is not None:
            extra = trace.num_ticks - self._capture.num_ticks
            flops = np.concatenate([self._capture.flops, np.zeros(extra)])
            moved = np.concatenate([self._capture.moved_bytes, np.zeros(extra)])
        seconds = estimate_tick_seconds(
            trace, self._page_size, flops_per_tick=flops, moved_bytes_per_tick=moved
        )
        self.trace = trace.with_seconds(seconds * self._scale)
        self._plan = None
        self._first_use = {}
        for row, segment in reversed(list(enumerate(trace.segment.tolist()))):
            self._first_use[segment] = row

    def scale_seconds(self, factor: float) -> AccessTrace | None:
        """A step took ``factor`` times as long as the trace says: its seconds, and those of later traces, follow.

        Returns the new trace, None if there is none.
        """
        if self.trace is None:
            return None
        self.is_measured = True
        self._scale *= factor
        self.trace = self.trace.with_seconds(self.trace.seconds * factor)
        self._plan = None
        return self.trace

    def update_order(self, segment: int) -> int:
        """Where a parameter is first used in the step; those never seen come last, in their own order."""
        return self._first_use.get(segment, 1 << 40 | segment)

    def num_gradients(self, segment: int) -> int:
        """How often a gradient comes in one backward; 1 where nothing is known."""
        return max(self._num_gradients.get(segment, 1), 1)

    def largest_tick(self) -> tuple[int, list[str]]:
        """The bytes that the hungriest operation must stream in at once, and the tensors it names."""
        if self.trace is None or not len(self.trace):
            return 0, []
        homes = np.array([int(self._table.home[segment.first_page]) for segment in self._segments])
        streamed = np.where(homes[self.trace.segment] == Home.DEVICE, 0, self.trace.num_pages)
        need = np.bincount(self.trace.tick, streamed) * self._page_size
        tick = int(np.argmax(need))
        names = [self._segments[int(s)].name for s in self.trace.segment[self.trace.tick == tick]]
        return int(need[tick]), names

    def plan(self, *, budgets: Mapping[str, int | None], policy: EvictionPolicy) -> Plan:
        """The plan as it stands; made when asked for, and again when the trace or the segments changed."""
        seen = len(self._segments), len(self._space.retired)
        if self._plan is None or seen != self._planned:
            self._planned = seen
            live = [segment for segment in self._segments if segment.index not in self._space.retired]
            self._plan = make_plan(
                [_spec(segment, index) for index, segment in enumerate(live)],
                self._live_trace(),
                page_size=self._page_size,
                homes=[int(self._table.home[segment.first_page]) for segment in live],
                budgets=budgets,
                policy=policy,
                way=self.way,
                note=self.note,
                graph=self._graph if self._inputs is not None else None,
                critical_path=self._critical_path if self._inputs is not None else None,
            )
        return self._plan

    def _live_trace(self) -> AccessTrace | None:
        """The trace in the plan's numbering, which leaves out retired segments; their successors take their rows."""
        trace, retired = self.trace, self._space.retired
        if trace is None or not retired:
            return trace
        successor = self._space.successors()[trace.segment]
        kept = np.flatnonzero(successor >= 0)
        new, old = successor[kept], trace.segment[kept]
        pages = np.array([segment.num_pages for segment in self._segments], np.int64)
        alive = np.array([index not in retired for index in range(len(self._segments))])
        # In another dtype the same elements lie in other pages.
        begin = trace.first_page[kept].astype(np.int64) * pages[new] // pages[old]
        end = -(-(trace.first_page[kept].astype(np.int64) + trace.num_pages[kept]) * pages[new] // pages[old])
        ticks, tick = np.unique(trace.tick[kept], return_inverse=True)
        return AccessTrace(
            tick=tick,
            segment=(np.cumsum(alive) - 1)[new],
            first_page=begin,
            num_pages=end - begin,
            write=trace.write[kept],
            phase=trace.phase[kept],
            seconds=trace.seconds[ticks],
        )

    def forget_plan(self) -> None:
        """Homes or budgets changed."""
        self._plan = None

    def _graph(self) -> Any:
        from pager.graph.fx_graph import joint_graph, to_networkx

        if self._digraph is None:
            assert self._inputs is not None
            ceilings = Ceilings()
            self._digraph = to_networkx(
                joint_graph(self._model, *self._inputs),
                flops_per_second=ceilings.flops_per_second,
                bytes_per_second=ceilings.device_memory_bytes_per_second,
            )
        return self._digraph

    def _critical_path(self) -> Any:
        from pager.graph.fx_graph import critical_path_graph

        return critical_path_graph(self._graph(), "seconds")


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.detach().to("meta")
    return tensor.detach().cpu()  # indices and masks may steer control flow


def _spec(segment: Segment, index: int) -> SegmentSpec:
    return SegmentSpec(
        index=index,
        name=segment.name,
        kind=segment.kind,
        num_bytes=segment.num_bytes,
        first_page=segment.first_page,
        num_pages=segment.num_pages,
    )


def renumbered(rows: Sequence[AccessRow]) -> list[AccessRow]:
    """The rows with ticks that rise by one from 0, keeping together what shared a tick."""
    result: list[AccessRow] = []
    tick, last = -1, None
    for row in rows:
        if row.tick != last:
            tick, last = tick + 1, row.tick
        result.append(row._replace(tick=tick))
    return result
