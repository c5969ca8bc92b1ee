"""What counts as an access: every getter, method and function of torch that may arrive is decided on."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pager.graph.access import (
    GRADIENT,
    LAYOUT,
    METADATA,
    AccessRecorder,
    Neighbours,
    SavedBeneath,
    TracedView,
    collect_tensors,
    current_phase,
    is_access,
)
from pager.graph.access_trace import Phase

# Getters that hand out data. With METADATA and GRADIENT they are all the getters there are: a getter that a
# new torch adds makes a test red until somebody decides.
DATA_GETTERS = {"H", "T", "data", "imag", "mH", "mT", "real", "__cuda_array_interface__"}

METADATA_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda p: p.shape,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "requires_grad": lambda p: p.requires_grad,
    "set requires_grad": lambda p: setattr(p, "requires_grad", True),
    "requires_grad_": lambda p: p.requires_grad_(True),
    "is_leaf": lambda p: p.is_leaf,
    "grad_fn": lambda p: p.grad_fn,
    "_version": lambda p: p._version,
    "ndim": lambda p: p.ndim,
    "size": lambda p: p.size(0),
    "dim": lambda p: p.dim(),
    "stride": lambda p: p.stride(),
    "storage_offset": lambda p: p.storage_offset(),
    "numel": lambda p: (p.numel(), p.nelement(), torch.numel(p)),
    "element_size": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "is_contiguous": lambda p: p.is_contiguous(memory_format=torch.channels_last),
    "dim_order": lambda p: p.dim_order(),
    "is_floating_point": lambda p: (p.is_floating_point(), torch.is_floating_point(p)),
    "is_complex": lambda p: (p.is_complex(), torch.is_complex(p)),
    "is_cuda": lambda p: (p.is_cuda, p.is_cpu, p.is_meta, p.is_sparse, p.is_quantized),
    "get_device": lambda p: p.get_device(),
    "len": lambda p: len(p),
    "hash": lambda p: hash(p),
    "register_hook": lambda p: p.register_hook(lambda grad: grad),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(lambda _: None),
    "_backward_hooks": lambda p: setattr(p, "_backward_hooks", p._backward_hooks),
    "is_pinned": lambda p: (p.is_pinned(), p.is_shared()),
    "retains_grad": lambda p: (p.retains_grad, p.output_nr, p._is_view(), p._base),
    "result_type": lambda p: torch.result_type(p, p),
    "is_same_size": lambda p: torch.is_same_size(p, p),
    "is_tensor": lambda p: torch.is_tensor(p),
    "isinstance": lambda p: isinstance(p, nn.Parameter),
    "new_zeros": lambda p: (p.new_zeros(2), p.new_empty(2), p.new_ones(2)),
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", None),
}
ACCESS_CALLS: dict[str, Callable[[Tensor], Any]] = {
    "T": lambda p: p.T,
    "mT": lambda p: p.mT,
    "H": lambda p: p.H,
    "real": lambda p: p.real,
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(4, 6)),
    "add": lambda p: p + 1,
    "matmul": lambda p: torch.ones(2, 4) @ p,
    "keyword": lambda p: nn.functional.linear(torch.ones(2, 6), weight=p),
    "list": lambda p: torch._foreach_norm([p]),
    "view": lambda p: p.view(-1),
    "detach": lambda p: p.detach(),
    "data_ptr": lambda p: p.data_ptr(),
    "numpy": lambda p: p.detach().numpy(),
    "item": lambda p: p[0, 0].item(),
    "zeros_like": lambda p: torch.zeros_like(p),
    "equal": lambda p: torch.equal(p, p),
    "repr": lambda p: repr(p),
    "other's copy_": lambda p: torch.ones(4, 6).copy_(p.detach()),
    "new_full": lambda p: p.new_full((2,), 1.0),
    "untyped_storage": lambda p: p.untyped_storage(),
}


def make_parameter() -> tuple[nn.Parameter, AccessRecorder]:
    parameter = nn.Parameter(torch.randn(4, 6))
    recorder = AccessRecorder()
    recorder.adopt(parameter, 0)
    recorder.active = True
    return parameter, recorder


def overridable_getters() -> dict[str, set[Any]]:
    """Name of each getter of torch.Tensor that reaches `__torch_function__` -> the callables that arrive."""

    class Spy(Tensor):
        seen: set[Any] = set()  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen.add(func)
            raise NotImplementedError

    spy = torch.randn(2, 2).as_subclass(Spy)
    found = {}
    for name in dir(Tensor):
        if hasattr(getattr(Tensor, name), "__set__"):
            Spy.seen.clear()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(NotImplementedError, AttributeError, TypeError, RuntimeError):
                    getattr(spy, name)
            if Spy.seen:
                found[name] = set(Spy.seen)
    return found


@pytest.mark.parametrize("name", METADATA_CALLS)
def test_metadata_is_no_access(name: str) -> None:
    parameter, recorder = make_parameter()
    METADATA_CALLS[name](parameter)
    assert recorder.rows == []


@pytest.mark.parametrize("name", ACCESS_CALLS)
def test_data_is_an_access(name: str) -> None:
    parameter, recorder = make_parameter()
    ACCESS_CALLS[name](parameter)
    assert recorder.rows
    assert {segment for _, segment, _, _ in recorder.rows} == {0}


def test_every_getter_of_this_torch_is_decided_on() -> None:
    getters = overridable_getters()
    undecided = [
        name
        for name, functions in getters.items()
        if name not in DATA_GETTERS and not functions <= METADATA | GRADIENT
    ]
    assert len(getters) > 30
    assert undecided == []
    for name in DATA_GETTERS & set(getters):
        assert all(is_access(function) for function in getters[name]), name


def test_metadata_answers_alike_on_a_phantom_but_for_layout() -> None:
    real, phantom = torch.randn(4, 6), torch.full((), float("nan")).expand(4, 6)
    names = ("size", "dim", "numel", "nelement", "element_size", "get_device", "is_complex", "is_same_size")
    for name in names:
        assert getattr(Tensor, name) in METADATA - LAYOUT
        arguments = (real,) if name == "is_same_size" else ()
        assert getattr(real, name)(*arguments) == getattr(phantom, name)(*arguments)
    for name in ("stride", "is_contiguous"):
        assert getattr(Tensor, name) in LAYOUT
        assert getattr(real, name)() != getattr(phantom, name)()
    assert LAYOUT <= METADATA
    assert not METADATA & GRADIENT


def test_collect_tensors_finds_each_once_in_order() -> None:
    a, b, c, d = (make_parameter()[0] for _ in range(4))
    plain = torch.zeros(1)
    args = (plain, [b, (a, {"x": c}), 3], "text", b)
    found = collect_tensors(type(a), args, {"weight": d, "bias": a, "none": None})
    assert [id(t) for t in found] == [id(t) for t in (b, a, c, d)]
    assert collect_tensors(type(a), (plain, nn.Parameter(plain))) == []


def test_collect_tensors_takes_subclasses() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    assert collect_tensors(Tensor, ((parameter,),))[0] is parameter


def test_phase_is_recompute_only_inside_backward() -> None:
    phases = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: phases.append(current_phase()))
    phases.append(current_phase())
    y.sum().backward()
    phases.append(current_phase())
    assert phases == [Phase.FORWARD, Phase.RECOMPUTE, Phase.FORWARD]


def test_recorder_marks_writes() -> None:
    parameter, recorder = make_parameter()
    with torch.no_grad():
        parameter.mul_(2)
        parameter.mul(2)
    assert [row[2] for row in recorder.rows] == [True, False]


def test_recorder_gives_an_operation_one_tick() -> None:
    recorder = AccessRecorder()
    weight, bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))
    recorder.adopt(weight, 4)
    recorder.adopt(bias, 7)
    recorder.active = True
    x = torch.randn(2, 5, requires_grad=True)
    nn.functional.linear(x, weight, bias).sum().backward()
    rows = [(tick, segment, Phase(phase)) for tick, segment, _, phase in recorder.rows]
    assert rows[:2] == [(0, 4, Phase.FORWARD), (0, 7, Phase.FORWARD)]
    assert rows[2:] == [(1, 4, Phase.BACKWARD), *rows[3:]]
    assert {row[1:] for row in rows[3:]} == {(4, Phase.GRADIENT), (7, Phase.GRADIENT)}


def test_recorder_leaves_other_saved_tensors_to_the_hooks_beneath() -> None:
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tuple(tensor.shape))
        return tensor

    parameter, _ = make_parameter()
    x = torch.randn(3, 4)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = (x @ parameter).exp().sum()
    loss.backward()
    assert packed == [(3, 4), (3, 6)]
    assert sorted(unpacked) == sorted(packed)
    assert parameter.grad is not None
    assert torch.allclose(parameter.grad, x.t() @ (x @ parameter.data).exp())


@pytest.mark.parametrize("bias", [False, True])  # autograd asks for the weight first, or for the input
def test_what_is_saved_beside_a_weight_is_unpacked_before_it_and_once_a_backward(bias: bool) -> None:
    events: list[Any] = []

    def unpack(tensor: Tensor) -> Tensor:
        events.append(tuple(tensor.shape))
        return tensor

    parameter, recorder = make_parameter()
    recorder._on_tick = lambda: events.append("tick")
    x = torch.randn(3, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
        loss = nn.functional.linear(x, parameter, torch.ones(4) if bias else None).sum()
    torch.autograd.grad(loss, [x], retain_graph=True)  # in which autograd does not ask for the input
    for _ in range(2):
        events.clear()
        loss.backward(retain_graph=True)
        assert events == [(3, 6), "tick", "tick"]  # the weight, its gradient


def test_what_autograd_asks_for_in_no_backward_is_unpacked_each_time() -> None:
    asked: list[int] = []

    def unpack(tensor: Tensor) -> Tensor:
        asked.append(1)
        return tensor

    saved = SavedBeneath((Tensor.detach, unpack), torch.ones(2))
    neighbours = Neighbours()
    neighbours.unpack_beside(neighbours.next_place())
    neighbours.add(saved)
    neighbours.unpack_beside(0)
    assert asked == []
    assert torch.equal(saved.unpack(), saved.unpack())
    assert asked == [1, 1]
    del saved
    neighbours.unpack_beside(1)  # gone with its graph
    assert asked == [1, 1]


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda p: p.t(),
    "a view of a view": lambda p: p.t()[1:].unsqueeze(0),
    "detach": lambda p: p.detach(),
    "chunk": lambda p: p.chunk(2)[1],
    "without grad": lambda p: _without_grad(p),
}


def _without_grad(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter.t()


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_saved_of_a_view_is_recorded_in_backward(name: str) -> None:
    parameter, recorder = make_parameter()
    view = VIEWS[name](parameter)
    num_ticks = recorder.num_ticks
    x = torch.ones(view.shape[-1], requires_grad=True)
    assert isinstance(view, TracedView)
    product = view @ x
    assert type(product) is Tensor
    assert recorder.num_ticks == num_ticks  # using a view is no access of its own
    torch.autograd.grad(product.sum(), [x])
    assert [Phase(phase) for *_, phase in recorder.rows[num_ticks:]] == [Phase.BACKWARD]
    torch.add(view.new_ones(1), view)
    assert recorder.num_ticks == num_ticks + 1
    torch.mul(view[..., :1, :1], parameter)
    assert recorder.num_ticks == num_ticks + 2  # the parameter beside it is one


def test_a_result_that_can_be_no_view_or_may_not_be_hooked_is_left_alone() -> None:
    parameter, recorder = make_parameter()
    assert type(parameter.to_sparse()) is Tensor
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        product = torch.ones(1, 4, requires_grad=True) @ parameter
    num_ticks = recorder.num_ticks
    product.sum().backward()
    assert recorder.num_ticks == num_ticks + 1  # the gradient


def test_a_traced_view_is_as_any_tensor() -> None:
    parameter, recorder = make_parameter()
    view = parameter.t()
    assert repr(view) == repr(nn.Parameter(parameter.data).t())
    assert type(copy.deepcopy(view.detach())) is Tensor
    view[0, 0].backward()
    assert type(view) is TracedView
    assert parameter.grad is not None
    assert parameter.grad.sum() == 1
    assert recorder.rows[-1][3] == Phase.GRADIENT


def test_recorder_keeps_no_graph_alive() -> None:
    parameter, _ = make_parameter()
    gc.collect()
    gc.disable()
    try:
        result = parameter.exp()  # keeps its own output for backward
        storage = weakref.ref(result.untyped_storage())
        assert storage() is not None
        del result
        assert storage() is None
    finally:
        gc.enable()
