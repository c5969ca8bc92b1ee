"""Run one script twice, on an ordinary model and on a managed one, and compare every bit it reports.

A script is what a user would write: ``script(model, report)`` trains, saves, breaks things, and calls
``report(name, value)`` with whatever it could have looked at. `check_same` runs it on both models and compares
reports, and at the end parameters, gradients and buffers of the closed model with those of the ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from tests.models import Case

PAGE = 16 * 2**10
CHECKS = Checks(streams="late", happens_before=True, poison=True, page_all=True)

Report = Callable[[str, Any], None]
Script = Callable[[nn.Module, Report], None]


def num_pages(tensor: Tensor) -> int:
    """Pages of a contiguous tensor; 0 for one that stays ordinary (under a page)."""
    return -(-tensor.nbytes // PAGE) if tensor.nbytes >= PAGE else 0


def state_bytes(model: Any, states: int = 2) -> int:
    """Bytes of the paged training state: parameters, gradients and ``states`` optimizer states each."""
    return sum(
        num_pages(p) * PAGE * (2 + states if p.requires_grad else 1)
        for p in dict.fromkeys(model.parameters())
    )


def small_bytes(model: Any) -> int:
    """Bytes of what stays on the device beside the pages."""
    small = sum(4 * p.nbytes for p in dict.fromkeys(model.parameters()) if not num_pages(p))
    return small + sum(buffer.nbytes for buffer in model.buffers())


def budget_bytes(model: Any, share: float) -> int:
    """A device budget of ``share`` of the training state, but enough for the update of the largest tensor."""
    largest = max((num_pages(p) for p in model.parameters()), default=0) * PAGE
    return small_bytes(model) + max(int(state_bytes(model) * share), 5 * largest) + PAGE


def manage(model: Any, optimizer: Any = None, *, share: float = 0.35, **knobs: Any) -> Any:
    """`pager.manage` on the simulated device with every check on and a device budget of ``share`` of the state."""
    settings: dict[str, Any] = {"device": "cpu", "page_size": PAGE, "checks": CHECKS}
    if "device_budget" not in knobs:
        settings["device_budget"] = budget_bytes(model, share)
    return pager.manage(model, optimizer, **{**settings, **knobs})


def copied(value: Any) -> Any:
    """``value`` as it is now: tensors (in lists, tuples, dicts) become ordinary CPU copies."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item) for item in value]
    return value


def check_equal(expected: Any, found: Any, where: str) -> None:
    """Equal in every bit, NaN equal to NaN."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{where}: {type(found).__name__} instead of a tensor"
        assert found.dtype == expected.dtype, where
        assert found.shape == expected.shape, where
        torch.testing.assert_close(
            found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert set(found) == set(expected), where
        for key, item in expected.items():
            check_equal(item, found[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, item in enumerate(expected):
            check_equal(item, found[index], f"{where}[{index}]")
    else:
        assert found == expected, where


def values_of(model: Any) -> dict[str, Any]:
    """Parameters, gradients and buffers of an ordinary model, as they are now."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return copied({"state": dict(model.state_dict()), "grads": grads})


def check_ordinary(model: Any) -> None:
    """Nothing of the pager is left on the model."""
    assert "pager" not in model.__dict__
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter, name
        assert param.device.type == "cpu", name
        assert not hasattr(param, "_pager"), name


def run(script: Script, model: Any) -> list[tuple[str, Any]]:
    """What ``script`` reports, with the same random numbers each time."""
    reports: list[tuple[str, Any]] = []
    torch.manual_seed(1234)
    script(model, lambda name, value: reports.append((name, copied(value))))
    return reports


def check_same(make_model: Callable[[], Any], script: Script, *, close: bool = True, **knobs: Any) -> Any:
    """Run ``script`` on an ordinary and on a managed model of ``make_model``; returns the latter, closed by default."""
    plain = make_model()
    expected = run(script, plain)
    paged = manage(make_model(), **knobs)
    try:
        found = run(script, paged)
        check_reports(expected, found)
    except BaseException:
        paged.pager.close()
        raise
    if close:
        paged.pager.close()
        check_ordinary(paged)
        check_equal(values_of(plain), values_of(paged), "at the end")
    return paged


def check_reports(expected: list[tuple[str, Any]], found: list[tuple[str, Any]]) -> None:
    """Two runs of a script reported the same."""
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert expected, "the script reported nothing"
    for (name, value), (_, other) in zip(expected, found, strict=True):
        check_equal(value, other, name)


def batch_loss(case: Case, model: Any, step: int) -> Tensor:
    """The loss of one batch."""
    batch = case.make_batch(step)
    return case.loss(model(*batch[0], **batch[1]), batch)


def train_step(case: Case, model: Any, step: int) -> Tensor:
    """Forward and backward of one batch; the loss."""
    loss = batch_loss(case, model, step)
    loss.backward()
    return loss


def train(
    case: Case,
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    report: Report | None = None,
) -> None:
    """Ordinary training steps; reports losses."""
    for step in steps:
        optimizer.zero_grad()
        loss = train_step(case, model, step)
        optimizer.step()
        if report is not None:
            report(f"loss {step}", loss)
