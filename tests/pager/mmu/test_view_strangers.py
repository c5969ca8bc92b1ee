"""Views of paged weights where others take part: modes, transforms, other classes of tensors, code that torch runs for
the user, and functions that do not ask ``__torch_function__``. All as with plain tensors, or refused.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pager.mmu.view import PagedView
from tests.cases.same import Report, check_equal, check_same, copied, manage
from tests.pager.mmu.test_view import WIDTH, leased, report_leases
from tests.pager.mmu.test_view_habits import Product, Script, gradients, make, use_others


def names(script: Script) -> str:
    return script.__name__


# -- no hooks --------------------------------------------------------------------------------------


def forbidden(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = torch.tanh(x @ model.weights[0]) @ model.weights[1].t()
        normed = F.layer_norm(loss, (WIDTH,), weight=model.weights[2][0])
        joined = torch.linalg.multi_dot([x, model.weights[2], model.weights[3]])
    use_others(model)
    (normed.sum() + joined.sum()).backward()
    report("gradients", gradients(model))
    report("x", x.grad)


def forbidden_in_place(model: Any, report: Report) -> None:
    model(torch.randn(2, WIDTH)).sum().backward()
    gradient = model.weights[0].grad
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        report("same", [gradient.mul_(2) is gradient, torch.add(gradient, 1, out=gradient) is gradient])
    del gradient
    use_others(model)
    report("gradients", gradients(model))


def transformed(model: Any, report: Report) -> None:
    x = torch.randn(3, WIDTH)
    weight = model.weights[0]
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda a: (a @ weight).exp(),
        lambda a: (a @ weight.t()).exp(),
        lambda a: F.linear(a, weight, weight[0]).exp(),
        lambda a: torch.tanh(a @ weight) @ model.weights[1].t(),
        lambda a: torch.tanh(a @ weight) @ model.weights[1],
    ]
    for use in uses:
        report("grad", torch.func.grad(lambda a, f=use: f(a).sum())(x))
        report("each", torch.vmap(torch.func.grad(lambda a, f=use: f(a).sum()))(x))
        report("jvp", torch.func.jvp(use, (x,), (x,)))
        report("forward", torch.func.jacfwd(use)(x[0]))
        pull = torch.func.vjp(use, x)[1]
        use_others(model)
        report("vjp", pull(torch.ones(3, WIDTH)))
        del pull


def transformed_with_gradients_outside(model: Any, report: Report) -> None:
    x = torch.randn(3, WIDTH)
    mapped = torch.vmap(lambda a: (a @ model.weights[1].t()).exp())(x)
    report_leases(model, report, [])  # this one allows them
    inner = torch.func.grad(lambda a: (a @ model.weights[0]).exp().sum())(x)
    use_others(model)
    (inner.sum() + mapped.sum()).backward()
    report("gradients", gradients(model))


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"
)  # torch's own, on the way to forward mode
@pytest.mark.parametrize(
    "script", [forbidden, forbidden_in_place, transformed, transformed_with_gradients_outside], ids=names
)
def test_where_torch_allows_no_hooks_weights_stay_until_backward(script: Script) -> None:
    check_same(make, script, share=0.4)


# -- code that torch runs for the user -------------------------------------------------------------


def _hooked(model: Any) -> Tensor:
    item: Tensor = model.weights[0].t()[3, 4]
    item.register_hook(lambda grad: grad * (model.weights[2].t() @ torch.ones(WIDTH)).sum().detach())
    return item


def _hooked_weight(model: Any) -> Tensor:
    weight: Tensor = model.weights[0]
    weight.register_hook(lambda grad: grad * (model.weights[2].t() @ torch.ones(WIDTH)).sum().detach())
    return weight


def _recomputed(model: Any) -> Tensor:
    x = torch.ones(2, WIDTH, requires_grad=True)
    products = checkpoint(
        lambda a: torch.tanh(a @ model.weights[0].t()) @ model.weights[1], x, use_reentrant=False
    )
    assert isinstance(products, Tensor)
    return products.sum()


def _distance(model: Any, *args: Tensor) -> Tensor:
    return F.triplet_margin_with_distance_loss(
        *args, distance_function=lambda a, b: ((a - b) @ model.weights[3].t()).norm(dim=1)
    )


RUN_FOR_THE_USER: dict[str, Callable[[Any], Any]] = {
    "backward": lambda m: _hooked(m).backward(),
    "autograd.backward": lambda m: torch.autograd.backward([_hooked(m)]),
    "with gradients": lambda m: torch.autograd.backward(_hooked(m), m.weights[1].detach()[0, 0]),
    "inputs": lambda m: _recomputed(m).backward(inputs=[m.weights[1]]),
    "one input": lambda m: torch.autograd.backward(_recomputed(m), inputs=m.weights[0]),
    "inputs and a view": lambda m: torch.autograd.backward([_hooked(m)], inputs=list(m.parameters())),
    "no input": lambda m: torch.autograd.backward([_recomputed(m), _hooked(m)]),
    "a weight": lambda m: _hooked_weight(m).backward(m.weights[1].detach().t()),
    "a distance of views": lambda m: _distance(
        m, m.weights[0][:2], m.weights[1][:2], torch.ones(2, WIDTH)
    ).backward(),
    "a distance of weights": lambda m: _distance(m, m.weights[0], m.weights[1], m.weights[2].t()).backward(),
}


@pytest.mark.parametrize("name", RUN_FOR_THE_USER)
def test_code_that_torch_runs_for_the_user_finds_the_door_open(name: str) -> None:
    def script(model: Any, report: Report) -> None:
        RUN_FOR_THE_USER[name](model)
        report("gradients", gradients(model))

    check_same(make, script, share=0.4)


def test_an_input_that_needs_no_gradient_is_refused_as_by_torch() -> None:
    def script(model: Any, report: Report) -> None:
        loss = _recomputed(model)
        model.weights[2].requires_grad_(False)
        with pytest.raises(RuntimeError, match="requires_grad|require grad"):
            loss.backward(inputs=[model.weights[2]])
        report("gradients", gradients(model))

    check_same(make, script)


# -- modes and classes of others -------------------------------------------------------------------


class Labelled(Tensor):
    """A class of a user's, with torch's own ``__torch_function__``."""


def with_a_class_of_the_users(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH).as_subclass(Labelled)
    view = model.weights[0].t()
    for product in (x @ view, F.linear(x, view), torch.cat([view, x]), view.as_subclass(Labelled)[0]):
        report("class", isinstance(product, Labelled))
        report("value", product.as_subclass(Tensor))
    assert not hasattr(model, "pager") or type(view) is PagedView


def traced_by_fx(model: Any, report: Report) -> None:
    """Dispatch modes refuse classes that they do not know."""
    view = model.weights[0].detach().t()
    x = torch.ones(2, WIDTH)
    report("constant", make_fx(lambda a: torch.tanh(a @ view))(torch.randn(2, WIDTH))(x))
    report("argument", make_fx(lambda a, b: torch.tanh(a @ b))(x, view)(x, view))
    assert not hasattr(model, "pager") or type(view) is PagedView


class Seen(TorchDispatchMode):
    """Writes down the operations that the user's program runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # saved by us, not by torch
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def seen_by_a_mode(model: Any, report: Report) -> None:
    """What brings a weight there is none of the program's."""
    x = torch.randn(3, WIDTH)
    view = model.weights[0].t()
    with torch.no_grad():
        model.weights[0].mul_(1.5)
    with Seen() as seen:
        mapped = torch.vmap(lambda a: (a @ model.weights[1]).exp())(x)
        product = (x @ view).exp()
    report("operations", seen.names)
    (mapped.sum() + product.sum()).backward()
    report("gradients", gradients(model))


