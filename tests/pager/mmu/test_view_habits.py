"""What users do with views beside multiplying: hold, write, copy, differentiate twice. All as with plain tensors."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pager.errors import BudgetError
from pager.graph import access
from pager.mmu import parameter
from pager.mmu.view import PagedView
from tests.cases.same import Report, check_same, manage
from tests.pager.mmu.test_view import WIDTH, Products, leased, report_leases, transposed

Script = Callable[[Any, Report], None]


def make() -> nn.Module:
    return Products(transposed)


def use_others(model: Any) -> None:
    """Bring every other weight to the device, so that what is not held leaves."""
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(1, WIDTH))


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


# -- writes between forward and backward -----------------------------------------------------------


def _with_no_grad(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(model: Any) -> None:
        with torch.no_grad():
            write(model.weights[0])

    return run


WRITES: dict[str, Callable[[Any], Any]] = {
    "itself": _with_no_grad(lambda w: w.mul_(2)),
    "a view": _with_no_grad(lambda w: w.t().mul_(2)),
    "a row": _with_no_grad(lambda w: w[3].zero_()),
    "an item": _with_no_grad(lambda w: w.__setitem__((0, 0), 1.0)),
    "an item of a view": _with_no_grad(lambda w: w[2:].__setitem__(0, 1.0)),
    "detached": lambda m: m.weights[0].detach().view(-1)[:3].fill_(1),
    "copy_": _with_no_grad(lambda w: w.copy_(torch.ones(WIDTH, WIDTH))),
    "copy_ to a view": _with_no_grad(lambda w: w.t().copy_(torch.ones(WIDTH, WIDTH))),
    "a list": _with_no_grad(lambda w: torch._foreach_mul_([w.t()], 2.0)),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("held", [False, True])
def test_a_write_before_backward_is_refused_as_by_torch(name: str, held: bool) -> None:
    def script(model: Any, report: Report) -> None:
        kept = [model.weights[0].t()] if held else []
        x = torch.randn(1, WIDTH, requires_grad=True)
        output = (x @ (kept[0] if held else model.weights[0].t())).sum()
        WRITES[name](model)
        use_others(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
        report("weight", model.weights[0] + 0)
        report("kept", [view + 0 for view in kept])
        kept.clear()

    check_same(make, script)


@pytest.mark.parametrize("held", [False, True])
def test_an_optimizer_step_before_backward_is_refused_as_by_torch(held: bool) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(1, WIDTH, requires_grad=True)
        model(x).sum().backward()
        kept = [model.weights[0].t()] if held else []
        output = (x @ (kept[0] if held else model.weights[0].t())).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.backward()
        report("weight", model.weights[0] + 0)
        kept.clear()

    check_same(make, script)


UNCOUNTED: dict[str, Callable[[Any], Any]] = {
    "data": lambda v: v.data.mul_(2),
    "numpy": lambda v: v.detach().numpy().__imul__(2),
    "array": lambda v: v.detach().__array__().__imul__(2),
    "dlpack": lambda v: torch.from_dlpack(v.detach()).mul_(2),
    "storage": lambda v: v.untyped_storage().fill_(1),
    "typed storage": lambda v: v._typed_storage()._setitem(3, 9.0),
    "pointer": lambda v: ctypes.memset(v.data_ptr(), 1, 400),
    "set_ from its storage": lambda v: (
        torch.empty(0).set_(v.untyped_storage(), 0, (WIDTH, WIDTH), (WIDTH, 1)).fill_(4)
    ),
    "amp": lambda v: torch._amp_foreach_non_finite_check_and_unscale_(
        [v.detach()], torch.zeros(1), torch.full((1,), 0.5)
    ),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_a_write_that_nobody_counts_is_kept(name: str) -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].t()
        UNCOUNTED[name](view)
        report("view", view + 0)
        del view
        use_others(model)
        report("weight", model.weights[0] + 0)

    check_same(make, script, share=0.2)


def test_a_write_to_a_view_reaches_the_weight_and_its_other_views() -> None:
    def script(model: Any, report: Report) -> None:
        weight = model.weights[0]
        rows, columns = weight[:10], weight.t()
        with torch.no_grad():
            rows.fill_(3.0)
            columns[0] = 7.0
        report("seen", [rows + 0, columns + 0, weight + 0])
        del rows, columns
        use_others(model)
        report("weight", weight + 0)

    check_same(make, script, share=0.2)


def test_a_view_knows_its_graph_after_a_write_to_the_weight() -> None:
    """Torch then derives the view from its base anew, by the base's strides."""

    def script(model: Any, report: Report) -> None:
        weight = model.weights[0]
        view, other = weight.t(), weight[5:9]
        with torch.no_grad():
            weight.mul_(2)
        report("function", other.grad_fn.name())
        x = torch.randn(2, WIDTH)
        ((x @ view).sum() + (other * x[0]).sum()).backward()
        report("gradient", weight.grad)
        del view, other

    check_same(make, script, share=0.2)


