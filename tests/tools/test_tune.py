"""``pager tune``: what it runs, prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pager import Config
from pager.statistics import Statistics
from pager.tools import cli, tune_runs
from pager.tools.model_source import ModelSource
from pager.tools.tune_runs import WARM_STEPS, MachineRuns, measure_steps
from pager.tools.tuner import Measurement, Setting

SMALL = ("--page-size", "16KiB", "--device", "cpu", "--steps", "2")


@pytest.fixture
def sizes(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"hidden": 64, "layers": 2, "heads": 2, "ffn": 96}))
    return str(path)


def test_it_tunes_writes_yaml_that_config_reads_and_says_what_it_did(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned.yaml"
    argv = ["tune", sizes, *SMALL, "--seq", "16", "--device-budget", "512KiB", "--out", str(out)]
    assert cli.main([*argv, "--update-at", "backward"]) == 0
    printed = capsys.readouterr().out
    assert "in the simulator" in printed
    assert "on this machine" in printed
    assert printed.endswith(out.read_text())
    config = Config.from_yaml(out)
    assert (config.device, config.device_budget, config.update_at) == ("cpu", 2**19, "backward")
    assert f"page_size={config.page_size}, prefetch_distance={config.prefetch_distance}: " in printed


@pytest.fixture
def on_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Setting], Measurement]], list[dict[str, Any]]]:
    """Gives runs on the machine these measurements; returns the knobs they were made with."""

    def set_runs(measure: Callable[[Setting], Measurement]) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []

        class Runs(MachineRuns):
            def measure(self, setting: Setting) -> Measurement:
                made.append(self._knobs)
                return measure(setting)

        monkeypatch.setattr(tune_runs, "MachineRuns", Runs)
        return made

    return set_runs


def test_the_machine_has_the_last_word(
    sizes: str, on_paper: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = on_paper(lambda s: Measurement(seconds=2 - min(s.prefetch_distance, 16) / 32, busy_share=0.5))
    out = tmp_path / "tuned.yaml"
    argv = ["tune", sizes, *SMALL, "--seq", "16", "--json", "--out", str(out), "--eviction", "lru"]
    assert cli.main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"] == {"page_size": "16KiB", "prefetch_distance": 16}
    assert found["seconds"] == 1.5
    assert found["gain"] == pytest.approx(1 - 1.5 / 1.875)
    first, again = found["stages"]["machine"]["trials"][:2]
    assert (first["why"], again["why"]) == ("as given", "the same again, for the noise")
    assert found["stages"]["simulated"]["trials"][0]["seconds"] > 0
    assert made[0] == {"device": "cpu", "device_budget": found["device_budget_bytes"], "eviction": "lru"}
    assert Config.from_yaml(out).prefetch_distance == 16


@pytest.mark.parametrize(("second", "loud"), [(1.2, True), (1.05, False)])
def test_a_loud_machine_is_named(
    second: float, loud: bool, sizes: str, on_paper: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([1.0, second])
    on_paper(lambda s: Measurement(seconds=next(times, 2.0), busy_share=0.9))
    assert cli.main(["tune", sizes, *SMALL, "--seq", "16"]) == 0
    assert ("were 20% apart: other work on this machine" in capsys.readouterr().out) == loud


def test_simulating_only_runs_nothing(sizes: str, on_paper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = on_paper(lambda s: Measurement(seconds=1.0))
    assert cli.main(["tune", sizes, *SMALL, "--seq", "16", "--simulate-only", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["stages"]) == ["simulated"]
    assert made == []


def test_where_everything_fits_there_is_nothing_to_tune(
    sizes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned.yaml"
    argv = ["tune", sizes, *SMALL, "--seq", "16", "--device-budget", "64MiB", "--out", str(out)]
    assert cli.main(argv) == 1
    assert "nothing to tune: nothing is paged in a step" in capsys.readouterr().err
    assert not out.exists()


def test_a_refused_run_says_why() -> None:
    linear = torch.nn.Linear(256, 256)
    source = ModelSource(
        name="linear", model=linear, args=(torch.ones(2, 256),), kwargs={}, tokens=2, dtype="float32"
    )
    runs = MachineRuns(lambda: source, knobs={"device": "cpu", "device_budget": "40KiB"}, steps=2, seed=0)
    found = runs.measure(Setting(page_bytes=2**14, prefetch_distance=4))
    assert found.reason is not None
    assert "device_budget" in found.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "1"], "--steps is 1; expected at least 2"),
        (["--prefetch-distance", "0"], "--prefetch-distance is 0; expected at least 1"),
        (["--page-size", "3KiB"], "page_size is '3KiB'"),
        (["--device", "tpu"], "device is 'tpu'"),
        (["--device-budget", "much", "--page-size", "16KiB"], "much"),
        (["--disk", "/nowhere"], "--disk /nowhere: there is no such folder"),
        (["--out", "/nowhere/tuned.yaml"], "--out /nowhere/tuned.yaml: cannot write there"),
        (["--out", "."], "--out .: cannot write there"),
    ],
)
def test_wrong_use(options: list[str], message: str, sizes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", sizes, *options]) == 2
    assert message in capsys.readouterr().err


# -- a measured run --------------------------------------------------------------------------------------


class Handle:
    """Counts as if each step paged, waited half a second, and threw out one of ten accesses' pages unused."""

    def __init__(self, per_step: Statistics) -> None:
        self.per_step = per_step
        self.clock = 0.0
        self.steps = 0

    def statistics(self) -> Statistics:
        names = ("page_in_bytes", "stall_seconds", "hits", "prefetch_unused")
        return replace(self.per_step, **{name: getattr(self.per_step, name) * self.steps for name in names})

    def step(self) -> None:
        self.steps += 1
        # Slow until warm; then 2 s, and one outlier.
        self.clock += 50.0 if self.steps <= WARM_STEPS else 9.0 if self.steps == WARM_STEPS + 1 else 2.0


def measured(**per_step: Any) -> Measurement:
    values = {"page_in_bytes": 10, "stall_seconds": 0.5, "hits": 10, "prefetch_unused": 1}
    known = {"device_budget_bytes": 200, "peak_resident_bytes": 100}
    handle = Handle(Statistics(**(values | known | per_step)))
    source = ModelSource(
        name="linear",
        model=torch.nn.Linear(4, 4),
        args=(torch.ones(2, 4),),
        kwargs={},
        tokens=2,
        dtype="float32",
    )
    optimizer: Any = SimpleNamespace(zero_grad=lambda: None, step=handle.step)
    return measure_steps(source, optimizer, handle, 5, clock=lambda: handle.clock)


def test_the_steady_state_is_measured() -> None:
    found = measured()
    assert found.seconds == 2.0
    assert found.noise == 0.0
    assert found.busy_share == pytest.approx(1 - 5 * 0.5 / (9 + 4 * 2))
    assert found.peak_share == 0.5
    assert found.wasted_share == pytest.approx(0.1)
    assert measured(peak_device_process_bytes=190).peak_share == 0.95


def test_a_run_that_pages_nothing_is_no_measurement() -> None:
    assert measured(page_in_bytes=0).reason is not None
