"""Updates that wait for their parameters' next use: nobody sees that they wait, and none is lost, doubled or disturbed.

Each corner is what a user may do between ``step()`` and the next forward, run on an ordinary and on a managed model.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases.same import Report
from tests.pager.optim.waiting import (
    BUDGETS,
    NUM_LAYERS,
    WIDTH,
    Net,
    backward,
    batch,
    check_corner,
    expect_waiting,
    make_adamw,
    weight,
)

# -- looking -------------------------------------------------------------------------------------------------------


def save_and_load(value: Any) -> Any:
    """Through a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


LOOKS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda m: weight(m).detach(),
    "item": lambda m: weight(m)[1, 2].item(),
    "norm": lambda m: weight(m).norm(),
    "numpy": lambda m: torch.from_numpy(weight(m).detach().numpy().copy()),
    "data": lambda m: weight(m).data,
    "tolist": lambda m: weight(m).tolist(),
    "clone": lambda m: weight(m).clone(),
    "stack of all": lambda m: torch.stack([p.detach() for p in list(m.parameters())[1:4]]),
    "foreach norm": lambda m: torch._foreach_norm(list(m.parameters())),
    "to": lambda m: weight(m).to(torch.float64),
    "cpu": lambda m: weight(m).detach().cpu(),
    "functional": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (batch(1),)),
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": lambda m: copy.deepcopy(weight(m)),
    "deepcopy of all": lambda m: list(copy.deepcopy(list(m.parameters()))),
    "pickle": lambda m: pickle.loads(pickle.dumps(weight(m))),
    "save": lambda m: save_and_load(weight(m)),
    "save state_dict": lambda m: save_and_load(m.state_dict()),
    "data_ptr": lambda m: weight(m).data_ptr() == 0,
    "dlpack": lambda m: torch.from_dlpack(weight(m).detach()),
    "is new": lambda m: weight(m)._version > 2,
    "grad": lambda m: weight(m).grad,
    "all grads": lambda m: [p.grad for p in m.parameters()],
    "equal": lambda m: torch.equal(weight(m), weight(m, 5)),
    "metadata": lambda m: (weight(m).shape, weight(m).stride(), weight(m).is_contiguous()),
    "copy into other": lambda m: torch.empty(WIDTH, WIDTH).copy_(weight(m).detach()),
}


@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_at_a_parameter_sees_its_new_value(name: str) -> None:
    check_corner(lambda model, optimizer, report: report(name, LOOKS[name](model)), steps_after=1)


STATE_LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "exp_avg": lambda m, o: o.state[weight(m)]["exp_avg"],
    "step": lambda m, o: [o.state[p]["step"] for p in m.parameters()],
    "norms": lambda m, o: [o.state[p]["exp_avg_sq"].norm() for p in m.parameters()],
    "state_dict": lambda m, o: o.state_dict(),
    "deepcopy": lambda m, o: copy.deepcopy(o).state_dict(),
    "pickle": lambda m, o: pickle.loads(pickle.dumps(o.state_dict())),
    "save": lambda m, o: save_and_load(o.state_dict()),
    "numpy": lambda m, o: torch.from_numpy(o.state[weight(m)]["exp_avg"].numpy().copy()),
    "data": lambda m, o: o.state[weight(m)]["exp_avg"].data,
    "both": lambda m, o: (m.state_dict(), o.state_dict()),
}


@pytest.mark.parametrize("name", STATE_LOOKS)
def test_who_looks_at_a_state_sees_its_new_value(name: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        report(name, STATE_LOOKS[name](model, optimizer))

    check_corner(corner, steps_after=1)


# -- changing ------------------------------------------------------------------------------------------------------


def state(model: Any, optimizer: Any, key: str = "exp_avg", index: int = 2) -> Any:
    """A paged state."""
    return optimizer.state[weight(model, index)][key]


def replace_state(model: Any, optimizer: Any) -> None:
    optimizer.state[weight(model)]["exp_avg"] = torch.full((WIDTH, WIDTH), 0.25)


def reset_states(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def reset_one_state(model: Any, optimizer: Any) -> None:
    optimizer.state[weight(model)] = {}


def delete_one_state(model: Any, optimizer: Any) -> None:
    del optimizer.state[weight(model)]


def set_step(model: Any, optimizer: Any) -> None:
    optimizer.state[weight(model)]["step"] = torch.tensor(100.0)


def add_to_step(model: Any, optimizer: Any) -> None:
    optimizer.state[weight(model)]["step"] += 7


def set_lr(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.5)


def load_model(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: torch.ones_like(v) * 0.01 for name, v in model.state_dict().items()})


def load_other_model(model: Any, optimizer: Any) -> None:
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict())


def load_own(model: Any, optimizer: Any) -> None:
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


def other_optimizer_state() -> Any:
    torch.manual_seed(7)
    model = Net()
    optimizer = make_adamw(model)
    backward(model, 3)
    optimizer.step()
    return optimizer.state_dict()


