"""AdamW and Adam on the CPU in one pass: bf16 gradient in, states updated, bf16 weight out.

torch's own update wants fp32 gradients and a fp32 master, so bf16 weights with a split master (`pager.optim.master`)
would cost three passes over host memory. Here each element is read once and written once: 26 bytes with a split
master and a bf16 gradient (weight 2 + 2, low 2 + 2, moments 8 + 8, gradient 2), 28 where everything is fp32.

The kernel is compiled by numba for the dtypes at hand when an update is prepared (0.3 to 1.1 s; later from a cache on
disk), runs on the calling thread without the GIL, and is one loop, which LLVM vectorises. It computes in fp32 in the
order of the single-tensor code of `torch.optim.AdamW` and `torch.optim.Adam`, each operation rounded by itself: no
contraction to FMA, no reassociation; only the division by the bias correction is a multiplication by its inverse.
So the result does not depend on how a parameter is cut, on the number of threads or on the processor. In a core's
own cache it makes 1.1 G elements/s, more than twice what one core gets from memory.

torch's vector code does contract, so the two differ in last bits. From equal inputs one step differs by at most

- first moment: 2 ulp of the larger of the old moment and the gradient;
- second moment: 1 ulp;
- master: 2 ulp, and 2**-22 of the step that the larger of old moment and gradient would make as the first moment;

(in fp32; measured over 4 million elements of magnitudes 2**-20 to 2**8, torch's loop and fused code alike) where the
decay is decoupled or zero. Adam's own decay is added to the gradient, which may then differ by 1 ulp of the larger of
the two terms. A split master is besides off by 1 ulp once in 131072 elements and steps. The clipping coefficient is
multiplied in fp32, where torch rounds the clipped gradient to bf16.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pager.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AdamValues", "CpuAdam"]

logger = logging.getLogger(__name__)

_i32, _u32, _f32 = np.int32, np.uint32, np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamValues:
    """The values of one step, in Python floats as torch keeps them.

    ``step`` counts from 1: it is the count after its increment. ``decoupled`` is AdamW, else the decay is added to
    the gradient (Adam). ``grad_scale`` is multiplied into the gradient: a clipping coefficient, or the inverse of a
    loss scale. There is no amsgrad. Raises ConfigError for a step below 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool = True
    maximize: bool = False
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ConfigError(
                f"an Adam step counts from 1, so step={self.step} cannot be: count, then update"
            )

    def scalars(self) -> tuple[Any, ...]:
        """What the kernel takes: worked out in double precision, then rounded to fp32, as torch does."""
        weight = _f32(1 - self.beta1)
        # torch.lerp: from the nearer end, so that a weight of 1 gives exactly the gradient.
        near_old = bool(weight < 0.5)
        correction1 = 1 - self.beta1**self.step
        return (
            _f32(-self.grad_scale if self.maximize else self.grad_scale),
            _f32(1 - self.lr * self.weight_decay if self.decoupled else 1.0),
            _f32(0.0 if self.decoupled else self.weight_decay),
            not self.decoupled and self.weight_decay != 0,
            weight if near_old else _f32(1) - weight,
            near_old,
            _f32(self.beta2),
            _f32(1 - self.beta2),
            _f32(1 / math.sqrt(1 - self.beta2**self.step)),
            _f32(self.eps),
            _f32(-(self.lr / correction1)),
        )


