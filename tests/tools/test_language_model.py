"""The decoder that `pager train` trains, as a model of its own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pager.tools import language_model
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes

SIZES = ModelSizes(hidden=32, layers=2, heads=4, ffn=48)


def make_tokens(batch: int = 2, seq: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(0))


def test_the_first_loss_is_that_of_a_guess() -> None:
    tokens = make_tokens(batch=8, seq=64)
    loss = make_model(SIZES, seed=0)(tokens, tokens.roll(1)).detach()
    assert loss.shape == ()
    assert float(loss) == pytest.approx(math.log(256), abs=0.4)


def test_the_same_seed_gives_the_same_model() -> None:
    first, again, other = (make_model(SIZES, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_position_sees_what_came_before_it_only() -> None:
    model = make_model(SIZES, seed=0)
    tokens = make_tokens()
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    ignored = -100
    early_targets = tokens.roll(-1, dims=1)
    early_targets[:, 6:] = ignored
    late_targets = tokens.roll(-1, dims=1)
    late_targets[:, :6] = ignored
    assert torch.equal(model(tokens, early_targets), model(changed, early_targets))
    assert not torch.equal(model(tokens, late_targets), model(changed, late_targets))


def test_order_matters() -> None:
    model = make_model(SIZES, seed=0)
    tokens = make_tokens(batch=1)
    swapped = tokens.clone()
    swapped[:, :2] = tokens[:, :2].flip(1)
    targets = torch.full_like(tokens, -100)
    targets[:, -1] = 7
    assert not torch.equal(model(tokens, targets), model(swapped, targets))


def test_checkpointing_and_a_chunked_loss_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "LOSS_CHUNK_TOKENS", 7)
    tokens = make_tokens()
    gradients = []
    for checkpoint in (False, True):
        model = make_model(dataclasses.replace(SIZES, checkpoint=checkpoint), seed=0)
        model(tokens, tokens.roll(-1, dims=1)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, recomputed = gradients
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient)


def test_a_meta_model_has_the_shapes_and_no_bytes() -> None:
    model = make_model(dataclasses.replace(SIZES, dtype="bfloat16"), seed=0, device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() is torch.float32
    assert all(hasattr(m, "reset_parameters") for m in model.modules() if list(m.parameters(recurse=False)))
