"""The fastest placement by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from pager.graph.arena_walk import DeviceShares, Placement, StepKnobs
from pager.graph.choose import Choice, choose_placement
from pager.policies.belady import Belady
from pager.policies.staying import belady, spread
from tests.graph.step_builders import ROUND_RATES, make_step

NUM = 12


def choose(candidates: dict[str, Placement], *, arena: int = 10**6, margin: float = 0.01) -> Choice:
    return choose_placement(
        make_step(NUM, tick_seconds=25.0),
        DeviceShares(arena_bytes=arena, num_slots=4, slot_bytes=600),
        candidates,
        policy=Belady(),
        rates=ROUND_RATES,
        knobs=StepKnobs(update_at="backward"),
        margin=margin,
    )


def of(**columns: object) -> Placement:
    return Placement.of(NUM, stays=True, **columns)  # type: ignore[arg-type]


def test_states_spread_along_a_backward_that_computes_as_long_as_the_link_copies() -> None:
    """Half of the states stay. Those first used in a row: the link rests while their gradients come."""
    sizes = np.full(NUM, 1000)
    found = choose(
        {
            "belady": of(keeps_states=belady(sizes, range(NUM), 6000)),
            "spread": of(keeps_states=spread(sizes, 6000)),
        }
    )
    assert found.name == "spread"
    assert found.step.seconds < 0.95 * found.steps["belady"].seconds  # type: ignore[union-attr]
    assert found.placement.keeps_states.tolist() == spread(sizes, 6000).tolist()


def test_the_first_is_kept_where_the_others_are_hardly_faster() -> None:
    same = of(keeps_states=True)
    assert choose({"first": same, "second": same}).name == "first"
    slow, fast = of(keeps_states=np.arange(NUM) < 6), of(keeps_states=np.arange(NUM) % 2 == 0)
    assert choose({"slow": slow, "fast": fast}, margin=0.9).name == "slow"
    assert choose({"slow": slow, "fast": fast}, margin=0.0).name == "fast"


def test_what_cannot_be_carried_out_is_not_chosen_and_says_why() -> None:
    found = choose({"all": of(keeps_states=True), "none": of()}, arena=10_000)
    assert found.name == "none"
    assert "pass the arena's 10000" in str(found.steps["all"])
    assert str(found).startswith("none of all slots of 2400 bytes")
    with pytest.raises(ValueError, match="pass the arena's 1000"):
        choose({"all": of(keeps_states=True)}, arena=1000)
    with pytest.raises(ValueError, match="no placement to choose from"):
        choose({})