class CpuAdam:
    """The buffers of one parameter (or of an extent of it), ready to be updated in slices.

    Raises TypeError and ValueError for buffers that the kernel cannot take, ConfigError where numba is not installed.
    The first one of its dtypes in a process compiles the kernel, or loads it from the cache.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        low: torch.Tensor | None,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
    ) -> None:
        """Tensors on the CPU, contiguous, equally many elements, used where they lie (and kept alive).

        ``weight`` bf16, with ``low`` int16 (`pager.optim.master`) or None for a weight that is its own master; or fp32
        without ``low``. Moments fp32. ``gradient`` bf16 or fp32, only read.
        """
        _check(weight, low, exp_avg, exp_avg_sq, gradient)
        self.num_elements = weight.numel()
        self._arrays = (
            _flat(weight),
            _flat(low) if low is not None else None,
            _flat(exp_avg),
            _flat(exp_avg_sq),
            _flat(gradient),
        )
        self._kernel = _kernel(weight.dtype, low is not None, gradient.dtype)

    def run(self, begin: int, end: int, scalars: tuple[Any, ...]) -> None:
        """Update elements ``[begin, end)`` on the calling thread, without the GIL. Disjoint slices may run at once.

        ``scalars`` is the answer of `AdamValues.scalars`. Raises ValueError for elements that there are not.
        """
        if not 0 <= begin <= end <= self.num_elements:
            raise ValueError(
                f"elements [{begin}, {end}) are not among the {self.num_elements} of this update"
            )
        weight, low, exp_avg, exp_avg_sq, gradient = self._arrays
        part = slice(begin, end)
        self._kernel(
            weight[part],
            None if low is None else low[part],
            exp_avg[part],
            exp_avg_sq[part],
            gradient[part],
            *scalars,
        )


def _check(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    weights = (torch.bfloat16,) if low is not None else (torch.bfloat16, torch.float32)
    wanted = {
        "weight": (weight, weights),
        "low": (low, (torch.int16,)),
        "exp_avg": (exp_avg, (torch.float32,)),
        "exp_avg_sq": (exp_avg_sq, (torch.float32,)),
        "gradient": (gradient, (torch.bfloat16, torch.float32)),
    }
    for name, (tensor, dtypes) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"the CPU update takes {name} as one of {dtypes}, not {tensor.dtype}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() != weight.numel():
            raise ValueError(
                f"the CPU update takes {name} contiguous on the CPU with {weight.numel()} elements, not "
                f"{tensor.numel()} on {tensor.device} with strides {tuple(tensor.stride())}"
            )


def _flat(tensor: torch.Tensor) -> NDArray[Any]:
    """The elements as a flat array over the same memory; bf16 as its bits."""
    flat = tensor.detach().view(-1)
    if tensor.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(np.uint16)
    return flat.numpy()


# What `_update` calls by the next two names is written in `_define_accesses`, by the types of the arrays.


def _read(array: Any, low: Any, index: int) -> Any:
    """The fp32 value of an element."""
    raise NotImplementedError


def _write(array: Any, low: Any, index: int, value: Any) -> None:
    """Round a fp32 value into an element, and what is left of it into ``low``."""
    raise NotImplementedError


def _update(
    weight: Any,
    low: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    gradient: Any,
    grad_scale: Any,
    keep: Any,
    decay: Any,
    decays_gradient: Any,
    lerp: Any,
    near_old: Any,
    beta2: Any,
    one_minus_beta2: Any,
    inverse_correction2: Any,
    eps: Any,
    minus_step_size: Any,
) -> None:
    # What keeps this loop a vector loop: the index counts from 0, or numba's wrap-around of negative indices stays in
    # it; and the two helpers are calls, which LLVM inlines: inlined by numba they count references in every round.
    for index in range(weight.size):
        master = _read(weight, low, index)
        grad = _read(gradient, None, index) * grad_scale
        grad = grad + decay * master if decays_gradient else grad
        old = exp_avg[index]
        start = old if near_old else grad
        other = grad if near_old else old
        first = start + lerp * (other - start)
        second = exp_avg_sq[index] * beta2 + one_minus_beta2 * grad * grad
        exp_avg[index] = first
        exp_avg_sq[index] = second
        denominator = np.sqrt(second) * inverse_correction2 + eps
        _write(weight, low, index, master * keep + minus_step_size * (first / denominator))


@cache
def _define_accesses() -> None:
    """Give `_read` and `_write` their meaning inside compiled code."""
    from numba import types
    from numba.extending import overload

    @overload(_read)
    def _(array: Any, low: Any, index: Any) -> Any:
        def read_value(array: Any, low: Any, index: Any) -> Any:
            return array[index]

        def read_bits(array: Any, low: Any, index: Any) -> Any:
            return _u32(_u32(array[index]) << _u32(16)).view(_f32)

        def read_halves(array: Any, low: Any, index: Any) -> Any:
            return _u32(_u32(_u32(array[index]) << _u32(16)) + _u32(low[index])).view(_f32)

        if array.dtype != types.uint16:
            return read_value
        return read_bits if isinstance(low, types.NoneType) else read_halves

    @overload(_write)
    def _(array: Any, low: Any, index: Any, value: Any) -> Any:
        def write_value(array: Any, low: Any, index: Any, value: Any) -> None:
            array[index] = value

        def write_bits(array: Any, low: Any, index: Any, value: Any) -> None:
            bits = _f32(value).view(_u32)
            rounded = _u32(_u32(bits + _u32(0x7FFF)) + _u32(_u32(bits >> _u32(16)) & _u32(1)))
            rounded = _u32(bits | _u32(0x400000)) if value != value else rounded
            array[index] = np.uint16(rounded >> _u32(16))

        def write_halves(array: Any, low: Any, index: Any, value: Any) -> None:
            bits = _f32(value).view(_u32)
            rounded = _u32(_u32(bits + _u32(0x7FFF)) + _u32(_u32(bits >> _u32(16)) & _u32(1)))
            rounded = _u32(bits | _u32(0x400000)) if value != value else rounded
            array[index] = np.uint16(rounded >> _u32(16))
            low[index] = np.int16(min(_i32(bits - _u32(rounded & _u32(0xFFFF0000))), _i32(0x7FFF)))

        if array.dtype != types.uint16:
            return write_value
        return write_bits if isinstance(low, types.NoneType) else write_halves


_lock = threading.Lock()
_kernels: dict[tuple[torch.dtype, bool, torch.dtype], Callable[..., None]] = {}


def _kernel(weight: torch.dtype, has_low: bool, gradient: torch.dtype) -> Callable[..., None]:
    """The compiled update for these dtypes."""
    key = (weight, has_low, gradient)
    with _lock:
        if key not in _kernels:
            _kernels[key] = _compile(weight, has_low, gradient)
        return _kernels[key]


def _compile(weight: torch.dtype, has_low: bool, gradient: torch.dtype) -> Callable[..., None]:
    try:
        import numba
        from numba import types
    except ImportError as error:
        raise ConfigError(
            f"updating on the CPU needs numba, which cannot be imported here ({error}). Install numba, or leave "
            "update_on='device'"
        ) from error
    _define_accesses()

    def array(dtype: torch.dtype) -> Any:
        return types.Array(types.uint16 if dtype == torch.bfloat16 else types.float32, 1, "C")

    f4, low = types.float32, types.Array(types.int16, 1, "C") if has_low else types.none
    arrays = (array(weight), low, types.Array(f4, 1, "C"), types.Array(f4, 1, "C"), array(gradient))
    scalars = (f4, f4, f4, types.boolean, f4, types.boolean, f4, f4, f4, f4, f4)
    signature = types.void(*arrays, *scalars)
    try:
        return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(_update)
    except (RuntimeError, OSError) as error:
        logger.debug("the compiled CPU update is not kept on disk: %s", error)
        return numba.njit(signature, nogil=True, error_model="numpy")(_update)
