"""The view of a run: its lines, its characters, its plain values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pager.statistics import Statistics
from pager.tools.monitor.recorded import RecordedRun
from pager.tools.monitor.view import ASCII, UNICODE, as_dict, glyphs_for, render, spark
from pager.tools.step_log import StepLine

CONFIG = {"model": "tiny", "steps": 10, "batch": 2, "seq": 8, "knobs": {"page_size": "16KiB"}}
GiB = 2**30


def make_run(path: Path, *, steps: int = 2, loss: float | None = 1.5) -> RecordedRun:
    run = RecordedRun(path, CONFIG)
    run.status = "running"
    for step in range(1, steps + 1):
        statistics = Statistics(
            hits=90 * step,
            minor_faults=7 * step,
            major_faults=3 * step,
            refaults=2 * step,
            page_in_bytes=10**9 * step,
            page_out_bytes=5 * 10**8 * step,
            stall_seconds=0.1 * step,
            resident_bytes=GiB,
            peak_resident_bytes=2 * GiB,
            device_budget_bytes=2 * GiB,
            wired_bytes=GiB // 2,
            host_bytes=GiB,
            peak_host_bytes=GiB,
            host_budget_bytes=4 * GiB,
        )
        line = StepLine(step, 0.5, loss, statistics, ((step, GiB), (step + 0.1, 2 * GiB), (step + 0.2, 0)))
        run.first = run.first or line
        run.recent.append(line)
    return run


def test_the_view_has_a_line_for_everything(tmp_path: Path) -> None:
    lines = render(make_run(tmp_path), ASCII)
    assert lines[0] == "tiny: running, step 2 of 10, 0.500 s, 32 tokens/s, loss 1.500"
    assert lines[1] == (
        "device   ############............ 1.00 GiB of 2.00 GiB, peak 2.00 GiB, 512.00 MiB wired"
    )
    assert lines[2] == "host     ######.................. 1.00 GiB of 4.00 GiB, peak 1.00 GiB"
    assert lines[3] == "disk     -"
    assert lines[4] == (
        "accesses 90.0% hits, 7 minor and 3 major faults, 2 refaults; prefetch 0 late, 0 unused"
    )
    assert lines[5] == "stall    0.100 s, 20.0% of the step"
    assert lines[6] == (
        "links    page in 2.00 GB/s, page out 1.00 GB/s, disk read 0.00 GB/s, disk write 0.00 GB/s"
    )
    assert lines[7] == "resident -#_"
    assert lines[8].startswith("Too short")


def test_before_the_first_step_and_without_a_loss(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0)
    assert render(run, ASCII) == ["tiny: running, no step was logged yet"]
    run.status = "killed"
    assert render(run, ASCII) == ["tiny: killed, no step was logged"]
    assert as_dict(run)["steps_done"] == 0
    assert render(make_run(tmp_path, loss=None), ASCII)[0].endswith("loss nan")


def test_the_first_step_is_shown_alone(tmp_path: Path) -> None:
    values = as_dict(make_run(tmp_path, steps=1))
    assert (values["hit_rate"], values["refaults"], values["stall_seconds"]) == (0.9, 2, 0.1)


def test_plain_values_are_json(tmp_path: Path) -> None:
    values = as_dict(make_run(tmp_path))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["tiers"]["device"] == {"bytes": GiB, "peak_bytes": 2 * GiB, "budget_bytes": 2 * GiB}
    assert values["links"]["page_in_bytes_per_second"] == 2e9
    assert values["diagnosis"]["kind"] == "too short"


@pytest.mark.parametrize(
    ("encoding", "glyphs"), [("utf-8", UNICODE), ("ascii", ASCII), (None, ASCII), ("no", ASCII)]
)
def test_a_terminal_without_blocks_gets_letters(encoding: str | None, glyphs: object) -> None:
    assert glyphs_for(encoding) is glyphs


@pytest.mark.parametrize(
    ("values", "chart"),
    [([], ""), ([0, 4, 8], "_-#"), ([9, 100], "##"), ([-1], "_"), (list(range(9)), "_.-*#")],
)
def test_a_chart(values: list[int], chart: str) -> None:
    assert spark(values, 8, ASCII, width=5) == chart
    assert spark(values, 0, ASCII) == ""
