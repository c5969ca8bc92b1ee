"""Another host budget while the model trains: which homes move, when, and that no bit changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pager import host_cap
from pager.address_space import Segment
from pager.engine.moving import HomeMover
from pager.errors import BudgetError
from pager.optim.cpu_job import Job
from pager.page_table import Home
from pager.units import parse_size
from tests.cases.same import PAGE, state_bytes
from tests.faults.media import backward, batch, check_equal, make_layers, make_optimizer, train_plainly
from tests.faults.moves import BASE, check_books, homes_of, manage_in_host_memory

ENGINES = [("late", "inline"), ("early", "inline"), ("late", "thread"), ("early", "thread")]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, num_steps: int
) -> list[torch.Tensor]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        optimizer.step()
    return losses


def check_values(model: nn.Module, losses: list[torch.Tensor]) -> None:
    """As without pager."""
    model.pager.close()  # type: ignore[union-attr, operator]
    check_equal([*losses, *(param.detach() for param in model.parameters())], train_plainly(len(losses)))


@pytest.mark.parametrize(("streams", "daemon"), ENGINES)
def test_homes_go_to_the_disk_and_come_back_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: str, daemon: str
) -> None:
    checks = {"streams": streams, "daemon": daemon}
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks=checks)
    host = model.pager._runtime.host
    losses = train(model, optimizer, 0, 2)
    before = homes_of(model)
    full = host.reserved_bytes
    assert before["state", "HOST"] == 20
    model.pager.set(host_budget=BASE + full // 2)
    assert homes_of(model) == before, "not before the step boundary"
    assert model.pager.statistics().host_budget_bytes == BASE + 2 * state_bytes(model)
    losses += train(model, optimizer, 2, 1)
    assert model.pager.statistics().host_budget_bytes == model.pager.config.host_budget == BASE + full // 2
    assert full // 4 < host.reserved_bytes <= full // 2
    assert host.budget_bytes <= full // 2
    check_books(model)
    losses += train(model, optimizer, 3, 3)
    assert host.reserved_bytes <= full // 2
    model.pager.set(host_budget=BASE + 2 * full)
    losses += train(model, optimizer, 6, 2)
    assert homes_of(model) == before
    check_books(model)
    losses += train(model, optimizer, 8, 2)
    check_values(model, losses)


def test_states_of_what_is_used_last_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime

    def on_disk() -> set[str]:
        return {
            f"{binding.segment.kind} {binding.owner.name}"
            for binding in runtime.mmu.bindings.values()
            if int(runtime.table.home[binding.segment.first_page]) == Home.DISK
        }

    layer = 4 * PAGE
    full = runtime.host.reserved_bytes
    monkeypatch.setattr(host_cap, "HIGH", 1.0)
    model.pager.set(host_budget=BASE + full - 3 * layer)
    losses += train(model, optimizer, 2, 1)
    assert on_disk() == {"state 9.weight", "state 8.weight"}
    assert runtime.host.reserved_bytes == full - 3 * layer
    model.pager.set(host_budget=BASE + full - 21 * layer)
    losses += train(model, optimizer, 3, 1)
    states = {f"state {number}.weight" for number in range(10)}
    assert on_disk() == states | {"gradient 9.weight"}
    monkeypatch.setattr(host_cap, "LOW", 1.0)
    monkeypatch.setattr(host_cap, "RETURN_BYTES", layer)
    model.pager.set(host_budget=BASE + full - 19 * layer)
    losses += train(model, optimizer, 4, 1)
    assert on_disk() == states, "one at a time, the gradient first"
    losses += train(model, optimizer, 5, 1)
    assert len([b for b in runtime.mmu.bindings.values() if b.segment.kind == "state"]) == 20
    assert on_disk() == states, "of the first parameter one state came, the other had no room"
    assert homes_of(model)["state", "HOST"] == 1
    losses += train(model, optimizer, 6, 2)
    assert homes_of(model)["state", "HOST"] == 1
    check_books(model)
    check_values(model, losses)


def test_updates_that_wait_are_settled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, device_share=0.7)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime
    waited: list[list[bool]] = []
    move = HomeMover.move

    def watched(mover: HomeMover, segments: Sequence[Segment], target: Home, **more: Any) -> list[Segment]:
        waited.append([runtime.mmu.bindings[s.index].owner.pending is not None for s in segments])
        return move(mover, segments, target, **more)

    monkeypatch.setattr(HomeMover, "move", watched)
    waiting = [b for b in runtime.mmu.bindings.values() if b.pending is not None]
    assert waiting, "step() left something for the next forward"
    model.pager.set(host_budget=BASE + runtime.host.reserved_bytes // 3)
    losses += train(model, optimizer, 2, 2)
    assert waited
    assert not any(map(any, waited))
    check_values(model, losses)


@pytest.mark.parametrize("knobs", [{"update_at": "backward"}, {"master": "float32"}], ids=str)
def test_other_ways_to_update_move_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    """The same training, with the same knobs, where nothing moves."""
    results = []
    for moves in (False, True):
        model = make_layers().to(torch.bfloat16 if "master" in knobs else torch.float32)
        optimizer = make_optimizer(model)
        manage_in_host_memory(monkeypatch, tmp_path, model=model, optimizer=optimizer, **knobs)
        host = model.pager._runtime.host
        for step in range(6):
            if moves and step in (2, 4):
                model.pager.set(
                    host_budget=BASE + (host.reserved_bytes // 2 if step == 2 else 2 * state_bytes(model))
                )
            optimizer.zero_grad()
            model(batch(step).to(next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
            if moves and step == 2:
                assert homes_of(model)["state", "DISK"]
                check_books(model)
        assert not homes_of(model)["state", "DISK"]
        model.pager.close()
        results.append([param.detach() for param in model.parameters()])
    check_equal(results[1], results[0])


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_updates_on_the_cpu_end_before_their_homes_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update_at: str
) -> None:
    """What the CPU updated in host memory the device updates from the disk: equal but for the kernel's last bits."""
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, update_on="cpu", update_at=update_at)
    runtime = model.pager._runtime
    train(model, optimizer, 0, 3)
    assert any(isinstance(binding.pending, Job) for binding in runtime.mmu.bindings.values())
    full = runtime.host.reserved_bytes
    model.pager.set(host_budget=BASE + int(full * 0.6))
    train(model, optimizer, 3, 3)
    assert homes_of(model)["state", "DISK"] > 5
    assert runtime.host.reserved_bytes <= int(full * 0.6)
    model.pager.set(host_budget=BASE + 2 * full)
    train(model, optimizer, 6, 3)
    model.pager.close()
    for ours, theirs in zip(model.parameters(), train_plainly(9)[9:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_state_dict_that_is_held_keeps_its_homes_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime
    held = optimizer.state_dict()["state"]
    view = held[9]["exp_avg"].view(-1)[5:]
    del held[9]["exp_avg"]
    before = {number: {key: value.clone() for key, value in entry.items()} for number, entry in held.items()}
    model.pager.set(host_budget=BASE + runtime.host.reserved_bytes - 10 * 4 * PAGE)
    losses += train(model, optimizer, 2, 1)
    assert homes_of(model)["state", "DISK"] == 0, "all of them are looked at"
    assert homes_of(model)["gradient", "DISK"] > 0
    for number, entry in held.items():
        assert not torch.equal(entry["exp_avg_sq"], before[number]["exp_avg_sq"]), (
            "as in torch, it shows the step's"
        )
    del held, entry, before
    model.pager.set(host_budget=BASE + runtime.host.reserved_bytes - 10 * 4 * PAGE)
    losses += train(model, optimizer, 3, 1)
    kinds = {
        (binding.owner.name, Home(int(runtime.table.home[binding.segment.first_page])))
        for binding in runtime.mmu.bindings.values()
        if binding.segment.kind == "state"
    }
    assert ("9.weight", Home.HOST) in kinds, "a view of one is left"
    assert ("9.weight", Home.DISK) in kinds
    state = optimizer.state[model[9].weight]["exp_avg"]
    assert torch.equal(state.detach().view(-1)[5:], view)
    del state, view
    check_values(model, losses)


def test_pages_that_somebody_uses_stay_and_others_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime
    view = optimizer.state[model[9].weight]["exp_avg"].detach()
    model.pager.set(host_budget=BASE + runtime.host.reserved_bytes - 2 * 4 * PAGE)
    losses += train(model, optimizer, 2, 1)
    assert homes_of(model)["state", "DISK"] >= 2
    binding = optimizer.state[model[9].weight]["exp_avg"]._pager
    assert int(runtime.table.home[binding.segment.first_page]) == Home.HOST
    del view
    check_values(model, losses)


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_disk", "disk_share"), [(True, 1.2), (True, 0.1), (False, 0.0)])
def test_what_cannot_fit_names_the_least_that_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_disk: bool, disk_share: float
) -> None:
    folder = tmp_path if has_disk else None
    model, optimizer = manage_in_host_memory(monkeypatch, folder, disk_share=disk_share)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime
    before = homes_of(model)
    settings = model.pager.config, model.pager.statistics().host_budget_bytes, runtime.host.budget_bytes
    with monkeypatch.context() as patch:
        patch.setattr(host_cap, "NOISE_BYTES", PAGE)
        with pytest.raises(BudgetError, match=r"homes, (of which .* can move|.* no disk with room)") as info:
            model.pager.set(host_budget=1)
        least = parse_size(re.findall(r"least that can be set now is (\S+ \w+);", str(info.value))[0])
        with pytest.raises(BudgetError):
            model.pager.set(host_budget=least - 8 * PAGE)
        assert not runtime.host_cap.has_work
        now = model.pager.config, model.pager.statistics().host_budget_bytes, runtime.host.budget_bytes
        assert now == settings
        model.pager.set(host_budget=least)
        losses += train(model, optimizer, 2, 1)
    assert homes_of(model)["state", "DISK"] == {1.2: before["state", "HOST"], 0.1: 4, 0.0: 0}[disk_share]
    assert model.pager.statistics().host_budget_bytes == least
    assert BASE + runtime.host.reserved_bytes <= least
    losses += train(model, optimizer, 3, 2)
    check_values(model, losses)


def test_room_between_homes_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, None)
    losses = train(model, optimizer, 0, 2)
    runtime = model.pager._runtime
    used = runtime.host.used_bytes
    runtime.homes.reserve_host([20 * PAGE])
    first = runtime.host.allocate(20)
    runtime.host.view(first, 20 * PAGE).fill_(1)
    last = runtime.host.allocate(1) if runtime.host.largest_free else None
    runtime.host.free(first + 5, 15)
    runtime.host.free(first, 5)
    assert last is None
    model.pager.set(host_budget=BASE + used)
    losses += train(model, optimizer, 2, 1)
    assert model.pager.statistics().host_budget_bytes == BASE + runtime.host.reserved_bytes == BASE + used
    check_values(model, losses)


