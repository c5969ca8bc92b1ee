"""What ties a torch tensor to its segment."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from pager.address_space import Segment
    from pager.engine.run import Run
    from pager.mmu.clipping import Norm, Scale
    from pager.mmu.mmu import Mmu

# Slots of the C++ class, called with torch functions disabled: they act on the tensor object, not on its
# pages.
NoTorchFunction = torch._C.DisableTorchFunctionSubclass
_tensor_base: Any = torch._C.TensorBase
_set_data = _tensor_base.data.__set__
_get_grad = _tensor_base.grad.__get__
_set_grad = _tensor_base.grad.__set__
_get_version = _tensor_base._version.__get__


def make_phantom(size: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a tensor's storage is while absent: one NaN of its dtype on the compute device, expanded to its
    shape.

    Whatever slips past the door then reads NaN, not stale numbers. Integer dtypes have no NaN; they get their
    least value.
    """
    if dtype.is_floating_point or dtype.is_complex:
        value: float | int | bool = float("nan")
    else:
        value = True if dtype == torch.bool else torch.iinfo(dtype).min
    return torch.full((1,), value, dtype=dtype, device=device).expand(size)


def strided_view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int = 0,
) -> torch.Tensor:
    """An ordinary tensor over ``storage`` with this layout (offset in elements)."""
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, offset, size, stride)


def num_storage_users(tensor: torch.Tensor) -> int | None:
    """How many tensors share this one's storage, itself among them; None where this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)  # private
    return None if count is None else 1 + int(count(tensor.untyped_storage()._cdata)) - _count_of_one()


@functools.cache
def _count_of_one() -> int:
    """What torch counts for the storage of one tensor, while it is asked."""
    tensor = torch.empty(2, device="cpu")
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let ``tensor.data`` be ``data``, whatever class the tensor has; its version counter stays."""
    with NoTorchFunction():
        _set_data(tensor, data)


def raw_version(tensor: torch.Tensor) -> int:
    """The version counter of this very tensor, also of a paged one."""
    with NoTorchFunction():
        return int(_get_version(tensor))


class Value:
    """One value of a paged tensor, for graphs that look back at it. ``kept``: its bytes, uint8 on the CPU, once the
    tensor has been given another one (`pager.mmu.replacing`).
    """

    __slots__ = ("__weakref__", "kept")

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None


class Pending(Protocol):
    """An optimizer step's updates that wait for their parameters' next use."""

    def run(self, binding: Binding) -> None:
        """Finish the update of one parameter."""

    def is_released(self, binding: Binding) -> bool:
        """Whether the user has dropped the gradient, which is kept for the update."""

    def release(self, binding: Binding) -> None:
        """The user drops the gradient."""


class Binding:
    """A paged tensor's segment, its phantom, and how many operations use it now.

    ``users`` and the swap of ``tensor.data`` belong together: the first use points the tensor at its frames,
    the last one back at the phantom. The MMU's lock guards both.

    ``keep``: the plan wants it on the device for good. From its next use on it is: ``fixed`` is then a lease on
    all of its pages in ``run``, and the binding itself is one of its users, so that it stays pointed.
    """

    __slots__ = (
        "derived_blindly",
        "fixed",
        "goes_home",
        "gradient",
        "hook",
        "keep",
        "meta",
        "mmu",
        "norm",
        "original_class",
        "owner",
        "pending",
        "phantom",
        "pointed",
        "run",
        "scale",
        "segment",
        "tensor",
        "users",
        "value",
        "versions_before",
    )

    def __init__(self, mmu: Mmu, segment: Segment, tensor: torch.Tensor, original_class: type) -> None:
        self.mmu = mmu
        self.tensor = tensor
        self.original_class = original_class
        self._take(segment)
        self.gradient: Binding | None = None
        self.hook: torch.utils.hooks.RemovableHandle | None = None
        # The operations that use the tensor now, and whether it points at its frames. A set, so that leaving twice,
        # or without having quite entered, does no harm.
        self.users: set[object] = set()
        self.pointed = False
        self.keep = False
        self.fixed: torch.Tensor | None = None
        self.run: Run | None = None
        # The parameter that a gradient or state belongs to; a parameter's own is itself.
        self.owner: Binding = self
        # Set while the parameter's last update waits for its next use (`pager.optim.deferred`).
        self.pending: Pending | None = None
        # Of a gradient: its norm, if it was taken on arrival, and what clipping still owes it (`pager.mmu.clipping`).
        self.norm: Norm | None = None
        self.scale: Scale | None = None
        # Of a gradient: the plan has no room for it on the device until its update, so that it need not wait there.
        self.goes_home = False
        # Torch derived the graph of a view from this tensor while it pointed nowhere (`pager.mmu.view`).
        self.derived_blindly = False
        # Versions that the tensor's own counter does not tell of: counted by tensors that stood here before, so that a
        # saved version never fits another tensor, and other values through ``.data``.
        self.versions_before = 0
        self.value = Value()

    def _take(self, segment: Segment) -> None:
        self.segment = segment
        self.phantom = make_phantom(segment.size, segment.dtype, self.mmu.engine.device.torch_device)
        # Answers questions about strides, which an expanded phantom cannot.
        self.meta = torch.empty_strided(segment.size, segment.stride, dtype=segment.dtype, device="meta")

    def rebind(self, segment: Segment) -> None:
        """The tensor now has the layout of ``segment``; its old segment is the caller's to retire."""
        self._take(segment)
        self.point_at(self.phantom)

    @property
    def name(self) -> str:
        """The name the user knows: the parameter's, or that of what belongs to it."""
        return self.segment.name

    def version(self) -> int:
        """The tensor's version counter; every counted in-place write moves it."""
        return self.versions_before + raw_version(self.tensor)

    def bump_version(self) -> None:
        """Count a write that did not go through the tensor."""
        with NoTorchFunction():
            torch.autograd.graph.increment_version(self.tensor)

    def point_at(self, data: torch.Tensor) -> None:
        """Let ``tensor.data`` be ``data``; the version counter stays."""
        set_data(self.tensor, data)

    def raw_grad(self) -> torch.Tensor | None:
        """The gradient autograd left on the tensor itself, not yet in its segment."""
        with NoTorchFunction():
            grad: torch.Tensor | None = _get_grad(self.tensor)
            return grad

    def set_raw_grad(self, grad: torch.Tensor | None) -> None:
        """Set the gradient on the tensor itself; torch checks shape, dtype and device."""
        with NoTorchFunction():
            _set_grad(self.tensor, grad)

    def check_graph(self) -> None:
        """Refuse a gradient that came through a view's graph derived from no strides; it would be wrong."""
        if self.derived_blindly:
            self.derived_blindly = False
            raise RuntimeError(
                f"{self.name}: a view of it that is older than the last write to it was given to a custom "
                "autograd.Function, a reentrant checkpoint or TorchScript, which do not ask the pager; its gradient "
                "cannot be known. Make the view anew after each write (optimizer.step() is one)"
            )

    def typed(self, lease: torch.Tensor) -> torch.Tensor:
        """The segment's tensor over a lease of all its pages."""
        segment = self.segment
        return strided_view(lease.untyped_storage(), segment.dtype, segment.size, segment.stride)
