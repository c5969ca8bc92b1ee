"""Control tests of the dirty marks: each place that says "this was written to" is left out, and a write is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.config import Checks
from pager.engine.engine import Engine
from pager.mmu.binding import Binding
from pager.mmu.clipping import MAX_IDLE_STEPS
from pager.page_table import PageTable
from tests.engine_rig import PAGE, make_filled
from tests.races.scenarios import (
    WrongBytes,
    check_bytes,
    check_tensors,
    expect_refusal,
    handle_of,
    make_managed_layer,
    train_over_host,
    train_through_staging,
)
from tests.races.sites import current_site, find_sites, skip_only

MARKS = {**find_sites("mark_dirty"), **find_sites("bump_version")}


def leave_out(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    """Marks made at this site do nothing."""
    for owner, name in ((Engine, "mark_dirty"), (PageTable, "mark_dirty"), (Binding, "bump_version")):
        original: Callable[..., Any] = getattr(owner, name)

        def mark(*args: Any, original: Callable[..., Any] = original) -> None:
            if current_site(MARKS) != site:
                original(*args)

        monkeypatch.setattr(owner, name, mark)


def send_home(model: nn.Module) -> None:
    """Evict everything that is not in use."""
    engine = handle_of(model)._runtime.engine
    engine.evict_segments(engine.space.segments)


def write_in_place() -> None:
    """The version moves while a lease is held; seen when it ends."""
    rig, values = make_filled([PAGE], arena_frames=1)
    rig.write(0, ~values[0])
    rig.evict(0)
    check_bytes(rig.home_value(0), ~values[0], "written")
    rig.close()


def overwrite_what_is_clean() -> None:
    """Asking for pages to overwrite them is a write, whoever counts what."""
    rig, values = make_filled([PAGE], arena_frames=1)
    rig.read(0)
    _, lease = rig.lease(0, overwrite=True)
    lease.copy_(torch.from_numpy(~values[0]))
    del lease
    rig.evict(0)
    check_bytes(rig.home_value(0), ~values[0], "overwritten")
    rig.close()


def accumulate_a_gradient_at_home() -> None:
    """The second gradient is added to the first, which has left the device meanwhile."""
    layer = make_managed_layer(skip_only(None))
    plain = nn.Linear(96, 96, bias=False)
    for number in (1.0, 2.0):
        for module in (layer, plain):
            module(torch.full((1, 96), number)).sum().backward()
        send_home(layer)
    assert layer.weight.grad is not None
    assert plain.weight.grad is not None
    check_tensors([layer.weight.grad + 0], [plain.weight.grad], "gradient")
    handle_of(layer).close()


def clip_again_after_a_while() -> None:
    """The norm that was taken of the last gradient while the user clipped is not that of one that went home since."""
    layer: Any = make_managed_layer(skip_only(None))
    plain = nn.Linear(96, 96, bias=False)
    layer.weight._pager.gradient.goes_home = True
    try:
        for number in (1.0, 2.0, 3.0):
            for module in (layer, plain):
                module.zero_grad()
                module(torch.full((1, 96), number)).sum().backward()
            if number == 1.0:
                handle_of(layer).clip_grad_norm_(1e9)
            if number == 2.0:
                for _ in range(MAX_IDLE_STEPS + 1):
                    layer.weight._pager.mmu.clipping.end_step()
        found = handle_of(layer).clip_grad_norm_(1e9)
        check_tensors([found], [nn.utils.clip_grad_norm_(plain.parameters(), 1e9, foreach=False)], "norm")
    finally:
        handle_of(layer).close()


class ClipsInPlace(torch.optim.SGD):
    """SGD that halves the gradients it is given, in place."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return super().step(closure)


def optimizer_writes_to_the_gradient() -> None:
    """What the optimizer leaves in ``p.grad`` is what the user finds there."""
    grads = []
    for managed in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(96, 96, bias=False)
        optimizer = ClipsInPlace(layer.parameters(), lr=0.1)
        if managed:
            checks = Checks(page_all=True)
            pager.manage(
                layer, optimizer, device="cpu", page_size="16KiB", device_budget="160KiB", checks=checks
            )
        layer(torch.ones(1, 96)).sum().backward()
        if managed:
            send_home(layer)
        optimizer.step()
        if managed:
            send_home(layer)
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad + 0)
        if managed:
            handle_of(layer).close()
    check_tensors(grads[:1], grads[1:], "gradient after the step")


def unscale_a_gradient() -> None:
    """What GradScaler does: torch writes to the gradients without counting it."""
    layer = make_managed_layer(skip_only(None))
    layer(torch.ones(1, 96)).sum().backward()
    send_home(layer)
    assert layer.weight.grad is not None
    torch._amp_foreach_non_finite_check_and_unscale_(
        [layer.weight.grad], torch.zeros(1), torch.full((1,), 0.25)
    )
    send_home(layer)
    check_tensors([layer.weight.grad + 0], [torch.full((96, 96), 0.25)], "gradient")
    handle_of(layer).close()


def train() -> None:
    """Three steps of Adam, as plain torch takes them."""
    train_over_host(skip_only(None), None)  # type: ignore[arg-type]


