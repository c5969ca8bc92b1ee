"""Checks of the host: cores, NUMA, huge pages, limits, and whether locking memory does anything.

What the system tells in files is read below ``root``, so that a folder can stand for another machine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from pager.tools.doctor.result import CheckResult
from pager.units import format_bytes

__all__ = [
    "LockTrial",
    "check_affinity",
    "check_cores",
    "check_host_memory",
    "check_huge_pages",
    "check_lock",
    "check_locked_limit",
    "try_lock",
]

# A CPU update with 4 threads does 2.1, with 16 4.8 G parameters a second (docs/benchmarks.md); pagerd and the
# threads of the disk come on top.
ENOUGH_CORES = 4
# Below half of what the machine has, a training state goes to the disk that would have had room in memory.
ENOUGH_MEMORY = 0.5
LEAST_FREE_BYTES = 2**30
# Fits the usual default limit of 8 MiB.
TRIAL_BYTES = 4 * 2**20
UNLIMIT = (
    "raise it: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, or "
    "`--ulimit memlock=-1` for a container"
)


def read_text(path: Path) -> str | None:
    """What a file of the system says, stripped; None where it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def parse_cpus(text: str) -> set[int]:
    """The numbers in a list such as ``0-3,8``. What is none is left out."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def check_cores(num_cores: int, num_allowed: int, num_machine: int) -> CheckResult:
    """``num_cores``: what affinity and quotas leave; ``num_allowed``: affinity alone; ``num_machine``: all."""
    values = {"cores": num_cores, "affinity_cores": num_allowed, "machine_cores": num_machine}
    found = f"{num_cores} of {num_machine} cores may be kept busy"
    advice = ""
    if num_cores < num_allowed:
        found += f" (a quota of the cgroup; the affinity has {num_allowed})"
        advice = "raise the CPU quota of the container"
    elif num_allowed < num_machine:
        found += " (the affinity)"
        advice = "give the process more cores: taskset, or --cpuset-cpus of the container"
    if num_cores >= ENOUGH_CORES:
        return CheckResult(name="cores", verdict="ok", found=found, values=values)
    return CheckResult(
        name="cores",
        verdict="slow",
        found=f"{found}; fewer than {ENOUGH_CORES} slow updates on the CPU and the disk",
        advice=advice
        or f"take a machine with {ENOUGH_CORES} cores or more, or leave update_on at the device",
        values=values,
    )


def check_affinity(root: Path, allowed: Set[int], bus_id: str | None) -> CheckResult:
    """Whether the process runs beside the GPU at PCI address ``bus_id`` (as in /sys), if there is one."""
    folder = root / "sys/devices/system/node"
    nodes = {
        int(path.name[4:]): parse_cpus(read_text(path / "cpulist") or "")
        for path in sorted(folder.glob("node[0-9]*"))
        if path.name[4:].isdigit()
    }
    name = "NUMA affinity"
    ours = sorted(node for node, cpus in nodes.items() if cpus & allowed)
    values = {"nodes": len(nodes), "process_nodes": ours}
    if not nodes:
        found = "the system does not show its NUMA nodes"
        return CheckResult(name=name, verdict="not here", found=found, values=values)
    if len(nodes) == 1:
        return CheckResult(name=name, verdict="ok", found="one node: all memory is near", values=values)
    where = f"{len(nodes)} nodes; the process may run on {', '.join(map(str, ours)) or 'none'}"
    if bus_id is None:
        return CheckResult(
            name=name, verdict="not here", found=f"{where}; no GPU to be near to", values=values
        )
    device = root / "sys/bus/pci/devices" / bus_id
    told = read_text(device / "numa_node") or ""
    node = int(told) if told.isdigit() else None
    if node is None or node not in nodes:
        found = f"{where}; the system does not say at which the GPU {bus_id} is"
        return CheckResult(
            name=name,
            verdict="not here",
            found=found,
            advice="`nvidia-smi topo -m` may know; bind the process to that node",
            values=values,
        )
    values["gpu_node"] = node
    local = parse_cpus(read_text(device / "local_cpulist") or "") or nodes[node]
    if allowed <= local:
        return CheckResult(
            name=name, verdict="ok", found=f"the process runs on node {node}, the GPU's", values=values
        )
    found = f"{where}; the GPU is at node {node}" + (
        "" if allowed & local else ", so every copy crosses the sockets"
    )
    return CheckResult(
        name=name,
        verdict="slow",
        found=found,
        advice=f"start it with `numactl --cpunodebind={node} --membind={node}`, or --cpuset-cpus and --cpuset-mems",
        values=values,
    )


def check_huge_pages(root: Path) -> CheckResult:
    """Whether the arena's advice to take huge pages is heard."""
    name = "huge pages"
    told = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if told is None:
        return CheckResult(name=name, verdict="not here", found="the kernel has no transparent huge pages")
    _, bracket, rest = told.partition("[")
    mode = rest.partition("]")[0] if bracket else told
    if mode in ("always", "madvise"):
        found = f'transparent huge pages: "{mode}", which the host arena asks for'
        return CheckResult(name=name, verdict="ok", found=found, values={"mode": mode})
    return CheckResult(
        name=name,
        verdict="slow",
        found=f'transparent huge pages: "{mode}"; registering and copying host memory takes small pages one by one',
        advice="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        values={"mode": mode},
    )


