"""The fp32 master of a bf16 weight, kept as the weight itself and 16 low bits.

A bf16 number is the upper half of a fp32 number. So a master and its weight share 16 bits, and::

    master bits == (weight bits << 16) + low        low: int16, signed, since rounding may have gone up

The weight is the master rounded to nearest even, exactly as ``master.to(torch.bfloat16)`` rounds it (it is that
operation that makes it). ``low`` is zero if and only if the master equals the weight, so zeroing ``low`` is all that
a user's write to a weight asks for.

One difference does not fit into 16 bits: +0x8000, where the master lies exactly between two weights and the even one
is below it. There ``low`` becomes 0x7FFF: the master is moved by one fp32 ulp towards its weight, and the weight is
correctly rounded from either. This meets 1 of 131072 random masters, by 2**-16 of the distance between two weights;
joining and splitting again changes nothing more. Infinities, zeros of both signs, denormals and masters that round
to infinity come back as they were; a NaN comes back as a NaN, not always with the same payload.

On an accelerator every torch operation is one pass over memory. ``join`` is one (8 bytes per element moved: 4 read,
4 written, the least there is), ``split`` four (30 bytes): bf16 cast 6, difference 10, saturation 8, narrowing 6. The
trick behind the single pass: a constant of shape (1,) and dtype int32 takes part in type promotion, so that
``addcmul`` reads int16 operands and computes in int32.
"""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["join", "split"]

# On the CPU mixed dtypes cost temporaries: done in pieces that stay in the second-level cache.
_CPU_BLOCK = 1 << 16


def join(weight: torch.Tensor, low: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the master into ``out`` and return it.

    ``weight`` bf16, ``low`` int16, ``out`` fp32: equally many elements, contiguous, on one device. Nothing is
    allocated on an accelerator (after the first call there) and the work is on the current stream; on the CPU it
    is done on return.
    Raises TypeError for other dtypes, ValueError for other sizes, strides or devices.
    """
    _check(weight, low, out)
    bits, high, low = out.view(torch.int32).view(-1), weight.view(torch.int16).view(-1), low.view(-1)
    if out.device.type != "cpu":
        torch.addcmul(low, high, _constant(1 << 16, out.device), out=bits)
        return out
    values, weight = out.view(-1), weight.view(-1)
    for begin, end in _blocks(out.numel()):
        values[begin:end].copy_(weight[begin:end])
        bits[begin:end].add_(low[begin:end])
    return out


def split(
    master: torch.Tensor, weight: torch.Tensor, low: torch.Tensor, scratch: torch.Tensor | None = None
) -> None:
    """Write the halves of ``master`` into ``weight`` and ``low``.

    ``master`` fp32, ``weight`` bf16, ``low`` int16, as in `join`. ``scratch`` is room for as many fp32 or int32
    elements, overwritten: with it nothing is allocated; ``master`` itself may be given where it is not needed
    afterwards. Without it the room is allocated, on the CPU for a small block only.
    """
    _check(weight, low, master)
    if scratch is not None:
        if scratch.dtype not in (torch.float32, torch.int32):
            raise TypeError(f"the scratch of split must be float32 or int32, not {scratch.dtype}")
        _check_place("scratch", scratch, master)
    bits, high = master.view(torch.int32).view(-1), weight.view(torch.int16).view(-1)
    values, weight, low = master.view(-1), weight.view(-1), low.view(-1)
    if scratch is None:
        room = torch.empty(
            min(master.numel(), _CPU_BLOCK) if master.device.type == "cpu" else master.numel(),
            dtype=torch.int32,
            device=master.device,
        )
    else:
        room = scratch.view(torch.int32).view(-1)
    if master.device.type != "cpu":
        _split(values, bits, weight, high, low, room)
        return
    in_place = room.data_ptr() == bits.data_ptr()
    for begin, end in _blocks(master.numel()):
        piece = slice(begin, end)
        place = room[piece] if in_place else room[: end - begin]
        _split(values[piece], bits[piece], weight[piece], high[piece], low[piece], place)


def _split(
    values: torch.Tensor,
    bits: torch.Tensor,
    weight: torch.Tensor,
    high: torch.Tensor,
    low: torch.Tensor,
    room: torch.Tensor,
) -> None:
    weight.copy_(values)
    torch.addcmul(bits, high, _constant(-(1 << 16), bits.device), out=room)
    # There is no lower bound to keep: only the difference of a NaN from its weight can be less, and a NaN's weight with
    # any low bits is a NaN. Not straight into ``low``: CUDA would narrow the operands first and compare afterwards.
    torch.minimum(room, _constant(0x7FFF, bits.device), out=room)
    low.copy_(room)


@cache
def _constant(value: int, device: torch.device) -> torch.Tensor:
    # A blocking copy from the host: complete before any stream can read it.
    return torch.tensor([value], dtype=torch.int32).to(device)


def _blocks(num_elements: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _CPU_BLOCK, num_elements)) for begin in range(0, num_elements, _CPU_BLOCK)]


def _check(weight: torch.Tensor, low: torch.Tensor, master: torch.Tensor) -> None:
    wanted = (torch.bfloat16, torch.int16, torch.float32)
    given = (weight.dtype, low.dtype, master.dtype)
    if given != wanted:
        raise TypeError(f"weight, low and master must be {wanted}, not {given}")
    _check_place("master", master, master)
    _check_place("weight", weight, master)
    _check_place("low", low, master)


def _check_place(name: str, tensor: torch.Tensor, master: torch.Tensor) -> None:
    if tensor.numel() != master.numel() or tensor.device != master.device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements on {tensor.device}, the master {master.numel()} on {master.device}; "
            "they must agree"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tuple(tensor.stride())}")
