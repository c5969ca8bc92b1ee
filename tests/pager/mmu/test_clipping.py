"""Norms taken on arrival and scaling put off: when they count, what they cost, and that nothing is scaled twice."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pager.device.base import Event
from pager.errors import PagerInternalError
from pager.mmu import clipping, values
from pager.mmu.mmu import Mmu
from tests import models
from tests.cases.clipping import HELD, Halves, clip, expect_owed, owed
from tests.cases.same import Report, check_equal, check_same, copied, manage, train_step
from tests.pager.optim.waiting import (
    BUDGETS,
    CHECKS,
    NUM_LAYERS,
    backward,
    check_corner,
    make_adamw,
    make_net,
    weight,
)

# -- norms that must not be taken for good -------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda m: weight(m).grad.mul_(2),
    "view": lambda m: weight(m).grad.view(-1)[5].fill_(3),
    "data": lambda m: weight(m).grad.data.mul_(2),
    "data of a view": lambda m: weight(m).grad.t().data.mul_(2),
    "numpy": lambda m: weight(m).grad.numpy().__imul__(2),
    "an alias": lambda m: weight(m).grad.unsafe_chunk(3)[1].mul_(2),
    "detached": lambda m: weight(m).grad.detach().mul_(2),
    "copy_": lambda m: weight(m).grad.copy_(torch.ones(96, 96)),
    "assigned": lambda m: setattr(weight(m), "grad", torch.ones(96, 96)),
    "data assigned": lambda m: setattr(weight(m).grad, "data", torch.ones(96, 96)),
    "laid out anew": lambda m: setattr(weight(m).grad, "data", torch.arange(96.0 * 96).view(96, 96).t()),
    "None": lambda m: setattr(weight(m), "grad", None),
    "foreach": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 2.0),
    "unscale": lambda m: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad for p in m.parameters()], torch.zeros(1), torch.full((1,), 0.5)
    ),
    "backward": lambda m: backward(m, 3),
    "clipped": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "frozen": lambda m: weight(m).requires_grad_(False),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_that_was_changed_since_is_read_again(name: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step in range(4, 6):
            optimizer.zero_grad()
            backward(model, step)
            report("norm before", clip(model, 100.0))
            optimizer.zero_grad()
            backward(model, step)
            CHANGES[name](model)
            report("norm", clip(model))
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_corner(corner, steps_after=1)


@pytest.mark.parametrize("name", ["row", "data", "numpy"])
def test_a_view_from_before_the_last_backward_is_written_through(name: str) -> None:
    """The norm of the sum was taken while somebody could still write, uncounted."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step in range(4, 6):
            optimizer.zero_grad()
            backward(model, step)
            held = HELD[name](model)
            backward(model, step + 1)
            held.mul_(3)
            del held
            report("norm", clip(model))
            optimizer.step()

    check_corner(corner)


def test_a_step_that_writes_to_the_gradients_is_noticed() -> None:
    """A second clipping without a backward between."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = Halves(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            train_step(case, model, step)
            if step % 2:
                report("before", clip(model))
            optimizer.step()
            report("after", clip(model))

    check_same(lambda: models.make_mlp().model, script, share=0.25)


@pytest.mark.parametrize("fused", [False, True])
def test_gradscaler(fused: bool) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            args, _ = data = case.make_batch(step)
            with torch.autocast("cpu", torch.bfloat16):
                output = model(*args)
            loss = case.loss(output, data) * (float("inf") if step == 2 else 1)
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
            report("norm", clip(model))
            scaler.step(optimizer)
            scaler.update()
            report("scale", scaler.get_scale())

    check_same(lambda: models.make_mlp().model, script, share=0.25)


def test_under_autocast_and_in_inference_mode() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        contexts: list[Any] = [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)]
        for step, context in enumerate(contexts, 4):
            optimizer.zero_grad()
            backward(model, step)
            with context:
                report("norm", clip(model))
                report("grad", weight(model).grad.clone())
            optimizer.step()

    check_corner(corner)


def test_under_autocast_norms_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch may take them in another dtype than in backward."""
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizer = make_adamw(model)
    train_clipped(model, optimizer, range(2))
    backward(model, 2)
    faults = count_faults(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16):
        clip(model)
    assert len(faults) == NUM_LAYERS
    model.pager.close()