@pytest.mark.parametrize("script", [with_a_class_of_the_users, traced_by_fx, seen_by_a_mode], ids=names)
def test_others_see_a_tensor_of_torchs_own_class(script: Script) -> None:
    check_same(make, script, share=0.4)


def test_a_parameter_made_of_a_view_is_copied_as_a_parameter() -> None:
    def script(model: Any, report: Report) -> None:
        parameter = nn.Parameter(model.weights[0].t())
        buffer = io.BytesIO()
        torch.save(parameter, buffer)
        buffer.seek(0)
        copies = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(buffer)]
        report("classes", [type(made).__name__ for made in copies])
        report("values", copies)
        report("text", repr(parameter))
        (parameter * 2).sum().backward()
        report("gradient", parameter.grad)

    check_same(make, script, share=0.4)


# -- aliases that are no views ---------------------------------------------------------------------


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "unsafe_chunk": lambda w: w.detach().unsafe_chunk(3)[1],
    "unsafe_split": lambda w: w.unsafe_split(10)[2].detach(),
    "written by a view": lambda w: w.data[1:].add_(w.detach()[1:]),
    "handed through": lambda w: torch.atleast_1d([w.data[2:], w])[0],
    "broadcast": lambda w: torch.broadcast_tensors(w.data[2:], w.detach()[2:])[0],
}