def load_optimizer(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(other_optimizer_state())


def load_optimizer_then_model(model: Any, optimizer: Any) -> None:
    load_optimizer(model, optimizer)
    load_other_model(model, optimizer)


def load_model_then_optimizer(model: Any, optimizer: Any) -> None:
    load_other_model(model, optimizer)
    load_optimizer(model, optimizer)


def assign_grad(model: Any, optimizer: Any) -> None:
    weight(model).grad = torch.full((WIDTH, WIDTH), 0.5)


def assign_grad_after_zero(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    weight(model).grad = torch.full((WIDTH, WIDTH), 0.5)
    optimizer.step()


def clear_grad_by_del(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        del param.grad


def grow_grad(model: Any, optimizer: Any) -> None:
    weight(model).grad.mul_(3)


def zero_grad_data(model: Any, optimizer: Any) -> None:
    weight(model).grad.data.zero_()


def freeze(model: Any, optimizer: Any) -> None:
    for layer in model.layers[:3]:
        layer.weight.requires_grad_(False)
    optimizer.zero_grad()


def freeze_and_unfreeze(model: Any, optimizer: Any) -> None:
    model.requires_grad_(False)
    model(batch(0))
    model.requires_grad_(True)


def write(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight(model).mul_(0.5).add_(1e-3)


def write_part(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight(model)[2:5] = 0.125


def write_data(model: Any, optimizer: Any) -> None:
    weight(model).data[2:5] = 0.125


def set_data(model: Any, optimizer: Any) -> None:
    weight(model).data = torch.full((WIDTH, WIDTH), 0.01)


def copy_in(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight(model).copy_(torch.full((WIDTH, WIDTH), 0.01))


def copy_between(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        weight(model).copy_(weight(model, 5))


def init_again(model: Any, optimizer: Any) -> None:
    torch.manual_seed(3)
    for layer in model.layers:
        layer.reset_parameters()


def average(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def write_states(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        optimizer.state[param]["exp_avg"].mul_(0.5)


def write_state_out(model: Any, optimizer: Any) -> None:
    torch.mul(torch.ones(WIDTH, WIDTH), 0.5, out=state(model, optimizer))


def write_state_numpy(model: Any, optimizer: Any) -> None:
    state(model, optimizer).numpy()[:3] = 0.75


def write_held_state_dict(model: Any, optimizer: Any) -> None:
    shown = model.state_dict()
    shown["layers.3.weight"].mul_(0.5)


def write_held_optimizer_state(model: Any, optimizer: Any) -> None:
    shown = optimizer.state_dict()
    shown["state"][3]["exp_avg"].mul_(0.5)


def step_again(model: Any, optimizer: Any) -> None:
    optimizer.step()


def steps_again(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        optimizer.step()


def zero_and_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer.step()


def accumulate(model: Any, optimizer: Any) -> None:
    backward(model, 6)
    optimizer.step()


def evaluate(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(batch(0))
    with torch.inference_mode():
        model(batch(0))


def clip_and_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    backward(model, 5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def clip_waiting(model: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def unused_parameters(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.used = 3
    backward(model, 5)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 6)
    optimizer.step()
    optimizer.zero_grad()
    model.used = NUM_LAYERS


def add_group(model: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})


def regroup(model: Any, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    params = group["params"]
    group["params"] = params[:3]
    optimizer.add_param_group({"params": params[3:], "lr": 0.02, "weight_decay": 0.3})


def remove_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = list(model.parameters())[:3]


def other_group_options(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = True


def turn_on_amsgrad(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    for param in model.parameters():
        optimizer.state[param]["max_exp_avg_sq"] = torch.zeros_like(param)


def double_use(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss = model(batch(1)).sum() + model(batch(2)).sum()
    loss.backward()
    optimizer.step()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", None) == __name__
    and getattr(value, "__code__", None) is not None
    and value.__code__.co_varnames[:2] == ("model", "optimizer")
    and value.__code__.co_argcount == 2
    and not name.startswith("optimizer_state")
}
CHANGES["zero_grad"] = lambda model, optimizer: optimizer.zero_grad()
CHANGES["zero_grad to zeros"] = lambda model, optimizer: optimizer.zero_grad(set_to_none=False)
CHANGES["model.zero_grad"] = lambda model, optimizer: model.zero_grad()
CHANGES["write a state"] = lambda model, optimizer: state(model, optimizer).add_(0.5)
CHANGES["zero a state"] = lambda model, optimizer: state(model, optimizer).zero_()
CHANGES["copy into a state"] = lambda model, optimizer: state(model, optimizer).copy_(
    torch.ones(WIDTH, WIDTH)
)
CHANGES["state.data"] = lambda model, optimizer: state(model, optimizer).data.mul_(0.5)
CHANGES["nothing"] = lambda model, optimizer: None


NEED_GRADIENTS = ("grow_grad", "zero_grad_data", "turn_on_amsgrad", "clip_waiting")


@pytest.mark.pairwise(name=CHANGES, gradients=["kept", "dropped"], budget=BUDGETS)
def test_who_changes_something_changes_the_new_values(name: str, gradients: str, budget: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        if gradients == "dropped" and name not in NEED_GRADIENTS:
            optimizer.zero_grad()
            expect_waiting(model)
        CHANGES[name](model, optimizer)
        report("values", list(model.parameters()))
        report("grads", [p.grad for p in model.parameters()])

    check_corner(corner, budgets=(budget,))
