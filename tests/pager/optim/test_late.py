"""Updates inside backward that wait for its end: which, and that nobody sees that they waited."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pager.errors import ConfigError, TornStateError
from pager.optim import late
from pager.optim import update as update_module
from pager.optim.deferred import Deferred
from pager.optim.late import LateUpdates
from pager.optim.streamed import StreamedUnit
from pager.policies.update_split import late_elements
from pager.residency import Residency
from pager.statistics import Counters
from tests import models
from tests.cases.optimizers import OPTIMIZERS
from tests.cases.plainly import MAKERS, Pair, checks
from tests.cases.same import copied, train_step

# Weights stay, some states stream, and some more must when gradients wait.
BUDGET = 0.8


@pytest.fixture(autouse=True)
def chooses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A third of the elements, from the third step on: what was measured of models as small as these says nothing."""
    monkeypatch.setattr(Residency, "lent_bytes", lambda self: 2**20)

    def wanted_elements(self: LateUpdates, order: Any) -> float:
        self._wanted = self._wanted or 0.34 * sum(binding.segment.num_elements for binding, *_ in order)
        return self._wanted

    monkeypatch.setattr(LateUpdates, "_wanted_elements", wanted_elements)
    yield
    Pair.close_all()


def make_mlp() -> models.Case:
    return models.make_mlp(width=160, depth=8)


def make_pair(name: str = "adamw", make_case: Callable[[], models.Case] = make_mlp, **knobs: Any) -> Pair:
    knobs = {"update_at": "backward", "master": False, "dtype": torch.float32, "checks": checks(), **knobs}
    example = make_mlp().make_batch(0)[0]
    return Pair(make_case, (MAKERS | OPTIMIZERS)[name], budget=BUDGET, example_inputs=example, **knobs)


def late_of(pair: Pair) -> LateUpdates:
    found: LateUpdates = pair.model.pager._runtime.in_backward._late
    return found


def late_names(pair: Pair) -> set[str]:
    return {binding.name for binding in late_of(pair).chosen}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters each backward left to its end."""
    found: list[int] = []
    run_beside = Deferred.run_beside

    def counted(self: Deferred, stream: Any) -> None:
        found.append(len(self._units))
        run_beside(self, stream)

    monkeypatch.setattr(Deferred, "run_beside", counted)
    return found


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize(
    "switches", [{}, {"streams": "early"}, {"daemon": "inline"}, {"lazy_compute": True}], ids=str
)
def test_equals_a_step_after_backward(switches: dict[str, Any], master: bool, runs: list[int]) -> None:
    dtype = torch.bfloat16 if master else torch.float32
    lazy = {"lazy_compute"} & set(switches)
    pair = make_pair(checks=checks(**({} if lazy else switches)), master=master, dtype=dtype)
    pair.model.pager._runtime.device.lazy_compute = bool(lazy)
    pair.train(5)
    pair.train(2, micro_batches=3)
    pair.train(2)
    assert runs
    assert all(runs)
    pair.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer(name: str) -> None:
    pair = make_pair(name)
    pair.train(6)
    pair.close()


def test_those_that_the_next_forward_uses_last_are_late() -> None:
    pair = make_pair()
    pair.train(3)
    order = [name for name, param in pair.model.named_parameters() if hasattr(param, "_pager")]
    assert late_names(pair) == set(order[-3:])
    pair.close()


def test_they_run_beside_the_compute_in_the_order_of_the_next_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = make_pair()
    pair.train(4)
    device = pair.model.pager._runtime.device
    seen: list[str] = []
    run = StreamedUnit.run

    def noting(unit: StreamedUnit, update: Any) -> None:
        if unit.progress.binding in late_of(pair).chosen:
            assert device.current_stream() is device.beside
            seen.append(unit.progress.binding.name)
        run(unit, update)

    monkeypatch.setattr(StreamedUnit, "run", noting)
    pair.train(1)
    order = [name for name, param in pair.model.named_parameters() if hasattr(param, "_pager")]
    assert list(dict.fromkeys(seen)) == order[-3:]
    pair.close()


def test_what_cannot_stream_any_more_is_updated_at_once(
    monkeypatch: pytest.MonkeyPatch, runs: list[int]
) -> None:
    """It was chosen for its slices; then the slots are gone, as where memory is short."""
    pair = make_pair(frozen=[f"{index}.bias" for index in range(0, 17, 2)])
    pair.train(4)
    assert runs
    chosen = set(late_of(pair).chosen)
    monkeypatch.setattr(update_module, "can_stream", lambda adopted, binding, keys: binding not in chosen)
    before = len(runs)
    for step in (50, 51):
        for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
            trainer.zero_grad()
            train_step(pair.case, model, step)
        pair.optimizer.zero_grad()  # drops nothing that step() would still need
        pair.plain.step()
        pair.optimizer.step()
    assert len(runs) == before
    monkeypatch.undo()
    pair.close()


class Gated(nn.Module):
    """Uses its last two layers in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(9))
        self.num_used = 9

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.num_used]:
            x = torch.tanh(layer(x))
        return x


