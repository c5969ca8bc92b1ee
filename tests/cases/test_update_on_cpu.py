"""Updates on the CPU in ``step()``: the same training within the kernel's tolerance, nothing lost on the way."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.errors import TierError, TornStateError
from pager.mmu.gradient import _UNSHARED, _num_references
from pager.optim import late, on_cpu
from pager.optim.adamw_cpu import CpuAdam
from pager.optim.cpu_pool import UpdatePool
from pager.optim.step_counts import StepCounts
from pager.optim.streamed import StreamedUnit
from pager.optim.update import Update
from tests.races.scenarios import handle_of

WIDTH = 160
NUM_LAYERS = 8
# All parameters stay on the device, and some of them stream.
BUDGETS = {"staying": "2MiB", "streaming": "700KiB"}
LONG = 60.0


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers of 100 KB in fp32."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS))
    return nn.Sequential(*layers).to(dtype)


class Jobs:
    """The updates that the CPU began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        start = on_cpu.Job.start

        def counting(job: Any, *args: Any) -> None:
            self.names.append(job._binding.name)
            start(job, *args)

        monkeypatch.setattr(on_cpu.Job, "start", counting)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Counts them."""
    return Jobs(monkeypatch)


def manage(model: nn.Module, optimizer: Any, budget: str, **knobs: Any) -> Any:
    """The model's handle."""
    switches = {"daemon": "inline", **knobs.pop("switches", {})}
    checks = Checks(streams="late", happens_before=True, poison=True, page_all=True, **switches)
    knobs = {"update_on": "cpu", **knobs}
    pager.manage(
        model, optimizer, device="cpu", page_size="16KiB", device_budget=budget, checks=checks, **knobs
    )
    return handle_of(model)


