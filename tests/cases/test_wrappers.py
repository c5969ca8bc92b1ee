"""Case 35 and others: what is built around modules and weights, other threads, several models."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import pager
from tests import models
from tests.cases.same import (
    Report,
    batch_loss,
    budget_bytes,
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


def test_functional_call_and_stacked_parameters() -> None:
    def script(model: Any, report: Report) -> None:
        train(CASE, model, sgd(model), range(1), report)
        with torch.no_grad():
            other = {name: param * 0.5 for name, param in model.named_parameters()}
        report("out", torch.func.functional_call(model, other, torch.ones(1, 96)))
        report("own", torch.func.functional_call(model, dict(model.named_parameters()), torch.ones(1, 96)))
        report("vector", nn.utils.parameters_to_vector(model.parameters()))
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters()
        )
        train(CASE, model, sgd(model), range(1, 3), report)

    check_same(make_mlp, script, share=0.7)


class Double(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / 2


@pytest.mark.parametrize(
    ("what", "when"),
    [
        *((what, "before") for what in ("parametrize", "weight_norm", "spectral_norm", "orthogonal")),
        *((what, "after") for what in ("parametrize", "spectral_norm", "orthogonal")),
    ],
)
def test_parametrizations(what: str, when: str) -> None:
    def wrap(model: Any) -> None:
        if what == "parametrize":
            parametrize.register_parametrization(model[0], "weight", Double())
        elif what == "weight_norm":
            parametrizations.weight_norm(model[0])
        elif what == "spectral_norm":
            parametrizations.spectral_norm(model[0])
        else:
            parametrizations.orthogonal(model[0], orthogonal_map="cayley")

    def make() -> Any:
        model = make_mlp()
        if when == "before":
            torch.manual_seed(11)
            wrap(model)
        return model

    def script(model: Any, report: Report) -> None:
        if when == "after":
            torch.manual_seed(11)
            wrap(model)
        optimizer = sgd(model)
        for step in range(3):
            torch.manual_seed(step)
            train(CASE, model, optimizer, [step], report)
        report("weight", model[0].weight)

    check_same(make, script, share=0.7)


def test_a_parametrization_that_makes_new_parameters_of_a_managed_one_is_refused() -> None:
    model, twin = manage(make_mlp()), make_mlp()
    with pytest.raises(pager.ConfigError, match=r"0\.weight.*detach\(\)\.clone\(\)"):
        parametrizations.weight_norm(model[0])
    with pytest.raises(pager.ConfigError, match="copy"):
        nn.Parameter(model[0].weight)
    train(CASE, model, sgd(model), range(2))
    train(CASE, twin, sgd(twin), range(2))
    model.pager.close()
    check_equal(dict(twin.state_dict()), dict(model.state_dict()), "after the refusal")


def test_set_gives_values_of_the_same_kind_only() -> None:
    def script(model: Any, report: Report) -> None:
        old = model[0].weight.data
        with torch.no_grad():
            model[0].weight.set_(model[2].weight * 2)
        report("weights", [model[0].weight, old])
        del old
        train(CASE, model, sgd(model), range(2), report)

    check_same(make_mlp, script)


def test_pruning_and_dropconnect_by_hand() -> None:
    from torch.nn.utils import prune

    def script(model: Any, report: Report) -> None:
        prune.l1_unstructured(model[2], "weight", amount=0.3)
        optimizer = sgd(model)
        for _ in range(2):
            optimizer.zero_grad()
            x = F.linear(torch.ones(2, 96), F.dropout(model[0].weight, 0.2))
            (model[2](x).sum() + model[4].weight.square().sum()).backward()
            optimizer.step()
        prune.remove(model[2], "weight")
        report("pruned", model[2].weight)
        report("weights", dict(model.named_parameters()))

    check_same(make_mlp, script, share=0.7)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_with_dropout_draw_the_same_numbers(reentrant: bool) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = sgd(model)

        def inner(x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(model[2](x)), 0.3)

        def outer(x: Tensor) -> Tensor:
            return checkpoint(inner, F.dropout(model[0](x), 0.3), use_reentrant=reentrant)

        for step in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 192).view(2, 96).requires_grad_(True) * (step + 1)
            loss = checkpoint(outer, x, use_reentrant=reentrant).square().sum() + model[4](x).sum()
            loss.backward()
            optimizer.step()
            report("loss", loss)
            report("rng", torch.get_rng_state())

    check_same(make_mlp, script, share=0.4)


def test_users_own_saved_tensor_hooks() -> None:
    def script(model: Any, report: Report) -> None:
        packed: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tuple(tensor.shape))
            return tensor.double()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
            h = model[0](torch.ones(2, 96).requires_grad_(True))
            loss = torch.tanh(h).square().sum()
        loss.backward()
        report("grads", [p.grad for p in model[0].parameters()])
        with torch.autograd.graph.save_on_cpu():
            loss = model[2](torch.ones(2, 96)).square().sum()
        loss.backward()
        report("grads", [p.grad for p in model[2].parameters()])
        report("activations packed", (2, 96) in packed)

    check_same(make_mlp, script)


class Square(torch.autograd.Function):
    """A custom function that saves a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grads[0] @ weight, 2 * grads[0].t() @ x


