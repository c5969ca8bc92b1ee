"""A policy of the user's that raises or answers nonsense: a clear error, nothing lost, and two ways on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pager
from pager.config import Checks
from pager.engine.checked_policy import CheckedPolicy
from pager.policies.lru import Lru
from tests import models
from tests.cases.refusals import adamw
from tests.cases.same import CHECKS, check_equal, check_ordinary, manage, train, values_of


class Spoilt(Lru):
    """LRU until it is spoilt."""

    name = "spoilt"

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Callable[[Any], Any] | None = None

    def eviction_order(self, candidates: Any, next_use: Any) -> Any:
        order = super().eviction_order(candidates, next_use)
        return order if self.spoil is None else self.spoil(order)


def fail(order: Any) -> Any:
    raise KeyError("no such key")


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (fail, "raised KeyError in eviction_order.*no such key"),
    "repeats": (lambda order: np.r_[order, order[:1]], r"repeats key \d+"),
    "unknown": (lambda order: np.r_[order, 10**6], "adds, unasked, key 1000000"),
    "missing": (lambda order: order[1:], r"leaves out key \d+"),
    "empty": (lambda order: order[:0], r"leaves out key"),
    "none": (lambda order: None, "answered eviction_order.. with None; expected"),
    "floats": (lambda order: order.astype(float), "expected the candidates' keys"),
    "ragged": (lambda order: [[1], [2, 3]], "expected the candidates' keys"),
}


def use(case: models.Case, model: Any) -> None:
    """Read every parameter some times: whether a policy is asked at a given use depends on what pagerd brought."""
    with torch.no_grad():
        for _ in range(10):
            model(*case.make_batch(2)[0])


@pytest.mark.parametrize("daemon", ["inline", "thread"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_policy_gone_wrong_can_be_replaced_in_the_middle_of_training(kind: str, daemon: str) -> None:
    spoil, message = WRONG[kind]
    plain, case, policy = models.make_mlp(), models.make_mlp(), Spoilt()
    plain_optimizer, optimizer = adamw(plain.model), adamw(case.model)
    checks = Checks(daemon=daemon, streams="late", happens_before=True)
    model = manage(case.model, optimizer, eviction=policy, checks=checks)
    train(plain, plain.model, plain_optimizer, range(4))
    train(case, model, optimizer, range(2))
    policy.spoil = spoil
    for _ in range(2):
        with pytest.raises(pager.ConfigError, match=f"eviction policy 'spoilt' .*{message}") as caught:
            use(case, model)
        assert (kind == "raises") == isinstance(caught.value.__cause__, KeyError)
    model.pager.set(eviction="lru")
    assert model.pager.config.eviction == "lru"
    train(case, model, optimizer, range(2, 4))
    model.pager.close()
    check_equal(values_of(plain.model), values_of(model), "after the policy was replaced")


@pytest.mark.parametrize("kind", WRONG)
def test_closing_does_not_need_the_policy(kind: str) -> None:
    spoil, _ = WRONG[kind]
    plain, case, policy = models.make_mlp(), models.make_mlp(), Spoilt()
    model = manage(case.model, optimizer := adamw(case.model), eviction=policy)
    train(plain, plain.model, plain_optimizer := adamw(plain.model), range(2))
    train(case, model, optimizer, range(2))
    policy.spoil = spoil
    optimizer.zero_grad()
    plain_optimizer.zero_grad()
    with pytest.raises(pager.ConfigError, match="spoilt"):
        use(case, model)
    model.pager.close()
    check_ordinary(model)
    check_equal(values_of(plain.model), values_of(model), "after closing")
    train(plain, plain.model, plain_optimizer, range(2, 4))
    train(case, model, optimizer, range(2, 4))
    check_equal(values_of(plain.model), values_of(model), "trained on without us")


@pytest.mark.parametrize("method", ["resize", "record_access", "record_evict"])
def test_an_error_where_a_policy_is_only_told_something(method: str) -> None:
    class Deaf(Lru):
        name = "deaf"

    def refuse(self: Any, *args: Any) -> None:
        raise ZeroDivisionError("by nothing")

    plain, case, policy = models.make_mlp(), models.make_mlp(), Deaf()
    model = manage(case.model, optimizer := adamw(case.model), eviction=policy, checks=CHECKS)
    train(plain, plain.model, adamw(plain.model), range(2))
    setattr(Deaf, method, refuse)
    if method == "resize":
        model.pager.set(eviction=policy)
        train(case, model, optimizer, [0])
    with pytest.raises(
        pager.ConfigError, match=rf"'deaf' raised ZeroDivisionError in {method}\(\): by nothing"
    ):
        train(case, model, optimizer, [1] if method == "resize" else [0])
    model.pager.set(eviction="lru")
    train(case, model, optimizer, [1] if method == "resize" else [0, 1])
    model.pager.close()
    check_equal(values_of(plain.model), values_of(model), "nothing was lost")


def test_the_plan_names_the_policy_too() -> None:
    case, policy = models.make_mlp(), Spoilt()
    model = manage(case.model, adamw(case.model), eviction=policy, example_inputs=case.make_batch(0)[0])
    policy.spoil = fail
    with pytest.raises(pager.ConfigError, match="'spoilt' raised KeyError"):
        _ = model.pager.plan
    model.pager.set(eviction="lru")
    model.pager.close()


def test_a_right_answer_passes_as_a_list_too() -> None:
    policy = Spoilt()
    policy.resize(3)
    policy.spoil = lambda order: [int(key) for key in order]
    checked = CheckedPolicy(policy)
    keys = np.array([2, 0, 1], np.int64)
    np.testing.assert_array_equal(checked.eviction_order(keys, keys), [0, 1, 2])
    assert not checked.has_failed
