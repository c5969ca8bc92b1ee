"""Case 33: a step that was interrupted anywhere is finished, not repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pager.optim.update import Update
from tests import models
from tests.cases.bombs import Bomb, Stop
from tests.cases.same import check_equal, manage, train, train_step


class Fragile(torch.optim.Optimizer):
    """AdamW-like, slow to the eye: it ticks a bomb between its operations, also half way through a tensor."""

    bomb: Bomb | None = None

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "decay": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["n"] = 0
                self._tick()
                p.grad.add_(p, alpha=group["decay"])  # in place, as coupled decay often is
                self._tick()
                state["m"].mul_(0.9).add_(p.grad)
                state["n"] += 1
                self._tick()
                p.sub_(state["m"], alpha=group["lr"] / state["n"])
                self._tick()

    def _tick(self) -> None:
        if Fragile.bomb is not None:
            Fragile.bomb.tick()


@pytest.fixture(autouse=True)
def _no_bomb() -> Any:
    yield
    Fragile.bomb = None


def expected_run(steps: int) -> tuple[Any, torch.optim.Optimizer]:
    """The uninterrupted run."""
    case = models.make_mlp(depth=1)
    optimizer = Fragile(case.model.parameters())
    train(case, case.model, optimizer, range(steps))
    return case.model, optimizer


def interrupted_run(at: int, after: Callable[[Any, torch.optim.Optimizer], None]) -> tuple[Any, Any, bool]:
    """Interrupt the second step at the ``at``-th operation; ``after`` is what the user then does."""
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        train_step(case, model, step)
        Fragile.bomb = bomb = Bomb(at) if step == 1 else Bomb(10**6)
        try:
            optimizer.step()
        except Stop:
            Fragile.bomb = None
            after(model, optimizer)
        if step == 1:
            fired = bomb.fired
        Fragile.bomb = None
    return model, optimizer, fired


def step_again(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Calls ``step()`` again: the rest of the units."""
    optimizer.step()


