"""Case 36: copies, conversions, models on meta, closing in mid-training."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from tests import models
from tests.cases.same import (
    PAGE,
    Report,
    batch_loss,
    check_equal,
    check_ordinary,
    check_same,
    copied,
    manage,
    train,
    train_step,
)


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make_mlp() -> Any:
    return models.make_mlp(depth=2).model


CASE = models.make_mlp(depth=2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_managed_model_are_ordinary_models(how: str) -> None:
    case = models.make_decoder(dropout=0.0)
    model = manage(case.model)
    untrained = pickle.loads(pickle.dumps(model))
    check_equal(
        model(*case.make_batch(0)[0]), untrained(*case.make_batch(0)[0]), "hooks that wait for a batch"
    )
    train(case, model, adamw(model), range(2))
    train_step(case, model, 2)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert getattr(other, "pager", None) is None
    assert other.head.weight is other.embed.weight
    for name, param in other.named_parameters():
        assert type(param) is nn.Parameter, name
    check_equal(dict(model.state_dict()), dict(other.state_dict()), how)
    other.zero_grad()
    model.zero_grad()
    train(case, model, adamw(model), range(3, 5))
    train(case, other, adamw(other), range(3, 5))
    check_equal(dict(model.state_dict()), dict(other.state_dict()), f"{how}, trained on")
    manage(other).pager.close()
    model.pager.close()


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to(dtype)": lambda model: model.to(torch.float64),
    "to(cpu)": lambda model: model.to("cpu"),
    "cpu": lambda model: model.cpu(),
    "float": lambda model: model.float(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "one module": lambda model: model[0].double().float(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversions_while_managed_equal_those_of_an_ordinary_model(name: str) -> None:
    def make() -> Any:
        return models.make_cnn(channels=48).model.eval()

    def script(model: Any, report: Report) -> None:
        x = torch.linspace(-1, 1, 4 * 3 * 144).view(4, 3, 12, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            if step == 2:
                optimizer.zero_grad()
                report("same object", CONVERSIONS[name](model) is not None)
                report("layout", [(p.dtype, p.stride(), p.shape) for p in model.parameters()])
            optimizer.zero_grad()
            y = model(x.to(model[0].weight.dtype))
            y.float().square().mean().backward()
            optimizer.step()
            report("y", y)
            report("weights", list(model.parameters()))

    check_same(make, script)


def test_conversion_with_gradients_present() -> None:
    def script(model: Any, report: Report) -> None:
        train_step(CASE, model, 0)
        model.double()
        report("grads", [p.grad for p in model.parameters()])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        report("weights", list(model.parameters()))

    check_same(make_mlp, script)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_moving_a_managed_model_away_is_refused_and_leaves_it_whole(device: str) -> None:
    model, twin = manage(make_mlp()), make_mlp()
    error = (pager.ConfigError, RuntimeError, AssertionError) if device == "cuda" else pager.ConfigError
    with pytest.raises(error):
        model.to(device)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    train(CASE, model, adamw(model), range(2))
    train(CASE, twin, adamw(twin), range(2))
    model.pager.close()
    check_equal(dict(twin.state_dict()), dict(model.state_dict()), "after the refusal")


def make_meta(make: Callable[[], Any]) -> Any:
    """The model's structure without data."""
    with torch.device("meta"):
        return make()


def test_a_meta_model_is_initialised_by_its_modules() -> None:
    def make() -> Any:
        return nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.LayerNorm(128), nn.Embedding(200, 96))

    torch.manual_seed(5)
    plain = make()
    meta = make_meta(make)
    torch.manual_seed(5)
    model = manage(meta, device_budget="1MiB")
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), "reset_parameters")
    model.pager.close()
    check_ordinary(model)


def test_a_meta_model_with_init_and_buffers() -> None:
    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.constant_(param, 0.125)
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()

    meta = make_meta(lambda: models.make_cnn().model)
    model = manage(meta, device_budget="4MiB", init=init)
    for name, param in model.named_parameters():
        assert bool((param == 0.125).all()), name
    train(models.make_cnn(), model, adamw(model), range(2))
    model.pager.close()


def test_a_meta_model_left_to_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Module):
        """Parameters without a way to reset them."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(96, 96))
            self.b = nn.Parameter(torch.randn(96))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.a + self.b

    torch.manual_seed(0)
    source = Bare()
    model = manage(make_meta(Bare), device_budget="1MiB")
    assert "no reset_parameters" in caplog.text
    with pytest.raises(pager.ConfigError, match=r"'a'.*no value.*load a state dict"):
        model(torch.ones(1, 96))
    model.load_state_dict(source.state_dict())
    check_equal(source(torch.ones(1, 96)), model(torch.ones(1, 96)).detach(), "loaded")
    model.pager.close()
    check_equal(dict(source.state_dict()), dict(model.state_dict()), "closed")


def test_a_meta_model_loaded_by_assignment() -> None:
    source = models.make_decoder(dropout=0.0)
    twin = models.make_decoder(dropout=0.0)
    model = manage(make_meta(lambda: models.make_decoder(dropout=0.0).model), device_budget="1MiB")
    model.load_state_dict(copied(dict(source.model.state_dict())), assign=True)
    model.head.weight = model.embed.weight
    train(source, model, adamw(model), range(2))
    train(twin, twin.model, adamw(twin.model), range(2))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "trained")


def test_close_and_manage_again_in_mid_training() -> None:
    plain, model = make_mlp(), make_mlp()
    plain_optimizer, optimizer = adamw(plain), adamw(model)
    train(CASE, plain, plain_optimizer, range(6))
    for start in (0, 2, 4):
        manage(model, optimizer, share=0.3 + 0.2 * start)
        train(CASE, model, optimizer, range(start, start + 1))
        model.pager.close()
        check_ordinary(model)
        assert all(type(v) is Tensor for s in optimizer.state.values() for v in s.values())
        train(CASE, model, optimizer, range(start + 1, start + 2))
    check_equal(dict(plain.state_dict()), dict(model.state_dict()), "weights")
    check_equal(plain_optimizer.state_dict(), optimizer.state_dict(), "state")


def test_close_with_gradients_views_and_a_graph_alive() -> None:
    def script(model: Any, report: Report) -> None:
        train_step(CASE, model, 0)
        view = model[0].weight[:3]
        loss = batch_loss(CASE, model, 1)
        if "pager" in model.__dict__:
            model.pager.close()
        report("view", view)
        loss.backward()
        report("grads", [p.grad for p in model.parameters()])

    model = manage(make_mlp(), share=1.0)
    reports: list[Any] = []
    script(model, lambda name, value: reports.append(copied(value)))
    expected: list[Any] = []
    script(make_mlp(), lambda name, value: expected.append(copied(value)))
    check_equal(expected, reports, "closed under way")
    assert model[0].weight.nbytes > PAGE
