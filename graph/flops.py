"""FLOPs of one ATen operation: torch's own formulas, and those that it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def _grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Products of groups of rows, as mixtures of experts make them: each row meets one group's matrix only.

    Either side may be one matrix that is cut into groups: (m, k) x (groups, k, n), (groups, m, k) x (k, n), and
    (m, k) x (k, n) with the groups along k, are 2 m n k all together. Of two batches it is that for each group.
    """
    if left.dim() == 3 and right.dim() == 2:
        return 2 * left.shape[-2] * right.numel()
    return 2 * left.numel() * right.shape[-1]


# Looked up by name: not every torch that we support has them.
_OURS = {
    packet: formula
    for name, formula in {"_grouped_mm": _grouped_product}.items()
    if (packet := getattr(torch.ops.aten, name, None)) is not None
}


def flops_of(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """FLOPs (2 m n k for a product) of a call of ``packet``, an overload packet; 0.0 for what has no formula.

    Tensors are asked for their shapes only.
    """
    ours = _OURS.get(packet)
    if ours is not None:
        return float(ours(*args, **kwargs))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
