"""The smaller of this process's affinity and the quotas of the cgroups around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pager.core_limit import core_limit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "450000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a\n", {"b/cpu.max": "200000 100000\n"}, 16),
        ("0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ("0::/\n", {"cpu/cpu.cfs_quota_us": "500000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 5),
        (
            "4:cpuacct,cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "600000\n", "cpu/a/cpu.cfs_period_us": "200000\n"},
            3,
        ),
        ("4:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "6\n", "cpu/a/cpu.cfs_period_us": "2\n"}, 16),
        ("0::/\n", {"cpu.max": "0 100000\n"}, 16),
        ("0::/\n", {"cpu.max": "200000 0\n"}, 16),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 16),
        ("nonsense\n", {}, 16),
    ],
)
def test_the_smallest_quota_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    limits: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    root, file = tmp_path / "cgroup", tmp_path / "membership"
    for name, text in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    file.write_text(membership)
    assert core_limit(root, file) == expected


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert core_limit(tmp_path / "none", tmp_path / "none") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("num_threads", ["1", "64"])
def test_affinity_counts_and_openmps_threads_do_not(num_threads: str) -> None:
    program = (
        "import os; from pathlib import Path; from pager.core_limit import core_limit\n"
        "none = Path('/nowhere'); before = core_limit(none, none)\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(before, core_limit(none, none))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": num_threads},
    )
    assert completed.stdout.split() == [str(len(os.sched_getaffinity(0))), "1"]
