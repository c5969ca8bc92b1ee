"""Run the systems of a job one after another, each in a process of its own, and make rows of what they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import pager
from pager.tools.bench.job import CEILINGS, SYSTEMS, StepJob
from pager.tools.bench.rows import add_bound, failed_row, measured_rows
from pager.tools.bench.table import format_ceilings, format_rows
from pager.tools.errors import CommandFailed

__all__ = ["conduct"]

# After a process that held most of the machine's memory has ended, the system takes a while to have it back.
MEMORY_BACK_SECONDS = 30.0
MEMORY_BACK_SHARE = 0.03


def conduct(job: StepJob, out: Path, *, as_json: bool) -> int:
    """Measure the ceilings, then each system; print and append to ``out/bench.jsonl``. 0 if anything came of it.

    The output of a system that failed stays in ``out`` as a log.
    """
    started = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    common = {
        "workload": job.workload,
        "parameters": job.num_parameters,
        "seq": job.seq,
        "device": job.device,
        "deterministic": job.deterministic,
        "started": started,
        "pager": pager.__version__,
    }
    record = _Record(out / "bench.jsonl", as_json=as_json, common=common)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pager-bench-") as folder:
        path = Path(folder) / "job.json"
        job.write(path)
        result, reason = _run_child(job, CEILINGS, path, out / f"{CEILINGS}.log")
        ceilings = {found["batch"]: found for found in result.get("ceilings", ())}
        for line in ceilings.values() or [{"reason": reason}]:
            record.put({"kind": "ceilings", **line})
        if not as_json:
            text = (
                format_ceilings(list(ceilings.values())) if ceilings else f"no ceilings, no bound: {reason}"
            )
            print(text, flush=True)
        for position, (system, own) in enumerate(_parts(job)):
            own.write(path)
            for row in _measure(own, system, path, out / f"{position}-{system}.log"):
                row |= {"position": position}
                add_bound(row, own, ceilings.get(row.get("batch")))
                record.put({"kind": "step", **row})
                rows.append(row)
    if not as_json and job.systems:
        print(format_rows(rows), flush=True)
    return 0 if (ceilings and not job.systems) or any(row["status"] == "ok" for row in rows) else 1


def _parts(job: StepJob) -> Iterator[tuple[str, StepJob]]:
    """A system and what it is to do in one process. pager plans for a batch: each has a process of its own."""
    for system in job.systems:
        if SYSTEMS[system].is_pager:
            for batch in job.batches:
                yield system, dataclasses.replace(job, batches=(batch,))
        else:
            yield system, job


class _Record:
    """The file of JSON lines. Raises CommandFailed where it cannot be written."""

    def __init__(self, path: Path, *, as_json: bool, common: dict[str, Any]) -> None:
        self._path = path
        self._as_json = as_json
        self._common = common

    def put(self, row: dict[str, Any]) -> None:
        line = json.dumps({**self._common, **row})
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise CommandFailed(f"cannot write {self._path}: {error.strerror or error}") from error
        if self._as_json:
            print(line, flush=True)


def _measure(job: StepJob, system: str, path: Path, log: Path) -> list[dict[str, Any]]:
    if SYSTEMS[system].needs_gpu and job.device == "cpu":
        return [failed_row(job, system, "skipped", "needs a GPU")]
    began = time.perf_counter()
    print(f"{system}: started", file=sys.stderr, flush=True)
    result, reason = _run_child(job, system, path, log)
    seconds = time.perf_counter() - began
    rows = measured_rows(job, system, result)
    if reason is not None and len(rows) < len(job.batches) * len(job.clips):
        status = "refused" if result.get("refused") else "failed"
        rows.append(failed_row(job, system, status, reason))
    for row in rows:
        row["wall_seconds"] = seconds
        text = f"{row['seconds_per_step']:.3f} s a step" if row["status"] == "ok" else row["reason"]
        where = f" at batch {row['batch']}" if "batch" in row else ""
        print(
            f"{system}{where}: {row['status']}, {text} ({seconds:.0f} s in all)", file=sys.stderr, flush=True
        )
    return rows


def _run_child(job: StepJob, system: str, job_path: Path, log: Path) -> tuple[dict[str, Any], str | None]:
    """What the child left, and in words why it left no more (None: it ended well)."""
    result_path = job_path.with_name("result.json")
    result_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pager.tools.bench.child", str(job_path), system, str(result_path)]
    available = psutil.virtual_memory().available
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(job, system),
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(timeout=job.timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    _wait_for_memory(available)
    result = json.loads(result_path.read_text(encoding="utf-8")) if result_path.exists() else {}
    if code == 0:
        log.unlink()
        return result, None
    if code is None:
        return result, f"not done after {job.timeout:.0f} s; see {log}"
    died = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return result, f"{result.get('error') or died}; see {log}"


def _environment(job: StepJob, system: str) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    if system.startswith("deepspeed"):
        environment["TORCH_EXTENSIONS_DIR"] = str(_extensions_folder())
    if job.deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if job.device == "cuda":
        # CPU optimizers get all cores that this process may use, whatever the shell says.
        environment["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        if system != CEILINGS and not SYSTEMS[system].is_pager:
            # Page-locking by registration costs a quarter of cudaHostAlloc's time. The old name works everywhere.
            environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True")
    return environment


def _extensions_folder() -> Path:
    """Where DeepSpeed builds its optimizer, for minutes: once for all its systems, and for later runs."""
    folder = Path(tempfile.gettempdir()) / f"pager-bench-extensions-{os.getuid()}"
    # A build that was killed leaves its lock behind, and the next one would wait for it for good.
    for lock in folder.glob("**/lock"):
        lock.unlink()
    return folder


def _end(child: subprocess.Popen[Any]) -> None:
    """Kill what is left of the child and of the processes it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _wait_for_memory(available: int) -> None:
    """Until the host's memory is nearly what it was before the child ran, or long enough."""
    end = time.monotonic() + MEMORY_BACK_SECONDS
    while time.monotonic() < end:
        missing = available - psutil.virtual_memory().available
        if missing <= MEMORY_BACK_SHARE * psutil.virtual_memory().total:
            return
        time.sleep(0.2)
