"""Case 23 and others: how people use optimizers, beyond calling `step()`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from tests import models
from tests.cases.optimizers import OPTIMIZERS, Counting, copy_state
from tests.cases.same import Report, check_equal, check_same, manage, train, train_step


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


def test_states_stand_in_torchs_order() -> None:
    """Large and small parameters mixed over groups out of the model's order, one trained later than the rest."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        number = {id(param): index for index, param in enumerate(params)}
        groups = [params[4:], params[1::-1], params[2:4]]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)
        params[2].requires_grad_(False)
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            optimizer.step()
            params[2].requires_grad_(True)
            states = optimizer.state_dict()["state"]
            report("shown", [(index, list(state)) for index, state in states.items()])
            report("held", [number[id(param)] for param in optimizer.state])

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
        optimizer: Any = OPTIMIZERS[name](list(model.parameters()))
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


class Nested(torch.optim.Optimizer):
    """Its state has containers: a count in a dict, and the last gradients in a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                counts, history = state.setdefault("counts", {"n": 0}), state.setdefault("history", [])
                counts["n"] += 1
                history.append(p.grad.clone())
                del history[:-2]
                for gradient in history:
                    p.sub_(gradient, alpha=group["lr"] / counts["n"])


def test_states_that_hold_containers() -> None:
    """Slices of a parameter would count in one dict, and find gradients of other slices in one list."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = Nested(model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            optimizer.step()
        report("counts", [state["counts"]["n"] for state in optimizer.state.values()])
        report("history", [list(state["history"]) for state in optimizer.state.values()])

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

        def step(self, closure: Any = None) -> Any:
            raise LookupError("no such luck")

    case = models.make_mlp()
    model = manage(case.model)
    optimizer = Broken(model.parameters(), lr=0.1)
    train_step(case, model, 0)
    with pytest.raises(pager.ConfigError, match="Broken cannot be managed.*no such luck"):
        optimizer.step()
    model.pager.close()
