"""Few combinations of factor values that together hold every pair of values of every two factors.

A fault shows where two settings meet far more often than where three must, so a few dozen combinations find
nearly what the whole product of thousands would (D. Cohen and others, "The AETG System", 1997; the greedy
search is theirs).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs_of(row: Mapping[str, object]) -> set[Pair]:
    """The pairs of (factor, value) that a combination holds, factors in its order."""
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Mapping[str, Sequence[object]]) -> list[Pair]:
    """Every pair of values of two different factors."""
    return [
        ((one, a), (two, b))
        for (one, first), (two, second) in itertools.combinations(factors.items(), 2)
        for a, b in itertools.product(first, second)
    ]


def pairwise(factors: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Combinations (factor -> value) that cover ``all_pairs(factors)``; the same ones in every run.

    Each begins with the first pair not covered yet and takes, factor by factor, the value that covers most
    new pairs with those taken already; among equals the one used least. Values must be hashable.
    """
    missing = dict.fromkeys(all_pairs(factors))
    used: Counter[tuple[str, object]] = Counter()
    rows = []
    while missing:
        row: dict[str, object] = dict(next(iter(missing)))
        for name, values in factors.items():
            if name not in row:
                row[name] = _best(factors, missing, used, row, name, values)
        row = {name: row[name] for name in factors}
        for pair in pairs_of(row):
            missing.pop(pair, None)
        used.update(row.items())
        rows.append(row)
    return rows


def _best(
    factors: Mapping[str, Sequence[object]],
    missing: Mapping[Pair, None],
    used: Mapping[tuple[str, object], int],
    row: Mapping[str, object],
    name: str,
    values: Iterable[object],
) -> object:
    order = list(factors)

    def num_new(value: object) -> int:
        mine = (name, value)
        return sum(
            ((other, mine) if order.index(other[0]) < order.index(name) else (mine, other)) in missing
            for other in row.items()
        )

    return max(values, key=lambda value: (num_new(value), -used.get((name, value), 0)))
