"""A model's step, captured on meta: as a plan's trace and segments, and as the simulator's step."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pager.graph.access_trace import AccessRow, AccessTrace, Phase, SegmentSpec
from pager.graph.bound import BytesPerParameter
from pager.graph.capture import capture
from pager.graph.cost_model import Ceilings, estimate_tick_seconds
from pager.graph.fused_kernels import fused_kernels_on_meta
from pager.graph.step_model import StepModel
from pager.tools.errors import CommandFailed
from pager.tools.machine import Machine
from pager.tools.model_source import ModelSource
from pager.units import ceil_div, even_slices

__all__ = ["CapturedModel", "capture_model"]

# What AdamW keeps: two moments; with a master, in fp32, and the master's low bits.
_MASTER_STATES = ((4, "exp_avg"), (4, "exp_avg_sq"), (2, "master_low"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapturedModel:
    """``trace``: of forward and backward; gradient rows name the parameter. ``segments``: its paged parameters.

    ``states``: (bytes per element, name) of each optimizer state; ``num_small``: elements of tensors under a page.
    """

    name: str
    way: str
    note: str
    step: StepModel
    trace: AccessTrace
    segments: tuple[SegmentSpec, ...]
    states: tuple[tuple[int, str], ...]
    page_size: int
    activation_bytes: int
    flops: float
    num_small: int
    dtype: str

    @property
    def num_parameters(self) -> int:
        """All elements, those of small tensors included."""
        return self.step.num_parameters + self.num_small

    def plan_segments(self) -> tuple[list[SegmentSpec], AccessTrace]:
        """The segments of parameters, gradients and states, and the trace of forward and backward over them."""
        pages = self.segments[-1].first_page + self.segments[-1].num_pages if self.segments else 0
        specs = list(self.segments)
        count = len(specs)
        kinds = [
            ("gradient", self.step.size.gradient, "gradient"),
            *(("state", size, name) for size, name in self.states),
        ]
        for kind, element_bytes, suffix in kinds:
            for parameter, elements in enumerate(self.step.num_elements.tolist()):
                name = self.segments[parameter].name
                num_bytes = elements * element_bytes
                spec = SegmentSpec(
                    index=len(specs),
                    name=name if kind == "gradient" else f"{name}.{suffix}",
                    kind=kind,
                    num_bytes=num_bytes,
                    first_page=pages,
                    num_pages=ceil_div(num_bytes, self.page_size),
                )
                pages += spec.num_pages
                specs.append(spec)
        segment = self.trace.segment.astype(np.int64)
        segment[self.trace.phase == Phase.GRADIENT] += count
        num_pages = np.array([spec.num_pages for spec in specs], np.int64)
        trace = AccessTrace(
            tick=self.trace.tick,
            segment=segment,
            first_page=np.zeros(len(segment), np.int64),
            num_pages=num_pages[segment],
            write=self.trace.write | (self.trace.phase == Phase.GRADIENT),
            phase=self.trace.phase,
            seconds=self.trace.seconds,
        )
        return specs, trace

    def update_rows(self, specs: list[SegmentSpec], unit_elements: int) -> list[AccessRow]:
        """The accesses of an update cut into units of ``unit_elements`` (0: whole), in order of the next forward."""
        first = np.full(len(self.segments), len(self.trace), np.int64)
        np.minimum.at(first, self.step.access_parameter, np.arange(len(self.step.access_parameter)))
        trained = np.flatnonzero(self.step.gradient_tick >= 0)
        count, rows, tick = len(self.segments), [], 0
        sizes = [self.step.size.weight, self.step.size.gradient, *(size for size, _ in self.states)]
        align = self.page_size // min(sizes)
        for parameter in trained[np.argsort(first[trained], kind="stable")].tolist():
            elements = int(self.step.num_elements[parameter])
            step = even_slices(elements, unit_elements, align) if unit_elements else elements
            for begin in range(0, elements, step):
                end = min(begin + step, elements)
                for place, element_bytes in enumerate(sizes):
                    page = begin * element_bytes // self.page_size
                    last = ceil_div(end * element_bytes, self.page_size)
                    rows.append(
                        AccessRow(tick, parameter + place * count, page, last - page, True, int(Phase.UPDATE))
                    )
                tick += 1
        return rows


def capture_model(
    source: ModelSource, machine: Machine, *, page_size: int, master: bool = True, is_gpu: bool = True
) -> CapturedModel:
    """Run one step of the model on meta. ``master``: a half-precision model is stepped in fp32 through masters;
    ``is_gpu``: attention never holds its scores. Raises CommandFailed where capture fails, with what the model said.
    """
    paged = [(name, p) for name, p in source.model.named_parameters() if p.nbytes >= page_size]
    small = [p for _, p in source.model.named_parameters() if p.nbytes < page_size]
    if not paged:
        raise CommandFailed(
            f"{source.name}: no parameter is as large as a page ({page_size} bytes); there is nothing to page"
        )
    managed: dict[nn.Parameter, int] = {p: index for index, (_, p) in enumerate(paged)}
    # Kernels as a GPU has them; but not capture on fake tensors of a GPU, which takes one.
    fused = fused_kernels_on_meta() if is_gpu else contextlib.nullcontext()
    with fused:
        found = capture(source.model, managed, source.args, source.kwargs, device=torch.device("cpu"))
    if found.way == "recorded":
        raise CommandFailed(f"{source.name}: the step cannot be captured without data: {found.reason}")
    specs, pages = [], 0
    for index, (name, p) in enumerate(paged):
        count = ceil_div(p.nbytes, page_size)
        specs.append(
            SegmentSpec(
                index=index,
                name=name,
                kind="parameter",
                num_bytes=p.nbytes,
                first_page=pages,
                num_pages=count,
            )
        )
        pages += count
    size, states = _bytes_per_parameter(paged[0][1].element_size(), master)
    trace = _trace(found, specs, machine, page_size)
    small_bytes = sum(p.numel() * (p.element_size() * 2 + sum(s for s, _ in states)) for p in small)
    small_bytes += sum(buffer.nbytes for buffer in source.model.buffers())
    step = StepModel.from_trace(
        trace,
        specs,
        num_elements={index: p.numel() for index, (_, p) in enumerate(paged)},
        size=size,
        live_bytes=found.live_bytes,
        small_bytes=small_bytes,
        num_elements_small=sum(p.numel() for p in small),
        tokens=source.tokens,
    )
    trained = np.array([p.requires_grad for _, p in paged])
    step = dataclasses.replace(step, gradient_tick=np.where(trained, step.gradient_tick, -1))
    return CapturedModel(
        name=source.name,
        way=f"captured on {found.way}",
        note=found.reason or "",
        step=step,
        trace=trace,
        segments=tuple(specs),
        states=states,
        page_size=page_size,
        activation_bytes=found.peak_activation_bytes,
        flops=float(found.flops.sum()),
        num_small=sum(p.numel() for p in small),
        dtype=source.dtype,
    )


def _bytes_per_parameter(
    element_bytes: int, master: bool
) -> tuple[BytesPerParameter, tuple[tuple[int, str], ...]]:
    """Bytes of weight, gradient and states, and the states: AdamW's."""
    states: tuple[tuple[int, str], ...]
    if master and element_bytes == 2:
        states = _MASTER_STATES
    else:
        states = ((element_bytes, "exp_avg"), (element_bytes, "exp_avg_sq"))
    size = BytesPerParameter(
        weight=element_bytes, gradient=element_bytes, state=sum(width for width, _ in states)
    )
    return size, states


def _trace(found: Any, specs: list[SegmentSpec], machine: Machine, page_size: int) -> AccessTrace:
    rows = found.rows
    pages = np.array([spec.num_pages for spec in specs], np.int64)
    trace = AccessTrace(
        tick=rows["tick"],
        segment=rows["segment"],
        first_page=np.zeros(len(rows), np.int64),
        num_pages=pages[rows["segment"]],
        write=rows["write"],
        phase=rows["phase"],
    )
    ceilings = Ceilings(
        flops_per_second=machine.flops_per_second,
        device_memory_bytes_per_second=machine.device_memory_bytes_per_second,
    )
    seconds = estimate_tick_seconds(
        trace,
        page_size,
        flops_per_tick=found.flops,
        moved_bytes_per_tick=found.moved_bytes,
        ceilings=ceilings,
    )
    return trace.with_seconds(seconds)