def test_a_norm_of_another_kind_is_taken_anew() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step, norm_type in enumerate((2.0, 2.0, 1.0, 2.0, float("inf")), 4):
            optimizer.zero_grad()
            backward(model, step)
            report("norm", clip(model, norm_type=norm_type))
            optimizer.step()

    check_corner(corner)


def test_a_norm_made_on_another_stream_is_taken_anew() -> None:
    """Nothing orders this stream behind that one."""
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizer = make_adamw(model)
    train_clipped(model, optimizer, range(2))
    backward(model, 2)
    slots = [p._pager.gradient for p in model.parameters() if hasattr(p, "_pager")]
    assert all(slot.norm is not None for slot in slots)
    taken = [slot.norm for slot in slots]
    for slot in slots:
        slot.norm = clipping.Norm(slot.norm.value * 2, 2.0, slot.segment, slot.version(), stream=99)
    found = clip(model, 1e6)
    assert torch.equal(found, nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False))
    assert all(norm.stream == 0 for norm in taken)
    model.pager.close()


def count_faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that are paged in for a look, from now on."""
    faults: list[str] = []
    fault = Mmu.fault

    def counted(mmu: Mmu, binding: Any, *args: Any, **kwargs: Any) -> Any:
        faults.append(binding.name)
        return fault(mmu, binding, *args, **kwargs)

    monkeypatch.setattr(Mmu, "fault", counted)
    return faults


# -- what it costs -------------------------------------------------------------------------------------------------


def train_clipped(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        clip(model)
        optimizer.step()
        optimizer.zero_grad()


def moved(model: Any) -> tuple[int, int, int]:
    statistics = model.pager.statistics()
    return statistics.page_in_bytes, statistics.page_out_bytes, statistics.major_faults


@pytest.mark.parametrize("master", [None, "float32"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_clipped_step_moves_what_an_unclipped_one_moves(budget: str, master: str | None) -> None:
    def traffic(clips: bool) -> list[tuple[int, ...]]:
        dtype = torch.float32 if master is None else torch.bfloat16
        model = manage(make_net().to(dtype), device_budget=budget, checks=CHECKS, master=master)
        optimizer = make_adamw(model)
        seen = [moved(model)]
        for step in range(6):
            x = torch.linspace(-1, 1, 96).repeat(2, 1) * (step + 1)
            model(x.to(dtype)).float().square().sum().backward()
            if clips:
                clip(model)
                assert len(owed(model)) == NUM_LAYERS
            optimizer.step()
            optimizer.zero_grad()
            seen.append(moved(model))
        model.pager.close()
        # The first clipping reads.
        return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen[2:])]

    clipped = traffic(True)
    assert clipped == traffic(False)
    assert clipped[-1][0] > 0


def test_torchs_own_clipping_moves_more() -> None:
    """Else there would be nothing to gain, and the test before this one would show nothing."""
    found = []
    for clips in (clip, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)):
        model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
        optimizer = make_adamw(model)
        for step in range(4):
            backward(model, step)
            clips(model)
            optimizer.step()
            optimizer.zero_grad()
        found.append(moved(model)[0])
        model.pager.close()
    assert found[1] > 1.2 * found[0]


class NoReading(TorchDispatchMode):
    """Refuses what takes a value off the device, or waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "the host asked for a value"
        assert "is_nonzero" not in str(func), "the host asked for a value"
        return func(*args, **(kwargs or {}))


def test_clipping_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    optimizer = make_adamw(model)
    train_clipped(model, optimizer, range(2))
    backward(model, 2)
    faults = count_faults(monkeypatch)

    def refused(event: Event) -> None:
        raise AssertionError("the host waits for an event")

    with monkeypatch.context() as patch, NoReading():
        patch.setattr(Event, "synchronize", refused)
        norm = clip(model)
    assert faults == []
    assert norm.dim() == 0
    with NoReading(), pytest.raises(AssertionError, match="asked for a value"):
        clip(model, error_if_nonfinite=True)
    model.pager.close()


