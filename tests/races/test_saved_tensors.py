"""Control tests of what autograd saves: without the packing, or without the version check, a named thing goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pager.errors import PagerError
from pager.mmu import saved_tensors
from tests.races.scenarios import WrongBytes, expect_refusal, handle_of, make_managed_layer, train_over_host
from tests.races.sites import skip_only


class _EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def leave_out_check(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """What is saved as ``kind`` takes any version for its own."""
    init = kind.__init__  # type: ignore[misc]

    def __init__(saved: Any, *args: Any) -> None:
        init(saved, *args)
        saved.version = _EqualToAll()

    monkeypatch.setattr(kind, "__init__", __init__)


def write_to_a_weight_before_backward() -> None:
    """Backward needs the weight that was used in forward."""
    layer = make_managed_layer(skip_only(None))
    loss = layer(torch.ones(1, 96, requires_grad=True)).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    expect_refusal(loss)
    handle_of(layer).close()


def write_to_an_activation_before_backward() -> None:
    """Backward needs the input as it was in forward; torch checks it, except under hooks like ours."""
    layer = make_managed_layer(skip_only(None))
    hidden = torch.ones(1, 96)
    loss = layer(hidden).sum()
    hidden.mul_(3)
    expect_refusal(loss)
    handle_of(layer).close()


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [
        (saved_tensors._SavedFrame, write_to_a_weight_before_backward),
        (saved_tensors._SavedOrdinary, write_to_an_activation_before_backward),
    ],
)
def test_the_version_check_left_out_is_noticed(
    kind: type, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario()
    leave_out_check(monkeypatch, kind)
    with pytest.raises(WrongBytes):
        scenario()


def test_the_packing_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that autograd keeps as they are cannot leave: the model does not fit any more."""
    saving_frames = saved_tensors.saving_frames
    monkeypatch.setattr("pager.mmu.mmu.saving_frames", lambda frames: saving_frames({}))
    with pytest.raises(PagerError, match="are in use"):
        train_over_host(skip_only(None), None)  # type: ignore[arg-type]


def test_packing_is_what_plain_torch_would_compute_without_it() -> None:
    """With the packing and the checks in place the same step gives the same gradients."""
    layer = make_managed_layer(skip_only(None))
    plain = nn.Linear(96, 96, bias=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 96, requires_grad=True)
    (found,) = torch.autograd.grad(layer(x).square().sum(), [x])
    (expected,) = torch.autograd.grad(plain(x).square().sum(), [x])
    handle_of(layer).close()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("convert", [False, True])
def test_a_saved_gradient_outlives_its_parameters_next_one(convert: bool) -> None:
    """What autograd saved of a gradient that was dropped is the old values, as in plain torch."""
    found = []
    for managed in (True, False):
        layer = make_managed_layer(skip_only(None)) if managed else nn.Linear(96, 96, bias=False)
        layer(torch.ones(1, 96)).sum().backward()
        x = torch.ones(96, 96, requires_grad=True)
        assert layer.weight.grad is not None
        product = (layer.weight.grad * x).sum()
        layer.weight.grad = None
        if convert:
            layer.half()
        layer(torch.full((1, 96), 3.0).to(layer.weight.dtype)).sum().backward()
        product.backward()
        assert x.grad is not None
        found.append(x.grad)
        if managed:
            handle_of(layer).close()
    assert torch.equal(found[0], found[1])


def test_a_backward_after_close_uses_the_ordinary_weight() -> None:
    layer = make_managed_layer(skip_only(None))
    x = torch.randn(1, 96, requires_grad=True)
    loss = layer(x).sum()
    handle_of(layer).close()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(1, 96) @ layer.weight.detach())
