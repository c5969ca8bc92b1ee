"""On a GPU: the budget is kept, and the arena follows what activations leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes

pytestmark = pytest.mark.gpu

MIB = 2**20
# 302 M parameters in bf16: 2.3 GiB with gradients and Adam.
SIZES = ModelSizes(
    hidden=1536, layers=8, heads=12, ffn=4096, vocabulary=32000, dtype="bfloat16", checkpoint=True
)


def handle_of(model: nn.Module) -> Any:
    """The model's handle; torch types every attribute of a module as a tensor or a module."""
    return model.pager


def make_managed(budget: int, **knobs: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(SIZES, seed=0, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    pager.manage(model, optimizer, device="cuda", device_budget=budget, **knobs)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int = 1) -> float:
    tokens = torch.randint(0, 32000, (2, batch, 512), device="cuda")
    loss = model(tokens[0], tokens[1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.fixture(autouse=True)
def empty_cache() -> Any:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.empty_cache()


def context_bytes() -> int:
    """What the process holds outside torch's allocator before it is managed."""
    from pager.device.base import make_device

    device = make_device("cuda")
    outside = device.process_bytes() - device.allocator_bytes()
    device.close()
    return outside


def test_the_arena_takes_what_activations_leave() -> None:
    """Without example inputs half is left to activations; measured, most of it goes to pages; never over the budget."""
    budget = context_bytes() + 2600 * MIB
    model, optimizer = make_managed(budget)
    arena = handle_of(model)._runtime.arena
    first = arena.capacity_bytes
    for _ in range(6):
        train(model, optimizer)
    assert arena.capacity_bytes > first
    assert torch.cuda.max_memory_reserved() <= budget
    assert handle_of(model)._runtime.device.process_bytes() <= budget
    handle_of(model).close()


def test_after_running_out_of_memory_the_next_step_uses_less() -> None:
    """A batch too large raises torch's error; the arena gives a slab back at the next boundary; training goes on."""
    budget = context_bytes() + 2600 * MIB
    model, optimizer = make_managed(budget)
    for _ in range(4):
        train(model, optimizer)
    arena = handle_of(model)._runtime.arena
    grown = arena.capacity_bytes
    with pytest.raises(torch.OutOfMemoryError):
        train(model, optimizer, batch=96)
    optimizer.zero_grad()
    train(model, optimizer)
    assert arena.capacity_bytes < grown
    assert train(model, optimizer) > 0
    handle_of(model).close()


def test_a_budget_below_the_largest_tensor_is_refused_with_names() -> None:
    with pytest.raises(pager.BudgetError, match=r"embedding.weight|head.weight"):
        make_managed(context_bytes() + 480 * MIB)


def test_a_model_that_fits_keeps_its_parameters() -> None:
    """Nothing is paged, nothing moves; the plan says so; closing brings it to the CPU."""
    model, optimizer = make_managed(64 * 1024 * MIB)
    for _ in range(2):
        train(model, optimizer)
    statistics = handle_of(model).statistics()
    assert statistics.page_in_bytes == statistics.page_out_bytes == 0
    assert statistics.num_steps == 2
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert handle_of(model).plan.wired.all()
    handle_of(model).close()
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_checks_on_cuda_see_every_frame() -> None:
    """The happens-before checker runs on CUDA too, over a model large enough for several slabs."""
    model, optimizer = make_managed(context_bytes() + 2600 * MIB, checks=Checks(happens_before=True))
    for _ in range(2):
        train(model, optimizer)
    assert handle_of(model)._runtime.device.checker.num_checked > 1000
    handle_of(model).close()
