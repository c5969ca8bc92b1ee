"""Capture: one training step on a twin of the model, before training, to learn its accesses in order.

The problem. Pages move by their next use, so the order in which a step touches its parameters must be known
before the first step: forward, recomputation under checkpointing, backward (autograd reads saved weights),
gradients. Symbolic traces see neither recomputation nor the reads of saved tensors, and fail on many models.

The way. Run the program itself, with nothing in its tensors:

1. Twin. A deep copy of the model in which every tensor is replaced, through deepcopy's memo, by one without
   data of the same shape, strides and dtype. The user's tensors are asked for metadata only, so parameters
   may stand on any device, or be the runtime's own class with phantom data.
2. Recorder (`access.AccessRecorder`). The twin's managed parameters see every operation that names one, as
   the runtime's door does: one tick each. So are autograd's reads of what it saved of them, and each
   gradient.
3. Meter. A dispatch mode beneath counts FLOPs and bytes by tick and the bytes of live intermediates.

The ladder. "meta": floating tensors have no data; small integer and boolean ones (token ids, masks, counters)
are real copies on the CPU, so that control flow over them works, and turn into meta tensors where they meet
one. "fake": FakeTensorMode, whose tensors claim to stand on a real device: for models that meta tensors
cannot serve and where the device decides what autograd keeps (autocast; recurrent layers). "recorded":
neither worked, the runtime records its first real step. A failing model never raises here.

Why not run it once on zeros: that needs the memory this project exists to save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pager.graph.access import (
    ACCESS_DTYPE,
    AccessRecorder,
    Traced,
    TracedParameter,
    TracedView,
    ViewOfTraced,
    hooks_beneath,
)
from pager.graph.flops import flops_of
from pager.graph.fused_kernels import fused_kernels_on_meta
from pager.graph.twin import REAL_LIMIT_BYTES, empty_on_meta, empty_twin, make_twin, meta_twin
from pager.graph.wrong_inputs import (
    ForwardFailed,
    NotOnThisRung,
    fault_of_inputs,
    in_forward,
    quiet_fake_tensors,
    unfit_call,
)

log = logging.getLogger(__name__)

Way = Literal["meta", "fake", "recorded"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capture:
    """What one step on the twin showed.

    `way`: the rung that worked. `reason`: why not an earlier one (None for "meta").
    `rows`: ACCESS_DTYPE, in order; ticks dense from 0; see AccessRecorder. A GRADIENT row names the
    parameter's segment; what is written is its gradient.
    `flops`, `moved_bytes`: float64 per tick, the work from the tick's begin to the next one's; bytes read and
    written by operations that are not views.
    `peak_activation_bytes`: largest sum of live intermediates (saved ones too), without parameters, buffers,
    inputs and finished gradients. Attention counts as the device computes it: without its scores where that
    is a GPU with a fused kernel for it. `live_bytes`: int64 per tick, the most of them while it lasts. For
    "recorded" all are empty or 0.
    `wrong_inputs`: for "recorded", what the model says of inputs that it does not take.
    """

    way: Way
    reason: str | None
    rows: npt.NDArray[Any]
    flops: npt.NDArray[np.float64]
    moved_bytes: npt.NDArray[np.float64]
    peak_activation_bytes: int
    wrong_inputs: str | None = None
    live_bytes: npt.NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_ticks(self) -> int:
        return len(self.flops)


class TracedFakeParameter(Traced, FakeTensor):
    """A TracedParameter for FakeTensorMode, whose tensors must be FakeTensors."""


class TracedFakeView(ViewOfTraced, FakeTensor):
    """A view of a TracedFakeParameter."""


VIEW_CLASSES: Mapping[type, type[ViewOfTraced]] = {Tensor: TracedView, FakeTensor: TracedFakeView}


@functools.cache
def is_view(func: torch._ops.OpOverload) -> bool:
    aliases = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def num_bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _to_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), tree)


class StepMeter(TorchDispatchMode):
    """Counts FLOPs and bytes by tick, and live bytes; joins real integers to meta tensors."""

    def __init__(self, real_tensors: bool) -> None:
        super().__init__()
        self.flops: list[float] = []
        self.moved_bytes: list[float] = []
        self.tick_live_bytes: list[int] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._real_tensors = real_tensors
        self._known: dict[int, Any] = {}  # storage -> weak reference, or the storage itself: never counted
        self._early = (0.0, 0.0)  # before the first tick: counted with it

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Leave the storages of `tensors` out of the live bytes."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._known[storage._cdata] = storage

    def begin_tick(self) -> None:
        """What follows is counted for a new tick."""
        self.flops.append(self._early[0])
        self.moved_bytes.append(self._early[1])
        self._early = (0.0, 0.0)
        self.tick_live_bytes.append(self.live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if self._real_tensors:
                inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                if not any(t.is_meta for t in inputs):
                    return self._run_real(func, args, kwargs)
                if not all(t.is_meta for t in inputs):
                    if func._schema.is_mutable and isinstance(args[0], Tensor) and not args[0].is_meta:
                        raise RuntimeError(f"{func} writes values that are not known yet into a real tensor")
                    args, kwargs = _to_meta((args, kwargs))
            result = func(*args, **kwargs)
            self._count(func, args, kwargs, result)
        return result

    def _run_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_view(func) and not func._schema.is_mutable:
            on_meta = dict(kwargs)
            if any(argument.name == "device" for argument in func._schema.arguments):
                on_meta["device"] = torch.device("meta")
            meta_args, meta_kwargs = _to_meta((args, on_meta))
            # Some results have a size that depends on values (nonzero): those can only be run.
            with contextlib.suppress(Exception):
                shapes = func(*meta_args, **meta_kwargs)
                if num_bytes(tree_leaves(shapes)) > REAL_LIMIT_BYTES:
                    return shapes
        result = func(*args, **kwargs)
        self._track(t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_meta)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        flops = flops_of(func._overloadpacket, args, kwargs, result)
        outputs = tree_leaves(result)
        moved = 0 if is_view(func) else num_bytes(outputs) + num_bytes(tree_leaves((args, kwargs)))
        if self.flops:
            self.flops[-1] += flops
            self.moved_bytes[-1] += moved
        else:
            self._early = (self._early[0] + flops, self._early[1] + moved)
        self._track(outputs)

    def _track(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                continue
            self._known[key] = weakref.ref(storage, functools.partial(self._forget, key, size))
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if self.tick_live_bytes:
                self.tick_live_bytes[-1] = max(self.tick_live_bytes[-1], self.live_bytes)

    def _forget(self, key: int, size: int, _: Any) -> None:
        self._known.pop(key, None)
        self.live_bytes -= size


def _drop_gradient(parameter: Tensor) -> None:
    # Finished gradients leave the device in the runtime: they are no activations.
    parameter.grad = None


def _floating_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield torch.view_as_real(output) if output.is_complex() else output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _floating_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _floating_tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _floating_tensors(getattr(output, field.name))


def step_loss(output: Any) -> Tensor | None:
    """The scalar to differentiate: `output.loss` (or `["loss"]`) if there is one, else the sum of what
    floats.

    None where nothing in the output has a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss.sum() if loss.requires_grad else None
    sums = [tensor.sum() for tensor in _floating_tensors(output)]
    return functools.reduce(torch.add, sums) if sums else None


