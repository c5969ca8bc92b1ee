"""How much host memory there is to budget: the smaller of physical memory and the cgroup's limit (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

import psutil

# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


def host_limit_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes this process may use at most, before anything is asked of it."""
    limit = int(psutil.virtual_memory().total)
    for path in _limit_files(root, membership):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and 0 < int(text) < _NO_LIMIT:
            limit = min(limit, int(text))
    return limit


def process_bytes() -> int:
    """Bytes of host memory this process holds now (resident set)."""
    return int(psutil.Process().memory_info().rss)


def _limit_files(root: Path, membership: Path) -> list[Path]:
    """The limit files of this process's cgroup and of those around it; inner limits cannot exceed outer ones."""
    files = [root / "memory.max", root / "memory" / "memory.limit_in_bytes"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        unified = controllers == ""
        if not unified and "memory" not in controllers.split(","):
            continue
        base = root if unified else root / "memory"
        name = "memory.max" if unified else "memory.limit_in_bytes"
        here = base
        for piece in path.strip("/").split("/"):
            here = here / piece
            files.append(here / name)
    return files
