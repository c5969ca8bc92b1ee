"""Cases 20 to 23: the optimizer contract. Every class, schedule and habit of use equals plain torch, or is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import pager
from tests import models
from tests.cases.same import Report, check_equal, check_same, manage, train, train_step

Make = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, after Chen et al. 2023."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


class Counting(torch.optim.Optimizer):
    """Keeps a step count on itself and in its groups, and warms up by it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "t": 0})
        self.num_steps = 0
        self.history: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["t"] += 1
            warm = min(1.0, group["t"] / 3)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * warm)
        self.history.append(self.param_groups[0]["lr"])
        return self.num_steps


class Rms(torch.optim.Optimizer):
    """Scales each tensor's update by its own norm, as LAMB does: whole tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-6) * p.norm(), alpha=group["lr"])


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd loop": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "sgd maximize": lambda params: torch.optim.SGD(
        params, lr=0.01, maximize=True, dampening=0.1, momentum=0.5
    ),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "adam fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw capturable": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, maximize=True),
    "adagrad": lambda params: torch.optim.Adagrad(
        params, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "lion": Lion,
    "counting": Counting,
    "rms": Rms,
}


@pytest.mark.parametrize(
    ("name", "made"),
    [(name, "before") for name in OPTIMIZERS]
    + [(name, "after") for name in ("sgd momentum", "adamw amsgrad", "adagrad", "adafactor", "lion")],
)
def test_every_optimizer_equals_plain_torch(name: str, made: str) -> None:
    case, twin = models.make_cnn(), models.make_cnn()
    plain = OPTIMIZERS[name](twin.model.parameters())
    optimizer = OPTIMIZERS[name](case.model.parameters()) if made == "before" else None
    model = manage(case.model, optimizer, share=0.3)
    if optimizer is None:
        optimizer = OPTIMIZERS[name](model.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer)
    for each, its in ((twin.model, plain), (model, optimizer)):
        torch.manual_seed(0)
        train(case, each, its, range(4))
    check_equal(copy_state(plain), copy_state(optimizer), name)
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), name)
    check_equal(copy_state(plain), copy_state(optimizer), f"{name} after close")
    train(case, twin.model, plain, range(4, 6))
    train(case, model, optimizer, range(4, 6))


def copy_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict, as it is now."""
    return copy.deepcopy(optimizer.state_dict())


def test_muon_takes_whole_tensors() -> None:
    def matrices(model: Any) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2]

    def script(model: Any, report: Report) -> None:
        case = models.make_mlp()
        muon = torch.optim.Muon(matrices(model), lr=0.02)
        rest = torch.optim.SGD([p for p in model.parameters() if p.dim() != 2], lr=0.1)
        for step in range(3):
            muon.zero_grad()
            rest.zero_grad()
            report("loss", train_step(case, model, step))
            muon.step()
            rest.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("optimizer_class", [Rms, torch.optim.Muon])
def test_a_warm_up_from_zero_does_not_hide_what_an_optimizer_is(optimizer_class: Callable[..., Any]) -> None:
    """With lr = 0 every optimizer leaves parameters alone, so a probe at that moment could take it for sliceable."""

    def script(model: Any, report: Report) -> None:
        case = models.make_mlp(width=160, depth=1)
        optimizer = optimizer_class([p for p in model.parameters() if p.dim() == 2], lr=0.05)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 2, 1))
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
            scheduler.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp(width=160, depth=1).model, script)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=8),
    "cosine after warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        ],
        milestones=[3],
    ),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.02, step_size_up=2, cycle_momentum=False
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


