"""The leak checks themselves bite."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests import conftest


def test_a_thread_left_running_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "THREAD_END_SECONDS", 0.05)
    before = set(threading.enumerate())
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    thread.start()
    try:
        assert conftest.find_leaked_threads(before) == ["left-over"]
    finally:
        release.set()
        thread.join()
    assert conftest.find_leaked_threads(before) == []


def test_an_open_file_is_found_and_a_dropped_one_is_not(tmp_path: Path) -> None:
    before = conftest._open_descriptors()
    path = tmp_path / "open"
    with path.open("w"):
        assert list(conftest.find_leaked_descriptors(before).values()) == [str(path)]
    assert conftest.find_leaked_descriptors(before) == {}
