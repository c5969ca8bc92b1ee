"""Views of paged tensors: ordinary tensors over leased frames that still pass through the door.

The problem. ``w.t()``, ``w[i]``, ``w.view(...)`` of a paged weight is a tensor over the frames. It must work like any
other, so it has the frames for good: its storage holds a lease until the last view dies. But if it were an ordinary
tensor, the next operation (``x @ w.t()``) would not know the door, autograd would save the view itself, and the
frames of every weight that is used so would stay from forward to backward.

The way. What an operation at the door returns over its frames gets the class `PagedView`: the same object, storage,
version counter and graph, but its operations run under the saved-tensor hooks of `pager.mmu.saved_tensors` as well,
and what they return over the frames is a `PagedView` again. So autograd keeps (segment, version, layout), and the
lease ends with the view itself. An operation on a view is no access: the view's own lease has the pages there.

A view is *current* while its frames are the tensor's value. If the value was dropped (a gradient given up, a model
converted or closed) the view has the old one, which nobody could bring back: autograd keeps that view as it is.

What else a view must not do unseen:

- write without being counted (``.data``, ``numpy()``, raw pointers): the pages count as written while it lives;
- ask its base for a shape. After a write to the tensor autograd derives a view's ``grad_fn`` anew from the base's
strides, and a phantom has none; so the tensor points at the frames meanwhile.

Why not hooks over the whole forward: they would cost every operation of the model, and torch allows only one pair at a
time, so that each checkpoint and each hook of the user's would hide ours. What does not ask ``__torch_function__``
(a custom ``autograd.Function`` that saves a view, TorchScript) keeps the view, and its frames, as any tensor. What
torch derives there from a phantom is seen afterwards, and refused when its gradient comes.

What else lies over the frames and is no view of the tensor's (views of ``.data``, ``unsafe_split``) has a version
counter of its own: torch's own class and torch's own saving are right for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pager.graph.access import GRADIENT, METADATA, ORDINARY_FOR, collect_tensors, ordinary_views
from pager.mmu.binding import Binding, NoTorchFunction, raw_version
from pager.mmu.parameter import Managed, Paged, access

if TYPE_CHECKING:
    from pager.engine.run import Run


class Frames:
    """What a view lies on: a run of a paged tensor's, leased from ``address`` on, and which value that was.

    ``base``: the paged tensor of which the view's graph was derived, None where there is none (``w.detach()``);
    ``version``: the base's by then. A dropped gradient's tensor is no longer its binding's, but the view's base still.
    """

    __slots__ = ("address", "base", "binding", "num_bytes", "run", "version")

    def __init__(self, address: int, binding: Binding, run: Run, base: torch.Tensor | None) -> None:
        self.address = address
        self.num_bytes = run.num_bytes
        self.binding = binding
        self.run = run
        self.base = base
        self.version = 0 if base is None else raw_version(base)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: it says something of one tensor only."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def are_current(self) -> bool:
        """Whether the frames hold the value of the binding's tensor, as it is now."""
        run = self.run
        return (
            not run.orphan
            and run.frame >= 0  # else nobody leases it: the view was given other memory, ``view.data = ...``
            and getattr(self.binding.tensor, "_pager", None) is self.binding
        )

    def is_stale(self) -> bool:
        """Whether the base was written to since the view's graph was derived from it."""
        return self.base is not None and raw_version(self.base) != self.version

    def point_base(self, view: torch.Tensor, use: object, pointed: list[Binding]) -> None:
        """Where torch may derive the view's graph anew, the base points at its frames until it is ``exit``ed."""
        binding = self.binding
        if not self.is_stale() or getattr(self.base, "_pager", None) is not binding:
            return
        with NoTorchFunction():
            has_graph = view.requires_grad  # true also where torch has yet to derive the first one
        if has_graph:
            pointed.append(binding)
            binding.mmu.point(binding, use)

    def note_graph(self) -> None:
        """Torch has derived the view's graph out of our sight."""
        if self.is_stale() and not self.binding.pointed:
            self.binding.derived_blindly = True

    def escape(self) -> None:
        """Somebody may write to the frames without being counted, as long as a view of them lives."""
        self.run.escaped = True
        self.binding.norm = None


View = tuple[torch.Tensor, Frames]


class PagedView(Managed):
    """A view of a paged tensor. Never made by users; `torch.Tensor` in all but its class."""

    _pager = None
    _pager_view: Frames | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation that names a view, and no paged tensor before it, arrives here."""
        kwargs = kwargs or {}
        if func in METADATA or func in GRADIENT:
            return _look(func, args, kwargs)
        if func in ORDINARY_FOR or (len(types) > 1 and _has_foreign(types)):
            return _run_ordinarily(func, args, kwargs)
        if func in _UNCOUNTED:
            frames = args[0]._pager_view
            if frames is not None:
                frames.escape()
            with NoTorchFunction():
                return func(*args, **kwargs)
        return access(func, args, kwargs)


_POINTERS = "untyped_storage storage _typed_storage data_ptr const_data_ptr mutable_data_ptr"
_EXPORTS = "numpy __array__ __dlpack__"
_Tensor: Any = torch.Tensor  # torch's stubs do not know that class attributes are descriptors
_UNCOUNTED: frozenset[Any] = frozenset(
    [
        _Tensor.data.__get__,
        _Tensor.__cuda_array_interface__.__get__,
        *(getattr(_Tensor, name) for name in f"{_POINTERS} {_EXPORTS}".split() if hasattr(_Tensor, name)),
    ]
)
"""What gives away the memory beneath a view: writes there move no version counter."""


def _has_foreign(types: Iterable[type]) -> bool:
    """Whether an operation is also the affair of somebody else's class of tensors."""
    return any(kind is not torch.Tensor and not issubclass(kind, Managed) for kind in types)


