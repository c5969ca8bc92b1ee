"""A training state of one and a half times the memory that there is: it trains, within the limit, and bit for bit.

In a cgroup of its own where this process may make one (v1 or v2); elsewhere a folder plays the cgroup, and the peak of
the process is what is looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.limited_run import NUM_STEPS, STATE_BYTES

ROOT = Path(__file__).parents[2]
LIMIT = 2**30
FORMS = (
    # Where groups are made, the file of the limit in them, and what says how often the system had to kill.
    ("memory", "memory.limit_in_bytes", "memory.oom_control"),
    ("", "memory.max", "memory.events"),
)


@pytest.fixture
def cgroup() -> Iterator[tuple[Path, str] | None]:
    """A group with the limit, and the name of its file of kills; None where none can be made."""
    for folder, limit, kills in FORMS:
        group = Path("/sys/fs/cgroup", folder, f"pager-test-{os.getpid()}")
        if not (group.parent / "cgroup.procs").exists():
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            try:
                (group / limit).write_text(str(LIMIT))
            except OSError:
                continue
            yield group, kills
            return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    yield None


def run(*arguments: str) -> dict[str, Any]:
    """What the training says of itself."""
    command = [sys.executable, "-m", "tests.faults.limited_run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-3000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_and_a_half_times_the_memory_trains(tmp_path: Path, cgroup: tuple[Path, str] | None) -> None:
    assert STATE_BYTES == 1.5 * LIMIT
    if cgroup is None:
        played = tmp_path / "cgroup"
        played.mkdir()
        (played / "memory.max").write_text(str(LIMIT))
        (played / "membership").write_text("")
        limited = run(str(tmp_path), "--limit-file", str(played))
    else:
        group, kills = cgroup
        limited = run(str(tmp_path), "--join", str(group))
        lines = dict(line.split() for line in (group / kills).read_text().splitlines())
        assert int(lines["oom_kill"]) == 0
    assert limited["host_budget_bytes"] == int(0.85 * LIMIT)
    assert limited["peak_bytes"] <= LIMIT
    assert limited["swapped_bytes"] == 0
    assert limited["disk_bytes"] > 0.5 * LIMIT
    assert limited["disk_read_bytes"] > NUM_STEPS // 2 * limited["disk_bytes"]
    plain = run(str(tmp_path), "--plain")
    assert plain["peak_bytes"] > 1.5 * LIMIT
    assert (limited["losses"], limited["sums"]) == (plain["losses"], plain["sums"])
