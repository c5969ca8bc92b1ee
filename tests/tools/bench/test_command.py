"""``pager bench step`` on the simulated device: the whole of it once, its options, and systems that fail."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pager.tools import cli
from pager.tools.bench import conductor
from pager.tools.bench.command import add_arguments, make_job
from pager.tools.bench.job import SYSTEMS, StepJob
from pager.tools.bench.rows import measured_rows
from pager.tools.errors import CommandFailed, InputError
from pager.tools.model_sizes import ModelSizes, num_parameters

# Weights of a page each: smaller ones are not paged.
SIZES = ModelSizes(hidden=256, layers=2, heads=4, ffn=704, dtype="bfloat16", checkpoint=True)


def make_job_of(*options: str, has_gpu: bool = False) -> StepJob:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_job(parser.parse_args(["step", *options]), has_gpu=has_gpu)


class Finished(NamedTuple):
    code: int
    out: str
    err: str
    lines: list[dict[str, Any]]

    def rows(self, system: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("system") == system]


def bench(folder: Path, *options: str) -> Finished:
    """Run the command with its output in ``folder``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["bench", "step", "--device", "cpu", "--out", str(folder), *options])
    path = folder / "bench.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Finished(code, out.getvalue(), err.getvalue(), lines)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four systems of which one needs a GPU, two batches, without and with clipping."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "wee.json").write_text(json.dumps(dataclasses.asdict(SIZES)))
    systems = "pager,gpu,traditional,fsdp2"
    work = ("--workload", str(folder / "wee.json"), "--batch", "2,1", "--seq", "32", "--steps", "3")
    return bench(folder / "out", *work, "--systems", systems, "--clip", "both")


def test_the_whole_ends_well(finished: Finished) -> None:
    assert finished.code == 0, finished.out + finished.err
    kinds = [line["kind"] for line in finished.lines]
    assert kinds == ["ceilings"] * 2 + ["step"] * 13
    assert {line["workload"] for line in finished.lines} == {"wee"}
    # pager has a process for each batch, the others one.
    assert [line["position"] for line in finished.lines[2:]] == [0, 0, 1, 1, *[2] * 4, *[3] * 4, 4]
    assert [line["batch"] for line in finished.lines[:2]] == [1, 2]


@pytest.mark.parametrize("system", ["pager", "gpu", "traditional"])
def test_a_row_adds_up(system: str, finished: Finished) -> None:
    rows = finished.rows(system)
    assert [(row["batch"], row["clip"]) for row in rows] == [(1, None), (1, 1.0), (2, None), (2, 1.0)]
    for row in rows:
        low, high = row["seconds_spread"]
        assert row["status"] == "ok"
        assert len(row["seconds"]) == 3
        assert 0 < low <= row["seconds_per_step"] <= high
        assert [low, high] == [min(row["seconds"][2:]), max(row["seconds"][2:])]
        tokens = row["batch"] * 32
        assert row["tokens_per_second"] * row["seconds_per_step"] == pytest.approx(tokens)
        flops = 6 * num_parameters(SIZES) * tokens
        assert row["model_tflops"] * 1e12 * row["seconds_per_step"] == pytest.approx(flops)
        assert row["host_bytes"] >= row["host_resident_bytes"] > 2**26
        assert row["allocator_peak_bytes"] is row["process_peak_bytes"] is None
        assert 0 < row["setup_seconds"] < row["wall_seconds"]


def test_all_start_alike_and_learn_alike(finished: Finished) -> None:
    """Same weights, same tokens; and traditional does on the host exactly what gpu does in place, clipped and not, on
    and on in one process.
    """
    unclipped = {system: finished.rows(system)[0]["losses"] for system in ("pager", "gpu", "traditional")}
    assert unclipped["pager"][0] == unclipped["gpu"][0]
    # pager keeps bf16 moments here.
    assert unclipped["pager"][1] == pytest.approx(unclipped["gpu"][1], rel=1e-3)
    alike = [[row["losses"] for row in finished.rows(system)] for system in ("gpu", "traditional")]
    assert alike[0] == alike[1]


