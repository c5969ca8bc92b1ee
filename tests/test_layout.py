"""The rooms: who may import whom, what is exported, what an import costs. DESIGN, section 3, as tests.

The sources are read, not run: a forbidden import is found also inside a function or under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("policies", "graph", "tools")
MAX_LINES = 450
# A test file is a table of cases, and reads as one at greater length.
MAX_TEST_LINES = 700

EXPORTED = {
    "manage",
    "Handle",
    "Config",
    "Plan",
    "Statistics",
    "parse_size",
    "PagerError",
    "ConfigError",
    "BudgetError",
    "PagerClosed",
    "__version__",
}

# Inside pager/ an import goes to the same or an earlier row, never to a later one.
LAYERS = (
    (
        "errors",
        "units",
        "columns",
        "config",
        "statistics",
        "host_limit",
        "core_limit",
        "interrupts",
        "exiting",
        "spans",
    ),
    ("address_space", "page_table"),
    ("tiers", "device"),
    ("engine", "home_frames", "homes", "device_budget"),
    ("mmu",),
    ("optim", "model_checks"),
    (
        "bill",
        "fitting",
        "home_moves",
        "host_cap",
        "paging",
        "planning",
        "residency",
        "slabs",
        "step_boundary",
    ),
    ("runtime", "closing", "model_hooks"),
    ("api",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

ALLOWED_THIRD_PARTY = {
    "policies": {"numpy"},
    "graph": {"numpy", "networkx", "torch", "matplotlib"},
}


def _sources(*folders: str) -> list[Path]:
    """The Python files under ``folders``, each once: links between rooms are not followed."""
    files = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside_link = folder == "pager" and path.relative_to(ROOT / "pager").parts[0] in ROOMS
            if not inside_link and "__pycache__" not in path.parts:
                files.append(path)
    return files


def _module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(["pager", *parts] if parts[0] in ROOMS else parts)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _known_modules() -> frozenset[str]:
    return frozenset(_module_name(path) for path in _sources("pager", *ROOMS, "tests"))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import in ``path``, wherever it stands."""
    package = _module_name(path) if path.name == "__init__.py" else _module_name(path).rpartition(".")[0]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                named = f"{base}.{alias.name}"
                yield node.lineno, named if named in _known_modules() else base


def _room(module: str) -> str:
    """The room of a module, "pager" for the runtime; else its top-level name."""
    parts = module.split(".")
    if parts[0] != "pager":
        return parts[0]
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "pager"


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


LIBRARY = _sources("pager", *ROOMS)
EVERYTHING = [*LIBRARY, *_sources("tests")]


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("policies", ("pager", "graph", "tools", "tests")),
        ("graph", ("pager", "policies", "tools", "tests")),
        ("pager", ("tools", "tests")),
        ("tools", ("tests",)),
    ],
)
def test_rooms_import_one_way(room: str, forbidden: tuple[str, ...]) -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(room)
        for line, module in _imports(path)
        # `import pager` is the runtime's face, and forbidden to policies and graph like the rest of it.
        if _room(module) in forbidden
    ]
    assert broken == []


@pytest.mark.parametrize("room", sorted(ALLOWED_THIRD_PARTY))
def test_a_leaf_room_uses_only_what_it_may(room: str) -> None:
    allowed = ALLOWED_THIRD_PARTY[room] | sys.stdlib_module_names | {"pager"}
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(room)
        for line, module in _imports(path)
        if module.split(".")[0] not in allowed
    ]
    assert broken == []


def test_every_part_of_the_runtime_has_a_layer() -> None:
    parts = {path.relative_to(ROOT / "pager").parts[0].removesuffix(".py") for path in _sources("pager")}
    assert parts - {"__init__"} <= RANK.keys()


def test_the_runtime_imports_towards_its_errors() -> None:
    broken = []
    for path in _sources("pager"):
        part = path.relative_to(ROOT / "pager").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for line, module in _imports(path):
            if _room(module) != "pager":
                continue
            target = module.split(".")[1] if "." in module else "__init__"
            if target == "__init__" or RANK.get(target, 0) > RANK[part]:
                broken.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert broken == []


