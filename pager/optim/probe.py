"""Whether an optimizer may be run on one tensor, or one slice, at a time.

Not a matter of its name: the class is run on small tensors three ways, and the bits are compared.

1. all tensors in one call, one object over all steps, as torch would run it;
2. one tensor a call, in another order: differs for optimizers that couple tensors (a global norm, shared random
   numbers);
3. slices of the flattened tensors, one a call: differs for those that look at a whole tensor (Adafactor, Muon, LAMB).

So an optimizer is SLICEABLE, WHOLE_TENSOR or COUPLED; coupled ones are refused. Tensors are taken whole also where a
state holds containers, which slices would share, and on the CPU in half precision, where torch's vector loops treat the
tail of each thread's share differently. The probe runs with the user's own group values, on the device and in the
dtypes of the parameters, with gradients of several sizes (a threshold shows only above it), and takes a few
milliseconds.

Compared too is what the class keeps beside states (`pager.optim.books`): 2 and 3 run as `pager.optim.update` does, from
copies of the books, and the next step begins with what a run without tensors leaves. A class that leaves other books
with tensors than without them is refused.
"""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import LBFGS, Optimizer

from pager.errors import ConfigError
from pager.optim.bookkeeping import depends_on_parameters
from pager.optim.books import Books, copy_of, differences, is_same, kept, read
from pager.optim.held import check_holds, check_states
from pager.optim.masters import stepped_dtype
from pager.optim.shadow import GroupValues, may_wait, raw_step, shadow_with

# Sizes with tails, one large enough for several threads of an elementwise kernel (32768 elements each), all
# >= 2-D for Muon.
_SHAPES = ((48, 64), (7, 5), (210, 330))
_SLICE_ELEMENTS = 16384
# Factors of the gradients, by step.
_SCALES = (1.0, 1.0, 1.0, 2.0**-12, 2.0**12)
# Updates of parameters around 1 by less than this could be lost in rounding.
_LEAST_LR = 1e-3
_USABLE_LR = 1e-2


class Cut(enum.Enum):
    """How an optimizer's work may be cut."""

    SLICEABLE = "slices of a tensor"
    WHOLE_TENSOR = "whole tensors"
    COUPLED = "all tensors together"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """``cut``, the dtypes by key of states shaped like their parameter, and whether gradients are written."""

    cut: Cut
    state_dtypes: dict[str, torch.dtype]
    writes_gradients: bool


@dataclass(frozen=True, slots=True)
class ExpectedStates:
    """The dtypes of the states that a parameter will have, and whether they pass the device in slices, never whole."""

    dtypes: tuple[torch.dtype, ...]
    in_slices: bool = False


def probe(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    example_state: Mapping[str, Any],
    example_size: torch.Size,
) -> ProbeResult:
    """Find out how ``optimizer`` may be cut with the values of ``group``.

    ``example_state``: an existing state dict of a parameter of ``example_size`` (made in the optimizer's
    constructor or by earlier steps), or empty. Raises ConfigError if the class cannot even run on small
    tensors.
    """
    step = raw_step(optimizer)
    if _needs_closure(step):
        couples = ", and it takes one direction for all parameters together" * isinstance(optimizer, LBFGS)
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: its step() needs a closure, which runs the model in the "
            f"middle of the update{couples}. So it cannot run on one tensor at a time. Use an optimizer that treats "
            "each tensor by itself, or leave its parameters out of pager.manage()."
        )
    runner = _Runner(optimizer, _with_usable_lr(group), step, dtype, device, example_state, example_size)
    try:
        whole = runner.whole()
        alone = runner.apart(list(reversed(range(len(_SHAPES)))), sliced=False)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: it failed on small tensors of {dtype}, or on a group "
            f"without any ({type(error).__name__}: {error}). Leave its parameters out of pager.manage(), or use "
            "another optimizer."
        ) from error
    names = runner.other_books | {
        name for pair in zip(whole.books, alone.books, strict=True) for name in differences(*pair)
    }
    if names:
        raise ConfigError(depends_on_parameters(type(optimizer), sorted(names)))
    half_on_cpu = device.type == "cpu" and dtype.itemsize < 4
    if not _equal(whole.values, alone.values):
        cut = Cut.COUPLED
    elif half_on_cpu or runner.nests or not _slices_agree(runner, whole.values):
        cut = Cut.WHOLE_TENSOR
    else:
        cut = Cut.SLICEABLE
    return ProbeResult(cut=cut, state_dtypes=whole.dtypes, writes_gradients=runner.wrote_gradients)


