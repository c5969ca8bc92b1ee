"""Cases 15 to 19 and 36: state dicts, saving and loading, resuming, copies, conversions, models on meta."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from tests import models
from tests.cases.same import (
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


def saved(value: Any) -> Any:
    """Through `torch.save` and back, by the strict loader."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert buffer.tell() < 2 * sum(t.nbytes for t in tensors_in(value)) + 2**16
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def test_a_state_dict_is_ordinary_and_full_at_any_time() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)

        def look() -> None:
            state = model.state_dict()
            for name, tensor in state.items():
                assert type(tensor) is Tensor, name
                assert tensor.device.type == "cpu", name
                assert not tensor.requires_grad, name
                report("strides", tensor.stride())
            report("keys", list(state))
            report("state", state)
            report(
                "kept",
                {
                    k: type(v) is nn.Parameter or isinstance(v, nn.Parameter)
                    for k, v in model.state_dict(keep_vars=True).items()
                },
            )

        look()
        train_step(CASE, model, 0)
        look()
        train_step(CASE, model, 1)
        look()
        optimizer.step()
        look()
        report("inner", model[0].state_dict())
        report("optimizer", saved(optimizer.state_dict()))

    check_same(make_mlp, script)


def test_a_state_dict_follows_the_model_as_torchs_alias_does_and_can_be_written_to() -> None:
    """torch's state dict aliases the parameters; so does ours where homes are host memory, until the next use."""
    model = manage(make_mlp(), share=0.3)
    state = model.state_dict()
    with torch.no_grad():
        state["0.weight"].fill_(0.25)
        state["2.bias"].fill_(0.5)
    assert torch.equal(model[0].weight.cpu(), torch.full((96, 96), 0.25))
    assert torch.equal(model.state_dict()["2.bias"], torch.full((96,), 0.5))
    x = torch.ones(1, 96)
    assert torch.equal(model[0](x), nn.functional.linear(x, torch.full((96, 96), 0.25), model[0].bias))
    model.pager.close()


def test_a_state_dict_that_is_kept_while_training_goes_on() -> None:
    """Aliases that nobody wrote to are no hindrance, and none of them drops what the device knows better."""

    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        kept = [model.state_dict()]
        for step in range(4):
            train(CASE, model, optimizer, [step], report)
            kept.append(model.state_dict())
            report("state", kept[-1])
        with torch.no_grad():
            kept[1]["0.weight"].mul_(2)
        train(CASE, model, optimizer, [4], report)
        report("weights", list(model.parameters()))

    check_same(make_mlp, script)


def test_a_snapshot_of_a_state_dict_stays_as_it_was() -> None:
    model = manage(make_mlp(), share=0.3)
    optimizer = adamw(model)
    snapshot = copy.deepcopy(model.state_dict())
    expected = copied(model.state_dict())
    train(CASE, model, optimizer, range(3))
    check_equal(expected, snapshot, "deepcopy of a state dict")
    assert not torch.equal(snapshot["0.weight"], model.state_dict()["0.weight"])
    model.pager.close()


def test_exponential_averages_over_state_dict_and_named_parameters() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        other = copy.deepcopy(model)
        swa = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for step in range(3):
            train(CASE, model, optimizer, [step], report)
            with torch.no_grad():
                for name, tensor in model.state_dict().items():
                    shadow[name].lerp_(tensor, 0.1)
                for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
            swa.update_parameters(model)
        report("shadow", shadow)
        report("other", list(other.parameters()))
        report("swa", list(swa.module.parameters()))
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(shadow[name])
        train(CASE, model, optimizer, range(3, 5), report)

    check_same(make_mlp, script)


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_tied_weights_are_saved_once_and_stay_tied(share: float, tmp_path: Path) -> None:
    """Also where the weight's home is the device, so that a state dict is a copy."""
    case, twin = models.make_decoder(), models.make_decoder()
    model = manage(case.model, share=share)
    optimizer = adamw(model)
    torch.manual_seed(0)
    train(case, model, optimizer, range(2))
    state = model.state_dict()
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    path = tmp_path / "model.pt"
    for _ in range(2):
        torch.save(model.state_dict(), path)
        loaded = torch.load(path, weights_only=True)
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
        twin.model.load_state_dict(loaded)
        model.load_state_dict(loaded)
        assert model.head.weight is model.embed.weight
        tokens = case.make_batch(5)[0]
        with torch.no_grad():
            check_equal(twin.model.eval()(*tokens), model.eval()(*tokens), "logits")
        model.train()
        twin.model.train()
        train(case, model, optimizer, range(1))
    model.pager.close()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loading(assign: bool, dtype: torch.dtype) -> None:
    source = {k: v.to(dtype) for k, v in models.make_mlp(seed=7, depth=2).model.state_dict().items()}

    def script(model: Any, report: Report) -> None:
        optimizer = None if assign else adamw(model)
        if optimizer is not None:
            train(CASE, model, optimizer, range(2), report)
        report("keys", list(model.load_state_dict({k: v.clone() for k, v in source.items()}, assign=assign)))
        report("dtypes", [p.dtype for p in model.parameters()])
        report("state", model.state_dict())
        optimizer = optimizer or adamw(model)
        for step in range(2):
            optimizer.zero_grad()
            x = CASE.make_batch(step)[0][0].to(next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            report("loss", loss)

    check_same(make_mlp, script)


def test_loading_what_does_not_fit() -> None:
    def script(model: Any, report: Report) -> None:
        full = make_mlp().state_dict()
        partial = OrderedDict((k, v + 1) for k, v in full.items() if not k.startswith("2."))
        with pytest.raises(RuntimeError, match=r"Missing key.*2\.weight"):
            model.load_state_dict(partial)
        report("after strict", model.state_dict())
        report("missing", list(model.load_state_dict(partial, strict=False)))
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**full, "more": torch.ones(3)})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**full, "0.weight": torch.ones(3)})
        report("after all", model.state_dict())
        train(CASE, model, adamw(model), range(2), report)

    check_same(make_mlp, script)


