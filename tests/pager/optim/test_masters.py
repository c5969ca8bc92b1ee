"""``master="float32"``: bf16 parameters trained as a loop with a list of fp32 masters trains them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pager.errors import ConfigError
from tests import models
from tests.cases.plainly import BUDGETS, MAKERS, Pair, Plain, checks, managed_step, plain_step
from tests.cases.same import check_equal, copied, manage, num_pages


@pytest.fixture(autouse=True)
def close() -> Iterator[None]:
    yield
    Pair.close_all()


def make_mlp() -> models.Case:
    """Matrices of several pages, biases that stay ordinary."""
    return models.make_mlp(width=160, depth=2)


def make_pair(name: str = "adamw", *, make_case: Callable[[], models.Case] = make_mlp, **knobs: Any) -> Pair:
    return Pair(make_case, MAKERS[name], **{"checks": checks(), **knobs})


# -- training --------------------------------------------------------------------------------------


@pytest.mark.pairwise(name=MAKERS, budget=BUDGETS, update_at=["step", "backward"])
def test_equals_a_loop_with_masters(name: str, budget: str, update_at: str) -> None:
    pair = make_pair(name, budget=BUDGETS[budget], update_at=update_at)
    pair.train(3)
    pair.check()
    pair.train(2, micro_batches=3)
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize(
    "switches", [{"streams": "early"}, {"daemon": "inline"}, {"page_all": False}], ids=str
)
def test_equals_it_however_the_work_is_ordered(switches: dict[str, Any], update_at: str) -> None:
    pair = make_pair(update_at=update_at, checks=checks(**switches))
    pair.train(4)
    pair.close()


def test_masters_keep_what_bf16_would_lose() -> None:
    """Steps of a 2048th of a weight vanish in bf16, and add up in a master."""

    def trained(**knobs: Any) -> Tensor:
        model = manage(make_mlp().model.bfloat16(), **knobs)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(8):
            (model[0].weight.sum() / 2048).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.pager.close()
        value: Tensor = model[0].weight.detach()
        return value

    assert trained().eq(1.0).all()
    assert trained(master="float32").eq(torch.tensor(1.0 - 8 / 2048).bfloat16()).all()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_a_model_of_two_dtypes(update_at: str) -> None:
    def make_mixed(model: nn.Module) -> nn.Module:
        model.bfloat16()
        model[2].float()  # type: ignore[index]
        return model

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_mixed(make_mlp().model)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:  # type: ignore[attr-defined]
                x = layer(x.to(next(layer.parameters()).dtype) if isinstance(layer, nn.Linear) else x)
            return x

    case, twin = (models.Case("mixed", Casting(), make_mlp().make_batch, make_mlp().loss) for _ in range(2))
    plain = Plain(case.model, MAKERS["adamw"], master=True)
    model = manage(twin.model, master="float32", update_at=update_at, checks=checks())
    optimizer = MAKERS["adamw"](list(model.parameters()))
    for step in range(4):
        check_equal(plain_step(case, plain, [step]), managed_step(twin, model, optimizer, [step]), "loss")
    state = optimizer.state_dict()["state"]
    check_equal(plain.state(), copied(state), "state")
    assert ["master" in entry for entry in state.values()] == [True, True, False, False, True, True]
    model.pager.close()
    check_equal(dict(case.model.state_dict()), dict(model.state_dict()), "weights")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_have_no_masters(dtype: torch.dtype) -> None:
    pair = make_pair("momentum", dtype=dtype)
    pair.train(3)
    assert all("master" not in entry for entry in pair.optimizer.state_dict()["state"].values())
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_frozen_and_thawed_weights(update_at: str) -> None:
    pair = make_pair(frozen=["0.weight", "2.bias"], update_at=update_at)
    pair.train(2)
    for model in (pair.plain.model, pair.model):
        model.requires_grad_(True)
    pair.train(2)
    for model in (pair.plain.model, pair.model):
        model.get_parameter("4.weight").requires_grad_(False)
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_an_optimizer_that_forgot_its_state_keeps_the_masters(update_at: str) -> None:
    pair = make_pair("momentum", update_at=update_at)
    pair.train(2)
    pair.plain.optimizer.state.clear()
    pair.optimizer.state.clear()
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_another_layout_in_mid_training(update_at: str) -> None:
    """Values and masters are what they were."""
    pair = make_pair("momentum", make_case=models.make_cnn, budget=0.6, update_at=update_at)
    pair.train(2)
    model: Any
    for model in (pair.plain.model, pair.model):
        model.to(memory_format=torch.channels_last)
    pair.check()
    pair.train(1)
    pair.check()
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
def test_homes_on_disk(update_at: str, tmp_path: Path) -> None:
    pair = make_pair(disk=tmp_path, host_budget=2**20, update_at=update_at)
    pair.train(3)
    assert pair.model.pager.statistics().disk_bytes > 0
    pair.close()


def test_clipped_gradients() -> None:
    pair = make_pair()
    for step in range(3):
        for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
            trainer.zero_grad()
            args = [arg.bfloat16() for arg in pair.case.make_batch(step)[0]]
            model(*args).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
            trainer.step()
    pair.close()


# -- ties ------------------------------------------------------------------------------------------


def test_a_tie_moves_by_one_ulp_and_no_further() -> None:
    pair = make_pair()
    pair.train(1)
    saved = copied(pair.optimizer.state_dict())
    weight = saved["state"][0]["master"].bfloat16()
    bits = (weight.view(torch.int16).int() << 16) + 0x8000
    saved["state"][0]["master"] = bits.view(torch.float32)
    even = weight.view(torch.int16) % 2 == 0
    pair.optimizer.load_state_dict(saved)
    found = pair.optimizer.state_dict()["state"][0]["master"].view(torch.int32)
    assert torch.equal(found, torch.where(even, bits - 1, bits))
    assert torch.equal(pair.model[0].weight.detach().cpu(), bits.view(torch.float32).bfloat16())
    pair.optimizer.load_state_dict(copied(pair.optimizer.state_dict()))
    assert torch.equal(pair.optimizer.state_dict()["state"][0]["master"].view(torch.int32), found)
    pair.model.pager.close()


# -- writes of the user's --------------------------------------------------------------------------

WRITES: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "copy_": lambda model, weight: weight.copy_(torch.full_like(weight, 0.25)),
    "add_": lambda model, weight: weight.add_(0.125),
    "fill_ of a row": lambda model, weight: weight[3].fill_(0.5),
    "load_state_dict": lambda model, weight: model.load_state_dict(
        {name: value.clone() * 2 for name, value in model.state_dict().items()}
    ),
}


@pytest.mark.pairwise(write=WRITES, budget=BUDGETS, update_at=["step", "backward"])
def test_a_written_weight_begins_a_new_master(write: str, budget: str, update_at: str) -> None:
    pair = make_pair(budget=BUDGETS[budget], update_at=update_at)
    pair.train(2)
    for model in (pair.plain.model, pair.model):
        with torch.no_grad():
            WRITES[write](model, model.get_parameter("2.weight"))
    everything = write == "load_state_dict"
    pair.plain.written(*(pair.plain.params if everything else [pair.plain.model.get_parameter("2.weight")]))
    pair.check()
    pair.train(2)
    pair.close()


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_same_values_keep_the_masters(budget: str, update_at: str) -> None:
    pair = make_pair(budget=BUDGETS[budget], update_at=update_at)
    pair.train(2)
    pair.model.load_state_dict(copied(dict(pair.model.state_dict())))
    pair.check()
    pair.train(1)
    pair.close()


# -- saving ----------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_state_dict_shows_fp32_masters_and_moments() -> None:
    pair = make_pair()
    pair.train(1)
    for index, entry in pair.optimizer.state_dict()["state"].items():
        assert list(entry) == ["step", "exp_avg", "exp_avg_sq", "master"], index
        assert {value.dtype for value in entry.values()} == {torch.float32}
        assert {value.device.type for value in entry.values()} == {"cpu"}
        assert {type(value) for value in entry.values()} == {Tensor}
    live = pair.optimizer.state[pair.model[0].weight]
    assert list(live) == ["step", "exp_avg", "exp_avg_sq"]
    assert live["exp_avg"].dtype == torch.float32
    pair.model.pager.close()


@pytest.mark.pairwise(
    budget=["streaming", "everything"],
    update_at=["step", "backward"],
    order=["model first", "optimizer first"],
)
def test_training_resumes_bit_for_bit(budget: str, update_at: str, order: str) -> None:
    knobs: dict[str, Any] = {"budget": BUDGETS[budget], "update_at": update_at}
    pair = make_pair(**knobs)
    pair.train(2)
    saved = through_a_file({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    pair.model.pager.close()
    fresh = make_pair(**knobs)
    fresh.train(1)  # values of its own, to be overwritten
    parts = [(fresh.model, saved["model"]), (fresh.optimizer, saved["optimizer"])]
    for part, state in parts if order == "model first" else reversed(parts):
        part.load_state_dict(state)
    fresh.case, fresh.plain, fresh.num_batches = pair.case, pair.plain, pair.num_batches
    fresh.check()
    fresh.train(2)
    fresh.close()


def test_a_checkpoint_from_before_masters_loads() -> None:
    """Moments in bf16 and no masters, as torch saves them: masters begin at the weights, moments become fp32."""
    case = make_mlp()
    case.model.bfloat16()
    before = MAKERS["adamw"](list(case.model.parameters()))
    for param in case.model.parameters():
        param.grad = torch.ones_like(param)
    before.step()
    pair = make_pair()
    pair.train(1)
    pair.model.load_state_dict(case.model.state_dict())
    pair.optimizer.load_state_dict(copied(before.state_dict()))
    plain = Plain(case.model, MAKERS["adamw"], master=True)
    plain.optimizer.load_state_dict(copied(before.state_dict()))
    pair.case, pair.plain = case, plain
    pair.train(2)
    pair.close()


def test_a_copy_of_the_model_is_an_ordinary_one() -> None:
    pair = make_pair()
    pair.train(2)
    twin = copy.deepcopy(pair.model)
    assert {type(param) for param in twin.parameters()} == {nn.Parameter}
    check_equal(dict(pair.plain.model.state_dict()), dict(twin.state_dict()), "copy")
    pair.train(1)
    pair.close()


def test_states_of_other_shapes_resume_too() -> None:
    """Adafactor keeps sums over rows and columns."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(params, lr=1e-2)

    pair = Pair(make_mlp, make, budget=BUDGETS["everything"], checks=checks())
    pair.train(2)
    saved = through_a_file({"model": pair.model.state_dict(), "optimizer": pair.optimizer.state_dict()})
    pair.model.load_state_dict(saved["model"])
    pair.optimizer.load_state_dict(saved["optimizer"])
    pair.train(2)
    pair.close()


# -- conversions and ends --------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("convert", ["half", "float", "double"])
def test_another_dtype_is_refused(convert: str, num_steps: int) -> None:
    pair = make_pair()
    pair.train(num_steps)
    with pytest.raises(ConfigError, match="master"):
        getattr(pair.model, convert)()
    pair.train(1)
    pair.close()


def test_small_tensors_have_ordinary_masters() -> None:
    pair = make_pair(update_at="backward")
    pair.train(3)
    state = pair.optimizer.state_dict()["state"]
    small = [index for index, param in enumerate(pair.plain.params) if not num_pages(param)]
    assert len(small) == 3
    for index in small:
        assert state[index]["master"].dtype == torch.float32
        assert not torch.equal(state[index]["master"], state[index]["master"].bfloat16().float())
    pair.close()
