"""What happens between two steps: traces are built without the lock, seconds become this machine's, "auto" adapts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import pager
from pager import step_boundary
from pager.config import Checks
from pager.graph.access_trace import AccessRow, Phase
from tests.races.scenarios import handle_of

WIDTH = 96
CHECKS = Checks(streams="late", happens_before=True, poison=True, daemon="inline", page_all=True)


class Clock:
    """Time as the boundaries see it: each step takes as long as ``seconds`` says."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The boundaries' clock."""
    clock = Clock()
    monkeypatch.setattr(step_boundary, "time", clock)
    return clock


class Looking(nn.Module):
    """Looks at values, so that no step without data can be run; its first step is recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool(torch.isfinite(x).all()) else -x


class Trained:
    """A small paged model and its optimizer."""

    def __init__(self, *, recorded: bool = False, **knobs: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
        if recorded:
            self.model.append(Looking())
        knobs = {"device_budget": "256KiB", "checks": CHECKS, **knobs}
        pager.manage(self.model, device="cpu", page_size="16KiB", **knobs)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.runtime = handle_of(self.model)._runtime

    def step(self, clock: Clock | None = None, seconds: float = 1.0) -> None:
        """One step that takes so long."""
        self.optimizer.zero_grad()
        self.model(torch.ones(2, WIDTH)).sum().backward()
        if clock is not None:
            clock.now += seconds
        self.optimizer.step()

    def planned_seconds(self) -> float:
        """The length of a step by the plan."""
        trace = handle_of(self.model).plan.trace
        assert trace is not None
        return trace.step_seconds


@pytest.fixture(params=[False, True], ids=["recorded", "captured"])
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    """With its first step recorded, and with a plan from the first batch on."""
    trained = Trained(recorded=not request.param)
    yield trained
    handle_of(trained.model).close()


def test_after_the_second_step_the_plans_seconds_are_this_machines(trained: Trained, clock: Clock) -> None:
    trained.step(clock, 50.0)
    estimated = trained.planned_seconds()
    assert 0 < estimated < 0.1, "the first step has its captures and warm-ups: it measures nothing"
    trained.step(clock, 3.0)
    assert trained.planned_seconds() == pytest.approx(3.0)
    timeline = trained.runtime.engine.timeline
    assert timeline.step_seconds == pytest.approx(3.0)
    rows = handle_of(trained.model).plan.pages()
    assert 0.0 <= np.nanmin(rows["next_use_seconds"]) <= np.nanmax(rows["next_use_seconds"]) <= 3.0
    assert np.nanmax(rows["next_use_seconds"]) > 0.1
    trained.step()
    assert timeline.deviations == 0, "the trace is followed as before"


def test_seconds_follow_a_drift_that_stays_and_no_single_pause(trained: Trained, clock: Clock) -> None:
    for seconds in (1.0, 3.0, 5.0, 100.0, 4.0):
        trained.step(clock, seconds)
    assert trained.planned_seconds() == pytest.approx(3.0)
    for seconds in (7.0, 8.0):
        trained.step(clock, seconds)
    assert trained.planned_seconds() == pytest.approx(8.0)
    for seconds in (1.0, 1.5):
        trained.step(clock, seconds)
    assert trained.planned_seconds() == pytest.approx(1.5)


def test_a_later_trace_keeps_the_scale(clock: Clock) -> None:
    trained = Trained(example_inputs=(torch.ones(2, WIDTH),))
    for _ in range(2):
        trained.step(clock, 3.0)
    planner = trained.runtime.planner
    assert planner.trace is not None
    columns = (getattr(planner.trace, name).tolist() for name in AccessRow._fields)
    rows = [AccessRow(*row) for row in zip(*columns, strict=True)]
    update = [row for row in rows if row.phase == Phase.UPDATE]
    assert update
    again = planner.with_update(update)
    assert again is not None
    assert again.step_seconds == pytest.approx(3.0)
    handle_of(trained.model).close()


@pytest.mark.parametrize("recorded", [False, True])
def test_traces_are_built_without_the_engines_lock(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(recorded=recorded)
    planner, engine = trained.runtime.planner, trained.runtime.engine
    calls: list[str] = []
    for name in ("record", "with_update", "scale_seconds"):
        original = getattr(planner, name)

        def watched(*args: Any, original: Any = original, name: str = name) -> Any:
            assert not engine.lock._is_owned(), f"{name} under the engine's lock"  # type: ignore[attr-defined]
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(planner, name, watched)
    for _ in range(3):
        trained.step()
    assert ("record" in calls) is recorded
    assert "scale_seconds" in calls
    assert trained.runtime.engine.timeline.deviations == 0
    handle_of(trained.model).close()


def test_auto_counts_small_extents_as_small(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena is far smaller than an extent of 16 MiB, and has room for many of the model's."""
    trained = Trained(prefetch_distance="auto", device_budget="240KiB")
    monkeypatch.setattr(trained.runtime.device, "measure_bandwidth", lambda num_bytes: 1e6)
    for _ in range(3):
        trained.step(clock, 0.5)
    assert trained.runtime.counters.page_in_bytes > 0
    assert trained.runtime.pagerd.distance > 1
    handle_of(trained.model).close()


