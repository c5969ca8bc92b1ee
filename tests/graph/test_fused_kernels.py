"""Attention on meta tensors, as a GPU would compute it; and as before, once nobody asks for that."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pager.graph.capture import capture
from pager.graph.fused_kernels import fused_kernels_on_meta

FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Names(TorchDispatchMode):
    """The operations that ran, and the elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def attend(
    dtype: torch.dtype = torch.bfloat16, head: int = 16, key_heads: int = 4, **options: Any
) -> list[str]:
    """What a forward and backward of attention calls."""
    query, key, value = (
        torch.empty(2, heads, 64, head, dtype=dtype, device="meta", requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    names = Names()
    with names:
        output = functional.scaled_dot_product_attention(query, key, value, **options)
        output.sum().backward()
    assert output.shape == query.shape
    assert output.dtype == dtype
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
    return names.seen


MASK = torch.ones(64, 64, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, FLASH),
        ({"is_causal": True, "dropout_p": 0.1, "scale": 0.5}, FLASH),
        ({"dtype": torch.float16}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
        ({"attn_mask": MASK}, EFFICIENT),
        ({"attn_mask": torch.zeros(64, dtype=torch.bfloat16, device="meta")}, EFFICIENT),
        ({"head": 264}, EFFICIENT),
        ({"head": 12}, None),
        ({"dtype": torch.float64}, None),
        ({"key_heads": 2, "enable_gqa": True}, None),
    ],
)
def test_the_kernel_that_a_gpu_would_choose(options: Any, kernel: str | None) -> None:
    with fused_kernels_on_meta():
        seen = attend(**options)
    assert {name for name in seen if name in (FLASH, EFFICIENT)} == ({kernel} if kernel else set())
    assert ("bmm" in seen) == (kernel is None)
    if kernel:
        assert f"{kernel}_backward" in seen


def test_kernels_that_the_user_switched_off_are_not_named() -> None:
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        fused_kernels_on_meta(),
    ):
        assert "bmm" in attend()


def test_afterwards_all_is_as_before() -> None:
    before = attend()
    with fused_kernels_on_meta():
        assert attend() != before
    assert attend() == before
    with pytest.raises(ZeroDivisionError), fused_kernels_on_meta():
        raise ZeroDivisionError
    assert attend() == before