@pytest.mark.parametrize("held", [False, True])
def test_a_view_that_was_given_other_memory(held: bool) -> None:
    """It keeps its graph, and is none of our frames any more."""

    def script(model: Any, report: Report) -> None:
        weight = model.weights[0]
        view, other = weight.t(), weight.t() if held else None
        view.data = torch.full((WIDTH, WIDTH), 2.0)
        use_others(model)
        with torch.no_grad():
            weight.mul_(2)
        x = torch.randn(2, WIDTH, requires_grad=True)
        loss = (x @ view).exp().sum()
        use_others(model)
        loss.backward()
        report("gradient", weight.grad)
        report("x", x.grad)
        assert held or not hasattr(model, "pager") or not view._pager_view.are_current()
        del other

    check_same(make, script, share=0.2)


# -- views that are held ---------------------------------------------------------------------------


def test_a_view_that_is_held_shows_each_step_and_outlives_the_model() -> None:
    held: list[Tensor] = []

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        views = [model.weights[1].t(), model.weights[2].detach()[3:5]]
        for _ in range(3):
            x = torch.randn(2, WIDTH)
            (model(x) @ views[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            report("views", [view + 0 for view in views])
        held.extend(views)
        report("last", views)

    model = check_same(make, script, share=0.5)
    plain, paged = held[:2], held[2:]
    for one, other in zip(plain, paged, strict=True):
        assert torch.equal(one, other)
        assert type(other) is PagedView
    x = torch.randn(1, WIDTH, requires_grad=True)
    (x @ paged[0]).sum().backward()  # the model is closed: an ordinary tensor by now
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, WIDTH) @ plain[0].detach().t())
    assert torch.equal(model.weights[1].detach(), paged[0].detach().t())


def test_backward_of_a_held_view_after_closing() -> None:
    model = manage(make(), share=0.5)
    x = torch.randn(1, WIDTH, requires_grad=True)
    loss = (x @ model.weights[0].t()).sum()
    model.pager.close()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, WIDTH) @ model.weights[0].detach())


def test_too_many_held_views_say_so() -> None:
    model = manage(make(), share=0.2)
    with pytest.raises(BudgetError, match="drop views of managed tensors that you keep"):
        views = [weight.t() for weight in model.weights]
    views = []
    assert leased(model) == views
    model.pager.close()


@pytest.mark.parametrize("kept", ["gradient", "view", "saved", "saved late"])
def test_views_of_a_gradient_that_is_dropped_keep_its_values(kept: str) -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.ones(WIDTH, requires_grad=True)
        model(torch.randn(2, WIDTH)).sum().backward()
        held: Any = model.weights[0].grad if kept == "gradient" else model.weights[0].grad.t()
        product = (held @ x).sum() if kept == "saved" else None
        if kept == "saved":
            held = None
        model.weights[0].grad = None
        if held is not None and kept != "saved":
            report("old", held + 0)
            product = (held @ x).sum()
        if kept == "saved late":
            held = None
        model(torch.randn(2, WIDTH)).sum().backward()
        assert product is not None
        product.backward()
        report("gradient", x.grad)
        report("new", model.weights[0].grad)

    check_same(make, script, share=0.5)


def test_a_view_of_a_gradient_whose_update_waits_keeps_its_values() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.ones(WIDTH, requires_grad=True)
        for _ in range(2):
            model(torch.randn(2, WIDTH)).sum().backward()
            held = model.weights[0].grad.t()
            optimizer.step()
            optimizer.zero_grad()
            product = (held @ x).sin().sum()
            report("held", held + 0)
            model(torch.randn(2, WIDTH)).sum().backward()
            product.backward()
            report("gradient", x.grad)
            report("new", model.weights[0].grad)
            report("held", held + 0)
            optimizer.zero_grad()

    check_same(make, script, share=0.5)


