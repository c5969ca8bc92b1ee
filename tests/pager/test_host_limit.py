"""The smaller of physical memory and what the cgroups around this process allow."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pager.host_limit import host_limit_bytes, process_bytes

PHYSICAL = int(psutil.virtual_memory().total)
MIB = 2**20


def make_cgroup(folder: Path, membership: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A cgroup file system and this process's membership in it."""
    root = folder / "cgroup"
    for name, text in limits.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = folder / "membership"
    file.write_text(membership)
    return root, file


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {}, PHYSICAL),
        ("0::/\n", {"memory.max": "max\n"}, PHYSICAL),
        ("0::/\n", {"memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{64 * MIB}\n"}, 64 * MIB),
        ("0::/a/b\n", {"a/memory.max": f"{32 * MIB}\n", "a/b/memory.max": f"{64 * MIB}\n"}, 32 * MIB),
        ("0::/a/b\n", {"a/memory.max": "max\n", "a/b/memory.max": "max\n"}, PHYSICAL),
        ("0::/a\n", {"b/memory.max": f"{MIB}\n"}, PHYSICAL),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        ("5:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": f"{64 * MIB}\n"}, 64 * MIB),
        ("5:cpu:/a\n", {"memory/a/memory.limit_in_bytes": f"{64 * MIB}\n"}, PHYSICAL),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, PHYSICAL),
        ("0::/a\n", {"memory.max": "not a number\n", "a/memory.max": f"{MIB}\n"}, MIB),
        ("0::/a\n", {"a/memory.max": "0\n"}, PHYSICAL),
        ("nonsense\n", {}, PHYSICAL),
    ],
)
def test_the_smallest_limit_around_the_process_counts(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int
) -> None:
    root, file = make_cgroup(tmp_path, membership, limits)
    assert host_limit_bytes(root, file) == expected


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert host_limit_bytes(tmp_path / "none", tmp_path / "none") == PHYSICAL


def test_this_machine() -> None:
    assert 0 < process_bytes() < host_limit_bytes() <= PHYSICAL