def batches(count: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, WIDTH, generator=generator).to(dtype)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    """A backward; its loss."""
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def check_close(model: nn.Module, plain: nn.Module) -> None:
    """The weights are those of plain training, but for the kernel's last bits."""
    ours, theirs = dict(model.state_dict()), dict(plain.state_dict())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def adamw(model: nn.Module, **values: Any) -> torch.optim.AdamW:
    """With a learning rate that shows."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **values})


@pytest.mark.pairwise(where=["cpu", "auto"], budget=BUDGETS, accumulation=[1, 2], daemon=["inline", "thread"])
def test_trains_as_plain_torch_does(
    where: str, budget: str, accumulation: int, daemon: str, jobs: Jobs
) -> None:
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    handle = manage(model, optimizers[1], BUDGETS[budget], update_on=where, switches={"daemon": daemon})
    for number, x in enumerate(batches(6 * accumulation), start=1):
        expected, found = backward(plain, x), backward(model, x)
        torch.testing.assert_close(found, expected)
        if number % accumulation == 0:
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    assert jobs.names
    check_close(model, plain)
    handle.close()
    check_close(model, plain)


@pytest.mark.parametrize("where", ["cpu", "auto"])
@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_bf16_with_masters(update_at: str, where: str, jobs: Jobs) -> None:
    """The weight is its master rounded: a last bit of the master seldom shows."""
    plain, model = make_model(torch.bfloat16), make_model(torch.bfloat16)
    masters = [(p, p.detach().float().requires_grad_()) for p in plain.parameters()]
    of_plain = torch.optim.AdamW([master for _, master in masters], lr=1e-3)
    optimizer = adamw(model)
    handle = manage(model, optimizer, "400KiB", master="float32", update_at=update_at, update_on=where)
    for x in batches(6, torch.bfloat16):
        backward(plain, x)
        backward(model, x)
        for param, master in masters:
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        of_plain.step()
        with torch.no_grad():
            for param, master in masters:
                param.copy_(master)
        optimizer.step()
        optimizer.zero_grad()
    assert jobs.names
    shown = optimizer.state_dict()["state"]
    for index, (param, master) in enumerate(masters):
        ours = list(model.parameters())[index]
        assert (ours.detach() != param.detach()).float().mean() < 1e-3
        for key, theirs in of_plain.state[master].items():
            torch.testing.assert_close(shown[index][key].to(theirs.dtype), theirs, rtol=1e-4, atol=1e-8)
    handle.close()


def test_the_share_is_a_part_and_spread(jobs: Jobs) -> None:
    """A tenth of eight layers, before the CPU's rate is known: one, where half of it is due; not the one used first."""
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["staying"], update_on="auto")
    for x in batches(3):
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    assert jobs.names[0] == "5.0.weight"
    assert not {"0.0.weight"} & set(jobs.names)
    handle.close()


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_can_be_seen_after_the_step(budget: str, jobs: Jobs) -> None:
    """The gradient stays what it was until it is dropped; values and states are those after the step."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS[budget])
    for x in batches(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each, x)
            optimizer.step()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.clone(), theirs.grad)
        saved, expected = (copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers)
        torch.testing.assert_close(saved, expected, rtol=1e-5, atol=1e-6)
    assert jobs.names
    held = [p.grad for p in model.parameters()]
    optimizers[1].zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for gradient, theirs in zip(held, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, theirs.grad)
    check_close(model, plain)
    handle.close()


def test_a_parameter_of_which_a_view_is_held_shows_the_step_at_once(jobs: Jobs) -> None:
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["staying"])
    rows = [each.get_parameter("7.0.weight").detach()[0] for each in (plain, model)]
    for x in batches(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            backward(each, x)
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(rows[1].clone(), rows[0])
    assert "7.0.weight" not in jobs.names
    del rows
    handle.close()


def test_pages_are_not_brought_while_the_cpu_writes_their_home(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["streaming"])
    x = next(batches(1))
    for _ in range(2):
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()  # what the last step began is over
    gate = Gate(monkeypatch)
    backward(model, x)
    jobs.names.clear()
    optimizer.step()
    assert jobs.names
    engine = handle._runtime.engine
    bindings = [b for b in handle._runtime.mmu.bindings.values() if b.name in jobs.names and b.owner is b]
    for binding in bindings:
        engine.prefetch(binding.segment, 0, binding.segment.num_pages, ticks_ahead=0)
        assert not engine.runs_of(binding.segment)
    gate.opened.set()
    model(x)
    assert not engine.being_written
    handle.close()


def test_a_gradient_scaler_leaves_it_to_the_device(jobs: Jobs) -> None:
    """A fused step divides the gradients in place, which the kernel does not."""
    model = make_model()
    optimizer = adamw(model, fused=True)
    handle = manage(model, optimizer, BUDGETS["streaming"])
    scaler = torch.amp.GradScaler("cpu")
    for x in batches(3):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert not jobs.names
    handle.close()


@pytest.mark.parametrize("ours", [False, True])
def test_clipped_gradients_are_stepped_clipped(ours: bool, jobs: Jobs) -> None:
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["streaming"])
    for x in batches(4):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            backward(each, x)
            if each is model and ours:
                norm = handle.clip_grad_norm_(1e-3)
            else:
                norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3, foreach=False)
            assert norm > 1e-3
            optimizer.step()
            optimizer.zero_grad()
    assert jobs.names
    # The weights hardly show it, since Adam takes the scale out again.
    moments = [
        torch.stack([state["exp_avg"].norm() for state in optimizer.state_dict()["state"].values()])
        for optimizer in optimizers
    ]
    torch.testing.assert_close(moments[1], moments[0], rtol=1e-4, atol=0.0)
    check_close(model, plain)
    handle.close()


class Gate:
    """Holds the CPU's updates up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        run = CpuAdam.run

        def held_up(*args: Any) -> None:
            assert self.opened.wait(LONG)
            run(*args)

        monkeypatch.setattr(CpuAdam, "run", held_up)


