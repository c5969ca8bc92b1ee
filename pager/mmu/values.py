"""Whole values of paged tensors on the CPU: for state dicts, copies, pickles, loading and closing.

A tensor whose home is host memory can be shown without a copy: an ordinary CPU tensor over the home itself,
as torch's own ``state_dict()`` aliases the parameter. The catch is that device copies do not see what the
user writes there. So the MMU remembers each alias, and before the next use of the tensor looks whether it was
written to (its version moved) or may have been (it is gone): then the device copy is dropped and the home is
read again.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from pager.mmu.binding import NoTorchFunction, strided_view
from pager.page_table import Home

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu


class HomeAliases:
    """The CPU tensors over homes that users hold."""

    def __init__(self, mmu: Mmu) -> None:
        self._mmu = mmu
        # Per segment: the aliases, each with the version it was last seen at.
        self._aliases: dict[int, list[tuple[weakref.ref[torch.Tensor], int]]] = {}

    def storage_over(self, binding: Binding) -> torch.UntypedStorage | None:
        """The storage of an alias that is alive: tied names share one, so that torch.save writes it once."""
        for ref, _ in self._aliases.get(binding.segment.index, ()):
            tensor = ref()
            if tensor is not None:
                return tensor.untyped_storage()
        return None

    def __bool__(self) -> bool:
        return bool(self._aliases)

    def add(self, binding: Binding, alias: torch.Tensor) -> None:
        """Remember ``alias``, a tensor over the home of ``binding``."""
        self._aliases.setdefault(binding.segment.index, []).append((weakref.ref(alias), alias._version))

    def settle(self, bindings: Sequence[Binding]) -> None:
        """Before these tensors are used: take over what was written to their homes."""
        for binding in bindings:
            refs = self._aliases.get(binding.segment.index)
            if refs is not None:
                self._settle(binding, refs)

    def _settle(self, binding: Binding, refs: list[tuple[weakref.ref[torch.Tensor], int]]) -> None:
        alive = [
            (tensor, seen) for tensor, seen in ((ref(), seen) for ref, seen in refs) if tensor is not None
        ]
        written = any(tensor._version != seen for tensor, seen in alive)
        if not written and len(alive) == len(refs):
            return
        engine = self._mmu.engine
        if engine.is_dirty(binding.segment):
            if written:
                raise RuntimeError(
                    f"{binding.name}: a tensor from state_dict() was written to after the parameter itself had "
                    "changed; use load_state_dict() or torch.no_grad() and the parameter to change a managed model"
                )
        else:
            engine.evict_segments([binding.segment])
            if written and engine.runs_of(binding.segment):
                raise RuntimeError(
                    f"{binding.name}: a tensor from state_dict() was written to while views of the parameter are "
                    "alive, which would not see it; drop them, or change the parameter itself under torch.no_grad()"
                )
        if alive:
            self._aliases[binding.segment.index] = [
                (weakref.ref(tensor), tensor._version) for tensor, _ in alive
            ]
        else:
            del self._aliases[binding.segment.index]


def cpu_bytes(mmu: Mmu, binding: Binding) -> torch.Tensor:
    """The value's bytes on the CPU, uint8: the home itself where that is host memory, else a copy."""
    engine = mmu.engine
    segment = binding.segment
    engine.flush([segment])
    home = Home(int(engine.table.home[segment.first_page]))
    if home == Home.HOST:
        view = engine.transfers.home_bytes(segment, write=False)
        assert view is not None
        return view
    if home == Home.DISK:
        return engine.transfers.read_disk_home(segment)
    run = engine.acquire_all([(segment, 0, segment.num_pages, False)], f"reading {segment.name}")[0]
    with NoTorchFunction(), torch.no_grad():
        copied = engine.lease(run).to("cpu", copy=True)
    return copied


def has_value(mmu: Mmu, binding: Binding) -> bool:
    """Whether the tensor holds a value."""
    return mmu.engine.has_value(binding.segment)


def cpu_tensor(mmu: Mmu, binding: Binding, *, alias: bool) -> torch.Tensor:
    """The value as an ordinary CPU tensor of the same size and strides.

    ``alias``: over the home itself where that is host memory. A tensor without a value gives NaN of its shape
    (torch would give uninitialised memory).
    """
    mmu.before_access()
    segment = binding.segment
    if not has_value(mmu, binding):
        return binding.phantom.cpu().contiguous()
    mmu.aliases.settle([binding])
    data = cpu_bytes(mmu, binding)
    if not alias and int(mmu.engine.table.home[segment.first_page]) == Home.HOST:
        data = data.clone()
    else:
        # A storage of its own, or torch.save would write the whole arena.
        data = torch.from_numpy(data.numpy())
    storage = (mmu.aliases.storage_over(binding) if alias else None) or data.untyped_storage()
    tensor = strided_view(storage, segment.dtype, segment.size, segment.stride)
    if alias and int(mmu.engine.table.home[segment.first_page]) == Home.HOST:
        mmu.aliases.add(binding, tensor)
    return tensor


def storage_bytes(
    tensor: torch.Tensor, size: torch.Size, stride: tuple[int, ...], num_bytes: int
) -> torch.Tensor:
    """The bytes of ``tensor`` as they lie in storage under this layout: uint8, without a copy where it has
    that layout.
    """
    with NoTorchFunction(), torch.no_grad():
        tensor = tensor.detach()
        if tensor.stride() != tuple(stride) or tensor.size() != size:
            laid_out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
            laid_out.copy_(tensor)
            tensor = laid_out
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        offset = tensor.storage_offset() * tensor.element_size()
        return raw.set_(tensor.untyped_storage(), offset, (num_bytes,), (1,))


def can_store(mmu: Mmu, binding: Binding) -> bool:
    """Whether :func:`store` may write the home: it is below the device, and nobody looks at the old value."""
    if mmu.closed or int(mmu.engine.table.home[binding.segment.first_page]) == Home.DEVICE:
        return False
    return not mmu.engine.in_use(binding.segment)


def store(mmu: Mmu, binding: Binding, source: torch.Tensor) -> None:
    """Give the tensor the values of ``source``, an ordinary tensor of its size and dtype.

    Views of the old value keep it: where a write through the tensor itself is meant, see :func:`can_store`.
    """
    segment = binding.segment
    engine = mmu.engine
    mmu.before_access()
    if engine.has_value(segment):
        engine.discard(segment)
    engine.store(segment, storage_bytes(source, segment.size, segment.stride, segment.num_bytes))
    binding.bump_version()
    if int(engine.table.home[segment.first_page]) == Home.DEVICE:
        engine.wire(segment)
