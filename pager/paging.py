"""A model's tensors going into pages and coming out again.

Going in: each parameter's bytes are copied to its home and the original is freed before the next one is
copied, batch by batch, so that a model on the CPU never exists twice. A parameter on meta gets its value from
its module's ``reset_parameters`` (or ``init=``), one module at a time on the compute device; where there is
neither it has no value until ``load_state_dict``. Tensors under a page and buffers become ordinary tensors on
the compute device.

Coming out: parameters are ordinary CPU tensors over their homes, which costs no copy where those are host
memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pager.address_space import Segment, span_elements
from pager.engine.engine import Engine
from pager.homes import Homes
from pager.mmu import values
from pager.mmu.binding import Binding, NoTorchFunction
from pager.mmu.mmu import Mmu
from pager.mmu.parameter import PagedParameter, PagedTensor, page_tensor, unpage_tensor
from pager.mmu.replacing import Replacing
from pager.model_checks import MANAGED_SMALL, Parameters
from pager.page_table import Home, PageTable
from pager.tiers.host_arena import HostArena

logger = logging.getLogger("pager.paging")

# Originals are freed batch by batch while the model moves: at most this share of it exists twice.
_BATCH_SHARE = 20
_BATCH_BYTES = 1 << 28


class PagedModel:
    """The bindings of one model, and the ways in and out."""

    def __init__(
        self,
        model: nn.Module,
        mmu: Mmu,
        homes: Homes,
        host: HostArena,
        table: PageTable,
        *,
        page_size: int,
        init: Callable[[nn.Module], None] | None,
        gradients_need_homes: bool = True,
        look_at_heap: Callable[[], None] = lambda: None,
    ) -> None:
        """``look_at_heap`` is called where tensors have just let go of memory."""
        self.model = model
        self.bindings: dict[str, Binding] = {}
        self.small: list[nn.Parameter] = []
        # Values, and gradients, of parameters on their way out: an exception may come between any two lines.
        self._leaving: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        # Set where the whole training state fits the device: parameters stay ordinary (`pager.fitting`).
        self.fits = False
        self._mmu = mmu
        self._engine: Engine = mmu.engine
        self._homes = homes
        self._host = host
        self._table = table
        self._page_size = page_size
        self._init = init
        self._gradients_need_homes = gradients_need_homes
        self._look_at_heap = look_at_heap
        self._device = mmu.engine.device.torch_device
        mmu.replace = Replacing(mmu, homes, self._resize_checker).replace
        mmu.renew = self.renew
        mmu.undo_move = self.undo_move

    # -- in ----------------------------------------------------------------------------------------

    def take_in_model(self, parameters: Parameters) -> None:
        """Page all of the model's parameters; reserve host memory for their gradients."""
        self.small = [param for _, param in parameters.small]
        self._move_buffers(self._device)
        for _, param in parameters.small:
            _move(param, self._device)
        meta = {id(param) for _, param in parameters.paged + parameters.small if param.device.type == "meta"}
        if meta or any(b.device.type == "meta" for b in self.model.buffers()):
            self._initialise(parameters)
        for param in self.small:
            MANAGED_SMALL[param] = True  # a weak reference, which swapping a meta tensor would not survive
        self._take_in_batches([(name, p) for name, p in parameters.paged if type(p) is not PagedParameter])
        trainable = [b for b in self.bindings.values() if b.tensor.requires_grad]
        self._homes.reserve_host(
            [
                b.segment.num_bytes
                for b in trainable
                if self._gradients_need_homes and self._homes.planned("gradient", b.name) in (None, Home.HOST)
            ]
        )
        for binding in trainable:
            self._mmu.gradients.prepare(binding)

    def _take_in_batches(self, named: list[tuple[str, nn.Parameter]]) -> None:
        batch_bytes = max(sum(p.nbytes for _, p in named) // _BATCH_SHARE, _BATCH_BYTES)
        batch: list[tuple[str, nn.Parameter]] = []
        filled = 0
        for name, param in named:
            batch.append((name, param))
            filled += param.nbytes
            if filled >= batch_bytes:
                self._take_in_batch(batch)
                batch, filled = [], 0
        self._take_in_batch(batch)

    def _take_in_batch(self, batch: list[tuple[str, nn.Parameter]]) -> None:
        on_host = [
            span_elements(p.size(), p.stride()) * p.element_size()
            for name, p in batch
            if self._homes.planned("parameter", name) in (None, Home.HOST)
        ]
        self._homes.reserve_host(on_host)
        for name, param in batch:
            self.take_in_parameter(name, param)
        self._look_at_heap()

    def take_in_parameter(self, name: str, param: nn.Parameter) -> Binding:
        """Turn one ordinary parameter into a paged one, in place, keeping its values (none, if it is on
        meta).
        """
        segment = self.new_segment(
            name=name, kind="parameter", size=param.size(), stride=param.stride(), dtype=param.dtype
        )
        binding = Binding(self._mmu, segment, param, type(param))
        self._mmu.bind(binding)
        grad, param.grad = param.grad, None
        if param.device.type == "meta":
            # A meta parameter cannot take data of another device; swap the C++ tensors, the object stays.
            torch.utils.swap_tensors(param, nn.Parameter(binding.phantom, requires_grad=param.requires_grad))
        else:
            raw = values.storage_bytes(param.data, segment.size, segment.stride, segment.num_bytes)
            self._engine.store(segment, raw)
            del raw
            if int(self._table.home[segment.first_page]) == Home.DEVICE:
                self._engine.wire(segment)
        page_tensor(binding, PagedParameter)
        self.bindings[name] = binding
        if grad is not None:
            self._mmu.gradients.prepare(binding)
            self._mmu.gradients.set(binding, grad.to(self._device))
        return binding

    def take_in_late(self, name: str, param: nn.Parameter) -> None:
        """Manage a parameter that came into the model after ``manage()``."""
        num_bytes = span_elements(param.size(), param.stride()) * param.element_size()
        if self.fits or num_bytes < self._page_size:
            _move(param, self._device)
            MANAGED_SMALL[param] = True
            self.small.append(param)
            return
        unique = name
        while unique in self.bindings:
            unique += "'"
        self._mmu.gradients.prepare(self.take_in_parameter(unique, param))

    def replace(self, name: str, param: nn.Parameter) -> None:
        """Another object stands in a managed parameter's place: that one is managed, the old one ordinary."""
        old = self.bindings.pop(name, None)
        if old is not None:
            self._take_out_parameter(old, alias=False)
            for binding in (old.gradient, old):
                if binding is not None:
                    self.retire(binding)
        self.take_in_late(name, param)

    def renew(self, binding: Binding, value: torch.Tensor) -> None:
        """Give a paged tensor a segment of ``value``'s dtype and strides, with its values.

        A parameter's gradient keeps its own until it is assigned to (``model.half()`` converts it next); the
        optimizer's states keep theirs, as in torch.
        """
        old = binding.segment
        num_bytes = span_elements(value.size(), value.stride()) * value.element_size()
        # What is wired must not grow: streaming needs what is left.
        home = Home.HOST if num_bytes > old.num_bytes and self._is_wired(old) else None
        segment = self.new_segment(
            name=old.name,
            kind=old.kind,
            size=value.size(),
            stride=value.stride(),
            dtype=value.dtype,
            home=home,
        )
        raw = values.storage_bytes(value, segment.size, segment.stride, segment.num_bytes)
        self._mmu.aliases.are_held(binding)  # what is held of state dicts shows the old value from now on
        self._mmu.unfix(binding)
        self._engine.discard(old)  # views keep the old values; its frames are free for the new ones
        binding.rebind(segment)
        self._mmu.bind(binding)
        self._engine.store(segment, raw)
        if self._is_wired(segment):
            self._engine.wire(segment)
        self._retire(old, segment)

    def _is_wired(self, segment: Segment) -> bool:
        return int(self._table.home[segment.first_page]) == Home.DEVICE

    def retire(self, binding: Binding) -> None:
        """The paged tensor is no more: its segment has no value, its frames are free for others."""
        self._mmu.unfix(binding)
        self._retire(binding.segment)

    def _retire(self, segment: Segment, successor: Segment | None = None) -> None:
        self._engine.discard(segment)
        self._mmu.unbind(segment)
        aliases = self._mmu.aliases
        self._homes.retire(segment, successor, is_held=lambda: aliases.is_held(segment))

    def undo_move(self) -> None:
        """Bring small tensors and buffers back to the compute device after a refused ``model.to(device)``."""
        for param in self.small:
            _move(param, self._device)
        self._move_buffers(self._device)

    def holds_small(self, module: nn.Module) -> bool:
        """Whether a parameter of ``module`` is one of ours that stays ordinary, always on the device."""
        small = {id(param) for param in self.small}
        return any(id(param) in small for param in module.parameters())

    def find_new(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters of the model that are not managed."""
        small = {id(param) for param in self.small}
        return [
            (name, param)
            for name, param in self.model.named_parameters()
            if type(param) is not PagedParameter and id(param) not in small
        ]

    def new_segment(self, **layout: Any) -> Segment:
        """A segment with frames at its home; see `Homes.new_segment`."""
        segment = self._homes.new_segment(**layout)
        self._resize_checker()
        return segment

    def _resize_checker(self) -> None:
        checker = self._engine.device.checker
        if checker is not None:
            checker.resize("host", self._host.end_frame)

    def make_gradient(self, binding: Binding) -> Binding:
        """The binding of a parameter's gradient: same layout, no value yet."""
        own = binding.segment
        segment = self.new_segment(
            name=own.name,
            kind="gradient",
            size=own.size,
            stride=own.stride,
            dtype=own.dtype,
            later=not self._gradients_need_homes,
        )
        tensor = torch.empty(0, dtype=own.dtype, device=self._device)
        gradient = Binding(self._mmu, segment, tensor, torch.Tensor)
        self._mmu.bind(gradient)
        page_tensor(gradient, PagedTensor)
        return gradient

    def settle_gradient(self, gradient: Binding) -> None:
        """Have a home for a gradient that is to be kept."""
        self._homes.settle(gradient.segment)
        self._resize_checker()

    # -- meta --------------------------------------------------------------------------------------

    def _initialise(self, parameters: Parameters) -> None:
        """Give meta parameters values module by module, and page each module's before the next one's exist."""
        names = {id(param): name for name, param in parameters.paged}
        without: list[str] = []
        for path, module in self.model.named_modules():
            params = [p for p in module._parameters.values() if p is not None and p.device.type == "meta"]
            buffers = [key for key, b in module._buffers.items() if b is not None and b.device.type == "meta"]
            if not params and not buffers:
                continue
            reset = getattr(module, "reset_parameters", None)
            can_fill = self._init is not None or callable(reset)
            large = [p for p in params if id(p) in names]
            for param in params if can_fill else [p for p in params if id(p) not in names]:
                self._leave_meta(param)
            for key in buffers:
                meta = module._buffers[key]
                assert meta is not None
                module._buffers[key] = torch.zeros_like(meta, device=self._device)
            if not can_fill:
                without += [path] if params or buffers else []
                continue
            with torch.no_grad():
                if self._init is not None:
                    self._init(module)
                elif callable(reset):
                    reset()
            self._take_in_batches([(names[id(p)], p) for p in large])
        if without:
            logger.warning(
                "%d modules on meta have no reset_parameters(), such as %r: their tensors have no values until "
                "load_state_dict(), or pass init= to pager.manage()",
                len(without),
                without[0] or "the model itself",
            )

    def _leave_meta(self, param: nn.Parameter) -> None:
        """Memory for a meta parameter, filled with NaN so that a forgotten one shows."""
        fresh = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=self._device)
        if fresh.is_floating_point() or fresh.is_complex():
            fresh.fill_(float("nan"))
        torch.utils.swap_tensors(param, nn.Parameter(fresh, requires_grad=param.requires_grad))

    # -- out ---------------------------------------------------------------------------------------

    def take_out_model(self, value_of: Callable[[Binding], torch.Tensor]) -> None:
        """Ordinary parameters, gradients and buffers on the CPU; ``value_of`` gives a paged tensor's value there.

        After an exception a further call goes on with what is not out yet.
        """
        for name in list(self.bindings):
            binding = self.bindings[name]
            if name not in self._leaving:
                grad = self._mmu.gradients.get(binding)
                if isinstance(grad, PagedTensor):
                    grad = value_of(grad._pager)
                self._leaving[name] = value_of(binding), grad
            _make_ordinary(binding, *self._leaving[name])
            del self.bindings[name]
            del self._leaving[name]
        cpu = torch.device("cpu")
        for param in self.small:
            MANAGED_SMALL.pop(param, None)
            _move(param, cpu)
        self._move_buffers(cpu)

    def put_back(self, places: Mapping[str, torch.device], optimizers: Sequence[Optimizer]) -> None:
        """After a failed `manage`: ordinary tensors, by name, and optimizer states to the devices they came
        from.
        """
        for name, param in self.model.named_parameters():
            _move(param, places[name])
        for path, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                device = places.get(f"{path}.{key}" if path else key)
                if buffer is not None and device is not None and device.type != "meta":
                    module._buffers[key] = buffer.to(device)
        for optimizer in optimizers:
            for held, state in optimizer.state.items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.dim() > 0:
                        state[key] = value.to(held.device)

    def _take_out_parameter(self, binding: Binding, *, alias: bool = True) -> None:
        """An ordinary CPU tensor again, over its home (``alias``) or apart from it."""
        data = values.cpu_tensor(self._mmu, binding, alias=alias)
        grad = self._mmu.gradients.get(binding)
        if isinstance(grad, PagedTensor):
            grad = values.cpu_tensor(self._mmu, grad._pager, alias=alias)
        _make_ordinary(binding, data, grad)

    def _move_buffers(self, device: torch.device) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)


