"""Pictures of a plan: the page map, the waveform, what the engines did, distances, miss ratios and working sets. Needs
matplotlib.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pager.graph.plan_view import page_weighted_distances
from pager.graph.simulate import SimulatedStep
from pager.tools.errors import InputError

if TYPE_CHECKING:
    from pager.graph.arena_walk import Placement
    from pager.graph.plan import Plan
    from pager.tools.captured import CapturedModel
    from pager.tools.plan_locality import Locality
    from pager.tools.prediction import Prediction

__all__ = ["draw_plan", "page_map"]

# Codes of the map, and their colours: nothing there, and the three tiers.
NOWHERE, DEVICE, HOST, DISK = range(4)
COLOURS = ("#ffffff", "#2166ac", "#d9d9d9", "#8c510a")
TIERS = ("no value", "device", "host", "disk")
KINDS = ("weights", "gradients", "states")


def page_map(
    captured: CapturedModel,
    placement: Placement,
    step: SimulatedStep,
    *,
    num_lines: int = 480,
    num_columns: int = 960,
) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Where each page is over the step: a tier's code per line of pages and column of time, uint8.

    Lines are bytes in the order weights, gradients, states; the second result is the first line of each kind and the
    end. A line shows the device if any of its pages is there. Gradients without a home are nowhere but on the device.
    """
    size, elements = captured.step.size, captured.step.num_elements
    element_bytes = (size.weight, size.gradient, size.state)
    total = int(elements.sum()) * sum(element_bytes)
    starts = np.cumsum([0, *(int(elements.sum()) * width for width in element_bytes)])
    lines = max(min(num_lines, total), 1)
    offsets = np.cumsum(elements) - elements
    codes = np.empty((lines, num_columns), np.uint8)
    homes = (
        np.where(placement.weight_on_disk, DISK, HOST),
        np.where(placement.on_cpu, HOST, NOWHERE),
        np.where(placement.states_on_disk, DISK, HOST),
    )
    wired = (placement.stays, np.zeros(len(elements), bool), placement.keeps_states)

    def rows(kind: int, first: int, count: int, parameter: int) -> slice:
        begin = int(starts[kind]) + (int(offsets[parameter]) + first) * element_bytes[kind]
        end = begin + count * element_bytes[kind]
        return slice(begin * lines // total, max(-(-end * lines // total), begin * lines // total + 1))

    for kind in range(3):
        for parameter, count in enumerate(elements.tolist()):
            where = DEVICE if wired[kind][parameter] else int(homes[kind][parameter])
            codes[rows(kind, 0, count, parameter)] = where
    for span in step.spans:
        first = int(span.begin_seconds / step.seconds * num_columns)
        last = int(np.ceil(span.end_seconds / step.seconds * num_columns))
        lines_of = rows(span.kind, span.first_element, span.num_elements, span.parameter)
        codes[lines_of, first : max(last, first + 1)] = DEVICE
    return codes, [int(start * lines // total) for start in starts]


def draw_plan(
    file: Path | IO[bytes],
    plan: Plan,
    captured: CapturedModel,
    prediction: Prediction,
    locality: Locality,
    *,
    dpi: int = 110,
) -> None:
    """Draw the plan as a PNG into ``file``. InputError where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "pictures take matplotlib, which is not installed (pip install 'torch-pager[plot]'); leave --out away "
            "for the table alone"
        ) from error
    result = prediction.step
    simulated = result is not None and prediction.placement is not None
    rows: list[Any] = [["map", "map"], ["waveform", "waveform"], ["engines", "engines"]] if simulated else []
    rows += [["distances", "ratios"], ["windows", "windows"]]
    heights = [4, 2.4, 1.6, 2, 1.6][-len(rows) :]
    figure = Figure(figsize=(11, 1.36 * sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{captured.name}: plan of one step", x=0.01, ha="left", fontsize=12)
    axes = figure.subplot_mosaic(rows, height_ratios=heights)
    if result is not None and prediction.placement is not None:
        _draw_map(axes["map"], captured, prediction.placement, result)
        _draw_waveform(axes["waveform"], prediction, result)
        _draw_engines(axes["engines"], result)
    _draw_distances(axes["distances"], plan)
    _draw_ratios(axes["ratios"], plan, locality)
    _draw_windows(axes["windows"], locality)
    figure.savefig(file, dpi=dpi, format="png")


def _draw_map(axes: Any, captured: CapturedModel, placement: Placement, step: SimulatedStep) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    codes, starts = page_map(captured, placement, step)
    axes.imshow(
        codes,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap(COLOURS),
        vmin=0,
        vmax=3,
        extent=(0, step.seconds, len(codes), 0),
    )
    axes.axvline(step.forward_seconds, color="black", linewidth=0.8, linestyle=":")
    middles = [(low + high) / 2 for low, high in itertools.pairwise(starts)]
    axes.set_yticks(middles, KINDS)
    for start in starts[1:-1]:
        axes.axhline(start, color="black", linewidth=0.6)
    present = np.unique(codes)
    handles = [
        Patch(facecolor=COLOURS[code], edgecolor="grey", label=TIERS[code]) for code in present.tolist()
    ]
    axes.legend(handles=handles, loc="upper right", ncols=4, fontsize=8)
    axes.set(title="pages over time, by tier (dotted: backward begins)", xlabel="seconds")


def _draw_waveform(axes: Any, prediction: Prediction, step: SimulatedStep) -> None:
    wave, gibibyte = step.waveform, 2**30
    pages, both = wave.pages / gibibyte, (wave.pages + wave.activations) / gibibyte
    axes.fill_between(
        wave.seconds, 0, pages, step="post", color="#2166ac", alpha=0.45, linewidth=0, label="pages"
    )
    axes.fill_between(
        wave.seconds, pages, both, step="post", color="#f4a582", alpha=0.7, linewidth=0, label="activations"
    )
    arena = prediction.arena_bytes / gibibyte
    axes.axhline(arena, color="#2166ac", linestyle="--", linewidth=1, label="arena")
    axes.axhline(
        prediction.wanted.budget_bytes / gibibyte,
        color="#b2182b",
        linestyle="--",
        linewidth=1,
        label="budget",
    )
    axes.set(title="device memory", xlabel="seconds", ylabel="GiB", xlim=(0, step.seconds), ylim=(0, None))
    axes.legend(loc="lower right", ncols=4, fontsize=8)


def _draw_engines(axes: Any, step: SimulatedStep) -> None:
    names = [name for name, seconds in step.busy_seconds.items() if seconds > 0 and name != "host"]
    colours = {"compute": "#4d9221", "h2d": "#2166ac", "d2h": "#92c5de", "cpu update": "#b2182b"}
    least = step.seconds / 1000  # about a pixel: what is narrower would not be drawn at all
    for line, name in enumerate(names):
        spans = [
            (max(task.begin_seconds, 0.0), min(task.end_seconds, step.seconds))
            for task in step.tasks
            if task.engine == name
        ]
        bars = [(begin, max(end - begin, least)) for begin, end in spans]
        axes.broken_barh(bars, (line - 0.4, 0.8), color=colours.get(name, "#8c510a"), linewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title="who is busy", xlabel="seconds", xlim=(0, step.seconds))


def _draw_distances(axes: Any, plan: Plan) -> None:
    distance, num_bytes, _ = page_weighted_distances(plan)
    scale, unit = _unit(int(distance.max(initial=0)))
    axes.hist(distance / scale, bins=64, weights=num_bytes / scale, color="#4d4d4d")
    axes.set(
        title="reuse distance of the accessed bytes",
        xlabel=f"distinct {unit} touched in between",
        ylabel=f"{unit} accessed",
    )


def _draw_ratios(axes: Any, plan: Plan, locality: Locality) -> None:
    scale, unit = _unit(locality.state_bytes)
    every = np.linspace(0, locality.state_bytes, 257)
    axes.plot(every / scale, plan.miss_ratio_curve("lru", every), color="#b2182b", label="lru")
    for name, colour in (("clock", "#f4a582"), ("belady", "#2166ac")):
        # Nothing hits in no memory, under any policy.
        sizes, ratios = np.append(0, locality.sizes), np.append(1.0, locality.ratios[name])
        axes.plot(sizes / scale, ratios, color=colour, marker=".", label=name)
    axes.axvline(locality.arena_bytes / scale, color="#2166ac", linestyle="--", linewidth=1, label="arena")
    axes.set(
        title="miss ratio by device memory",
        xlabel=unit,
        ylabel="bytes missed by accessed",
        xlim=(0, None),
        ylim=(0, 1.02),
    )
    axes.legend(loc="lower left", fontsize=8)


def _draw_windows(axes: Any, locality: Locality) -> None:
    scale, unit = _unit(max(found.max_bytes for _, _, found in locality.windows))
    for (share, _, found), colour in zip(locality.windows, ("#2166ac", "#92c5de"), strict=True):
        axes.step(
            np.arange(len(found.bytes)),
            found.bytes / scale,
            where="post",
            color=colour,
            label=f"{share:.0%} of the step",
        )
    axes.set(title="working set", xlabel="tick at which the window begins", ylabel=unit, ylim=(0, None))
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize=8)


def _unit(num_bytes: int) -> tuple[int, str]:
    """GiB where it reaches one, else MiB."""
    return (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")