@pytest.mark.parametrize("name", ALIASES)
def test_what_counts_its_own_writes_is_no_view(name: str) -> None:
    """So torch sees those writes, and not those to the weight."""

    def script(model: Any, report: Report) -> None:
        weight = model.weights[0]
        alias = ALIASES[name](weight)
        report("class", type(alias) is Tensor)
        x = torch.randn(2, WIDTH, requires_grad=True)
        unseen = (x @ alias.t()).sum()
        with torch.no_grad():
            weight.mul_(2)
        if name != "unsafe_split":  # detached, so of the split's own counter, but so is what follows
            unseen.backward()
        seen = (x @ alias.t()).sum()
        alias.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            seen.backward()
        report("x", x.grad)
        del alias, seen, unseen
        use_others(model)
        report("weight", weight + 0)

    check_same(make, script, share=0.2)


@pytest.mark.parametrize("split", [torch.unsafe_chunk, torch.unsafe_split])
def test_a_write_that_only_an_alias_counts_is_kept(split: Any) -> None:
    def script(model: Any, report: Report) -> None:
        with torch.no_grad():
            for part in split(model.weights[0], 3):
                part.mul_(2)
        del part
        use_others(model)
        report("weight", model.weights[0] + 0)

    check_same(make, script, share=0.2)


# -- the graph of a view after a write to the weight -----------------------------------------------


def printed(model: Any, view: Tensor) -> Tensor:
    assert "grad_fn" in repr(view)
    return (view.exp() @ torch.ones(WIDTH)).sum()


def beside_others(model: Any, view: Tensor) -> Tensor:
    return torch.stack([view, model.weights[1].t(), view]).exp().sum()


def from_the_view(model: Any, view: Tensor) -> Tensor:
    torch.autograd.backward([view, view[3, 4]], [torch.ones(WIDTH, WIDTH), None])
    return view.exp().sum()


@pytest.mark.parametrize("use", [printed, beside_others, from_the_view], ids=names)
def test_the_graph_of_a_view_is_derived_with_the_weights_strides(use: Any) -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].t()
        with torch.no_grad():
            model.weights[0].mul_(1.5)
        use(model, view).backward()
        report("gradients", gradients(model))

    check_same(make, script, share=0.4)


def test_also_that_of_a_view_made_while_the_weight_was_frozen() -> None:
    """Torch gives it one after a write, where something beside it needs a gradient."""

    def script(model: Any, report: Report) -> None:
        weight = model.weights[0].requires_grad_(False)
        view, detached = weight.t(), weight.detach()[3:5]
        weight.requires_grad_(True)
        with torch.no_grad():
            weight.mul_(1.5)
        x = torch.randn(WIDTH, requires_grad=True)
        before = view.requires_grad
        (view @ x).exp().sum().backward()
        report("graphs", [before, view.requires_grad, detached.requires_grad])
        report("detached", (detached @ x).sum())
        report("x", x.grad)
        report("gradients", gradients(model))
        if hasattr(model, "pager"):
            assert not detached._pager_view.is_stale()  # so that nobody looks for its graph

    check_same(make, script, share=0.4)


