"""Models whose homes are to move, on a machine whose memory is the arena's and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import pager
from pager import bill, host_cap
from pager.config import Checks
from pager.engine.transfer import Transfers
from pager.page_table import Home
from tests.cases.same import PAGE, state_bytes
from tests.faults.media import make_layers, make_optimizer

BASE = 2**20


def measure_the_arena(monkeypatch: pytest.MonkeyPatch, runtime_of: list[Any]) -> None:
    """The process takes what is reserved for homes and ``BASE``, to the byte: what else it takes would drown so small a
    model.
    """

    def taken() -> int:
        if not runtime_of:
            return BASE
        host = runtime_of[0].host
        return BASE + int(host.reserved_bytes - host.untouched_bytes)

    monkeypatch.setattr(host_cap, "process_bytes", taken)
    monkeypatch.setattr(host_cap, "NOISE_BYTES", 0)
    monkeypatch.setattr(Transfers, "bytes_to_come", 0)


def manage_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path | None,
    *,
    model: Any = None,
    optimizer: Any = None,
    disk_share: float = 1.2,
    device_share: float = 0.4,
    checks: dict[str, Any] | None = None,
    **knobs: Any,
) -> tuple[Any, Any]:
    """Layers, all at home in host memory but what is wired, and their AdamW; ``disk_share``: of the training state."""
    model = make_layers() if model is None else model
    optimizer = make_optimizer(model) if optimizer is None else optimizer
    total = state_bytes(model)
    runtime_of: list[Any] = []
    measure_the_arena(monkeypatch, runtime_of)
    monkeypatch.setattr(bill, "host_room", lambda *arguments: (2 * total, BASE + 2 * total))
    if folder is not None:
        knobs |= {"disk": folder, "disk_budget": int(total * disk_share)}
    pager.manage(
        model,
        optimizer,
        device="cpu",
        page_size=PAGE,
        device_budget=int(total * device_share) // PAGE * PAGE,
        checks=Checks(**{"happens_before": True, "poison": True, **(checks or {})}),
        **knobs,
    )
    runtime_of.append(model.pager._runtime)
    return model, optimizer


def homes_of(model: nn.Module) -> Counter[tuple[str, str]]:
    """Segments by kind and home."""
    runtime: Any = model.pager._runtime  # type: ignore[union-attr]
    return Counter(
        (binding.segment.kind, Home(int(runtime.table.home[binding.segment.first_page])).name)
        for binding in runtime.mmu.bindings.values()
    )


def check_books(model: nn.Module) -> None:
    """Every frame in use, in host memory and on the disk, is the home of one page."""
    runtime: Any = model.pager._runtime  # type: ignore[union-attr]
    for home, tier in ((Home.HOST, runtime.host), (Home.DISK, runtime.disk)):
        frames = [
            int(runtime.table.home_frame[page])
            for binding in runtime.mmu.bindings.values()
            for page in range(binding.segment.first_page, binding.segment.last_page)
            if int(runtime.table.home[page]) == home and int(runtime.table.home_frame[page]) >= 0
        ]
        assert len(frames) == len(set(frames))
        assert tier is None or tier.used_bytes == len(frames) * PAGE, home
    assert not runtime.engine.being_written