def train(model: nn.Module, optimizer: Any, count: int) -> None:
    """Steps, of which everything is over."""
    for x in batches(count):
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()


def test_states_are_not_fetched_while_the_cpu_writes_their_home(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter may be the device's in the next step, whose first states are fetched early."""
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["staying"])
    train(model, optimizer, 2)
    gate = Gate(monkeypatch)
    backward(model, next(batches(1)))
    optimizer.step()
    (adopted,) = handle._runtime.optimizers
    binding: Any = model.get_parameter("6.0.weight")._pager  # type: ignore[attr-defined]
    assert binding.name in jobs.names
    unit = Update(adopted, collect=False).units_of(0, binding)[0]
    assert isinstance(unit, StreamedUnit)
    assert adopted.engine.staging.has_free_slot
    assert not unit.fetch(adopted)
    gate.opened.set()
    model.state_dict()
    assert unit.fetch(adopted)
    adopted.engine.staging.give_back(unit)
    handle.close()


def test_another_thread_waits_for_what_the_cpu_is_about_to_write() -> None:
    """It has asked whether an update waits, and comes for the pages a moment later."""
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["streaming"])
    train(model, optimizer, 2)
    engine = handle._runtime.engine
    binding: Any = model.get_parameter("6.0.weight")._pager  # type: ignore[attr-defined]
    engine.evict_segments([binding.segment])
    engine.being_written.add(binding.segment.index)
    found: list[Any] = []

    def read() -> None:
        found.append(engine.acquire(binding.segment, 0, binding.segment.num_pages))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.3)
    assert not found
    assert not engine.runs_of(binding.segment)
    handle._runtime.on_cpu.written([binding.segment])
    thread.join(LONG)
    assert len(found) == 1
    engine.release(found.pop())
    engine.drain()
    handle.close()


def odd_groups() -> list[dict[str, Any]]:
    """Values that torch takes, and the kernel may not."""
    return [{"betas": (0.9, 1.0)}, {"decoupled_weight_decay": False}, {"maximize": True}, {"lr": 0}]


@pytest.mark.parametrize("values", odd_groups(), ids=str)
def test_odd_group_values_mean_what_they_mean_in_torch(values: dict[str, Any]) -> None:
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain, weight_decay=0.1), adamw(model, weight_decay=0.1)]
    handle = manage(model, optimizers[1], BUDGETS["streaming"])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, 2)
        optimizer.param_groups[0].update(values)
        train(each, optimizer, 2)
    check_close(model, plain)
    handle.close()


@pytest.mark.parametrize("count", [2.5, 500.0])
def test_another_count_of_steps_is_seen(count: float, jobs: Jobs) -> None:
    """Also in a tensor that was written to as often as the last one."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["streaming"])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, 3)
        for state in optimizer.state.values():
            other = torch.tensor(count)
            for _ in range(state["step"]._version):
                other += 0
            state["step"] = other
        train(each, optimizer, 2)
    assert jobs.names
    check_close(model, plain)
    handle.close()


def test_a_parameter_that_stayed_when_its_update_began_may_have_to_stream(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device memory runs short while the CPU is at it: the frames are not somebody else's when the new value comes."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["staying"])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, 2)
    gate = Gate(monkeypatch)
    x = next(batches(1))
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        backward(each, x)
        optimizer.step()
    runtime = handle._runtime
    segments = [binding.segment for binding in runtime.paged.bindings.values()]
    assert runtime.residency.give_up()
    runtime.engine.evict_segments(segments)
    gate.opened.set()
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.zero_grad()
        train(each, optimizer, 2)
    check_close(model, plain)
    runtime.engine.drain()
    assert not any(run.pins for segment in segments for run in runtime.engine.runs_of(segment))
    handle.close()


def test_units_that_are_kept_from_step_to_step_do_not_hold_states() -> None:
    """Else a dropped optimizer's states would all be copied out, as for a user who holds them."""
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["staying"], update_on="device", update_at="backward")
    train(model, optimizer, 3)
    (adopted,) = handle._runtime.optimizers
    assert handle._runtime.in_backward._units
    optimizer.state.clear()
    held = [
        state.name
        for binding in adopted.bindings()
        for state in adopted.paged_states(binding).values()
        if _num_references(state) > _UNSHARED
    ]
    assert not held
    handle.close()


