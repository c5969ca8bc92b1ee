"""Options that ``pager plan`` and ``pager estimate`` share, and what follows from them. No torch here."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pager.errors import ConfigError
from pager.tools.errors import InputError
from pager.units import parse_size

if TYPE_CHECKING:
    from pager.tools.captured import CapturedModel
    from pager.tools.machine import Machine
    from pager.tools.prediction import Wanted

__all__ = [
    "add_shared_options",
    "capture_from",
    "columns_of",
    "default_budget",
    "make_folder",
    "parse_budget",
    "plain",
    "wanted_from",
]

# A training state below this is planned for as on the simulated device: its budget counts pages alone.
SMALL_BYTES = 2**30


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """The model, its batch, the machine and the knobs of a run."""
    from pager.tools.model_source import HELP

    parser.add_argument("model", metavar="MODEL", help=HELP)
    work = parser.add_argument_group("the work")
    work.add_argument("--batch", type=int, default=1, help="sequences a step (default: 1)")
    work.add_argument(
        "--seq",
        type=int,
        help="tokens of a sequence (default: 2048, or all of a model's positions; small models 128)",
    )
    work.add_argument(
        "--no-checkpoint", action="store_true", help="a Hugging Face model keeps its activations in forward"
    )
    work.add_argument(
        "--no-master", action="store_true", help="half-precision models are stepped as they are"
    )
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--machine",
        metavar="FILE",
        help="JSON of rates and sizes (default: one H200, measured; docs/benchmarks.md)",
    )
    machine.add_argument(
        "--host-budget", metavar="SIZE", help="for homes (default: 85 %% of the machine's memory)"
    )
    machine.add_argument(
        "--disk-budget", metavar="SIZE", help="of the third tier (default: the machine's; none)"
    )
    machine.add_argument(
        "--compute-seconds",
        type=float,
        help="of forward and backward, measured (default: by the machine's rates)",
    )
    knobs = parser.add_argument_group("knobs of pager.Config")
    knobs.add_argument("--update-at", choices=("step", "backward"), default="step")
    knobs.add_argument("--update-on", choices=("device", "auto", "cpu"), default="device")
    knobs.add_argument("--eviction", choices=("belady", "clock", "lru"), default="belady")
    knobs.add_argument("--prefetch-distance", type=int, default=4, help="extents kept in flight (default: 4)")
    knobs.add_argument("--page-size", metavar="SIZE", default="128KiB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def capture_from(arguments: argparse.Namespace) -> tuple[CapturedModel, Machine]:
    """The model's step, captured, and the machine. InputError for options that cannot be."""
    from pager.config import Config
    from pager.tools.captured import capture_model
    from pager.tools.machine import load_machine
    from pager.tools.model_source import load_model

    for name, lowest in (("batch", 1), ("seq", 2), ("prefetch_distance", 0)):
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected at least {lowest}")
    if arguments.compute_seconds is not None and not arguments.compute_seconds > 0:
        raise InputError(f"--compute-seconds is {arguments.compute_seconds}; expected more than 0")
    page_size = Config(page_size=arguments.page_size).page_bytes
    machine = load_machine(arguments.machine)
    source = load_model(
        arguments.model, batch=arguments.batch, seq=arguments.seq, checkpoint=not arguments.no_checkpoint
    )
    captured = capture_model(source, machine, page_size=page_size, master=not arguments.no_master)
    if arguments.compute_seconds is not None:
        captured = dataclasses.replace(captured, step=captured.step.scaled_to(arguments.compute_seconds))
    return captured, machine


def wanted_from(
    arguments: argparse.Namespace, captured: CapturedModel, machine: Machine, budget_bytes: int
) -> Wanted:
    """The knobs of a run with this device budget."""
    from pager.tools.prediction import Wanted

    host = _size(arguments.host_budget, "--host-budget")
    disk = _size(arguments.disk_budget, "--disk-budget")
    return Wanted(
        budget_bytes=budget_bytes,
        host_bytes=int(machine.host_bytes * 0.85) if host is None else host,
        disk_bytes=machine.disk_bytes if disk is None else disk,
        update_at=arguments.update_at,
        update_on=arguments.update_on,
        eviction=arguments.eviction,
        prefetch_extents=arguments.prefetch_distance,
        simulated=is_small(captured),
    )


def state_bytes_of(captured: CapturedModel) -> int:
    """Bytes of the training state that is paged: parameters, gradients, optimizer states."""
    size = captured.step.size
    return captured.step.num_parameters * (size.weight + size.gradient + size.state)


def is_small(captured: CapturedModel) -> bool:
    """Whether a GPU's budget says nothing about the model: a process takes more than its training state."""
    return state_bytes_of(captured) < SMALL_BYTES


def default_budget(captured: CapturedModel, machine: Machine) -> int:
    """Device memory that holds a quarter of the training state; on a GPU beside activations and what a process takes,
    and at most 90 % of the device.
    """
    state = state_bytes_of(captured)
    if is_small(captured):
        return state // 4 + captured.step.small_bytes
    largest = int(captured.step.num_elements.max()) * captured.step.size.weight
    beside = machine.context_bytes + 1024 * 2**20 + captured.step.small_bytes + 2 * captured.activation_bytes
    return min((max(state // 4, 16 * largest) + beside) * 16 // 15, machine.device_bytes * 9 // 10)


def parse_budget(text: str, machine: Machine, *, name: str = "--device-budget") -> int:
    """Bytes of ``"24GiB"``, or of a fraction such as ``"0.9"`` of the machine's device. InputError for others."""
    try:
        share = float(text)
    except ValueError:
        return parse_size(text, name=name)
    if 0 < share <= 1 and "." in text:
        return int(share * machine.device_bytes)
    try:
        return parse_size(text, name=name)
    except ConfigError as error:
        raise InputError(str(error)) from error


def _size(text: str | None, name: str) -> int | None:
    return None if text is None else parse_size(text, name=name)


def make_folder(path: str) -> Path:
    """A folder that can be written to. Raises InputError where it cannot."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".pager-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot write there ({error.strerror or error}); name another folder"
        ) from error
    return folder


def plain(value: Any) -> Any:
    """``value`` with numpy's scalars and infinities as JSON knows them."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return value.item()
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def columns_of(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns under each other: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