@pytest.mark.parametrize(("name", "tensor_lr"), [*((name, False) for name in SCHEDULERS), ("lambda", True)])
def test_schedulers_and_two_groups(name: str, tensor_lr: bool) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        lr: Any = torch.tensor(0.01) if tensor_lr else 0.01
        groups = [
            {"params": params[::2], "weight_decay": 0.1},
            {"params": params[1::2], "weight_decay": 0.0, "lr": lr * 0.5},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        scheduler = SCHEDULERS[name](optimizer)
        for step in range(6):
            optimizer.zero_grad()
            loss = train_step(case, model, step)
            optimizer.step()
            scheduler.step(*([float(loss.detach())] if name == "plateau" else []))
            report("lr", [group["lr"] for group in optimizer.param_groups])
            report("loss", loss)
        report("opt called", getattr(optimizer, "_opt_called", None))

    check_same(lambda: models.make_mlp().model, script)


def test_a_scheduler_made_before_manage_does_not_warn() -> None:
    case = models.make_mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    model = manage(case.model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        train_step(case, model, step)
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]
    assert model.pager.statistics().num_steps == 3
    model.pager.close()


def test_lr_set_by_hand_right_after_step_belongs_to_the_next_one() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            train_step(case, model, step)
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
                group["momentum"] = 0.5
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_add_param_group_in_mid_training() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params[4:], lr=0.01)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": params[:4], "lr": 0.02, "amsgrad": True})
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("way", ["requires_grad_", "attribute", "module"])
def test_freezing_and_unfreezing_in_mid_training(way: str) -> None:
    case = models.make_mlp()

    def set_frozen(model: Any, frozen: bool) -> None:
        if way == "module":
            model[2].requires_grad_(not frozen)
        for param in model[2].parameters() if way != "module" else ():
            if way == "attribute":
                param.requires_grad = not frozen
            else:
                param.requires_grad_(not frozen)

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(7):
            if step in (0, 4):
                set_frozen(model, True)
            if step in (2, 6):
                set_frozen(model, False)
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)


def test_freezing_between_backward_and_step_keeps_the_gradient() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_step(case, model, 0)
        model.requires_grad_(False)
        report("grads", [p.grad for p in model.parameters()])
        optimizer.step()
        report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw", "lion", "adagrad"])
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closure_is_evaluated_once_and_its_loss_comes_back(name: str, keyword: bool) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        calls = []

        def closure() -> Tensor:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            return train_step(case, model, len(calls))

        for _ in range(3):
            loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            report("loss", loss)
        report("calls", calls)

    check_same(lambda: models.make_mlp().model, script)


def test_hooks_fire_once_and_in_order() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        events: list[str] = []
        before = [p.detach().clone() for p in model.parameters()]

        def pre(opt: Any, args: Any, kwargs: Any) -> None:
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            events.append(f"pre {opt is optimizer} {same}")

        def post(opt: Any, args: Any, kwargs: Any) -> None:
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            events.append(f"post {opt is optimizer} {same}")

        optimizer.register_step_pre_hook(pre)
        optimizer.register_step_post_hook(post)
        optimizer.register_state_dict_pre_hook(lambda opt: events.append(f"state {opt is optimizer}"))
        for step in range(2):
            optimizer.zero_grad()
            train_step(case, model, step)
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        report("events", events)

    check_same(lambda: models.make_mlp().model, script)


