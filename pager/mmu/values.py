"""Whole values of paged tensors on the CPU: for state dicts, copies, pickles, loading and closing.

A tensor whose home is host memory can be shown without a copy: an ordinary CPU tensor over the home itself,
as torch's own ``state_dict()`` aliases the parameter. The catch is that device copies do not see what the
user writes there. So the MMU remembers each alias, and before the next use of the tensor looks whether it was
written to (its version moved) or may have been (it is gone): then the device copy is dropped and the home is
read again. Of a home that cannot be shown so (the device, the disk) a copy is given out; what is written to that is
written to the tensor before its next use.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pager.mmu.binding import NoTorchFunction, strided_view
from pager.mmu.modes import apart
from pager.page_table import Home

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from pager.address_space import Segment
    from pager.mmu.binding import Binding
    from pager.mmu.mmu import Mmu


@dataclass(slots=True, eq=False)
class _Alias:
    """A tensor over a home, and the versions it was last seen at and last refused at."""

    ref: weakref.ref[torch.Tensor]
    seen: int
    refused: int = -1


@dataclass(slots=True, eq=False)
class _Copy:
    """A tensor that was given out in place of a home, its version when it was last seen, and that of the tensor whose
    values it shows. ``kept``: of a parameter, the same memory and version, also if the user has dropped it: what was
    written before that counts. (Of states, which may be large and on a disk, it does while the user has the tensor.)
    """

    ref: weakref.ref[torch.Tensor]
    seen: int
    shows: int
    kept: torch.Tensor | None

    def tensor(self) -> torch.Tensor | None:
        """It, as long as somebody may look at it, or it was written to unseen."""
        held = self.ref()
        if held is None and self.kept is not None and self.kept._version > self.seen:
            return self.kept
        return held


class HomeAliases:
    """The CPU tensors over homes that users hold. Safe to call from several threads.

    The lock guards the lists alone; the engine, which may wait, is called without it. So several threads may
    settle one tensor at a time: each takes over what it saw, and an alias counts as seen only when its writes
    have been taken over, before the thread that did so goes on to use the tensor.
    """

    def __init__(self, mmu: Mmu) -> None:
        self._mmu = mmu
        self._aliases: dict[int, list[_Alias]] = {}
        # What storages over homes stand on: alive as long as any view of an alias is.
        self._arrays: dict[int, list[weakref.ref[Any]]] = {}
        # By segment, what was given out for homes that host memory is not: brought up to date after each step.
        self._copies: dict[int, list[_Copy]] = {}
        # By segment, the version of the tensor whose values were shown last.
        self._shown: dict[int, int] = {}
        # Reentrant: garbage collection under it may run code of the user's that comes here.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._aliases or self._copies)

    def is_held(self, segment: Segment) -> bool:
        """Whether an alias of the segment's home, or a view of one, is alive."""
        with self._lock:
            held = [ref for ref in self._arrays.pop(segment.index, ()) if ref() is not None]
            if held:
                self._arrays[segment.index] = held
        return bool(held)

    def share(self, segment: Segment, array: npt.NDArray[Any]) -> torch.Tensor:
        """A new tensor over the home of ``segment``, remembered as an alias.

        Its storage is that of an alias which is alive, else one over ``array``: tied names share one, so that
        torch.save writes it once.
        """
        with self._lock:
            aliases = self._aliases.setdefault(segment.index, [])
            alive = (alias.ref() for alias in aliases)
            storage = next((known.untyped_storage() for known in alive if known is not None), None)
            if storage is None:
                storage = torch.from_numpy(array).untyped_storage()
                known_arrays = [ref for ref in self._arrays.get(segment.index, ()) if ref() is not None]
                self._arrays[segment.index] = [*known_arrays, weakref.ref(array)]
            tensor = strided_view(storage, segment.dtype, segment.size, segment.stride)
            aliases.append(_Alias(weakref.ref(tensor), tensor._version))
        return tensor

    def share_copy(self, binding: Binding, value: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for a home which cannot be aliased (the device, the disk), remembered as such.

        ``value``: the tensor's, which is given out, or shown in the memory of a copy that is alive: as in torch, what
        is written to one is seen in all, and tied names share one.
        """
        segment = binding.segment
        with self._lock:
            alive = [known for _, known in self._copies_of(segment.index) if known.dtype == segment.dtype]
            tensor = value
            if alive:
                tensor = strided_view(alive[0].untyped_storage(), segment.dtype, segment.size, segment.stride)
                tensor.copy_(value)
            copies = self._copies.setdefault(segment.index, [])
            held = tensor.detach() if segment.kind == "parameter" else None
            copies.append(_Copy(weakref.ref(tensor), tensor._version, binding.version(), held))
            for copy in copies:
                copy.shows = binding.version()
        return tensor

    def are_held(self, binding: Binding) -> bool:
        """Whether somebody looks at the tensor's home. What is held of state dicts is brought up to date."""
        segment, engine = binding.segment, self._mmu.engine
        with self._lock:
            copies = self._copies_of(segment.index)
        if copies and has_value(self._mmu, binding):
            self._show(binding)
        if not self.is_held(segment):
            return False
        engine.flush([segment])
        engine.transfers.home_bytes(segment, write=False)  # waits for the link: the user reads without asking
        return True

    def leave(self, segment: Segment) -> Callable[[], bool]:
        """The tensor has another value: what was given out is the user's own now. What comes back answers whether he
        still looks at the home that was shared.
        """
        with self._lock:
            self._copies.pop(segment.index, None)
            self._aliases.pop(segment.index, None)
            self._shown.pop(segment.index, None)
            arrays = self._arrays.pop(segment.index, [])
        return lambda: any(ref() is not None for ref in arrays)

    def follow(self, bindings: Iterable[Binding]) -> None:
        """After an operation on these tensors: what users hold of a ``state_dict()`` shows what it has written."""
        for binding in bindings:
            index = binding.segment.index
            if index not in self._aliases and index not in self._copies:
                continue
            if self._shown.get(index) != binding.version():
                with apart(self._mmu.engine.device.torch_device.type):
                    self.are_held(binding)
                self.is_shown(binding)

    def is_shown(self, binding: Binding) -> None:
        """What is held shows the tensor's present value."""
        self._shown[binding.segment.index] = binding.version()

    def refresh(self) -> None:
        """After a step: what users hold of a ``state_dict()`` shows the new values, as torch's own does."""
        with self._lock:
            held = [
                i for i, aliases in self._aliases.items() if any(alias.ref() is not None for alias in aliases)
            ]
            copies = [index for index in list(self._copies) if self._copies_of(index)]
        if not held and not copies:
            return  # nearly always: a step owes nothing to state dicts that nobody holds
        bindings = self._mmu.bindings
        engine = self._mmu.engine
        shown = {*held, *copies}
        self._mmu.before_access([bindings[index] for index in sorted(shown) if index in bindings])
        segments = [bindings[index].segment for index in held if index in bindings]
        engine.flush(segments)
        for segment in segments:
            # Waits for the link: the user reads without asking.
            engine.transfers.home_bytes(segment, write=False)
        for index in copies:
            binding = bindings.get(index)
            if binding is not None and has_value(self._mmu, binding):
                self._show(binding)
        for index in shown:
            if index in bindings:
                self.is_shown(bindings[index])

    def _copies_of(self, index: int) -> list[tuple[_Copy, torch.Tensor]]:
        """What is alive of the copies of a segment. With the lock."""
        alive = [
            (copy, tensor) for copy in self._copies.get(index, ()) if (tensor := copy.tensor()) is not None
        ]
        if alive:
            self._copies[index] = [copy for copy, _ in alive]
        else:
            self._copies.pop(index, None)
        return alive

    def _show(self, binding: Binding) -> None:
        """Bring copies up to date."""
        value, version = cpu_tensor(self._mmu, binding, alias=False), binding.version()
        with self._lock:
            for copy, tensor in self._copies_of(binding.segment.index):
                # Through .data: this is not a write of the user's.
                tensor.data.copy_(value)
                copy.shows = version

    def settle(self, bindings: Sequence[Binding]) -> None:
        """Before these tensors are used: take over what was written to their homes."""
        for binding in bindings:
            if binding.segment.index in self._aliases:
                self._settle(binding)
            if binding.segment.index in self._copies:
                self._settle_copies(binding)

    def _settle_copies(self, binding: Binding) -> None:
        """Write to the tensor what was written to a copy of it."""
        with self._lock:
            written = []
            for copy, tensor in self._copies_of(binding.segment.index):
                if tensor._version > copy.seen:
                    copy.seen = tensor._version  # first: the write below comes here again
                    written.append((copy, tensor))
        if not written:
            return
        if any(copy.shows != binding.version() for copy, _ in written):
            raise RuntimeError(
                f"{binding.name}: a tensor from state_dict() was written to after the tensor itself had changed, "
                "which keeps its own value. Use load_state_dict() or torch.no_grad() and the parameter to change a "
                "managed model"
            )
        with torch.no_grad():
            binding.tensor.copy_(written[-1][1])
        self._show(binding)

    def settle_all(self) -> None:
        """Before the model is closed: what was written to homes is the value, unless the parameter is newer.

        Then a write that no error told of raises, as at a use; one that was refused gives way to the parameter.
        """
        self.settle([b for index in list(self._copies) if (b := self._mmu.bindings.get(index)) is not None])
        for index in list(self._aliases):
            binding = self._mmu.bindings.get(index)
            if binding is None:
                continue
            with self._lock:
                aliases = list(self._aliases.get(index, ()))
                versions = _versions(aliases)
            if self._mmu.engine.is_dirty(binding.segment):
                if not _written(aliases, versions, beyond_refused=True):
                    self._see(aliases, versions)
                self._settle(binding)
            else:
                self._see(
                    aliases, versions
                )  # the home is what is given out, whoever still looks at the device

    def _settle(self, binding: Binding) -> None:
        index = binding.segment.index
        with self._lock:
            aliases = list(self._aliases.get(index, ()))
            versions = _versions(aliases)
        written = _written(aliases, versions)
        if not written and None not in versions:
            return
        engine = self._mmu.engine
        if engine.is_dirty(binding.segment):
            if written and self._still_written(aliases):
                self._refuse(aliases, versions)
                raise RuntimeError(
                    f"{binding.name}: a tensor from state_dict() was written to after the parameter itself had "
                    "changed. load_state_dict() takes what was written; close() keeps the parameter's own value. "
                    "Use load_state_dict() or torch.no_grad() and the parameter to change a managed model"
                )
        else:
            self._mmu.unfix(binding)
            engine.evict_segments([binding.segment])
            if written and engine.runs_of(binding.segment) and self._still_written(aliases):
                raise RuntimeError(
                    f"{binding.name}: a tensor from state_dict() was written to while views of the parameter are "
                    "alive, which would not see it; drop them, or change the parameter itself under torch.no_grad()"
                )
        self._see(aliases, versions)
        with self._lock:
            gone = {id(alias) for alias, version in zip(aliases, versions, strict=True) if version is None}
            left = [alias for alias in self._aliases.get(index, ()) if id(alias) not in gone]
            if left:
                self._aliases[index] = left
            else:
                self._aliases.pop(index, None)

    def _see(self, aliases: list[_Alias], versions: list[int | None]) -> None:
        with self._lock:
            for alias, version in zip(aliases, versions, strict=True):
                if version is not None:
                    alias.seen = max(alias.seen, version)

    def _refuse(self, aliases: list[_Alias], versions: list[int | None]) -> None:
        with self._lock:
            for alias, version in zip(aliases, versions, strict=True):
                if version is not None:
                    alias.refused = max(alias.refused, version)

    def _still_written(self, aliases: list[_Alias]) -> bool:
        """False if another thread has settled them meanwhile: it may use the tensor, and change it, already."""
        with self._lock:
            return _written(aliases, _versions(aliases))


def _versions(aliases: list[_Alias]) -> list[int | None]:
    """The aliases' versions now, None for one that is gone."""
    tensors = [alias.ref() for alias in aliases]
    return [None if tensor is None else tensor._version for tensor in tensors]


def _written(aliases: list[_Alias], versions: list[int | None], *, beyond_refused: bool = False) -> bool:
    """Whether one was written to since it was seen; ``beyond_refused``: since that was refused."""
    return any(
        version is not None and version > (max(alias.seen, alias.refused) if beyond_refused else alias.seen)
        for alias, version in zip(aliases, versions, strict=True)
    )


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
    mmu.before_access([binding])
    segment = binding.segment
    if not has_value(mmu, binding):
        return binding.phantom.cpu().contiguous()
    mmu.aliases.settle([binding])
    data = cpu_bytes(mmu, binding)
    if alias:
        mmu.aliases.is_shown(binding)
    on_host = int(mmu.engine.table.home[segment.first_page]) == Home.HOST
    if alias and on_host:
        # A storage of its own, or torch.save would write the whole arena.
        return mmu.aliases.share(segment, data.numpy())
    data = data.clone() if on_host else data
    tensor = strided_view(data.untyped_storage(), segment.dtype, segment.size, segment.stride)
    return mmu.aliases.share_copy(binding, tensor) if alias else tensor


def storage_bytes(
    tensor: torch.Tensor, size: torch.Size, stride: tuple[int, ...], num_bytes: int
) -> torch.Tensor:
    """The bytes of ``tensor`` as they lie in storage under this layout: uint8, without a copy where it has
    that layout.
    """
    with NoTorchFunction(), torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg()
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
    if binding.fixed is not None:
        return False
    return not mmu.engine.in_use(binding.segment)


def store(mmu: Mmu, binding: Binding, source: torch.Tensor) -> None:
    """Give the tensor the values of ``source``, an ordinary tensor of its size and dtype.

    Views of the old value keep it: where a write through the tensor itself is meant, see :func:`can_store`.
    """
    segment = binding.segment
    engine = mmu.engine
    mmu.before_access([binding])
    if holds_already(mmu, binding, source):
        return
    mmu.unfix(binding)
    if engine.has_value(segment):
        engine.discard(segment)
    engine.store(segment, storage_bytes(source, segment.size, segment.stride, segment.num_bytes))
    binding.bump_version()
    if int(engine.table.home[segment.first_page]) == Home.DEVICE:
        engine.wire(segment)
    if mmu.aliases:
        mmu.aliases.follow([binding])


def holds_already(mmu: Mmu, binding: Binding, source: torch.Tensor) -> bool:
    """Whether a parameter that may have a master has exactly these values, so that storing them would only lose the
    master's low bits.
    """
    segment = binding.segment
    if not mmu.keeps_masters or segment.kind != "parameter" or segment.dtype != torch.bfloat16:
        return False
    if not has_value(mmu, binding):
        return False
    now, source = cpu_tensor(mmu, binding, alias=False), source.detach().to("cpu", segment.dtype)
    return torch.equal(now.view(torch.int16), source.view(torch.int16))