def test_the_last_of_several_wishes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    handle, host = model.pager, model.pager._runtime.host
    before, full = homes_of(model), host.reserved_bytes
    handle.set(host_budget=BASE + full // 2)
    handle.set(host_budget=BASE + 3 * full)
    losses += train(model, optimizer, 2, 1)
    assert (homes_of(model), handle.statistics().host_budget_bytes) == (before, BASE + 3 * full)
    handle.set(host_budget=BASE + full // 2)
    handle.set(host_budget=BASE + full // 3 * 2, prefetch_distance=2)
    losses += train(model, optimizer, 3, 1)
    assert handle.config.host_budget == handle.statistics().host_budget_bytes == BASE + full // 3 * 2
    assert full // 2 < host.reserved_bytes <= full // 3 * 2
    handle.set(host_budget=BASE + full // 2)
    with pytest.raises(BudgetError):
        handle.set(host_budget=5)
    losses += train(model, optimizer, 4, 1)
    assert handle.statistics().host_budget_bytes == BASE + full // 2, (
        "what was refused has not changed the wish before"
    )
    check_values(model, losses)


def test_the_same_budget_again_makes_room_for_what_has_grown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process takes more than its budget, by what is not ours: pressure moves no home, a wish does."""
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full)
    monkeypatch.setattr("tests.faults.moves.BASE", BASE + full // 2)
    monkeypatch.setattr(host_cap, "SECONDS_BETWEEN_LOOKS", 0.0)
    before = homes_of(model)
    losses += train(model, optimizer, 2, 2)
    assert homes_of(model) == before
    assert "Set to the same again, it has homes move to the disk" in caplog.text
    handle.set(host_budget=BASE + full)
    losses += train(model, optimizer, 4, 2)
    assert host.reserved_bytes <= host.budget_bytes <= full - full // 2, (
        "no home is made beside what has grown"
    )
    assert handle.statistics().host_budget_bytes == BASE + full
    check_values(model, losses)


def test_what_is_reserved_and_not_written_to_yet_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step: states have homes and no values, so nothing is copied, and the promise holds later."""
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    host = model.pager._runtime.host
    full = host.reserved_bytes
    assert host.untouched_bytes > full // 2
    model.pager.set(host_budget=BASE + full // 2)
    assert model.pager._runtime.host_cap.has_work
    losses = train(model, optimizer, 0, 3)
    assert host.reserved_bytes <= full // 2
    check_books(model)
    check_values(model, losses)


def test_without_a_step_nothing_moves_and_closing_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses = train(model, optimizer, 0, 2)
    before = homes_of(model)
    model.pager.set(host_budget=BASE + model.pager._runtime.host.reserved_bytes // 2)
    with torch.no_grad():
        model(batch(5))
    assert homes_of(model) == before
    check_values(model, losses)


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("where", ["forward", "backward", "between", "accumulate"])
def test_a_wish_may_be_told_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, update_at: str
) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, update_at=update_at)
    handle, host = model.pager, model.pager._runtime.host
    train(model, optimizer, 0, 2)
    full = host.reserved_bytes
    plain = make_layers()
    plain_optimizer = make_optimizer(plain)
    train(plain, plain_optimizer, 0, 2)

    def wish() -> None:
        now = host.reserved_bytes
        handle.set(host_budget=BASE + full // 2)
        assert host.reserved_bytes == now, "nothing moves before the boundary"

    for managed in (True, False):
        net, stepper = (model, optimizer) if managed else (plain, plain_optimizer)
        stepper.zero_grad()
        hooks = []
        if managed and where == "forward":
            hooks.append(net[4].register_forward_hook(lambda *arguments: wish()))
        if managed and where == "backward":
            hooks.append(net[4].register_full_backward_hook(lambda *arguments: wish()))
        with handle.accumulate() if managed else contextlib.nullcontext():
            backward(net, 2)
            if managed and where == "accumulate":
                wish()
        for hook in hooks:
            hook.remove()
        backward(net, 3)
        if managed and where == "between":
            wish()
        stepper.step()
        train(net, stepper, 4, 2)
    assert host.reserved_bytes <= full // 2
    handle.close()
    check_equal([*model.parameters()], [*plain.parameters()])
