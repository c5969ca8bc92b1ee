"""What counts as an access to a parameter: one answer for capture's recorder and for the runtime's door.

Both are tensor subclasses with `__torch_function__`. Each call that arrives there either reads or writes
elements of the tensors it names (an *access*: it costs a tick, and pages must be on the device) or only asks
about them (shape, dtype, autograd bookkeeping). If the two sides classified differently, the captured trace
would not be the one the runtime sees; so the table stands here, once.

The rule is one of exclusion: whatever is not listed is an access. Forgetting a getter costs a needless fault,
never a wrong number. That is also why what takes a second tensor's values (`new_tensor`) is not listed.

Calls arrive in three shapes: getters and setters as bound slots (`torch.Tensor.shape.__get__`; two such
objects are equal and hash alike), methods as the descriptor or function of the class (`torch.Tensor.size`),
functions as themselves (`torch.is_complex`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pager.graph.access_trace import Phase
from pager.graph.hook_stack import SavedTensorHooks, top_hooks

T = TypeVar("T")

ACCESS_DTYPE = np.dtype([("tick", np.int32), ("segment", np.int32), ("write", np.bool_), ("phase", np.uint8)])

_GETTERS = (
    "shape dtype device layout ndim itemsize nbytes name names "
    "requires_grad is_leaf grad_fn _grad_fn grad_dtype output_nr retains_grad volatile "
    "_version _base _cdata _backward_hooks _post_accumulate_grad_hooks "
    "is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse "
    "is_sparse_csr is_vulkan is_xla is_xpu"
)
_SETTERS = "requires_grad grad_dtype names _backward_hooks _post_accumulate_grad_hooks"
_METHODS = (
    "size dim ndimension numel nelement element_size get_device "
    "is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed is_same_size "
    "_is_view _is_zerotensor has_names is_pinned is_shared "
    "sparse_dim dense_dim is_coalesced _nnz _dimI _dimV "
    "requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook "
    "__len__ __hash__ __dir__ __dlpack_device__ "
    # These take only dtype and device from the tensor, and a phantom has the right ones. The *_like functions
    # also copy its strides, so they stay accesses.
    "new_empty new_empty_strided new_zeros new_ones"
)
_FUNCTIONS = (
    "is_tensor is_floating_point is_complex is_signed is_conj is_neg is_inference is_distributed "
    "is_same_size numel get_device result_type can_cast _is_zerotensor _has_compatible_shallow_copy_type"
)
_LAYOUT_METHODS = "stride storage_offset is_contiguous dim_order"
_LAYOUT_FUNCTIONS = "_debug_has_internal_overlap"


def _slots(names: str, slot: str) -> Iterable[Callable[..., Any]]:
    descriptors = (getattr(torch.Tensor, name, None) for name in names.split())
    return (getattr(descriptor, slot) for descriptor in descriptors if hasattr(descriptor, slot))


def _members(owner: object, names: str) -> Iterable[Callable[..., Any]]:
    # Names come and go between torch 2.6 and today (named tensors went): an absent one cannot be called.
    return (getattr(owner, name) for name in names.split() if hasattr(owner, name))


LAYOUT: frozenset[Callable[..., Any]] = frozenset(
    [*_members(torch.Tensor, _LAYOUT_METHODS), *_members(torch, _LAYOUT_FUNCTIONS)]
)
"""Metadata whose answer depends on strides or offset: an expanded phantom's are not the parameter's."""

METADATA: frozenset[Callable[..., Any]] = LAYOUT.union(
    _slots(_GETTERS, "__get__"),
    _slots(_SETTERS, "__set__"),
    _members(torch.Tensor, _METHODS),
    _members(torch, _FUNCTIONS),
)
"""Torch callables, as `__torch_function__` receives them, that touch no element. Contains LAYOUT."""

GRADIENT: frozenset[Callable[..., Any]] = frozenset(
    [*_slots("grad _grad", "__get__"), *_slots("grad _grad", "__set__"), *_slots("grad _grad", "__delete__")]
)
"""Reading, assigning, deleting `.grad`: no access to the parameter, yet a tensor comes or goes."""


def is_access(func: Callable[..., Any]) -> bool:
    """Whether a call of `func` (as `__torch_function__` gets it) touches elements of parameters it names."""
    return func not in METADATA and func not in GRADIENT


def collect_tensors(cls: type[T], args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> list[T]:
    """The instances of `cls` (or a subclass) in `args`, `kwargs` and lists, tuples and dicts within them.

    Each once, in the order of first appearance. Runs on the door's path, once per torch operation: so no
    isinstance on tensors, since the metaclass of nn.Parameter answers that in Python.
    """
    found: dict[int, T] = {}
    _collect(cls, args, found)
    if kwargs:
        _collect(cls, kwargs.values(), found)
    return list(found.values())


def _collect(cls: type[T], values: Iterable[Any], found: dict[int, T]) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is int or kind is float:
            continue
        if cls in kind.__mro__:
            found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            _collect(cls, value, found)
        elif isinstance(value, dict):
            _collect(cls, value.values(), found)


def current_phase() -> Phase:
    """Phase.FORWARD, or Phase.RECOMPUTE where this thread stands inside autograd's backward pass.

    Inside it, an operation in Python is a checkpoint's recomputation, a hook or a custom Function's backward.
    """
    return Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.RECOMPUTE


ORDINARY_FOR: frozenset[Callable[..., Any]] = frozenset(
    [
        # These run code of the user's, which must find the door open: hooks, recomputation, a distance.
        *_members(torch.Tensor, "backward"),
        *_members(torch.autograd, "backward grad"),
        *_members(nn.functional, "triplet_margin_with_distance_loss"),
        # These look at the class.
        *_members(torch.Tensor, "__repr__ __format__ __deepcopy__ __reduce_ex__"),
    ]
)
"""Calls for which a view of a managed tensor has the class that it would have without us."""


@contextlib.contextmanager
def ordinary_views(cls: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
    """The instances of ``cls``, a class of views, in ``args`` and ``kwargs`` are of torch's own class meanwhile, and
    without their ``_pager_view``. A thread that uses one meanwhile uses an ordinary tensor.
    """
    kept: list[tuple[Any, Any, dict[str, Any]]] = []
    try:
        found: list[Any] = collect_tensors(cls, args, kwargs)
        for view in found:
            known = getattr(view, "_pager_view", None)
            view_class = view.__class__
            # Another thread may be at the same, and have some of them already.
            if known is None or not issubclass(view_class, cls):
                continue
            ordinary = next(base for base in view_class.__mro__ if base.__module__.startswith("torch"))
            marks = {"_pager_view": known}
            if ordinary is Tensor and view.__dict__.get("_is_param"):
                ordinary = nn.Parameter  # such is ``nn.Parameter(view)``
                marks["_is_param"] = True
            kept.append((view, view_class, marks))
            for mark in marks:
                view.__dict__.pop(mark, None)
            view.__class__ = ordinary
        yield
    finally:
        for view, view_class, marks in kept:
            view.__dict__.update(marks)
            view.__class__ = view_class


class Traced:
    """Mixin of the parameters that report every operation that names them."""

    _recorder: AccessRecorder
    _segment: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_access(func):
            traced = [t for t in collect_tensors(Traced, args, kwargs) if hasattr(t, "_recorder")]
            if traced and traced[0]._recorder.active:
                return traced[0]._recorder.call(traced, func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class TracedParameter(Traced, nn.Parameter):
    """A parameter (meta or real) that an AccessRecorder has adopted."""


class ViewOfTraced:
    """Mixin of what an operation returns over a traced parameter's storage: using it is no access of its own, but what
    autograd saves of it is.
    """

    _pager_view: AccessRecorder | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ORDINARY_FOR:
            with ordinary_views(ViewOfTraced, args, kwargs):
                return func(*args, **kwargs)
        if is_access(func):
            if any(hasattr(t, "_recorder") for t in collect_tensors(Traced, args, kwargs)):
                return Traced.__torch_function__(func, types, args, kwargs)
            views = collect_tensors(ViewOfTraced, args, kwargs)
            recorder = views[0]._pager_view if views else None
            if recorder is not None and recorder.active:
                return recorder.run(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class TracedView(ViewOfTraced, Tensor):
    """A view of a TracedParameter."""


# torch.func switches hooks off.
can_hook: Callable[[], bool] = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
"""Whether saved-tensor hooks may be put in force here."""


_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks


def push_hooks(hooks: SavedTensorHooks, pushed: list[Any]) -> None:
    """Put saved-tensor hooks in force until ``pop_hooks``, and something into ``pushed``: both, or neither.

    Not torch's context manager: a signal whose handler raises may strike it between its lines, and would leave the
    hooks in force for ever. Here one call into C does both, and a ``finally`` that begins with ``if pushed:
    pop_hooks()`` is not struck before its work is done.
    """
    pushed.extend(map(_push_hooks, hooks[:1], hooks[1:]))


def hooks_beneath() -> SavedTensorHooks | None:
    """The saved-tensor hooks (pack, unpack) in force here; None without any."""
    return top_hooks(False)


class SavedBeneath:
    """A tensor that the hooks beneath ours packed. Safe in autograd's several threads as far as those hooks are."""

    __slots__ = ("__weakref__", "_early", "_packed", "_task", "_unpack")

    def __init__(self, hooks: SavedTensorHooks, tensor: Tensor) -> None:
        self._packed = hooks[0](tensor)
        self._unpack = hooks[1]
        # The last backward that it was unpacked in, and what came of that, until autograd asks.
        self._task = -1
        self._early: Tensor | None = None

    def unpack(self) -> Tensor:
        """What the hooks beneath give for it."""
        task = torch._C._current_graph_task_id()
        early, self._early = self._early, None
        if early is not None and self._task == task:
            return early
        result: Tensor = self._unpack(self._packed)
        self._task = task
        return result

    def unpack_early(self) -> None:
        """Ask the hooks now for what this backward is about to ask for, if it has not yet: they may allow it once."""
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._early = self._unpack(self._packed)
            self._task = task


