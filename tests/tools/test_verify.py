"""``pager verify``: equal bits, different bits and their cause, and what is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pager.config import Checks
from pager.tools import cli, verifier
from pager.tools.verify_run import Comparison, Masters, Record, train_managed

# Matrices of a few small pages each, one of them used twice; dropout, so that a wrong seed shows.
MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(160, 128)
        self.body = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128))
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, ids):
        self.seen += 1
        return (self.body(self.words(ids)) @ self.words.weight.t()).logsumexp(-1)

def make():
    return Tied(), (torch.arange(24).reshape(2, 12),)

def floats():
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), (torch.empty(4, 128, device="meta"),)

class Moody(Tied):
    times = 0
    def forward(self, ids):
        Moody.times += 1
        return super().forward(ids) * Moody.times

def moody(): return Moody(), (torch.arange(24).reshape(2, 12),)

class Broken(Tied):
    def forward(self, ids): raise KeyError("no such head")

def broken(): return Broken(), (torch.arange(24).reshape(2, 12),)

class Flat(Tied):
    def forward(self, ids): return super().forward(ids).detach()

def flat(): return Flat(), (torch.arange(24).reshape(2, 12),)

def on_meta(): return nn.Linear(128, 128, device="meta"), (torch.zeros(2, 128),)
"""
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def verify(file: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run on a function of the file; exit code and what it printed."""

    def run(function: str, *options: str) -> tuple[int, dict[str, Any]]:
        argv = ["verify", f"{file}:{function}", "--device", "cpu", "--page-size", "16KiB", "--json", *options]
        code = cli.main(argv)
        return code, json.loads(capsys.readouterr().out)

    return run


def by_kind(found: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found["tensors"]:
        kinds.setdefault(row["kind"], []).append(row)
    return kinds


def test_a_paged_run_has_the_same_bits(verify: Run) -> None:
    code, found = verify("make")
    assert (code, found["equal"], found["num_different"]) == (0, True, 0)
    assert found["page_in_bytes"] > 0
    assert found["page_out_bytes"] > 0
    kinds = by_kind(found)
    assert {kind: len(rows) for kind, rows in kinds.items()} == {
        "gradient": 5,
        "loss": 1,
        "gradient in p.grad": 5,
        "parameter": 5,
        "buffer": 1,
        "optimizer state": 15,
    }
    assert all(row["times"] == 3 for row in kinds["gradient"] + kinds["loss"])
    (words,) = [row for row in kinds["gradient"] if row["name"] == "words.weight"]
    assert words["shape"] == [160, 128]
    assert words["norm"] == words["plain_norm"] > 0
    assert kinds["buffer"][0]["norm"] == 3


def test_gradients_that_are_used_up_are_compared_as_they_come(verify: Run) -> None:
    code, found = verify("make", "--update-at", "backward", "--optimizer", "sgd")
    assert code == 0
    kinds = by_kind(found)
    assert "gradient in p.grad" not in kinds
    assert [row["times"] for row in kinds["gradient"]] == [3] * 5
    assert len(kinds["optimizer state"]) == 5


def test_the_cpus_update_differs_and_is_named(verify: Run) -> None:
    code, found = verify("make", "--update-on", "cpu", "--update-at", "backward")
    assert code == 1
    assert found["trials"][0] == {"without": "update_on=cpu", "equal": True, "reason": ""}
    assert [trial["equal"] for trial in found["trials"][1:]] == [False] * 3  # update_at, page size, prefetch
    assert "expected, see the table in README.md" in found["explanation"][-1]
    worst = max(row["max_difference"] for row in found["tensors"] if row["kind"] == "parameter")
    assert 0 < worst < 1e-6


def test_inputs_on_meta_are_drawn_and_seeds_matter(verify: Run) -> None:
    losses = [
        [row["norm"] for row in verify("floats", "--seed", seed, "--steps", "1")[1]["tensors"]]
        for seed in ("0", "0", "1")
    ]
    assert losses[0] == losses[1] != losses[2]
    assert min(losses[0]) > 0


def test_masters_are_compared_with_a_loop_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = tmp_path / "half.json"
    sizes.write_text(json.dumps({"hidden": 64, "layers": 1, "heads": 2, "ffn": 96, "dtype": "bfloat16"}))
    options = ("--device", "cpu", "--page-size", "16KiB", "--seq", "16", "--batch", "2")
    assert cli.main(["verify", str(sizes), *options, "--master", "float32"]) == 0
    out = capsys.readouterr().out
    assert "embedding.weight.master" in out
    assert "bit-equal: 85 tensors" in out


def test_the_disk_can_be_part_of_it(verify: Run, tmp_path: Path) -> None:
    code, found = verify("make", "--disk", str(tmp_path), "--host-budget", "1", "--disk-budget", "64MiB")
    assert code == 0
    assert found["disk_read_bytes"] > 0
    assert found["disk_write_bytes"] > 0


def test_the_disk_can_be_compressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16: of fp32 pages as small as these do not shrink by a block."""
    sizes = tmp_path / "half.json"
    sizes.write_text(json.dumps({"hidden": 128, "layers": 1, "heads": 2, "ffn": 192, "dtype": "bfloat16"}))
    options = ["--device", "cpu", "--page-size", "16KiB", "--seq", "16", "--batch", "2", "--host-budget", "1"]
    disk = ["--disk", str(tmp_path), "--disk-budget", "64MiB", "--disk-compression", "zstd"]
    assert cli.main(["verify", str(sizes), *options, *disk]) == 0
    out = capsys.readouterr().out
    assert "bit-equal" in out
    assert "; compression spared it " in out


def test_a_disk_without_effect_says_so(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["verify", f"{file}:make", "--device", "cpu", "--page-size", "16KiB", "--disk", str(tmp_path)]
    assert cli.main([*argv, "--disk-budget", "64MiB"]) == 0
    assert "the disk had no effect" in capsys.readouterr().out


def test_a_pager_that_does_not_wait_for_its_copies_is_caught(
    verify: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = functools.partial(Checks, streams="late", skip_wait=lambda stream, event: True)
    monkeypatch.setattr(verifier, "Checks", broken)
    code, found = verify("make", "--prefetch-distance", "0")
    assert code == 1
    assert "with nothing paged bit-equal: paging makes the difference" in found["explanation"]
    assert "not expected" in found["explanation"][-1]


def test_a_budget_that_holds_everything_says_little(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--device-budget", "64MiB"], ["--no-paging"]):
        assert cli.main(["verify", f"{file}:floats", "--device", "cpu", "--steps", "1", *options]) == 0
        assert "nothing was paged: the budget holds everything" in capsys.readouterr().out


class Nudged:
    """Shows a gradient with another last bit."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def see(self, kind: str, name: str, step: int, tensor: Tensor) -> None:
        if (kind, name, step) == ("gradient", "body.0.weight", 2):
            tensor = torch.nextafter(tensor.detach(), torch.tensor(1.0))
        self._observer.see(kind, name, step, tensor)


def test_a_wrong_bit_is_found_placed_and_attributed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nudging(work: Any, knobs: dict[str, Any], observer: Any) -> Any:
        wrong = knobs["eviction"] == "lru"
        return train_managed(work, knobs, Nudged(observer) if wrong else observer)

    monkeypatch.setattr(verifier, "train_managed", nudging)
    argv = ["verify", f"{file}:make", "--device", "cpu", "--page-size", "16KiB"]
    assert cli.main(argv) == 0
    capsys.readouterr()
    assert cli.main([*argv, "--eviction", "lru"]) == 1
    out = capsys.readouterr().out
    assert "different: 1 of 32 tensors\n  gradient body.0.weight: from step 2 on, by at most " in out
    assert "with eviction=belady bit-equal: eviction=lru makes the difference" in out
    assert "not expected" in out


def test_a_model_that_differs_from_itself_is_not_blamed_on_pager(verify: Run) -> None:
    code, found = verify("moody")
    assert code == 1
    assert found["trials"] == []
    assert "two runs without pager differ" in found["explanation"][0]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("broken", [], "its step without pager raised KeyError; see the traceback above"),
        ("flat", [], "nothing in what the model returns has a gradient"),
        ("on_meta", [], "puts its parameters on meta itself"),
        ("nothing", [], "has no function 'nothing'"),
        ("make", ["--steps", "0"], "--steps is 0; expected at least 1"),
        ("make", ["--lr", "nan"], "--lr is nan"),
        ("make", ["--page-size", "3KiB"], "page_size is '3KiB'"),
        ("make", ["--device", "tpu"], "device is 'tpu'"),
        ("make", ["--device-budget", "much"], "much"),
        ("make", ["--device-budget", "1MiB", "--no-paging"], "contradict each other"),
        ("make", ["--disk-compression", "zstd"], "disk_compression is set but disk is None"),
        ("make", ["--disk", "/tmp", "--disk-compression", "0"], "disk_compression is 0; expected"),
        ("make", ["--disk", "/nowhere"], "--disk /nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_verified_is_wrong_use(
    function: str, options: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", f"{file}:{function}", "--device", "cpu", *options]) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""


def test_a_budget_too_small_is_a_refusal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["verify", f"{file}:make", "--device", "cpu", "--page-size", "16KiB", "--device-budget", "40KiB"]
    assert cli.main(argv) == 1
    assert "device_budget" in capsys.readouterr().err


def test_exact_ties_of_a_master_go_as_the_pagers() -> None:
    """1 + 2**-8 lies between two weights: the weight is 1, and a paged master moves by one unit towards it."""
    for num_paged, expected in ((1, 1 + 2**-8 - 2**-23), (2**20, 1 + 2**-8)):
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        masters = Masters(model, num_paged)
        with torch.no_grad():
            model.weight.fill_(1)
            masters.masters[0].fill_(1)
        model.weight.grad = torch.full_like(model.weight, -(2**-8))
        masters.step(torch.optim.SGD(masters.masters, lr=1.0))
        assert model.weight.tolist() == [[1.0, 1.0]]
        assert masters.masters[0].tolist() == [[expected] * 2]


# -- the comparison --------------------------------------------------------------------------------------

ONE, NAN = torch.tensor([1.0, 0.0]), torch.tensor([float("nan")])


@pytest.mark.parametrize(
    ("plain", "managed", "equal", "difference", "note"),
    [
        (ONE, ONE.clone(), True, 0.0, ""),
        (ONE, torch.tensor([1.0, -0.0]), False, 0.0, ""),
        (ONE, torch.tensor([1.5, 0.0]), False, 0.5, ""),
        (NAN, NAN.clone(), True, 0.0, ""),
        (ONE, ONE.double(), False, 0.0, "float32 (2,) without pager"),
        (ONE, ONE[:1], False, 0.0, "float32 (2,) without pager"),
    ],
)
def test_bits_are_compared(plain: Tensor, managed: Tensor, equal: bool, difference: float, note: str) -> None:
    record = Record()
    record.see("parameter", "w", 3, plain)
    comparison = Comparison(record)
    comparison.see("parameter", "w", 3, managed)
    (row,) = comparison.rows()
    assert (row.equal, row.max_difference, row.note) == (equal, difference, note)
    assert row.first_step == (None if equal else 3)


def test_a_record_keeps_copies() -> None:
    record, tensor = Record(), torch.ones(3)
    record.see("parameter", "w", 1, tensor)
    tensor.zero_()
    assert record.seen["parameter", "w"][0][1].sum() == 3


def test_what_is_on_one_side_only_differs() -> None:
    record = Record()
    see = functools.partial(record.see, "gradient")
    see("a", 1, ONE)
    see("a", 2, ONE)
    see("b", 1, ONE)
    comparison = Comparison(record)
    comparison.see("gradient", "a", 1, ONE)
    comparison.see("gradient", "c", 1, ONE)
    rows = {row.name: row for row in comparison.rows()}
    assert list(rows) == ["a", "b", "c"]
    assert (rows["a"].note, rows["a"].first_step) == ("not there with pager", 2)
    assert (rows["b"].note, rows["b"].first_step) == ("not there with pager", 1)
    assert (rows["c"].note, rows["c"].first_step) == ("not there without pager", 1)
