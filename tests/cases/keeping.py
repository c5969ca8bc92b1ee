"""Optimizers of users that keep something beside ``self.state``: on the object, in groups, in entries of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class Keeping(torch.optim.Optimizer):
    """SGD whose parts subclasses replace; it evaluates a closure first."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin(loss)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p), alpha=group["lr"] * scale * self.factor(group))
        self.end()
        return loss

    def begin(self, loss: Any) -> None:
        """Before any parameter."""

    def direction(self, p: Tensor) -> Tensor:
        """What a parameter moves by."""
        assert p.grad is not None
        return p.grad

    def factor(self, group: Any) -> float:
        """Of the learning rate."""
        return 1.0

    def end(self) -> None:
        """After all parameters."""

    def with_gradient(self) -> Iterator[Tensor]:
        """The parameters that are stepped."""
        yield from (p for group in self.param_groups for p in group["params"] if p.grad is not None)


class WarmUp(Keeping):
    """Counts steps on itself and warms up by them."""

    n = 0

    def begin(self, loss: Any) -> None:
        self.n += 1

    def factor(self, group: Any) -> float:
        return min(1.0, self.n / 5)


class LateCount(Keeping):
    """Counts when it is through, in a container, in an object and in an entry of ``state``."""

    class Schedule:
        """A helper object, and a method of the optimizer's in it."""

        def __init__(self, optimizer: LateCount) -> None:
            self.n = 0
            self.base = optimizer.base

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[float] = []
        self.count = torch.zeros(())
        self.schedule = LateCount.Schedule(self)

    def base(self) -> int:
        """Read through the helper."""
        return len(self.history)

    def factor(self, group: Any) -> float:
        state: Any = self.state
        terms = (self.schedule.n, self.schedule.base(), float(self.count), state.get("k", 0))
        return 1 / (1 + sum(terms))

    def end(self) -> None:
        self.history.append(self.param_groups[0]["lr"])
        self.count.add_(1)
        self.schedule.n += 1
        state: Any = self.state
        state["k"] = state.get("k", 0) + 1


class FirstGroupLeads(Keeping):
    """Takes the learning rate of the first group for all."""

    def factor(self, group: Any) -> float:
        return float(self.param_groups[0]["lr"] / group["lr"])


class Polyak(Keeping):
    """Its step length follows the loss that the closure returns."""

    loss = 0.0

    def begin(self, loss: Any) -> None:
        self.loss = float(loss) if loss is not None else 0.0

    def factor(self, group: Any) -> float:
        return 1 + self.loss


class Muon(Keeping):
    """Orthogonalises the whole momentum, and counts."""

    n = 0

    def begin(self, loss: Any) -> None:
        self.n += 1

    def direction(self, p: Tensor) -> Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(1 - 1 / (1 + self.n)).add_(p.grad)
        if p.dim() < 2:
            return momentum
        x = momentum.flatten(1) / (momentum.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        return x.view_as(p)


class ClippedRms(Keeping):
    """Adafactor-like: clips the root mean square of each whole update, which only large gradients show."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        return p.grad / max(1.0, float(p.grad.pow(2).mean().sqrt()) / 100)


# -- refused -------------------------------------------------------------------------------------------


class KeyedByParameter(Keeping):
    """Momentum in a dict on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.m: dict[Any, Tensor] = {}

    def key(self, p: Tensor) -> Any:
        """What a parameter's momentum is found by."""
        return p

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        m = self.m.setdefault(self.key(p), torch.zeros_like(p))
        return m.mul_(0.9).add_(p.grad)


class KeyedById(KeyedByParameter):
    """By the parameter's identity."""

    def key(self, p: Tensor) -> Any:
        return id(p)


class MadeAtOnce(KeyedByParameter):
    """Its dict is full before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.m = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}


class SlowWeights(Keeping):
    """Lookahead as one class: slow weights in lists parallel to the groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def end(self) -> None:
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, mine in zip(group["params"], slow, strict=False):
                p.copy_(mine.add_(p - mine, alpha=0.5))


class KeepsItself(Keeping):
    """Its state is the parameter, by another name."""

    def direction(self, p: Tensor) -> Tensor:
        self.state[p]["old_p"] = p.data.view(-1)
        assert p.grad is not None
        return p.grad


class KeepsGradient(Keeping):
    """Its state is the last gradient itself."""

    def direction(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        last = self.state[p].get("last", p.grad)
        self.state[p]["last"] = p.grad
        return p.grad + last


class Wraps(Keeping):
    """SAM and Lookahead as they are often published: an optimizer around one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    def end(self) -> None:
        self.base_optimizer.step()


class HoldsModel(Keeping):
    """Looks parameters up in a module of its own."""

    model: Any = None

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.nets = {"a": torch.nn.Linear(2, 2)}


class GlobalClip(Keeping):
    """Clips by the norm of all gradients, but only gradients much larger than one."""

    def begin(self, loss: Any) -> None:
        norms = [p.grad.norm() for p in self.with_gradient() if p.grad is not None]
        self._clip = max(1.0, float(torch.stack(norms).norm()) / 3000) if norms else 1.0

    def factor(self, group: Any) -> float:
        return 1 / self._clip


class LocalGlobalClip(Keeping):
    """The same without an attribute that shows it."""

    def direction(self, p: Tensor) -> Tensor:
        norms = [q.grad.norm() for q in self.with_gradient() if q.grad is not None]
        assert p.grad is not None
        return p.grad / max(1.0, float(torch.stack(norms).norm()) / 3000)


class DAdaptation(Keeping):
    """Its group has a sum over all parameters."""

    def end(self) -> None:
        group = self.param_groups[0]
        for p in self.with_gradient():
            assert p.grad is not None
            group["d"] = group.get("d", 0.0) + float((p.grad * p).sum())

    def factor(self, group: Any) -> float:
        return 1 + max(0.0, min(1.0, group.get("d", 0.0)))


class CountsParameters(Keeping):
    """Counts the parameters it has stepped."""

    seen = 0

    def direction(self, p: Tensor) -> Tensor:
        self.seen += 1
        assert p.grad is not None
        return p.grad
