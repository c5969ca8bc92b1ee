"""Folders of runs that train, are over, were killed, or are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from pager.statistics import Statistics
from pager.tools.errors import InputError
from pager.tools.monitor.recorded import RECENT_STEPS, open_run
from pager.tools.step_log import StepLog

CONFIG = {"model": "tiny", "steps": 40, "batch": 4, "seq": 64, "knobs": {"page_size": "64KiB"}}


def make_folder(path: Path, config: Any = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def write_steps(log: StepLog, first: int, last: int) -> None:
    """Each takes 2 s, waits 0.5 s, moves 10 bytes in and 8 out, and has one sample."""
    for step in range(first, last + 1):
        statistics = Statistics(
            page_in_bytes=10 * step,
            page_out_bytes=8 * step,
            hits=90 * step,
            major_faults=10 * step,
            refaults=5 * step,
            stall_seconds=0.5 * step,
            device_budget_bytes=1000,
            wired_bytes=100,
        )
        log.write(step, loss=1.0, seconds=2.0, statistics=statistics, history=[(2.0 * step, step)])


def finish(folder: Path, status: str = "completed") -> None:
    (folder / "losses.json").write_text(json.dumps({"status": status}))


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = open_run(str(make_folder(tmp_path)))
    run.update()
    assert (run.status, run.is_over, run.last) == ("starting", False, None)
    assert (run.model, run.steps_asked, run.tokens_per_step, run.page_size) == ("tiny", 40, 256, 64 * 1024)
    log = StepLog(tmp_path)
    write_steps(log, 1, 3)
    run.update()
    assert (run.status, run.is_over) == ("running", False)
    assert run.last is not None
    assert run.last.step == 3
    finish(tmp_path)
    log.close()
    run.update()
    assert (run.status, run.is_over) == ("completed", True)


def test_a_run_that_no_longer_holds_its_log_was_killed(tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = StepLog(tmp_path)
    write_steps(log, 1, 1)
    log.close()
    run = open_run(str(tmp_path))
    run.update()
    assert run.status == "killed"
    assert run.is_over


def test_results_that_come_while_it_is_looked_at_are_not_a_killed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path)
    log = StepLog(tmp_path)
    write_steps(log, 1, 1)
    run = open_run(str(tmp_path))

    def end_meanwhile() -> bool:
        finish(tmp_path, "interrupted")
        log.close()
        return False

    monkeypatch.setattr(run._reader, "is_being_written", end_meanwhile)
    run.update()
    assert run.status == "interrupted"


@pytest.mark.parametrize("num_steps", [1, 2, 5, 40])
def test_traffic_is_that_of_the_steps_whose_samples_are_shown(num_steps: int, tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = StepLog(tmp_path)
    write_steps(log, 1, num_steps)
    run = open_run(str(tmp_path))
    run.update()
    shown = 1 if num_steps == 1 else min(num_steps - 1, RECENT_STEPS)
    traffic = run.traffic()
    assert len(run.samples()) == traffic.num_steps == shown
    assert (traffic.seconds, traffic.stall_seconds) == (2.0 * shown, 0.5 * shown)
    assert (traffic.page_in_bytes, traffic.page_out_bytes) == (10 * shown, 8 * shown)
    assert (traffic.num_accesses, traffic.refaults) == (100 * shown, 5 * shown)
    assert (traffic.budget_bytes, traffic.wired_bytes, traffic.page_size) == (1000, 100, 64 * 1024)
    log.close()


def test_a_run_that_is_over_shows_all_of_it(tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = StepLog(tmp_path)
    write_steps(log, 1, 40)
    (tmp_path / "resident.csv").write_text("seconds,resident_bytes\n0.5,7\n1.5,9\n")
    finish(tmp_path)
    log.close()
    run = open_run(str(tmp_path))
    run.update()
    assert run.samples() == [(0.5, 7), (1.5, 9)]
    traffic = run.traffic()
    assert (traffic.num_steps, traffic.seconds, traffic.stall_seconds) == (39, 78.0, 19.5)


def test_what_is_wired_is_read_from_the_plan(tmp_path: Path) -> None:
    make_folder(tmp_path)
    log = StepLog(tmp_path)
    write_steps(log, 1, 2)
    run = open_run(str(tmp_path))
    run.update()
    assert (run.traffic().wired, run.traffic().managed_bytes) == ({}, 0)
    segments = [
        {"kind": "parameter", "home": "device", "num_pages": 2},
        {"kind": "state", "home": "device", "num_pages": 3},
        {"kind": "state", "home": "device", "num_pages": 1},
        {"kind": "state", "home": "host", "num_pages": 5},
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"page_size": 10, "segments": segments}))
    assert run.traffic().wired == {"parameter": 20, "state": 40}
    assert run.traffic().managed_bytes == 110
    log.close()


def test_what_is_no_run_is_told_and_the_newest_run_in_it_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: there is no such folder"):
        open_run(str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: is not a folder"):
        open_run(str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"it has no config.yaml\)$"):
        open_run(str(tmp_path))
    for age, name in enumerate(("new", "old")):
        os.utime(make_folder(tmp_path / name) / "config.yaml", (1e9 - age, 1e9 - age))
    with pytest.raises(InputError, match=f"the newest run in it is {tmp_path / 'new'}$"):
        open_run(str(tmp_path))


@pytest.mark.parametrize(
    "config", [["a list"], {"steps": "many"}, {"knobs": {"page_size": "big"}}, {"knobs": [1]}]
)
def test_a_config_that_no_run_wrote(config: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config.yaml: cannot be read"):
        open_run(str(make_folder(tmp_path, config)))


@pytest.mark.parametrize(
    ("name", "content"),
    [("losses.json", "{"), ("losses.json", "[]"), ("resident.csv", "seconds,resident_bytes\n1.0,x\n")],
)
def test_results_that_no_run_wrote(name: str, content: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / name).write_text(content)
    run = open_run(str(tmp_path))

    def look() -> None:
        run.update()
        run.samples()

    with pytest.raises(InputError, match=name):
        look()
