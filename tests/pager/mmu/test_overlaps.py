"""Operands that overlap in memory: torch refuses them where it must, also where each access has its own lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.same import Report, check_same, manage

WIDTH = 96


def make_model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda w: w.add_(w.t()),
    "transposed copy": lambda w: w.copy_(w.t()),
    "shifted": lambda w: w[1:].copy_(w[:-1]),
    "shifted by setitem": lambda w: w.__setitem__(slice(1, None), w[:-1]),
    "out": lambda w: torch.add(w[:-1], 1, out=w[1:]),
    "out of itself": lambda w: torch.add(w, 1, out=w.t()),
    "aliases": lambda w: w.data[1:].copy_(w.data[:-1]),
    "with an alias": lambda w: w.add_(w.data.t()),
    "detached": lambda w: w.detach().add_(w.detach().t()),
    "no views to torch": lambda w: w.unsafe_split(48)[0].add_(w[1:49]),
    "foreach": lambda w: torch._foreach_add_([w], [w.t()]),
}
ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda w: w.add_(w),
    "itself as out": lambda w: torch.mul(w, 2, out=w),
    "all of it": lambda w: w.add_(w.view(-1).view(WIDTH, WIDTH)),
    "alias of all": lambda w: w.mul_(w.data),
    "halves": lambda w: w[:48].add_(w[48:]),
    "gradient": lambda w: w.add_(w.grad if w.grad is not None else w),
}


@pytest.mark.parametrize("share", [0.35, 1.5, 8.0])
@pytest.mark.parametrize("name", [*REFUSED, *ALLOWED])
def test_an_operation_on_overlapping_operands(name: str, share: float) -> None:
    """Of a parameter that streams, one that stays, one that is wired."""

    def script(model: Any, report: Report) -> None:
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        weight = model[0].weight
        with torch.no_grad():
            if name in ALLOWED:
                ALLOWED[name](weight)
            else:
                with pytest.raises(RuntimeError, match="refer to a single memory location"):
                    REFUSED[name](weight)
        report("weight", weight)

    check_same(make_model, script, share=share)


@pytest.mark.parametrize("name", ["transposed", "aliases", "with an alias", "no views to torch"])
def test_an_operation_on_a_parameter_that_has_come_to_stay(name: str) -> None:
    model = manage(make_model(), share=1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    weight = next(p for p in model.parameters() if getattr(p, "_pager", None) and p._pager.keep)
    with torch.no_grad():
        before = weight.clone()
        assert weight._pager.fixed is not None
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            REFUSED[name](weight)
        assert torch.equal(weight, before)
    model.pager.close()


def test_an_operation_inside_resident() -> None:
    model = manage(make_model(), share=1.0)
    weight = model[0].weight
    with torch.no_grad(), model.pager.resident(model[0]):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            weight.add_(weight.data.t())
        weight.add_(weight.data)
    model.pager.close()
    assert torch.equal(model[0].weight, make_model()[0].weight * 2)


class WritesInBackward(torch.autograd.Function):
    """Adds what it saved, turned, to the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """A product."""
        ctx.save_for_backward(weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refused."""
        (saved,) = ctx.saved_tensors
        with torch.no_grad(), pytest.raises(RuntimeError, match="refer to a single memory location"):
            ctx.weight.add_(saved.t())
        return grads[0] @ saved, None


def test_what_autograd_saved_overlaps_too() -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.ones(2, WIDTH, requires_grad=True)
        product: Any = WritesInBackward.apply(x, model[0].weight)
        product.sum().backward()
        report("grad", [x.grad, model[0].weight])

    check_same(make_model, script)


def test_a_weight_with_a_view_still_trains_as_in_torch() -> None:
    """The parameter's next accesses share the view's storage; writes on either side show on the other."""

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model[0].weight
        row = weight.detach()[3]
        for _ in range(3):
            F.linear(torch.ones(2, WIDTH), weight).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                weight.mul_(1.5)
                row.add_(1)
            report("both", [row, weight])
        del row
        for _ in range(2):
            model(torch.ones(2, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    check_same(make_model, script)
