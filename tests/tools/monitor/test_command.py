"""``pager monitor`` as a user runs it, on a run of ``pager train``."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pager.tools.cli import main
from pager.tools.monitor import command
from pager.tools.monitor.recorded import RecordedRun, open_run
from pager.tools.step_log import StepLog
from tests.tools.monitor.test_recorded import finish, make_folder, write_steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real run of a few steps."""
    out = tmp_path_factory.mktemp("runs")
    assert main(["train", "--model", "tiny", "--device", "cpu", "--steps", "3", "--out", str(out)]) == 0
    (folder,) = out.iterdir()
    return folder


def test_a_real_run_is_shown_once_into_a_pipe(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(trained)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tiny: completed, step 3 of 3, ")
    assert [line.split(" ")[0] for line in lines[1:8]] == [
        "device",
        "host",
        "disk",
        "accesses",
        "stall",
        "links",
        "resident",
    ]
    assert lines[8].split(":")[0] in ("Full", "Healthy", "Jagged", "Uneven")


def test_the_state_of_a_real_run_as_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(trained), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    statistics = json.loads((trained / "statistics.json").read_text())
    assert (state["status"], state["steps_done"], state["steps_asked"]) == ("completed", 3, 3)
    assert state["tiers"]["device"]["budget_bytes"] == statistics["pager/device_budget_bytes"]
    assert state["tiers"]["device"]["peak_bytes"] == statistics["pager/peak_resident_bytes"]
    assert state["links"]["page_in_bytes_per_second"] > 0
    assert state["diagnosis"]["kind"] in ("full", "healthy", "jagged", "uneven")


def test_a_model_that_fits_is_flat_and_the_reason_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--model", "tiny", "--device", "cpu", "--steps", "2", "--device-budget", "64MiB"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    capsys.readouterr()
    assert main(["monitor", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Flat: nothing is paged out, 19.00 MiB stay on the device. Wired are 19.00 MiB (state " in text
    assert "it fits the budget of 64.00 MiB" in text


def test_the_plot_is_drawn_and_explained(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.image import imread

    file = tmp_path / "sawtooth.png"
    assert main(["monitor", str(trained), "--plot", str(file)]) == 0
    assert capsys.readouterr().out == f"{open_and_read(trained).diagnosis().text}\n"
    pixels = imread(file)
    assert pixels.shape[0] > 300
    # The curve and its budget: blue and red on white.
    assert ((pixels[..., 2] - pixels[..., 0]) > 0.3).sum() > 100
    assert ((pixels[..., 0] - pixels[..., 2]) > 0.3).sum() > 100


def open_and_read(folder: Path) -> RecordedRun:
    run = open_run(str(folder))
    run.update()
    return run


def test_a_plot_that_cannot_be_written_or_drawn(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "missing" / "sawtooth.png"
    assert main(["monitor", str(trained), "--plot", str(file)]) == 1
    assert capsys.readouterr() == ("", f"pager: --plot {file}: cannot write it: No such file or directory\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["monitor", str(trained), "--plot", str(tmp_path / "x.png")]) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err
    make_folder(tmp_path / "new")
    assert main(["monitor", str(tmp_path / "new"), "--plot", str(tmp_path / "x.png")]) == 1
    assert "no step was logged in" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"pager: {tmp_path}: no run of `pager train`")


@pytest.fixture
def growing(tmp_path: Path) -> tuple[RecordedRun, Callable[[], None], list[int]]:
    """A run that makes a step at each wait, waits once for nothing, and ends after the third."""
    folder = make_folder(tmp_path)
    log = StepLog(folder)
    waits: list[int] = []

    def wait() -> None:
        waits.append(len(waits))
        if len(waits) == 2:
            return
        write_steps(log, len(waits), len(waits))
        if len(waits) == 3:
            finish(folder)
            log.close()

    run = open_run(str(folder))
    run.update()
    return run, wait, waits


@pytest.mark.parametrize("can_move", [True, False])
def test_the_view_is_renewed_until_the_run_ends(
    can_move: bool,
    growing: tuple[RecordedRun, Callable[[], None], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, wait, waits = growing
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    prose = " and".join(["five words of prose here"] * 3)
    command.follow(
        run, lambda: [f"{run.status} {run.last and run.last.step}", prose], out, wait, can_move=can_move
    )
    assert len(waits) == 3
    text = out.getvalue()
    views = [line for line in text.split("\n") if "prose" not in line]
    if can_move:
        # Three or more lines a view, since prose is wrapped; drawn over twice, not for the wait in vain.
        assert text.count("\x1b[5A\x1b[J") == text.count("\x1b") // 2 == 2
        assert max(map(len, text.replace("\x1b[5A\x1b[J", "").split("\n"))) < 30
        assert text.index("starting None") < text.index("running 1") < text.index("completed 3")
    else:
        assert views == ["starting None", "running 1", "completed 3", ""]


def test_ctrl_c_ends_the_view_well(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "follow", interrupted)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert command.run(argparse.Namespace(folder=str(trained), plot=None, json=False)) == 0
