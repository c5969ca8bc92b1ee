"""Checks of the host on folders that stand for other machines."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from pager.tools.doctor import host
from pager.tools.doctor.host import LockTrial, parse_cpus

MiB, GiB = 2**20, 2**30
GPU = "0000:3b:00.0"


def make_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def nodes(*cpus: str) -> dict[str, str]:
    return {f"sys/devices/system/node/node{number}/cpulist": text for number, text in enumerate(cpus)}


def gpu_at(node: int, cpus: str = "") -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{GPU}"
    return {f"{folder}/numa_node": str(node), f"{folder}/local_cpulist": cpus}


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("x,1", {1}), ("2-y", set())],
)
def test_a_list_of_cpus(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize(
    ("cores", "allowed", "machine", "verdict", "found", "advice"),
    [
        (16, 16, 16, "ok", "16 of 16 cores", ""),
        (4, 16, 16, "ok", "a quota of the cgroup", ""),
        (3, 16, 16, "slow", "a quota of the cgroup; the affinity has 16", "raise the CPU quota"),
        (2, 2, 16, "slow", "2 of 16 cores may be kept busy (the affinity)", "taskset"),
        (2, 2, 2, "slow", "fewer than 4", "take a machine with 4 cores"),
    ],
)
def test_cores(cores: int, allowed: int, machine: int, verdict: str, found: str, advice: str) -> None:
    result = host.check_cores(cores, allowed, machine)
    assert result.verdict == verdict
    assert found in result.found
    assert advice in result.advice
    assert bool(result.advice) == (verdict == "slow")


@pytest.mark.parametrize(
    ("files", "allowed", "bus_id", "verdict", "found"),
    [
        ({}, {0, 1}, GPU, "not here", "does not show its NUMA nodes"),
        (nodes("0-3"), {0, 1}, GPU, "ok", "one node"),
        (nodes("0-3", "4-7"), {0}, None, "not here", "no GPU to be near to"),
        (nodes("0-3", "4-7"), {0}, GPU, "not here", f"does not say at which the GPU {GPU} is"),
        (nodes("0-3", "4-7") | gpu_at(-1), {0}, GPU, "not here", "does not say"),
        (nodes("0-3", "4-7") | gpu_at(1), {4, 5}, GPU, "ok", "on node 1, the GPU's"),
        (nodes("0-3", "4-7") | gpu_at(1, "4-7"), {0, 1}, GPU, "slow", "every copy crosses the sockets"),
        (nodes("0-3", "4-7") | gpu_at(1), {0, 4}, GPU, "slow", "may run on 0, 1; the GPU is at node 1"),
    ],
)
def test_the_process_is_beside_its_gpu(
    files: dict[str, str], allowed: set[int], bus_id: str | None, verdict: str, found: str, tmp_path: Path
) -> None:
    result = host.check_affinity(make_machine(tmp_path, files), allowed, bus_id)
    assert result.verdict == verdict
    assert found in result.found
    assert ("numactl --cpunodebind=1 --membind=1" in result.advice) == (verdict == "slow")
    assert ("crosses" in result.found) == (verdict == "slow" and 4 not in allowed)


@pytest.mark.parametrize(
    ("enabled", "verdict"),
    [
        (None, "not here"),
        ("[always] madvise never", "ok"),
        ("always [madvise] never", "ok"),
        ("always madvise [never]", "slow"),
    ],
)
def test_huge_pages(enabled: str | None, verdict: str, tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    root = make_machine(tmp_path, {} if enabled is None else {path: enabled})
    result = host.check_huge_pages(root)
    assert result.verdict == verdict
    assert ("echo madvise" in result.advice) == (verdict == "slow")


@pytest.mark.parametrize(
    ("soft", "registered", "verdict", "found"),
    [
        (None, 0, "not here", "does not tell"),
        ("unlimited", 0, "ok", "unlimited"),
        (str(128 * GiB), 0, "ok", "all there is"),
        (str(8 * MiB), 0, "slow", "8.00 MiB of 64.00 GiB"),
        (str(8 * MiB), 8 * MiB, "slow", "8.00 MiB of 64.00 GiB"),
        (str(8 * MiB), 128 * MiB, "ok", "locked 128.00 MiB and does not count"),
    ],
)
def test_the_limit_of_locked_memory(
    soft: str | None, registered: int, verdict: str, found: str, tmp_path: Path
) -> None:
    table = (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        f"Max locked memory         {soft}              unlimited            bytes"
    )
    root = make_machine(tmp_path, {} if soft is None else {"proc/self/limits": table})
    result = host.check_locked_limit(root, 64 * GiB, registered)
    assert result.verdict == verdict
    assert found in result.found
    assert ("memlock" in result.advice) == (verdict == "slow")


@pytest.mark.parametrize(
    ("trial", "verdict", "found"),
    [
        (LockTrial(4 * MiB, 0, MiB, 5 * MiB), "ok", "holds it locked"),
        (LockTrial(4 * MiB, 0, MiB, MiB), "broken", "holds 0 B locked: it fails silently"),
        (LockTrial(4 * MiB, 0, 0, 4 * MiB - 4096), "broken", "fails silently"),
        (LockTrial(4 * MiB, 0, None, None), "not here", "does not tell whether"),
        (LockTrial(4 * MiB, errno.ENOMEM, 0, 0), "slow", "refused: Cannot allocate memory"),
        (LockTrial(4 * MiB, errno.EPERM, None, None), "slow", "refused: Operation not permitted"),
    ],
)
def test_a_lock_is_believed_only_with_the_kernels_word(trial: LockTrial, verdict: str, found: str) -> None:
    result = host.check_lock(trial)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict in ("slow", "broken"))


def test_memory_is_locked_for_the_trial_only() -> None:
    before = host.locked_bytes(Path("/"))
    trial = host.try_lock(Path("/"), 64 * 1024)
    assert trial.num_bytes == 64 * 1024
    assert trial.errno >= 0
    assert (trial.before_bytes, host.locked_bytes(Path("/"))) == (before, before)


def test_a_sandbox_that_tells_nothing_or_pretends(tmp_path: Path) -> None:
    trial = host.try_lock(tmp_path, 4096)
    assert (trial.before_bytes, trial.while_bytes) == (None, None)
    trial = host.try_lock(make_machine(tmp_path, {"proc/self/status": "Name:\tx\nVmLck:\t      12 kB"}), 4096)
    assert (trial.before_bytes, trial.while_bytes) == (12 * 1024, 12 * 1024)
    assert trial.errno or host.check_lock(trial).verdict == "broken"


@pytest.mark.parametrize(
    ("total", "limit", "free", "verdict", "advice"),
    [
        (128 * GiB, 128 * GiB, 100 * GiB, "ok", ""),
        (128 * GiB, 64 * GiB, 60 * GiB, "ok", ""),
        (128 * GiB, 63 * GiB, 60 * GiB, "slow", "memory limit of the container"),
        (128 * GiB, 128 * GiB, GiB - 1, "broken", "end what holds it"),
        (128 * GiB, 2 * GiB, GiB - 1, "broken", "memory limit of the container"),
    ],
)
def test_host_memory(total: int, limit: int, free: int, verdict: str, advice: str) -> None:
    result = host.check_host_memory(total, limit, free)
    assert result.verdict == verdict
    assert advice in result.advice
    assert ("a cgroup's limit (the machine has 128.00 GiB)" in result.found) == (limit < total)
