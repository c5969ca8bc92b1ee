"""A training step as the simulator sees it: which parameters each tick reads, how long it computes, what it keeps.

Made from an access trace (``StepModel.from_trace``). Parameters are numbered in the order of their segments; rows are
whole parameters: what moves in the runtime are parameters and slices of their states, never single pages. So the size
of a model shows in bytes, not in the number of rows, and a step of 1 T parameters has some thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pager.graph.access_trace import AccessTrace, FloatArray, IntArray, Phase, SegmentSpec
from pager.graph.bound import BytesPerParameter

__all__ = ["StepModel"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepModel:
    """One forward and backward, and what an update costs.

    Per parameter: ``names``, ``num_elements`` (int64), ``gradient_tick`` (int64: the last tick in which its gradient
    comes, -1 where none does). Per tick: ``seconds`` (float64), ``phase`` (uint8), ``live_bytes`` (int64 of
    activations; zeros where unknown). Per access, in order: ``access_tick`` and ``access_parameter`` (int64).
    ``size``: bytes of weight, gradient and states per element. ``small_bytes``: what is not paged, on the device.
    ``num_elements_small``: parameters in it. ``tokens``: of one step, for rates.
    """

    names: tuple[str, ...]
    num_elements: IntArray
    gradient_tick: IntArray
    seconds: FloatArray
    phase: npt.NDArray[np.uint8]
    live_bytes: IntArray
    access_tick: IntArray
    access_parameter: IntArray
    size: BytesPerParameter
    small_bytes: int = 0
    num_elements_small: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.names) != len(self.num_elements) or len(self.gradient_tick) != len(self.names):
            raise ValueError(
                f"{len(self.names)} names, {len(self.num_elements)} sizes and {len(self.gradient_tick)} gradients"
            )
        if not len(self.seconds) == len(self.phase) == len(self.live_bytes):
            raise ValueError("seconds, phase and live_bytes differ in length")
        if np.any(np.diff(self.access_tick) < 0):
            raise ValueError("accesses must stand in the order of their ticks")

    @property
    def num_parameters(self) -> int:
        """Elements of all paged parameters."""
        return int(self.num_elements.sum())

    @property
    def num_ticks(self) -> int:
        """Ticks of forward and backward."""
        return len(self.seconds)

    @property
    def compute_seconds(self) -> float:
        """Of forward and backward, without updates."""
        return float(self.seconds.sum())

    @property
    def first_backward_tick(self) -> int:
        """The first tick that is not forward."""
        later = np.flatnonzero(self.phase != int(Phase.FORWARD))
        return int(later[0]) if len(later) else self.num_ticks

    def phase_seconds(self) -> tuple[float, float]:
        """Compute seconds of forward and of backward with recompute."""
        cut = self.first_backward_tick
        return float(self.seconds[:cut].sum()), float(self.seconds[cut:].sum())

    def scaled_to(self, compute_seconds: float) -> StepModel:
        """The same step, computing as long as was measured. ValueError where nothing is known to scale."""
        if not self.compute_seconds > 0:
            raise ValueError("no tick of this step takes any time; there is nothing to scale")
        return self._with(seconds=self.seconds * (compute_seconds / self.compute_seconds))

    def _with(self, **changes: object) -> StepModel:
        values = {name: getattr(self, name) for name in StepModel.__slots__}
        return StepModel(**(values | changes))

    @classmethod
    def from_trace(
        cls,
        trace: AccessTrace,
        segments: Sequence[SegmentSpec],
        *,
        gradient_of: Mapping[int, int] | None = None,
        num_elements: Mapping[int, int] | None = None,
        size: BytesPerParameter | None = None,
        live_bytes: npt.ArrayLike | None = None,
        small_bytes: int = 0,
        num_elements_small: int = 0,
        tokens: int = 0,
    ) -> StepModel:
        """The step of ``trace`` (its update part is left out) over the parameters among ``segments``.

        ``gradient_of``: the parameter's segment of each gradient's segment; a gradient row that names the parameter
        itself needs no entry. ``num_elements`` by segment (default: bytes by ``size.weight``). ``live_bytes``: of
        activations, per tick of forward and backward or one number for all of them.
        """
        bytes_of = size or BytesPerParameter()
        specs = [spec for spec in segments if spec.kind == "parameter"]
        index = np.full(max((spec.index for spec in segments), default=-1) + 1, -1, np.int64)
        index[[spec.index for spec in specs]] = np.arange(len(specs))
        segment = trace.segment.astype(np.int64)
        for gradient, parameter in (gradient_of or {}).items():
            segment[trace.segment == gradient] = parameter
        parameter_of = index[segment]
        counted = trace.phase < Phase.UPDATE
        is_gradient = trace.phase == Phase.GRADIENT
        num_ticks = int(trace.tick[counted].max(initial=-1)) + 1
        phase = np.zeros(num_ticks, np.uint8)
        phase[trace.tick[counted]] = trace.phase[counted]
        reads = counted & ~is_gradient & (parameter_of >= 0)
        gradient_tick = np.full(len(specs), -1, np.int64)
        rows = np.flatnonzero(is_gradient & (parameter_of >= 0))
        gradient_tick[parameter_of[rows]] = trace.tick[rows]  # the last one stays
        live = np.zeros(num_ticks, np.int64) if live_bytes is None else np.asarray(live_bytes, np.int64)
        elements = num_elements or {}
        return cls(
            names=tuple(spec.name for spec in specs),
            num_elements=np.array(
                [elements.get(spec.index, spec.num_bytes // bytes_of.weight) for spec in specs], np.int64
            ),
            gradient_tick=gradient_tick,
            seconds=trace.seconds[:num_ticks].copy(),
            phase=phase,
            live_bytes=np.broadcast_to(live, (num_ticks,)).copy(),
            access_tick=trace.tick[reads].astype(np.int64),
            access_parameter=parameter_of[reads],
            size=bytes_of,
            small_bytes=small_bytes,
            num_elements_small=num_elements_small,
            tokens=tokens,
        )
