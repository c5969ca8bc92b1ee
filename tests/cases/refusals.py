"""That `manage` refuses something and leaves the model exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import models
from tests.cases.same import check_equal, check_ordinary, manage, train


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def identity_of(model: Any, *, storages: bool) -> dict[str, Any]:
    """What must not change: objects, storages, hooks, attributes."""
    return {
        "params": [
            (name, id(p), type(p), p.data_ptr() * storages, p._version, p.requires_grad)
            for name, p in model.named_parameters()
        ],
        "buffers": [(name, id(b), b.data_ptr()) for name, b in model.named_buffers()],
        "modules": [
            (name, sorted(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks))
            for name, m in model.named_modules()
        ],
    }


def check_refused(
    make_case: Callable[[], models.Case],
    error: type[Exception],
    match: str,
    optimizer: Any = None,
    *,
    storages: bool = True,
    **knobs: Any,
) -> None:
    """`manage` raises, the model is untouched, and it trains as one that never met us."""
    case, twin = make_case(), make_case()
    before = identity_of(case.model, storages=storages)
    made = optimizer(case.model) if callable(optimizer) else optimizer
    with pytest.raises(error, match=match):
        manage(case.model, made, **knobs)
    assert identity_of(case.model, storages=storages) == before
    check_ordinary(case.model)
    for each in (case, twin):
        torch.manual_seed(0)
        train(each, each.model, adamw(each.model), range(2))
    check_equal(dict(twin.model.state_dict()), dict(case.model.state_dict()), "trained after the refusal")
