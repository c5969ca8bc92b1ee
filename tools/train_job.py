"""One training from its options to its results: the managed run, its folder, the comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import pager
from pager.statistics import Statistics
from pager.tools.errors import CommandFailed
from pager.tools.language_model import DecoderModel, make_model
from pager.tools.model_sizes import num_parameters
from pager.tools.report import ProgressBar, format_table, plot_resident
from pager.tools.run_folder import RunFolder, make_run_folder
from pager.tools.step_log import LOG_NAME, StepLog
from pager.tools.text import TextBatches, read_text
from pager.tools.training import (
    StopOnInterrupt,
    TrainingRecord,
    compare_models,
    deterministic,
    train_steps,
)
from pager.units import format_bytes

if TYPE_CHECKING:
    from pager.api import Handle
    from pager.tools.train import Job

__all__ = ["run_job"]

EXIT_INTERRUPTED = 130

# A model this large is drawn on the device segment by segment instead of in host memory first.
META_PARAMETERS = 2**30

# The close-up of the plot: few enough steps to tell them apart, enough to see that they repeat.
PLOTTED_STEPS = 4


def run_job(job: Job) -> int:
    """Train as ``job`` says; returns the exit code of ``pager train``.

    Raises InputError for a text or an output folder that cannot be used, before any training; CommandFailed
    when ``--check`` finds a difference or a result cannot be written; and what the training itself raises,
    after writing the results so far.
    """
    batches = TextBatches(read_text(job.text), batch=job.batch, seq=job.seq, seed=job.seed)
    folder = make_run_folder(job.out, job.model)
    _say(
        f"{job.model}: {num_parameters(job.sizes):,} parameters, {format_bytes(job.sizes.state_bytes)} of "
        f"state (parameters, gradients, Adam); results in {folder.path}"
    )
    folder.write_yaml("config.yaml", _as_plain(job))
    if job.check:
        # Read by cuBLAS when it starts; without it torch refuses deterministic products on CUDA.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic(job.check):
        model, record, status = _train_managed(job, batches, folder)
        if status == "interrupted":
            _say(
                f"interrupted after {len(record.losses)} of {job.steps} steps; results so far: {folder.path}"
            )
            return EXIT_INTERRUPTED
        return _check(job, batches, model, record, folder) if job.check else 0


def _say(message: str) -> None:
    print(message, flush=True)


def _as_plain(job: Job) -> dict[str, Any]:
    versions = {"pager": pager.__version__, "torch": str(torch.__version__)}
    return {**dataclasses.asdict(job), "versions": versions}


def _manage(job: Job, batches: TextBatches) -> tuple[DecoderModel, torch.optim.Optimizer]:
    """The model of the run, under pager. Raises what refuses it."""
    on_meta = num_parameters(job.sizes) >= META_PARAMETERS and not job.check
    model = make_model(job.sizes, seed=job.seed, device="meta" if on_meta else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
    inputs, targets = next(iter(batches))
    example = (torch.from_numpy(inputs), torch.from_numpy(targets))
    pager.manage(model, optimizer, example_inputs=example, **job.knobs)
    return model, optimizer


def _train_managed(
    job: Job, batches: TextBatches, folder: RunFolder
) -> tuple[DecoderModel, TrainingRecord, str]:
    try:
        model, optimizer = _manage(job, batches)
    except BaseException:  # refused, or interrupted: there was no run
        folder.discard()
        raise
    handle: Handle = model.pager  # type: ignore[assignment]  # torch types every attribute of a module
    record = TrainingRecord()
    status = "failed"
    log: StepLog | None = None
    try:
        _write_plan(handle, folder)
        log = _open_log(folder)
        completed = _train(job, model, optimizer, batches, record, title=job.model, handle=handle, log=log)
        status = "completed" if completed else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        # Also after Ctrl-C and after an error: what was reached so far is readable, and the error goes on.
        with contextlib.suppress(pager.PagerError) if status == "failed" else contextlib.nullcontext():
            try:
                _write_results(job, record, status, handle, folder)
            finally:
                # The log last: who sees it closed, and no results, takes the run for a killed one.
                with contextlib.nullcontext() if log is None else contextlib.closing(log):
                    handle.close()
    return model, record, status


def _train(
    job: Job,
    model: DecoderModel,
    optimizer: torch.optim.Optimizer,
    batches: TextBatches,
    record: TrainingRecord,
    *,
    title: str,
    handle: Handle | None = None,
    log: StepLog | None = None,
) -> bool:
    """Train with a bar, and with a line a step in ``log``; True if all were done, False if Ctrl-C asked to stop."""
    bar = ProgressBar(steps=job.steps, tokens_per_step=job.batch * job.seq, title=title)
    with contextlib.closing(bar), StopOnInterrupt(bar.say) as stop:

        def on_step(loss: float, seconds: float) -> bool:
            statistics = handle.statistics() if handle is not None else None
            bar.step(loss, seconds, statistics)
            if log is not None and handle is not None and statistics is not None:
                problem = log.write(
                    len(record.losses),
                    loss=loss,
                    seconds=seconds,
                    statistics=statistics,
                    history=handle.resident_history(),
                )
                if problem is not None:
                    bar.say(f"warning: {problem}")
            return not stop.requested

        train_steps(model, optimizer, batches, steps=job.steps, record=record, on_step=on_step)
    return len(record.losses) == job.steps


def _open_log(folder: RunFolder) -> StepLog:
    try:
        return StepLog(folder.path)
    except OSError as error:
        raise CommandFailed(f"cannot write {folder.path / LOG_NAME}: {error.strerror or error}") from error


def _write_plan(handle: Handle, folder: RunFolder) -> None:
    plan = handle.plan
    folder.write_text("plan.txt", f"{plan}\n")
    try:
        plan.to_json(folder.path / "plan.json", pages=False)
    except OSError as error:
        raise CommandFailed(f"cannot write {folder.path / 'plan.json'}: {error.strerror or error}") from error


def _write_results(job: Job, record: TrainingRecord, status: str, handle: Handle, folder: RunFolder) -> None:
    """Files first, then the table: where the folder fails, the numbers are still shown."""
    statistics: Statistics = handle.statistics()
    tokens = len(record.losses) * job.batch * job.seq
    table = format_table(statistics, losses=record.losses, tokens=tokens, seconds=record.seconds)
    try:
        folder.write_json(
            "losses.json",
            {
                "status": status,
                "unit": "nats/byte",
                "steps_asked": job.steps,
                "steps_done": len(record.losses),
                "losses": record.losses,
                "step_seconds": record.step_seconds,
            },
        )
        folder.write_json("statistics.json", statistics.as_dict())
        history = handle.resident_history()
        folder.write_csv("resident.csv", ("seconds", "resident_bytes"), history)
        about_plot = _write_plot(job, record, statistics, history, folder)
    finally:
        _say(f"\n{table}\n")
        if job.knobs["disk"] is not None and not statistics.peak_disk_bytes:
            _say(f"warning: --disk {job.knobs['disk']} had no effect: device and host memory hold everything")
    _say(about_plot)


def _write_plot(
    job: Job,
    record: TrainingRecord,
    statistics: Statistics,
    history: Sequence[tuple[float, int]],
    folder: RunFolder,
) -> str:
    """Draw into memory, then write like any other result; says where the plot is, or why there is none."""
    picture = io.BytesIO()
    try:
        no_plot = plot_resident(
            picture,
            history,
            budget_bytes=statistics.device_budget_bytes,
            title=f"{job.model}: resident device memory",
            closeup_seconds=sum(record.step_seconds[-PLOTTED_STEPS:]),
        )
    except OSError as error:  # matplotlib keeps a cache of fonts on the disk
        raise CommandFailed(f"cannot draw resident.png: {error.strerror or error}") from error
    return no_plot or (
        f"plot of resident device memory: {folder.write_bytes('resident.png', picture.getvalue())}"
    )


def _check(
    job: Job, batches: TextBatches, managed: DecoderModel, record: TrainingRecord, folder: RunFolder
) -> int:
    """Train the same model without pager and compare every loss and every parameter, bit by bit."""
    device = record.device  # that of the managed model while it was managed
    model = make_model(job.sizes, seed=job.seed)
    plain = TrainingRecord()
    try:
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr)
        if not _train(job, model, optimizer, batches, plain, title="unmanaged"):
            _say("interrupted: nothing was compared")
            return EXIT_INTERRUPTED
    except torch.OutOfMemoryError as error:
        raise CommandFailed(
            f"--check: the model without pager does not fit on {device} "
            f"({format_bytes(job.sizes.state_bytes)} of training state and its activations); "
            "check a smaller --model or --batch"
        ) from error
    wrong_steps = [
        step for step, pair in enumerate(zip(record.losses, plain.losses, strict=True)) if not _same(*pair)
    ]
    differences = compare_models(managed, model)
    folder.write_json(
        "check.json",
        {
            "losses_equal": not wrong_steps,
            "parameters_equal": not differences,
            "first_different_step": wrong_steps[0] if wrong_steps else None,
            "different_parameters": differences,
            "unmanaged_losses": plain.losses,
            "unmanaged_seconds": plain.seconds,
        },
    )
    if wrong_steps or differences:
        raise CommandFailed(
            f"check FAILED: {len(wrong_steps)} of {len(plain.losses)} losses differ"
            + (f" (first at step {wrong_steps[0]})" if wrong_steps else "")
            + f", {len(differences)} parameters differ"
            + "".join(f"\n  {line}" for line in differences[:10])
        )
    _say(
        f"check passed: {len(plain.losses)} losses and {len(model.state_dict())} parameters are bit-equal "
        f"to the run without pager ({plain.seconds:.1f} s; with pager {record.seconds:.1f} s)"
    )
    return 0


def _same(ours: float, plain: float) -> bool:
    return ours == plain or (ours != ours and plain != plain)  # a NaN equals a NaN here