_SETS_HOOKS = _Tensor._backward_hooks.__set__
"""Torch itself calls it, with None, when it has derived a view's graph anew, and holds a lock of the view's."""


def _look(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Metadata of a view: as of any tensor."""
    use = object()
    pointed: list[Binding] = []
    try:
        frames = args[0]._pager_view if args and isinstance(args[0], PagedView) else None
        if frames is not None and func != _SETS_HOOKS:
            frames.point_base(args[0], use, pointed)
        elif frames is not None:
            frames.note_graph()
        with NoTorchFunction():
            return func(*args, **kwargs)
    finally:
        for binding in pointed:
            binding.mmu.exit([binding], use)


_PARAMETERS_OWN = frozenset([_Tensor.__repr__, _Tensor.__deepcopy__, _Tensor.__reduce_ex__])
"""Methods that a parameter, such as ``nn.Parameter(view)``, has other ones for."""


def _run_ordinarily(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What looks at the class of its arguments, runs code of the user's, or is also the affair of somebody else's
    class of tensors: the views are ordinary tensors meanwhile.
    """
    use = object()
    pointed: list[Binding] = []
    try:
        for view in collect_tensors(PagedView, args, kwargs):
            frames = view._pager_view
            if frames is not None:
                frames.point_base(view, use, pointed)
        with ordinary_views(PagedView, args, kwargs):
            if args and type(args[0]) is nn.Parameter and func in _PARAMETERS_OWN:
                return getattr(nn.Parameter, func.__name__)(*args)
            return func(*args, **kwargs)
    finally:
        for binding in pointed:
            binding.mmu.exit([binding], use)


def add_frames(frames: dict[int, Binding], views: Iterable[View]) -> None:
    """Put what the views lie on, where it is current, into ``frames`` (address -> binding)."""
    for _, known in views:
        if known.are_current():
            frames[known.address] = known.binding


VIEWS_UNSEEN = frozenset(["detach", "view"])
"""Operations whose one result shares an argument's memory and version counter though torch does not call it a view
(``view(dtype)``)."""


def mark_views(
    result: Any, leases: Sequence[torch.Tensor], bindings: Sequence[Binding], views: Sequence[View], name: str
) -> None:
    """Give what is a view of ``bindings``, over these leases, or of ``views``, among the results of the operation
    ``name``, the class of views. Called with torch functions disabled.
    """
    if type(result) is torch.Tensor:
        _mark(result, leases, bindings, views, name in VIEWS_UNSEEN)
    elif isinstance(result, (list, tuple)):
        for item in result:
            if type(item) is torch.Tensor:
                _mark(item, leases, bindings, views, False)


def _mark(
    tensor: torch.Tensor,
    leases: Sequence[torch.Tensor],
    bindings: Sequence[Binding],
    views: Sequence[View],
    unseen: bool,
) -> None:
    try:
        found = _frames_at(tensor.data_ptr(), leases, bindings, views)
    except RuntimeError:  # there is no address (sparse, wrappers of torch.func)
        return
    if found is None:
        return
    begin, binding = found
    segment = binding.segment
    for run in binding.mmu.engine.runs_of(segment):
        if run.covers(0, segment.num_pages):
            binding.mmu.engine.share(run, tensor)
            base = tensor._base
            if isinstance(base, Managed) or (base is None and unseen):
                view: Any = tensor
                view._pager_view = Frames(begin, binding, run, base if base is binding.tensor else None)
                view.__class__ = PagedView
            else:  # whose writes have a counter of their own
                run.escaped = True
                binding.norm = None
            return


def _frames_at(
    address: int, leases: Sequence[torch.Tensor], bindings: Sequence[Binding], views: Sequence[View]
) -> tuple[int, Binding] | None:
    """The lease, or the current frames of a view, that hold an address: where they begin, and whose they are."""
    for lease, binding in zip(leases, bindings, strict=True):
        begin = lease.data_ptr()
        if begin <= address < begin + lease.numel():
            return begin, binding
    for _, frames in views:
        if 0 <= address - frames.address < frames.num_bytes and frames.are_current():
            return frames.address, frames.binding
    return None


def run_on_views(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on views in place of the paged tensors it names, which point at their frames: what autograd
    saves of it are the views, and the frames stay until backward. Called with torch functions disabled.
    """
    given = [_on_views(arg) for arg in args]
    named = {name: value if name == "out" else _on_views(value) for name, value in kwargs.items()}
    result = func(*given, **named)
    return args[0] if given and result is given[0] else result


def _on_views(value: Any) -> Any:
    if isinstance(value, Paged):
        return value.view_as(value)
    if isinstance(value, (list, tuple)) and collect_tensors(Paged, value):
        return type(value)([_on_views(item) for item in value])
    return value


def count_writes(
    bindings: Sequence[Binding],
    views: Sequence[View],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation that writes to the tensors it names without moving their versions; move them."""
    try:
        return func(*args, **kwargs)
    finally:
        for binding in dict.fromkeys(
            [*bindings, *(frames.binding for _, frames in views if frames.are_current())]
        ):
            binding.bump_version()