def test_what_is_no_longer_the_value_is_not_current() -> None:
    model = manage(make(), share=0.5)
    model(torch.randn(2, WIDTH)).sum().backward()
    weights = model.weights
    views = [weights[0].t(), weights[0].grad.t(), weights[1].t()]

    def are_current() -> list[bool]:
        return [view._pager_view.are_current() for view in views]

    assert are_current() == [True, True, True]
    weights[0].grad = None
    assert are_current() == [True, False, True]
    model.half()
    assert are_current() == [False, False, False]
    views = [weights[0].t(), weights[1].t()]
    with torch.no_grad():
        views[0].zero_()
    assert are_current() == [True, True]
    model.pager.close()
    assert are_current() == [False, False]


def test_views_of_optimizer_states() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(2, WIDTH)).sum().backward()
        optimizer.step()
        x = torch.randn(WIDTH, requires_grad=True)
        products = [(optimizer.state[p]["exp_avg"].t() @ x).sum() for p in model.parameters()]
        report_leases(model, report, [])
        torch.stack(products).sum().backward()
        report("gradient", x.grad)

    check_same(make, script, share=0.2)


# -- autograd --------------------------------------------------------------------------------------


def twice(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    loss = model(x).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    report("gradients", gradients(model))
    report("x", x.grad)


def double(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    first = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], create_graph=True)
    torch.stack([g.square().sum() for g in first]).sum().backward()
    report("gradients", gradients(model))
    report("x", x.grad)


def of_a_view(model: Any, report: Report) -> None:
    """`autograd.grad` by a view, and of one."""
    view = model.weights[0].t()
    x = torch.randn(2, WIDTH)
    report("by", torch.autograd.grad((x @ view).sum(), view)[0])
    report("of", torch.autograd.grad(view, model.weights[0], torch.ones(WIDTH, WIDTH))[0])
    view.retain_grad()
    (x @ view).exp().sum().backward()
    report("retained", view.grad)
    report("weight", model.weights[0].grad)
    report("seen", [view.register_hook(lambda grad: grad * 2) is not None, view.requires_grad, view.is_leaf])


def from_a_view(model: Any, report: Report) -> None:
    """A backward that begins at a view runs code of the user's, which needs the door."""
    for start in ("backward", "grad"):
        item = model.weights[0].t()[0, 0]
        item.register_hook(lambda grad: grad * (model.weights[2].t() @ torch.ones(WIDTH)).sum().detach())
        if start == "backward":
            item.backward()
        else:
            report("grad", torch.autograd.grad(item, model.weights[0])[0])
    report("gradients", gradients(model))


def under_hooks(model: Any, report: Report) -> None:
    """The user's own hooks see what they see without us, but for the weights."""
    kinds: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        kinds.append((type(tensor) is Tensor, tuple(tensor.shape)))
        return tensor.detach().clone()

    x = torch.randn(2, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).exp().sum()
    loss.backward()
    report("seen", [entry for entry in kinds if entry[1] != (WIDTH, WIDTH)])
    report("gradients", gradients(model))


def on_cpu(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).exp().sum()
    report_leases(model, report, [])
    loss.backward()
    report("gradients", gradients(model))


def in_inference_mode(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH)
    with torch.inference_mode():
        report("inference", model(x))
    with torch.no_grad():
        report("no grad", model(x))
    report_leases(model, report, [])


class Product(torch.autograd.Function):
    """``x @ weight``, saved as torch's documentation says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


def in_own_function(model: Any, report: Report) -> None:
    """A Function of the user's keeps what it is given to keep, with the frames."""

    x = torch.randn(2, WIDTH, requires_grad=True)
    output = x
    for weight in model.weights:
        output = torch.tanh(Product.apply(output, weight.t()))
    output.sum().backward()
    report("x", x.grad)
    report("gradients", gradients(model))


def into_a_checkpoint(model: Any, report: Report) -> None:
    """A view made outside and handed in."""
    x = torch.randn(2, WIDTH, requires_grad=True)
    for reentrant in (True, False):
        output = checkpoint(lambda a, b: (a @ b).exp(), x, model.weights[0].t(), use_reentrant=reentrant)
        output.sum().backward()
    report("x", x.grad)
    report("gradients", gradients(model))


