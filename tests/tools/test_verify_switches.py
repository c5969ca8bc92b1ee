"""Switching off one thing at a time: what is tried, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from pager.errors import ConfigError
from pager.tools.verify_switches import PAGING, explain, switches_of, try_without_each

DEFAULTS: dict[str, Any] = {
    "update_on": "device",
    "update_at": "step",
    "master": None,
    "disk": None,
    "disk_compression": None,
    "eviction": "belady",
    "page_size": "128KiB",
    "prefetch_distance": 4,
    "device_budget": "1GiB",
    PAGING: True,
}
ALL_ON = DEFAULTS | {"update_on": "cpu", "update_at": "backward", "master": "float32", "disk": "/d"}
ALL_ON |= {"disk_compression": "zstd", "eviction": "lru", "page_size": "16KiB"}


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (DEFAULTS, ["prefetch_distance=4", "paging"]),
        (DEFAULTS | {PAGING: False, "prefetch_distance": 0}, []),
        (
            ALL_ON,
            [
                *(
                    "update_on=cpu",
                    "update_at=backward",
                    "master=float32",
                    "disk_compression=zstd",
                    "disk=/d",
                ),
                *("eviction=lru", "page_size=16KiB", "prefetch_distance=4", "paging"),
            ],
        ),
    ],
)
def test_what_is_switched_on(knobs: dict[str, Any], expected: list[str]) -> None:
    assert [str(switch) for switch in switches_of(knobs)] == expected


def tried(
    knobs: dict[str, Any], guilty: set[str], refuse: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """The runs, and what is said, where a run is bit-equal unless all of ``guilty`` are as in ``knobs``."""
    runs: list[dict[str, Any]] = []

    def run(other: dict[str, Any]) -> bool:
        runs.append(other)
        if refuse and other[refuse] != knobs[refuse]:
            raise ConfigError("pager: no room")
        return other[PAGING] is False or any(other[name] != knobs[name] for name in guilty)

    return runs, explain(try_without_each(switches_of(knobs), run, knobs))


def test_one_is_off_at_a_time() -> None:
    runs, _ = tried(ALL_ON, {"eviction"})
    changed = [{name for name in ALL_ON if run[name] != ALL_ON[name]} for run in runs]
    assert changed == [
        {name}
        for name in (
            *("update_on", "update_at", "master", "disk_compression", "disk"),
            *("eviction", "page_size", "prefetch_distance"),
        )
    ]  # and not without paging: one of those it holds was found


def test_the_cpus_update_is_expected_to_differ() -> None:
    _, said = tried(DEFAULTS | {"update_on": "cpu"}, {"update_on"})
    assert said == [
        "with update_on=device bit-equal: update_on=cpu makes the difference",
        "update_on=cpu: the CPU's update may differ in the last bits: expected, see the table in README.md",
    ]


def test_another_culprit_is_not_expected() -> None:
    _, said = tried(ALL_ON, {"update_at"})
    assert said[0] == "with update_at=step bit-equal: update_at=backward makes the difference"
    assert "not expected" in said[-1]
    assert len(said) == 2


def test_two_that_differ_only_together_are_both_named() -> None:
    _, said = tried(ALL_ON, {"update_at", "eviction"})
    assert [line.partition(" bit-equal")[0] for line in said[:2]] == [
        "with update_at=step",
        "with eviction=belady",
    ]


def test_paging_is_named_where_nothing_else_is() -> None:
    runs, said = tried(DEFAULTS, set())
    assert len(runs) == 2
    assert said[0] == "with nothing paged bit-equal: paging makes the difference"
    assert "not expected" in said[1]


def test_where_nothing_helps_it_says_so() -> None:
    said = explain(try_without_each(switches_of(DEFAULTS), lambda knobs: False, DEFAULTS))
    assert said[0].startswith("it differs with nothing paged too")
    alone = DEFAULTS | {PAGING: False}
    said = explain(try_without_each(switches_of(alone), lambda knobs: False, alone))
    assert said[0] == "no one of them makes the difference alone"


def test_a_run_that_is_refused_is_no_answer() -> None:
    knobs = DEFAULTS | {"disk": "/d"}
    _, said = tried(knobs, {"disk"}, refuse="disk")
    assert "with disk=None it could not be run (no room)" in said
    assert "disk=/d makes the difference" not in " ".join(said)
