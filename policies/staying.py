"""What stays on the device where only a part can: by error diffusion, or by Belady.

Which parameters' weights or states stay, and which the CPU updates, is one question: of tensors in order along the
step, take so many bytes. Two answers, and no general rule between them:

- *spread* (error diffusion): walk along the step, add the share that can be taken to a running error, take a tensor
  when the error has grown to it. Every stretch of the step then streams the same share, so that neither the link nor
  the computation stands idle for long.
- *belady*: what is needed farthest from now streams, so what is used first stays. It is the optimum where only misses
  count, as they do where the link is busy throughout.

Which is faster depends on what is the wall where: compared by simulation in docs/benchmarks.md, decided in
docs/decisions.md, 30.

How the arena is shared out stands here too, for the runtime and for predictions.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "UPDATE_TENSORS",
    "ArenaShares",
    "belady",
    "is_worth_lending",
    "lent_gradient_bytes",
    "room_for_staying",
    "share_arena",
    "spread",
    "share_wired",
    "usually_wired_bytes",
    "wired_bytes",
]

BoolArray = npt.NDArray[np.bool_]

# Beside what stays, room for gradients on their way and for the tensors of one operation: so many of the largest
# tensor, and a share of the arena.
_FREE_TENSORS = 3
_FREE_SHARE = 16
# Where no gradients are on their way: one tensor that is used, one that comes.
_FREE_TENSORS_IN_BACKWARD = 2
# Staging slots: a share of the arena, but no more than lets copies, compute and copies back overlap.
_RING_SHARE = 6
_RING_BYTES = 2**30
# Inside backward, where much is computed between two gradients, the states of the next ones must have room meanwhile,
# or the link rests while the device computes and the device while the link catches up. How much is computed shows in
# the activations. Updates in the forward keep the link busy throughout: there, what a larger ring takes from weights
# and gradients only has to cross it once more (docs/decisions.md, 58).
_RING_OF_ACTIVATIONS = 4
_LARGEST_RING_SHARE = 3
_MAX_RING_BYTES = 2**31
_MAX_SLOT_BYTES = 384 * 2**20
# As a rule: one arrives, one is computed, one leaves, one is free. In the forward, where copies leave all the time, one
# more has arrived.
_SLOTS_IN_BACKWARD = 4
_SLOTS_IN_FORWARD = 5


# What is not wired must hold the update of the largest tensor, for an optimizer that cannot be cut into slices: the
# tensor, its gradient, two states; and a share of the arena, so that something is on its way.
UPDATE_TENSORS = 4
_STREAMING_SHARE = 64
# Of what activations take, and of the arena: gradients that wait for their states beside the backward.
_LENT_OF_ACTIVATIONS = 16
_LENT_SHARE = 8
_LEAST_LENT_GRADIENTS = 4


class ArenaShares(NamedTuple):
    """Staging slots: how many, and of how many bytes each."""

    num_slots: int
    slot_bytes: int


def share_arena(
    arena_bytes: int,
    page_size: int,
    *,
    least_slot_bytes: int,
    in_backward: bool = False,
    activation_bytes: int = 0,
    wired_bytes: int = 0,
) -> ArenaShares:
    """The staging slots of an arena; none where they were smaller than ``least_slot_bytes`` (0: nothing streams).

    ``in_backward``: updates run inside backward, not in the forward; ``activation_bytes``: of a step at most, as far as
    it is known; ``wired_bytes``: what has its home in the arena.
    """
    ring_bytes = min(arena_bytes // _RING_SHARE, _RING_BYTES)
    if in_backward:
        by_activations = min(activation_bytes // _RING_OF_ACTIVATIONS, _MAX_RING_BYTES)
        ring_bytes = max(ring_bytes, min(by_activations, arena_bytes // _LARGEST_RING_SHARE))
    most_slots = _SLOTS_IN_BACKWARD if in_backward else _SLOTS_IN_FORWARD
    # The arena was larger when it was decided what is wired; the rest of the weights must have room to stream.
    limited = min(ring_bytes, (arena_bytes - wired_bytes) // _LARGEST_RING_SHARE)
    ring_bytes = limited if limited >= least_slot_bytes else ring_bytes
    if not least_slot_bytes or least_slot_bytes > ring_bytes:
        return ArenaShares(0, 0)
    slot_bytes = (
        max(min(ring_bytes // most_slots, _MAX_SLOT_BYTES), least_slot_bytes) // page_size * page_size
    )
    return ArenaShares(ring_bytes // slot_bytes, slot_bytes)


def usually_wired_bytes(arena_bytes: int, largest_bytes: int) -> int:
    """Of the arena, what may be the only home of parameters while streaming runs ahead: about half. ``largest_bytes``:
    of a tensor of the training state.
    """
    return max(min(arena_bytes // 2 - largest_bytes, arena_bytes - UPDATE_TENSORS * largest_bytes), 0)


def wired_bytes(
    arena_bytes: int,
    page_size: int,
    *,
    total_bytes: int,
    largest_bytes: int,
    largest_whole_bytes: int,
    host_bytes: int,
    wires: bool,
) -> int:
    """Of the arena, what is to be the only home of parameters where not everything fits it.

    ``total_bytes`` of training state, ``host_bytes`` of them in host memory; ``largest_whole_bytes``: of a tensor that
    is on the device as a whole (states that pass slots in slices are not). Where device and host hold less than all: as
    much more as is lacking, up to what streaming needs, also if the device is no home else (``wires``).
    """
    usual = usually_wired_bytes(arena_bytes, largest_bytes) if wires else 0
    lacking = total_bytes - usual - host_bytes
    whole = max(UPDATE_TENSORS * largest_whole_bytes, arena_bytes // _STREAMING_SHARE)
    num_slots, slot_bytes = share_arena(arena_bytes, page_size, least_slot_bytes=page_size)
    # As `share_arena` limits them, once so much is wired.
    slots = min(num_slots * slot_bytes, ceil(whole / (_LARGEST_RING_SHARE - 1)))
    return max(usual, min(usual + lacking, arena_bytes - whole - slots))


class WiredShare(NamedTuple):
    """Bytes to wire: every parameter of more than ``first_above`` bytes, then of the others what has room."""

    num_bytes: int
    first_above: int


def share_wired(
    arena_bytes: int,
    page_size: int,
    *,
    parameter_bytes: Iterable[int],
    largest_other_bytes: int,
    **known: Any,
) -> WiredShare:
    """What is to be wired of parameters of these sizes, with ``known`` as in :func:`wired_bytes`.

    ``largest_other_bytes``: of a tensor that is on the device as a whole and no parameter. Where as much as can be is
    wired, the largest parameters (a table of words, the head) go first if what streaming needs becomes less by it.
    """
    sizes = sorted(parameter_bytes, reverse=True)
    best = WiredShare(-1, 0)
    first_bytes, passed = 0, 0
    for size in dict.fromkeys([*sizes, 0]):
        while passed < len(sizes) and sizes[passed] > size:
            first_bytes += sizes[passed]
            passed += 1
        whole = max(size, largest_other_bytes)
        num_bytes = wired_bytes(arena_bytes, page_size, largest_whole_bytes=whole, **known)
        if first_bytes <= num_bytes and num_bytes > best.num_bytes:
            best = WiredShare(num_bytes, size)
        if size <= largest_other_bytes:
            break
    return best


def lent_gradient_bytes(activation_bytes: int, arena_bytes: int) -> int:
    """Bytes of gradients that may wait for their updates while the backward goes on, outside of the arena.

    A block's worth is enough to even out its burst, and shows in the activations as the ring's size does.
    """
    return min(activation_bytes // _LENT_OF_ACTIVATIONS, arena_bytes // _LENT_SHARE)


def is_worth_lending(gradient_bytes: int, lent_bytes: int) -> bool:
    """Whether a gradient may wait for its update beside the backward. Where few of them may, the backward waits for
    their states all the same, and two streams only cost the host more than one.
    """
    return lent_bytes >= _LEAST_LENT_GRADIENTS * gradient_bytes


def room_for_staying(
    arena_bytes: int, ring_bytes: int, largest_bytes: int, *, in_backward: bool = False
) -> int:
    """Bytes that may stay for good, beside slots and what streaming needs; may be negative. ``in_backward``: updates
    run there, so that gradients need no room, if there are slots for states.
    """
    free = max(_FREE_TENSORS * largest_bytes, arena_bytes // _FREE_SHARE)
    if in_backward and ring_bytes:
        free = _FREE_TENSORS_IN_BACKWARD * largest_bytes
    return arena_bytes - free - ring_bytes


def room_for_gradients(arena_bytes: int, ring_bytes: int, weights_bytes: int, largest_bytes: int) -> int:
    """Bytes of gradients that may wait on the device for updates in the next forward, beside weights all of which stay,
    and slots. ``largest_bytes``: of a weight; so much is left free, since frames of one gradient must lie side by side.
    """
    return max(arena_bytes - ring_bytes - weights_bytes - largest_bytes, 0)


def spread(num_bytes: npt.ArrayLike, room_bytes: float) -> BoolArray:
    """bool: which of the tensors, in order along the step, to take within ``room_bytes``, spread evenly.

    ``num_bytes``: of each tensor (or elements, or any measure), not negative.
    """
    sizes = np.asarray(num_bytes, dtype=np.int64).reshape(-1)
    taken = np.zeros(len(sizes), dtype=bool)
    total = int(sizes.sum())
    if total <= room_bytes:
        return ~taken
    share, error, room = room_bytes / total, 0.0, room_bytes
    for index, size in enumerate(sizes.tolist()):
        error += share * size
        # Half a tensor of rounding, so that the first one taken stands in the middle of its stretch.
        if error >= size / 2 and size <= room:
            taken[index] = True
            error -= size
            room -= size
    for index in np.flatnonzero(~taken).tolist():
        if sizes[index] <= room:
            taken[index] = True
            room -= int(sizes[index])
    return taken


def belady(num_bytes: npt.ArrayLike, next_use: npt.ArrayLike, room_bytes: float) -> BoolArray:
    """bool: which of the tensors to take within ``room_bytes``: the nearest next use first, what is farther streams.

    ``next_use`` of each, in any unit. A tensor that does not fit is passed over for smaller ones behind it.
    """
    sizes = np.asarray(num_bytes, dtype=np.int64).reshape(-1)
    order = np.argsort(np.asarray(next_use, dtype=np.float64).reshape(-1), kind="stable")
    if len(order) != len(sizes):
        raise ValueError(f"num_bytes has {len(sizes)} entries and next_use {len(order)}")
    taken = np.zeros(len(sizes), dtype=bool)
    room = room_bytes
    for index in order.tolist():
        size = int(sizes[index])
        if size <= room:
            taken[index] = True
            room -= size
    return taken