def run_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Forward, `step_loss`, backward: the step that capture looks at."""
    with torch.inference_mode(False), torch.enable_grad():
        with in_forward():
            output = model(*args, **kwargs)
        loss = step_loss(output)
        if loss is not None:
            loss.backward()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random generators as before, no warning twice, no compilation of the twin."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])  # noqa: NPY002


@contextlib.contextmanager
def _own_saved_tensors() -> Iterator[None]:
    """Keep what the twin saves from the hooks the caller runs under: a checkpoint would count it as its."""
    if hooks_beneath() is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept):
        yield


def _end_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold: a checkpoint whose forward raised may be one (torch 2.6), which
    leaves its saved-tensor hooks in force until then.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# The fused kernel that a real device has keeps its own choice of weights for backward.
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def _refuse_on_meta(device: torch.device, func: Callable[..., Any]) -> None:
    if torch.is_autocast_enabled(device.type):
        raise NotOnThisRung(f"autocast for {device.type} does not act on meta tensors")
    if func in _RECURRENT:
        raise NotOnThisRung("what a recurrent layer keeps for backward depends on the device")


def _try_rung(
    way: Literal["meta", "fake"],
    reason: str | None,
    model: nn.Module,
    managed: Mapping[nn.Parameter, int],
    inputs: tuple[Any, Any],
    device: torch.device,
    shared: Iterable[object],
) -> Capture:
    fake_mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    make, empty = meta_twin, empty_on_meta
    if way == "fake":
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake_twin(tensor: Tensor) -> Tensor:
            with fake_mode:
                return empty_twin(tensor, device)

        make = empty = fake_twin
    meter = StepMeter(real_tensors=way == "meta")
    refuse = functools.partial(_refuse_on_meta, device)
    recorder = AccessRecorder(
        meter.begin_tick, refuse if way == "meta" else lambda func: None, view_classes=VIEW_CLASSES
    )
    traced_class = TracedParameter if way == "meta" else TracedFakeParameter
    twin, args, kwargs, parameters = make_twin(model, managed, inputs, make, empty, shared)
    meter.ignore([*(p for p, _ in parameters), *twin.buffers(), *tree_leaves((args, kwargs))])
    for parameter, segment in parameters:
        if segment is not None:
            recorder.adopt(parameter, segment, traced_class)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    recorder.active = True
    # On fake tensors of a GPU torch makes that choice itself.
    fused = fused_kernels_on_meta() if way == "meta" and device.type == "cuda" else contextlib.nullcontext()
    with _own_saved_tensors(), fake_mode, meter, fused:
        run_step(twin, args, kwargs)
    recorder.active = False
    return Capture(
        way=way,
        reason=reason,
        rows=recorder.array(),
        flops=np.array(meter.flops, dtype=np.float64),
        moved_bytes=np.array(meter.moved_bytes, dtype=np.float64),
        peak_activation_bytes=meter.peak_bytes,
        live_bytes=np.array(meter.tick_live_bytes, dtype=np.int64),
    )


def capture(
    model: nn.Module,
    managed: Mapping[nn.Parameter, int],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | None = None,
    shared: Iterable[object] = (),
) -> Capture:
    """The accesses of one training step of `model(*args, **kwargs)` to its `managed` parameters (-> segment).

    Nothing of the user's is touched: the step runs on a twin without data, in the mode (training or not)
    the model is in, under the caller's autocast. `device`: where the model will compute (default: where the
    first managed parameter is), for the "fake" rung. `shared`: objects hanging on the model (the runtime's
    handle) that are not copied; module hooks that are methods of them are left out of the twin. A hook that
    closes over the user's own objects does act on those. Takes about as long as the step's Python part;
    allocates a few MiB.
    Raises ValueError if a managed parameter is not the model's; never for a model that fails (way
    "recorded").
    """
    own = {id(parameter) for parameter in model.parameters()}
    if not managed or any(id(parameter) not in own for parameter in managed):
        raise ValueError("capture needs at least one managed parameter, and all of them in the model")
    inputs = (tuple(args), dict(kwargs or {}))
    shared = tuple(shared)
    device = next(iter(managed)).device if device is None else torch.device(device)
    if device.type == "meta":
        device = torch.device("cpu")
    attempts: list[tuple[Literal["meta", "fake"], torch.device]] = [("meta", device), ("fake", device)]
    if device.type != "cpu":
        attempts.append(("fake", torch.device("cpu")))
    reasons: list[str] = []
    errors: list[Exception] = []
    for way, where in attempts:
        try:
            with undisturbed(), quiet_fake_tensors():
                reason = "; ".join(reasons) or None
                result = _try_rung(way, reason, model, managed, inputs, where, shared)
        except Exception as error:
            _end_frames(error)
            errors.append(error)
            cause = error.__cause__ if isinstance(error, ForwardFailed) else error
            reasons.append(f"{way}: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}")
            log.debug("capture on %s tensors failed", way, exc_info=True)
            continue
        log.info(
            "captured %d accesses in %d ticks by a step on %s tensors%s",
            len(result.rows),
            result.num_ticks,
            way,
            f" ({result.reason})" if result.reason else "",
        )
        return result
    log.info("no capture before training, the first step is recorded instead (%s)", "; ".join(reasons))
    return Capture(
        way="recorded",
        reason="; ".join(reasons),
        rows=np.zeros(0, ACCESS_DTYPE),
        flops=np.zeros(0),
        moved_bytes=np.zeros(0),
        peak_activation_bytes=0,
        wrong_inputs=unfit_call(model, *inputs) or fault_of_inputs(errors),
    )
