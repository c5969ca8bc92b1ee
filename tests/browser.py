"""A page as a browser shows it.

Qt WebEngine, which is Chromium and comes from the package index like all else that tests need, draws it without a
screen, in a process of its own (`tests.browser_process`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["Picture", "Seen", "open_page", "why_not_here"]

ROOT = Path(__file__).resolve().parents[1]
# Longer than the process waits for a page.
TIMEOUT_SECONDS = 120
ENVIRONMENT = {
    "QT_QPA_PLATFORM": "offscreen",
    # Root may not use the sandbox, and containers often lack what it needs; the pages are ours, and ask for nothing.
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
    # Without it a frame may be shown before the pictures in it are.
    "QTWEBENGINE_CHROMIUM_FLAGS": "--disable-checker-imaging",
    "QT_SCALE_FACTOR": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An ``<img>``: its size in the file, and left, top, width and height on the page, in pixels."""

    id: str
    natural: tuple[int, int]
    box: tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What a page came to. ``shown``: all of it, top to bottom, as ``(height, width, 3)`` uint8."""

    loaded: bool
    title: str
    text: str
    scripts: int
    pictures: tuple[Picture, ...]
    console: tuple[str, ...]
    refused: tuple[str, ...]
    failed: tuple[str, ...]
    scroll_width: int
    out_of_reach: tuple[int, ...]
    shown: npt.NDArray[np.uint8]

    @property
    def faults(self) -> list[str]:
        """Everything that a page without faults has nothing of."""
        return [
            *([] if self.loaded else ["the page did not load"]),
            *(f"console: {line}" for line in self.console),
            *(f"asked for {url}" for url in self.refused),
            *(f"did not load: {element}" for element in self.failed),
        ]

    def part(self, picture: Picture) -> npt.NDArray[np.uint8]:
        """What is shown where a picture is."""
        left, top, width, height = (round(value) for value in picture.box)
        return self.shown[top : top + height, left : left + width]


@cache
def why_not_here() -> str | None:
    """Why there is no browser on this machine: another platform, or a library of the system that it lacks."""
    found = _run("-c", "import PySide6.QtWebEngineWidgets")
    if found.returncode == 0:
        return None
    return f"Qt WebEngine does not start here: {found.stderr.strip().rpartition(chr(10))[2]}"


def open_page(page: Path, *, width: int = 1200) -> Seen:
    """Open the file ``page`` in a window ``width`` pixels wide and as high as it needs."""
    picture = page.with_suffix(f".{width}.png")
    found = _run("-m", "tests.browser_process", str(page), str(width), str(picture))
    assert found.returncode == 0, f"{page} was not shown: {found.stdout}\n{found.stderr}"
    values = json.loads(found.stdout)
    with Image.open(picture) as image:
        shown = np.asarray(image.convert("RGB"))
    pictures = tuple(
        Picture(id=value["id"], natural=tuple(value["natural"]), box=tuple(value["box"]))
        for value in values.pop("pictures")
    )
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Seen(**(values | lists), pictures=pictures, shown=shown)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
