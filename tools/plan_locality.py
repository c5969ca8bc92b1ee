"""What a plan says about caches of any size: miss ratios by device memory, and working sets; as text and as values."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from pager.tools.plan_options import columns_of
from pager.units import format_bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    from pager.graph.locality import WorkingSet
    from pager.graph.plan import Plan

__all__ = ["Locality", "locality_of"]

POLICIES = ("belady", "clock", "lru")
SHARES = tuple(Fraction(eighths, 8) for eighths in (1, 2, 4, 6, 8))
# What the curves of a picture are drawn by; the table's shares are among them.
FINE = 16
WINDOWS = (0.01, 0.1)  # of the step's ticks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Locality:
    """``sizes``: int64 bytes, rising; ``ratios``: float64 of that length per policy. ``arena_bytes``: what the budget
    leaves for pages, one of the sizes. ``windows``: share of the step, ticks, and the working set of each.
    """

    state_bytes: int
    arena_bytes: int
    sizes: npt.NDArray[np.int64]
    ratios: dict[str, npt.NDArray[np.float64]]
    windows: tuple[tuple[float, int, WorkingSet], ...]

    def _rows(self) -> list[tuple[int, Fraction | None]]:
        """Place among the sizes, and share of the state (None: the arena), of what the table shows."""
        shown: list[tuple[int, Fraction | None]] = [
            (int(self.state_bytes * share), share) for share in SHARES
        ]
        shown.append((self.arena_bytes, None))
        places = {int(size): place for place, size in enumerate(self.sizes.tolist())}
        return [(places[size], share) for size, share in sorted(shown, key=lambda row: row[0])]

    def miss_lines(self) -> list[str]:
        """The table of miss ratios."""
        cells: list[tuple[str, ...]] = [("", "", *POLICIES)]
        for place, share in self._rows():
            cells.append(
                (
                    _name(share),
                    format_bytes(int(self.sizes[place])),
                    *(f"{self.ratios[name][place]:.1%}" for name in POLICIES),
                )
            )
        return columns_of(cells)

    def window_lines(self) -> list[str]:
        """The table of working sets."""
        cells: list[tuple[str, ...]] = [("", "at most", "on average")]
        for share, ticks, found in self.windows:
            cells.append(
                (
                    f"{share:.0%} of the step, {ticks:,} tick{'' if ticks == 1 else 's'}",
                    format_bytes(found.max_bytes),
                    format_bytes(round(found.mean_bytes)),
                )
            )
        return columns_of(cells)

    def sections(self) -> list[tuple[str, list[str]]]:
        """Heading and lines of each table."""
        return [
            (
                "miss ratio by device memory (bytes missed by bytes accessed, nothing wired)",
                self.miss_lines(),
            ),
            ("working set (distinct bytes touched in a window)", self.window_lines()),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Arrays of one length each: the rows of the tables, in bytes, ticks and shares."""
        rows = self._rows()
        return {
            "miss_ratio": {
                "share_of_state": [None if share is None else float(share) for _, share in rows],
                "device_bytes": [int(self.sizes[place]) for place, _ in rows],
                **{name: [float(self.ratios[name][place]) for place, _ in rows] for name in POLICIES},
            },
            "working_set": {
                "share_of_step": [share for share, _, _ in self.windows],
                "ticks": [ticks for _, ticks, _ in self.windows],
                "max_bytes": [found.max_bytes for _, _, found in self.windows],
                "mean_bytes": [found.mean_bytes for _, _, found in self.windows],
            },
        }


def _name(share: Fraction | None) -> str:
    if share is None:
        return "the budget's arena"
    return "all of the state" if share == 1 else f"{share} of the state"


def locality_of(plan: Plan, arena_bytes: int, *, fine: bool = False) -> Locality:
    """Miss ratios of the policies by device memory, and working sets, of a plan with a trace.

    ``fine``: at as many sizes as a picture wants, else at those of the table. Carries the step out twice per size, but
    for LRU: 0.1 s in all for a 7b model, 6 s for a 1t one.
    """
    from pager.policies.protocol import make_eviction_policy

    assert plan.trace is not None
    state = plan.num_pages * plan.page_size
    shares = [*SHARES, *(Fraction(part, FINE) for part in range(1, FINE + 1) if fine)]
    sizes = np.unique(np.array([arena_bytes, *(int(state * share) for share in shares)], np.int64))
    ratios = {
        name: plan.miss_ratio_curve("lru" if name == "lru" else make_eviction_policy(name), sizes)
        for name in POLICIES
    }
    num_ticks = plan.trace.num_ticks
    ticks = [max(round(share * num_ticks), 1) for share in WINDOWS]
    windows = tuple(
        (share, length, plan.working_set(ticks=length)) for share, length in zip(WINDOWS, ticks, strict=True)
    )
    return Locality(state_bytes=state, arena_bytes=arena_bytes, sizes=sizes, ratios=ratios, windows=windows)