def under_autocast(model: Any, report: Report) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    report_leases(model, report, [])
    output.float().sum().backward()
    report("gradients", gradients(model))


def with_func(model: Any, report: Report) -> None:
    """`torch.func` allows no saved-tensor hooks: views that exist work in it as ever."""
    view = model.weights[0].t()
    x = torch.randn(3, WIDTH)
    report("grad", torch.func.grad(lambda a: (a @ view).exp().sum())(x))
    report("vmap", torch.vmap(lambda a: a @ view)(x))
    report("jvp", torch.func.jvp(lambda a: a @ view, (x,), (x,))[1])


def forward_mode(model: Any, report: Report) -> None:
    x = torch.randn(3, WIDTH)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        result = torch.autograd.forward_ad.unpack_dual(dual @ model.weights[0].t())
        report("tangent", result.tangent)


AUTOGRAD: list[Script] = [
    twice,
    double,
    of_a_view,
    from_a_view,
    under_hooks,
    on_cpu,
    in_inference_mode,
    in_own_function,
    into_a_checkpoint,
    under_autocast,
    with_func,
    forward_mode,
]


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated"
)  # torch's own, on the way to a dual tensor
@pytest.mark.parametrize("script", AUTOGRAD, ids=lambda script: script.__name__)
def test_autograd(script: Script) -> None:
    check_same(make, script, share=0.6 if script in (in_own_function, double) else 0.25)


def test_frames_that_the_backward_of_a_loss_needs_come_back_one_by_one() -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.randn(2, WIDTH, requires_grad=True)
        views = [w.t() for w in model.weights[:2]]
        loss = torch.tanh((x @ views[0]) @ views[1]).sum()
        del views
        report_leases(model, report, [])
        use_others(model)
        loss.backward(retain_graph=True)
        report_leases(model, report, [])
        loss.backward()
        report("x", x.grad)

    check_same(make, script, share=0.25)


@pytest.mark.parametrize("product", [transposed, F.linear], ids=["view", "weight"])
@pytest.mark.parametrize("times", [1, 2])
def test_no_weight_is_on_the_device_in_use_while_a_checkpoint_is_recomputed(product: Any, times: int) -> None:
    """Autograd unpacks the weight of ``x @ w`` before ``x``, whose unpacking recomputes."""

    def script(model: Any, report: Report) -> None:
        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                report_leases(model, report, [])
            return product(x, weight)

        def products(x: Tensor) -> Tensor:
            for weight in model.weights:
                x = multiply(torch.tanh(x), weight)
            return x

        x = torch.randn(2, WIDTH, requires_grad=True)
        loss = checkpoint(products, x, use_reentrant=False).sum()
        for _ in range(times):
            loss.backward(retain_graph=times > 1)
        report("x", x.grad)
        report("gradients", gradients(model))

    check_same(make, script, share=0.2)


def test_a_tied_weight_under_two_names() -> None:
    def make_tied() -> nn.Module:
        model: Any = make()
        model.weights[3] = model.weights[0]
        return model

    def script(model: Any, report: Report) -> None:
        x = torch.randn(2, WIDTH, requires_grad=True)
        loss = model(x).sum()
        report_leases(model, report, [])
        loss.backward()
        report("gradients", gradients(model))

    check_same(make_tied, script, share=0.3)


def test_what_stays_on_the_device_and_is_let_go_between_forward_and_backward() -> None:
    model = manage(make(), share=1.5)
    plain = make()
    x = torch.randn(2, WIDTH)
    found, expected = model(x), plain(x)
    bindings = [p._pager for p in model.parameters()]
    model.pager._runtime.mmu.fix(bindings)
    found, expected = found + model(x), expected + plain(x)
    for binding in bindings:
        binding.keep = False
        model.pager._runtime.mmu.unfix(binding)
    model.pager._runtime.engine.evict_segments([binding.segment for binding in bindings])
    assert leased(model) == []
    found.sum().backward()
    expected.sum().backward()
    model.pager.close()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_threads_that_share_a_view() -> None:
    def script(model: Any, report: Report) -> None:
        view = model.weights[0].t()
        results: dict[int, Any] = {}

        def work(index: int) -> None:
            x = torch.full((2, WIDTH), float(index), requires_grad=True)
            for _ in range(20):
                output = torch.tanh(x @ view[:, : WIDTH - index]).sum()
                (gradient,) = torch.autograd.grad(output, [x])
                results.setdefault(-1, repr(view[0, 0]))
            results[index] = gradient

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report("gradients", results)

    check_same(make, script, share=0.3)


