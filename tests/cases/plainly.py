"""What a managed model must equal where torch has no such thing itself: an ordinary loop with fp32 masters.

The loop is a user's: a list of fp32 copies, an optimizer over these, gradients converted, results copied back. It
knows one fact of the library: a paged master that lies exactly between two weights moves by one ulp towards its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pager.config import Checks
from tests.cases.same import PAGE, check_equal, check_ordinary, copied, manage, num_pages
from tests.models import Case

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}
"""Optimizers whose results depend on every bit of a master."""

# Device budgets as shares of the training state: states and parameters stream, parameters stay, all of it stays.
BUDGETS = {"streaming": 0.3, "staying": 1.5, "everything": 8.0}


class Plain:
    """Ordinary training of ``model``: of bf16 parameters through fp32 masters, with ``master``."""

    def __init__(self, model: nn.Module, make: Make, *, master: bool) -> None:
        self.model = model
        self.params = list(dict.fromkeys(model.parameters()))
        self.masters = [
            param.detach().float().requires_grad_() if master and param.dtype == torch.bfloat16 else param
            for param in self.params
        ]
        self.optimizer = make(self.masters)
        # Of parameters that were stepped, by id.
        self._stepped: set[int] = set()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self.params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters with the parameters' gradients."""
        for param, master in self._pairs():
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in self._pairs():
            if param.grad is not None:
                self._stepped.add(id(param))
                param.copy_(master)
                if num_pages(param):
                    _move_ties(param, master)

    def written(self, *params: Tensor) -> None:
        """The user wrote to these parameters: their masters begin anew from there."""
        for param, master in self._pairs():
            if any(param is other for other in params):
                with torch.no_grad():
                    master.copy_(param)

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer's state by index, masters among it, as `pager` shows it."""
        state: dict[int, dict[str, Any]] = copied(self.optimizer.state_dict()["state"])
        for index, (param, master) in enumerate(zip(self.params, self.masters, strict=True)):
            if master is not param and (index in state or id(param) in self._stepped):
                state.setdefault(index, {})["master"] = copied(master)
        return state

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.params, self.masters, strict=True)
        return [(param, master) for param, master in pairs if master is not param]


def _move_ties(param: Tensor, master: Tensor) -> None:
    bits = master.view(torch.int32)
    bits[bits - (param.view(torch.int16).int() << 16) == 0x8000] -= 1


def checks(**switches: Any) -> Checks:
    """All checks on, with these switches."""
    known: dict[str, Any] = {"streams": "late", "happens_before": True, "poison": True, "page_all": True}
    return Checks(**{**known, **switches})


def plain_step(case: Case, plain: Plain, batches: Iterable[int]) -> list[Tensor]:
    """One step over these micro-batches; the losses."""
    plain.zero_grad()
    losses = [_backward(case, plain.model, batch) for batch in batches]
    plain.step()
    return losses


def managed_step(
    case: Case, model: Any, optimizer: torch.optim.Optimizer, batches: Iterable[int]
) -> list[Tensor]:
    """The same on a managed model, written so that it is right for either ``update_at``."""
    optimizer.zero_grad()
    *first, last = batches
    losses = []
    with model.pager.accumulate():
        losses += [_backward(case, model, batch) for batch in first]
    losses.append(_backward(case, model, last))
    optimizer.step()
    return losses


def _backward(case: Case, model: Any, batch: int) -> Tensor:
    args, kwargs = case.make_batch(batch)
    dtype = next(model.parameters()).dtype
    args = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    torch.manual_seed(batch)
    loss = case.loss(model(*args, **kwargs), (args, kwargs))
    loss.backward()
    return loss.detach()


def check_trained(plain: Plain, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Weights, masters and states are equal in every bit."""
    check_equal(dict(plain.model.state_dict()), copied(dict(model.state_dict())), "weights")
    check_equal(plain.state(), copied(optimizer.state_dict()["state"]), "state")


class Pair:
    """A plain and a managed model of one case, trained alike; ``close`` compares what is left.

    A test that fails leaves its pairs to `close_all`.
    """

    made: ClassVar[list[Pair]] = []

    def __init__(
        self,
        make_case: Callable[[], Case],
        make: Make,
        *,
        master: bool = True,
        budget: float = 0.3,
        dtype: torch.dtype = torch.bfloat16,
        frozen: Iterable[str] = (),
        **knobs: Any,
    ) -> None:
        self.case = make_case()
        twin = make_case()
        for model in (self.case.model, twin.model):
            model.to(dtype)
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
        self.plain = Plain(self.case.model, make, master=master)
        self.model: Any = manage(
            twin.model, share=budget, master="float32" if master else None, page_size=PAGE, **knobs
        )
        self.optimizer = make(list(self.model.parameters()))
        self.num_batches = 0
        Pair.made.append(self)

    @classmethod
    def close_all(cls) -> None:
        """Close the models of all pairs that are open still."""
        while cls.made:
            model = cls.made.pop().model
            if hasattr(model, "pager"):
                model.pager.close()

    def train(self, steps: int = 1, micro_batches: int = 1) -> None:
        """Equal steps of both; the losses must agree."""
        for _ in range(steps):
            batches = range(self.num_batches, self.num_batches + micro_batches)
            self.num_batches += micro_batches
            expected = plain_step(self.case, self.plain, batches)
            found = managed_step(self.case, self.model, self.optimizer, batches)
            check_equal(expected, copied(found), f"losses after {self.num_batches} batches")

    def check(self) -> None:
        """They agree."""
        check_trained(self.plain, self.model, self.optimizer)

    def close(self) -> None:
        """They agree, and so does what ``close`` leaves."""
        self.check()
        self.model.pager.close()
        check_ordinary(self.model)
        check_equal(dict(self.plain.model.state_dict()), dict(self.model.state_dict()), "closed")
