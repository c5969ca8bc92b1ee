"""What stays on the device: chosen for the arena as it is, let go of where room runs short."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pager.page_table import Home
from tests.cases.same import check_equal, manage, values_of
from tests.pager.optim.waiting import (
    BUDGETS,
    CHECKS,
    NUM_LAYERS,
    Net,
    backward,
    batch,
    expect_waiting,
    make_adamw,
    make_net,
    weight,
)


def train(model: Any, steps: int, optimizer: Any = None) -> Any:
    """Some steps of AdamW; the optimizer."""
    optimizer = optimizer or make_adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return optimizer


def fixed(model: Any) -> list[bool]:
    """Which of the layers' weights stay."""
    return [layer.weight._pager.fixed is not None for layer in model.layers]


def streaming_and_staying() -> list[Any]:
    return [manage(make_net(), device_budget=budget, checks=CHECKS) for budget in BUDGETS]


def test_what_the_two_budgets_are_for() -> None:
    """Every corner of a waiting update is tried with one of them or both."""
    for model, stays, num_slots in zip(streaming_and_staying(), (False, True), (1, 2), strict=True):
        train(model, 2)
        expect_waiting(model)
        runtime = model.pager._runtime
        assert len(runtime.engine.staging._slots) == num_slots
        assert fixed(model) == [stays] * NUM_LAYERS
        assert runtime.table.home[weight(model)._pager.segment.first_page] == Home.HOST
        model.pager.close()


def test_parameters_stay_all_or_not_at_all() -> None:
    small, large = streaming_and_staying()
    for model, stays in ((small, False), (large, True)):
        train(model, 2)
        assert fixed(model) == [stays] * NUM_LAYERS
        model.pager.close()


def test_slots_leave_room_beside_what_is_wired() -> None:
    """With activations as large as the arena the ring would take a third of it."""
    model = manage(make_net(), device_budget="608KiB", checks=CHECKS)
    train(model, 1)
    runtime = model.pager._runtime
    arena = runtime.arena.capacity_bytes
    wired = int((runtime.table.home == Home.DEVICE).sum()) * runtime.arena.page_size
    assert wired > arena // 3
    runtime.residency.activation_bytes = 2**30
    runtime.engine.staging.release()
    train(model, 1)
    assert 0 < runtime.engine.staging.num_bytes <= (arena - wired) // 3
    model.pager.close()


def test_an_optimizer_first_seen_at_its_step_gets_slots_in_a_full_arena() -> None:
    for model in streaming_and_staying():
        optimizer = make_adamw(model)
        backward(model, 0)
        optimizer.step()
        assert model.pager._runtime.engine.staging.num_bytes > 0
        model.pager.close()


def test_what_stays_crosses_the_link_no_more() -> None:
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    train(model, 2)
    engine = model.pager._runtime.engine
    runs = {id(engine.runs_of(layer.weight._pager.segment)[0]) for layer in model.layers}
    with torch.no_grad():
        for step in range(3):
            model(batch(step))
    assert {id(engine.runs_of(layer.weight._pager.segment)[0]) for layer in model.layers} == runs
    assert all(run.stays or run.wired for run in engine.resident_runs() if run.segment.kind == "parameter")
    model.pager.close()


def test_short_of_room_everything_is_let_go_and_the_values_stay() -> None:
    plain, model = make_net(), manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizers = [train(plain, 3), train(model, 3)]
    residency, engine = model.pager._runtime.residency, model.pager._runtime.engine
    expect_waiting(model)
    assert residency.give_up()
    assert engine.staging.num_bytes == 0
    assert not any(fixed(model))
    assert not any(run.stays for run in engine.resident_runs())
    assert not residency.give_up()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, 3, optimizer)
    assert not any(fixed(model)), "let go of until the arena changes"
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "at the end")
    check_equal(optimizers[0].state_dict(), optimizers[1].state_dict(), "states")


