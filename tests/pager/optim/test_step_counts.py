"""Step counts: read once, followed without asking, and never believed where somebody else wrote."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from pager.optim.step_counts import StepCounts

BINDING = cast(Any, object())


class Asked:
    """How often a tensor was read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        item = torch.Tensor.item

        def counting(tensor: torch.Tensor) -> Any:
            self.times += 1
            return item(tensor)

        monkeypatch.setattr(torch.Tensor, "item", counting)


def test_it_is_read_once_and_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, step, asked = StepCounts(), torch.tensor(3.0), Asked(monkeypatch)
    assert counts.of(BINDING, step) == 3
    counts.keep(BINDING, step, 3)
    for expected in range(4, 9):
        version = step._version
        step.copy_(torch.tensor(float(expected)))
        counts.add_one(BINDING, step, version)
        assert counts.of(BINDING, step) == expected
    assert asked.times == 1


def test_who_writes_to_it_is_seen() -> None:
    counts, step = StepCounts(), torch.tensor(3.0)
    counts.keep(BINDING, step, 3)
    step.fill_(7)
    assert counts.of(BINDING, step) == 7
    version = step._version
    step += 1
    counts.add_one(BINDING, step, version)  # nothing was known of that version
    assert counts.of(BINDING, step) == 8
    assert counts.of(BINDING, torch.tensor(5.0)) == 5  # another tensor in its place
    assert counts.of(cast(Any, object()), step) == 8


@pytest.mark.parametrize("value", [2.5, -1.0, float("nan"), float("inf")])
def test_what_is_no_count_is_none(value: float) -> None:
    assert StepCounts().of(BINDING, torch.tensor(value)) is None


def test_a_count_that_is_no_tensor_is_nobodys() -> None:
    counts, step = StepCounts(), torch.tensor(3.0)
    counts.keep(BINDING, step, 3)
    counts.add_one(BINDING, 4, 0)
    assert counts.of(BINDING, step) == 3
