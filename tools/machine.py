"""The machine that plans and estimates are made for: rates and sizes, as data. No torch here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pager.graph.task_timing import MachineRates
from pager.tools.errors import InputError, closest
from pager.units import parse_size

__all__ = ["Machine", "load_machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Sizes in bytes, rates a second. Defaults: one H200 on PCIe 5 x16 with 125 GiB of host memory, measured.

    ``context_bytes``: what a process takes on the device before any tensor. ``network_bytes_per_second``: of each
    direction between machines (assumed: 400 Gbit/s), for estimates on several.
    """

    name: str = "one H200, PCIe 5 x16, 125 GiB"
    rates: MachineRates = field(default_factory=MachineRates)
    # A plain 6.7 B decoder, batch 8 x 2048, checkpointed: 8 * 6.7e9 * 16384 operations in 1.7 s.
    flops_per_second: float = 5.2e14
    device_memory_bytes_per_second: float = 3.2e12
    device_bytes: int = 139 * 2**30
    context_bytes: int = 512 * 2**20
    host_bytes: int = 125 * 2**30
    disk_bytes: int = 0
    network_bytes_per_second: float = 50e9


def load_machine(path: str | None) -> Machine:
    """The machine in a JSON file: any of the fields of `Machine` and `MachineRates`; the default one without a path.

    Raises InputError for what cannot be read, unknown names and values that are no rate or size.
    """
    if path is None:
        return Machine()
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--machine {path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"--machine {path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(
            f"--machine {path}: holds {type(content).__name__}; expected a mapping of rates and sizes"
        )
    own = {f.name for f in fields(Machine)} - {"rates"}
    of_rates = {f.name for f in fields(MachineRates)}
    counts = {f.name for f in fields(MachineRates) if f.type == "int"}
    values: dict[str, Any] = {"name": Path(path).stem}
    rates: dict[str, Any] = {}
    for key, value in content.items():
        if key not in own | of_rates:
            raise InputError(f"--machine {path}: unknown field {key!r}{closest(key, own | of_rates)}")
        if key == "name":
            values[key] = str(value)
        elif key in of_rates:
            rates[key] = _count(path, key, value) if key in counts else _rate(path, key, value)
        elif key.endswith("_per_second"):
            values[key] = _rate(path, key, value)
        else:
            values[key] = _size(path, key, value)
    return dataclasses.replace(Machine(), **values, rates=dataclasses.replace(MachineRates(), **rates))


def _rate(path: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"--machine {path}: {key} is {value!r}; expected a number above 0")
    return float(value)


def _count(path: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"--machine {path}: {key} is {value!r}; expected a whole number above 0")
    return value


def _size(path: str, key: str, value: Any) -> int:
    try:
        return parse_size(value, name=f"--machine {path}: {key}")
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