def test_a_hook_may_change_gradients_and_lr_before_the_step() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(opt: Any, args: Any, kwargs: Any) -> None:
            for group in opt.param_groups:
                group["lr"] *= 0.5
                for p in group["params"]:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
        for step in range(3):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_a_custom_class_keeps_its_own_counters() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = Counting(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            train_step(case, model, step)
            report("returned", optimizer.step())
            report("counted", (optimizer.num_steps, optimizer.history, optimizer.param_groups[0]["t"]))

    check_same(lambda: models.make_mlp().model, script)


class TwoPhases(torch.optim.AdamW):
    """Calls its parent's step, as wrappers do, and then decays by itself."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.calls = getattr(self, "calls", 0) + 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 0.01 * group["lr"])
        return loss


def test_a_subclass_that_calls_its_parents_step() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = TwoPhases(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
        report("calls", optimizer.calls)
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)


class Lookahead:
    """Not an Optimizer: wraps one and interpolates slow weights, reading and writing parameters itself."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            params = [p for group in self.inner.param_groups for p in group["params"]]
            for slow, fast in zip(self.slow, params, strict=True):
                slow.add_(fast - slow, alpha=0.5)
                fast.copy_(slow)


def test_lookahead_and_sam_write_to_parameters_themselves() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Lookahead(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            with torch.no_grad():  # the ascent of SAM
                moved = []
                for p in model.parameters():
                    e = p.grad * (0.05 / (p.grad.norm() + 1e-12))
                    p.add_(e)
                    moved.append((p, e))
            optimizer.zero_grad()
            train_step(case, model, step)
            with torch.no_grad():
                for p, e in moved:
                    p.sub_(e)
            outer.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_state_touched_by_the_user_between_steps() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(case, model, optimizer, range(2))
        state = optimizer.state[model[0].weight]
        report("state", (state["exp_avg"].norm(), state["step"], state["exp_avg"].shape))
        state["exp_avg"].zero_()
        state["exp_avg_sq"].mul_(2)
        state["step"].fill_(5)
        train(case, model, optimizer, range(2, 4), report)
        optimizer.state[model[2].weight]["exp_avg"] = torch.ones(96, 96)
        train(case, model, optimizer, range(4, 5), report)
        del optimizer.state[model[4].weight]
        train(case, model, optimizer, range(5, 7), report)
        optimizer.state.clear()
        train(case, model, optimizer, range(7, 9), report)
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)


def test_replacing_the_optimizer() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(case, model, optimizer, range(2), report)
        del optimizer
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(case, model, optimizer, range(2, 4), report)
        optimizer = None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(case, model, optimizer, range(4, 6), report)

    check_same(lambda: models.make_mlp().model, script)


def test_a_step_without_gradients_changes_nothing() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.step()
        report("weights", list(model.parameters()))
        report("state", len(optimizer.state))
        train(case, model, optimizer, range(1), report)
        optimizer.zero_grad()
        optimizer.step()
        report("state", optimizer.state_dict())

    check_same(lambda: models.make_mlp().model, script)


def test_steps_without_zero_grad_repeat_the_gradients() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train_step(case, model, 0)
        for _ in range(3):
            optimizer.step()
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


def test_a_grad_scaler_on_the_cpu_skips_and_unscales() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            batch = case.make_batch(step)
            with torch.autocast("cpu", torch.bfloat16):
                loss = case.loss(model(*batch[0]), batch)
            scaler.scale(loss * (math.inf if step == 2 else 1)).backward()
            scaler.unscale_(optimizer)
            report("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            report("scale", scaler.get_scale())
            report("weights", list(model.parameters()))

    check_same(lambda: models.make_mlp().model, script)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "adagrad"])
def test_other_dtypes(dtype: torch.dtype, name: str) -> None:
    def make() -> Any:
        return models.make_mlp(width=160, depth=2).model.to(dtype)

    def script(model: Any, report: Report) -> None:
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, 1, 640, dtype=dtype).view(4, 160) * step).float().square().mean()
            loss.backward()
            report("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            report("loss", loss)
            report("weights", list(model.parameters()))

    check_same(make, script)


def test_adagrad_made_after_manage_has_its_first_state() -> None:
    model = manage(models.make_mlp().model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.25)
    for param in model.parameters():
        assert float(optimizer.state[param]["sum"].min()) == 0.25
    model.pager.close()


def test_the_optimizer_can_be_copied_and_pickled() -> None:
    import pickle

    case = models.make_mlp()
    model = manage(case.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(case, model, optimizer, range(2))
    expected = copy_state(optimizer)
    both_model, both = copy.deepcopy((model, optimizer))
    check_equal(expected, both.state_dict(), "deepcopy")
    restored_model, restored = pickle.loads(pickle.dumps((model, optimizer)))
    check_equal(expected, restored.state_dict(), "pickle")
    train(case, model, optimizer, range(2, 4))
    for other_model, other in ((both_model, both), (restored_model, restored)):
        assert other.param_groups[0]["params"][0] is next(other_model.parameters())
        train(case, other_model, other, range(2, 4))
        check_equal(dict(model.state_dict()), dict(other_model.state_dict()), "trained on")
    model.pager.close()


def test_a_failing_class_names_itself() -> None:
    class Broken(torch.optim.SGD):
        """Raises in its step."""

        def step(self, closure: Any = None) -> None:
            raise LookupError("no such luck")

    case = models.make_mlp()
    model = manage(case.model)
    optimizer = Broken(model.parameters(), lr=0.1)
    train_step(case, model, 0)
    with pytest.raises(pager.ConfigError, match="Broken cannot be managed.*no such luck"):
        optimizer.step()
    model.pager.close()
