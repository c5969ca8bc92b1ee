"""Optimizers that keep values beside ``self.state``: exactly as in torch, or refused before anything moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from tests import models
from tests.cases import keeping
from tests.cases.bombs import Bomb, Stop
from tests.cases.refusals import check_refused
from tests.cases.same import Report, check_equal, check_same, manage, train, train_step


def two_groups(model: Any) -> list[dict[str, Any]]:
    """Parameters in two groups of different rates."""
    params = list(model.parameters())
    return [{"params": params[3:], "lr": 0.1}, {"params": params[:3], "lr": 0.02}]


EXACT = {
    "warm-up": keeping.WarmUp,
    "late": keeping.LateCount,
    "first group": keeping.FirstGroupLeads,
    "polyak": keeping.Polyak,
    "muon": keeping.Muon,
    "clipped": keeping.ClippedRms,
}


def kept(optimizer: Any) -> dict[str, Any]:
    """What can be compared of an optimizer's attributes."""
    names = ("n", "history", "count", "loss")
    found = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
    schedule = getattr(optimizer, "schedule", None)
    return {**found, "schedule": schedule.n if schedule is not None else None, "k": optimizer.state.get("k")}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("way", ["plain", "closure"])
def test_what_is_kept_beside_states_is_as_in_torch(name: str, way: str) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = EXACT[name](two_groups(model))
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: report("before", kept(opt)))
        optimizer.register_step_post_hook(lambda opt, args, kwargs: report("after", kept(opt)))
        for step in range(4):
            optimizer.zero_grad()
            if way == "plain":
                report("loss", train_step(case, model, step))
                optimizer.step()
            else:
                report("loss", optimizer.step(lambda step=step: train_step(case, model, step)))
            report("kept", kept(optimizer))
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script, share=0.3)


def test_what_a_hook_sets_before_the_step_counts() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = keeping.WarmUp(two_groups(model))

        def jump(opt: Any, args: Any, kwargs: Any) -> None:
            opt.n += 1

        optimizer.register_step_pre_hook(jump)
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            optimizer.step()
            report("weights", [optimizer.n, *model.parameters()])

    check_same(lambda: models.make_mlp().model, script)


def test_arguments_of_step_reach_every_unit() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = keeping.WarmUp(model.parameters())
        for step in range(2):
            optimizer.zero_grad()
            train_step(case, model, step)
            optimizer.step(None, 0.25)
            optimizer.step(scale=0.5)
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_an_argument_that_cannot_be_handed_on_is_refused() -> None:
    case = models.make_mlp()
    model = manage(case.model)
    optimizer: Any = keeping.WarmUp(model.parameters())
    train_step(case, model, 0)
    with pytest.raises(pager.ConfigError, match=r"WarmUp.step\(\) was given a list"):
        optimizer.step(scale=[0.5])
    assert optimizer.n == 0
    optimizer.step()
    assert optimizer.n == 1
    model.pager.close()


@pytest.mark.parametrize(
    ("optimizer_class", "match"),
    [
        (keeping.KeyedByParameter, r"leaves in self\.m depends on the parameters.*self\.state\[p\]"),
        (keeping.KeyedById, r"leaves in self\.m depends on the parameters.*self\.state\[p\]"),
        (keeping.MadeAtOnce, r"self\.m holds parameters.*self\.state\[p\]"),
        (keeping.SlowWeights, r"self\.slow\[0\] holds parameters.*self\.state\[p\]"),
        (keeping.KeepsItself, r"self\.state\[p\]\['old_p'\].*\.clone\(\)"),
        (keeping.KeepsGradient, r"self\.state\[p\]\['last'\].*\.clone\(\)"),
        (keeping.Wraps, r"self\.base_optimizer is another optimizer.*Pass that one to pager\.manage"),
        (keeping.HoldsModel, r"self\.nets\['a'\] is a module"),
        (keeping.GlobalClip, r"leaves in self\._clip depends on the parameters"),
        (keeping.LocalGlobalClip, "one at a time gives other bits"),
        (keeping.DAdaptation, r"leaves in group\['d'\] depends on the parameters"),
        (keeping.CountsParameters, r"leaves in self\.seen depends on the parameters"),
    ],
)
def test_what_cannot_be_run_on_one_parameter_at_a_time_is_refused(optimizer_class: Any, match: str) -> None:
    check_refused(
        lambda: models.make_mlp(),
        pager.ConfigError,
        f"{optimizer_class.__name__} cannot be managed.*{match}",
        lambda model: optimizer_class(model.parameters()),
    )