def test_the_first_clipping_reads_and_later_ones_find_norms() -> None:
    model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    optimizer = make_adamw(model)
    slots = [p._pager.gradient for p in model.parameters() if hasattr(p, "_pager")]
    backward(model, 0)
    assert all(slot.norm is None for slot in slots)
    clip(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    assert all(slot.norm is not None for slot in slots)
    model.pager.close()


def test_who_clips_no_more_pays_no_more() -> None:
    model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    optimizer = make_adamw(model)
    slot = weight(model)._pager.gradient
    train_clipped(model, optimizer, range(2))
    for step in range(clipping.MAX_IDLE_STEPS):
        backward(model, step)
        assert slot.norm.version == slot.version(), step
        optimizer.step()
        optimizer.zero_grad()
    backward(model, 9)
    assert slot.norm is None or slot.norm.version != slot.version()
    assert torch.equal(
        clip(model, 1e6), nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=False)
    )
    optimizer.zero_grad()
    backward(model, 10)
    assert slot.norm.version == slot.version()
    model.pager.close()


# -- once, and not twice -------------------------------------------------------------------------------------------


class Looks(torch.optim.AdamW):
    """Not torch's own: what it is stepped with may look around."""

    look: Callable[[], None]

    def step(self, closure: Any = None) -> Any:
        """One step."""
        self.look()
        return super().step(closure)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("index", [1, 3, 4, 5])
def test_a_look_from_inside_the_update(index: int, budget: str) -> None:
    """At a gradient whose turn is yet to come: units that were fetched ahead hold it as it was before."""
    plain, model = make_net(), manage(make_net(), device_budget=budget, checks=CHECKS)
    calls = 0
    # The user's own, that of the small tensors, three of each parameter before: the next unit is fetched by now.
    last = 2 + 3 * index

    def look() -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            expect_owed(model)
            weight(model, index).grad.sum()

    for one in (plain, model):
        optimizer = Looks(one.parameters(), lr=0.01)
        optimizer.look = look if one is model else int  # type: ignore[assignment]
        for step in range(4):
            optimizer.zero_grad()
            backward(one, step)
            clip(one)
            calls = 0
            optimizer.step()
            if one is model:
                assert calls > last
                assert weight(model, index)._pager.gradient not in owed(model)
    for name in ("grad", "data"):
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            check_equal(getattr(expected, name), copied(getattr(found, name)), name)
    model.pager.close()


class Noting(TorchDispatchMode):
    """A user's mode that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_sees_neither_norms_nor_scaling() -> None:
    model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    optimizer = make_adamw(model)
    train_clipped(model, optimizer, range(2))
    with Noting() as mode:
        backward(model, 2)
    assert weight(model)._pager.gradient.norm is not None
    clip(model)
    with mode:
        weight(model).grad.neg()
    assert weight(model)._pager.gradient not in owed(model)
    assert "aten.neg.default" in mode.seen
    assert not [name for name in mode.seen if "vector_norm" in name or "mul_" in name]
    model.pager.close()


def test_many_threads_look_at_once() -> None:
    """One of them scales, the others wait for it."""
    model = manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    plain = make_net()
    optimizers = [make_adamw(one) for one in (model, plain)]
    found: list[torch.Tensor] = []
    for step in range(3):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            backward(one, step)
            clip(one)
        expect_owed(model)
        barrier = threading.Barrier(4)

        def look(barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            found.append(weight(model).grad.clone())

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tensor in found[-4:]:
            check_equal(weight(plain).grad, copied(tensor), f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    model.pager.close()


def test_what_is_scaled_goes_home_scaled() -> None:
    """The write is marked, for a gradient that was clean when it was scaled."""
    model, plain = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS), make_net()
    for one in (model, plain):
        backward(one, 0)
        clip(one)
    engine = model.pager._runtime.engine
    engine.evict_segments(engine.space.segments)
    expect_owed(model)
    grads = [p.grad for p in model.parameters()]
    for gradient in grads:
        assert gradient is not None
        gradient.sum()
    assert not owed(model)
    engine.evict_segments(engine.space.segments)
    check_equal([p.grad for p in plain.parameters()], copied(grads), "gradients")
    model.pager.close()


def test_closing_past_a_broken_engine_keeps_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = models.make_mlp()
    model, plain = manage(models.make_mlp().model), models.make_mlp().model
    for one in (model, plain):
        train_step(case, one, 0)
        clip(one)
    expect_owed(model)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise PagerInternalError("broken")

    monkeypatch.setattr(values, "cpu_tensor", broken)
    with pytest.raises(PagerInternalError, match="broken"):
        model.pager.close()
    check_equal([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()], "gradients")