def test_modules_do_not_import_in_circles() -> None:
    """At import time, that is: what stands in a function or under TYPE_CHECKING may point back."""
    edges = {
        _module_name(path): {target for target in _top_level_imports(path) if target != _module_name(path)}
        for path in LIBRARY
        if path != ROOT / "pager" / "__init__.py"
    }
    circles = [name for name in edges if name in _reachable(edges, name)]
    assert circles == []


def _top_level_imports(path: Path) -> set[str]:
    lines: set[int] = set()
    for node in _tree(path).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return {module for line, module in _imports(path) if line in lines and module.startswith("pager.")}


def _reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(edges[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(edges.get(name, ()))
    return found


def test_no_room_is_imported_as_a_top_level_module() -> None:
    """``import graph`` works in the root of the repository and would make a second module object."""
    broken = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in EVERYTHING
        for line, module in _imports(path)
        if module.split(".")[0] in ROOMS
    ]
    assert broken == []


def test_only_the_cuda_device_knows_cuda() -> None:
    """``torch.cuda`` as an attribute, as an import, or by ``from torch import cuda``."""
    broken = []
    names = ("pager/device/cuda.py", "pager/device/cuda_allocator.py")
    tests = ("tests/device/test_cuda.py", "tests/device/test_cuda_allocator.py")
    knows = [ROOT / name for name in names + tests]
    for path in EVERYTHING:
        if path in knows or path.is_relative_to(ROOT / "tests" / "gpu"):
            continue
        named = [
            node.lineno
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
        named += [
            node.lineno
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(alias.name == "cuda" for alias in node.names)
        ]
        named += [line for line, module in _imports(path) if f"{module}.".startswith("torch.cuda.")]
        broken += [f"{path.relative_to(ROOT)}:{line}" for line in named]
    assert broken == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "pager" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


@pytest.mark.parametrize("path", LIBRARY, ids=_ids)
def test_a_module_says_what_it_is_for(path: Path) -> None:
    has_code = bool(_tree(path).body)
    assert ast.get_docstring(_tree(path)) or not has_code


@pytest.mark.parametrize("path", EVERYTHING, ids=_ids)
def test_a_file_stays_readable(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    limit = MAX_TEST_LINES if path.is_relative_to(ROOT / "tests") else MAX_LINES
    assert num_lines <= limit, f"{num_lines} lines; split the file along its reasons to change"


@pytest.mark.parametrize("path", _sources("pager", "policies", "graph"), ids=_ids)
def test_the_library_does_not_print(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert calls == []


def test_the_face_has_its_names_and_no_others() -> None:
    import pager

    assert set(pager.__all__) == EXPORTED
    assert set(dir(pager)) >= EXPORTED
    for name in EXPORTED:
        assert getattr(pager, name) is not None


def test_an_unknown_name_of_the_face_is_an_attribute_error() -> None:
    import pager

    with pytest.raises(AttributeError, match="module 'pager' has no attribute 'mange'"):
        _ = pager.mange


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("pager", {"torch", "numpy", "networkx"}),
        ("pager.units", {"torch", "numpy"}),
        ("pager.errors", {"torch", "numpy"}),
        ("pager.policies.lru", {"torch", "networkx"}),
        ("pager.graph.access_trace", {"torch"}),
        ("pager.core_limit", {"torch", "numpy", "psutil"}),
        ("pager.optim.adamw_cpu", {"numba", "llvmlite"}),
        ("pager.optim.cpu_pool", {"torch", "numpy", "numba"}),
        ("pager.tools.cli", {"torch", "numpy", "yaml", "matplotlib"}),
        ("pager.tools.train", {"torch", "matplotlib"}),
        ("pager.tools.monitor.recorded", {"torch", "matplotlib"}),
    ],
)
def test_importing_a_leaf_is_cheap(module: str, unwanted: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({unwanted!r} & set(sys.modules)))"
    completed = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert completed.stdout.split() == []
