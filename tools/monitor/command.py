"""Watch a run of `pager train` while it trains: tiers, hit rate, stalls, links, and what its waveform says.

On a terminal the view is renewed until the run ends or Ctrl-C; into a pipe it is printed once. It reads the files in
the run's folder and nothing else, so it may run on another machine that sees them. Exit code 0, 1 if --plot cannot be
drawn, 2 for a folder that is no run's.

    pager monitor runs/20260101-120000-small
    pager monitor runs/20260101-120000-small --plot sawtooth.png"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pager.tools.errors import CommandFailed

if TYPE_CHECKING:
    from pager.tools.monitor.recorded import RecordedRun

__all__ = ["add_arguments", "follow", "run"]

SECONDS_BETWEEN_LOOKS = 0.5
# The close-up of the plot.
PLOTTED_STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pager monitor``."""
    parser.add_argument("folder", metavar="RUN_FOLDER", help="a run's folder: <out>/<time>-<model>")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the recorded sawtooth as a PNG, say what it means, and end"
    )
    parser.add_argument("--json", action="store_true", help="print the present state as JSON, and end")


def run(arguments: argparse.Namespace) -> int:
    """``pager monitor``."""
    from pager.tools.monitor.recorded import open_run
    from pager.tools.monitor.view import as_dict, glyphs_for, render

    recorded = open_run(arguments.folder)
    recorded.update()
    if arguments.plot is not None:
        _plot(recorded, Path(arguments.plot))
    glyphs = glyphs_for(getattr(sys.stdout, "encoding", None))
    if arguments.json:
        print(json.dumps(as_dict(recorded)))
    elif arguments.plot is not None:
        print(recorded.diagnosis().text)
    elif sys.stdout.isatty():
        wait = threading.Event().wait
        try:
            follow(
                recorded,
                lambda: render(recorded, glyphs),
                sys.stdout,
                lambda: wait(SECONDS_BETWEEN_LOOKS),
                can_move=os.environ.get("TERM", "dumb") not in ("", "dumb"),
            )
        except KeyboardInterrupt:
            return 0  # the usual way to stop watching
    else:
        print("\n".join(render(recorded, glyphs)))
    return 0


def follow(
    recorded: RecordedRun,
    draw: Callable[[], list[str]],
    out: TextIO,
    wait: Callable[[], object],
    *,
    can_move: bool,
) -> None:
    """Show the view until the run is over: in place where the terminal can, else anew for every step."""
    shown: list[str] = []
    while True:
        lines = draw()
        if lines != shown:
            if shown and can_move:
                # Up to the first line, and all below it away. Lines are wrapped, or they would be two.
                out.write(f"\x1b[{len(_wrapped(shown))}A\x1b[J")
            out.write("\n".join(_wrapped(lines) if can_move else lines) + "\n")
            out.flush()
            shown = lines
        if recorded.is_over:
            return
        wait()
        recorded.update()


def _wrapped(lines: list[str]) -> list[str]:
    """Lines no wider than the terminal."""
    width = max(shutil.get_terminal_size().columns - 1, 20)
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=" " * 9) or [""]]


def _plot(recorded: RecordedRun, file: Path) -> None:
    from pager.tools.report import plot_resident

    if recorded.last is None:
        raise CommandFailed(f"--plot {file}: no step was logged in {recorded.path}")
    samples = recorded.samples()
    picture = io.BytesIO()
    found = recorded.diagnosis()
    traffic = recorded.traffic()
    each = traffic.seconds / max(traffic.num_steps, 1)
    try:
        problem = plot_resident(
            picture,
            samples,
            budget_bytes=recorded.statistics().device_budget_bytes,
            title=f"{recorded.model}, {recorded.status}: {found.kind}",
            closeup_seconds=PLOTTED_STEPS * each,
        )
        if problem is not None:
            raise CommandFailed(f"--plot {file}: {problem}")
        file.write_bytes(picture.getvalue())
    except OSError as error:
        raise CommandFailed(f"--plot {file}: cannot write it: {error.strerror or error}") from error