def load_between_forward_and_backward() -> None:
    """Torch refuses a backward through values that are gone, and so do we."""
    layer = make_managed_layer(skip_only(None))
    x = torch.ones(1, 96, requires_grad=True)
    loss = layer(x).sum()
    layer.load_state_dict({"weight": torch.randn(96, 96)})
    expect_refusal(loss)
    handle_of(layer).close()


def set_between_forward_and_backward() -> None:
    """The same of ``set_``."""
    layer = make_managed_layer(skip_only(None))
    x = torch.ones(1, 96, requires_grad=True)
    loss = layer(x).sum()
    with torch.no_grad():
        layer.weight.set_(torch.randn(96, 96))  # type: ignore[call-overload]
    expect_refusal(loss)
    handle_of(layer).close()


def train_streaming() -> None:
    """Parameters that stream keep what their updates wrote."""
    train_through_staging(skip_only(None), None)  # type: ignore[arg-type]


class OnesOwn(torch.optim.AdamW):
    """Not torch's: its updates do not wait for the parameters' next use."""


def step_between_forward_and_backward() -> None:
    """Torch refuses a backward through values from before the step, and so do we, though the update waits."""
    step_under_a_graph(torch.optim.AdamW)


def step_of_ones_own_between_forward_and_backward() -> None:
    """The same where the update has run when the step returns."""
    step_under_a_graph(OnesOwn)


def step_on_the_cpu_between_forward_and_backward() -> None:
    """The same where the CPU updates inside backward."""
    step_under_a_graph(
        torch.optim.AdamW, num_layers=1, budget="260KiB", update_at="backward", update_on="cpu"
    )


def step_under_a_graph(
    optimizer_class: type[torch.optim.AdamW], *, num_layers: int = 4, budget: str = "600KiB", **knobs: Any
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96, bias=False) for _ in range(num_layers)))
    optimizer = optimizer_class(model.parameters())
    checks = Checks(streams="late", happens_before=True, poison=True, daemon="inline")
    pager.manage(
        model, optimizer, device="cpu", page_size="16KiB", device_budget=budget, checks=checks, **knobs
    )
    try:
        x = torch.ones(1, 96, requires_grad=True)
        for _ in range(2):  # the first step makes the states
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        before = model(x).sum()
        model(x).sum().backward()
        optimizer.step()
        expect_refusal(before)
    finally:
        handle_of(model).close()


def clip_under_a_graph() -> None:
    """Torch refuses a backward through a gradient that was clipped since, and so do we, though scaling waits."""
    layer = make_managed_layer(skip_only(None))
    try:
        layer(torch.ones(1, 96)).sum().backward()
        x = torch.ones(96, requires_grad=True)
        assert layer.weight.grad is not None
        before = (layer.weight.grad @ x).sum()
        send_home(layer)
        handle_of(layer).clip_grad_norm_(0.5)
        expect_refusal(before)
    finally:
        handle_of(layer).close()


CONTROLS: dict[str, Callable[[], None]] = {
    "engine/faults.py:Faults._begin_use:mark_dirty": overwrite_what_is_clean,
    "engine/leases.py:Leases._note_write:mark_dirty": write_in_place,
    "engine/leases.py:Leases.mark_dirty:mark_dirty": write_in_place,
    "engine/leases.py:Leases.wrote:mark_dirty": train_streaming,
    "mmu/gradient.py:Gradients.add:bump_version": accumulate_a_gradient_at_home,
    "mmu/gradient.py:Gradients._send_home:bump_version": clip_again_after_a_while,
    "mmu/clipping.py:Clipping._count_write:bump_version": clip_under_a_graph,
    "mmu/special.py:_set:bump_version": set_between_forward_and_backward,
    "mmu/values.py:store:bump_version": load_between_forward_and_backward,
    "mmu/view.py:count_writes:bump_version": unscale_a_gradient,
    "optim/units.py:PagedUnit._commit:mark_dirty#1": optimizer_writes_to_the_gradient,
    "optim/units.py:PagedUnit._commit:mark_dirty#2": train,
    "optim/units.py:PagedUnit._commit:bump_version": train,
    "optim/on_cpu.py:CpuUpdates.take:bump_version": step_on_the_cpu_between_forward_and_backward,
    "optim/deferred.py:Deferred.begin:bump_version": step_between_forward_and_backward,
    "optim/streamed.py:StreamedUnit._commit:bump_version": step_of_ones_own_between_forward_and_backward,
}


@pytest.mark.parametrize("site", sorted(MARKS.values()))
def test_a_dirty_mark_left_out_is_noticed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, site)
    with pytest.raises(WrongBytes):
        CONTROLS[site]()


def test_every_mark_has_a_control() -> None:
    assert CONTROLS.keys() == set(MARKS.values())


@pytest.mark.parametrize("scenario", dict.fromkeys(CONTROLS.values()), ids=lambda scenario: scenario.__name__)
def test_with_all_marks_no_write_is_lost(scenario: Callable[[], None]) -> None:
    scenario()
    assert scenario.__doc__


def test_the_version_is_looked_at_when_a_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the note at the end of a lease, in-place writes by torch operations are lost."""
    monkeypatch.setattr(Engine, "_note_write", lambda engine, run: None)
    with pytest.raises(WrongBytes):
        write_in_place()
