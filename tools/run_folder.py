"""The folder of one run: made and tried before the work starts, and readable whenever the work stops."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pager.tools.errors import CommandFailed, InputError
from pager.units import format_bytes

__all__ = ["RunFolder", "make_run_folder"]

# A run writes its losses, a plan of a few MB for the largest presets, a plot and a table of residence.
NEEDED_BYTES = 32 * 2**20


class RunFolder:
    """Writes the results of one run. A file is replaced as a whole: a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def discard(self) -> None:
        """Remove the folder: there was no run."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_text(self, name: str, text: str) -> Path:
        """Write ``text`` to the file ``name``. Raises CommandFailed where the system refuses."""
        return self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> Path:
        """Write ``content`` to the file ``name``. Raises CommandFailed where the system refuses."""
        path = self.path / name
        partial = path.with_name(f".{name}.partial")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                partial.unlink(missing_ok=True)
            raise CommandFailed(f"cannot write {path}: {error.strerror or error}") from error
        return path

    def write_json(self, name: str, content: Any) -> Path:
        """Write ``content`` as JSON."""
        return self.write_text(name, json.dumps(content, indent=2) + "\n")

    def write_yaml(self, name: str, content: Any) -> Path:
        """Write ``content`` as YAML, its keys in their order."""
        return self.write_text(name, yaml.safe_dump(content, sort_keys=False))

    def write_csv(self, name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
        """Write a table with one line of column names."""
        lines = _Lines()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
        return self.write_text(name, "".join(lines))


class _Lines(list[str]):
    def write(self, line: str) -> None:
        self.append(line)


def make_run_folder(out: str | Path, model: str) -> RunFolder:
    """Make ``<out>/<time>-<model>`` and try it. Raises InputError where no result could be kept there."""
    parent = Path(out)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = _make_new(parent, f"{time.strftime('%Y%m%d-%H%M%S')}-{model}")
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < NEEDED_BYTES:
            path.rmdir()
            raise InputError(
                f"--out {out}: {format_bytes(free_bytes)} free, but the results may take "
                f"{format_bytes(NEEDED_BYTES)}; make room or name another folder"
            )
        probe = path / ".probe"
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot write there ({error.strerror or error}); name another folder"
        ) from error
    return RunFolder(path)


def _make_new(parent: Path, name: str) -> Path:
    """A folder that was not there before: two runs may start within one second."""
    for suffix in ("", *(f"-{count}" for count in range(2, 100))):
        try:
            path = parent / f"{name}{suffix}"
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise InputError(f"--out {parent}: there are already 99 runs named {name}")
