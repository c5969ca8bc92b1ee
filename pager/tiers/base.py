"""What every tier below the device promises: frames are handed out, filled, read back and returned.

A tier owns an arena of frames of ``page_size`` bytes and a budget in bytes, and knows nothing of policy,
segments or the page table. Frames are numbered from 0, and what is asked for together is contiguous. The
promises, checked by one contract suite that runs over every back end and every adaptor
(``tests/tiers/test_contract.py``):

1. ``allocate`` gives a range that overlaps no other range in use, or raises TierFull and changes nothing.
2. What ``read`` gives is what the last ``write`` of those frames put there, or an error is raised:
   TierIOError with its errno, or CorruptPage where the tier keeps checksums. A failed ``write`` leaves the
   frames undefined, the rest of the tier as it was, and the range still allocated: the caller still has the
   good copy it wrote from.
3. ``used_bytes`` counts the frames handed out, never passes ``budget_bytes``, and is 0 when all are freed.
4. After ``close`` everything but ``close`` and the figures raises PagerClosed.

All methods may be called from any thread. No lock is held over input or output.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from pager.errors import PagerInternalError


@runtime_checkable
class BackingTier(Protocol):
    """An arena of frames under a budget. See the head of this file for what its methods promise."""

    @property
    def page_size(self) -> int:
        """Bytes in a frame."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames handed out now."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most ``used_bytes`` has been."""
        ...

    @property
    def budget_bytes(self) -> int:
        """Bytes that ``used_bytes`` cannot pass."""
        ...

    def allocate(self, num_frames: int) -> int:
        """The first of ``num_frames`` contiguous frames, now in use. TierFull where there is no such run."""
        ...

    def free(self, first_frame: int, num_frames: int) -> None:
        """Take back frames in use; it need not be the whole of a range that was allocated together."""
        ...

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """Fill ``out`` (contiguous 1-D uint8 on the CPU) from the frames that begin at ``first_frame``; the bytes that
        were moved for it, fewer where the tier compresses.
        """
        ...

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """Put ``data`` (contiguous 1-D uint8 on the CPU) into the frames that begin at ``first_frame``; the bytes that
        were moved for it, fewer where the tier compresses.
        """
        ...

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        ...


def check_host_bytes(tensor: torch.Tensor, name: str) -> None:
    """PagerInternalError unless ``tensor`` is what tiers read into and write from."""
    is_right = tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
    if not is_right or tensor.device.type != "cpu":
        raise PagerInternalError(
            f"{name} must be a contiguous 1-D uint8 tensor on the CPU, "
            f"not {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
