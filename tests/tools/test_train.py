"""`pager train` as a user runs it: what it decides, what it leaves, and how it ends."""

from __future__ import annotations

import argparse
import csv
import errno
import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import pager
from pager.device import cuda
from pager.tools import train, train_job
from pager.tools.cli import main, make_parser
from pager.tools.errors import InputError
from pager.tools.language_model import DecoderModel
from pager.tools.model_sizes import PRESETS
from pager.tools.report import ProgressBar
from pager.tools.train import Job, make_job, parse_budget

RESULTS = {
    "config.yaml",
    "losses.json",
    "plan.json",
    "plan.txt",
    "resident.csv",
    "resident.png",
    "statistics.json",
    "steps.jsonl",
}


def decide(*argv: str) -> Job:
    arguments: argparse.Namespace = make_parser().parse_args(["train", *argv])
    return make_job(arguments)


def run_tiny(out: Path, *argv: str) -> int:
    return main(["train", "--model", "tiny", "--device", "cpu", "--out", str(out), *argv])


def the_folder(out: Path) -> Path:
    (folder,) = out.iterdir()
    return folder


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# What is decided before anything runs


@pytest.mark.parametrize(
    ("text", "budget"),
    [("24GiB", "24GiB"), ("1000000", 1_000_000), ("0.5", 0.5), ("auto", "auto"), (".9", 0.9)],
)
def test_a_budget_is_read_as_the_library_takes_it(text: str, budget: Any) -> None:
    assert parse_budget(text) == budget
    assert type(parse_budget(text)) is type(budget)


@pytest.mark.parametrize("model", ["tiny", "small", "7b"])
def test_the_state_is_four_times_the_budget(model: str) -> None:
    job = decide("--model", model, "--device", "cpu")
    assert job.sizes == PRESETS[model]
    assert 4 * job.knobs["device_budget"] <= job.sizes.state_bytes < 4 * job.knobs["device_budget"] + 4


def test_without_a_gpu_the_default_is_the_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_devices", lambda: 0)
    job = decide()
    assert (job.model, job.steps, job.batch, job.seq, job.lr) == ("small", 100, 8, 128, 1e-3)


def test_with_a_gpu_the_default_is_large_enough_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_devices", lambda: 1)
    assert decide().model == "1b"
    assert decide("--device", "cpu").model == "small"
    assert decide("--model", "small").knobs["device_budget"] == train.MIN_GPU_BUDGET_BYTES