def _by_function(x: Tensor, view: Tensor) -> Tensor:
    product: Tensor = Product.apply(x, view)
    return product


def _by_checkpoint(x: Tensor, view: Tensor) -> Tensor:
    product = checkpoint(lambda a, b: (a @ b).exp(), x, view, use_reentrant=True)
    assert isinstance(product, Tensor)
    return product


@pytest.mark.parametrize("apply", [_by_function, _by_checkpoint])
@pytest.mark.parametrize("by", ["backward", "grad"])
def test_a_graph_that_torch_derived_out_of_sight_is_refused(apply: Any, by: str) -> None:
    if (apply, by) == (_by_checkpoint, "grad"):
        by = "backward"  # torch has no other way through a reentrant checkpoint
    model = manage(make(), share=0.4)
    weight = model.weights[0]
    view = weight.t()
    with torch.no_grad():
        weight.mul_(1.5)
    x = torch.randn(2, WIDTH, requires_grad=True)
    loss = apply(x, view).sum()
    with pytest.raises(RuntimeError, match=r"weights\.0: a view of it that is older"):
        loss.backward() if by == "backward" else torch.autograd.grad(loss, weight)
    assert gradients(model)["weights.0"] is None
    fresh = weight.t()
    apply(x, fresh).sum().backward()
    assert weight.grad is not None
    plain: Any = make()
    with torch.no_grad():
        plain.weights[0].mul_(1.5)
    apply(x.detach().requires_grad_(), plain.weights[0].t()).sum().backward()
    assert torch.equal(weight.grad + 0, plain.weights[0].grad)
    del view, fresh
    model.pager.close()


def test_a_graph_that_torch_derived_out_of_sight_from_a_weight_that_stays() -> None:
    """It points at its frames all the time, so the graph is right."""

    def script(model: Any, report: Report) -> None:
        weight = model.weights[0]
        if hasattr(model, "pager"):
            model.pager._runtime.mmu.fix([weight._pager])
        view = weight.t()
        with torch.no_grad():
            weight.mul_(1.5)
        _by_function(torch.ones(2, WIDTH), view).exp().sum().backward()
        report("gradient", weight.grad)

    check_same(make, script, share=1.5)


def test_hooks_that_the_user_takes_off_a_view_say_nothing_of_its_graph() -> None:
    def script(model: Any, report: Report) -> None:
        view: Any = model.weights[0].t()
        view._backward_hooks = None
        (torch.ones(2, WIDTH) @ view).exp().sum().backward()
        report("gradients", gradients(model))

    check_same(make, script, share=0.4)


def test_a_view_of_a_dropped_gradient_keeps_its_graph() -> None:
    """It was derived from the gradient as it was, and has nothing to do with the one that comes after."""

    def script(model: Any, report: Report) -> None:
        model(torch.randn(2, WIDTH)).sum().backward()
        gradient = model.weights[0].grad.requires_grad_()
        view = gradient.t()
        model.weights[0].grad = None
        for _ in range(2):  # without a new gradient, and beside one
            x = torch.ones(WIDTH)
            (view @ x).exp().sum().backward()
            report("function", view.grad_fn.name())
            model(torch.randn(2, WIDTH)).sum().backward()
        report("of the old one", gradient.grad)
        report("gradients", gradients(model))

    check_same(make, script, share=0.5)


@pytest.mark.parametrize("written", [False, True])
def test_a_function_that_is_given_a_view_with_its_graph(written: bool) -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].t()
        if written:
            with torch.no_grad():
                model.weights[0].mul_(1.5)
            report("derived", view.grad_fn is not None)
        x = torch.randn(2, WIDTH, requires_grad=True)
        _by_function(x, view).sum().backward()
        report("gradients", gradients(model))

    check_same(make, script, share=0.4)


# -- a model that is converted between forward and backward -----------------------------------------


