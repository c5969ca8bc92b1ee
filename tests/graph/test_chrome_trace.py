"""The trace of a simulated step: well formed, complete, and on the right tracks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from pager.graph.chrome_trace import trace_events, write_chrome_trace
from tests.graph.step_builders import make_step, run


def make_traced() -> tuple[object, list[dict]]:
    step = run(make_step(live_bytes=50), keep_tasks=True, arena=2400 + 800, on_cpu=[True, *[False] * 5])
    return step, trace_events(step)


def test_each_engine_has_a_track_and_its_tasks_do_not_overlap() -> None:
    step, events = make_traced()
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values())[:3] == ["compute", "h2d", "d2h"]
    slices = [e for e in events if e["ph"] == "X"]
    for thread in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(begin >= end - 1e-3 for (_, end), (begin, _) in itertools.pairwise(own))
    kinds = {e["cat"] for e in slices}
    assert kinds >= {
        "compute",
        "states in",
        "states out",
        "parameter in",
        "parameter out",
        "cpu update",
    }
    seconds = step.seconds  # type: ignore[attr-defined]
    assert max(e["ts"] for e in slices) <= seconds * 1e6


def test_flows_lead_from_a_copy_to_what_waited_for_it() -> None:
    _, events = make_traced()
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)
    slices = [e for e in events if e["ph"] == "X"]
    for flow in (*begins.values(), *ends.values()):
        assert any(
            e["tid"] == flow["tid"] and e["ts"] - 1e-6 <= flow["ts"] <= e["ts"] + e["dur"] + 1e-6
            for e in slices
        )


def test_counters_follow_the_waveform() -> None:
    step, events = make_traced()
    counters = [e["args"] for e in events if e["ph"] == "C"]
    wave = step.waveform  # type: ignore[attr-defined]
    assert max(c["pages"] for c in counters) == wave.peak_pages_bytes
    assert max(c["activations"] for c in counters) == 50


def test_the_file_is_json(tmp_path: Path) -> None:
    step = run(make_step(), keep_tasks=True, stays=True)
    write_chrome_trace(step, tmp_path / "trace.json", name="mine")
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["traceEvents"][0]["args"]["name"] == "mine"
    assert len(content["traceEvents"]) > 50


def test_a_step_without_tasks_has_no_trace() -> None:
    with pytest.raises(ValueError, match="keep_tasks=True"):
        trace_events(run(make_step(), stays=True))