def test_custom_functions_that_save_weights() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.full((2, 96), 0.1 * (step + 1), requires_grad=True)
            y = Square.apply(Square.apply(x, model[0].weight), model[2].weight)
            y.square().mean().backward()
            report("x", x.grad)
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()
        report("weights", list(model.parameters()))

    check_same(make_mlp, script, share=0.4)


def test_retained_graphs_and_two_losses() -> None:
    def script(model: Any, report: Report) -> None:
        y = model(torch.linspace(-1, 1, 192).view(2, 96))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        report("grads", [p.grad for p in model.parameters()])
        y.sum().backward(inputs=[model[0].weight, model[2].bias])
        report("inputs", [p.grad for p in model.parameters()])

    check_same(make_mlp, script)


def test_jacobians_and_vmap_of_paged_weights() -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.linspace(-1, 1, 96)
        report("jacobian", torch.autograd.functional.jacobian(lambda v: model[0](v)[:3], x))
        report("vjp", torch.autograd.functional.vjp(lambda v: model[0](v).sum(), x)[1])

    check_same(make_mlp, script)


def test_two_threads_use_one_model() -> None:
    plain, model = make_mlp(), manage(make_mlp(), share=0.5)
    inputs = [torch.full((2, 96), 0.1 * k) for k in range(24)]
    with torch.no_grad():
        expected = [plain(x) for x in inputs]
    found: dict[int, Tensor] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def work(part: int) -> None:
        try:
            start.wait()
            for k in range(part, len(inputs), 3):
                with torch.no_grad():
                    found[k] = model(inputs[k])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    check_equal(expected, [found[k] for k in range(len(inputs))], "threads")
    model.pager.close()


def test_backward_on_another_thread() -> None:
    def script(model: Any, report: Report) -> None:
        loss = batch_loss(CASE, model, 0)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        report("grads", [p.grad for p in model.parameters()])

    check_same(make_mlp, script)


def test_two_managed_models_at_once() -> None:
    def run(teacher: Any, student: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            x = CASE.make_batch(step)[0][0]
            with torch.no_grad():
                target = teacher(x)
            optimizer.zero_grad()
            loss = F.mse_loss(student(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                    old.lerp_(new, 0.1)
        return losses

    plain = [models.make_mlp(seed=1).model, make_mlp()]
    paged = [manage(models.make_mlp(seed=1).model, share=0.4), manage(make_mlp(), share=0.4)]
    check_equal(run(*plain), run(*paged), "losses")
    paged[0].pager.close()
    train_step(CASE, paged[1], 0)
    paged[1].pager.close()
    for one, other in zip(plain, paged, strict=True):
        check_equal(dict(one.state_dict()), dict(other.state_dict()), "weights")


def test_one_optimizer_over_two_managed_models_is_refused() -> None:
    one, two = manage(make_mlp()), manage(models.make_mlp(seed=1).model)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    (one(torch.ones(1, 96)) + two(torch.ones(1, 96))).sum().backward()
    with pytest.raises(pager.ConfigError, match="two managed models"):
        optimizer.step()
    one.pager.close()
    two.pager.close()


def test_replacing_the_storage_is_refused() -> None:
    model = manage(make_mlp())
    weight = model[0].weight
    for change in (
        lambda: weight.set_(torch.ones(3)),
        lambda: weight.data.resize_(3) if False else weight.resize_(3),
        lambda: weight.share_memory_(),
        lambda: model.share_memory(),
    ):
        with pytest.raises((pager.ConfigError, RuntimeError)):
            change()
    with pytest.raises(pager.ConfigError, match="cannot take data"):
        weight.data = torch.ones(3)
    assert budget_bytes(model, 0.5) > 0
    model.pager.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.t_(),
        lambda w: w.transpose_(0, 1),
        lambda w: w.unsqueeze_(0),
        lambda w: w.squeeze_(),
        lambda w: w.swapaxes_(0, 1),
        lambda w: w.as_strided_((96,), (1,)),
    ],
)
def test_another_shape_in_place_is_refused(change: Any) -> None:
    """It would be gone with the operation."""
    model = manage(make_mlp())
    with torch.no_grad(), pytest.raises(pager.ConfigError, match="another shape in place. Use .*[a-z], or"):
        change(model[0].weight)
    check_equal(dict(make_mlp().state_dict()), dict(model.state_dict()), "weights")
    model.pager.close()


def test_numpy_asks_for_detach_where_torch_does() -> None:
    plain, model = make_mlp(), manage(make_mlp())
    expected = plain[0].weight.detach().numpy()
    with torch.no_grad():
        assert (model[0].weight.numpy() == expected).all()
    with torch.inference_mode():
        assert (model[0].weight.numpy() == expected).all()
    assert (model[0].weight.numpy(force=True) == expected).all()
    for each in (plain, model):
        with pytest.raises(RuntimeError, match="requires grad"):
            each[0].weight.numpy()
    model.pager.close()
