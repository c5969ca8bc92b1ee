"""Tensors that autograd saves while an operation runs on device frames.

The problem: autograd saves a weight, or a view of it such as ``weight.t()``, for backward. The saved tensor
keeps the frame's storage, and by the time of backward something else stands there: wrong gradients and no
error.

So an operation runs under saved-tensor hooks. What lies in a managed frame is packed as (segment, version,
layout) and faulted in again on unpack; if the segment was written meanwhile, unpack raises torch's own error.
An unpacked tensor leases its pages, so they stay until autograd drops it. Everything else is passed on:

- to the hooks beneath ours, if there are any (checkpointing, a user's own): they see what they would have
seen without us;
- else it is kept, detached (a saved output that kept its grad_fn would be a reference cycle), with its
version: hooks switch off
  torch's in-place check, so we make it.

A weight that is asked for first has what was saved beside it unpacked before it comes to the device: under a checkpoint
that recomputes, and needs the room.

Why not pin from forward to backward: then nothing could ever leave.
"""

from __future__ import annotations

import torch

from pager.graph.access import Neighbours, SavedBeneath, SavedTensorHooks, hooks_beneath
from pager.mmu.binding import Binding, raw_version, strided_view


def changed_since(tensor_name: str, size: torch.Size, found: int, expected: int) -> RuntimeError:
    """torch's error for a saved tensor that was modified in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor_name} {list(size)}] is at version {found}; expected version {expected} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class _SavedFrame:
    """A saved tensor that lay in a managed frame."""

    __slots__ = (
        "base",
        "binding",
        "conj",
        "dtype",
        "is_view",
        "neg",
        "neighbours",
        "offset",
        "place",
        "segment",
        "size",
        "stride",
        "value",
        "version",
    )

    def __init__(self, binding: Binding, tensor: torch.Tensor, neighbours: Neighbours | None) -> None:
        self.binding = binding
        self.neighbours = neighbours
        if neighbours is not None:
            self.place = neighbours.next_place()
        # A gradient that is dropped while this refers to it becomes an ordinary tensor with the old values,
        # and so does a parameter when its model is closed.
        self.base = binding.tensor
        self.version = raw_version(self.base)
        self.segment = binding.segment
        self.is_view = tensor is not self.base
        # A parameter itself has, in torch too, the value that ``.data`` has been given since.
        self.value = binding.value if self.is_view or neighbours is not None else None
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())

    def unpack(self) -> torch.Tensor:
        if self.neighbours is not None:
            self.neighbours.unpack_beside(self.place)
        found = raw_version(self.base)
        if found != self.version:
            raise changed_since(f"parameter {self.binding.name}", self.size, found, self.version)
        dtype, size, stride = self.dtype, self.size, self.stride
        kept = None if self.value is None else self.value.kept
        if kept is not None:
            return self._as_saved(self._on_device(kept))
        segment = self.binding.segment
        if segment is not self.segment and self.binding.tensor is self.base:
            if self.is_view:
                raise RuntimeError(
                    f"backward needs the values that {self.binding.name} had before it was converted from {dtype} "
                    f"with strides {self.segment.stride} to {segment.dtype} with {segment.stride}; call backward() "
                    "before model.half(), .to(dtype) or the like"
                )
            dtype, size, stride = (
                segment.dtype,
                segment.size,
                segment.stride,
            )  # a weight itself is what it is now
        if getattr(self.base, "_pager", None) is self.binding:
            tensor = self.binding.mmu.fault_saved(self.binding, dtype, size, stride, self.offset)
        else:
            tensor = strided_view(self.base.untyped_storage(), dtype, size, stride, self.offset)
        return self._as_saved(tensor)

    def _on_device(self, kept: torch.Tensor) -> torch.Tensor:
        """The saved tensor in the bytes of a value that is gone."""
        if self.neighbours is not None:
            # A checkpoint recomputes with the parameter's new value, other hooks have a copy of the old one.
            raise RuntimeError(
                f"backward through a checkpoint or saved-tensor hooks needs {self.binding.name}, whose .data was "
                "assigned since the forward; call backward() before assigning .data"
            )
        with torch.inference_mode(False):
            storage = kept.to(self.binding.phantom.device).untyped_storage()
            return strided_view(storage, self.dtype, self.size, self.stride, self.offset)

    def _as_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.conj:
            tensor = torch._conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


class _SavedOrdinary:
    """Any other saved tensor."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.tensor = tensor.detach()

    def unpack(self) -> torch.Tensor:
        found = self.tensor._version
        if found != self.version:
            raise changed_since(self.tensor.type(), self.tensor.size(), found, self.version)
        return self.tensor


def _unpack(saved: _SavedFrame | SavedBeneath | _SavedOrdinary) -> torch.Tensor:
    return saved.unpack()


def saving_frames(frames: dict[int, Binding]) -> SavedTensorHooks:
    """Hooks under which tensors over ``frames`` (storage address -> binding) are packed as frames."""
    beneath = hooks_beneath()
    neighbours = None if beneath is None else Neighbours()

    def pack(tensor: torch.Tensor) -> _SavedFrame | SavedBeneath | _SavedOrdinary:
        # Looking at storage of a tensor without one (sparse, functional wrappers) raises; such are never
        # frames.
        binding = frames.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if binding is not None:
            return _SavedFrame(binding, tensor, neighbours)
        if beneath is not None and neighbours is not None:
            return neighbours.add(SavedBeneath(beneath, tensor))
        return _SavedOrdinary(tensor)

    return pack, _unpack
