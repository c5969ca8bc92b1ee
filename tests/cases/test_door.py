"""What users do to weights past their modules: views, raw data, in-place changes, other threads, other wrappers."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import pager
from pager.config import Checks
from tests import models
from tests.cases.same import Report, budget_bytes, check_equal, check_same, manage, train, train_step

CASE = models.make_mlp()


def make_mlp() -> Any:
    return models.make_mlp().model


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# -- in-place changes between forward and backward -------------------------------------------------------------


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
        loss = CASE.loss(model(*CASE.make_batch(1)[0]), None)
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


# -- views and raw data ----------------------------------------------------------------------------------------


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
        for param in model.parameters():
            views.append(param.detach())
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


# -- modes -----------------------------------------------------------------------------------------------------


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


# -- wrappers --------------------------------------------------------------------------------------------------


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
        with torch.no_grad():
            model[0].weight.set_(model[2].weight * 2)
        report("weight", model[0].weight)
        train(CASE, model, sgd(model), range(2), report)

    check_same(make_mlp, script)


def test_pruning_and_dropconnect_by_hand() -> None:
    from torch.nn.utils import prune

    def script(model: Any, report: Report) -> None:
        prune.l1_unstructured(model[2], "weight", amount=0.3)
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            x = F.linear(torch.ones(2, 96), F.dropout(model[0].weight, 0.2))
            (model[2](x).sum() + model[4].weight.square().sum()).backward()
            optimizer.step()
        prune.remove(model[2], "weight")
        report("pruned", model[2].weight)
        report("weights", {name: param for name, param in sorted(model.named_parameters())})

    check_same(make_mlp, script, share=0.7)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_checkpoints_with_dropout_draw_the_same_numbers(reentrant: bool) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = sgd(model)

        def inner(x: Tensor) -> Tensor:
            return F.dropout(torch.tanh(model[2](x)), 0.3)

        def outer(x: Tensor) -> Tensor:
            return checkpoint(inner, F.dropout(model[0](x), 0.3), use_reentrant=reentrant)  # type: ignore[no-any-return]

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


# -- threads and several models --------------------------------------------------------------------------------


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
        loss = CASE.loss(model(*CASE.make_batch(0)[0]), None)
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