def test_what_is_given_is_taken(tmp_path: Path) -> None:
    sizes = tmp_path / "mine.json"
    sizes.write_text('{"hidden": 32, "layers": 1, "heads": 2, "ffn": 40}')
    options = {
        "--model": str(sizes),
        "--steps": "7",
        "--batch": "3",
        "--seq": "16",
        "--lr": "0.5",
        "--seed": "9",
        "--device": "cpu",
        "--device-budget": "3MiB",
        "--host-budget": "0.25",
        "--disk": str(tmp_path),
        "--disk-compression": "3",
        "--page-size": "64KiB",
        "--prefetch-distance": "auto",
        "--eviction": "lru",
    }
    job = decide(*(word for option in options.items() for word in option))
    assert (job.model, job.steps, job.batch, job.seq, job.lr, job.seed) == ("mine", 7, 3, 16, 0.5, 9)
    assert job.knobs == {
        "device": "cpu",
        "device_budget": "3MiB",
        "host_budget": 0.25,
        "disk": str(tmp_path),
        "disk_compression": 3,
        "page_size": "64KiB",
        "prefetch_distance": "auto",
        "eviction": "lru",
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "smal"), "did you mean 'small'"),
        (("--page-size", "100KiB"), "power of two"),
        (("--eviction", "random"), "belady"),
        (("--device-budget", "lots"), "device_budget is 'lots'"),
        (("--device-budget", "1.5"), "device_budget is 1.5"),
        (("--host-budget", "0"), "host_budget is 0 bytes"),
        (("--model", ""), "unknown model ''; known are .*small"),
    ],
)
def test_an_option_that_cannot_work_is_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decide("--device", "cpu", *argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--text", "no/such/file"), "there is no such file or folder"),
        (("--text", ""), "--text is empty text"),
        (("--text", "/dev/zero"), "--text /dev/zero: neither a regular file nor a folder"),
        (("--disk", "/proc"), "disk='/proc': .*No such file.*Name a folder"),
        (("--seq", "10000000"), "too few for --seq 10000000"),
        (("--out", "/dev/null/runs"), "cannot write there"),
        (("--eviction", "random"), "belady"),
        (("--device", "gpu"), 'device is .gpu.*"cuda'),
        (("--disk-compression", "zstd"), "disk_compression is set but disk is None"),
        (("--disk", ".", "--disk-compression", "lz4"), "disk_compression is 'lz4'; expected \"zstd\""),
        (("--disk", "/nonexistent"), "--disk /nonexistent: there is no such folder"),
        (("--disk", "/dev/null"), "--disk /dev/null: is not a folder"),
    ],
)
def test_bad_input_is_one_line_before_any_training(
    argv: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: Any, **options: Any) -> None:
        raise AssertionError("training began")

    monkeypatch.setattr(train_job, "train_steps", never)
    assert run_tiny(tmp_path, *argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--seed", "--steps", "--batch", "--seq"])
def test_a_number_beyond_64_bits_is_wrong_use(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tiny(tmp_path, option, str(2**63)) == 2
    assert re.search(
        rf"argument {option}: '{2**63}' is not a number from \d to {2**63 - 1}", capsys.readouterr().err
    )
    assert decide("--seed", str(2**63 - 1), "--device", "cpu").seed == 2**63 - 1


def test_the_largest_seed_trains(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, "--steps", "1", "--seed", str(2**63 - 1)) == 0
    assert len(read_json(the_folder(tmp_path) / "losses.json")["losses"]) == 1


# Whole runs


def test_a_disk_that_nothing_needs_is_said_to_have_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    assert run_tiny(tmp_path / "runs", "--steps", "1", "--disk", str(disk)) == 0
    assert f"warning: --disk {disk} had no effect" in capsys.readouterr().out


def test_a_full_disk_at_the_plot_is_one_line_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "resident.png" not in self.name:
            return original(self, data)
        original(self, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert run_tiny(tmp_path, "--steps", "1") == 1
    output = capsys.readouterr()
    assert re.search(
        r"^pager: cannot write \S+resident.png: No space left on device$", output.err, re.MULTILINE
    )
    assert "hit rate" in output.out
    assert {path.name for path in the_folder(tmp_path).iterdir()} == RESULTS - {"resident.png"}


def test_a_plot_that_cannot_be_drawn_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_job, "plot_resident", refuse)
    assert run_tiny(tmp_path, "--steps", "1") == 1
    assert "pager: cannot draw resident.png: No space left on device\n" in capsys.readouterr().err


def test_a_run_equals_plain_pytorch_and_leaves_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tiny(tmp_path, "--steps", "4", "--check") == 0
    output = capsys.readouterr()
    folder = the_folder(tmp_path)
    assert {path.name for path in folder.iterdir()} == RESULTS | {"check.json"}
    assert "check passed: 4 losses and 21 parameters are bit-equal" in output.out
    for line in ("bytes in", "peak / budget", "hit rate", "stall", "minor and", "nats/byte in 4 steps"):
        assert line in output.out
    for part in ("4/4", "loss=", "tokens/s=", "hit=", "stall="):
        assert part in output.err
    losses = read_json(folder / "losses.json")
    assert losses["status"] == "completed"
    assert losses["losses"] == read_json(folder / "check.json")["unmanaged_losses"]
    assert losses["steps_done"] == len(losses["step_seconds"]) == 4


def test_a_run_moves_pages_and_keeps_its_budget(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, "--steps", "4") == 0
    folder = the_folder(tmp_path)
    statistics = read_json(folder / "statistics.json")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    budget_bytes = config["knobs"]["device_budget"]
    assert statistics["pager/device_budget_bytes"] <= budget_bytes
    assert 0 < statistics["pager/peak_resident_bytes"] <= budget_bytes
    assert statistics["pager/page_in_bytes"] > budget_bytes
    assert statistics["pager/num_steps"] == 4
    with (folder / "resident.csv").open() as file:
        resident = [int(row["resident_bytes"]) for row in csv.DictReader(file)]
    assert 0 < max(resident) <= budget_bytes
    assert min(resident) < max(resident)


def test_a_run_can_be_repeated(tmp_path: Path) -> None:
    for name in ("first", "second"):
        assert run_tiny(tmp_path / name, "--steps", "3", "--seed", "5") == 0
    first, second = (
        read_json(the_folder(tmp_path / name) / "losses.json")["losses"] for name in ("first", "second")
    )
    assert first == second


def test_an_own_text_and_an_own_model_are_trained(tmp_path: Path) -> None:
    sizes = tmp_path / "mine.yaml"
    sizes.write_text("{hidden: 192, layers: 1, heads: 4, ffn: 256, checkpoint: true}")
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 100)
    options = ["--model", str(sizes), "--text", str(text), "--steps", "20", "--lr", "0.003", "--seq", "32"]
    assert main(["train", "--device", "cpu", "--out", str(tmp_path / "runs"), "--check", *options]) == 0
    losses = read_json(the_folder(tmp_path / "runs") / "losses.json")["losses"]
    assert losses[-1] < 1.0 < 5.0 < losses[0]


def after_steps(monkeypatch: pytest.MonkeyPatch, count: int, action: Callable[[], None]) -> None:
    """Do ``action`` when the bar of the run has counted ``count`` steps."""
    original = ProgressBar.step
    seen = []

    def step(self: ProgressBar, *arguments: Any) -> None:
        original(self, *arguments)
        seen.append(arguments)
        if len(seen) == count:
            action()

    monkeypatch.setattr(ProgressBar, "step", step)


def test_ctrl_c_leaves_the_results_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    after_steps(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run_tiny(tmp_path, "--steps", "50", "--check") == 130
    output = capsys.readouterr()
    folder = the_folder(tmp_path)
    losses = read_json(folder / "losses.json")
    assert (losses["status"], losses["steps_done"], losses["steps_asked"]) == ("interrupted", 2, 50)
    assert {path.name for path in folder.iterdir()} == RESULTS
    assert "interrupted after 2 of 50 steps" in output.out
    assert "hit rate" in output.out


def test_an_error_leaves_the_results_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DecoderModel.forward
    failing: list[bool] = []

    def forward(self: DecoderModel, *arguments: torch.Tensor) -> torch.Tensor:
        if failing:
            raise ZeroDivisionError("in the third step")
        return original(self, *arguments)

    monkeypatch.setattr(DecoderModel, "forward", forward)
    after_steps(monkeypatch, 2, lambda: failing.append(True))
    with pytest.raises(ZeroDivisionError, match="in the third step"):
        run_tiny(tmp_path, "--steps", "5")
    losses = read_json(the_folder(tmp_path) / "losses.json")
    assert (losses["status"], losses["steps_done"]) == ("failed", 2)


def test_a_difference_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = train_job.make_model
    made: list[DecoderModel] = []

    def make_model(*arguments: Any, **options: Any) -> DecoderModel:
        model = original(*arguments, **options)
        if made:  # the second model is the plain one
            with torch.no_grad():
                model.head.weight[0, 0] += 0.5
        made.append(model)
        return model

    monkeypatch.setattr(train_job, "make_model", make_model)
    assert run_tiny(tmp_path, "--steps", "2", "--check") == 1
    assert "check FAILED: 2 of 2 losses differ (first at step 0), " in capsys.readouterr().err
    check = read_json(the_folder(tmp_path) / "check.json")
    assert (check["losses_equal"], check["parameters_equal"]) == (False, False)
    assert any(line.startswith("head.weight: largest difference") for line in check["different_parameters"])


def test_a_budget_that_cannot_hold_the_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tiny(tmp_path, "--steps", "2", "--device-budget", "256KiB") == 1
    error = capsys.readouterr().err
    assert error.startswith("pager: ")
    assert error.count("pager: ") == 1
    assert "256.00 KiB" in error
    assert list(tmp_path.iterdir()) == []  # there was no run


def test_without_matplotlib_a_run_says_so_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_tiny(tmp_path, "--steps", "1") == 0
    assert "no plot, since matplotlib is not installed" in capsys.readouterr().out
    assert {path.name for path in the_folder(tmp_path).iterdir()} == RESULTS - {"resident.png"}


def test_the_version_of_the_run_is_recorded(tmp_path: Path) -> None:
    assert run_tiny(tmp_path, "--steps", "1") == 0
    config = yaml.safe_load((the_folder(tmp_path) / "config.yaml").read_text())
    assert config["versions"] == {"pager": pager.__version__, "torch": str(torch.__version__)}
    assert (config["model"], config["steps"], config["seed"]) == ("tiny", 1, 0)
