"""How deep the disk's queue is to be: measured on large files only, and never in the way."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pager.errors import TierIOError
from pager.tiers import disk_probe
from pager.tiers.disk_file import DiskFile
from pager.tiers.disk_probe import (
    DEFAULT_DEPTH,
    DEPTHS,
    EXTENT_BYTES,
    measure_rate,
    measure_sustained_rate,
    measured_shape,
    shape_of,
)

PAGE = 128 * 2**10
FRAMES = 16 * 2**20 // PAGE


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_ring_has_slots_for_the_disk_for_the_link_and_some_more(depth: int) -> None:
    shape = shape_of(depth)
    assert shape.num_threads == depth
    assert shape.num_slots > 2 * depth
    assert shape.num_bytes == shape.num_slots * shape.slot_bytes <= 80 * 2**20


def test_a_small_file_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(disk_probe, "measure_rate", lambda disk, depth: calls.append(depth))
    file = DiskFile(tmp_path, PAGE, FRAMES)
    assert measured_shape(file) == measured_shape(None) == shape_of(DEFAULT_DEPTH)
    assert calls == []
    file.close()


@pytest.mark.parametrize(
    ("rates", "depth"),
    [
        ({1: 1.0, 2: 1.8, 4: 2.9, 8: 3.0}, 4),
        ({1: 2.9, 2: 3.0, 4: 2.0, 8: 1.0}, 1),
        ({1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}, 8),
        ({1: 0.0, 2: 0.0, 4: 0.0, 8: 0.0}, DEFAULT_DEPTH),
    ],
)
def test_the_smallest_depth_that_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], depth: int
) -> None:
    monkeypatch.setattr(disk_probe, "LEAST_BYTES", 1)
    monkeypatch.setattr(disk_probe, "measure_rate", lambda disk, depth: rates[depth])
    file = DiskFile(tmp_path, PAGE, FRAMES)
    assert measured_shape(file).num_threads == depth
    file.close()


def test_the_measurement_gives_its_frames_back(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, PAGE, FRAMES)
    assert measure_rate(file, 2, seconds=0.01) > 0
    assert file.used_bytes == 0
    assert measure_rate(file, 8, seconds=0.01) == 0.0, "no room for eight extents"
    file.close()


def test_the_sustained_rate_moves_all_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, FRAMES)
    used = file.allocate(1)
    done: list[tuple[str, int]] = []

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def note(frame: int, data: object) -> None:
            done.append((name, frame))
            call(frame, data)

        return note

    for name in ("read", "write"):
        monkeypatch.setattr(file, name, noting(name, getattr(file, name)))
    assert measure_sustained_rate(file, 2) > 0
    extents = (FRAMES - 1) // (EXTENT_BYTES // PAGE)
    assert [sum(kind == name for kind, _ in done) for name in ("write", "read")] == [2 * extents, extents]
    assert len({frame for _, frame in done}) == extents
    assert {name for name, _ in done[:extents]} == {"write"}, "all is written before it is timed"
    assert used not in {frame for _, frame in done}
    assert file.used_bytes == PAGE
    file.close()


def test_a_disk_that_fails_is_not_a_failure_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, PAGE, FRAMES)

    def refuse(frame: int, data: object) -> None:
        raise TierIOError(errno.EIO, "no", "disk")

    monkeypatch.setattr(file, "write", refuse)
    assert measure_rate(file, 1, seconds=0.01) == measure_sustained_rate(file, 1) == 0.0
    assert file.used_bytes == 0
    file.close()