def go_on(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Goes on with the next batch: the next read of anything finishes the step."""


def change_lr_and_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The step is finished with the values that it began with."""
    for group in optimizer.param_groups:
        group["lr"] = 1e6
    model(torch.zeros(1, 96))
    for group in optimizer.param_groups:
        group["lr"] = 0.05


def evaluate(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Looks at the model: never half a step."""
    x = torch.linspace(-1, 1, 96)
    expected = expected_run(2)[0]
    with torch.no_grad():
        check_equal(expected(x), model(x), "evaluation")


def zero_in_place(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Zeroes gradients that the step still needs, also those of small tensors."""
    for param in reversed(list(model.parameters())):
        if param.grad is not None:
            param.grad.zero_()


def drop_small_first(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Drops gradients, those of biases first."""
    for param in reversed(list(model.parameters())):
        param.grad = None


def save(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Saves what it has; a checkpoint never holds half a step."""
    check_equal(dict(expected_run(2)[0].state_dict()), dict(model.state_dict()), "saved model")
    check_equal(expected_run(2)[1].state_dict()["state"], optimizer.state_dict()["state"], "saved optimizer")


def count_operations() -> int:
    """How many places there are to interrupt one step."""
    counted = Bomb(10**6)
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    train(case, model, optimizer, range(1))  # probes and makes state
    train_step(case, model, 1)
    Fragile.bomb = counted
    optimizer.step()
    Fragile.bomb = None
    model.pager.close()
    return 10**6 - counted.left


@pytest.mark.parametrize(
    "after", [step_again, go_on, change_lr_and_step, save, evaluate, zero_in_place, drop_small_first]
)
def test_a_step_interrupted_anywhere_is_finished_not_repeated(after: Callable[..., None]) -> None:
    plain, plain_optimizer = expected_run(3)
    num = count_operations()
    assert num >= 24
    places = range(num) if after is go_on else range(1, num, 7)
    for at in places:
        model, optimizer, fired = interrupted_run(at, after)
        assert fired, at
        model.pager.close()
        check_equal(dict(plain.state_dict()), dict(model.state_dict()), f"interrupted at {at}")
        check_equal(plain_optimizer.state_dict()["state"], optimizer.state_dict()["state"], f"state, at {at}")


def ticking(method: Callable[..., Any], bomb: Bomb, *, before: bool) -> Callable[..., Any]:
    """``method`` with a tick of the bomb before or after each call."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            bomb.tick()
        result = method(self, *args, **kwargs)
        if not before:
            bomb.tick()
        return result

    return wrapped


def ticking_acquire(method: Callable[..., Any], bomb: Bomb) -> Callable[..., Any]:
    """An acquisition of pages that may go off when it has them; it gives them back then."""

    def acquire(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = method(self, *args, **kwargs)
        try:
            bomb.tick()
        except Stop:
            self.release(run)
            raise
        return run

    return acquire


@pytest.mark.parametrize("phase", ["_commit", "_compute", "_done"])
def test_interrupts_between_the_phases_of_a_unit(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before or after each phase of each unit, the small unit included."""
    from pager.optim import update as module

    case, twin = models.make_mlp(depth=1), models.make_mlp(depth=1)
    plain = torch.optim.AdamW(twin.model.parameters(), lr=0.01)
    train(twin, twin.model, plain, range(8))
    model = manage(case.model, share=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fired = 0
    for step in range(8):
        optimizer.zero_grad()
        train_step(case, model, step)
        bomb = Bomb(step, Stop)
        with monkeypatch.context() as patched:
            for cls in (module.PagedUnit, module.SmallUnit):
                original = getattr(cls, phase, None)
                if original is None:
                    continue

                patched.setattr(cls, phase, ticking(original, bomb, before=bool(step % 2)))
            try:
                optimizer.step()
            except Stop:
                fired += 1
        if step % 3 and bomb.fired:
            optimizer.step()
    assert fired >= 3
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), phase)
    check_equal(plain.state_dict()["state"], optimizer.state_dict()["state"], phase)


@pytest.mark.parametrize("at", [0, 3, 9, 17])
def test_interrupts_in_the_engine_during_a_step(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C lands in the middle of a fault: before pages are acquired, and after."""
    from pager.engine.engine import Engine

    case, twin = models.make_mlp(depth=1), models.make_mlp(depth=1)
    plain = torch.optim.AdamW(twin.model.parameters(), lr=0.01)
    train(twin, twin.model, plain, range(4))
    model = manage(case.model, share=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    original = Engine.acquire
    for step in range(4):
        optimizer.zero_grad()
        train_step(case, model, step)
        bomb = Bomb(at)

        with monkeypatch.context() as patched, contextlib.suppress(Stop):
            if step == 1:
                patched.setattr(Engine, "acquire", ticking(original, bomb, before=True))
            if step == 2:
                patched.setattr(Engine, "acquire", ticking_acquire(original, bomb))
            optimizer.step()
        assert bomb.fired == (step in (1, 2))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")
    check_equal(plain.state_dict()["state"], optimizer.state_dict()["state"], "state")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_stay_until_the_interrupted_step_is_done(set_to_none: bool) -> None:
    """`zero_grad` right after the interrupt must not take away what the step still needs."""
    plain, plain_optimizer = expected_run(2)
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    train(case, model, optimizer, range(1))
    optimizer.zero_grad()
    train_step(case, model, 1)
    Fragile.bomb = Bomb(5)
    with pytest.raises(Stop):
        optimizer.step()
    Fragile.bomb = None
    optimizer.zero_grad(set_to_none=set_to_none)
    model.pager.close()
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), "weights")
    check_equal(plain_optimizer.state_dict()["state"], optimizer.state_dict()["state"], "state")


def test_two_interrupted_optimizers_are_both_finished() -> None:
    def run(model: Any, interrupted: bool) -> None:
        case = models.make_mlp(depth=1)
        params = list(model.parameters())
        optimizers = [Fragile(params[:2]), Fragile(params[2:])]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            train_step(case, model, step)
            for at, optimizer in zip((6, 9), optimizers, strict=True):
                Fragile.bomb = Bomb(at) if interrupted and step == 1 else None
                try:
                    optimizer.step()
                except Stop:
                    assert Fragile.bomb is not None
                Fragile.bomb = None

    plain, paged = models.make_mlp(depth=1).model, manage(models.make_mlp(depth=1).model, share=0.3)
    run(plain, False)
    run(paged, True)
    paged.pager.close()
    check_equal(dict(plain.state_dict()), dict(paged.state_dict()), "weights")


def test_a_gradient_that_comes_after_the_interrupt_is_not_part_of_the_step() -> None:
    """Backward without `zero_grad`: accumulation onto gradients that the unfinished step still needs."""
    plain, plain_optimizer = models.make_mlp(depth=1), None
    plain_optimizer = Fragile(plain.model.parameters())
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    for each, its, bomb in ((plain.model, plain_optimizer, None), (model, optimizer, Bomb(9))):
        train(case, each, its, range(1))
        train_step(case, each, 1)
        Fragile.bomb = bomb
        try:
            its.step()
        except Stop:
            assert each is model
        Fragile.bomb = None
        train_step(case, each, 2)
        its.step()
    model.pager.close()
    check_equal(dict(plain.model.state_dict()), dict(model.state_dict()), "weights")


def test_close_finishes_an_interrupted_step() -> None:
    plain, _ = expected_run(2)
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    train(case, model, optimizer, range(1))  # probes the class, which would set the bomb off
    optimizer.zero_grad()
    train_step(case, model, 1)
    Fragile.bomb = Bomb(7)
    with pytest.raises(Stop):
        optimizer.step()
    Fragile.bomb = None
    model.pager.close()
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), "weights")


def test_update_is_the_one_that_was_interrupted() -> None:
    """The second ``step()`` goes on with the same update, it does not begin another."""
    case = models.make_mlp(depth=1)
    model = manage(case.model, share=0.3)
    optimizer = Fragile(model.parameters())
    train(case, model, optimizer, range(1))
    train_step(case, model, 1)
    Fragile.bomb = Bomb(6)
    with pytest.raises(Stop):
        optimizer.step()
    Fragile.bomb = None
    begun = model.pager._runtime.optimizers[0].update
    assert isinstance(begun, Update)
    assert begun.todo
    optimizer.step()
    assert not begun.todo
    assert model.pager.statistics().num_steps == 2
    model.pager.close()
