"""On a GPU: a steady step of a model that does not fit makes no call that waits or reserves, and hides its copies.

CUDA's own trace is asked, so it does not matter which part of the program would do it. (The same, counted without a
GPU: ``tests/cases/test_steady_state.py``.)
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import pager
from pager.tools.bench.system import fill_module
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes
from tests.gpu.test_budget import context_bytes
from tests.trace_intervals import Trace, is_bubble, overlap_share, read_trace

# Torch says at its first profile what only those of several cycles need to know.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")]

GIB = 2**30
# 0.94 G parameters: 13.2 GB with fp32 masters, moments and gradients. Few and large matrices: a unit of the update is
# up to 0.2 GB, 4 ms of link, so that the link and not the host's 2 ms for it sets the pace.
SIZES = ModelSizes(
    hidden=4096, layers=4, heads=32, ffn=11008, vocabulary=16384, dtype="bfloat16", checkpoint=True
)
BUDGET_BYTES = 11 * GIB  # beside the context; activations, their headroom, the rest is the arena's
# No more than 3072: from there on the backward of an embedding sorts its indices.
SEQ = 2048
# The arena grows into what activations leave, the allocator finds its blocks; then all has to stand still.
STILL_STEPS = 3
MAX_WARM_UP_STEPS = 12
NUM_STEPS = 3
STEP = "steady step"

# Shares of the shorter one's time. What is done one after the other has a share of 0: a host that waits for each unit,
# or both directions on one stream. Not more is asked than that: how well it overlaps is for benchmarks to say, and the
# states that stay on the device leave the link idle in a part of a step.
BOTH_WAYS_SHARE = 0.2
LINK_AND_KERNELS_SHARE = 0.1
# Extents: a page is 128 KiB, and the link is at full speed from about 4 MiB on.
MEAN_COPY_BYTES = 4 * 2**20


class Training:
    """A managed decoder with fp32 masters on random tokens."""

    def __init__(self, update_at: str) -> None:
        torch.cuda.empty_cache()
        device = torch.device("cuda")
        self.model: Any = make_model(SIZES, seed=0, device="meta")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        paths = {id(module): path for path, module in self.model.named_modules()}
        self.tokens = torch.randint(SIZES.vocabulary, (2, 1, SEQ), device=device)
        example = torch.zeros(2, 1, SEQ, dtype=torch.long)
        pager.manage(
            self.model,
            self.optimizer,
            device="cuda",
            device_budget=context_bytes() + BUDGET_BYTES,
            master="float32",
            update_at=update_at,
            example_inputs=(example[0], example[1]),
            init=lambda module: fill_module(
                module, paths[id(module)], seed=0, dtype=SIZES.dtype, device=device
            ),
        )
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """A user's step; the loss is not read in it."""
        loss = self.model(self.tokens[0], self.tokens[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def memory(self) -> tuple[int, int, int]:
        """Bytes reserved for the arena, by torch's allocator (the arena among it), and in host memory."""
        capacity = self.model.pager._runtime.arena.capacity_bytes
        return capacity, torch.cuda.memory_reserved(), self.model.pager.statistics().host_bytes

    def warm_up(self) -> None:
        """Steps until memory has stood still for a few."""
        seen = []
        for _ in range(MAX_WARM_UP_STEPS):
            self.step()
            torch.cuda.synchronize()
            seen.append(self.memory())
            if len(set(seen[-STILL_STEPS - 1 :])) == 1 and len(seen) > STILL_STEPS:
                return
        pytest.fail(f"memory does not stand still: {seen}")

    def traced(self, path: Path) -> Trace:
        """The trace of steady steps, each marked; between two of them the host waits for the device."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            self.step()  # what the profiler sets up at its first events is not ours
            torch.cuda.synchronize()
            for _ in range(NUM_STEPS):
                with record_function(STEP):
                    self.step()
                torch.cuda.synchronize()
        profiled.export_chrome_trace(str(path))
        return read_trace(path)


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_no_bubbles(update_at: str, tmp_path: Path) -> None:
    training = Training(update_at)
    try:
        training.warm_up()
        before = training.model.pager.statistics()
        trace = training.traced(tmp_path / "trace.json")
        after = training.model.pager.statistics()
    finally:
        training.model.pager.close()
    steps = trace.marked(STEP)
    assert len(steps) == NUM_STEPS
    assert len({float(loss) for loss in training.losses}) > 1  # it trains

    found = sorted({name for name in trace.calls_in(steps) if is_bubble(name)})
    assert found == []
    assert len(trace.calls_in(steps)) > 100  # else calls are not traced

    for name, copies, moved in (
        ("h2d", trace.h2d, after.page_in_bytes - before.page_in_bytes),
        ("d2h", trace.d2h, after.page_out_bytes - before.page_out_bytes),
    ):
        assert moved > (NUM_STEPS + 1) * GIB, f"{name}: {moved} bytes, so the model all but fits"
        # The trace holds what the runtime says it moved, or nothing about it can be believed.
        assert 0.95 < copies.num_bytes / moved < 1.05, name
        assert copies.num_bytes / len(copies.intervals) > MEAN_COPY_BYTES, name
        # The device may be behind the host, but not beyond the next step.
        for (begin, _), (end, _) in pairwise([*steps, (math.inf, math.inf)]):
            assert any(begin <= first < end for first, _ in copies.intervals), f"{name}: a step without"

    both_ways = overlap_share(trace.h2d.intervals, trace.d2h.intervals)
    assert both_ways > BOTH_WAYS_SHARE
    link = [*trace.h2d.intervals, *trace.d2h.intervals]
    assert overlap_share(link, trace.kernels) > LINK_AND_KERNELS_SHARE