def _make_ordinary(binding: Binding, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Take the parameter out of pages. May be repeated after an exception."""
    if binding.hook is not None:
        binding.hook.remove()
    if isinstance(binding.tensor, PagedParameter):
        unpage_tensor(binding, data)
    if grad is not None:
        _set_gradient(binding.tensor, grad.to("cpu"))


def _set_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    """``param.grad = grad``, also where a graph from before a conversion has left one of the old dtype, which torch
    lets nobody assign.
    """
    data = param.data
    if data.dtype != grad.dtype:
        param.data = torch.empty_like(data, dtype=grad.dtype)
    param.grad = grad
    param.data = data


def _move(param: nn.Parameter, device: torch.device) -> None:
    """Move an ordinary parameter, and its gradient, in place."""
    if "meta" in (param.device.type, device.type):
        return
    with NoTorchFunction():
        param.data = param.data.to(device)
        if param.grad is not None:
            _set_gradient(param, param.grad.to(device))


def waits_for_values(model: nn.Module, init: Callable[[nn.Module], None] | None) -> bool:
    """Whether a parameter on meta has no way to get a value but ``load_state_dict``."""
    return init is None and any(
        param is not None
        and param.device.type == "meta"
        and not callable(getattr(module, "reset_parameters", None))
        for module in model.modules()
        for param in module._parameters.values()
    )
