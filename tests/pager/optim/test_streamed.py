"""Units of the update whose states go through staging slots."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from pager.errors import BudgetError
from pager.optim.streamed import StreamedUnit, can_stream
from pager.optim.update import Update
from pager.page_table import PageState
from tests.cases.same import Report, check_equal, check_same, manage, values_of
from tests.pager.optim.waiting import (
    BUDGETS,
    CHECKS,
    NUM_LAYERS,
    ROOMY_BUDGETS,
    backward,
    batch,
    expect_waiting,
    make_adamw,
    make_net,
    make_roomy_net,
    pending,
    weight,
)

KEYS = ("exp_avg", "exp_avg_sq")


def trained(budget: str = BUDGETS[0], steps: int = 2) -> tuple[Any, Any, Any]:
    """A managed model after some steps, its optimizer, and that as the runtime knows it."""
    model = manage(make_net(), device_budget=budget, checks=CHECKS)
    optimizer = make_adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer, model.pager._runtime.optimizers[0]


def finish(model: Any) -> None:
    for param in model.parameters():
        param.norm()
    assert not pending(model)


@pytest.mark.parametrize("budget", BUDGETS)
def test_states_never_enter_the_arena_in_ordinary_training(budget: str) -> None:
    model, optimizer, adopted = trained(budget)
    engine = adopted.engine
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        finish(model)
        kinds = [run.segment.kind for run in engine.resident_runs()]
        assert "state" not in kinds
        assert len(engine.staging._held) == 0
    model.pager.close()


def test_a_parameter_is_cut_into_units_that_fit_a_slot() -> None:
    model, _, adopted = trained()
    finish(model)
    backward(model, 1)
    update = Update(adopted)
    units = [unit for units in update.later._units.values() for unit in units]  # type: ignore[union-attr]
    mine = [unit for unit in units if unit.progress.binding is weight(model)._pager]
    assert len(mine) == mine[0].progress.num_units == 3
    assert [unit.piece.begin for unit in mine] == [0, 4096, 8192]
    assert mine[-1].piece.end == 96 * 96
    for unit in units:
        assert unit.fetch(adopted)
        slot = adopted.engine.staging._held[id(unit)]
        assert sum(run.num_pages for run in slot.runs) <= slot.num_frames
        adopted.engine.staging.give_back(unit)
    model.pager.close()


def test_slots_inside_backward_are_full_of_states() -> None:
    """Also where gradients waited at home, under accumulate(): those come through the arena."""
    plain: Any = make_net()
    model: Any = make_net()
    optimizers = [make_adamw(plain), make_adamw(model)]
    manage(model, optimizers[1], device_budget=BUDGETS[0], checks=CHECKS, update_at="backward")
    engine = model.pager._runtime.engine
    staging = engine.staging
    fetched, fetch = [], staging.fetch

    def spy(holder: Any, ranges: Any) -> bool:
        num_pages = sum(wanted.num_pages for wanted in ranges)
        is_full = num_pages * ranges[0].segment.page_size == staging.slot_bytes
        fetched.append((is_full, [wanted.segment.kind for wanted in ranges]))
        return bool(fetch(holder, ranges))

    staging.fetch = spy
    for step in range(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            waits = each is model and step % 2
            with each.pager.accumulate() if waits else contextlib.nullcontext():
                backward(each, step)
            if waits:
                engine.evict_segments([layer.weight._pager.gradient.segment for layer in model.layers])
            optimizer.step()
    # Updates of what was accumulated run later: all units of two steps, and of two more inside backward.
    check_equal(optimizers[0].state_dict(), optimizers[1].state_dict(), "states")
    assert len(fetched) >= 4 * 3 * NUM_LAYERS
    assert all(is_full and kinds == ["state", "state"] for is_full, kinds in fetched)
    for optimizer in optimizers:
        optimizer.zero_grad()  # used up inside backward, but not by torch
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "parameters")


def test_what_can_stream() -> None:
    model, optimizer, adopted = trained()
    finish(model)
    binding, state = weight(model)._pager, optimizer.state[weight(model)]
    assert can_stream(adopted, binding, KEYS)
    assert not can_stream(adopted, binding, (*KEYS, "max_exp_avg_sq"))
    assert not can_stream(adopted, binding, KEYS[:1])
    kept, state["exp_avg"] = state["exp_avg"], torch.zeros(96, 96)
    assert not can_stream(adopted, binding, KEYS), "a state that is not the paged one"
    state["exp_avg"] = kept
    assert can_stream(adopted, binding, KEYS)
    adopted.engine.discard(kept._pager.segment)
    assert not can_stream(adopted, binding, KEYS), "a state without a value"
    optimizer.state[weight(model)] = {}
    assert can_stream(adopted, binding, KEYS), "a first step"
    adopted.engine.staging.release()
    assert not can_stream(adopted, binding, KEYS), "no slots"
    model.pager.close()


def test_a_first_step_through_slots_makes_the_states() -> None:
    """Slots are there before the first step where the optimizer is named to `manage`."""
    plain: Any = make_net()
    model: Any = make_net()
    optimizers = [make_adamw(plain), make_adamw(model)]
    manage(model, optimizers[1], device_budget=BUDGETS[1], checks=CHECKS)
    engine = model.pager._runtime.engine
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        backward(each, 0)
        optimizer.step()
    assert engine.streamed
    segment = optimizers[1].state[weight(model)]["exp_avg"]._pager.segment
    states = engine.table.state[segment.first_page : segment.last_page]
    assert (states == PageState.ABSENT).all()
    check_equal(optimizers[0].state_dict(), optimizers[1].state_dict(), "states")
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "parameters")


def test_slots_that_are_gone_when_the_unit_runs() -> None:
    """Units were made for slots; memory ran short before they ran."""
    plain = make_net()
    optimizer = make_adamw(plain)
    for step in range(4):
        optimizer.zero_grad()
        backward(plain, step)
        optimizer.step()
    model, managed, adopted = trained(BUDGETS[1], steps=4)
    expect_waiting(model)
    assert adopted.engine.staging._held
    model.pager._runtime.residency.give_up()
    finish(model)
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "parameters")


def test_no_room_for_the_parameter_is_an_error_that_can_be_put_right() -> None:
    """Views fill the arena when a waiting update needs its parameter: nothing is lost."""
    plain = make_net()
    optimizer = make_adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        backward(plain, step)
        optimizer.step()
    model, managed, _ = trained(steps=3)
    expect_waiting(model)
    held: list[torch.Tensor] = []

    def hold_all() -> None:
        for param in model.parameters():
            held.append(param.detach())

    with pytest.raises(BudgetError, match="drop views"):
        hold_all()
    assert len(held) > NUM_LAYERS // 2
    held.clear()
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "parameters")


@pytest.mark.parametrize("budget", ROOMY_BUDGETS)
def test_two_optimizers_updates_run_in_two_threads_at_once(budget: str) -> None:
    """With one slot, one of them does without."""

    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        halves = [params[:7], params[7:]]
        optimizers = [torch.optim.AdamW(half, lr=0.01) for half in halves]
        for step in range(5):
            backward(model, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step:
                expect_waiting(model)
            start = threading.Barrier(2)
            found: dict[int, Any] = {}

            def read(number: int, start: Any = start, found: Any = found) -> None:
                start.wait(60)
                found[number] = [param.detach().clone() for param in halves[number]]

            threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            report("found", [found.get(number) for number in range(2)])
        report("states", [optimizer.state_dict() for optimizer in optimizers])

    check_same(make_roomy_net, script, device_budget=budget, checks=CHECKS)


def test_a_unit_that_cannot_have_a_slot_runs_in_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_net()
    optimizer = make_adamw(plain)
    for step in range(3):
        optimizer.zero_grad()
        backward(plain, step)
        optimizer.step()
    model, managed, adopted = trained(steps=3)
    ran = []
    run = StreamedUnit.run

    def noting(unit: Any, update: Any) -> None:
        ran.append(unit)
        run(unit, update)

    monkeypatch.setattr(StreamedUnit, "run", noting)
    monkeypatch.setattr(adopted.engine.staging, "take", lambda holder, ranges: None)
    finish(model)
    assert len(ran) == 3 * NUM_LAYERS
    monkeypatch.undo()
    model(batch(0))
    check_equal(optimizer.state_dict(), managed.state_dict(), "states")
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "parameters")