def test_what_moves_is_told_where_it_is_known(finished: Finished) -> None:
    state_bytes = 12 * num_parameters(SIZES)
    row = finished.rows("traditional")[0]
    assert row["h2d_bytes_per_step"] == row["d2h_bytes_per_step"] == state_bytes
    assert row["stall_share"] is None
    row = finished.rows("gpu")[0]
    assert row["h2d_bytes_per_step"] == 0
    row = finished.rows("pager")[0]
    assert row["h2d_bytes_per_step"] > 0
    assert 0 <= row["stall_share"] < 1
    assert row["knobs"] == {}
    assert row["facts"]["statistics"]["pager/num_steps"] == 6


def test_the_bound_stands_beside_it(finished: Finished) -> None:
    for row in finished.lines[2:-1]:
        assert row["of_bound"] == pytest.approx(row["bound"] / row["seconds_per_step"])
        assert row["bound"] > 0
        assert sum(row["bound_shares"].values()) == pytest.approx(1.0)
    ceilings = finished.lines[0]
    compute = ceilings["forward_seconds"] + ceilings["backward_seconds"]
    assert finished.rows("gpu")[0]["bound"] >= compute * 0.999
    # One that is capped can do no better than one that is not.
    assert finished.rows("pager")[0]["bound"] >= finished.rows("gpu")[0]["bound"] * 0.999
    assert finished.rows("pager")[0]["bound_of_knobs"] >= finished.rows("pager")[0]["bound"] * 0.999


def test_who_cannot_run_has_one_line(finished: Finished) -> None:
    (row,) = finished.rows("fsdp2")
    assert (row["status"], row["reason"]) == ("skipped", "needs a GPU")
    assert "fsdp2: skipped: needs a GPU" in finished.out


def test_the_table_says_what_is_not_alike(finished: Finished) -> None:
    assert "gpu: fp32 master, fp32 moments; cap on nothing; no cap: all of it on the GPU" in finished.out
    assert "pager: moments in bfloat16; cap on process" in finished.out
    assert "wall " in finished.out
    assert "GB/s in / out / each way at once" in finished.out
    assert sum(line.startswith("pager ") for line in finished.out.splitlines()) == 4


def test_ceilings_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_child(job: StepJob, system: str, job_path: Path, log: Path) -> tuple[dict[str, Any], str | None]:
        calls.append(system)
        return {}, "no machine"

    monkeypatch.setattr(conductor, "_run_child", run_child)
    finished = bench(tmp_path, "--workload", "tiny", "--ceilings", "--json")
    assert calls == ["ceilings"]
    assert finished.code == 1
    assert json.loads(finished.out)["reason"] == "no machine"


# ---- systems that fail


def run_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, timeout: float) -> Any:
    """What the conductor makes of a child that is ``program``: argv is job, system, result."""
    popen = conductor.subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return popen([sys.executable, "-c", program, *command[3:]], **options)

    monkeypatch.setattr(conductor.subprocess, "Popen", start)
    job = dataclasses.replace(make_job_of("--workload", "tiny"), timeout=timeout)
    job.write(tmp_path / "job.json")
    return conductor._run_child(job, "gpu", tmp_path / "job.json", tmp_path / "log")


WRITE = "import sys; open(sys.argv[3], 'w').write('{\"runs\": [1]}'); "


