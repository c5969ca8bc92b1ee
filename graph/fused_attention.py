"""Attention as a GPU computes it, on tensors without data.

`scaled_dot_product_attention` picks its kernel by the device of its tensors. On meta tensors that is the formula
in single steps, whose scores grow with the square of the sequence and are kept for backward; on a GPU a fused
kernel that never holds them. What capture says about activations and work must be the GPU's, so for its time
torch's dispatcher is told which kernel that is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

_HALVES = frozenset({torch.float16, torch.bfloat16})
# The largest head that torch's flash kernel takes, and what all fused ones want it to be a multiple of.
_MAX_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8
# The dispatcher is the process's: one registration at a time.
_lock = threading.Lock()


@contextlib.contextmanager
def fused_attention_on_meta() -> Iterator[None]:
    """Meanwhile attention over meta tensors is the kernel that a GPU would choose, in every thread."""
    with _lock:
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
            yield
        finally:
            library._destroy()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output, by the fused kernel that would take this; by single steps where none would or it is not certain."""
    inputs = (query, key, value)
    aten, cuda = torch.ops.aten, torch.backends.cuda
    head = query.shape[-1]
    alike = all(
        t.dim() == 4 and t.dtype == query.dtype and t.shape[:2] == query.shape[:2] and t.shape[-1] == head
        for t in inputs
    )
    is_half = query.dtype in _HALVES
    if alike and not enable_gqa and not head % _HEAD_MULTIPLE:
        if attn_mask is None and is_half and head <= _MAX_FLASH_HEAD and cuda.flash_sdp_enabled():
            output, *_ = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )
            return output
        if (is_half or query.dtype == torch.float32) and cuda.mem_efficient_sdp_enabled():
            saves = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
            bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
            output, *_ = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, saves, dropout_p, is_causal, scale=scale
            )
            return output
    output, *_ = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return output


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as the kernel takes it: what is added to the scores, of their shape."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    return mask.expand(*query.shape[:3], key.shape[2])