class Late(keeping.Keeping):
    """Does what a probe must not see before its tenth step."""

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params)
        self.n, self.what = 0, what
        self.m: dict[Any, Tensor] = {}

    def begin(self, loss: Any) -> None:
        self.n += 1

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        if self.n == 10 and self.what == "attribute":
            self.m[p] = p.grad.clone()
        if self.n == 10 and self.what == "state":
            self.state[p]["p"] = p
        return p.grad


@pytest.mark.parametrize("what", ["attribute", "state"])
def test_what_begins_later_is_refused_before_anything_is_changed(what: str) -> None:
    case = models.make_mlp()
    model = manage(case.model)
    optimizer = Late(model.parameters(), what)
    train(case, model, optimizer, range(9))
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer.zero_grad()
    train_step(case, model, 9)
    with pytest.raises(pager.ConfigError, match=r"Late cannot be managed.*self\.(m|state)"):
        optimizer.step()
    assert optimizer.n == 9
    check_equal(before, dict(model.state_dict()), "nothing was changed")
    model.pager.close()


class Bombed(keeping.WarmUp):
    """Ticks a bomb at each parameter; keeps a history, a count in its groups, and one in ``state``."""

    bomb: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[int] = []

    def direction(self, p: Tensor) -> Tensor:
        if Bombed.bomb is not None:
            Bombed.bomb.tick()
        return super().direction(p)

    def end(self) -> None:
        self.history.append(self.n)
        self.state["k"] = self.n  # type: ignore[index]
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1


@pytest.mark.parametrize("after", ["step", "look", "look and step", "train on"])
@pytest.mark.parametrize("at", [1, 3])
def test_attributes_after_an_interrupted_step(after: str, at: int) -> None:
    """As before the step until it is finished; then as one run of the class leaves them, whoever finishes it."""
    case, twin = models.make_mlp(depth=1), models.make_mlp(depth=1)
    plain = Bombed(two_groups(twin.model))
    model = manage(case.model, share=0.3)
    optimizer = Bombed(two_groups(model))
    history = optimizer.history
    for each, its in ((twin.model, plain), (model, optimizer)):
        train(case, each, its, range(2))  # "t" in the groups asks for a second probe
        its.zero_grad()
        train_step(case, each, 2)
    plain.step()
    Bombed.bomb = bomb = Bomb(at)
    try:
        with pytest.raises(Stop):
            optimizer.step()
    finally:
        Bombed.bomb = None
    assert bomb.fired
    assert (optimizer.n, optimizer.history, optimizer.state["k"]) == (2, [1, 2], 2)  # type: ignore[index]
    if after.startswith("look"):
        check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "looked at")
        assert (optimizer.n, optimizer.param_groups[0]["t"]) == (3, 3)
    if after.endswith("step"):
        optimizer.step()
        assert optimizer.n == 3
    for each, its in ((twin.model, plain), (model, optimizer)):
        train(case, each, its, range(3, 5))
    check_equal(kept(plain), kept(optimizer), "kept")
    assert optimizer.history is history
    check_equal(plain.state_dict()["param_groups"], optimizer.state_dict()["param_groups"], "groups")
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")


def test_attributes_after_a_step_that_raised() -> None:
    """The class raises at its first parameter: the step is as if never begun."""
    case = models.make_mlp()

    class Raises(keeping.WarmUp):
        """Raises once."""

        bad = False

        def direction(self, p: Tensor) -> Tensor:
            if self.bad:
                raise ArithmeticError("bad")
            return super().direction(p)

    model = manage(case.model)
    optimizer = Raises(model.parameters())
    train_step(case, model, 0)
    optimizer.step()
    optimizer.bad = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.n == 1
    optimizer.bad = False
    optimizer.step()
    assert optimizer.n == 2
    model.pager.close()