def test_what_waits_of_an_earlier_step_is_done_first() -> None:
    """A step over accumulated gradients alone leaves updates for the next use of their parameters; if that is none."""

    def make_gated() -> models.Case:
        mlp = make_mlp()
        torch.manual_seed(0)
        return models.Case("gated", Gated(), mlp.make_batch, mlp.loss)

    pair = make_pair(make_case=make_gated)
    pair.train(4)
    for step, is_last in ((50, False), (51, True)):
        pairs: list[tuple[Any, Any]] = [(pair.plain.model, pair.plain), (pair.model, pair.optimizer)]
        for model, trainer in pairs:
            model.num_used = 7 if is_last else 9
            trainer.zero_grad()
            with (
                contextlib.nullcontext() if is_last or model is pair.plain.model else model.pager.accumulate()
            ):
                train_step(pair.case, model, step)
            if is_last and model is pair.model:
                bindings = pair.model.pager._runtime.mmu.bindings.values()
                assert all(binding.pending is None for binding in bindings)
            trainer.step()
    pair.close()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_write_to_a_state_dict_that_is_held_counts(key: str) -> None:
    pair = make_pair()
    pair.train(4)
    chosen = next(iter(late_of(pair).chosen))
    index = [name for name, _ in pair.model.named_parameters()].index(chosen.name)
    held = pair.optimizer.state_dict()
    for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
        trainer.zero_grad()
        train_step(pair.case, model, 50)
        trainer.step()
    with torch.no_grad():
        pair.optimizer.state_dict()["state"][index][key].mul_(2)
        pair.plain.optimizer.state_dict()["state"][index][key].mul_(2)
    for step in (51, 52):
        for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
            trainer.zero_grad()
            train_step(pair.case, model, step)
            trainer.step()
    del held
    pair.close()


def test_their_room_is_taken_from_states() -> None:
    def staying_bytes(pair: Pair, kind: str) -> int:
        bindings = pair.model.pager._runtime.mmu.bindings.values()
        return sum(b.segment.num_bytes for b in bindings if b.keep and b.segment.kind == kind)

    pair = make_pair()
    pair.train(1)
    before = staying_bytes(pair, "state")
    pair.train(3)
    runtime = pair.model.pager._runtime
    late_bytes = sum(b.segment.num_bytes for b in late_of(pair).chosen)
    after = staying_bytes(pair, "state")
    assert after < before
    taken = late_bytes + after + staying_bytes(pair, "parameter") + runtime.engine.staging.num_bytes
    assert late_bytes > 0
    assert taken <= runtime.arena.capacity_bytes
    pair.close()


# -- nobody sees that they waited ------------------------------------------------------------------


def test_step_counts_move_on_with_the_backward() -> None:
    pair = make_pair()
    pair.train(4)
    chosen = next(iter(late_of(pair).chosen))
    state = pair.optimizer.state[chosen.tensor]
    pair.optimizer.zero_grad()
    train_step(pair.case, pair.model, 50)
    assert float(state["step"]) == 5
    with pytest.raises(ConfigError, match=r"\.grad was asked for"):
        assert chosen.tensor.grad
    pair.optimizer.step()
    assert float(state["step"]) == 5


@pytest.mark.parametrize("between", ["zero_grad", "state_dict", "rate"])
def test_what_is_done_before_step_changes_no_update(between: str) -> None:
    """Of paged parameters: all have had theirs. Biases are stepped in ``step()``."""
    pair = make_pair(frozen=[f"{index}.bias" for index in range(0, 17, 2)])
    pair.train(4)
    for step in (50, 51):
        for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
            trainer.zero_grad()
            train_step(pair.case, model, step)
        pair.plain.step()
        if between == "zero_grad":
            pair.optimizer.zero_grad()
        elif between == "state_dict":
            pair.model.state_dict()
            pair.optimizer.state_dict()
        else:
            pair.optimizer.param_groups[0]["lr"] *= 2
        pair.optimizer.step()
        if between == "rate":
            pair.optimizer.param_groups[0]["lr"] /= 2
    pair.close()


