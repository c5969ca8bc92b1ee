"""Attention and RMS norms as a GPU computes them, on tensors without data.

`scaled_dot_product_attention` picks its kernel by the device of its tensors. On meta tensors that is the formula
in single steps, whose scores grow with the square of the sequence and are kept for backward; on a GPU a fused
kernel that never holds them. `rms_norm` likewise: in single steps it keeps three fp32 tensors of its input's shape,
fused its input and one number a row. What capture says about activations and work must be the GPU's, so for its time
torch's dispatcher is told which kernel that is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

_HALVES = frozenset({torch.float16, torch.bfloat16})
# The largest head that torch's flash kernel takes, and what all fused ones want it to be a multiple of.
_MAX_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8
# The dispatcher is the process's: one registration at a time.
_lock = threading.Lock()


@contextlib.contextmanager
def fused_kernels_on_meta() -> Iterator[None]:
    """Meanwhile attention and RMS norms over meta tensors are the kernels that a GPU would choose, in every thread."""
    with _lock:
        library = torch.library.Library("aten", "IMPL")
        try:
            library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
            if _has_fused_rms_norm():
                library.impl("rms_norm", _rms_norm, "AutogradMeta")
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


def _has_fused_rms_norm() -> bool:
    """Whether this torch has one for GPUs: from 2.9 on, with a backward of its own."""
    return hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """The output, by the fused kernel where it would take this."""
    alike = weight is None or (weight.dtype == input.dtype and not weight.is_complex())
    laid_out = suggest_memory_format(input) == torch.contiguous_format
    if alike and laid_out and not input.is_complex() and not _is_transformed():
        output: Tensor = _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)
        return output
    return _in_single_steps(input, normalized_shape, weight, eps)


def _in_single_steps(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    # On meta tensors this is the formula.
    output: Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return output


def _is_transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work, which a Function without rules for them refuses."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    return in_func or torch.autograd.forward_ad._current_level >= 0


class _FusedRmsNorm(torch.autograd.Function):
    """What CUDA's kernel keeps: the input, and one fp32 number for each row."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output, rstd = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.normalized_shape, ctx.eps = normalized_shape, eps
        ctx.save_for_backward(input, rstd, weight)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        if torch.is_grad_enabled():  # create_graph=True: CUDA's goes on in single steps too
            output = _in_single_steps(input, ctx.normalized_shape, weight, ctx.eps)
            inputs = [tensor for tensor, is_wanted in zip((input, weight), wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(output, inputs, gradients[0], create_graph=True))
            first, second = (next(found) if is_wanted else None for is_wanted in wanted)
            return first, None, second, None
        with torch._C._AutoDispatchBelowAutograd():
            own, of_weight = torch.ops.aten._fused_rms_norm_backward(
                gradients[0], input, ctx.normalized_shape, rstd, weight, wanted
            )
        return own, None, of_weight, None
