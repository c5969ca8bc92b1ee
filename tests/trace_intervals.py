"""What ran at the same time, from the Chrome trace that ``torch.profiler`` writes. Times in microseconds.

An interval is (begin, end). A *set* of intervals is sorted and disjoint, as `merged` makes it; only such sets have a
length, since what overlaps would count twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The set of all times that are in any of ``intervals``; empty ones vanish."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def intersection(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """The set of times that are in both sets."""
    result: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            result.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(intervals: list[Interval]) -> float:
    """Microseconds in a set."""
    return sum(end - begin for begin, end in intervals)


def overlap_share(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Of the shorter one's time, the share in which the other one is busy too: 0 one after the other, 1 hidden.

    0 where one of them is empty.
    """
    first, second = merged(left), merged(right)
    shorter = min(length(first), length(second))
    return length(intersection(first, second)) / shorter if shorter else 0.0


@dataclass(kw_only=True)
class Copies:
    """Copies in one direction of the link."""

    intervals: list[Interval] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(kw_only=True)
class Trace:
    """What a GPU and its host did: kernels, copies over the link, the host's calls of CUDA, and what was marked."""

    kernels: list[Interval] = field(default_factory=list)
    h2d: Copies = field(default_factory=Copies)
    d2h: Copies = field(default_factory=Copies)
    calls: list[tuple[str, Interval]] = field(default_factory=list)
    marks: list[tuple[str, Interval]] = field(default_factory=list)

    def marked(self, name: str) -> list[Interval]:
        """The stretches under ``record_function(name)``, in order."""
        return sorted(interval for found, interval in self.marks if found == name)

    def calls_in(self, windows: list[Interval]) -> list[str]:
        """Names of the CUDA calls, by any thread, that began inside one of ``windows``."""
        return [
            name for name, (begin, _) in self.calls if any(first <= begin < last for first, last in windows)
        ]


_BUBBLE = re.compile(
    r"cuda(Malloc|Free|Host(Alloc|Register|Unregister)|(Device|Stream|Event)Synchronize)"
    r"|cu(Mem(Alloc|Free|Create|Release|Map|Unmap|Host)|(Ctx|Stream|Event)Synchronize)"
    r"|cudaMem(cpy|set)(_v\d+)?$"
)


def is_bubble(name: str) -> bool:
    """Whether a CUDA call waits for the device, takes memory, gives it back, or page-locks it."""
    return _BUBBLE.match(name) is not None


# Kineto: "Memcpy HtoD (Pinned -> Device)"; the second form is for the copies whose kind it leaves open.
_TO_DEVICE = re.compile(r"HtoD|\((Pinned|Pageable|Registered|Host)[^>]*-> *Device")
_TO_HOST = re.compile(r"DtoH|\(Device *-> *(Pinned|Pageable|Registered|Host)")


def read_trace(path: Path) -> Trace:
    """The trace that ``profile.export_chrome_trace`` wrote. What is not a complete event of these kinds is left out."""
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    events = content["traceEvents"] if isinstance(content, dict) else content
    trace = Trace()
    for event in events:
        if event.get("ph") == "X" and "ts" in event:
            _add(trace, event)
    return trace


def _add(trace: Trace, event: dict[str, Any]) -> None:
    kind, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
    begin = float(event["ts"])
    interval = begin, begin + float(event.get("dur", 0))
    if kind == "kernel":
        trace.kernels.append(interval)
    elif kind in ("gpu_memcpy", "memcpy"):
        copies = trace.h2d if _TO_DEVICE.search(name) else trace.d2h if _TO_HOST.search(name) else None
        if copies is not None:
            copies.intervals.append(interval)
            copies.num_bytes += int(event.get("args", {}).get("bytes", 0))
    elif kind in ("cuda_runtime", "cuda_driver", "runtime"):
        trace.calls.append((name, interval))
    elif kind == "user_annotation":
        trace.marks.append((name, interval))
