"""The arithmetic of traces: sets of intervals against counted points, and the events that a trace is made of."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, record_function

from tests.trace_intervals import Interval, intersection, is_bubble, length, merged, overlap_share, read_trace

LENGTH = 20
intervals = st.lists(st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)), max_size=8)


def points(found: list[Interval]) -> set[int]:
    """The unit steps that are in any of the intervals."""
    return {step for step in range(LENGTH) for begin, end in found if begin <= step < end}


@given(intervals, intervals)
def test_sets_are_those_of_their_points(left: list[Interval], right: list[Interval]) -> None:
    first, second = merged(left), merged(right)
    assert points(first) == points(left)
    assert all(a[1] < b[0] for a, b in pairwise(first))
    assert length(first) == len(points(left))
    both = intersection(first, second)
    assert points(both) == points(left) & points(right)
    assert length(both) == len(points(left) & points(right))


@pytest.mark.parametrize(
    ("left", "right", "share"),
    [
        ([(0, 4)], [(4, 8)], 0.0),
        ([(0, 4)], [(2, 8)], 0.5),
        ([(0, 1), (1, 2), (0, 2)], [(0, 8)], 1.0),
        ([(0, 8)], [(1, 2), (3, 4), (20, 22)], 0.5),
        ([], [(0, 8)], 0.0),
        ([(3, 3)], [(0, 8)], 0.0),
    ],
)
def test_the_share_is_of_the_shorter_one(left: list[Interval], right: list[Interval], share: float) -> None:
    assert overlap_share(left, right) == overlap_share(right, left) == share


def event(kind: str, name: str, begin: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": duration, **more}


EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1.0, "id": 7},
    event("user_annotation", "step", 10.5, 10),
    event("user_annotation", "step", 0, 10),
    event("user_annotation", "other", 0, 100),
    event("gpu_user_annotation", "step", 50, 10),
    event("kernel", "void gemm<Memcpy HtoD>", 3, 4),
    event("gpu_memset", "Memset (Device)", 3, 4),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2, 3, args={"bytes": 64}),
    event("gpu_memcpy", "Memcpy ??? (Pageable -> Device)", 6, 1, args={"bytes": 8}),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4, 2, args={"bytes": 32}),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 9, args={"bytes": 16}),
    event("cuda_runtime", "cudaLaunchKernel", 9.9, 40),
    event("cuda_runtime", "cudaFree", 10.2, 0.1),
    event("cuda_driver", "cuLaunchKernel", 20.4, 1),
]


@pytest.mark.parametrize("content", [{"traceEvents": EVENTS}, EVENTS], ids=["mapping", "list"])
def test_a_trace_is_read_by_kind(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    trace = read_trace(path)
    assert trace.marked("step") == [(0, 10), (10.5, 20.5)]
    assert trace.kernels == [(3, 7)]
    assert (trace.h2d.intervals, trace.h2d.num_bytes) == ([(2, 5), (6, 7)], 72)
    assert (trace.d2h.intervals, trace.d2h.num_bytes) == ([(4, 6)], 32)
    # By where they began: a launch that blocks ends late, and what stands between two steps is in neither.
    assert trace.calls_in(trace.marked("step")) == ["cudaLaunchKernel", "cuLaunchKernel"]


BUBBLES = """
    cudaMalloc cudaMallocAsync cudaMallocHost cudaFree cudaFreeAsync cudaFreeHost cudaMemcpy cudaMemset
    cudaHostAlloc cudaHostRegister cudaHostUnregister cudaDeviceSynchronize cudaStreamSynchronize cudaEventSynchronize
    cuMemAlloc_v2 cuMemCreate cuMemHostRegister_v2 cuCtxSynchronize
"""
OTHERS = """
    cudaMemcpyAsync cudaMemcpyBatchAsync cudaMemsetAsync cudaMemGetInfo cudaLaunchKernel cudaFuncGetAttributes
    cudaEventRecord cudaEventQuery cudaEventCreateWithFlags cudaEventElapsedTime cudaStreamWaitEvent
    cudaStreamIsCapturing cudaHostGetDevicePointer cuMemGetInfo_v2 cuLaunchKernelEx
"""


def test_what_counts_as_a_bubble() -> None:
    assert [name for name in BUBBLES.split() if not is_bubble(name)] == []
    assert [name for name in OTHERS.split() if is_bubble(name)] == []


def test_a_real_trace_shows_what_was_marked(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(2):
            with record_function("marked"):
                torch.ones(8).sum()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    first, second = read_trace(tmp_path / "trace.json").marked("marked")
    assert first[0] < first[1] <= second[0] < second[1]
