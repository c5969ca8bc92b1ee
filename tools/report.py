"""What a run shows: the bar while it goes, the table and the plot of resident memory when it ends."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from pager.statistics import Statistics
from pager.units import format_bytes

__all__ = ["ProgressBar", "format_table", "make_bar", "plot_resident"]


class _Bar(tqdm):
    monitor_interval = 0  # no helper thread of tqdm's beside ours


def make_bar(*, total: int, title: str, unit: str) -> Any:
    """A bar of tqdm's on stderr for work that takes more than a second; silent where nobody watches a terminal."""
    return _Bar(total=total, desc=title, unit=unit, dynamic_ncols=True, leave=False, disable=None)


class ProgressBar:
    """One bar: loss, tokens per second, hit rate and stall share, each of the last step."""

    def __init__(self, *, steps: int, tokens_per_step: int, title: str) -> None:
        self._bar: Any = _Bar(total=steps, desc=title, unit="step", dynamic_ncols=True, mininterval=0.5)
        self._tokens_per_step = tokens_per_step
        self._previous = Statistics()

    def step(self, loss: float, seconds: float, statistics: Statistics | None) -> None:
        """Count one step that took ``seconds``; ``statistics`` of a managed model adds hit rate and stall."""
        fields = {"loss": f"{loss:.3f}", "tokens/s": f"{self._tokens_per_step / max(seconds, 1e-9):,.0f}"}
        if statistics is not None:
            fields["hit"] = f"{interval_hit_rate(self._previous, statistics):.1%}"
            stall_seconds = statistics.stall_seconds - self._previous.stall_seconds
            fields["stall"] = f"{stall_seconds / max(seconds, 1e-9):.1%}"
            self._previous = statistics
        self._bar.set_postfix(fields, refresh=False)
        self._bar.update()

    def say(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.write(message)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def interval_hit_rate(before: Statistics, after: Statistics) -> float:
    """Share of hits among the accesses between two snapshots; 1.0 if there were none."""
    accesses = after.num_accesses - before.num_accesses
    return (after.hits - before.hits) / accesses if accesses else 1.0


def format_table(statistics: Statistics, *, losses: Sequence[float], tokens: int, seconds: float) -> str:
    """The closing table: one column per tier, then faults, hit rate, stall, and what the training reached.

    ``tokens`` and ``seconds`` are those of the training steps alone, without set-up.
    """
    s = statistics
    # On a GPU the budget bounds the whole process, not pages alone.
    device_peak = s.peak_device_process_bytes or s.peak_resident_bytes
    rows = [
        ("", "device", "host", "disk"),
        _row("bytes in", s.page_in_bytes, s.page_out_bytes + s.disk_read_bytes, s.disk_write_bytes),
        _row("bytes out", s.page_out_bytes, s.page_in_bytes + s.disk_write_bytes, s.disk_read_bytes),
        _row("peak", device_peak, s.peak_host_bytes, s.peak_disk_bytes),
        _row("budget", s.device_budget_bytes, s.host_budget_bytes, s.disk_budget_bytes),
        (
            "peak / budget",
            _share(device_peak, s.device_budget_bytes),
            _share(s.peak_host_bytes, s.host_budget_bytes),
            _share(s.peak_disk_bytes, s.disk_budget_bytes),
        ),
    ]
    lines = ["".join(f"{cell:<15}" if not i else f"{cell:>14}" for i, cell in enumerate(row)) for row in rows]
    lines.insert(1, "-" * len(lines[0]))
    lines += [
        "",
        f"accesses       {s.num_accesses:,}: {s.hits:,} hits, "
        f"{s.minor_faults:,} minor and {s.major_faults:,} major faults",
        f"hit rate       {s.hit_rate:.2%}",
        f"pages peak     {format_bytes(s.peak_resident_bytes)} on the device",
        f"stall          {s.stall_seconds:.2f} s, {_share(s.stall_seconds, seconds)} of {seconds:.1f} s",
        f"speed          {tokens / max(seconds, 1e-9):,.0f} tokens/s",
    ]
    if losses:
        lines.append(f"loss           {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte in {len(losses)} steps")
    return "\n".join(lines)


def _row(name: str, *num_bytes: int) -> tuple[str, ...]:
    return (name, *(format_bytes(number) if number else "-" for number in num_bytes))


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def plot_resident(
    file: Path | IO[bytes],
    history: Sequence[tuple[float, int]],
    *,
    budget_bytes: int,
    title: str,
    closeup_seconds: float = 0.0,
) -> str | None:
    """Draw resident device memory over time with its budget as a PNG into ``file``.

    ``history`` holds (seconds, bytes) samples. A second panel shows the last ``closeup_seconds``, where the
    teeth of a long run can be told apart. Returns None, or in words why there is no plot.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "no plot, since matplotlib is not installed (pip install 'torch-pager[plot]'); see resident.csv"
        )
    if not history:
        return "no plot, since nothing was resident yet"
    # The figure's own classes, not pyplot: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = history[-1][0]
    panels = [("", history)]
    if 0 < closeup_seconds < end - history[0][0]:
        last = [sample for sample in history if sample[0] >= end - closeup_seconds]
        panels.append((f", the last {closeup_seconds:.2g} s", last))
    figure = Figure(figsize=(10, 4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (suffix, samples) in enumerate(panels, start=1):
        _draw_resident(figure.add_subplot(len(panels), 1, number), samples, budget_bytes, title + suffix)
    figure.savefig(file, dpi=110, format="png")
    return None


def _draw_resident(axes: Any, samples: Sequence[tuple[float, int]], budget_bytes: int, title: str) -> None:
    mebibyte = 2**20
    seconds = [sample[0] for sample in samples]
    resident = [sample[1] / mebibyte for sample in samples]
    axes.fill_between(seconds, resident, step="post", alpha=0.25, color="tab:blue", linewidth=0)
    axes.step(seconds, resident, where="post", linewidth=0.8, color="tab:blue", label="resident")
    axes.axhline(budget_bytes / mebibyte, color="tab:red", linestyle="--", linewidth=1.2, label="budget")
    axes.set(xlabel="seconds", ylabel="device memory (MiB)", title=title, ylim=(0, None))
    axes.margins(x=0)
    axes.legend(loc="lower right")
