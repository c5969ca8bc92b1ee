"""torch's caching allocator, as pager sets it: how much it may take, and in which pieces."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading

import torch

__all__ = ["AllocatorCaps", "use_expandable_segments"]

logger = logging.getLogger("pager.device")

# Either names the allocator's settings; the second is the older one.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_VIRTUAL_MEMORY_SUPPORTED = 102


class AllocatorCaps:
    """The caps that open devices put on torch's allocator of one GPU.

    torch knows one fraction per process and GPU, while several managed models may be open. Each one's limit is
    on everything the process takes, so the smallest is in force, and never more than the user's own fraction,
    which comes back when the last limit goes.
    """

    def __init__(self) -> None:
        # Reentrant: a dropped device's finalizer may run inside garbage collection under this very lock.
        self._lock = threading.RLock()
        self._limits: dict[int, dict[int, float]] = {}
        self._before: dict[int, float] = {}

    def put(self, index: int, holder: int, share: float | None) -> None:
        """Replace the limit of ``holder`` on GPU ``index``: a share of its memory, None for no limit."""
        with self._lock:
            limits = self._limits.setdefault(index, {})
            if share is None:
                if limits.pop(holder, None) is None:
                    return
            else:
                if not limits:
                    self._before[index] = _memory_fraction(index)
                limits[holder] = share
            before = self._before[index]
            torch.cuda.set_per_process_memory_fraction(min([before, *limits.values()]), index)


def _memory_fraction(index: int) -> float:
    """The share of the GPU that torch's allocator may take now; 1.0 where torch cannot tell."""
    get = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return 1.0 if get is None else float(get(index))


@functools.cache
def use_expandable_segments(index: int) -> None:
    """Let torch's allocator extend its segments from now on, unless the user has set the allocator up.

    Blocks of fixed segments that activations have cut into pieces are no room for the next activation, nor for a slab;
    segments that can grow leave hardly any (docs/decisions.md, 58). Does nothing where the GPU ``index`` (or what gives
    a part of it to this machine) cannot map memory by the page, and in a torch that cannot be asked.
    """
    if any(os.environ.get(name) for name in _SETTINGS):
        return
    # Private, and with another name before torch 2.8.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or getattr(
        torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None
    )
    if change is None or not _maps_virtual_memory(index):
        return
    change("expandable_segments:True")
    logger.debug("torch's allocator extends its segments from now on")


def _maps_virtual_memory(index: int) -> bool:
    """Whether the GPU's driver maps memory by the page: not so on some virtual GPUs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    supported, handle = ctypes.c_int(0), ctypes.c_int(0)
    return (
        driver.cuDeviceGet(ctypes.byref(handle), index) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(supported), _VIRTUAL_MEMORY_SUPPORTED, handle) == 0
        and supported.value == 1
    )
