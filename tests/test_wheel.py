"""What is installed, tried outside of the repository: each file once, and nothing beside `pager`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOMS = ("policies", "graph", "tools")
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "__pycache__", "runs", "build", "dist", "*.egg-info", ".*_cache", ".hypothesis"
)


def _run(*command: str | Path, cwd: Path) -> str:
    completed = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
    assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


def _environment() -> dict[str, str]:
    """Without what could bring the repository back onto the path."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def distributions(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from that sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "source"  # setuptools leaves build folders behind, and reuses what it finds in them
    shutil.copytree(repository, copy, symlinks=True, ignore=NOT_SOURCES)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, copy, cwd=folder)
    shutil.rmtree(copy)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and sees the dependencies of this one."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    # A path file lends the dependencies, but not what path files among them add: an editable pager stays out.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def _expected_files(repository: Path) -> set[str]:
    files = {"pager/py.typed"}
    for room in ROOMS:
        files |= {f"pager/{path.relative_to(repository)}" for path in (repository / room).rglob("*.py")}
    for path in (repository / "pager").rglob("*.py"):
        relative = path.relative_to(repository)
        if relative.parts[1] not in ROOMS:
            files.add(str(relative))
    return files


def test_the_wheel_holds_each_file_once_and_nothing_else(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    code = [name for name in names if ".dist-info/" not in name]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert set(code) == _expected_files(repository)
    assert {name.split("/")[0] for name in code} == {"pager"}


def test_the_wheel_names_its_licence_command_and_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(metadata_name).decode()
        entry_points = archive.read(metadata_name.replace("METADATA", "entry_points.txt")).decode()
    required = {
        line.split()[1].split(">")[0] for line in metadata.splitlines() if _is_plain_requirement(line)
    }
    assert required == {"torch", "numpy", "networkx", "numba", "psutil", "nvidia-ml-py", "tqdm", "pyyaml"}
    assert "Name: torch-pager\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert "pager = pager.tools.cli:main" in entry_points
    assert any(name.endswith("/LICENSE") for name in names)


def _is_plain_requirement(line: str) -> bool:
    return line.startswith("Requires-Dist: ") and "extra ==" not in line


def test_the_sdist_carries_every_source(distributions: Path, repository: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert _expected_files(repository) <= names
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_every_room_is_imported_from_the_wheel(clean_python: Path, tmp_path: Path) -> None:
    modules = "pager, pager.graph, pager.policies, pager.tools, pager.policies.lru, pager.graph.access_trace"
    program = f"import sys, {modules}\nfor name in '{modules}'.split(', '): print(sys.modules[name].__file__)"
    files = _run(clean_python, "-c", program, cwd=tmp_path).splitlines()
    assert len(files) == 6
    assert all(Path(file).is_relative_to(clean_python.parents[1]) for file in files)


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_became_a_top_level_module(room: str, clean_python: Path, tmp_path: Path) -> None:
    program = f"import importlib.util; print(importlib.util.find_spec({room!r}))"
    assert _run(clean_python, "-c", program, cwd=tmp_path).strip() == "None"


def test_the_installed_command_trains(clean_python: Path, tmp_path: Path) -> None:
    command = clean_python.parent / "pager"
    assert _run(command, "--version", cwd=tmp_path).startswith("pager ")
    output = _run(command, "train", "--model", "tiny", "--steps", "2", "--check", cwd=tmp_path)
    assert "check passed: 2 losses and 21 parameters are bit-equal" in output
    assert len(list(tmp_path.glob("runs/*-tiny/losses.json"))) == 1
