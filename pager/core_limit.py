"""How many cores this process may keep busy: its affinity, and the quotas of the cgroups around it (v1 and v2).

Not what OMP_NUM_THREADS or ``torch.set_num_threads`` say: those are about the threads of one operator.
"""

from __future__ import annotations

import os
from pathlib import Path


def core_limit(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Whole cores that the calling thread's affinity and the CPU quotas leave, at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders(root, membership):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, quota)
    return max(1, int(cores))


def _quota(folder: Path) -> float | None:
    """Cores' worth of time that a cgroup may use; None without a limit."""
    unified = _words(folder / "cpu.max")
    if len(unified) == 2:
        limit, period = unified
    else:
        limit = "".join(_words(folder / "cpu.cfs_quota_us"))
        period = "".join(_words(folder / "cpu.cfs_period_us"))
    # "max" in v2 and -1 in v1 say that there is no limit.
    if not (limit.isdigit() and period.isdigit() and int(limit) > 0 and int(period) > 0):
        return None
    return int(limit) / int(period)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """This process's cgroups and those around them: an inner quota cannot exceed an outer one."""
    folders = [root, root / "cpu"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3 or (parts[1] and "cpu" not in parts[1].split(",")):
            continue
        here = root / "cpu" if parts[1] else root
        for piece in parts[2].strip("/").split("/"):
            here = here / piece
            folders.append(here)
    return folders
