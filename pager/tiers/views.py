"""Slices of an arena's memory that are asked for again and again.

Each step copies the same pages from and to the same homes, and cutting a tensor out of a larger one costs the launching
thread more than the copy does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Enough for the units of a model's update; where homes change all the time, what is old goes.
_MOST = 8192


class Views(dict[tuple[int, int], "torch.Tensor"]):
    """uint8 slices by first frame and number of bytes. Clear it when memory behind frames goes."""

    def keep(self, first_frame: int, num_bytes: int, view: torch.Tensor) -> torch.Tensor:
        """Remember a slice; returns it."""
        if len(self) >= _MOST:
            self.clear()
        self[first_frame, num_bytes] = view
        return view
