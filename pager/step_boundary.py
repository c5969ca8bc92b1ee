"""What changes between two steps, and nowhere else: knobs, the trace, the arena's size, new parameters.

Within a step nothing is allocated and no plan changes. At its end the runtime looks back at it: was the trace
followed, did activations leave memory unused or run out of it, did the user set a knob or add a parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from pager.config import Config
from pager.device.base import Device
from pager.device_budget import DeviceBudget
from pager.engine.engine import Engine
from pager.engine.pagerd import Pagerd
from pager.engine.transfer import EXTENT_BYTES
from pager.errors import ConfigError
from pager.graph.access_trace import AccessTrace, Phase
from pager.home_moves import HomeMoves
from pager.homes import Homes
from pager.host_cap import HostCap
from pager.mmu.mmu import Mmu
from pager.paging import PagedModel
from pager.planning import Planner
from pager.policies.prefetch import auto_distance
from pager.policies.protocol import make_eviction_policy
from pager.spans import span
from pager.units import format_bytes

logger = logging.getLogger("pager.step_boundary")

# Knobs that may change while the model trains.
LIVE_KNOBS = ("prefetch_distance", "eviction", "host_budget")
# A slab is worth having if it holds so many of the largest tensor, one in use, one on its way, or is such a part of the
# first ones: there is room in it for what stays.
LEAST_SLAB_PART = 8
SLAB_SEGMENTS = 2
# Measured and planned seconds of a step may differ by so much before the plan's are scaled again.
MAX_DRIFT = 2.0
# The prefetch distance before "auto" has measured a step.
FIRST_DISTANCE = 4


def fixed_distance(config: Config) -> int:
    """The prefetch distance to start with, in extents."""
    knob = config.prefetch_distance
    return FIRST_DISTANCE if knob == "auto" else int(knob)


class Round:
    """One step of the model: each of its optimizers has stepped, in whatever order."""

    def __init__(self) -> None:
        self._stepped: set[int] = set()

    def is_over(self, optimizer: object, all_of_them: Iterable[object]) -> bool:
        """``optimizer`` has stepped; whether ``all_of_them`` have. One that steps again begins anew."""
        if id(optimizer) in self._stepped:
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        over = all(id(known) in self._stepped for known in all_of_them)
        if over:
            self._stepped.clear()
        return over


class StepBoundary:
    """Carries out the changes at a step's end."""

    def __init__(
        self,
        config: Config,
        *,
        device: Device,
        budget: DeviceBudget,
        engine: Engine,
        pagerd: Pagerd,
        planner: Planner,
        paged: PagedModel,
        mmu: Mmu,
        homes: Homes,
        host_cap: HostCap,
        slab_frames: int,
    ) -> None:
        self._config = config
        self.host_cap = host_cap
        host_cap.moves = HomeMoves(mmu, homes, pagerd, gradients=config.update_at == "step")
        host_cap.on_failure = engine.fail
        mmu.look_at_heap = host_cap.look_in_step
        self._device = device
        self._budget = budget
        self._engine = engine
        self._pagerd = pagerd
        self._planner = planner
        self._paged = paged
        self._slab_frames = slab_frames
        self._pending: dict[str, Any] = {}
        self._step_began = time.perf_counter()
        # Of the last step but the first, which has its captures and warm-ups.
        self._step_seconds: float | None = None
        self._num_measured = 0
        self._may_grow = True
        self._bandwidth: float | None = None

    @property
    def config(self) -> Config:
        """The knobs in force."""
        return self._config.replace(host_budget=self.host_cap.knob)

    def set(self, **knobs: Any) -> None:
        """Change knobs at the next boundary, or now where the eviction policy had failed.

        Raises at once for values that cannot work. ``host_budget`` counts from now on where it holds what is in use
        once the pageable part is given back; else homes move to the disk at the next boundary, or BudgetError is raised
        now, and all stays as it was.
        """
        changed = self._config.replace(**knobs)
        fixed = sorted(name for name in knobs if name not in LIVE_KNOBS)
        if fixed:
            live = f"{', '.join(LIVE_KNOBS[:-1])} and {LIVE_KNOBS[-1]}"
            raise ConfigError(
                f"{', '.join(fixed)} cannot change while the model is managed (only {live} can); "
                "close() it and manage it again"
            )
        if "host_budget" in knobs:
            self.host_cap.set(changed.host_budget)
        self._pending.update({name: getattr(changed, name) for name in knobs if name != "host_budget"})
        if "eviction" in knobs and self._engine.policy.has_failed:
            self._apply_knobs()  # no step would come to its boundary

    def cross(self) -> None:
        """A step is over."""
        with span("step boundary"):
            self._cross()

    def _cross(self) -> None:
        counters = self._engine.counters
        counters.add(num_steps=1)
        if self._paged.fits:
            # Nothing is paged, so the rest has nothing to work on; and a step that fits is owed every microsecond.
            self._apply_knobs()
            self._measure_step()
            return
        counters.add(stall_seconds=self._device.drain_stall_seconds())
        self.host_cap.look()
        self._apply_knobs()
        for name, param in self._paged.find_new():
            self._paged.take_in_late(name, param)
            self._planner.forget_plan()
        self._renew_trace()
        self._adapt_arena()
        seconds = self._measure_step()
        self._adapt_distance(seconds)
        self._pagerd.end_step()

    def move_homes(self) -> None:
        """The last act of a boundary, since an interrupt may end it early: what another host budget asks for."""
        if self.host_cap.has_work:
            self._planner.forget_plan()
            with span("moving homes"):
                self.host_cap.move_homes()

    def _apply_knobs(self) -> None:
        knobs, self._pending = self._pending, {}
        if not knobs:
            return
        self._config = self._config.replace(**knobs)
        if "prefetch_distance" in knobs:
            self._pagerd.set_distance(fixed_distance(self._config))
        if "eviction" in knobs:
            self._engine.set_policy(make_eviction_policy(self._config.eviction))
            self._planner.forget_plan()

    def _renew_trace(self) -> None:
        engine = self._engine
        with engine.lock:
            renew = engine.timeline.end_step()
            rows = engine.timeline.take_recording()
        trace = self._planner.trace
        if renew and rows:
            self._follow(self._planner.record(rows), 1)
        elif trace is not None and not trace.num_update_rows and rows:
            update = self._planner.with_update([row for row in rows if row.phase == Phase.UPDATE])
            if update is not None:
                self._follow(update, engine.timeline.micro_batches)

    def _follow(self, trace: AccessTrace, micro_batches: int) -> None:
        with self._engine.lock:
            self._engine.timeline.follow(trace, micro_batches)

    def _measure_step(self) -> float:
        """The seconds of the step that ends; the plan's seconds are brought to this machine's by them."""
        now = time.perf_counter()
        seconds, self._step_began = now - self._step_began, now
        self._num_measured += 1
        if self._num_measured == 1:
            return seconds
        # What happens between two steps (a checkpoint, an evaluation) is no drift: two steps must agree.
        before = seconds if self._step_seconds is None else self._step_seconds
        self._step_seconds = seconds
        timeline = self._engine.timeline
        estimated = timeline.step_seconds
        if not estimated > 0:
            return seconds
        drifted = min(seconds, before) > MAX_DRIFT * estimated or max(seconds, before) < estimated / MAX_DRIFT
        if drifted or not self._planner.is_measured:
            trace = self._planner.scale_seconds(seconds / estimated)
            if trace is not None:
                self._follow(trace, timeline.micro_batches)
        return seconds

    def _adapt_arena(self) -> None:
        """Give a slab back after an out-of-memory error; take one where the step left room for it."""
        if self._device.is_simulated or not self._slab_frames:
            return
        arena = self._engine.arena
        spare = self._budget.spare_bytes(arena.capacity_bytes)
        if spare < 0 and arena.num_slabs > 1:
            if self._give_slab_back(arena.num_slabs - 1):
                logger.info("device memory ran short: pages now have %s", format_bytes(arena.capacity_bytes))
            self._may_grow = False  # or the next steps would run out of memory in turn
        elif self._may_grow and arena.capacity_bytes < self._engine.space.num_live_pages * arena.page_size:
            self.grow_arena(spare)

    @property
    def largest_parameter_bytes(self) -> int:
        """Of the model's paged parameters."""
        return max((binding.segment.num_bytes for binding in self._paged.bindings.values()), default=0)

    def fit_arena(self, target_bytes: int, *, least_bytes: int) -> None:
        """Have about ``target_bytes`` of slabs, by whole slabs and no less than ``least_bytes``."""
        arena = self._engine.arena
        while arena.capacity_bytes > target_bytes and arena.num_slabs > 1:
            last = arena.num_slabs - 1
            if arena.capacity_bytes - arena.slab_bytes(last) < least_bytes or not self._give_slab_back(last):
                break
        self.grow_arena(target_bytes - arena.capacity_bytes)

    def grow_arena(self, spare_bytes: int) -> None:
        """Add slabs for ``spare_bytes`` of device memory that nothing else needs; a small rest is left."""
        arena = self._engine.arena
        largest = max((segment.num_pages for segment in self._engine.space.segments), default=1)
        spare = spare_bytes // arena.page_size
        least = max(min(SLAB_SEGMENTS * largest, self._slab_frames // LEAST_SLAB_PART), 1)
        while self._slab_frames and spare >= least:
            frames = min(spare, self._slab_frames)
            self._device.release_cached_memory()
            arena.add_slab(frames)
            spare -= frames
            self._planner.forget_plan()

    def _give_slab_back(self, index: int) -> bool:
        """Evict a slab and free it. False, and it stays, where the rest could not compute or something is held."""
        engine = self._engine
        arena = engine.arena
        wired = sum(run.num_bytes for run in engine.resident_runs() if run.wired)
        largest = max((segment.num_pages for segment in engine.space.segments), default=1) * arena.page_size
        if arena.capacity_bytes - arena.slab_bytes(index) < wired + SLAB_SEGMENTS * largest:
            return False  # what is left could not compute any more
        self._pagerd.pause()
        try:
            engine.give_up_kept()
            engine.drain()
            runs = engine.arena.slab_owners(index)
            if any(run.is_kept or run.pins for run in runs) or not engine.reclaimer.evict(runs):
                return False
            engine.arena.remove_slab(index)
            self._device.release_cached_memory()
            self._planner.forget_plan()
            return True
        finally:
            self._pagerd.resume()

    def _adapt_distance(self, seconds: float) -> None:
        """With "auto": the distance at which extents of this trace's size arrive in time."""
        trace = self._engine.timeline.trace
        if (
            self._config.prefetch_distance != "auto"
            or trace is None
            or not self._engine.counters.page_in_bytes
        ):
            return
        if self._bandwidth is None:
            self._bandwidth = self._device.measure_bandwidth(EXTENT_BYTES)
            self._pagerd.bandwidth_bytes_per_second = self._bandwidth
        arena = self._engine.arena
        row_bytes = trace.num_pages.astype(np.int64) * arena.page_size
        extents = max(int(np.ceil(row_bytes / EXTENT_BYTES).sum()), 1)
        self._pagerd.set_distance(
            auto_distance(
                self._bandwidth,
                seconds / extents,
                max(int(row_bytes.sum()) / extents, 1),
                spare_bytes=arena.capacity_bytes // 2,
            )
        )