def test_loading_in_the_middle_of_accumulation_and_of_a_graph() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        train_step(CASE, model, 0)
        loss = batch_loss(CASE, model, 1)
        model.load_state_dict(models.make_mlp(seed=7, depth=2).model.state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        report("grads", model[0].weight.grad is not None)
        optimizer.zero_grad()
        train(CASE, model, optimizer, range(2), report)

    check_same(make_mlp, script)


@pytest.mark.parametrize(
    ("first", "second"), [("plain", "managed"), ("managed", "plain"), ("managed", "managed")]
)
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_resuming_equals_the_uninterrupted_run(first: str, second: str, optimizer_class: Any) -> None:
    def make() -> tuple[Any, Any, Any]:
        model = make_mlp()
        kwargs = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {"amsgrad": True}
        optimizer = optimizer_class(model.parameters(), lr=0.01, **kwargs)
        return model, optimizer, CosineAnnealingLR(optimizer, 10)

    def go(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(CASE, model, optimizer, [step])
            scheduler.step()

    whole = make()
    go(*whole, range(6))
    one = make()
    if first == "managed":
        manage(one[0], one[1], share=0.3)
    go(*one, range(3))
    checkpoint = saved([part.state_dict() for part in one])
    if first == "managed":
        one[0].pager.close()
    two = make()
    if second == "managed":
        manage(two[0], share=0.3)
    for part, state in zip(two, checkpoint, strict=True):
        part.load_state_dict(state)
    assert two[2].get_last_lr() == one[2].get_last_lr()
    go(*two, range(3, 6))
    check_equal([part.state_dict() for part in whole], [copied(part.state_dict()) for part in two], "resumed")
    if second == "managed":
        two[0].pager.close()
        check_ordinary(two[0])


def test_an_optimizer_state_of_another_dtype_or_shape() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        train(CASE, model, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"].double()
        optimizer.load_state_dict(state)
        report("state", optimizer.state_dict())
        train(CASE, model, optimizer, range(2, 4), report)
        smaller = copy.deepcopy(optimizer.state_dict())
        smaller["param_groups"][0]["params"] = smaller["param_groups"][0]["params"][:-1]
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(smaller)
        report("kept", optimizer.state_dict())
        optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        train(CASE, model, optimizer, range(4, 6), report)

    check_same(make_mlp, script)


def test_state_on_disk_saves_and_loads(tmp_path: Path) -> None:
    """Host memory is too small for the optimizer, which lives on disk."""
    plain = make_mlp()
    plain_optimizer = adamw(plain)
    train(CASE, plain, plain_optimizer, range(4))
    model = make_mlp()
    from pager import host_limit
    from pager.homes import Homes

    del host_limit, Homes
    manage(model, share=0.3, disk=tmp_path)
    optimizer = adamw(model)
    train(CASE, model, optimizer, range(2))
    parts = saved([model.state_dict(), optimizer.state_dict()])
    model.pager.close()
    again = manage(make_mlp(), share=0.3, disk=tmp_path)
    its = adamw(again)
    again.load_state_dict(parts[0])
    its.load_state_dict(parts[1])
    train(CASE, again, its, range(2, 4))
    again.pager.close()
    check_equal(dict(plain.state_dict()), dict(again.state_dict()), "resumed")


class Lora(nn.Module):
    """A frozen base with a trainable low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base = nn.Linear(256, 256)
        self.base.requires_grad_(False)
        self.down = nn.Linear(256, 20, bias=False)
        self.up = nn.Linear(20, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return torch.tanh(result)


def test_adapters_on_a_frozen_base() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(torch.full((2, 256), 0.1 * step)).square().sum()
            loss.backward()
            optimizer.step()
            report("loss", loss)
        report("base", model.base.weight.grad is None)
        report("adapters", saved({k: v for k, v in model.state_dict().items() if "base" not in k}))

    model = check_same(Lora, script, close=False)
    kinds = [(s.kind, s.name) for s in model.pager.plan.segments if "base" in s.name]
    assert kinds == [("parameter", "base.weight")]
    model.pager.close()
