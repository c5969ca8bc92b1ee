"""Whether an optimizer may be run on one tensor, or one slice, at a time.

Not a matter of its name: the class is run on small tensors three ways, and the bits are compared.

1. all tensors in one call, as torch would run it;
2. one tensor a call, in another order: differs for optimizers that couple tensors (a global norm, shared random
   numbers);
3. slices of the flattened tensors, one a call: differs for those that look at a whole tensor (Adafactor, Muon, LAMB).

So an optimizer is SLICEABLE, WHOLE_TENSOR or COUPLED; coupled ones are refused. Tensors are taken whole also where a
state holds containers, which slices would share, and on the CPU in half precision, where torch's vector loops treat the
tail of each thread's share differently. The probe runs with the user's own group values, on the device and in the
dtypes of the parameters, and takes a few milliseconds.
"""

from __future__ import annotations

import enum
import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from pager.errors import ConfigError
from pager.optim.masters import stepped_dtype
from pager.optim.shadow import make_shadow, raw_step, snapshot_attributes

# Sizes with tails, one large enough for several threads of an elementwise kernel (32768 elements each), all
# >= 2-D for Muon.
_SHAPES = ((48, 64), (7, 5), (210, 330))
_SLICE_ELEMENTS = 16384
_NUM_STEPS = 3
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
    attributes = snapshot_attributes(optimizer)
    step = raw_step(optimizer)
    if _needs_closure(step):
        couples = ", and it takes one direction for all parameters together" * isinstance(optimizer, LBFGS)
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: its step() needs a closure, which runs the model in the "
            f"middle of the update{couples}. So it cannot run on one tensor at a time. Use an optimizer that treats "
            "each tensor by itself, or leave its parameters out of pager.manage()."
        )
    runner = _Runner(
        type(optimizer), attributes, _with_usable_lr(group), step, dtype, device, example_state, example_size
    )
    try:
        whole, state_dtypes = runner.run([list(range(len(_SHAPES)))], sliced=False)
    except Exception as error:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be managed: it failed on small tensors of {dtype} "
            f"({type(error).__name__}: {error}). Leave its parameters out of pager.manage(), or use another optimizer."
        ) from error
    alone, _ = runner.run([[index] for index in reversed(range(len(_SHAPES)))], sliced=False)
    half_on_cpu = device.type == "cpu" and dtype.itemsize < 4
    if not _equal(whole, alone):
        cut = Cut.COUPLED
    elif half_on_cpu or runner.nests or not _slices_agree(runner, whole):
        cut = Cut.WHOLE_TENSOR
    else:
        cut = Cut.SLICEABLE
    return ProbeResult(cut=cut, state_dtypes=state_dtypes, writes_gradients=runner.wrote_gradients)


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
        sliced, _ = runner.run([[index] for index in range(len(_SHAPES))], sliced=True)
    except Exception:  # an optimizer that insists on a shape says so by failing
        return False
    return _equal(whole, sliced)


@dataclass(slots=True)
class _Runner:
    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]
    step: Any
    dtype: torch.dtype
    device: torch.device
    example_state: Mapping[str, Any]
    example_size: torch.Size
    wrote_gradients: bool = False
    # Whether a state holds containers: slices of a parameter would share them.
    nests: bool = False

    def run(
        self, calls: Sequence[Sequence[int]], *, sliced: bool
    ) -> tuple[list[torch.Tensor], dict[str, torch.dtype]]:
        """Run three steps, each as ``calls`` of tensor indices; the parameters and states at the end."""
        with (
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
            torch.no_grad(),
        ):
            torch.manual_seed(20240229)
            generator = torch.Generator(device="cpu").manual_seed(7)
            params = [self._random(shape, generator) for shape in _SHAPES]
            grads = [[self._random(shape, generator) for shape in _SHAPES] for _ in range(_NUM_STEPS)]
            states: dict[tuple[int, int], dict[str, Any]] = {}
            for step_grads in grads:
                for call in calls:
                    self._call(call, params, step_grads, states, sliced=sliced)
                self.wrote_gradients |= any(grad._version for grad in step_grads)
        results = [param.flatten() for param in params]
        dtypes: dict[str, torch.dtype] = {}
        for index, shape in enumerate(_SHAPES):
            pieces = sorted(key for key in states if key[0] == index)
            for name, value in states[pieces[0]].items():
                self.nests |= isinstance(value, (dict, list, set, deque))
                if isinstance(value, torch.Tensor):
                    results.append(
                        torch.cat([states[key][name].flatten() for key in pieces])
                        if value.numel() > 1
                        else value
                    )
                    if not sliced and value.shape == torch.Size(shape):
                        dtypes[name] = value.dtype
        return results, dtypes

    def _call(
        self,
        call: Sequence[int],
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: dict[tuple[int, int], dict[str, Any]],
        *,
        sliced: bool,
    ) -> None:
        for pieces in self._cut(call, params, grads, sliced=sliced):
            tensors = []
            state = {}
            for index, begin, param, grad in pieces:
                tensor = param.detach().requires_grad_(True)
                tensor.grad = grad
                state[tensor] = states.setdefault((index, begin), self._first_state(param))
                tensors.append(tensor)
            # One RNG stream for all ways: an optimizer that draws numbers then differs by order, and counts
            # as coupled.
            shadow = make_shadow(self.cls, self.attributes, [(dict(self.group), tensors)], state)
            self.step(shadow)
            for (index, begin, _, _), tensor in zip(pieces, tensors, strict=True):
                states[index, begin] = shadow.state[tensor]

    def _cut(
        self, call: Sequence[int], params: list[torch.Tensor], grads: list[torch.Tensor], *, sliced: bool
    ) -> list[list[tuple[int, int, torch.Tensor, torch.Tensor]]]:
        if not sliced:
            return [[(index, 0, params[index], grads[index]) for index in call]]
        cuts = []
        for index in call:
            flat, grad = params[index].view(-1), grads[index].view(-1)
            for begin in range(0, flat.numel(), _SLICE_ELEMENTS):
                end = begin + _SLICE_ELEMENTS
                cuts.append([(index, begin, flat[begin:end], grad[begin:end])])
        return cuts

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=self.device, dtype=self.dtype)

    def _first_state(self, param: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, value in self.example_state.items():
            if not isinstance(value, torch.Tensor):
                state[name] = value
            elif value.shape == self.example_size and value.numel() > 1:
                state[name] = torch.full(param.shape, 0.5, dtype=value.dtype, device=self.device)
            else:
                state[name] = value.clone()
        return state


def _equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(left, right, strict=True)
    )
