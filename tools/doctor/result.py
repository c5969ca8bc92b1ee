"""What a check answers: a line with a verdict, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["CheckResult", "Verdict", "as_dict", "as_text", "worst"]

Verdict = Literal["ok", "slow", "broken", "not here"]

# From the mildest on. What is not here cannot be wrong.
_ORDER: tuple[Verdict, ...] = ("not here", "ok", "slow", "broken")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """``found``: what was seen, with its numbers. ``advice``: what to do, where there is something to do.
    ``values``: the numbers by name, plain.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def worst(results: Sequence[CheckResult]) -> Verdict:
    """The gravest verdict among ``results``; "ok" if there is nothing to complain of."""
    return max((result.verdict for result in results), key=_ORDER.index, default="ok")


def as_dict(results: Sequence[CheckResult]) -> dict[str, Any]:
    """All results as plain values."""
    return {
        "verdict": worst(results),
        "checks": [
            {
                "name": result.name,
                "verdict": result.verdict,
                "found": result.found,
                "advice": result.advice,
                **({"values": result.values} if result.values else {}),
            }
            for result in results
        ],
    }


def as_text(results: Sequence[CheckResult]) -> str:
    """One line a check, the advice below it."""
    width = max((len(result.name) for result in results), default=0)
    lines = []
    for result in results:
        lines.append(f"{result.verdict:<9} {result.name:<{width}}  {result.found}")
        if result.advice:
            lines.append(f"{'':<9} {'':<{width}}  -> {result.advice}")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _ORDER}
    lines += [
        "",
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(_ORDER) if counts[verdict]),
    ]
    return "\n".join(lines)
