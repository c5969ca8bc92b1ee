"""Copies of many small tensors in few launches.

A model has hundreds of tensors under a page (norms, biases, step counts). One launch for each of them, several times
a step, is milliseconds of the launching thread; torch's foreach operations take a list with one. Each copy is exactly
``copy_`` or ``clone`` of its tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

__all__ = ["clone_all", "copy_all", "single_ones"]


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """``target.copy_(source)`` for each pair; targets do not overlap. Raises RuntimeError as ``copy_`` does."""
    groups: defaultdict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in pairs:
        # Lists of one kind are copied in one launch; the shapes of a pair may differ where copy_ expands.
        if _is_plain(target) and _is_plain(source) and target.shape == source.shape:
            targets, sources = groups[target.device, target.dtype, source.device, source.dtype]
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    for targets, sources in groups.values():
        torch._foreach_copy_(targets, sources)


def clone_all(tensors: Sequence[torch.Tensor], *, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """``tensor.detach().clone()`` of each, in ``dtype`` where that is given."""
    clones = [torch.empty_like(t, dtype=dtype) if _is_plain(t) else t.detach().clone() for t in tensors]
    copy_all((clone, t.detach()) for clone, t in zip(clones, tensors, strict=True) if _is_plain(t))
    return [clone if dtype is None else clone.to(dtype) for clone in clones]


def single_ones(dtypes: Sequence[torch.dtype], device: torch.device) -> list[torch.Tensor]:
    """``torch.ones(1, dtype=dtype, device=device)`` for each; those of a dtype share their memory."""
    counts = Counter(dtypes)
    ones = {
        dtype: iter(torch.ones(count, dtype=dtype, device=device).split(1)) for dtype, count in counts.items()
    }
    return [next(ones[dtype]).detach() for dtype in dtypes]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