def _needs_closure(step: Any) -> bool:
    """Whether ``step`` cannot be called without a closure."""
    try:
        closure = inspect.signature(step).parameters.get("closure")
    except (TypeError, ValueError):  # nothing that Python can look into
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def probe_key(group: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """What a probe's result depends on: switches as they are, numbers only in being zero or not (a schedule
    moves them).
    """
    options: list[tuple[str, Any]] = []
    for name, value in group.items():
        if isinstance(value, (bool, str, type(None))):
            options.append((name, value))
        elif isinstance(value, (int, float)):
            options.append((name, value != 0))
    return dtype, tuple(sorted(options, key=lambda option: option[0]))


def key_of(group: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """`probe_key`, made once for a snapshot of a group."""
    if not isinstance(group, GroupValues):
        return probe_key(group, dtype)
    key = group.probe_keys.get(dtype)
    if key is None:
        key = group.probe_keys[dtype] = probe_key(group, dtype)
    return key


def admit(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> ProbeResult:
    """How ``optimizer`` may be cut with the values of ``group``, for one parameter of the group.

    Raises ConfigError for an optimizer that cannot be managed.
    """
    plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    found = probe(optimizer, plain, dtype, device, optimizer.state.get(param, {}), param.shape)
    if found.cut is Cut.COUPLED:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: stepping tensors one at a time gives other bits than all "
            "together (it couples tensors, or draws random numbers), so it cannot run in pieces. Use an optimizer "
            "that treats each tensor by itself."
        )
    return found


def check_class(optimizer: Optimizer) -> None:
    """Refuse, by ConfigError, a class of the user's that holds what it must not (`pager.optim.held`)."""
    if not may_wait(type(optimizer)):
        check_holds(optimizer)


def check_optimizers(
    optimizers: Sequence[Optimizer],
    names: Mapping[int, str],
    device: torch.device,
    *,
    master: bool = False,
) -> dict[int, ExpectedStates]:
    """Refuse optimizers that cannot be managed, before anything moves. ``names``: of the parameters to be
    paged, by id. Returns the states that each of them will have.

    Raises ConfigError for coupled optimizers and for two that hold the same parameter.
    """
    taken: set[int] = set()
    states: dict[int, ExpectedStates] = {}
    for optimizer in optimizers:
        check_class(optimizer)
        probed: dict[tuple[Any, ...], ProbeResult] = {}
        own: set[int] = set()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    continue
                if id(param) in taken:
                    raise ConfigError(
                        f"two optimizers hold {names[id(param)]}; several optimizers over one managed model must have "
                        "disjoint parameters. Delete the old one first."
                    )
                own.add(id(param))
                dtype = stepped_dtype(param.dtype, master=master)
                key = probe_key(group, dtype)
                if key not in probed:
                    probed[key] = admit(optimizer, group, param, dtype, device)
                dtypes = tuple(probed[key].state_dtypes.values())
                if dtype != param.dtype:
                    dtypes += (torch.int16,)
                states[id(param)] = ExpectedStates(dtypes, in_slices=probed[key].cut is Cut.SLICEABLE)
        taken |= own
    return states


def _with_usable_lr(group: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with a learning rate that shows: a warm-up begins at zero, where every optimizer does the
    same.
    """
    usable = dict(group)
    lr = usable.get("lr")
    if isinstance(lr, torch.Tensor):
        usable["lr"] = lr.clone() if abs(float(lr)) >= _LEAST_LR else torch.full_like(lr, _USABLE_LR)
    elif isinstance(lr, (int, float)) and abs(lr) < _LEAST_LR:
        usable["lr"] = _USABLE_LR
    return usable


def _slices_agree(runner: _Runner, whole: list[torch.Tensor]) -> bool:
    try:
        sliced = runner.apart(list(range(len(_SHAPES))), sliced=True)
    except Exception:  # an optimizer that insists on a shape says so by failing
        return False
    return _equal(whole, sliced.values)


class _Outcome(NamedTuple):
    """Parameters and states at the end, the dtypes of states by key, and the books after each step."""

    values: list[torch.Tensor]
    dtypes: dict[str, torch.dtype]
    books: list[Books]


class _Runner:
    def __init__(
        self,
        optimizer: Optimizer,
        group: Mapping[str, Any],
        step: Any,
        dtype: torch.dtype,
        device: torch.device,
        example_state: Mapping[str, Any],
        example_size: torch.Size,
    ) -> None:
        self._cls = type(optimizer)
        self.books = kept(optimizer)
        self.books.groups[:] = [dict(group)]
        self._step = step
        self._dtype = dtype
        self._device = device
        self._example_state = example_state
        self._example_size = example_size
        self.wrote_gradients = False
        # Whether a state holds containers: slices of a parameter would share them.
        self.nests = False
        # Where one tensor, or a slice, left other books than none.
        self.other_books: set[str] = set()

    def whole(self) -> _Outcome:
        """All tensors in one call a step. Raises ConfigError for a state that is a parameter or a gradient."""
        with self._inputs() as (params, grads):
            tensors = [param.requires_grad_(True) for param in params]
            state = {tensor: self._first_state(tensor) for tensor in tensors}
            shadow = shadow_with(self._cls, self.books, {0: tensors}, state)
            books = []
            for step_grads in grads:
                for tensor, grad in zip(tensors, step_grads, strict=True):
                    tensor.grad = grad
                self._step(shadow)
                self.wrote_gradients |= any(grad._version for grad in step_grads)
                if not may_wait(self._cls):
                    check_states(self._cls.__name__, (shadow.state[tensor] for tensor in tensors), tensors)
                books.append(kept(shadow))
        states = {(index, 0): shadow.state[tensor] for index, tensor in enumerate(tensors)}
        dtypes = {
            name: value.dtype
            for index, tensor in enumerate(tensors)
            for name, value in states[index, 0].items()
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape
        }
        return _Outcome(self._results(tensors, states), dtypes, books)

    def apart(self, order: Sequence[int], *, sliced: bool) -> _Outcome:
        """One tensor or slice a call, on copies, as the update does it."""
        with self._inputs() as (params, grads):
            states: dict[tuple[int, int], dict[str, Any]] = {}
            books = [self.books]
            for step_grads in grads:
                nothing = shadow_with(self._cls, books[-1], {}, {})
                self._step(nothing)
                after = read(nothing)
                for index, begin, param, grad in self._cut(order, params, step_grads, sliced=sliced):
                    self._call((index, begin), param, grad, states, books[-1], after)
                books.append(kept(nothing))
        return _Outcome(self._results(params, states), {}, books[1:])

    def _call(
        self,
        key: tuple[int, int],
        param: torch.Tensor,
        grad: torch.Tensor,
        states: dict[tuple[int, int], dict[str, Any]],
        before: Books,
        after: Books,
    ) -> None:
        copy = param.clone().requires_grad_(True)
        copy.grad = grad.clone()
        state = states[key] if key in states else self._first_state(param)
        # One RNG stream for all ways: an optimizer that draws numbers then differs by order, and counts as coupled.
        shadow = shadow_with(self._cls, before, {0: [copy]}, {copy: copy_of(state, {})})
        self._step(shadow)
        states[key] = shadow.state[copy]
        param.copy_(copy.detach())
        self.other_books.update(differences(after, read(shadow)))

    @contextmanager
    def _inputs(self) -> Iterator[tuple[list[torch.Tensor], list[list[torch.Tensor]]]]:
        """The same parameters, gradients by step, and random numbers each time."""
        with (
            torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(20240229)
            generator = torch.Generator(device="cpu").manual_seed(7)
            params = [self._random(shape, generator) for shape in _SHAPES]
            yield params, [[self._random(shape, generator, scale) for shape in _SHAPES] for scale in _SCALES]

    def _results(
        self, params: Sequence[torch.Tensor], states: Mapping[tuple[int, int], dict[str, Any]]
    ) -> list[torch.Tensor]:
        results = [param.detach().flatten() for param in params]
        for index in range(len(_SHAPES)):
            pieces = sorted(key for key in states if key[0] == index)
            for name, value in states[pieces[0]].items():
                self.nests |= isinstance(value, (dict, list, set, deque))
                if isinstance(value, torch.Tensor):
                    results.append(
                        torch.cat([states[key][name].flatten() for key in pieces])
                        if value.numel() > 1
                        else value
                    )
        return results

    def _cut(
        self,
        order: Sequence[int],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        *,
        sliced: bool,
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        for index in order:
            if not sliced:
                yield index, 0, params[index], grads[index]
                continue
            flat, grad = params[index].view(-1), grads[index].view(-1)
            for begin in range(0, flat.numel(), _SLICE_ELEMENTS):
                end = begin + _SLICE_ELEMENTS
                yield index, begin, flat[begin:end], grad[begin:end]

    def _random(self, shape: tuple[int, ...], generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
        # Not in place: writes are looked for by version.
        value = torch.randn(shape, generator=generator) * scale
        return value.to(device=self._device, dtype=self._dtype)

    def _first_state(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, value in self._example_state.items():
            if not isinstance(value, torch.Tensor):
                state[name] = value
            elif value.shape == self._example_size and value.numel() > 1:
                state[name] = torch.full(param.shape, 0.5, dtype=value.dtype, device=self._device)
            else:
                state[name] = value.clone()
        return state


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and is_same(a.detach(), b.detach()) for a, b in zip(left, right, strict=True)
    )
