"""FLOPs by formula."""

from __future__ import annotations

import pytest
import torch

from pager.graph.flops import flops_of

M, K, N, GROUPS = 6, 5, 7, 3


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param((M, K), (GROUPS, K, N), 2 * M * K * N, id="rows in groups"),
        pytest.param((GROUPS, M, K), (K, N), 2 * M * K * N, id="columns in groups"),
        pytest.param((M, K), (K, N), 2 * M * K * N, id="sums in groups"),
        pytest.param((GROUPS, M, K), (GROUPS, K, N), 2 * GROUPS * M * K * N, id="batches"),
    ],
)
def test_grouped_products(left: tuple[int, ...], right: tuple[int, ...], expected: int) -> None:
    packet = getattr(torch.ops.aten, "_grouped_mm", None)
    # Torch before 2.8 has no such operation, and no model that calls it.
    assert packet is None or flops_of(packet, (on_meta(*left), on_meta(*right)), {}, None) == expected


def test_torchs_formulas_and_none() -> None:
    args = on_meta(M, K), on_meta(K, N)
    assert flops_of(torch.ops.aten.mm, args, {}, on_meta(M, N)) == 2 * M * K * N
    assert flops_of(torch.ops.aten.relu, args[:1], {}, args[0]) == 0
    assert flops_of(None, (), {}, None) == 0