def test_two_threads_that_want_a_view_ordinary_leave_it_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    model = manage(make(), share=0.5)
    view: Any = model.weights[0].t()
    frames = view._pager_view
    first, second = (access.ordinary_views(PagedView, [view]) for _ in range(2))
    with first:
        monkeypatch.setattr(parameter, "collect_tensors", lambda *_: [view])  # found just before
        assert torch.equal(parameter.access(torch.add, (view, 1), {}), view + 1)
        assert (type(view), view._pager_view if hasattr(view, "_pager_view") else None) == (Tensor, None)
        monkeypatch.setattr(access, "collect_tensors", lambda *_: [view])  # it had looked just before
        second.__enter__()
    second.__exit__(None, None, None)
    assert type(view) is PagedView
    assert view._pager_view is frames
    model.pager.close()


# -- a view is a tensor ----------------------------------------------------------------------------


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


AS_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "str": str,
    "format": lambda v: f"{v[0, 0].detach():.3f}",
    "deepcopy": lambda v: copy.deepcopy(v.detach()),
    "deepcopy in a list": lambda v: copy.deepcopy([v.detach()] * 2),
    "deepcopy of a leaf": lambda v: copy.deepcopy(v.detach().requires_grad_()),
    "copy": lambda v: copy.copy(v.detach()),
    "pickle": lambda v: pickle.loads(pickle.dumps(v.detach())),
    "save": lambda v: _saved(v.detach()),
    "parameter": lambda v: nn.Parameter(v)[0] * 2,
    "list": lambda v: v.tolist(),
    "length": len,
    "rows": lambda v: [row + 1 for row in v],
    "contains": lambda v: 3.0 in v,
    "hash": lambda v: len({v, v}),
    "compare": lambda v: (v == v.clone()).all(),
    "strides": lambda v: (v.stride(), v.storage_offset(), v.is_contiguous(), v.shape, v.dtype, v.layout),
    "version": lambda v: (v._version, v._is_view(), v.output_nr, v.is_leaf),
    "kind": lambda v: (isinstance(v, Tensor), isinstance(v, nn.Parameter), v.type(), torch.is_tensor(v)),
    "other dtype": lambda v: v.half(),
    "zeros like": torch.zeros_like,
    "new": lambda v: (v.new_zeros(3), v.new_tensor([1.0])),
    "out": lambda v: torch.add(v, 1, out=torch.empty(0)) if not v.requires_grad else torch.add(v, 1),
    "stack": lambda v: torch.stack([v, v]),
    "where": lambda v: torch.where(v > 0, v, 0.0),
    "in place": lambda v: v.detach().clone().add_(v),
    "data assigned": lambda v: _assign_data(v),
    "set_": lambda v: v.detach().set_(torch.ones(3).untyped_storage(), 0, (3,), (1,)) * 2,
}


def _assign_data(view: Tensor) -> Tensor:
    view = view.detach()
    view.data = torch.ones(4, 4)
    x = torch.ones(4, requires_grad=True)
    (view @ x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", AS_TENSORS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_view_is_as_any_tensor(name: str) -> None:
    def script(model: Any, report: Report) -> None:
        result = AS_TENSORS[name](model.weights[0].t())
        use_others(model)
        if isinstance(result, Tensor):
            report("class", (isinstance(result, PagedView), result.requires_grad) if name != "copy" else None)
        report("result", result)

    check_same(make, script, share=0.3)


def test_what_is_no_view_is_of_torchs_own_class() -> None:
    model = manage(make(), share=0.5)
    weight = model.weights[0]
    view = weight.t()
    assert type(view) is PagedView
    for result in (
        *weight.chunk(2),
        weight.detach(),
        weight.view(torch.int32),
        view[0],
    ):
        assert type(result) is PagedView
    for result in (
        view + 1,
        view @ view,
        view.clone(),
        view.contiguous(),
        weight * 2,
        view[view > 0],
        view.data,
        *weight.unsafe_chunk(2),
    ):
        assert type(result) is Tensor
    x = torch.ones(WIDTH, requires_grad=True)
    (view @ x).sum().backward()
    assert type(x.grad) is Tensor
    assert type(view.grad_fn).__name__ == "TBackward0"
    model.pager.close()
