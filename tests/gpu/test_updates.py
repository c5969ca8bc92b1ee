"""On a GPU: fp32 masters and the CPU's part of the update, at several budgets and beside plain PyTorch."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

import pager
from pager.config import Checks

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDTH, NUM_LAYERS = 512, 8
# Weights and states of all layers in bf16 with fp32 masters and moments: 14 bytes an element, gradients among them.
STATE_BYTES = NUM_LAYERS * WIDTH * WIDTH * 14


def make_net() -> nn.Sequential:
    """Matrices of bf16, the same each time, on the CPU."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers).bfloat16()


def make_adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-4, fused=DEVICE == "cuda")


def loss_of(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, WIDTH, generator=generator).to(DEVICE, torch.bfloat16)
    loss: Tensor = model(x).float().square().sum()
    return loss


def train(num_steps: int, *, share: float, clip: bool = False, **knobs: Any) -> dict[str, Any]:
    """Losses, and weights and optimizer state at the end, of a managed run whose arena is a share of the state."""
    model: Any = make_net()
    optimizer = make_adamw(model.parameters())
    checks = Checks(arena_bytes=int(STATE_BYTES * share), page_all=True, poison=True)
    pager.manage(model, optimizer, device=DEVICE, page_size="16KiB", master="float32", checks=checks, **knobs)
    losses = []
    for step in range(num_steps):
        loss = loss_of(model, step)
        loss.backward()
        if clip:
            losses.append(model.pager.clip_grad_norm_(0.5).cpu())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    on_cpu = model.pager._runtime.on_cpu
    result = {
        "losses": losses,
        "num_on_cpu": 0 if on_cpu is None else len(on_cpu.assigned),
        "weights": [param.clone() for param in model.state_dict().values()],
        "state": copy.deepcopy(optimizer.state_dict()["state"]),
        "page_in_bytes": model.pager.statistics().page_in_bytes,
    }
    model.pager.close()
    return result


def train_plainly(num_steps: int) -> dict[str, Any]:
    """The same by hand: a copy of each weight in fp32 is stepped, and the weight is the copy rounded."""
    model = make_net().to(DEVICE)
    masters = [param.detach().float().requires_grad_(True) for param in model.parameters()]
    optimizer = make_adamw(masters)
    for step in range(num_steps):
        loss_of(model, step).backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    return {
        "weights": [param.detach().cpu() for param in model.parameters()],
        "masters": [master.detach().cpu() for master in masters],
        "state": optimizer.state_dict()["state"],
    }


def units_apart(left: Tensor, right: Tensor) -> Tensor:
    """How many fp32 numbers lie between the two, element by element; int64."""
    ordered = [torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) for bits in _bits(left, right)]
    return (ordered[0] - ordered[1]).abs()


def _bits(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().cpu().view(torch.int32).long() for tensor in tensors]


def check_equal(ours: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("losses", "weights"):
        for index, pair in enumerate(zip(ours[name], other[name], strict=True)):
            assert torch.equal(*pair), (name, index)
    for index, entry in ours["state"].items():
        for key, value in entry.items():
            assert torch.equal(value.cpu(), other["state"][index][key].cpu()), (index, key)


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_masters_do_not_depend_on_the_budget(update_at: str) -> None:
    roomy = train(5, share=2.0, update_at=update_at)
    assert {value.dtype for entry in roomy["state"].values() for value in entry.values()} == {torch.float32}
    for share in (0.25, 0.5):
        tight = train(5, share=share, update_at=update_at)
        assert tight["page_in_bytes"] > roomy["page_in_bytes"]
        check_equal(tight, roomy)


def test_clipped_masters_do_not_depend_on_the_budget() -> None:
    check_equal(train(5, share=0.25, clip=True), train(5, share=2.0, clip=True))


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_a_step_with_masters_is_that_of_a_plain_loop(update_at: str) -> None:
    """But where a master lies exactly between two weights: it may move by one unit (one in 131072 of random ones)."""
    ours, plain = train(1, share=0.25, update_at=update_at), train_plainly(1)
    num_moved = 0
    for index, master in enumerate(plain["masters"]):
        apart = units_apart(ours["state"][index]["master"], master)
        assert int(apart.max()) <= 1
        num_moved += int((apart > 0).sum())
        assert torch.equal(ours["weights"][index].cpu()[apart == 0], plain["weights"][index][apart == 0])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours["state"][index][key].cpu(), plain["state"][index][key].cpu())
    assert num_moved <= NUM_LAYERS * WIDTH * WIDTH / 2**13


@pytest.mark.parametrize(
    ("update_at", "update_on"), [("step", "cpu"), ("backward", "cpu"), ("backward", "auto")]
)
def test_what_the_cpu_updates_is_within_two_units(update_at: str, update_on: str) -> None:
    """Of a step's fp32 moments and masters, against the same on the device."""
    ours = train(1, share=0.5, update_at=update_at, update_on=update_on)
    device = train(1, share=0.5, update_at=update_at)
    assert ours["num_on_cpu"] > device["num_on_cpu"] == 0
    for index, entry in device["state"].items():
        for key in ("master", "exp_avg", "exp_avg_sq"):
            assert int(units_apart(ours["state"][index][key], entry[key]).max()) <= 2, (index, key)


def test_a_run_with_the_cpu_learns_as_one_without() -> None:
    with_cpu, without = (train(60, share=0.5, update_at="backward", update_on=on) for on in ("cpu", "device"))
    assert with_cpu["num_on_cpu"] > 0
    losses = [torch.stack(run["losses"]).float() for run in (with_cpu, without)]
    assert losses[1][-1] < losses[1][0] / 2
    assert torch.allclose(losses[0], losses[1], rtol=0.05)