def test_a_new_value_that_does_not_reach_the_device_tears_the_model(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = adamw(model)
    handle = manage(model, optimizer, BUDGETS["staying"])
    train(model, optimizer, 2)

    def unplugged(*args: Any) -> None:
        raise TierError("unplugged")

    x = next(batches(1))
    with monkeypatch.context() as patch:
        patch.setattr(handle._runtime.engine.transfers, "send_to_device", unplugged)
        backward(model, x)
        optimizer.step()
        for param in model.parameters():
            with contextlib.suppress(TierError):
                param.sum()
    assert jobs.names
    with pytest.raises(TornStateError, match="unplugged"):
        handle._runtime.torn.check()
    assert not handle._runtime.engine.being_written
    handle.close()


def load_states(model: nn.Module, optimizer: Any) -> Any:
    """The states as they are."""
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer.state_dict()


def write(model: nn.Module, optimizer: Any) -> Any:
    """Into a weight."""
    with torch.no_grad():
        model.get_parameter("6.0.weight").mul_(2)
    return model.get_parameter("6.0.weight").detach().clone()


# With a model and its optimizer: what a user may do after step(), and what is found.
LOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "parameter": lambda model, optimizer: model.get_parameter("6.0.weight").detach().clone(),
    "state": lambda model, optimizer: optimizer.state[model.get_parameter("6.0.weight")]["exp_avg"].clone(),
    "step count": lambda model, optimizer: float(optimizer.state[model.get_parameter("6.0.weight")]["step"]),
    "state_dict": lambda model, optimizer: copy.deepcopy(dict(model.state_dict())),
    "optimizer": lambda model, optimizer: copy.deepcopy(optimizer.state_dict()),
    "copy": lambda model, optimizer: dict(copy.deepcopy(model).state_dict()),
    "forward": lambda model, optimizer: model(next(batches(1))).detach().clone(),
    "load": load_states,
    "write": write,
    "step again": lambda model, optimizer: optimizer.step(),
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("look", LOOKS)
def test_the_step_of_updates_in_backward_does_not_wait_for_the_cpu(
    look: str, budget: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while the CPU is at work; who looks sees what it will have done."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS[budget], update_at="backward")
    train(plain, optimizers[0], 2)
    train(model, optimizers[1], 2)
    gate = Gate(monkeypatch)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        backward(each, next(batches(1)))
        optimizer.step()
        optimizer.zero_grad()
    assert model.get_parameter("6.0.weight")._pager.pending is not None  # type: ignore[attr-defined]
    expected = LOOKS[look](plain, optimizers[0])
    opening = threading.Timer(0.1, gate.opened.set)
    opening.start()
    found = LOOKS[look](model, optimizers[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    opening.join()
    train(plain, optimizers[0], 2)
    train(model, optimizers[1], 2)
    check_close(model, plain)
    handle.close()
    check_close(model, plain)


def test_who_changes_sides_is_asked_for_its_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the count is on the device, to read it is to wait for the device."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["staying"], update_on="auto", update_at="backward")
    shares = itertools.cycle([0.2, 0.7, 0.4])
    monkeypatch.setattr(on_cpu.CpuUpdates, "_find_share", lambda *arguments: next(shares))
    # Whose count was read. (Who is to change sides may do so later: while the CPU is behind, no home is lent.)
    asked: Counter[str] = Counter()
    of, item = StepCounts.of, torch.Tensor.item
    inside: list[str] = []

    def counting_of(counts: StepCounts, binding: Any, step: Tensor) -> int | None:
        inside.append(binding.name)
        try:
            return of(counts, binding, step)
        finally:
            inside.pop()

    def counting_item(tensor: Tensor) -> Any:
        asked.update(inside)
        return item(tensor)

    monkeypatch.setattr(StepCounts, "of", counting_of)
    monkeypatch.setattr(torch.Tensor, "item", counting_item)
    assigned = []
    for x in batches(12):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            backward(each, x)
            optimizer.step()
            optimizer.zero_grad()
        assigned.append(len(handle._runtime.in_backward.on_cpu.assigned))
    assert len(set(assigned[-3:])) == 3
    assert len(asked) > 1
    assert set(asked.values()) == {1}
    check_close(model, plain)
    counts = [float(optimizers[1].state[p]["step"]) for p in model.parameters()]
    assert counts == [12.0] * len(counts)
    handle.close()


def test_gradients_are_lent_a_part_of_the_memory_they_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no home while the CPU is behind is the device's; then the homes come back, and are lent again."""
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    monkeypatch.setattr(on_cpu.CpuUpdates, "_find_share", lambda *arguments: 0.7)
    monkeypatch.setattr(late, "late_elements", lambda **known: 0.0)  # late gradients have homes too
    handle = manage(model, optimizers[1], BUDGETS["staying"], update_on="auto", update_at="backward")
    train(plain, optimizers[0], 3)
    train(model, optimizers[1], 3)
    runtime = handle._runtime
    gradients = [p._pager.gradient for p in model.parameters() if hasattr(p, "_pager")]
    one = gradients[0].segment.num_pages * runtime.space.page_size
    assert len(runtime.in_backward.on_cpu.assigned) > 3
    reserved = handle.statistics().host_bytes
    gate = Gate(monkeypatch)
    backward(model, next(batches(1)))
    backward(plain, next(batches(1)))
    lent = [g for g in gradients if int(runtime.table.home_frame[g.segment.first_page]) >= 0]
    assert 0 < len(lent) * one <= max(len(gradients) * one // 6, 2 * one)
    gate.opened.set()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    train(plain, optimizers[0], 3)
    train(model, optimizers[1], 3)
    assert handle.statistics().host_bytes == reserved
    check_close(model, plain)
    handle.close()


def test_all_threads_update_while_the_link_rests_and_few_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "default_num_threads", lambda: 4)
    limits: list[int] = []
    limit, wait = UpdatePool.limit, on_cpu.Job._wait
    # So that something is left to do when the link rests.
    link_rests = threading.Event()

    def noting(pool: UpdatePool, num_threads: int) -> None:
        limits.append(num_threads)
        limit(pool, num_threads)
        (link_rests.set if num_threads == 4 else link_rests.clear)()

    def wait_for_rest(job: on_cpu.Job) -> None:
        assert link_rests.wait(30)
        wait(job)

    monkeypatch.setattr(UpdatePool, "limit", noting)
    monkeypatch.setattr(on_cpu.Job, "_wait", wait_for_rest)
    monkeypatch.setattr(late, "late_elements", lambda **known: 0.0)  # else it has something to do throughout
    plain, model = make_model(), make_model()
    optimizers = [adamw(plain), adamw(model)]
    handle = manage(model, optimizers[1], BUDGETS["staying"], update_on="auto", update_at="backward")
    updates = handle._runtime.on_cpu
    # Much faster than what the link leaves of the memory, so that the part beside it is small.
    updates._engine.device._link_bytes_per_second = 1e15
    for x in batches(6):
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            backward(net, x)
            optimizer.step()
            optimizer.zero_grad()
    handle.close()
    check_close(model, plain)
    assert updates.rates.alone_per_second > 0
    made, *later = limits
    # Made in the first backward that has something for it; then both in turn.
    assert made == 1
    assert later[:4] == [4, 1, 4, 1]