class EarlyReader(keeping.Keeping):
    """Does something with its groups before the closure is called, if it is."""

    what = "nothing"

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        if self.what == "groups" and closure is not None:
            self.param_groups[0]["lr"] = 0.5
        if self.what == "parameters":
            for p in self.param_groups[0]["params"]:
                p.mul_(0.9)
        return super().step(None if self.what == "no call" else closure, scale)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("groups", "changes its parameter groups before it calls the closure"),
        ("parameters", "looks at its parameters before it calls the closure"),
        ("no call", "does not call it"),
    ],
)
def test_what_comes_before_the_closure_is_refused(what: str, match: str) -> None:
    case = models.make_mlp()
    model = manage(case.model)
    before = copy.deepcopy(dict(model.state_dict()))
    optimizer = EarlyReader(model.parameters())
    optimizer.what = what
    with pytest.raises(pager.ConfigError, match=match):
        optimizer.step(lambda: train_step(case, model, 0))
    check_equal(before, dict(model.state_dict()), "nothing was changed")
    model.pager.close()


def test_a_hook_that_is_registered_after_a_failed_step_comes_before_the_class() -> None:
    case = models.make_mlp()

    class Failing(keeping.WarmUp):
        """Refuses to step while told so."""

        fails = False

        def begin(self, loss: Any) -> None:
            if self.fails:
                raise ValueError("not now")
            super().begin(loss)

    def count_from_five(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.n = 5

    def script(model: Any, report: Report) -> None:
        optimizer = Failing(model.parameters())
        train_step(case, model, 0)
        optimizer.step()
        Failing.fails = True
        with pytest.raises(ValueError, match="not now"):
            optimizer.step()
        Failing.fails = False
        optimizer.register_step_pre_hook(count_from_five)
        optimizer.step()
        report("count", optimizer.n)

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("optimizer_class", [keeping.WarmUp, keeping.LateCount])
def test_in_backward_attributes_count_as_in_torch(optimizer_class: Any) -> None:
    """Parameters are stepped before step() is called, with the attributes that it will begin with."""
    case, twin = models.make_mlp(), models.make_mlp()
    model = manage(case.model, update_at="backward")
    seen = []
    for each in (twin.model, model):
        optimizer = optimizer_class(each.parameters())
        train(case, each, optimizer, range(4))
        seen.append({name: value for name, value in vars(optimizer).items() if name in ("n", "history")})
    assert seen[0] == seen[1] != {}
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")


def test_in_backward_values_of_groups_may_count() -> None:
    from tests.cases.optimizers import Lion

    case, twin = models.make_mlp(), models.make_mlp()
    model = manage(case.model, update_at="backward")
    for each in (twin.model, model):
        train(case, each, Lion(each.parameters()), range(3))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")


def test_copies_of_an_optimizer_are_as_in_torch() -> None:
    """torch copies groups and states, and no other attributes."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = keeping.LateCount(model.parameters())
        train(case, model, optimizer, range(2))
        copied = copy.deepcopy(optimizer)
        report("copied", (hasattr(copied, "history"), copied.state["k"], copied.param_groups[0]["lr"]))  # type: ignore[index]
        train(case, model, optimizer, range(2, 3))
        report("kept", kept(optimizer))

    check_same(lambda: models.make_mlp().model, script)


class Sam(torch.optim.Optimizer):
    """SAM as it is published: two phases that the user calls, around an optimizer of torch's."""

    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """The ascent."""
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Back, and the step."""
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


def test_sam_that_is_not_stepped_itself() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = Sam(model.parameters())
        for step in range(3):
            report("loss", train_step(case, model, step))
            optimizer.first_step()
            train_step(case, model, step)
            optimizer.second_step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_adafactor_of_transformers() -> None:
    transformers = pytest.importorskip("transformers.optimization")
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = transformers.Adafactor(model.parameters(), lr=None, warmup_init=True)
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report("weights", list(model.parameters()))
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)