@pytest.mark.parametrize(
    ("program", "timeout", "reason"),
    [
        (WRITE, 60.0, None),
        (WRITE + "import os; os.kill(os.getpid(), 9)", 60.0, "ended by signal SIGKILL; see "),
        (WRITE + "sys.exit(3)", 60.0, "ended with code 3; see "),
        (
            WRITE + "sys.stdout.close(); import threading; threading.Event().wait()",
            3.0,
            "not done after 3 s; see ",
        ),
    ],
)
def test_what_was_measured_before_the_end_is_kept(
    program: str, timeout: float, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, found = run_program(tmp_path, monkeypatch, program, timeout)
    assert result == {"runs": [1]}
    assert found is None if reason is None else str(found).startswith(reason)


@pytest.mark.parametrize(("program", "kept"), [(WRITE, None), (WRITE + "sys.exit('it broke')", "it broke\n")])
def test_only_the_output_of_what_failed_is_kept(
    program: str, kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program(tmp_path, monkeypatch, program, 60.0)
    log = tmp_path / "log"
    assert (log.read_text() if log.exists() else None) == kept


def test_a_build_that_was_killed_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor.tempfile, "gettempdir", lambda: str(tmp_path))
    environment = conductor._environment(make_job_of(), "deepspeed-zero2")
    build = Path(environment["TORCH_EXTENSIONS_DIR"]) / "py" / "cpu_adam"
    build.mkdir(parents=True)
    (build / "lock").write_text("")
    assert "TORCH_EXTENSIONS_DIR" not in conductor._environment(make_job_of(), "pager").keys() - set(
        os.environ
    )
    conductor._environment(make_job_of(), "deepspeed-zero3")
    assert not (build / "lock").exists()


@pytest.mark.parametrize("system", ["fsdp2", "pager", "ceilings"])
def test_on_a_gpu_every_system_gets_all_cores(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    environment = conductor._environment(make_job_of("--deterministic", has_gpu=True), system)
    assert environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    # pager page-locks by itself; the peers are given the faster way.
    assert ("PYTORCH_CUDA_ALLOC_CONF" in environment) == (system == "fsdp2")
    assert conductor._environment(make_job_of(), system)["OMP_NUM_THREADS"] == "1"


def test_one_that_fails_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {
        "batch": 1,
        "clip": None,
        "losses": [5.0, 4.0, 3.0],
        "seconds": [9.0, 9.0, 9.0, 2.0],
        "h2d_bytes_per_step": None,
        "d2h_bytes_per_step": None,
        "stall_seconds_per_step": 1.0,
        "allocator_peak_bytes": None,
        "process_peak_bytes": None,
        "host_bytes": 1,
        "host_resident_bytes": 1,
    }

    def run_child(job: StepJob, system: str, job_path: Path, log: Path) -> tuple[dict[str, Any], str | None]:
        if system == "gpu":
            return {"runs": [], "refused": True}, "it would not"
        if system == "traditional":
            return {"runs": [run], "setup_seconds": 1.0}, "it broke"
        return ({"runs": [run, {"batch": 1, "clip": 1.0, "refused": "no"}], "setup_seconds": 1.0}, None)

    monkeypatch.setattr(conductor, "_run_child", run_child)
    finished = bench(tmp_path, "--workload", "tiny", "--clip", "both", "--systems", "gpu,traditional,pager")
    assert finished.code == 0
    seen = [(line["system"], line["status"], line.get("reason")) for line in finished.lines[1:]]
    assert seen == [
        ("gpu", "refused", "it would not"),
        ("traditional", "ok", None),
        ("traditional", "failed", "it broke"),
        ("pager", "ok", None),
        ("pager", "refused", "no"),
    ]
    assert finished.rows("pager")[0]["stall_share"] == 0.5
    # Without ceilings there is no bound.
    assert finished.rows("pager")[0]["bound"] is None
    assert "pager at batch 1 with clipping at 1: refused: no" in finished.out


@pytest.mark.parametrize(
    ("system", "allocator", "process", "holds"),
    [
        ("pager", 11, 13, False),  # its cap is on the process
        ("pager", 11, 12, True),
        ("pager", 13, None, False),  # where NVML cannot tell
        ("fsdp2", 12, 13, True),
        ("fsdp2", 13, 14, False),
        ("fsdp2", None, None, None),
    ],
)
def test_the_cap_is_held_by_what_it_bounds(
    system: str, allocator: int | None, process: int | None, holds: bool | None
) -> None:
    gib = 2**30
    run = {
        "batch": 1,
        "clip": None,
        "losses": [5.0],
        "seconds": [9.0] * 9,
        **dict.fromkeys(("h2d_bytes_per_step", "d2h_bytes_per_step", "stall_seconds_per_step")),
        "allocator_peak_bytes": None if allocator is None else allocator * gib,
        "process_peak_bytes": None if process is None else process * gib,
        "host_bytes": 1,
        "host_resident_bytes": 1,
    }
    (row,) = measured_rows(make_job_of("--workload", "3b"), system, {"runs": [run]})
    assert row["holds_cap"] is holds


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "bench.jsonl").mkdir()
    record = conductor._Record(tmp_path / "bench.jsonl", as_json=False, common={})
    with pytest.raises(CommandFailed, match=r"cannot write .*bench.jsonl: Is a directory"):
        record.put({"a": 1})


# ---- options


def test_the_named_workloads_have_their_caps() -> None:
    three, seven = make_job_of("--workload", "3b"), make_job_of("--workload", "7b", "--batch", "8")
    assert make_job_of("--workload", "13b").cap_bytes == 24 * 2**30
    assert (three.cap_bytes, seven.cap_bytes) == (12 * 2**30, 24 * 2**30)
    assert (seven.sizes.hidden, seven.sizes.layers, seven.sizes.heads, seven.sizes.ffn) == (
        4096,
        32,
        32,
        11008,
    )
    assert (three.seq, seven.batches, three.sizes.dtype, three.sizes.checkpoint) == (
        2048,
        (8,),
        "bfloat16",
        True,
    )
    assert three.systems[0] == three.systems[-1] == "pager-backward"
    assert set(three.systems) == set(SYSTEMS) - {"pager"}


def test_only_the_knobs_that_were_named_are_handed_on() -> None:
    assert make_job_of().knobs == {}
    named = make_job_of("--update-at", "backward", "--update-on", "auto", "--master", "none")
    assert named.knobs == {"update_at": "backward", "update_on": "auto", "master": None}
    named = make_job_of(
        "--master",
        "float32",
        "--host-budget",
        "9GiB",
        "--disk",
        "/d",
        "--disk-budget",
        "1GiB",
        "--disk-compression",
        "2",
    )
    assert named.knobs == {
        "master": "float32",
        "host_budget": "9GiB",
        "disk": "/d",
        "disk_budget": "1GiB",
        "disk_compression": 2,
    }


def test_a_knob_that_was_named_wins_over_the_systems_own() -> None:
    job = make_job_of("--update-on", "cpu", "--batch", "8,1")
    assert job.batches == (1, 8)
    assert job.knobs_of("pager") == {"update_on": "cpu"}
    assert job.knobs_of("pager-step") == {"update_at": "step", "update_on": "cpu", "master": "float32"}
    assert job.knobs_of("pager-backward") == {
        "update_at": "backward",
        "update_on": "cpu",
        "master": "float32",
    }
    assert job.knobs_of("gpu") is None


@pytest.mark.parametrize(("steps", "dropped"), [(3, 2), (6, 2), (9, 3), (12, 4)])
def test_a_third_of_the_steps_does_not_count(steps: int, dropped: int) -> None:
    assert make_job_of("--steps", str(steps)).num_dropped == dropped


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = make_job_of("--clip", "both", "--cap", "1GiB", "--master", "float32", has_gpu=True)
    job.write(tmp_path / "job.json")
    assert StepJob.read(tmp_path / "job.json") == job
    assert (job.device, job.clips, job.cap_bytes) == ("cuda", (None, 1.0), 2**30)
    assert make_job_of("--device", "cpu", has_gpu=True).device == "cpu"
    assert math.isfinite(job.timeout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--systems", "pager,fdsp2"], "unknown system 'fdsp2'; did you mean 'fsdp2'"),
        (["--systems", ","], "--systems names none"),
        (["--device", "cuda"], "torch sees no GPU here"),
        (["--steps", "2"], "--steps is 2; expected at least 3"),
        (["--batch", "8,0"], "--batch is 0; expected at least 1"),
        (["--batch", "1,many"], "--batch is '1,many'; expected a number, or several as in 1,8"),
        (["--workload", "9b"], "unknown model '9b'"),
    ],
)
def test_wrong_use_is_said(options: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_job_of(*options)


def test_a_folder_that_cannot_be_made_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finished = bench(tmp_path / "file", "--workload", "tiny")
    assert finished.code == 2
    assert "File exists" in finished.err
