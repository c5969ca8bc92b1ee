"""Everything behind one managed model: built by ``pager.manage``, taken apart by ``close``.

Building goes from what costs nothing to what cannot fail any more: checks, budgets and the bill first; then
the tiers; then tensor by tensor into pages, freeing each original before the next is copied, so that a model
never exists twice.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pager import bill, slabs
from pager.address_space import AddressSpace
from pager.closing import Closing
from pager.config import Config
from pager.device.base import make_device
from pager.device_budget import DeviceBudget
from pager.engine.engine import Engine
from pager.engine.pagerd import Pagerd
from pager.engine.transfer import Transfers
from pager.errors import ConfigError, PagerClosed
from pager.fitting import FittingModel
from pager.graph.access_trace import AccessRow
from pager.homes import Homes
from pager.host_cap import HostCap
from pager.host_limit import process_bytes
from pager.mmu import special as _special  # noqa: F401  registers the door's special calls
from pager.mmu.binding import Binding
from pager.mmu.gradient import Gradients
from pager.mmu.mmu import Mmu
from pager.mmu.parameter import PagedParameter
from pager.model_checks import Parameters, held_twice, sort_parameters
from pager.optim import stand_in
from pager.optim.adopted import AdoptedOptimizer
from pager.optim.backward import BackwardUpdates
from pager.optim.placement import updates_on_cpu
from pager.optim.probe import ExpectedStates, check_optimizers
from pager.optim.schedule import expected_rows
from pager.optim.torn import Torn
from pager.page_table import Home, PageTable
from pager.paging import PagedModel, waits_for_values
from pager.planning import Planner
from pager.policies.protocol import make_eviction_policy
from pager.residency import Residency
from pager.statistics import Counters, Statistics
from pager.step_boundary import Round, StepBoundary, fixed_distance
from pager.tiers.device_arena import DeviceArena
from pager.tiers.disk_probe import measured_shape
from pager.tiers.host_arena import HostArena
from pager.units import format_bytes

logger = logging.getLogger("pager")


class Runtime:
    """The runtime of one managed model."""

    def __init__(self, model: nn.Module, config: Config, optimizers: Sequence[Optimizer] = ()) -> None:
        self.model = model
        self.config = config  # that of the beginning; StepBoundary has the knobs in force
        self.closed = False
        self.counters = Counters()
        self.optimizers: list[AdoptedOptimizer] = []
        self.torn = Torn()
        self._round = Round()
        self._closing = Closing(self)
        parameters = sort_parameters(model, config.page_bytes)
        self.device = make_device(
            config.device,
            streams=config.checks.streams,  # type: ignore[arg-type]
            check_races=config.checks.happens_before,
            skip_wait=config.checks.skip_wait,
        )
        try:
            with contextlib.ExitStack() as undo:
                self._build(parameters, optimizers, undo)
                undo.pop_all()
            self._take_in(parameters, optimizers)
        except BaseException:
            self.device.close()
            raise

    # -- building ----------------------------------------------------------------------------------

    def _build(
        self, parameters: Parameters, optimizers: Sequence[Optimizer], undo: contextlib.ExitStack
    ) -> None:
        """The bill, the tiers and the engine; ``undo`` takes what is to be given back should this fail."""
        config = self.config
        page_size = config.page_bytes
        refusal = self._probe(parameters, optimizers)
        self.budget = DeviceBudget(
            self.device,
            config,
            small_bytes=bill.small_bytes(parameters, self.model, self._states),
            remedy=bill.smaller_pages(parameters, page_size),
        )
        undo.callback(self.budget.close)
        self.space = AddressSpace(page_size)
        self.table = PageTable()
        wanted = bill.training_state(parameters, self._states, gradients=config.update_at == "step")
        arena_bytes = self.budget.arena_bytes(None) // page_size * page_size
        self.fitting: FittingModel | None = None
        fits = bool(wanted) and not config.checks.page_all and bill.fits(wanted, page_size, arena_bytes)
        # A parameter that waits for load_state_dict() must be missed at its first use: only a paged one is.
        fits = fits and not waits_for_values(self.model, config.init)
        # A master is ours to keep: plain torch would step the bf16 values.
        fits = fits and config.master is None and config.update_at == "step"
        if fits:
            # All of it is as small as a tensor under a page is: ordinary, on the device, taken off the budget.
            small = Parameters(paged=[], small=[*parameters.paged, *parameters.small])
            self.budget.small_bytes = bill.small_bytes(small, self.model, self._states)
            wanted, arena_bytes = [], 0
        elif refusal is not None:
            raise refusal
        bill.check_largest(wanted, page_size, arena_bytes, self.budget)
        host_bytes, host_budget = bill.host_room(config, self.device, self.budget, parameters, self._states)
        self.host = HostArena(page_size, self.device, max(host_bytes, 0))
        undo.callback(self.host.close)
        self.homes = Homes(self.space, self.table, self.host, None, page_size)
        self.host_cap = HostCap(host_budget, self.homes, config.host_budget)
        disk_bytes = bill.disk_room(config)
        self.disk = self.homes.open_disk(config, disk_bytes)
        if self.disk is not None:
            undo.callback(self.disk.close)
        if self.homes.lacks_room(wanted, arena_bytes=arena_bytes, host_bytes=host_bytes):
            known = slabs.known_arena_bytes(self.model, parameters, config, self.budget, self.device)
            arena_bytes = max(known, arena_bytes)
        wires = bill.may_wire(config, wanted, self.budget)
        self.homes.plan(
            wanted, arena_bytes=arena_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes, wires=wires
        )
        bill.state_movement(wanted, self.homes)
        self.arena = DeviceArena(
            self.device, page_size, arena_bytes if self.device.is_simulated else self.budget.allocator_bytes
        )
        slab_frames = slabs.add_first(self.arena, config, arena_bytes, wanted)
        self.engine = self._make_engine()
        self.mmu = Mmu(self.engine)
        self.mmu.keeps_masters = config.master is not None
        self.paged = PagedModel(
            self.model,
            self.mmu,
            self.homes,
            self.host,
            self.table,
            page_size=page_size,
            init=config.init,
            gradients_need_homes=config.update_at == "step",
            look_at_heap=self.host_cap.look_at_heap,
        )
        self.mmu.gradients = Gradients(self.mmu, self.paged.make_gradient, self.paged.settle_gradient)
        self.planner = Planner(self.model, self.space, self.table, page_size)
        self.mmu.update_order = self.planner.update_order
        self.on_cpu = updates_on_cpu(config.update_on, self.mmu, self.torn, self.homes)
        self.residency = Residency(self.mmu, in_backward=config.update_at == "backward")
        self.in_backward = self.mmu.gradients.in_backward = self._updates_in_backward()
        self.pagerd = Pagerd(self.engine, fixed_distance(config), threaded=config.checks.daemon == "thread")
        self.boundary = StepBoundary(
            config,
            device=self.device,
            budget=self.budget,
            engine=self.engine,
            pagerd=self.pagerd,
            planner=self.planner,
            paged=self.paged,
            mmu=self.mmu,
            homes=self.homes,
            host_cap=self.host_cap,
            slab_frames=slab_frames,
        )
        if fits:
            self.paged.fits = True
            self.fitting = FittingModel(parameters, self.homes, self.device.torch_device, self._end_step)
            undo.callback(self.fitting.close)

    def _updates_in_backward(self) -> BackwardUpdates | None:
        if self.config.update_at == "step":
            return None
        return BackwardUpdates(
            self.mmu,
            self.torn,
            optimizers=lambda: [known for known in self.optimizers if known.alive],
            num_gradients=self.planner.num_gradients,
            on_cpu=self.on_cpu,
            room=self.residency,
        )

    def _probe(self, parameters: Parameters, optimizers: Sequence[Optimizer]) -> ConfigError | None:
        """What states there will be, for the bill; or why these optimizers cannot be paged."""
        names = {id(param): name for name, param in parameters.paged}
        self._states: dict[int, ExpectedStates] = {}
        try:
            master = self.config.master is not None
            if master:
                self._states = {
                    id(param): bill.MASTER_STATES
                    for _, param in (*parameters.paged, *parameters.small)
                    if param.dtype == torch.bfloat16
                }
            self._states |= check_optimizers(optimizers, names, self.device.torch_device, master=master)
        except ConfigError as error:
            return error
        return None

    def _take_in(self, parameters: Parameters, optimizers: Sequence[Optimizer]) -> None:
        """The model's and the optimizers' tensors go into pages. On failure they are as before, where they were."""
        places = [
            (name, tensor.device)
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
        ]
        everything = Parameters(paged=[], small=[*parameters.paged, *parameters.small])
        try:
            self.paged.take_in_model(parameters if self.fitting is None else everything)
            self._capture_example()
            if self.fitting is not None:
                self.fitting.adopt(optimizers)
                self.counters.sample_resident(self.fitting.num_bytes)
            else:
                stand_in.watch(self.mmu, self.adopt)
                for optimizer in optimizers:
                    self.adopt(optimizer)
        except BaseException:
            self.close()
            self.paged.put_back(dict(places), optimizers)
            raise
        report = self.homes.report(bill.training_state(parameters, self._states))
        if self.fitting is not None:
            report = {"device": self.fitting.num_bytes, "host": 0, "disk": 0}
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

    def _make_engine(self) -> Engine:
        shape, cap = measured_shape(self.disk), self.host_cap
        transfers = Transfers(
            device=self.device,
            table=self.table,
            arena=self.arena,
            host=self.host,
            disk=self.disk,
            counters=self.counters,
            ring_shape=shape,
            # As much again as the ring, or what the budget leaves: a model whose disk fails is to be saved.
            spare_room=lambda: max(shape.num_bytes, cap.budget_bytes - process_bytes()),
            disk_inline=self.config.checks.streams if self.config.checks.daemon == "inline" else None,
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

    # -- the plan ----------------------------------------------------------------------------------

    def _capture_example(self) -> None:
        if self.config.example_inputs is None:
            return
        self.capture(*self.config.example_call())
        if self.planner.wrong_inputs is not None:
            raise ConfigError(
                f"example_inputs are no inputs of {type(self.model).__name__}, whose forward() says: "
                f"{self.planner.wrong_inputs}. Give what the model is called with in training, or leave them out"
            )

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan from one step without data on these inputs."""
        trace = self.planner.capture(
            *self._managed(),
            args,
            kwargs,
            device=self.device.torch_device,
            shared=[self, *filter(None, [self.model.__dict__.get("pager")])],
        )
        if trace is not None:
            if self.fitting is None:
                slabs.check_operations(self.planner, self.table, self.arena, self.budget)
            with self.engine.lock:
                self.engine.timeline.follow(trace)
            self._plan_update()
        if self.fitting is None and not self.device.is_simulated:
            self.residency.activation_bytes = self.planner.peak_activation_bytes or 0
            slabs.fit_activations(
                self.boundary, self.planner, self.table, self.arena, self.budget, lends=bool(self.in_backward)
            )
        if self.optimizers:
            self._share_out()

    def _managed(self) -> tuple[dict[nn.Parameter, int], dict[int, int]]:
        """The segment of each managed parameter, and the gradient's segment by the parameter's."""
        if self.fitting is not None:
            return self.fitting.segment_of, self.fitting.gradient_of
        bindings = self.paged.bindings.values()
        segments: dict[nn.Parameter, int] = {b.tensor: b.segment.index for b in bindings}  # type: ignore[misc]
        return segments, {
            b.segment.index: b.gradient.segment.index for b in bindings if b.gradient is not None
        }

    def _plan_update(self) -> None:
        """Add the accesses of the known optimizers' steps to a captured trace."""
        if self.planner.trace is None:
            return
        rows: list[AccessRow] = self.fitting.expected_rows() if self.fitting is not None else []
        for adopted in [known for known in self.optimizers if known.alive]:
            first = rows[-1].tick + 1 if rows else 0
            rows += [row._replace(tick=row.tick + first) for row in expected_rows(adopted)]
        trace = self.planner.with_update(rows) if rows else None
        if trace is not None:
            with self.engine.lock:
                self.engine.timeline.follow(trace, self.engine.timeline.micro_batches)

    def _share_out(self) -> None:
        """Set slots aside and choose what stays on the device, for the arena as it is."""
        if self.fitting is not None or (self.planner.trace is None and not self.optimizers):
            return
        for adopted in self.optimizers:
            if adopted.alive:
                self.residency.needs_slots(max(map(adopted.slot_bytes, adopted.bindings()), default=0))
        self.residency.choose(self.paged.bindings.values(), self.optimizers)

    # -- optimizers --------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> AdoptedOptimizer:
        """The adopted form of a user's optimizer, made at first sight. Raises ConfigError where there can be none."""
        for known in self.optimizers:
            if known.alive and known.optimizer is optimizer:
                return known
        self._forget_dead_optimizers()
        shared = held_twice(optimizer, self.optimizers)
        if shared is not None:
            for known in self.optimizers:
                known.finish()  # a step that is not over keeps its optimizer
            gc.collect()  # an old one that a scheduler refers to dies no sooner
            self._forget_dead_optimizers()
            shared = held_twice(optimizer, self.optimizers)
        if shared is not None:
            raise ConfigError(
                f"two optimizers hold {shared}; several optimizers over one managed model must have "
                "disjoint parameters. Delete the old one first."
            )
        adopted = AdoptedOptimizer(
            optimizer,
            self.mmu,
            new_segment=self.paged.new_segment,
            plan_states=self.homes.plan_states,
            retire=self.paged.retire,
            end_step=self._optimizer_stepped,
            torn=self.torn,
            master=self.config.master is not None,
            in_backward=self.in_backward,
            on_cpu=self.on_cpu,
        )
        self.optimizers.append(adopted)
        self.planner.forget_plan()
        self._plan_update()
        if self.planner.trace is not None:
            self._share_out()
        return adopted

    def _forget_dead_optimizers(self) -> None:
        for known in self.optimizers:
            if not known.alive:
                known.retire_states()
        self.optimizers = [known for known in self.optimizers if known.alive]

    def _optimizer_stepped(self, adopted: AdoptedOptimizer) -> None:
        if self._round.is_over(adopted, (known for known in self.optimizers if known.alive)):
            self._end_step()

    def _end_step(self) -> None:
        self.mmu.end_step()
        self.boundary.cross()
        self._share_out()
        if self.in_backward is not None:
            self.in_backward.end_step()
        elif self.on_cpu is not None:
            self.on_cpu.end_step(known for known in self.optimizers if known.alive)
        if self.fitting is not None:
            self.counters.sample_resident(self.fitting.num_bytes)
        self.boundary.move_homes()

    # -- questions ---------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """What happened so far."""
        with self.engine.lock:
            fields: dict[str, Any] = self.counters.as_fields()
            fields["deviations"] = self.engine.timeline.deviations
        wired = int((self.table.home[: self.table.num_pages] == Home.DEVICE).sum()) * self.arena.page_size
        unpaged = self.fitting.num_bytes if self.fitting is not None else 0
        return Statistics(
            **fields,
            resident_bytes=self.arena.resident_bytes + unpaged,
            peak_resident_bytes=self.arena.peak_resident_bytes + unpaged,
            peak_device_process_bytes=self.budget.peak_process_bytes(),
            wired_bytes=wired,
            device_budget_bytes=self.budget.limit_bytes,
            host_bytes=self.host.reserved_bytes,
            peak_host_bytes=self.host.peak_reserved_bytes,
            host_budget_bytes=self.host_cap.budget_bytes,
            disk_bytes=self.disk.used_bytes if self.disk is not None else 0,
            peak_disk_bytes=self.disk.peak_bytes if self.disk is not None else 0,
            disk_budget_bytes=self.disk.budget_bytes if self.disk is not None else 0,
        )

    def page_bytes_on_device(self) -> int:
        """What the device has for pages: the arena, or the budget where nothing is paged."""
        return self.arena.capacity_bytes if self.fitting is None else self.budget.limit_bytes

    def check_open(self) -> None:
        """Raise PagerClosed after close()."""
        if self.closed:
            raise PagerClosed("this handle is closed; call pager.manage(model) for a new one")

    def manages_parameter_of(self, module: nn.Module) -> bool:
        """Whether ``module`` has one of the managed parameters, paged or not."""
        managed, _ = self._managed()
        return any(param in managed for param in module.parameters())

    def bindings_of(self, module: nn.Module) -> list[Binding]:
        """The paged parameters of ``module``."""
        return [
            p._pager for p in module.parameters() if type(p) is PagedParameter and p._pager.mmu is self.mmu
        ]

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Ordinary parameters, gradients and optimizer states on the CPU again; see `pager.closing`."""
        self._closing.close()