def locked_limit_bytes(root: Path) -> int | None:
    """The soft limit of locked memory; None without one. Raises LookupError where the system does not tell."""
    for line in (read_text(root / "proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            if soft.isdigit() or soft == "unlimited":
                return int(soft) if soft.isdigit() else None
    raise LookupError("Max locked memory")


def check_locked_limit(root: Path, host_bytes: int, registered_bytes: int) -> CheckResult:
    """The memlock limit. ``host_bytes``: what there is to lock; ``registered_bytes``: what the GPU's driver was seen to
    lock, which often does not count.
    """
    name = "memlock limit"
    try:
        limit = locked_limit_bytes(root)
    except LookupError:
        return CheckResult(name=name, verdict="not here", found="the system does not tell it")
    values = {"limit_bytes": limit, "registered_bytes": registered_bytes}
    if limit is None:
        return CheckResult(name=name, verdict="ok", found="unlimited", values=values)
    if limit >= host_bytes:
        return CheckResult(
            name=name, verdict="ok", found=f"{format_bytes(limit)}: all there is", values=values
        )
    if registered_bytes > limit:
        found = f"{format_bytes(limit)}; the GPU's driver locked {format_bytes(registered_bytes)} and does not count"
        return CheckResult(name=name, verdict="ok", found=found, values=values)
    return CheckResult(
        name=name,
        verdict="slow",
        found=f"{format_bytes(limit)} of {format_bytes(host_bytes)}; a driver that counts leaves the rest pageable",
        advice=UNLIMIT,
        values=values,
    )


class LockTrial(NamedTuple):
    """What became of ``mlock`` of ``num_bytes``: its errno (0: accepted), and VmLck of the process before and while it
    was locked (None where the system does not tell).
    """

    num_bytes: int
    errno: int
    before_bytes: int | None
    while_bytes: int | None


def locked_bytes(root: Path) -> int | None:
    """Bytes of this process that the kernel holds locked."""
    for line in (read_text(root / "proc/self/status") or "").splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return None


def try_lock(root: Path, num_bytes: int = TRIAL_BYTES) -> LockTrial:
    """Lock memory for a moment, and ask the kernel whether it is locked."""
    from pager.tiers.host_arena import map_memory

    library = ctypes.CDLL(None, use_errno=True)
    memory = map_memory(num_bytes)
    address = ctypes.c_void_p(memory.data_ptr())
    before = locked_bytes(root)
    code = ctypes.get_errno() if library.mlock(address, ctypes.c_size_t(num_bytes)) else 0
    meanwhile = locked_bytes(root)
    if not code:
        library.munlock(address, ctypes.c_size_t(num_bytes))
    return LockTrial(num_bytes, code, before, meanwhile)


def check_lock(trial: LockTrial) -> CheckResult:
    """Whether locked memory is locked, by the kernel's own account."""
    name = "page-locking"
    size = format_bytes(trial.num_bytes)
    if trial.errno:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"mlock of {size} was refused: {os.strerror(trial.errno)}; a GPU's driver may still be let",
            advice=UNLIMIT,
            values={"errno": trial.errno},
        )
    if trial.before_bytes is None or trial.while_bytes is None:
        found = f"mlock of {size} was accepted; the system does not tell whether it did anything"
        return CheckResult(name=name, verdict="not here", found=found)
    grown = trial.while_bytes - trial.before_bytes
    values = {"locked_bytes": grown}
    if grown >= trial.num_bytes:
        found = f"mlock of {size}: the kernel holds it locked"
        return CheckResult(name=name, verdict="ok", found=found, values=values)
    return CheckResult(
        name=name,
        verdict="broken",
        found=f"mlock of {size} was accepted, but the kernel holds {format_bytes(grown)} locked: it fails silently",
        advice="the sandbox or container pretends; run on the host, or under a runtime that locks (runc, with "
        "`--cap-add IPC_LOCK --ulimit memlock=-1`)",
        values=values,
    )


def check_host_memory(total_bytes: int, limit_bytes: int, free_bytes: int) -> CheckResult:
    """``limit_bytes``: of the machine and the cgroups around the process; ``free_bytes``: what can still be taken."""
    values = {"total_bytes": total_bytes, "limit_bytes": limit_bytes, "free_bytes": free_bytes}
    found = f"{format_bytes(free_bytes)} free of {format_bytes(limit_bytes)}"
    if limit_bytes < total_bytes:
        found += f", a cgroup's limit (the machine has {format_bytes(total_bytes)})"
    advice = (
        "raise the memory limit of the container (--memory), or of the job"
        if limit_bytes < total_bytes
        else ""
    )
    name = "host memory"
    if free_bytes < LEAST_FREE_BYTES:
        return CheckResult(
            name=name,
            verdict="broken",
            found=found,
            advice=advice or "end what holds it: there is no room for a host tier",
            values=values,
        )
    if limit_bytes < ENOUGH_MEMORY * total_bytes:
        return CheckResult(name=name, verdict="slow", found=found, advice=advice, values=values)
    return CheckResult(name=name, verdict="ok", found=found, values=values)
