"""What users do to weights past their modules: views, raw data, in-place changes, other threads, other wrappers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from tests import models
from tests.cases.same import (
    Report,
    batch_loss,
    check_equal,
    check_same,
    manage,
    train,
    train_step,
)

CASE = models.make_mlp()


def make_mlp() -> Any:
    return models.make_mlp().model


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_an_activation_modified_in_place_raises_torchs_error() -> None:
    def script(model: Any, report: Report) -> None:
        h = torch.tanh(model[0](torch.ones(2, 96)))
        y = model[2](h)
        h.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        report("reached", True)
        model.zero_grad()
        report("loss", train_step(CASE, model, 0))

    check_same(make_mlp, script)


@pytest.mark.parametrize("how", ["add_", "copy_", "data", "slice", "optimizer", "view"])
def test_a_weight_modified_between_forward_and_backward(how: str) -> None:
    """Raises as in torch; through ``.data`` torch lets it pass, and so do we."""

    def script(model: Any, report: Report) -> None:
        optimizer = sgd(model)
        train(CASE, model, optimizer, range(1))
        loss = batch_loss(CASE, model, 1)
        weight = model[2].weight
        with torch.no_grad():
            if how == "add_":
                weight.add_(1)
            elif how == "copy_":
                weight.copy_(torch.ones(96, 96))
            elif how == "slice":
                weight[0] = 3
            elif how == "view":
                weight.t().mul_(2)
            elif how == "data":
                weight.data.mul_(2)
            else:
                optimizer.step()
        try:
            loss.backward()
        except RuntimeError as error:
            report("error", "modified by an inplace operation" in str(error))
        else:
            report("grads", [p.grad for p in model.parameters()])

    check_same(make_mlp, script)


def test_in_place_initialisation_and_surgery() -> None:
    def script(model: Any, report: Report) -> None:
        nn.init.xavier_uniform_(model[0].weight)
        nn.init.orthogonal_(model[2].weight)
        with torch.no_grad():
            model[4].weight[3:7, ::2] = 0.5
            model[4].weight.clamp_(-0.1, 0.1)
            model[6].weight.copy_(model[4].weight.t())
            model[8].weight.index_add_(0, torch.tensor([0, 2]), torch.ones(2, 96))
            model[8].weight += model[6].weight
            model[0].weight.data = model[2].weight.data * 2
            model[2].weight.data[:4] = 7
            torch.add(model[4].weight, 1, out=model[4].weight)
        report("weights", list(model.parameters()))
        train(CASE, model, sgd(model), range(2), report)

    check_same(make_mlp, script)


def test_views_kept_by_the_user_stay_right_while_pages_move() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = sgd(model)
        weight = model[0].weight
        kept = [weight.t(), weight[:2], weight.view(-1)[5:9], weight.detach(), weight.detach()[1:, ::3].t()]
        train(CASE, model, optimizer, range(2), report)
        report("views follow", kept)
        with torch.no_grad():
            kept[3][0, 0] = 42.0
        report("seen", weight[0, 0])
        report("used", model[0](torch.ones(1, 96)))
        del kept
        gc.collect()
        train(CASE, model, optimizer, range(2, 4), report)

    check_same(make_mlp, script, share=0.5)


def test_views_of_everything_do_not_fit_and_say_so_and_letting_go_helps() -> None:
    model = manage(models.make_mlp(depth=8).model, share=0.2)
    views: list[Tensor] = []
    with pytest.raises(pager.BudgetError, match=r"KiB.*drop views"):
        views.extend(param.detach() for param in model.parameters())
    views.clear()
    case, twin = models.make_mlp(depth=8), models.make_mlp(depth=8)
    train(case, model, sgd(model), range(2))
    train(twin, twin.model, sgd(twin.model), range(2))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "trained on")


def test_data_numpy_and_pointers() -> None:
    def script(model: Any, report: Report) -> None:
        weight = model[0].weight
        data = weight.data
        report("data", (type(data).__name__ == "Tensor", data.requires_grad, data.shape))
        data.mul_(2)
        report("written by data", weight)
        with pytest.raises(RuntimeError, match="requires grad"):
            weight.numpy()
        array = weight.detach().numpy()
        array[0, :] = 3.0
        report("written by numpy", weight)
        report("used", model[0](torch.ones(1, 96)))
        report("array", torch.from_numpy(weight.detach().numpy().copy()))
        report("list", weight[0, :3].tolist())
        report("item", weight[0, 0].item())
        report("dlpack", torch.from_dlpack(weight.detach()))
        assert weight.data_ptr() % 64 == 0
        del data, array
        gc.collect()
        train(CASE, model, sgd(model), range(2), report)
        report("storage bytes", weight.untyped_storage().nbytes())

    check_same(make_mlp, script, share=0.5)


def test_escaped_writes_survive_eviction() -> None:
    model = manage(make_mlp(), share=0.2)
    model[0].weight.data.fill_(0.5)
    for layer in model:
        layer(torch.ones(1, 96))
    assert bool((model[0].weight == 0.5).all())
    model[2].weight.detach().numpy()[:] = 0.25
    for layer in model:
        layer(torch.ones(1, 96))
    assert bool((model[2].weight == 0.25).all())
    model.pager.close()
    assert bool((model[2].weight == 0.25).all())


def test_resident_keeps_a_module_for_code_that_bypasses_python() -> None:
    model = manage(make_mlp(), share=0.5)
    with model.pager.resident(model[0]):
        pointer = model[0].weight.data_ptr()
        with torch._C.DisableTorchFunctionSubclass():
            assert bool(torch.isfinite(model[0].weight).all())
            model[0].weight.detach().fill_(0.125)
        for layer in model[2:]:
            layer(torch.ones(1, 96))
        assert model[0].weight.data_ptr() == pointer
        with model.pager.resident(model[0]):
            assert model[0].weight.data_ptr() == pointer
    assert bool((model[0].weight == 0.125).all())
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(torch.isnan(model[0].weight).all())
    model.pager.close()
    assert bool((model[0].weight == 0.125).all())


def test_metadata_costs_no_fault() -> None:
    model = manage(make_mlp(), share=0.2)
    weight = model[0].weight
    before = model.pager.statistics()
    assert weight.shape == (96, 96)
    assert (weight.dtype, weight.device.type, weight.stride(), weight.is_contiguous()) == (
        torch.float32,
        "cpu",
        (96, 1),
        True,
    )
    assert (weight.numel(), weight.nbytes, weight.dim(), weight.is_leaf, weight.requires_grad) == (
        9216,
        36864,
        2,
        True,
        True,
    )
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, Tensor)
    assert weight.grad is None
    assert weight in set(model.parameters())
    assert len({weight: 1}) == 1
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in make_mlp().parameters())
    after = model.pager.statistics()
    assert (
        after.hits + after.major_faults + after.minor_faults
        == before.hits + before.major_faults + before.minor_faults
    )
    model.pager.close()


def test_printing_and_comparing() -> None:
    def script(model: Any, report: Report) -> None:
        report("repr", repr(model))
        report("values", str(model[0].weight.detach()))
        report("equal", torch.equal(model[0].weight, model[0].weight))
        report("ordinary", isinstance(model[0].weight + 1, nn.Parameter))
        report("type", type(model[0].weight * 2) is Tensor)
        report("sum", sum(p.sum() for p in model.parameters()))
        report("contains", 5 in model[0].weight)
        report("iterated", torch.stack(list(model[0].weight)))

    check_same(make_mlp, script)
    model = manage(make_mlp())
    assert "Parameter containing" in repr(model[0].weight)
    model.pager.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_between_training_steps(mode: Any) -> None:
    case = models.make_decoder()

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            train(case, model, optimizer, [step], report)
            model.eval()
            with mode():
                tokens = case.make_batch(9)[0][0][:1, :4]
                for _ in range(4):
                    logits = model(tokens)
                    tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
                report("generated", tokens.tolist())
                report("weight", (model.embed.weight * 1.0).sum().item())
            model.train()

    check_same(lambda: models.make_decoder().model, script, share=0.3)


@pytest.mark.parametrize("daemon", ["thread", "inline"])
def test_first_use_in_inference_mode(daemon: str) -> None:
    def script(model: Any, report: Report) -> None:
        with torch.inference_mode():
            report("out", model(torch.ones(1, 96)))
            kept = model[0].weight.t()
            report("kept", kept)
        del kept
        train(CASE, model, sgd(model), range(2), report)
        with torch.inference_mode():
            report("out", [layer(torch.ones(1, 96)) for layer in model])
        train(CASE, model, sgd(model), range(2, 4), report)

    checks = Checks(streams="late", happens_before=True, poison=True, daemon=daemon)
    check_same(make_mlp, script, share=0.12, checks=checks)