def test_the_critical_path_is_a_graph_with_seconds_and_outlives_its_plan() -> None:
    trained = Trained(example_inputs=(torch.ones(2, WIDTH),))
    plan = handle_of(trained.model).plan
    trained.step()
    trained.runtime.planner.forget_plan()
    path = plan.critical_path()
    assert isinstance(path, nx.DiGraph)
    assert set(path) <= set(plan.graph)
    assert all(plan.graph.has_edge(*edge) for edge in path.edges)
    seconds = [value for _, value in path.nodes(data="seconds")]
    assert path.graph["total"] == pytest.approx(sum(seconds))
    assert path.graph["total"] > 0
    assert handle_of(trained.model).plan.graph is plan.graph, "traced once"
    handle_of(trained.model).close()


def test_a_model_that_fits_is_measured_too(clock: Clock) -> None:
    fitting = Checks(streams="late", happens_before=True, poison=True, daemon="inline")
    trained = Trained(example_inputs=(torch.ones(2, WIDTH),), checks=fitting, device_budget="64MiB")
    assert trained.runtime.fitting is not None
    for _ in range(3):
        trained.step(clock, 2.0)
    assert trained.planned_seconds() == pytest.approx(2.0)
    handle_of(trained.model).close()


class Gpu:
    """A device whose allocator may have room for slabs."""

    is_simulated = False

    def release_cached_memory(self) -> None:
        """There is nothing cached."""


class Spare:
    """A budget that says what the last step left over."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def spare_bytes(self, arena_bytes: int) -> int:
        """As `DeviceBudget.spare_bytes`."""
        return self.num_bytes


def test_the_arena_grows_until_memory_ran_out_and_never_again(trained: Trained) -> None:
    """Else every other step would run out of memory."""
    trained.step()
    arena = trained.runtime.arena
    arena.budget_bytes = 2**30
    boundary: Any = trained.runtime.boundary
    budget = Spare()
    boundary._device, boundary._budget, boundary._slab_frames = Gpu(), budget, 8
    first = arena.capacity_bytes
    sizes = []
    for spare in (8 * arena.page_size, -1, 8 * arena.page_size, 8 * arena.page_size):
        budget.num_bytes = spare
        boundary._adapt_arena()
        sizes.append(arena.capacity_bytes - first)
    assert sizes == [8 * arena.page_size, 0, 0, 0]
    boundary._device = trained.runtime.device
    trained.step()


def test_the_arena_is_fitted_by_whole_slabs_and_keeps_what_streaming_needs(trained: Trained) -> None:
    trained.step()
    arena = trained.runtime.arena
    arena.budget_bytes = 2**30
    boundary: Any = trained.runtime.boundary
    boundary._device, boundary._slab_frames = Gpu(), 8
    first, slab = arena.capacity_bytes, 8 * arena.page_size
    sizes = []
    for target, least in ((2, 0), (1, 0), (0, 1), (0, 0), (-9, 0), (2, 0)):
        boundary.fit_arena(first + target * slab, least_bytes=first + least * slab)
        sizes.append((arena.capacity_bytes - first) // slab)
    assert sizes == [2, 1, 1, 0, 0, 2]  # the first slab alone is never given back
    boundary._device = trained.runtime.device
    trained.step()


def test_a_slab_is_worth_having_for_a_part_of_a_first_one(trained: Trained) -> None:
    """Where two of the largest tensor have no room, what stays still has."""
    trained.step()
    arena = trained.runtime.arena
    arena.budget_bytes = 2**30
    boundary: Any = trained.runtime.boundary
    largest = max(segment.num_pages for segment in trained.runtime.space.segments)
    boundary._device, boundary._slab_frames = Gpu(), 8 * largest
    first = arena.capacity_bytes
    boundary.grow_arena((largest - 1) * arena.page_size)
    assert arena.capacity_bytes == first
    boundary.grow_arena(largest * arena.page_size)
    assert arena.capacity_bytes == first + largest * arena.page_size
    boundary._device = trained.runtime.device
    trained.step()


def test_no_room_is_no_slab_however_small_the_first_ones_are(trained: Trained) -> None:
    trained.step()
    arena = trained.runtime.arena
    arena.budget_bytes = 2**30
    boundary: Any = trained.runtime.boundary
    boundary._device, boundary._slab_frames = Gpu(), 5
    first, num_slabs = arena.capacity_bytes, arena.num_slabs
    boundary.grow_arena(0)
    assert (arena.capacity_bytes, arena.num_slabs) == (first, num_slabs)
    boundary.grow_arena(arena.page_size)
    assert arena.capacity_bytes == first + arena.page_size
    boundary._device = trained.runtime.device
    trained.step()
