"""Everything behind one managed model: built by ``pager.manage``, taken apart by ``close``.

Building goes from what costs nothing to what cannot fail any more: checks, budgets and the bill first; then the tiers; then
tensor by tensor into pages, freeing each original before the next is copied, so that a model never exists twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from pager.address_space import AddressSpace, Segment, span_elements
from pager.config import Config, resolve_budget
from pager.device.base import Device, make_device
from pager.device_budget import DeviceBudget
from pager.engine.engine import Engine
from pager.engine.pagerd import Pagerd
from pager.engine.transfer import EXTENT_BYTES, Transfers
from pager.errors import BudgetError, ConfigError, PagerClosed
from pager.graph.access_trace import Phase
from pager.homes import Homes, Wanted
from pager.host_limit import host_limit_bytes, process_bytes
from pager.mmu import special as _special  # noqa: F401  registers the door's special calls
from pager.mmu import values
from pager.mmu.binding import Binding, NoTorchFunction
from pager.mmu.gradient import Gradients
from pager.mmu.mmu import Mmu
from pager.mmu.parameter import PagedParameter, PagedTensor, page_tensor, unpage_tensor
from pager.model_checks import Parameters, sort_parameters
from pager.optim import stand_in
from pager.optim.adopted import AdoptedOptimizer
from pager.page_table import Home, PageTable
from pager.planning import Planner
from pager.policies.prefetch import auto_distance
from pager.policies.protocol import make_eviction_policy
from pager.statistics import Counters, Statistics
from pager.tiers.device_arena import DeviceArena
from pager.tiers.disk_file import DiskFile
from pager.tiers.host_arena import HostArena
from pager.units import ceil_div, format_bytes

logger = logging.getLogger("pager")

# Slabs of a CUDA arena: giving one back frees an eighth, while each is large enough for any operation's tensors.
_NUM_SLABS = 8
# States per parameter the bill assumes until the optimizer is known: AdamW's two.
_ASSUMED_STATES = 2
# Originals are freed batch by batch while the model moves: at most this share of it exists twice.
_BATCH_SHARE = 20
# Knobs that may change while the model trains.
_LIVE_KNOBS = ("prefetch_distance", "eviction")


class Runtime:
    """The runtime of one managed model."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        self.model = model
        self.config = config
        self.closed = False
        self.counters = Counters()
        self.optimizers: list[AdoptedOptimizer] = []
        self._stepped: set[int] = set()
        self._pending_knobs: dict[str, Any] = {}
        self._step_started = time.perf_counter()
        self._peak_host_bytes = 0
        parameters = sort_parameters(model, config.page_bytes)
        self.device = make_device(
            config.device,
            streams=config.checks.streams,  # type: ignore[arg-type]
            check_races=config.checks.happens_before,
            skip_wait=config.checks.skip_wait,
        )
        try:
            self._build(parameters)
        except BaseException:
            self.device.close()
            raise

    # -- building ------------------------------------------------------------------------------------------------------------

    def _build(self, parameters: Parameters) -> None:
        config = self.config
        page_size = config.page_bytes
        self.budget = DeviceBudget(self.device, config, small_bytes=_small_bytes(parameters, self.model))
        self.space = AddressSpace(page_size)
        self.table = PageTable()
        wanted = _wanted(parameters)
        arena_bytes = self.budget.arena_bytes(None) // page_size * page_size
        self._check_arena(wanted, arena_bytes)
        host_bytes, self.host_budget_bytes = self._host_room(parameters)
        self.host = HostArena(page_size, self.device, max(host_bytes, 0))
        self.homes = Homes(self.space, self.table, self.host, None, page_size)
        disk_bytes = self._disk_room()
        self.homes.plan(wanted, arena_bytes=arena_bytes, host_bytes=max(host_bytes, 0), disk_bytes=disk_bytes)
        self.disk = self._open_disk(self.homes.disk_bytes_planned(wanted))
        self.arena = DeviceArena(
            self.device, page_size, arena_bytes if self.device.is_simulated else self.budget.allocator_bytes
        )
        self._add_slabs(arena_bytes)
        self.engine = self._make_engine()
        self.mmu = Mmu(self.engine)
        self.mmu.gradients = Gradients(self.mmu, self._make_gradient)
        self.planner = Planner(self.model, self.space.segments, self.table, page_size)
        self.mmu.update_order = self.planner.update_order
        self.bindings: dict[str, Binding] = {}
        self.small: list[nn.Parameter] = [param for _, param in parameters.small]
        self.pagerd = Pagerd(self.engine, self._distance(), threaded=config.checks.daemon == "thread")
        try:
            self._adopt_parameters(parameters)
            self._capture_example()
        except BaseException:
            self._take_back()
            raise
        stand_in.watch(self.mmu, self.adopt)
        report = self.homes.report(wanted)
        logger.info(
            "managing %s: %s on the device, %s in host memory, %s on disk; device budget %s, of it %s for pages; "
            "eviction %s; plan %s",
            type(self.model).__name__,
            *(format_bytes(report[tier]) for tier in ("device", "host", "disk")),
            format_bytes(self.budget.limit_bytes),
            format_bytes(self.arena.capacity_bytes),
            self.engine.policy.name,
            self.planner.way,
        )

    def _check_arena(self, wanted: list[Wanted], arena_bytes: int) -> None:
        if not wanted:
            return
        page_size = self.config.page_bytes
        largest = max(wanted, key=lambda item: item.num_bytes)
        need = ceil_div(largest.num_bytes, page_size) * page_size
        if need > arena_bytes:
            raise BudgetError(
                f"pager: every operation on {largest.name} needs its {format_bytes(need)} on the device in one piece, but "
                f"of device_budget = {format_bytes(self.budget.limit_bytes)} only {format_bytes(arena_bytes)} are left "
                f"for pages. Raise device_budget by at least {format_bytes(need - arena_bytes)}."
            )

    def _host_room(self, parameters: Parameters) -> tuple[int, int]:
        """Bytes of host memory for homes, and the host budget."""
        limit = host_limit_bytes()
        budget = resolve_budget(self.config.host_budget, limit, name="host_budget")
        # What the model holds on the CPU now will be freed as it moves into pages.
        on_cpu = sum(param.nbytes for _, param in parameters.paged if param.device.type == "cpu")
        slabs = self.budget.limit_bytes if self.device.is_simulated else 0
        if self.device.is_simulated and self.config.device_budget is None:
            slabs = min(slabs, sum(item.num_bytes for item in _wanted(parameters)))
        return budget - max(process_bytes() - on_cpu, 0) - slabs, budget

    def _disk_room(self) -> int:
        config = self.config
        if config.disk is None:
            return 0
        if config.disk_budget is not None:
            return resolve_budget(config.disk_budget, 0, name="disk_budget")
        import shutil

        try:
            return shutil.disk_usage(config.disk).free * 9 // 10
        except OSError as error:
            raise ConfigError(f"disk={str(config.disk)!r}: {error.strerror}; give an existing folder") from error

    def _open_disk(self, planned_bytes: int) -> DiskFile | None:
        if self.config.disk is None or planned_bytes == 0:
            return None
        page_size = self.config.page_bytes
        disk = DiskFile(self.config.disk, page_size, planned_bytes // page_size, checksum=self.config.checks.happens_before)
        self.homes.use_disk(disk)
        return disk

    def _add_slabs(self, arena_bytes: int) -> None:
        page_size = self.config.page_bytes
        if self.device.is_simulated:
            state = sum(item.num_bytes for item in _wanted(sort_parameters(self.model, page_size)))
            frames = arena_bytes // page_size
            if self.config.device_budget is None:
                # Nobody set a budget: no more than the whole state could ever use, with room for its page ends.
                frames = min(frames, 2 * ceil_div(state, page_size) + 64)
            if frames:
                self.arena.add_slab(frames)
            return
        largest = max((item.num_bytes for item in _wanted(sort_parameters(self.model, page_size))), default=0)
        num_slabs = max(min(_NUM_SLABS, arena_bytes // max(4 * largest, 1)), 1)
        self._slab_frames = arena_bytes // num_slabs // page_size
        for _ in range(num_slabs):
            if self._slab_frames:
                self.arena.add_slab(self._slab_frames)

    def _make_engine(self) -> Engine:
        transfers = Transfers(
            device=self.device,
            table=self.table,
            arena=self.arena,
            host=self.host,
            disk=self.disk,
            counters=self.counters,
        )
        return Engine(
            device=self.device,
            space=self.space,
            table=self.table,
            arena=self.arena,
            transfers=transfers,
            policy=make_eviction_policy(self.config.eviction),
            counters=self.counters,
            poison=self.config.checks.poison,
        )

    def _distance(self) -> int:
        knob = self.config.prefetch_distance
        return 4 if knob == "auto" else int(knob)

    def _adopt_parameters(self, parameters: Parameters) -> None:
        self._initialise_small_and_buffers(parameters)
        batch_bytes = max(sum(p.nbytes for _, p in parameters.paged) // _BATCH_SHARE, 1 << 28)
        batch: list[tuple[str, nn.Parameter]] = []
        filled = 0
        for name, param in parameters.paged:
            batch.append((name, param))
            filled += param.nbytes
            if filled >= batch_bytes:
                self._adopt_batch(batch)
                batch, filled = [], 0
        self._adopt_batch(batch)
        trainable = [b for b in self.bindings.values() if b.tensor.requires_grad]
        self.homes.reserve_host([b.segment.num_bytes for b in trainable])
        for binding in trainable:
            self.mmu.gradients.prepare(binding)
        self._host_view_for_checker()

    def _adopt_batch(self, batch: list[tuple[str, nn.Parameter]]) -> None:
        on_host = [
            span_elements(p.size(), p.stride()) * p.element_size()
            for name, p in batch
            if self.homes.planned("parameter", name) in (None, Home.HOST)
        ]
        if on_host:
            self.homes.reserve_host(on_host)
            self._host_view_for_checker()
        for name, param in batch:
            self.adopt_parameter(name, param)

    def _host_view_for_checker(self) -> None:
        if self.device.checker is not None:
            self.device.checker.resize("host", self.host.num_frames)

    def adopt_parameter(self, name: str, param: nn.Parameter) -> Binding:
        """Turn one ordinary parameter into a paged one, in place, keeping its values (none, if it is on meta)."""
        segment = self.new_segment(
            name=name, kind="parameter", size=param.size(), stride=param.stride(), dtype=param.dtype
        )
        binding = Binding(self.mmu, segment, param, type(param))
        self.mmu.bind(binding)
        if param.device.type != "meta":
            data = param.data
            self.engine.store(segment, values.storage_bytes(data, segment.size, segment.stride, segment.num_bytes))
            if self.table.home[segment.first_page] == Home.DEVICE:
                self.engine.wire(segment)
        grad, param.grad = param.grad, None
        if param.device.type == "meta":
            _leave_meta(param, binding)
        page_tensor(binding, PagedParameter)
        self.bindings[name] = binding
        if grad is not None:
            self.mmu.gradients.prepare(binding)
            self.mmu.gradients.set(binding, grad.to(self.device.torch_device))
        return binding

    def new_segment(self, **layout: Any) -> Segment:
        """A segment with a home; see `Homes.new_segment`."""
        segment = self.homes.new_segment(**layout)
        self._host_view_for_checker()
        self._peak_host_bytes = max(self._peak_host_bytes, self.host.used_bytes)
        return segment

    def _make_gradient(self, binding: Binding) -> Binding:
        own = binding.segment
        segment = self.new_segment(
            name=own.name, kind="gradient", size=own.size, stride=own.stride, dtype=own.dtype
        )
        tensor = torch.empty(0, dtype=own.dtype, device=self.device.torch_device)
        gradient = Binding(self.mmu, segment, tensor, torch.Tensor)
        self.mmu.bind(gradient)
        page_tensor(gradient, PagedTensor)
        return gradient

    def _initialise_small_and_buffers(self, parameters: Parameters) -> None:
        """Small tensors and buffers become ordinary tensors on the compute device."""
        device = self.device.torch_device
        for _, param in parameters.small:
            if param.device.type != "meta":
                param.data = param.data.to(device)
                if param.grad is not None:
                    param.grad = param.grad.to(device)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)

    # -- the plan ------------------------------------------------------------------------------------------------------------

    def _capture_example(self) -> None:
        example = self.config.example_inputs
        if example is None:
            return
        args, kwargs = ((), dict(example)) if isinstance(example, dict) else (tuple(example), {})
        self.capture(args, kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan from one step without data on these inputs."""
        trace = self.planner.capture(
            list(self.bindings.values()),
            args,
            kwargs,
            device=self.device.torch_device,
            shared=[self, *filter(None, [self.model.__dict__.get("pager")])],
        )
        if trace is not None:
            self._check_largest_tick()
            with self.engine.lock:
                self.engine.timeline.follow(trace)
        self._fit_arena()

    def _check_largest_tick(self) -> None:
        need, names = self.planner.largest_tick()
        have = self.arena.capacity_bytes if self.device.is_simulated else self.budget.arena_bytes(
            self.planner.peak_activation_bytes
        )
        if need > have:
            raise BudgetError(
                f"pager: one operation needs {', '.join(names[:6])} on the device together, {format_bytes(need)}; of "
                f"device_budget = {format_bytes(self.budget.limit_bytes)} only {format_bytes(have)} are left for pages. "
                f"Raise device_budget by at least {format_bytes(need - have)}."
            )

    def _fit_arena(self) -> None:
        """Now that activations are known: as many slabs as they leave room for."""
        activations = self.planner.peak_activation_bytes
        if self.device.is_simulated or activations is None:
            return
        largest = max((b.segment.num_bytes for b in self.bindings.values()), default=0)
        # Beside activations: a gradient on its way into its pages, and the staged copies of a unit of the update.
        target = self.budget.arena_bytes(activations + 2 * largest + 4 * EXTENT_BYTES)
        while self._slab_frames and self.arena.capacity_bytes + self._slab_frames * self.arena.page_size <= target:
            self.arena.add_slab(self._slab_frames)

    # -- optimizers ----------------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> AdoptedOptimizer:
        """The adopted form of a user's optimizer, made at first sight. Raises ConfigError where that cannot be."""
        self.optimizers = [known for known in self.optimizers if known.alive]
        for known in self.optimizers:
            if known.optimizer is optimizer:
                return known
        taken = {id(b) for known in self.optimizers for b in known.bindings()}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if type(param) is PagedParameter and id(param._pager) in taken:
                    raise ConfigError(
                        f"two optimizers hold {param._pager.name}; several optimizers over one managed model must have "
                        "disjoint parameters. Delete the old one first."
                    )
        adopted = AdoptedOptimizer(
            optimizer,
            self.mmu,
            new_segment=self.new_segment,
            reserve=self.homes.reserve_host,
            end_step=self._optimizer_stepped,
        )
        self.optimizers.append(adopted)
        self.planner.forget_plan()
        return adopted

    def _optimizer_stepped(self, adopted: AdoptedOptimizer) -> None:
        if id(adopted) in self._stepped:
            self._stepped.clear()
        self._stepped.add(id(adopted))
        if all(id(known) in self._stepped for known in self.optimizers if known.alive):
            self._stepped.clear()
            self._end_step()

    def _end_step(self) -> None:
        """The step boundary: knobs, new parameters, trace and arena change here and nowhere else."""
        self.counters.num_steps += 1
        self.counters.stall_seconds += self.device.drain_stall_seconds()
        self.mmu.end_step()
        self._apply_knobs()
        self._adopt_new_parameters()
        engine = self.engine
        with engine.lock:
            self.counters.deviations = engine.timeline.deviations
            renew = engine.timeline.end_step()
            rows = engine.timeline.take_recording()
            trace = self.planner.trace
            if renew:
                engine.timeline.follow(self.planner.record(rows))
            elif trace is not None and not trace.num_update_rows:
                update = self.planner.with_update([row for row in rows if row.phase == Phase.UPDATE])
                if update is not None:
                    engine.timeline.follow(update, engine.timeline.micro_batches)
        self._adapt_arena()
        self._adapt_distance()

    def _adapt_arena(self) -> None:
        if self.device.is_simulated:
            return
        spare = self.budget.spare_bytes()
        slab_bytes = self._slab_frames * self.arena.page_size
        if spare < 0 and self.arena.num_slabs > 1:
            index = self.arena.num_slabs - 1
            self.pagerd.pause()
            try:
                self.engine.drain()
                runs = [run for run in self.arena.slab_owners(index)]
                if all(not run.wired and not run.pins for run in runs) and self.engine.reclaimer.evict(runs):
                    self.arena.remove_slab(index)
                    self.device.release_cached_memory()
                    logger.info("device memory was short: the arena now has %s", format_bytes(self.arena.capacity_bytes))
            finally:
                self.pagerd.resume()
        elif slab_bytes and spare >= slab_bytes and self.arena.capacity_bytes < self._state_bytes():
            self.device.release_cached_memory()
            self.arena.add_slab(self._slab_frames)

    def _state_bytes(self) -> int:
        return sum(segment.num_pages for segment in self.space.segments) * self.arena.page_size

    def _adapt_distance(self) -> None:
        now = time.perf_counter()
        seconds = now - self._step_started
        self._step_started = now
        if self.config.prefetch_distance != "auto" or not self.counters.page_in_bytes:
            return
        trace = self.engine.timeline.trace
        if trace is None:
            return
        extents = max(int(np.sum(-(-trace.num_pages.astype(np.int64) * self.arena.page_size // EXTENT_BYTES))), 1)
        self.pagerd.set_distance(
            auto_distance(
                self._link_bandwidth(),
                seconds / extents,
                EXTENT_BYTES,
                spare_bytes=self.arena.capacity_bytes // 2,
            )
        )

    def _link_bandwidth(self) -> float:
        """Bytes per second from host to device, measured once with copies of one extent."""
        if not hasattr(self, "_bandwidth"):
            self._bandwidth = self.device.measure_bandwidth(EXTENT_BYTES)
            self.pagerd.bandwidth_bytes_per_second = self._bandwidth
        return self._bandwidth

    def _apply_knobs(self) -> None:
        knobs, self._pending_knobs = self._pending_knobs, {}
        if not knobs:
            return
        self.config = self.config.replace(**knobs)
        if "prefetch_distance" in knobs:
            self.pagerd.set_distance(self._distance())
        if "eviction" in knobs:
            with self.engine.lock:
                self.engine.policy = make_eviction_policy(self.config.eviction)
                self.engine.policy.resize(len(self.space.segments))
            self.planner.forget_plan()

    def set(self, **knobs: Any) -> None:
        """Change knobs at the next step boundary. Raises at once for values that cannot work."""
        fixed = sorted(set(knobs) - set(_LIVE_KNOBS))
        self.config.replace(**knobs)
        if fixed:
            raise ConfigError(
                f"{', '.join(fixed)} cannot change while the model is managed (only {', '.join(_LIVE_KNOBS)}); close() it and "
                "manage it again"
            )
        self._pending_knobs.update(knobs)

    def _adopt_new_parameters(self) -> None:
        """Parameters that came into the model after ``manage()`` are managed from this step boundary on."""
        known = {id(binding.tensor) for binding in self.bindings.values()} | {id(param) for param in self.small}
        for name, param in self.model.named_parameters():
            if id(param) in known or type(param) is PagedParameter:
                continue
            self.take_in(name, param)

    def take_in(self, name: str, param: nn.Parameter) -> None:
        """Manage one parameter that is not managed yet."""
        if span_elements(param.size(), param.stride()) * param.element_size() < self.config.page_bytes:
            param.data = param.data.to(self.device.torch_device)
            self.small.append(param)
            return
        unique = name
        while unique in self.bindings:
            unique += "'"
        self.mmu.gradients.prepare(self.adopt_parameter(unique, param))
        self.planner.forget_plan()

    def replace_parameter(self, name: str, param: nn.Parameter) -> None:
        """``load_state_dict(assign=True)`` put another object in a managed parameter's place: manage that one."""
        old = self.bindings.pop(name, None)
        if old is not None and type(old.tensor) is PagedParameter:
            self._take_back_parameter(old)
        self.take_in(name, param)

    # -- questions -----------------------------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """What happened so far."""
        with self.engine.lock:
            fields: dict[str, Any] = self.counters.as_fields()
            fields["deviations"] = self.engine.timeline.deviations
        wired = int((self.table.home[: self.table.num_pages] == Home.DEVICE).sum()) * self.arena.page_size
        return Statistics(
            **fields,
            resident_bytes=self.arena.resident_bytes,
            peak_resident_bytes=self.arena.peak_resident_bytes,
            wired_bytes=wired,
            device_budget_bytes=self.budget.limit_bytes,
            host_bytes=self.host.used_bytes,
            peak_host_bytes=self.host.peak_bytes,
            host_budget_bytes=self.host_budget_bytes,
            disk_bytes=self.disk.used_bytes if self.disk is not None else 0,
            peak_disk_bytes=self.disk.peak_bytes if self.disk is not None else 0,
            disk_budget_bytes=self.disk.budget_bytes if self.disk is not None else 0,
        )

    def check_open(self) -> None:
        """Raise PagerClosed after close()."""
        if self.closed:
            raise PagerClosed("this handle is closed; call pager.manage(model) for a new one")

    def bindings_of(self, module: nn.Module) -> list[Binding]:
        """The paged parameters of ``module``."""
        return [p._pager for p in module.parameters() if type(p) is PagedParameter and p._pager.mmu is self.mmu]

    # -- the end -------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ordinary parameters, gradients and optimizer states on the CPU again. Idempotent."""
        if self.closed:
            return
        for adopted in self.optimizers:
            if adopted.alive:
                adopted.finish()
        self.pagerd.close()
        self.engine.raise_failure()
        self.engine.drain()
        self._take_back()

    def _take_back(self) -> None:
        self.closed = True
        stand_in.unwatch(self.mmu)
        self.pagerd.close()
        cpu = torch.device("cpu")
        for adopted in self.optimizers:
            if adopted.alive:
                adopted.close(lambda state: values.cpu_tensor(self.mmu, state, alias=True))
        for binding in self.bindings.values():
            self._take_back_parameter(binding)
        self.mmu.closed = True
        for param in self.small:
            with NoTorchFunction():
                param.data = param.data.to(cpu)
                if param.grad is not None:
                    param.grad = param.grad.to(cpu)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(cpu)
        self.mmu.end_step()
        self.engine.drain()
        self.budget.close()
        self.device.h2d.synchronize()
        self.device.d2h.synchronize()
        self.host.close()
        if self.disk is not None:
            self.disk.close()
        self.arena.close()
        self.device.close()

    def _take_back_parameter(self, binding: Binding) -> None:
        data = values.cpu_tensor(self.mmu, binding, alias=True)
        grad = self.mmu.gradients.get(binding)
        if isinstance(grad, PagedTensor):
            grad = values.cpu_tensor(self.mmu, grad._pager, alias=True)
        if binding.hook is not None:
            binding.hook.remove()
        unpage_tensor(binding, data)
        if grad is not None:
            binding.tensor.grad = grad


def _leave_meta(param: nn.Parameter, binding: Binding) -> None:
    """A meta parameter cannot take data of another device in place; swap the C++ tensors of the two."""
    fresh = nn.Parameter(binding.phantom, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, fresh)


def _wanted(parameters: Parameters) -> list[Wanted]:
    """The tensors of the training state that will be paged, assuming AdamW's states."""
    wanted: list[Wanted] = []
    trainable = [(name, p) for name, p in parameters.paged if p.requires_grad]
    for name, param in parameters.paged:
        wanted.append(Wanted("parameter", name, _span_bytes(param)))
    for name, param in trainable:
        wanted.append(Wanted("gradient", name, _span_bytes(param)))
    for name, param in trainable:
        wanted += [Wanted("state", f"{name}.state{i}", _span_bytes(param)) for i in range(_ASSUMED_STATES)]
    return wanted


def _span_bytes(param: nn.Parameter) -> int:
    return span_elements(param.size(), param.stride()) * param.element_size()


def _small_bytes(parameters: Parameters, model: nn.Module) -> int:
    """Device bytes of small tensors with gradients and states, and of buffers."""
    small = sum(p.nbytes * (2 + _ASSUMED_STATES if p.requires_grad else 1) for _, p in parameters.small)
    return small + sum(buffer.nbytes for buffer in model.buffers())


def iterate_optimizers(optimizer: Any) -> Iterable[Optimizer]:
    """The optimizers in what the user passed: None, one, or several."""
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for item in found:
        if not isinstance(item, Optimizer):
            raise TypeError(f"optimizer is a {type(item).__name__}; expected a torch.optim.Optimizer, or a list of them")
    return found