class Neighbours:
    """What one operation gave to the hooks beneath, for those of its saved weights that are packed by ours.

    A checkpoint recomputes when the first tensor of it is unpacked. In ``x @ w`` autograd unpacks ``w`` first: it would
    be on the device, in use, during all of the recomputation. So first a tensor that was saved beside it is unpacked.
    """

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved: list[weakref.ref[SavedBeneath]] = []

    def add(self, saved: SavedBeneath) -> SavedBeneath:
        """One more; kept by autograd alone."""
        self._saved.append(weakref.ref(saved))
        return saved

    def next_place(self) -> int:
        """Where a weight stands among them that is saved now."""
        return len(self._saved)

    def unpack_beside(self, place: int) -> None:
        """Have a neighbour of the weight at ``place`` unpacked, which recomputes what it comes from."""
        if self._saved:
            saved = self._saved[max(place - 1, 0)]()
            if saved is not None:
                saved.unpack_early()


class AccessRecorder:
    """Records the accesses of one step in order. Inactive until `active` is set; one thread.

    `rows`: (tick, segment, write, phase), the columns of ACCESS_DTYPE. An operation is one tick with a row
    for each adopted parameter it names, `write` where it raised the parameter's version. Autograd's reading
    of a tensor that shares an adopted parameter's storage is one tick, an accumulated gradient one more
    (the row names the parameter's segment, the write is to its gradient). `on_tick()` is called as a tick
    begins, `before(func)` before an operation is recorded: it may raise. `view_classes`: the class of a result
    -> the class it gets where it lies in a parameter's storage.
    """

    def __init__(
        self,
        on_tick: Callable[[], None] = lambda: None,
        before: Callable[[Callable[..., Any]], None] = lambda func: None,
        view_classes: Mapping[type, type[ViewOfTraced]] | None = None,
    ) -> None:
        self.active = False
        self.rows: list[tuple[int, int, bool, int]] = []
        self.num_ticks = 0
        self._segments: dict[int, int] = {}  # storage -> segment
        self._on_tick = on_tick
        self._before = before
        self._view_classes = view_classes or {Tensor: TracedView}

    def adopt(self, parameter: Tensor, segment: int, traced_class: type[Traced] = TracedParameter) -> None:
        """Turn `parameter`, of the class that `traced_class` extends, into a traced one, in place."""
        self._segments[parameter.untyped_storage()._cdata] = segment
        traced: Any = parameter
        traced.__class__ = traced_class
        traced._recorder, traced._segment = self, segment
        if parameter.requires_grad:
            traced.register_post_accumulate_grad_hook(lambda _: self._record([segment], Phase.GRADIENT, True))

    def array(self) -> npt.NDArray[Any]:
        """The rows so far, ACCESS_DTYPE."""
        return np.array(self.rows, dtype=ACCESS_DTYPE)

    def call(
        self, traced: list[Traced], func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Run one operation that names `traced` parameters, as one tick."""
        self._before(func)
        first = len(self.rows)
        segments = list(dict.fromkeys(t._segment for t in traced))
        # Before the operation: what it runs inside (a nested backward) has later ticks.
        self._record(segments, current_phase(), False)
        with torch._C.DisableTorchFunctionSubclass():
            versions = [t._version for t in traced]  # type: ignore[attr-defined]
            result = self.run(func, args, kwargs)
            for t, version in zip(traced, versions, strict=True):
                if t._version != version:  # type: ignore[attr-defined]
                    row = first + segments.index(t._segment)
                    tick, segment, _, phase = self.rows[row]
                    self.rows[row] = (tick, segment, True, phase)
        return result

    def run(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, of no tick, that names `traced` parameters or views of such."""
        beneath = hooks_beneath()
        neighbours = Neighbours()

        def pack(tensor: Tensor) -> tuple[int | None, int, Any]:
            segment = self._segments.get(tensor.untyped_storage()._cdata)
            # Detached: an operation's own output, kept as it is, would keep its graph alive in a cycle.
            if segment is not None or beneath is None:
                return segment, neighbours.next_place(), tensor.detach()
            return None, -1, neighbours.add(SavedBeneath(beneath, tensor))

        def unpack(packed: tuple[int | None, int, Any]) -> Tensor:
            segment, place, kept = packed
            if segment is not None:
                neighbours.unpack_beside(place)
                self._record([segment], Phase.BACKWARD, False)
            result: Tensor = kept.unpack() if isinstance(kept, SavedBeneath) else kept
            return result

        with torch._C.DisableTorchFunctionSubclass():
            pushed: list[Any] = []
            try:
                if can_hook():
                    push_hooks((pack, unpack), pushed)
                result = func(*args, **kwargs)
            finally:
                if pushed:
                    pop_hooks()
            self._mark_views(result)
        return result

    def _mark_views(self, result: Any) -> None:
        view_class = self._view_classes.get(type(result))
        if view_class is not None:
            if result.layout is torch.strided and result.untyped_storage()._cdata in self._segments:
                result._pager_view = self
                result.__class__ = view_class
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._mark_views(item)

    def _record(self, segments: list[int], phase: Phase, write: bool) -> None:
        if self.active:
            self._on_tick()
            self.rows.extend((self.num_ticks, segment, write, int(phase)) for segment in segments)
            self.num_ticks += 1
