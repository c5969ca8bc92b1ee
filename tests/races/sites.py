"""Where the runtime waits, pins and marks: the places in its source, and which of them is calling now.

A site is named by file, function and its place among the calls of that kind there, so that it keeps its name when lines
move.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pager

ROOT = Path(pager.__file__).resolve().parent
# The device's own files are the waits' implementation; their tests stand in tests/device.
_LEFT_OUT = ("device", "graph", "policies", "tools", "testing")


@functools.cache
def find_sites(method: str, *, receivers_left_out: tuple[str, ...] = ()) -> dict[tuple[str, int], str]:
    """(file, line) -> name of every call ``<receiver>.<method>(...)`` of the runtime."""
    found: dict[tuple[str, int], str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if relative.parts[0] in _LEFT_OUT:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for scope, function in _functions(tree, ()):
            lines = sorted(_calls(function, method, receivers_left_out))
            for number, line in enumerate(lines, 1):
                suffix = f"#{number}" if len(lines) > 1 else ""
                found[str(path), line] = f"{relative.as_posix()}:{'.'.join(scope)}:{method}{suffix}"
    return found


def _functions(node: ast.AST, scope: tuple[str, ...]) -> list[tuple[tuple[str, ...], ast.AST]]:
    found: list[tuple[tuple[str, ...], ast.AST]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            found += _functions(child, (*scope, child.name))
        elif isinstance(child, ast.FunctionDef):
            found.append(((*scope, child.name), child))
    return found


def _calls(function: ast.AST, method: str, receivers_left_out: tuple[str, ...]) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == method
        and _last_name(node.func.value) not in receivers_left_out
    ]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def wait_sites() -> dict[tuple[str, int], str]:
    """Every place where a stream or the host waits for an event. Conditions between threads are not among them."""
    conditions = ("changed", "_wake", "_finished")
    return {
        **find_sites("wait", receivers_left_out=conditions),
        **find_sites("synchronize", receivers_left_out=conditions),
    }


def current_site(sites: dict[tuple[str, int], str]) -> str | None:
    """The innermost of ``sites`` that is being executed by this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = sites.get((frame.f_code.co_filename, frame.f_lineno))
        if name is not None:
            return name
        frame = frame.f_back
    return None


def skip_only(site: str | None, *, stream: str | None = None) -> Callable[[Any, Any], bool]:
    """For ``Checks(skip_wait=...)``: leave out the waits of one site (of events of the stream of that name)."""
    sites = wait_sites()

    def skip(waiting: Any, event: Any) -> bool:
        return (
            site is not None
            and current_site(sites) == site
            and (stream is None or event.stream.name == stream)
        )

    return skip
