"""On a GPU: a managed run equals the unmanaged one, bit for bit, while its pages stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import pager
from pager import bill
from pager.config import Checks
from pager.residency import Residency
from tests import models

# Torch warns where it has no deterministic kernel, which `deterministic` allows.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*determinis:UserWarning")]

PAGE = 16 * 1024
NUM_STEPS = 4

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def handle_of(model: nn.Module) -> Any:
    """The model's handle; torch types every attribute of a module as a tensor or a module."""
    return model.pager


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Some CUDA backwards differ from themselves; parity is a question only where they do not.

    cuDNN's attention stays nondeterministic under ``warn_only``, so another one is used. cuDNN's RNNs draw dropout
    from a state that lives as long as the process, so two plain runs in one process differ: they run without it.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)


def on_gpu(case: models.Case, step: int) -> Any:
    """A batch on the GPU, floating tensors in the model's dtype."""
    dtype = next(p.dtype for p in case.model.parameters())
    move = lambda t: t.to("cuda", dtype if t.is_floating_point() else None)  # noqa: E731
    return tree_map_only(torch.Tensor, move, case.make_batch(step))


def train(case: models.Case, optimizer: torch.optim.Optimizer, mode: str) -> list[list[torch.Tensor]]:
    """Losses and gradients of a few steps, on the CPU. ``mode``: plain, accumulate, clip, autocast, losses (only)."""
    seen: list[list[torch.Tensor]] = []
    torch.manual_seed(7)
    for step in range(NUM_STEPS):
        losses = []
        for micro in range(3 if mode == "accumulate" else 1):
            batch = on_gpu(case, step * 3 + micro)
            with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
                loss = case.loss(case.model(*batch[0], **batch[1]), batch)
            loss.backward()
            losses.append(loss.detach().cpu())
        if mode == "clip":
            norm = torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1, foreach=False)
            losses.append(norm.cpu())
        grads = []
        if mode != "losses":
            grads = [p.grad.detach().cpu() for p in case.model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(losses + grads)
    return seen


def state_bytes(model: nn.Module) -> int:
    return sum(-(-p.nbytes // PAGE) * PAGE * 4 for p in model.parameters() if p.nbytes >= PAGE)


def check_equal(left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> None:
    for step, (ours, plain) in enumerate(zip(left, right, strict=True)):
        for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert torch.equal(a, b), f"step {step}, tensor {index}: {(a - b).abs().max()}"


def check_parity(
    name: str,
    optimizer: str,
    mode: str,
    share: float,
    dtype: torch.dtype,
    *,
    knobs: dict[str, Any] | None = None,
    **checks: Any,
) -> pager.Statistics:
    """Train with and without; the statistics of the managed run."""
    build = models.BUILDERS[name]
    plain = build()
    plain.model.to("cuda", dtype)
    expected = train(plain, OPTIMIZERS[optimizer](plain.model.parameters()), mode)
    managed = build()
    managed.model.to(dtype)
    arena = int(state_bytes(managed.model) * share) // PAGE * PAGE
    made = OPTIMIZERS[optimizer](managed.model.parameters())
    pager.manage(
        managed.model,
        made,
        device="cuda",
        page_size=PAGE,
        checks=Checks(arena_bytes=arena, **checks),
        **(knobs or {}),
    )
    got = train(managed, made, mode)
    statistics = handle_of(managed.model).statistics()
    assert statistics.peak_resident_bytes <= arena
    if share < 1:
        assert statistics.page_in_bytes > 0
    handle_of(managed.model).close()
    check_equal(got, expected)
    for ours, theirs in zip(managed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.detach(), theirs.detach().cpu())
    return statistics


@pytest.mark.parametrize("daemon", ["thread", "inline"])
@pytest.mark.parametrize("name", ["mlp", "decoder_nonreentrant"])
def test_half_of_the_homes_on_a_disk(
    name: str, daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process itself takes would drown the host budget of so small a model: only homes are counted."""
    host = state_bytes(models.BUILDERS[name]().model) // 2
    monkeypatch.setattr(bill, "host_room", lambda *arguments: (host, host))
    statistics = check_parity(
        name, "adamw", "plain", 0.4, torch.float32, knobs={"disk": tmp_path}, poison=True, daemon=daemon
    )
    assert statistics.disk_bytes > host // 2


@pytest.mark.parametrize("name", sorted(models.BUILDERS))
def test_every_model(name: str) -> None:
    with torch.backends.cudnn.flags(enabled=name != "lstm"):
        check_parity(name, "adamw", "plain", 0.5, torch.float32, happens_before=True, poison=True)


def test_captured_order_is_the_real_order() -> None:
    """What a step on meta showed is what the door sees on the GPU, checkpointing included."""
    case = models.BUILDERS["decoder_nonreentrant"]()
    batch = on_gpu(case, 0)
    checks = Checks(page_all=True)
    pager.manage(
        case.model, device="cuda", page_size=PAGE, checks=checks, example_inputs=batch[0] or batch[1]
    )
    runtime = handle_of(case.model)._runtime
    case.loss(case.model(*batch[0], **batch[1]), batch).backward()
    captured = [
        (int(s), int(p))
        for s, p in zip(runtime.planner.trace.segment, runtime.planner.trace.phase, strict=True)
    ]
    seen = [(row.segment, row.phase) for row in runtime.engine.timeline.recorded]
    assert len(seen) > 20
    assert seen == captured
    handle_of(case.model).close()


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_optimizer(optimizer: str, dtype: torch.dtype) -> None:
    check_parity("mlp", optimizer, "plain", 0.4, dtype, poison=True)


@pytest.mark.parametrize("mode", ["accumulate", "clip", "autocast"])
@pytest.mark.parametrize("daemon", ["thread", "inline"])
def test_every_mode(mode: str, daemon: str) -> None:
    check_parity(
        "decoder", "adamw", mode, 0.5, torch.float32, poison=True, daemon=daemon, happens_before=True
    )


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adam", "sgd-momentum"])
@pytest.mark.parametrize("name", ["mlp", "decoder", "decoder_nonreentrant"])
def test_updates_inside_backward(name: str, optimizer: str) -> None:
    check_parity(
        name,
        optimizer,
        "losses",
        0.5,
        torch.float32,
        knobs={"update_at": "backward"},
        poison=True,
        happens_before=True,
    )


@pytest.mark.parametrize("lent", [0, 9], ids=["on the compute stream", "beside it"])
def test_updates_beside_the_backward(lent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers large enough that copies, updates and the backward really overlap; nothing but events orders them."""
    side, num_layers, budget = 2048, 24, 160 * 2**20
    monkeypatch.setattr(Residency, "lent_bytes", lambda self: lent * side * side * 4)
    results = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(num_layers)))
        if not managed:
            model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if managed:
            pager.manage(
                model,
                optimizer,
                device="cuda",
                update_at="backward",
                checks=Checks(arena_bytes=budget, poison=True),
            )
        x = torch.randn(64, side, device="cuda")
        losses = []
        for step in range(6):
            loss = model(x * (1 + step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        if managed:
            assert handle_of(model).statistics().page_in_bytes > num_layers * side * side * 8
            handle_of(model).close()
        results.append([*losses, *(param.detach().cpu() for param in model.parameters())])
    check_equal(results[1:], results[:1])


@pytest.mark.parametrize("share", [0.3, 1.0, 2.0])
def test_every_budget(share: float) -> None:
    check_parity("decoder_nonreentrant", "adamw", "plain", share, torch.bfloat16, poison=True)


def test_grad_scaler() -> None:
    """fp16 with GradScaler: scales, skipped steps and parameters are those of the unmanaged run."""

    def run(managed: bool) -> tuple[list[float], list[torch.Tensor]]:
        case = models.make_mlp()
        if not managed:
            case.model.cuda()
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
        if managed:
            arena = int(state_bytes(case.model) * 0.5)
            pager.manage(
                case.model, optimizer, device="cuda", page_size=PAGE, checks=Checks(arena_bytes=arena)
            )
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=2)
        scales = []
        for step in range(8):
            args, _ = case.make_batch(step)
            with torch.autocast("cuda", torch.float16):
                loss = case.model(args[0].cuda()).float().square().mean() * 1e3
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        if managed:
            handle_of(case.model).close()
        return scales, [p.detach().cpu() for p in case.model.parameters()]

    scales, params = run(True)
    plain_scales, plain_params = run(False)
    assert scales == plain_scales
    assert len(set(scales)) > 1
    for ours, theirs in zip(params, plain_params, strict=True):
        assert torch.equal(ours, theirs)


def test_side_stream() -> None:
    """Forward and backward on a stream of the user's; pages wait for it as for the default one."""
    case, plain = models.make_mlp(), models.make_mlp()
    plain.model.cuda()
    optimizer = torch.optim.AdamW(case.model.parameters())
    arena = int(state_bytes(case.model) * 0.4)
    pager.manage(
        case.model, optimizer, device="cuda", page_size=PAGE, checks=Checks(arena_bytes=arena, poison=True)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = train(case, optimizer, "plain")
    torch.cuda.current_stream().wait_stream(stream)
    check_equal(got, train(plain, torch.optim.AdamW(plain.model.parameters()), "plain"))
    handle_of(case.model).close()


def test_steady_state_allocates_nothing() -> None:
    """After the second step the arena, the host arena and CUDA's reserve stay as they are."""
    case = models.make_mlp(width=256)
    optimizer = torch.optim.AdamW(case.model.parameters())
    arena = int(state_bytes(case.model) * 0.5)
    pager.manage(case.model, optimizer, device="cuda", page_size=PAGE, checks=Checks(arena_bytes=arena))
    sizes = []
    for step in range(30):
        batch = on_gpu(case, step)
        case.loss(case.model(*batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        statistics = handle_of(case.model).statistics()
        sizes.append((torch.cuda.memory_reserved(), statistics.host_bytes))
    handle_of(case.model).close()
    assert len(set(sizes[5:])) == 1
