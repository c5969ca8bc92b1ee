"""How much host memory there is to budget: the smaller of physical memory and the cgroup's limit (v1 and v2)."""

from __future__ import annotations

from pathlib import Path

import psutil

from pager.config import resolve_budget
from pager.errors import ConfigError
from pager.units import format_bytes

# cgroup v1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60
# Beside each limit stands what is in use.
_USAGE = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}


def host_limit_bytes(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes this process may use at most, before anything is asked of it."""
    limit = int(psutil.virtual_memory().total)
    for path in _limit_files(root, membership):
        limit = min(limit, _number_in(path) or limit)
    return limit


def host_budget_bytes(knob: int | float | str, limit: int) -> int:
    """Bytes meant by ``host_budget``, of ``limit`` bytes that there are. Raises ConfigError for more: such a budget
    would not keep the process from being swapped out or killed.
    """
    wanted = resolve_budget(knob, limit, name="host_budget")
    if wanted > limit:
        raise ConfigError(
            f"host_budget is {knob!r}, {format_bytes(wanted)}, but this machine, or a cgroup around this process, has "
            f"{format_bytes(limit)}; give less, or a share such as 0.85"
        )
    return wanted


def _number_in(path: Path) -> int | None:
    """The limit or figure in a file; None where there is none."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < _NO_LIMIT else None


def _reclaimable_bytes(path: Path) -> int:
    """Bytes of a cgroup's page cache that are not in active use."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    figures = {
        name: int(number) for name, _, number in (line.partition(" ") for line in lines) if number.isdigit()
    }
    return figures.get("total_inactive_file", figures.get("inactive_file", 0))


def free_host_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may still take before the system, or a cgroup around it, has none left: whoever took the
    rest. What the page cache can give up counts as free.
    """
    free = int(psutil.virtual_memory().available)
    for path in _limit_files(root, membership):
        limit = _number_in(path)
        used = _number_in(path.with_name(_USAGE[path.name]))
        if limit is not None and used is not None:
            free = min(free, max(limit - max(used - _reclaimable_bytes(path.with_name("memory.stat")), 0), 0))
    return free


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
