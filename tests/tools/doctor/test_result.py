"""Verdicts together: the gravest, as text and as plain values."""

from __future__ import annotations

import json

import pytest

from pager.tools.doctor.result import CheckResult, Verdict, as_dict, as_text, worst


def make_result(verdict: Verdict, name: str = "link", advice: str = "") -> CheckResult:
    return CheckResult(name=name, verdict=verdict, found="seen", advice=advice, values={"rate": 1.5})


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "ok"),
        (["not here", "ok"], "ok"),
        (["ok", "slow", "not here"], "slow"),
        (["slow", "broken", "ok"], "broken"),
    ],
)
def test_the_gravest_verdict_is_that_of_all(verdicts: list[Verdict], expected: str) -> None:
    results = [make_result(verdict) for verdict in verdicts]
    assert worst(results) == expected
    assert as_dict(results)["verdict"] == expected


def test_the_text_has_a_line_a_check_and_what_to_do() -> None:
    text = as_text([make_result("slow", "disk", "take another"), make_result("ok")])
    assert text.splitlines() == [
        "slow      disk  seen",
        "                -> take another",
        "ok        link  seen",
        "",
        "1 slow, 1 ok",
    ]


def test_plain_values_are_json() -> None:
    plain = as_dict([make_result("ok")])
    assert json.loads(json.dumps(plain)) == plain
    assert plain["checks"][0] == {
        "name": "link",
        "verdict": "ok",
        "found": "seen",
        "advice": "",
        "values": {"rate": 1.5},
    }