def test_an_operation_that_finds_no_room_makes_it() -> None:
    """Views of all states that fit: the slots and what stays give way, before BudgetError is raised."""
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizer = train(model, 2)
    held = [optimizer.state[layer.weight]["exp_avg"].view(-1) for layer in model.layers]
    assert not any(fixed(model))
    assert model.pager._runtime.engine.staging.num_bytes == 0
    assert all(bool(view.isfinite().all()) for view in held)
    model.pager.close()


def test_a_view_of_what_stayed_outlives_it() -> None:
    plain, model = make_net(), manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    optimizers = [train(plain, 2), train(model, 2)]
    views = [weight(plain).detach(), weight(model).detach()]
    model.pager._runtime.residency.give_up()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, 1, optimizer)
    check_equal(views[0], views[1].clone(), "the view after another step")
    with torch.no_grad():
        views[0].mul_(2)
        views[1].mul_(2)
    check_equal(weight(plain).detach(), weight(model).detach().clone(), "written through it")
    del views
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "at the end")


@pytest.mark.parametrize("change", ["load", "half", "data"])
def test_what_stays_takes_new_values(change: str) -> None:
    plain, model = make_net(), manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    torch.manual_seed(3)
    other = Net().state_dict()
    for each in (plain, model):
        train(each, 2)
        if change == "load":
            each.load_state_dict(other)
        elif change == "half":
            each.half()
        else:
            weight(each).data = torch.ones(96, 96)
        each(batch(1).to(weight(each).dtype))
    model.pager.close()
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), change)


def test_more_slots_where_much_is_computed_between_two_gradients() -> None:
    """The ring is a third of the arena then, not a sixth; not where updates run in the forward."""
    few, many, forward = (
        manage(make_net(), device_budget="1200KiB", checks=CHECKS, update_at=update_at)
        for update_at in ("backward", "backward", "step")
    )
    for model in (few, many, forward):
        if model is not few:
            model.pager._runtime.residency.activation_bytes = 2**30
        train(model, 4)
    sizes = [model.pager._runtime.engine.staging.num_bytes for model in (few, many, forward)]
    capacity = few.pager._runtime.arena.capacity_bytes
    assert 0 < sizes[0] <= capacity // 6 < sizes[1] <= capacity // 3
    assert 0 < sizes[2] <= capacity // 6
    for model in (few, many, forward):
        model.pager.close()
        check_equal(dict(few.state_dict()), dict(model.state_dict()), "whatever the ring")


def test_what_parameters_and_gradients_leave_goes_to_states() -> None:
    """Those of the first layers stay; only the others cross the link, once each way a step."""
    plain, model = make_net(), manage(make_net(), device_budget="1200KiB", checks=CHECKS)
    optimizers = [train(each, 2) for each in (plain, model)]
    before = model.pager.statistics()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, 3, optimizer)
    runtime = model.pager._runtime
    moved = model.pager.statistics().page_out_bytes - before.page_out_bytes
    states = [
        [state for known in runtime.optimizers for state in known.paged_states(layer.weight._pager).values()]
        for layer in model.layers
    ]
    assert fixed(model) == [True] * NUM_LAYERS
    assert [all(state.fixed is not None for state in of_layer) for of_layer in states] == [True] * 2 + [
        False
    ] * 4
    assert moved == 3 * 4 * 2 * weight(model).nbytes
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "states that stay")


def test_an_arena_that_has_grown_gets_other_slots() -> None:
    model = manage(make_net(), device_budget=BUDGETS[1], checks=CHECKS)
    plain = make_net()
    optimizers = [train(plain, 2), train(model, 2)]
    runtime: Any = model.pager._runtime
    before = runtime.engine.staging.num_bytes
    runtime.arena.budget_bytes *= 3
    runtime.arena.add_slab(64)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, 3, optimizer)
    after = runtime.engine.staging.num_bytes
    assert after >= 1.5 * before
    train(model, 1, optimizers[1])
    train(plain, 1, optimizers[0])
    assert runtime.engine.staging.num_bytes == after
    model.pager.close()
    check_equal(values_of(plain), values_of(model), "at the end")
