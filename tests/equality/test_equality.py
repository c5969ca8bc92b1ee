"""Managed equals unmanaged, bit for bit: losses, gradients, parameters, buffers, states after five steps.

Every pair of values of the factors below meets in some test; ``--full-product`` runs every combination of the
first table instead, the values of the second taking turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.equality.pairwise import pairwise
from tests.equality.training import MODELS, OPTIMIZERS, TRAININGS, Setting, check_equal, train, train_plainly
from tests.models import BUILDERS

FACTORS: Mapping[str, Sequence[Any]] = {
    "model": MODELS,
    "optimizer": tuple(OPTIMIZERS),
    "training": TRAININGS,
    "budget": (0.25, 0.5, 1.0),
    "streams": ("late", "early"),
    "daemon": ("inline", "thread"),
}
TAKING_TURNS: Mapping[str, Sequence[Any]] = {
    "eviction": ("belady", "lru", "clock"),
    "prefetch": (4, 0, 1),
    "home": ("host", "disk"),
    "adoption": ("given", "found"),
}


def settings(full_product: bool) -> list[Setting]:
    if not full_product:
        rows: list[dict[str, Any]] = pairwise({**FACTORS, **TAKING_TURNS})
        return [Setting(**row) for row in rows]
    turns = itertools.cycle(pairwise(TAKING_TURNS))
    return [
        Setting(**dict(zip(FACTORS, values, strict=True)), **next(turns))  # type: ignore[arg-type]
        for values in itertools.product(*FACTORS.values())
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setting" in metafunc.fixturenames:
        metafunc.parametrize("setting", settings(metafunc.config.getoption("--full-product")), ids=str)


def is_recorded(setting: Setting) -> bool:
    """Whether the trace is the first real step: nothing before it shows that the whole model is checkpointed.

    The recording also holds what was read before that step, such as by Adagrad's constructor.
    """
    return setting.training == "reentrant" and BUILDERS[setting.model]().blocks == ("",)


def test_managed_equals_plain(setting: Setting, tmp_path: Path) -> None:
    plain = train_plainly(setting)
    managed, closed = train(setting, tmp_path)
    check_equal(managed, plain)
    check_equal(closed, plain)
    assert len(plain.losses) in (5, 20)
    if not is_recorded(setting):
        # The first step shows the update, the second the micro-batches; a plan that missed more is remade then.
        assert managed.deviations[2:] == managed.deviations[2:3] * 3
    assert any(name.endswith(".grad") for name in plain.tensors)