@pytest.mark.parametrize("kind", ["parameter", "state"])
def test_a_view_that_is_held_shows_the_new_values_at_once(kind: str, runs: list[int]) -> None:
    pair = make_pair()
    pair.train(4)
    chosen = next(iter(late_of(pair).chosen))
    views: list[Tensor] = []
    for model, optimizer in ((pair.plain.model, pair.plain.optimizer), (pair.model, pair.optimizer)):
        param = model.get_parameter(chosen.name)
        views.append((param if kind == "parameter" else optimizer.state[param]["exp_avg"]).detach()[:2])
    num_late = runs[-1]
    for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
        trainer.zero_grad()
        train_step(pair.case, model, 50)
        trainer.step()
    assert runs[-1] == num_late - 1
    assert torch.equal(*views)
    views.clear()
    pair.close()


@pytest.mark.parametrize("place", ["last gradient", "end of the backward"])
def test_gradients_that_wait_are_dropped_with_a_backward_that_stopped(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    pair = make_pair()
    pair.train(4)
    saved = {name: value.clone() for name, value in pair.model.state_dict().items()}
    states = copied(pair.optimizer.state_dict())
    calls = 0

    def stop(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 or place == "last gradient":
            raise ZeroDivisionError
        return units(*arguments)

    units = LateUpdates._units
    hook = pair.model.get_parameter("0.weight").register_hook(
        stop if place == "last gradient" else lambda _: None
    )
    with monkeypatch.context() as patched:
        if place != "last gradient":
            patched.setattr(LateUpdates, "_units", stop)
        pair.optimizer.zero_grad()
        with pytest.raises(ZeroDivisionError):
            train_step(pair.case, pair.model, 50)
    hook.remove()
    with pytest.raises(TornStateError):
        pair.optimizer.step()
    pair.model.load_state_dict(saved)
    pair.optimizer.load_state_dict(states)
    for step in range(60, 63):
        pair.plain.zero_grad()
        for param in pair.model.parameters():
            if type(param) is torch.nn.Parameter:
                param.grad = None  # the others' were used up, or dropped
        for model in (pair.plain.model, pair.model):
            train_step(pair.case, model, step)
        pair.plain.step()
        pair.optimizer.step()
    pair.close()


def interrupted_step(pair: Pair) -> None:
    """A step of both, the managed one's backward with an interrupt."""
    for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
        trainer.zero_grad()
        with contextlib.nullcontext() if model is pair.plain.model else pytest.raises(KeyboardInterrupt):
            train_step(pair.case, model, 50)
        trainer.step()


@pytest.mark.parametrize("place", range(3))
def test_an_interrupt_leaves_the_rest_to_the_next_use(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    pair = make_pair()
    pair.train(4)
    calls = 0
    run = Deferred.run

    def interrupted(self: Deferred, binding: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == place + 1:
            signal.raise_signal(signal.SIGINT)
        run(self, binding)

    monkeypatch.setattr(Deferred, "run", interrupted)
    interrupted_step(pair)
    assert calls > place
    pair.check()
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("unit", range(2))
def test_an_interrupt_between_two_slices_of_a_parameter(monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    """The first slice was stepped beside the compute, the others are on the compute stream: both read one gradient."""
    pair = make_pair()
    pair.train(4)
    calls = 0
    run = StreamedUnit.run

    def interrupted(self: StreamedUnit, update: Any) -> None:
        nonlocal calls
        if self.progress.binding in late_of(pair).chosen:
            calls += 1
            if calls == unit + 2:
                signal.raise_signal(signal.SIGINT)
        run(self, update)

    monkeypatch.setattr(StreamedUnit, "run", interrupted)
    interrupted_step(pair)
    assert calls > unit + 2
    pair.check()
    pair.train(2)
    pair.close()


def test_a_new_optimizer_after_a_load() -> None:
    pair = make_pair(frozen=[f"{index}.bias" for index in range(0, 17, 2)])
    pair.train(4)
    assert late_of(pair).chosen
    pair.model.load_state_dict(copied(dict(pair.model.state_dict())))
    del pair.optimizer
    gc.collect()
    pair.optimizer = MAKERS["adamw"](list(pair.model.parameters()))
    pair.plain.optimizer = MAKERS["adamw"](pair.plain.masters)
    pair.train(5)
    assert late_of(pair).chosen
    pair.close()


# -- how many --------------------------------------------------------------------------------------


class _Rests:
    """A device whose link rests for so many seconds between two backwards, and brings 1e7 elements a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
        monkeypatch.undo()  # what was chosen by hand
        monkeypatch.setattr(Residency, "lent_bytes", lambda self: 2**20)
        self.seconds = 0.01
        self.stall_seconds = 1.0
        self.asked: list[float] = []
        device = pair.model.pager._runtime.device
        rests = self

        class Moment:
            def seconds_until(self, later: Any) -> float | None:
                return rests.seconds

        monkeypatch.setattr(type(device.compute), "moment", lambda stream: Moment())
        monkeypatch.setattr(device, "drain_stall_seconds", lambda: self.stall_seconds)
        monkeypatch.setattr(device, "_link_bytes_per_second", 8e7)  # two fp32 states
        monkeypatch.setattr(late, "late_elements", self.elements)

    def elements(self, *, num_elements: int, **known: float) -> float:
        """What is found, but for the limit in a share of all."""
        self.asked.append(known["stall_seconds"])
        return late_elements(num_elements=10**9, **known)


def test_as_many_as_the_link_brings_while_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    rests = _Rests(monkeypatch, pair)
    rests.seconds = 0.0052
    pair.train(6)
    assert len(late_names(pair)) == 2  # of 25,600 elements each
    rests.seconds = 0.0047  # about the same
    pair.train(9)
    assert len(late_names(pair)) == 2
    rests.seconds = 0.0027
    pair.train(2)
    assert len(late_names(pair)) == 2  # a short batch now and then
    pair.train(7)
    assert len(late_names(pair)) == 1
    rests.seconds = 0.1  # it may be that it waits for these updates themselves
    pair.train(9)
    assert len(late_names(pair)) == 2
    pair.close()


@pytest.mark.parametrize("stall_seconds", [0.0, 0.005])
def test_no_more_than_the_compute_waits_for(monkeypatch: pytest.MonkeyPatch, stall_seconds: float) -> None:
    pair = make_pair()
    rests = _Rests(monkeypatch, pair)
    rests.stall_seconds = stall_seconds
    add = Counters.add

    def without_the_hosts(counters: Counters, **counts: Any) -> None:
        if counts.get("stall_seconds", 0.0) in (0.0, stall_seconds):
            add(counters, **counts)

    monkeypatch.setattr(Counters, "add", without_the_hosts)
    pair.train(6)
    assert rests.asked == [pytest.approx(stall_seconds)]
    assert len(late_names(pair)) == round(stall_seconds * 1e7 / 25_600)
    pair.close()


def test_steps_that_use_other_layers_in_turn_choose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_gated() -> models.Case:
        mlp = make_mlp()
        torch.manual_seed(0)
        return models.Case("gated", Gated(), mlp.make_batch, mlp.loss)

    pair = make_pair(make_case=make_gated)
    _Rests(monkeypatch, pair)
    pair.train(7)
    chosen = late_names(pair)
    assert chosen
    choices = 0
    keep_states = Residency._keep_states

    def counted(self: Residency, *arguments: Any) -> None:
        nonlocal choices
        choices += 1
        keep_states(self, *arguments)

    monkeypatch.setattr(Residency, "_keep_states", counted)
    for step in range(6):
        for model in (pair.plain.model, pair.model):
            model.num_used = 9 if step % 2 else 5
        pair.train(1)
        assert late_names(pair) == chosen
    assert not choices
    pair.close()


def test_the_link_is_measured_only_where_it_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(
        make_mlp, MAKERS["adamw"], budget=0.3, update_at="backward", master=False, dtype=torch.float32
    )
    rests = _Rests(monkeypatch, pair)
    device = pair.model.pager._runtime.device
    monkeypatch.setattr(device, "_link_bytes_per_second", None)
    pair.train(6)
    assert not rests.asked
    assert device._link_bytes_per_second is None
    pair.close()
