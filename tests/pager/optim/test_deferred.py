"""Updates that wait for their parameters' next use: nobody sees that they wait, and none is lost, doubled or disturbed.

Each corner is what a user may do between ``step()`` and the next forward, run on an ordinary and on a managed model.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.cases.same import Report, check_equal, check_ordinary, check_same, copied, manage, values_of
from tests.pager.optim.waiting import (
    BUDGETS,
    CHECKS,
    ROOMY_BUDGETS,
    backward,
    batch,
    check_corner,
    expect_waiting,
    make_adamw,
    make_net,
    make_roomy_net,
    weight,
)

# -- what was taken before the step --------------------------------------------------------------------------------


HELD: dict[str, Callable[[Any, Any], Any]] = {
    "detached": lambda m, o: weight(m).detach(),
    "a row": lambda m, o: weight(m).detach()[3],
    "data": lambda m, o: weight(m).data,
    "numpy": lambda m, o: weight(m).detach().numpy(),
    "state": lambda m, o: o.state[weight(m)]["exp_avg"],
    "a row of a state": lambda m, o: o.state[weight(m)]["exp_avg"][3],
    "step": lambda m, o: o.state[weight(m)]["step"],
    "gradient": lambda m, o: weight(m).grad,
    "a row of the gradient": lambda m, o: weight(m).grad[3],
    "gradient's data": lambda m, o: weight(m).grad.data,
    "state_dict": lambda m, o: m.state_dict(),
    "states of the state_dict": lambda m, o: [s["exp_avg"] for s in o.state_dict()["state"].values()],
}


def shown(value: Any) -> Any:
    """As tensors."""
    return (
        value
        if not hasattr(value, "__array_interface__") or torch.is_tensor(value)
        else torch.from_numpy(value)
    )


@pytest.mark.pairwise(name=HELD, zeroes=[False, True], budget=BUDGETS)
def test_what_was_taken_before_the_step_shows_what_torch_shows(name: str, zeroes: bool, budget: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 5)
        held = HELD[name](model, optimizer)
        report("before", shown(held))
        optimizer.step()
        report("after the step", shown(held))
        if zeroes:
            optimizer.zero_grad()
            report("after zero_grad", shown(held))
        model(batch(0))
        report("after a forward", shown(held))
        optimizer.step()
        report("after another step", shown(held))
        backward(model, 6)
        optimizer.step()
        report("after a real step", shown(held))

    check_corner(corner, budgets=(budget,))


@pytest.mark.parametrize("name", ["gradient", "a row of the gradient", "gradient's data"])
def test_a_gradient_that_is_written_to_after_the_step_was_stepped_as_it_was(name: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 5)
        held = HELD[name](model, optimizer)
        optimizer.step()
        held.zero_()
        report("weight", weight(model).detach().clone())
        report("gradient", weight(model).grad.clone())

    check_corner(corner)


def test_a_gradient_kept_over_zero_grad_stays_what_it_was() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        kept = [param.grad for param in model.parameters()]
        optimizer.zero_grad()
        report("kept", kept)
        report("grads", [param.grad for param in model.parameters()])
        for gradient in kept:
            gradient.mul_(2)
        backward(model, 5)
        report("kept after backward", kept)
        optimizer.step()
        report("kept after a step", kept)

    check_corner(corner)


def test_a_graph_from_before_the_step_is_refused() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 5)
        loss = model(batch(1)).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        report("values", list(model.parameters()))

    check_corner(corner)


# -- the next use --------------------------------------------------------------------------------------------------


class Noting(TorchDispatchMode):
    """A user's dispatch mode that counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class NotingFunctions(TorchFunctionMode):
    """A user's function mode, likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("cpu"),
    "meta device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "default dtype": default_dtype,
    "dispatch mode": Noting,
    "function mode": NotingFunctions,
    "anomaly": torch.autograd.detect_anomaly,
    "saved tensors on the CPU": torch.autograd.graph.save_on_cpu,
    "no hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "enable_grad": torch.enable_grad,
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CONTEXTS)
def test_the_next_forward_runs_under_anything(name: str) -> None:
    x = batch(4)

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        with CONTEXTS[name]():
            out = model(x)
            if out.requires_grad:
                out.float().square().sum().backward()
            report("out", out.detach().float())
        report("values", list(model.parameters()))
        optimizer.step()
        report("grads", [p.grad for p in model.parameters()])

    check_corner(corner)


@pytest.mark.parametrize("mode", [Noting, NotingFunctions])
def test_a_mode_of_the_users_sees_nothing_of_the_update(mode: Any) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        watch = mode()
        with watch, torch.no_grad():
            y = weight(model) + 1
        report("y", y)
        report("seen", watch.seen)

    check_corner(corner)


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": lambda: create_selective_checkpoint_contexts(_save_products),
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_next_use_is_in_a_checkpoint(name: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            x = batch(2).requires_grad_(True)
            for layer in model.layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, **CHECKPOINTS[name])
            x.square().sum().backward()
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    check_corner(corner)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_from_the_first_step_on(name: str) -> None:
    """What a page in does is no operation of the forward's: a selective checkpoint counts those."""

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for _ in range(3):
            optimizer.zero_grad()
            x = batch(2).requires_grad_(True)
            for layer in model.layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, **CHECKPOINTS[name])
            x.square().sum().backward()
            optimizer.step()
        report("values", list(model.parameters()))

    check_same(make_net, script, device_budget=BUDGETS[0], checks=CHECKS)


def test_the_next_use_is_in_another_thread() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(backward(model, 3).detach()))
        thread.start()
        thread.join(60)
        report("loss", found)
        optimizer.step()

    check_corner(corner)