@pytest.mark.parametrize("convert", ["half", "half and back", "strides"])
@pytest.mark.parametrize("product", [torch.matmul, lambda x, w: x @ w.t()], ids=["weight", "view"])
def test_backward_after_a_conversion_is_as_of_torch_or_refused(convert: str, product: Any) -> None:
    """Torch saves a weight itself as it will be, a view with its old values; those are gone."""

    def outcome(model: Any) -> Any:
        x = torch.ones(2, WIDTH, requires_grad=True)
        loss = product(x, model.weights[0]).exp().sum()
        if convert == "strides":
            model.weights[0].data = model.weights[0].data.t().contiguous().t()
        else:
            model.half()
        if convert == "half and back":
            model.float()
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
        return x.grad

    model = manage(make(), share=0.5)
    found, expected = outcome(model), outcome(make())
    model.pager.close()
    if product is torch.matmul:
        assert type(found) is type(expected)
        assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    else:
        assert isinstance(expected, Tensor)
        assert "before it was converted" in found


def test_a_view_of_a_view_from_before_a_conversion_has_its_values() -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].t()
        model.half()
        converted = model.weights[0].t()
        x = torch.ones(WIDTH, requires_grad=True)
        loss = (view[1:] @ x).sin().sum()
        del view
        report("x", torch.autograd.grad(loss, [x])[0])
        report("converted", converted + 0)

    check_same(make, script, share=0.5)


def test_a_list_of_weights_and_views_is_run_in_parts_where_it_does_not_fit() -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].detach()
        with torch.no_grad():
            torch._foreach_mul_([view, *model.weights], 2.0)
        report("view", view + 0)
        report("weights", [weight + 0 for weight in model.weights])

    check_same(make, script, share=0.2)


def test_weights_of_two_models_beside_a_view() -> None:
    def outcome(one: Any, other: Any) -> Any:
        with torch.no_grad():
            other.weights[0].mul_(2)
        product = torch.addmm(one.weights[0], other.weights[0], one.weights[1].t()).exp()
        assert not hasattr(one, "pager") or leased(one) == leased(other) == []
        use_others(one)
        product.sum().backward()
        return copied([gradients(one), gradients(other)])

    one, other = manage(make(), share=0.4), manage(make(), share=0.4)
    check_equal(outcome(make(), make()), outcome(one, other), "gradients")
    one.pager.close()
    other.pager.close()


def test_a_write_to_a_dropped_gradient_is_none_to_the_next() -> None:
    """Neither by an operation whose writes only we count."""

    def script(model: Any, report: Report) -> None:
        model(torch.randn(2, WIDTH)).sum().backward()
        view = model.weights[0].grad.t()
        model.weights[0].grad = None
        model(torch.randn(2, WIDTH)).sum().backward()
        x = torch.ones(WIDTH, requires_grad=True)
        loss = (model.weights[0].grad.t() @ x).sin().sum()
        torch._amp_foreach_non_finite_check_and_unscale_([view], torch.zeros(1), torch.full((1,), 0.5))
        loss.backward()
        report("x", x.grad)
        report("view", view + 0)

    check_same(make, script, share=0.5)


def test_a_dropped_gradient_is_not_converted() -> None:
    def script(model: Any, report: Report) -> None:
        model(torch.randn(2, WIDTH)).sum().backward()
        x = torch.ones(WIDTH, requires_grad=True)
        loss = (model.weights[0].grad.t() @ x).sin().sum()
        for parameter in model.parameters():
            parameter.grad = None
        model.half()
        model(torch.randn(2, WIDTH).half()).sum().backward()
        report("x", torch.autograd.grad(loss, [x])[0])
        report("gradients", gradients(model))

    check_same(make, script, share=0.4)


def test_a_conversion_that_changes_nothing_needs_no_old_values() -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.ones(2, WIDTH, requires_grad=True)
        loss = (x @ model.weights[0].t()).exp().sum()
        model.float()
        report_leases(model, report, [])
        loss.backward()
        report("x", x.grad)

    check_same(make, script, share=0.4)
