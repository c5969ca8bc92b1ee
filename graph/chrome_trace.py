"""A simulated step as a trace that ui.perfetto.dev and chrome://tracing open: JSON in the Trace Event Format.

One track per engine, counters of the device's memory, and a flow from each copy to the first computation that waited
for it. (Format: "Trace Event Format", the Chromium project.) Times are microseconds.
"""

from __future__ import annotations

import json
import os
from typing import Any

from pager.graph.simulate import SimulatedStep
from pager.graph.task_timing import ENGINE_NAMES

__all__ = ["trace_events", "write_chrome_trace"]

_PROCESS = 1
_SECONDS_TO_US = 1e6
# Less than a nanosecond is not drawn.
_LEAST_SECONDS = 1e-9


def trace_events(step: SimulatedStep, *, name: str = "simulated step") -> list[dict[str, Any]]:
    """The events of a step that was simulated with ``keep_tasks=True``. ValueError where it has no tasks."""
    if not step.tasks:
        raise ValueError("this step has no tasks; simulate it with keep_tasks=True")
    events: list[dict[str, Any]] = [_named("process_name", 0, name)]
    thread = {engine: place for place, engine in enumerate(ENGINE_NAMES, start=1)}
    for engine, number in thread.items():
        events.append(_named("thread_name", number, engine))
        events.append({**_named("thread_sort_index", number, ""), "args": {"sort_index": number}})
    drawn = {
        task.number: task for task in step.tasks if task.end_seconds - task.begin_seconds >= _LEAST_SECONDS
    }
    used: set[int] = set()
    for task in drawn.values():
        begin, end = task.begin_seconds * _SECONDS_TO_US, task.end_seconds * _SECONDS_TO_US
        place = {"pid": _PROCESS, "tid": thread[task.engine]}
        unit = "parameters" if task.engine == "cpu update" else "bytes"
        work = {} if task.engine in ("compute", "beside", "host") else {unit: task.work}
        arguments = {"parameter": task.subject, **work}
        label = f"{task.kind} {task.subject}".strip()
        events.append(
            {
                "ph": "X",
                "name": label,
                "cat": task.kind,
                "ts": begin,
                "dur": end - begin,
                **place,
                "args": arguments,
            }
        )
        if task.engine not in ("compute", "beside"):
            continue
        for before in task.waits:
            copy = drawn.get(before)
            if copy is None or copy.engine not in ("h2d", "slots in") or before in used:
                continue
            used.add(before)
            flow = {"name": "first use", "cat": "flow", "id": before, "pid": _PROCESS}
            left = copy.end_seconds * _SECONDS_TO_US
            # A flow binds to the slice that it lies in: the copy's last moment, the computation's first.
            events.append({"ph": "s", "ts": max(left - 1e-3, 0.0), "tid": thread[copy.engine], **flow})
            events.append({"ph": "f", "bp": "e", "ts": begin, "tid": thread[task.engine], **flow})
    wave = step.waveform
    for seconds, pages, activations in zip(
        wave.seconds.tolist(), wave.pages.tolist(), wave.activations.tolist(), strict=True
    ):
        counters = {"pages": pages, "activations": activations}
        events.append(
            {
                "ph": "C",
                "name": "device bytes",
                "ts": seconds * _SECONDS_TO_US,
                "pid": _PROCESS,
                "args": counters,
            }
        )
    return events


def write_chrome_trace(
    step: SimulatedStep, path: str | os.PathLike[str], *, name: str = "simulated step"
) -> None:
    """Write the step to ``path`` (.json). ValueError as `trace_events`, OSError as for any file."""
    content = {"displayTimeUnit": "ms", "traceEvents": trace_events(step, name=name)}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
