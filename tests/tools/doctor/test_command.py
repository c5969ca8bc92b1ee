"""``pager doctor`` as a user runs it, on this machine and on one that is made up."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pager.device import base, cuda
from pager.errors import PagerInternalError, TierError
from pager.tiers import disk_probe
from pager.tools.cli import main
from pager.tools.doctor import command, link, memory
from pager.tools.doctor.result import CheckResult
from tests.tools.doctor.fake_nvml import make_nvml

LINES = [
    "GPU",
    "page-locking, GPU",
    "PCIe link",
    "link, pageable",
    "link, registered",
    "link, both ways",
    "page-locking",
    "memlock limit",
    "host memory",
    "huge pages",
    "cores",
    "NUMA affinity",
    "DRAM",
    "disk, speed",
    "disk, O_DIRECT",
]
OF_THE_GPU = LINES[:6]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, and there is no GPU."""
    monkeypatch.setattr(memory, "measure_dram", lambda threads: 30e9 * threads)
    monkeypatch.setattr(disk_probe, "measure_rate", lambda disk, depth, seconds: 2e9)
    monkeypatch.setattr(cuda, "num_devices", lambda: 0)
    monkeypatch.setattr(command, "nvml_module", lambda: None)


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU on PCIe 5 x16, whose copies are those of the simulated device."""
    nvml = make_nvml(
        nvmlDeviceGetName="A card",
        nvmlDeviceGetPciInfo=SimpleNamespace(busId="00000000:3B:00.0"),
        nvmlDeviceGetCount=1,
        nvmlDeviceGetCurrPcieLinkGeneration=5,
        nvmlDeviceGetCurrPcieLinkWidth=16,
    )
    monkeypatch.setattr(command, "nvml_module", lambda: nvml)
    monkeypatch.setattr(cuda, "num_devices", lambda: 1)
    monkeypatch.setattr(cuda, "current_index", lambda: 0)
    monkeypatch.setattr(cuda, "device_uuid", lambda index: "GPU-1")
    device = base.make_device("cpu", streams="early", check_races=False)
    monkeypatch.setattr(base, "make_device", lambda spec: device)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    measure = link.measure_link

    def measure_quickly(device: base.Device, read: Any) -> tuple[link.LinkRates, list[Any]]:
        rates, answers = measure(device, read, num_bytes=2**16, load_seconds=0.0)
        if rates.refused:
            return rates, answers
        rates = rates._replace(pageable_in=8e9, pageable_out=8e9, registered_in=55e9, registered_out=55e9)
        return rates._replace(both_ways=50e9, issue_share=0.02), answers

    monkeypatch.setattr(link, "measure_link", measure_quickly)


def as_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out)


def test_without_a_gpu_the_rest_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--disk", str(tmp_path)])
    report = as_json(capsys)
    assert code == (1 if report["verdict"] == "broken" else 0)
    assert [line["name"] for line in report["checks"]] == LINES
    verdicts = {line["name"]: line["verdict"] for line in report["checks"]}
    assert {verdicts[name] for name in OF_THE_GPU} == {"not here"}
    assert (verdicts["DRAM"], verdicts["disk, speed"]) == ("ok", "ok")
    assert list(tmp_path.iterdir()) == []


def test_with_a_gpu_every_line_has_its_figure(with_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    output = capsys.readouterr()
    assert output.err == "", "no bar where nobody watches"
    lines = output.out.splitlines()
    assert lines[0].startswith("ok        GPU                A card")
    assert "gen 5 x16 under load, at rest gen 5 x16" in output.out
    assert "87% of what the link carries (63.0 GB/s)" in output.out
    assert "50.0 GB/s each way at once, 91% of one way alone" in output.out
    assert [line.split()[0] for line in lines if line.split()[1:2] == ["link,"]] == ["ok"] * 3
    assert "no folder given" in output.out


def test_a_link_that_copies_outrun_is_judged_without_nvml(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.nvml_module().answers, "nvmlDeviceGetCurrPcieLinkGeneration", 1)
    main(["doctor", "--json"])
    checks = {line["name"]: line for line in as_json(capsys)["checks"]}
    assert checks["PCIe link"]["verdict"] == "not here"
    assert checks["link, registered"]["verdict"] == "ok"
    assert checks["link, registered"]["values"]["link_bytes_per_second"] is None


def test_something_broken_is_exit_code_1(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    assert main(["doctor", "--json"]) == 1
    report = as_json(capsys)
    assert report["verdict"] == "broken"
    (line,) = [line for line in report["checks"] if line["name"] == "page-locking, GPU"]
    assert line["verdict"] == "broken"
    assert "did nothing" in line["found"]


def test_a_check_that_fails_is_a_line_and_the_others_go_on(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nand more")

    monkeypatch.setattr(link, "measure_link", fail)
    assert main(["doctor", "--json"]) == 1
    report = as_json(capsys)
    assert [line["name"] for line in report["checks"]] == ["GPU", *LINES[6:]]
    assert report["checks"][0]["found"] == ("the check itself failed: CUDA out of memory. Tried to allocate")


def test_a_bug_is_not_a_line() -> None:
    results: list[CheckResult] = []

    def fail() -> None:
        raise PagerInternalError("a bug")

    with pytest.raises(PagerInternalError, match="a bug"):
        command.guarded("x", fail, results)
    assert results == []


@pytest.mark.parametrize("disk", ["missing", "file", ""])
def test_a_disk_that_is_no_folder_is_wrong_use(
    disk: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    path = str(tmp_path / disk) if disk else ""
    assert main(["doctor", "--disk", path]) == 2
    assert capsys.readouterr().err.startswith(f"pager: --disk {path}: ")


def test_a_read_only_folder_is_broken_with_the_systems_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pager.tiers import disk_folder

    def refuse(folder: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_folder, "_make_manifest", refuse)
    assert main(["doctor", "--json", "--disk", str(tmp_path)]) == 1
    (line,) = [line for line in as_json(capsys)["checks"] if line["name"] == "disk, speed"]
    assert line["verdict"] == "broken"
    assert "Read-only file system" in line["found"]


def test_the_bar_counts_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[str] = []
    totals: list[int] = []
    bar = SimpleNamespace(
        set_postfix_str=lambda what, refresh: parts.append(what), update=lambda: None, close=lambda: None
    )

    def make_bar(*, total: int, title: str, unit: str) -> SimpleNamespace:
        totals.append(total)
        return bar

    monkeypatch.setattr("pager.tools.report.make_bar", make_bar)
    command.run(argparse.Namespace(disk=str(tmp_path), json=True))
    assert totals == [len(parts)]
    assert parts[:3] == ["GPU", "link", "host"]
    assert parts[-1] == "disk"


def test_without_nvml_there_is_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert command.nvml_module() is not None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert command.nvml_module() is None


def test_a_refused_lock_does_not_end_the_examination(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = base.make_device("cuda")

    def refuse(address: int, num_bytes: int) -> None:
        raise TierError("CUDA error 2")

    monkeypatch.setattr(device, "register_host", refuse)
    assert main(["doctor", "--json"]) == 1
    verdicts = {line["name"]: line["verdict"] for line in as_json(capsys)["checks"]}
    assert verdicts["page-locking, GPU"] == "broken"
    assert verdicts["link, registered"] == verdicts["link, both ways"] == "not here"
    assert verdicts["link, pageable"] != "not here"