@pytest.mark.parametrize("order", ["the same", "opposite"])
def test_threads_that_touch_the_same_parameters_at_once(order: str) -> None:
    """Each sees every parameter updated, once."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        found: dict[int, Any] = {}
        start = threading.Barrier(3)

        def read(number: int) -> None:
            params = list(model.parameters())
            start.wait(60)
            order_of = params[::-1] if order == "opposite" and number % 2 else params
            sums = {id(param): param.detach().clone() for param in order_of}
            found[number] = [sums[id(param)] for param in params]

        threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        report("found", found)
        optimizer.zero_grad()

    check_corner(corner, budgets=ROOMY_BUDGETS, make_model=make_roomy_net)


def test_a_side_thread_saves_while_training_goes_on() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(copied(dict(model.state_dict()))))
        thread.start()
        loss = model(batch(2)).square().sum()
        thread.join(60)
        report("saved", found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    check_corner(corner, budgets=ROOMY_BUDGETS, make_model=make_roomy_net)


# -- other loops ---------------------------------------------------------------------------------------------------


def make_sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": make_sgd,
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "maximize": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, maximize=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "capturable-like groups": lambda m: torch.optim.AdamW(
        [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(m.parameters())]
    ),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.9),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_of_torch(name: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
        optimizer.zero_grad()
        report("states", optimizer.state_dict()["state"])

    check_corner(corner, MAKERS[name], expects_waiting=False)


def test_a_tensor_lr_that_is_changed_in_place_belongs_to_the_next_step() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.param_groups[0]["lr"].mul_(100)

    check_corner(corner, MAKERS["tensor lr"])


@pytest.mark.parametrize("scheduler_name", ["StepLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers(scheduler_name: str) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        settings = {"StepLR": {"step_size": 1, "gamma": 0.3}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 9}}
        scheduler = getattr(torch.optim.lr_scheduler, scheduler_name)(
            optimizer, **settings.get(scheduler_name, {})
        )
        for step in range(5):
            optimizer.zero_grad()
            loss = backward(model, step)
            optimizer.step()
            scheduler.step(*([loss.item()] if scheduler_name == "ReduceLROnPlateau" else []))
            report("lr", scheduler.get_last_lr())
        report("values", list(model.parameters()))

    check_same(make_net, script, device_budget=BUDGETS[0], checks=CHECKS)


def test_several_optimizers_over_one_model() -> None:
    def script(model: Any, report: Report) -> None:
        params = list(model.parameters())
        optimizers = [
            torch.optim.AdamW(params[:3], lr=0.01),
            torch.optim.SGD(params[3:5], lr=0.01, momentum=0.9),
            torch.optim.Adam(params[5:], lr=0.02),
        ]
        for step in range(6):
            backward(model, step)
            for optimizer in optimizers[: 3 if step % 2 else 2]:
                optimizer.step()
                optimizer.zero_grad()
            report("values", list(model.parameters()) if step % 3 == 2 else step)
        report("states", [optimizer.state_dict() for optimizer in optimizers])

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)


def test_closures() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(5):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                return backward(model, step)

            report("loss", optimizer.step(closure))

    check_same(make_net, script, device_budget=BUDGETS[0], checks=CHECKS)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            loss = model(batch(step)).square().sum() * (float("inf") if step == 3 else 1.0)
            scaler.scale(loss).backward()
            if step == 4:
                scaler.unscale_(optimizer)
                report("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            report("scale", scaler.get_scale())
        report("states", optimizer.state_dict())

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)


def test_a_new_optimizer_in_place_of_the_old_one() -> None:
    def script(model: Any, report: Report) -> None:
        for _ in range(3):
            optimizer = make_adamw(model)
            for step in range(3):
                optimizer.zero_grad()
                report("loss", backward(model, step))
                optimizer.step()
            expect_waiting(model)
            del optimizer
            gc.collect()
        report("values", list(model.parameters()))

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)


def test_the_optimizer_is_dropped_while_its_update_waits() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        expect_waiting(model)
        del optimizer
        gc.collect()
        report("out", model(batch(0)))
        report("values", list(model.parameters()))

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)


def test_the_optimizer_is_dropped_before_the_first_step() -> None:
    for budget in BUDGETS:
        model: Any = make_net()
        plain = copied(list(model.parameters()))
        manage(model, make_adamw(model), device_budget=budget, checks=CHECKS)
        gc.collect()
        check_equal(make_net()(batch(0)), model(batch(0)), "out")
        model.pager.close()
        check_equal(plain, list(model.parameters()), "weights")


def test_close_right_after_the_step() -> None:
    plain, model = make_net(), manage(make_net(), device_budget=BUDGETS[0], checks=CHECKS)
    optimizers = [make_adamw(plain), make_adamw(model)]
    for each, optimizer in zip([plain, model], optimizers, strict=True):
        for step in range(3):
            optimizer.zero_grad()
            backward(each, step)
            optimizer.step()
    expect_waiting(model)
    model.pager.close()
    check_ordinary(model)
    check_equal(values_of(plain), values_of(model), "closed")
    check_equal(optimizers[0].state_dict(), optimizers[1].state_dict(), "states")


@pytest.mark.parametrize("convert", ["half", "double", "bfloat16"])
def test_converting_the_model_while_updates_wait(convert: str) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        optimizer.zero_grad()
        expect_waiting(model)
        getattr(model, convert)()
        report("values", list(model.parameters()))
        report("states", optimizer.state_dict()["state"])
        dtype = next(model.parameters()).dtype
        for step in range(2):
            model(batch(step).to(dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for budget in BUDGETS:
        check_same(make_net, script, device_budget=budget, checks=CHECKS)
