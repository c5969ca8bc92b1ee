"""On a GPU: a smaller host budget moves homes to the disk, and page-locked memory really goes back to the system."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pager import bill
from pager.host_limit import process_bytes
from tests.gpu.test_budget import MIB, context_bytes, make_managed, train

pytestmark = pytest.mark.gpu


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of parameters and states, on the CPU."""
    states: Any = [
        value for entry in optimizer.state_dict()["state"].values() for value in entry.values() if value.dim()
    ]
    return [value.detach().cpu().clone() for value in (*model.state_dict().values(), *states)]


def test_the_process_shrinks_and_no_bit_changes(tmp_path: Path) -> None:
    model, optimizer = make_managed(context_bytes() + 2600 * MIB, disk=tmp_path, disk_budget="4GiB")
    handle: Any = model.pager
    with closing(handle):
        check_a_smaller_budget_and_back(handle, model, optimizer)


def check_a_smaller_budget_and_back(handle: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        train(model, optimizer)
    before = values_of(model, optimizer)
    runtime = handle._runtime
    # Or the heap's free memory alone makes up for the difference.
    runtime.host_cap._give_back("before homes move", 0)
    taken, locked = process_bytes(), runtime.host.locked_bytes
    budget = handle.statistics().host_budget_bytes
    handle.set(host_budget=taken - 600 * MIB)
    runtime.boundary.move_homes()  # as at the end of a step, but with nothing stepped
    assert handle.statistics().host_budget_bytes == taken - 600 * MIB
    assert process_bytes() <= taken - 600 * MIB
    assert runtime.host.locked_bytes == runtime.host.reserved_bytes <= locked - 500 * MIB
    assert all(map(torch.equal, before, values_of(model, optimizer)))
    loss = [train(model, optimizer) for _ in range(2)]
    assert process_bytes() <= taken - 500 * MIB
    before = values_of(model, optimizer)
    handle.set(host_budget=budget)
    while runtime.host_cap.has_work:
        runtime.boundary.move_homes()
    assert handle.statistics().disk_bytes == 0
    assert runtime.host.locked_bytes == runtime.host.reserved_bytes
    assert all(map(torch.equal, before, values_of(model, optimizer)))
    assert all(value == value for value in [*loss, train(model, optimizer)])


def test_the_process_stays_within_the_budget_from_the_first_step_on(tmp_path: Path) -> None:
    """Also where homes take all of it, with what CUDA loads in the first steps."""
    gc.collect()
    budget = process_bytes() + bill.LOADED_LATER_BYTES + 1024 * MIB
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set begins anew
    model, optimizer = make_managed(
        context_bytes() + 2600 * MIB, disk=tmp_path, disk_budget="8GiB", host_budget=budget
    )
    handle: Any = model.pager
    with closing(handle):
        assert handle.statistics().disk_bytes > 0
        for _ in range(3):
            train(model, optimizer)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert int(status["VmHWM"].split()[0]) * 1024 <= budget
