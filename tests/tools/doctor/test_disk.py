"""The folder of the third tier: the measurement, and what is made of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pager.tiers import disk_probe
from pager.tiers.disk_file import DiskFile
from pager.tiers.disk_probe import DEPTHS, EXTENT_BYTES
from pager.tools.doctor import disk
from pager.tools.doctor.disk import DiskFacts


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[int] = []
    files: list[DiskFile] = []  # kept: what is dropped would be closed by itself

    def measure(file: DiskFile, depth: int, *, seconds: float) -> float:
        assert file.num_free * file.page_size >= depth * EXTENT_BYTES
        assert list(tmp_path.iterdir()) != []
        files.append(file)
        return depth * seconds

    monkeypatch.setattr(disk_probe, "measure_rate", measure)
    facts = disk.measure_disk(str(tmp_path), seconds=2.0, tick=lambda: ticks.append(1))
    assert facts.refused == ""
    assert facts.rates == {depth: 2.0 * depth for depth in DEPTHS}
    assert len(ticks) == len(DEPTHS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    log = logging.getLogger("pager.tiers.disk_file")
    level = log.level
    facts = disk.measure_disk(str(tmp_path / "link"), seconds=0.005)
    assert facts.rates == {}
    assert "symbolic link" in facts.refused or str(tmp_path / "link") in facts.refused
    assert disk.check_disk(facts).verdict == "broken"
    assert log.level == level


@pytest.mark.parametrize(
    ("facts", "speed", "direct"),
    [
        (None, "not here", "not here"),
        (DiskFacts(False, {}, "Read-only file system"), "broken", "not here"),
        (DiskFacts(True, {1: 0.0, 2: 0.0}, ""), "broken", "ok"),
        (DiskFacts(True, {1: 1e7, 2: 4e7}, ""), "broken", "ok"),
        (DiskFacts(True, {1: 0.3e9, 2: 0.5e9}, ""), "slow", "ok"),
        (DiskFacts(True, {1: 0.9e9, 2: 2.0e9}, ""), "ok", "ok"),
        (DiskFacts(False, {1: 5e9}, ""), "ok", "slow"),
    ],
)
def test_a_disk(facts: DiskFacts | None, speed: str, direct: str) -> None:
    results = disk.check_disk(facts), disk.check_disk_direct(facts)
    assert [result.verdict for result in results] == [speed, direct]
    for result in results:
        assert result.advice or result.verdict in ("ok", "not here")
    if facts is not None and facts.refused:
        assert results[0].found == "Read-only file system"
