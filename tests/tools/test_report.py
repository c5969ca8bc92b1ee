"""What a run shows and keeps: table, plot, bar, and a folder that is tried before the work."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pager.statistics import Statistics
from pager.tools import report, run_folder
from pager.tools.errors import CommandFailed, InputError
from pager.tools.report import ProgressBar, format_table, interval_hit_rate, plot_resident
from pager.tools.run_folder import RunFolder, make_run_folder

MEBIBYTE = 2**20
STATISTICS = Statistics(
    page_in_bytes=30 * MEBIBYTE,
    page_out_bytes=20 * MEBIBYTE,
    disk_read_bytes=3 * MEBIBYTE,
    disk_write_bytes=2 * MEBIBYTE,
    hits=90,
    minor_faults=7,
    major_faults=3,
    stall_seconds=0.5,
    peak_resident_bytes=9 * MEBIBYTE,
    device_budget_bytes=10 * MEBIBYTE,
    peak_host_bytes=40 * MEBIBYTE,
    host_budget_bytes=80 * MEBIBYTE,
)


def make_table(statistics: Statistics = STATISTICS, **changes: Any) -> dict[str, str]:
    """Name of the line -> the rest of it."""
    arguments = {"losses": [5.5, 4.0, 2.25], "tokens": 6000, "seconds": 2.0, **changes}
    lines = format_table(statistics, **arguments).splitlines()
    return {line[:15].strip(): " ".join(line[15:].split()) for line in lines if line}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bytes in", "30.00 MiB 23.00 MiB 2.00 MiB"),
        ("bytes out", "20.00 MiB 32.00 MiB 3.00 MiB"),
        ("peak", "9.00 MiB 40.00 MiB -"),
        ("budget", "10.00 MiB 80.00 MiB -"),
        ("peak / budget", "90.0% 50.0% -"),
        ("accesses", "100: 90 hits, 7 minor and 3 major faults"),
        ("hit rate", "90.00%"),
        ("pages peak", "9.00 MiB on the device"),
        ("stall", "0.50 s, 25.0% of 2.0 s"),
        ("speed", "3,000 tokens/s"),
        ("loss", "5.500 -> 2.250 nats/byte in 3 steps"),
    ],
)
def test_the_table_has_a_line_for_everything(name: str, expected: str) -> None:
    assert make_table()[name] == expected


def test_on_a_gpu_the_peak_is_that_of_the_process() -> None:
    table = make_table(dataclasses.replace(STATISTICS, peak_device_process_bytes=5 * MEBIBYTE))
    assert table["peak"] == "5.00 MiB 40.00 MiB -"
    assert table["peak / budget"] == "50.0% 50.0% -"


def test_a_run_without_a_step_has_a_table_too() -> None:
    table = make_table(losses=[], tokens=0, seconds=0.0)
    assert "loss" not in table
    assert table["speed"] == "0 tokens/s"
    assert table["stall"] == "0.50 s, - of 0.0 s"


def test_the_hit_rate_of_an_interval_counts_that_interval() -> None:
    assert interval_hit_rate(STATISTICS, STATISTICS) == 1.0
    later = Statistics(hits=91, minor_faults=8, major_faults=5)
    assert interval_hit_rate(STATISTICS, later) == pytest.approx(1 / 4)


def test_the_bar_shows_loss_speed_hits_and_stall(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(steps=1, tokens_per_step=100, title="tiny")
    bar.step(2.5, 1.0, STATISTICS)
    bar.say("a line above")
    bar.close()
    output = capsys.readouterr()
    for part in ("tiny: 100%", "1/1", "loss=2.500", "tokens/s=100", "hit=90.0%", "stall=50.0%"):
        assert part in output.err
    assert "a line above" in output.out + output.err


def test_the_plot_shows_the_sawtooth_and_the_budget(tmp_path: Path) -> None:
    from matplotlib.image import imread

    history = [(0.01 * i, (i % 50) * MEBIBYTE // 5) for i in range(500)]
    path = tmp_path / "resident.png"
    assert plot_resident(path, history, budget_bytes=10 * MEBIBYTE, title="tiny") is None
    pixels = np.asarray(imread(path))[..., :3]
    red = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.4) & (pixels[..., 2] < 0.4)
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.4)
    height = pixels.shape[0]
    (budget_rows,) = np.nonzero(red.sum(axis=1) > 200)  # the dashed line crosses the picture, near its top
    assert 0 < budget_rows.min() <= budget_rows.max() < height / 3
    blue_rows = np.nonzero(blue.any(axis=1))[0]
    assert np.ptp(blue_rows) > height / 2


def test_a_long_run_gets_a_closeup_of_its_end(tmp_path: Path) -> None:
    from matplotlib.image import imread

    history = [(0.01 * i, (i % 50) * MEBIBYTE // 5) for i in range(500)]
    shapes = []
    for closeup_seconds in (0.0, 1.0, 100.0):  # none, one, and one that would show everything again
        path = tmp_path / f"{closeup_seconds}.png"
        plot_resident(path, history, budget_bytes=1, title="tiny", closeup_seconds=closeup_seconds)
        shapes.append(np.asarray(imread(path)).shape[:2])
    assert shapes[0] == shapes[2]
    assert shapes[1] == (2 * shapes[0][0], shapes[0][1])


def test_without_matplotlib_the_run_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = plot_resident(tmp_path / "resident.png", [(0.0, 1)], budget_bytes=2, title="tiny")
    assert reason is not None
    assert "torch-pager[plot]" in reason
    assert list(tmp_path.iterdir()) == []


def test_without_a_sample_there_is_no_plot(tmp_path: Path) -> None:
    reason = plot_resident(tmp_path / "resident.png", [], budget_bytes=2, title="tiny")
    assert reason == "no plot, since nothing was resident yet"


def test_a_run_folder_is_new_each_time(tmp_path: Path) -> None:
    folders = [make_run_folder(tmp_path / "deep" / "runs", "tiny") for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        assert "-tiny" in folder.path.name
        assert list(folder.path.iterdir()) == []


def test_results_are_written_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("losses.json", {"losses": [1.5]})
    folder.write_yaml("config.yaml", {"steps": 3, "batch": 2})
    folder.write_csv("resident.csv", ("seconds", "resident_bytes"), [(0.5, 10), (1.0, 20)])
    assert json.loads((tmp_path / "losses.json").read_text()) == {"losses": [1.5]}
    assert list(yaml.safe_load((tmp_path / "config.yaml").read_text())) == ["steps", "batch"]
    assert (tmp_path / "resident.csv").read_text() == "seconds,resident_bytes\n0.5,10\n1.0,20\n"
    assert {path.name for path in tmp_path.iterdir()} == {"losses.json", "config.yaml", "resident.csv"}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("losses.json", "old")

    def full(self: Path, data: bytes) -> int:
        with builtins.open(self, "wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CommandFailed, match=r"cannot write .*losses.json: No space left on device"):
        folder.write_text("losses.json", "new")
    assert (tmp_path / "losses.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["losses.json"]


@pytest.mark.parametrize("out", ["file/runs", "file"])
def test_an_output_folder_that_cannot_be_is_refused(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"--out .*: cannot write there"):
        make_run_folder(tmp_path / out, "tiny")


def test_an_output_folder_without_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(InputError, match=r"1000 B free, but the results may take 32.00 MiB"):
        make_run_folder(tmp_path, "tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(InputError, match=r"cannot write there \(Permission denied\)"):
        make_run_folder(tmp_path, "tiny")


def test_modules_under_test_are_those_of_the_package() -> None:
    assert report.__name__ == "pager.tools.report"
    assert run_folder.__name__ == "pager.tools.run_folder"