class Block(nn.Module):
    """Attention in a checkpoint; in torch's own module or called directly."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(64, 4, batch_first=True, bias=False) if own else None
        self.project = nn.Linear(64, 64, bias=False)
        self.to(torch.bfloat16)

    def attended(self, x: Tensor) -> Tensor:
        """Self-attention."""
        if self.own is not None:
            return self.own(x, x, x, need_weights=False)[0]
        heads = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return (
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.attended, self.project(x), use_reentrant=False)


@pytest.mark.parametrize("own", [True, False])
def test_on_a_gpu_activations_grow_with_the_sequence_and_not_with_its_square(own: bool) -> None:
    model = Block(own)
    managed = {parameter: index for index, parameter in enumerate(model.parameters())}
    peaks: dict[torch.device, list[int]] = {CUDA: [], CPU: []}
    orders: dict[torch.device, list[int]] = {}
    for device in (CUDA, CPU):
        for length in (1024, 2048):
            inputs = (torch.empty(1, length, 64, dtype=torch.bfloat16),)
            found = capture(model, managed, inputs, device=device)
            assert found.way == "meta", found.reason
            peaks[device].append(found.peak_activation_bytes)
            orders[device] = found.rows["segment"].tolist()
    assert peaks[CUDA][1] < 2.2 * peaks[CUDA][0]
    assert peaks[CPU][1] > 3.5 * peaks[CPU][0]
    assert orders[CUDA] == orders[CPU]  # the same accesses


# -- RMS norms -----------------------------------------------------------------------------------------------------


needs_fused_norm = pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_fused_rms_norm_backward"), reason="this torch has no fused RMS norm"
)


def norm(
    x: Tensor, weight: Tensor | None, shape: tuple[int, ...] = (64,)
) -> tuple[list[str], list[tuple[torch.Size, torch.dtype]]]:
    """What forward and backward of an RMS norm call, and what is saved between them."""
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.shape, tensor.dtype))
        return tensor

    names = Names()
    with names, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = functional.rms_norm(x, shape, weight)
        output.backward(torch.empty_like(output))
    assert output.shape == x.shape
    for tensor in (x, weight):
        assert tensor is None or (tensor.grad is not None and tensor.grad.shape == tensor.shape)
    return names.seen, saved


def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


@needs_fused_norm
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_norm_keeps_its_input_and_a_number_a_row(weighted: bool, dtype: torch.dtype) -> None:
    x = made(2, 32, 64, dtype=dtype)
    with fused_kernels_on_meta():
        seen, saved = norm(x, made(64, dtype=dtype) if weighted else None)
    assert "pow" not in seen
    assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= set(seen)
    expected = [(x.shape, dtype), (torch.Size([2, 32, 1]), torch.float32)]
    assert saved[:2] == expected
    assert saved[2:] == ([(torch.Size([64]), dtype)] if weighted else [])


@pytest.mark.parametrize(
    ("x", "weight", "shape"),
    [
        ((2, 32, 64), torch.float32, (64,)),
        ((2, 8, 4, 64), torch.bfloat16, (64,)),
    ],
    ids=["a weight in another dtype", "channels last"],
)
def test_where_the_fused_norm_is_not_taken_it_is_single_steps(
    x: tuple[int, ...], weight: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = made(*x)
    if len(x) == 4:
        tensor = tensor.detach().to(memory_format=torch.channels_last).requires_grad_(True)
    with fused_kernels_on_meta():
        seen, _ = norm(tensor, made(*shape, dtype=weight), shape)
    assert "pow" in seen
    assert "_fused_rms_norm_backward" not in seen


@needs_fused_norm
def test_a_norm_of_what_needs_no_gradient_is_fused_too() -> None:
    names = Names()
    with fused_kernels_on_meta(), names, torch.no_grad():
        functional.rms_norm(made(2, 32, 64), (64,), made(64))
    assert "pow" not in names.seen


def test_norms_are_as_before_afterwards() -> None:
    before = norm(made(2, 32, 64), made(64))
    with fused_kernels_on_meta():
        pass
    assert norm(made(2, 32, 64), made(64)) == before


@needs_fused_norm
def test_norms_in_a_frozen_layer() -> None:
    """Gradients of the input alone, of the weight alone."""
    for x_wanted, weight_wanted in ((True, False), (False, True)):
        x, weight = made(2, 32, 64).requires_grad_(x_wanted), made(64).requires_grad_(weight_wanted)
        with fused_kernels_on_meta():
            functional.rms_norm(x, (64,), weight).sum().backward()
        assert (x.grad is not None, weight.grad is not None) == (x_wanted, weight_wanted)


@needs_fused_norm
def test_heads_that_were_moved_forward_are_contiguous_to_torch() -> None:
    """A view (batch, heads, sequence, width) of (batch, sequence, heads, width)."""
    heads = made(2, 32, 4, 64).detach().transpose(1, 2).requires_grad_(True)
    with fused_kernels_on_meta():
        seen, saved = norm(heads, made(64))
    assert "pow" not in seen
    assert len(saved) == 3


@needs_fused_norm
def test_a_gradient_of_a_gradient_goes_through_the_norm() -> None:
    """The step with a penalty on gradients accesses each weight as without the fused kernel."""
    rows = []
    for context in (fused_kernels_on_meta, contextlib.nullcontext):
        x, weight = made(2, 32, 64), made(64)
        with context():
            output = functional.rms_norm(x, (64,), weight)
            (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            assert gradient.requires_grad
            gradient.square().sum().backward()
        rows.append((x.grad is not None, weight.grad is not None))
    assert rows == [(True, True)] * 2


@needs_fused_norm
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_transformed_norms_are_single_steps() -> None:
    """torch.func and forward-mode AD know no rule for the stand-in."""
    with fused_kernels_on_meta():
        mapped = torch.func.vmap(lambda x: functional.rms_norm(x, (64,)))(made(2, 32, 64))
        assert mapped.shape == (2, 32, 64)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(made(32, 64), made(32, 64).detach())
            assert functional.rms_norm(dual, (64,)).shape == (32, 64)
