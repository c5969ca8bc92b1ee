"""Short programs, each of which goes wrong if one particular wait, pin or mark of the runtime is left out.

Each takes ``skip``, the waits to leave out (`sites.skip_only`), and raises `RaceError` from the happens-before
checker or `WrongBytes` where the numbers differ. With nothing left out each of them passes.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import pager
from pager.config import Checks
from pager.device.simulated import SimulatedDevice, SimulatedStream
from pager.engine.staging import Range
from pager.errors import TierIOError
from pager.optim.update_stream import UpdateStream
from pager.page_table import Home
from pager.residency import Residency
from pager.tiers.adaptors import Fault
from tests.engine_rig import PAGE, Bytes, make_filled
from tests.models import BUILDERS, Case

Skip = Callable[[Any, Any], bool]
Scenario = Callable[[Skip, Path], None]


def handle_of(model: nn.Module) -> pager.Handle:
    """The handle of a managed model."""
    handle = model.pager
    assert isinstance(handle, pager.Handle)
    return handle


class WrongBytes(AssertionError):
    """A value read is not the value written."""


def check_bytes(found: Bytes, expected: Bytes, what: str) -> None:
    """WrongBytes unless the two are equal."""
    if not np.array_equal(found, expected):
        raise WrongBytes(f"{what}: {int((found != expected).sum())} of {len(found)} bytes differ")


def check_tensors(found: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    """WrongBytes unless all tensors are equal, bit for bit."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one, other):
            raise WrongBytes(f"{what}: tensor {index} differs")


def expect_refusal(loss: torch.Tensor) -> None:
    """WrongBytes unless backward raises torch's error for a saved tensor that was written to."""
    refusal = ""
    try:
        loss.backward()
    except RuntimeError as error:
        refusal = str(error)
    if "modified by an inplace operation" not in refusal:
        raise WrongBytes(f"backward went through a tensor that had been written to {refusal}")


# -- waits -----------------------------------------------------------------------------------------------------


def poison_a_run_in_use(skip: Skip, folder: Path) -> None:
    """The poison must not overtake the last read of the frames."""
    rig, values = make_filled([PAGE, PAGE], arena_frames=1, skip_wait=skip)
    check_bytes(rig.read(0), values[0], "first")
    check_bytes(rig.read(1), values[1], "second, in the same frame")
    rig.close()


def use_what_was_paged_in(skip: Skip, folder: Path) -> None:
    """The compute stream must not read before the copy has arrived."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip, check_races=False)
    check_bytes(rig.read(0), values[0], "paged in")
    rig.close()


def page_in_over_a_page_out(skip: Skip, folder: Path) -> None:
    """A page in must not overwrite frames that are still being copied out."""
    rig, values = make_filled([PAGE, PAGE], arena_frames=1, skip_wait=skip, poison=False)
    rig.write(0, values[1])
    check_bytes(rig.read(1), values[1], "second, in the same frame")
    check_bytes(rig.home_value(0), values[1], "first, written")
    rig.close()


def page_in_what_is_on_its_way_out(skip: Skip, folder: Path) -> None:
    """A page in must not read a home that has not been written yet.

    It comes back in other frames than it left, so that nothing but the home connects the two.
    """
    rig, values = make_filled([PAGE] * 3, arena_frames=3, skip_wait=skip, poison=False)
    rig.write(0, ~values[0])
    _, held = rig.lease(1)
    rig.evict(0)
    rig.overwrite(2, values[2])
    check_bytes(rig.read(0), ~values[0], "written, out and in again")
    del held
    rig.close()


def page_out_what_was_written(skip: Skip, folder: Path) -> None:
    """A page out must not read frames that the compute stream still writes."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip, poison=False)
    rig.write(0, ~values[0])
    rig.evict(0)
    check_bytes(rig.home_value(0), ~values[0], "written")
    rig.close()


def page_out_over_an_unused_page_in(skip: Skip, folder: Path) -> None:
    """A page out must not overwrite a home that a page in, evicted before its use, still reads.

    The new value is made in other frames, so that nothing but the home connects the two.
    """
    rig, values = make_filled([PAGE] * 4, arena_frames=3, skip_wait=skip, poison=False)
    rig.read(1)
    _, held = rig.lease(2)
    rig.read(3)
    rig.evict(3)
    assert rig.prefetch(0)
    rig.evict(1)
    rig.evict(0)
    rig.overwrite(0, ~values[0])
    rig.evict(0)
    check_bytes(rig.home_value(0), ~values[0], "overwritten")
    del held
    rig.close()


def _write_back_a_slot(skip: Skip) -> tuple[Any, list[Bytes]]:
    """A rig whose first segment was changed in a slot, and is on its way home on the slots' own stream."""
    rig, values = make_filled([PAGE], arena_frames=2, skip_wait=skip, poison=False)
    staging, unit, ranges = rig.engine.staging, object(), [Range(rig.segments[0], 0, 1)]
    assert staging.reserve(1, 1) == 1
    runs = staging.take(unit, ranges)
    assert runs is not None
    staging.bytes_of(runs[0]).copy_(torch.from_numpy(~values[0]))
    staging.write_back(unit, runs)
    return rig, values


def page_out_over_a_write_back_of_a_slot(skip: Skip, folder: Path) -> None:
    """Of two writes of one home, on two streams, the later one stays."""
    rig, values = _write_back_a_slot(skip)
    rig.overwrite(0, values[0] // 2)
    rig.evict(0)
    check_bytes(rig.home_value(0), values[0] // 2, "written last")
    rig.close()


def page_in_after_a_write_back_of_a_slot(skip: Skip, folder: Path) -> None:
    """What a slot sent home is there before anybody pages it in."""
    rig, values = _write_back_a_slot(skip)
    check_bytes(rig.read(0), ~values[0], "changed in the slot")
    rig.close()


def read_a_home_being_written(skip: Skip, folder: Path) -> None:
    """The host must not read a home that a page out has not reached."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    rig.write(0, ~values[0])
    rig.evict(0)
    check_bytes(rig.home_value(0), ~values[0], "at home")
    rig.close()


def store_over_a_page_in(skip: Skip, folder: Path) -> None:
    """The host must not write to a home that a page in still reads."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    assert rig.prefetch(0)
    rig.store(0, ~values[0])
    check_bytes(rig.read(0), ~values[0], "stored")
    rig.close()


def three_pages_through_two_slots(skip: Skip, folder: Path) -> None:
    """The third read of the disk must not overwrite what the first has not sent on."""
    rig, values = make_filled(
        [PAGE] * 3, arena_frames=3, homes=[Home.DISK] * 3, disk_folder=folder, skip_wait=skip, ring=(1, 2)
    )
    for index in range(3):
        assert rig.prefetch(index)
    for index in range(3):
        check_bytes(rig.read(index), values[index], f"page {index}")
    rig.close()


def write_to_disk_what_has_arrived(skip: Skip, folder: Path) -> None:
    """The file must not get a slot of the ring before the copy has filled it."""
    rig, values = make_filled([PAGE], arena_frames=1, homes=[Home.DISK], disk_folder=folder, skip_wait=skip)
    rig.write(0, ~values[0])
    rig.evict(0)
    rig.transfers.settle()
    check_bytes(rig.home_value(0), ~values[0], "on disk")
    rig.close()


def make_late(skip: Skip, folder: Path, num_pages: int, arena_frames: int, ring: tuple[int, int]) -> Any:
    """A rig over a disk that does nothing before somebody waits for it."""
    return make_filled(
        [PAGE] * num_pages,
        arena_frames=arena_frames,
        homes=[Home.DISK] * num_pages,
        disk_folder=folder,
        skip_wait=skip,
        ring=ring,
        disk_inline="late",
        poison=False,
    )


def read_back_what_is_on_its_way_to_the_disk(skip: Skip, folder: Path) -> None:
    """A read that finds its page in the ring must not take it before the copy has filled the slot."""
    rig, values = make_late(skip, folder, 1, 1, (1, 3))
    rig.write(0, ~values[0])
    rig.evict(0)
    check_bytes(rig.read(0), ~values[0], "read back")
    assert rig.counters.disk_read_bytes == PAGE, "once for the write in place; the second came from the ring"
    rig.close()


def page_in_from_disk_over_a_page_out(skip: Skip, folder: Path) -> None:
    """A page in from the disk must not overwrite frames that are still being copied out."""
    rig, values = make_late(skip, folder, 2, 1, (1, 3))
    rig.write(0, values[1])
    check_bytes(rig.read(1), values[1], "second, in the same frame")
    check_bytes(rig.home_value(0), values[1], "first, written")
    rig.close()


def write_again_to_a_run_of_which_a_part_went_out(skip: Skip, folder: Path) -> None:
    """A run whose page out was refused half way must not be written to under the copies that had begun."""
    rig, values = make_filled(
        [3 * PAGE],
        arena_frames=3,
        homes=[Home.DISK],
        disk_folder=folder,
        skip_wait=skip,
        ring=(1, 3),
        disk_inline="late",
    )
    rig.write(0, ~values[0])
    assert rig.disk is not None
    rig.disk.faults = (Fault(operation="write", at=rig.disk.calls["write"] + 1, lasting=True),)
    refusal: TierIOError | None = None
    try:
        rig.evict(0)
    except TierIOError as error:
        refusal = error
    if refusal is None:
        raise WrongBytes("the page out was not refused")
    rig.disk.faults = ()
    rig.write(0, values[0])
    check_bytes(rig.home_value(0), values[0], "written again")
    rig.close()


def reuse_the_home_of_a_retired_segment(skip: Skip, folder: Path) -> None:
    """Host frames must not be handed on while a page in still reads them."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    retired = rig.segments[0]
    assert rig.prefetch(0)
    rig.engine.discard(retired)
    rig.engine.unregister(retired)
    frame = int(rig.table.home_frame[retired.first_page])
    rig.host.free(frame, 1)
    rig.add(PAGE, Home.HOST)
    assert int(rig.table.home_frame[rig.segments[1].first_page]) == frame
    rig.store(1, ~values[0])
    check_bytes(rig.read(1), ~values[0], "the next owner")
    rig.close()


def give_back_a_slab_being_copied_out(skip: Skip, folder: Path) -> None:
    """A slab's memory must not go back while a page out still reads it."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip, poison=False)
    rig.write(0, ~values[0])
    rig.evict(0)
    rig.arena.remove_slab(0)
    check_bytes(rig.home_value(0), ~values[0], "at home")
    rig.close()


def in_place_write_after_a_write_back(skip: Skip, folder: Path) -> None:
    """A run that was cleaned and stays must not be written to under the copy that cleans it."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    rig.write(0, ~values[0])
    rig.engine.flush(rig.segments)
    rig.write(0, values[0])
    check_bytes(rig.home_value(0), values[0], "written twice")
    rig.close()


def write_through_a_view_after_a_write_back(skip: Skip, folder: Path) -> None:
    """A view that is alive must not be written to under the copy that cleans its run."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    rig.write(0, ~values[0])
    _, held = rig.lease(0)
    rig.engine.flush(rig.segments)
    rig.write_through(0, held, values[0])
    del held
    check_bytes(rig.home_value(0), values[0], "written twice")
    rig.close()


# -- closing ---------------------------------------------------------------------------------------------------


def make_managed_layer(skip: Skip) -> nn.Linear:
    """A managed linear layer with one paged parameter."""
    checks = Checks(streams="late", happens_before=True, poison=False, daemon="inline", skip_wait=skip)
    return pager.manage(
        nn.Linear(96, 96, bias=False), device="cpu", page_size="16KiB", device_budget="144KiB", checks=checks
    )


def close_after_a_forward(skip: Skip, folder: Path) -> None:
    """The slabs must not go back while the compute stream still reads them."""
    layer = make_managed_layer(skip)
    with torch.no_grad():
        layer(torch.ones(1, 96))
    handle_of(layer).close()


def close_with_a_page_in_under_way(skip: Skip, folder: Path) -> None:
    """Neither the slabs nor the homes must go back while a page in is under way."""
    layer = make_managed_layer(skip)
    engine = handle_of(layer)._runtime.engine
    segment = engine.space.segments[0]
    assert engine.prefetch(segment, 0, segment.num_pages, ticks_ahead=0)
    handle_of(layer).close()


def give_host_memory_back_with_a_page_in_under_way(skip: Skip, folder: Path) -> None:
    """Host memory between homes must not be cut out, and the rest locked anew, while a home beside it is read."""
    checks = Checks(streams="late", happens_before=True, poison=False, daemon="inline", skip_wait=skip)
    layers = [nn.Linear(96, 96, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers)
    pager.manage(
        model,
        device="cpu",
        page_size="16KiB",
        device_budget="144KiB",
        disk=folder,
        prefetch_distance=0,
        checks=checks,
    )
    runtime = handle_of(model)._runtime
    weight: Any = layers[-1].weight
    segment = weight._pager.segment
    expected = weight.detach().clone()
    model(torch.ones(1, 96)).sum().backward()
    runtime.engine.evict_segments(runtime.engine.space.segments)
    moves = runtime.host_cap.moves
    assert moves is not None
    with moves.standstill():
        assert moves.to_disk(1) > 0
    assert runtime.table.home[segment.first_page] == Home.HOST
    assert runtime.engine.prefetch(segment, 0, segment.num_pages, ticks_ahead=0)
    with moves.standstill():
        assert moves.release() > 0
    check_tensors([weight.detach()], [expected], "the weight beside the hole")
    handle_of(model).close()


def close_with_a_page_out_under_way(skip: Skip, folder: Path) -> None:
    """Neither the slabs nor the homes must go back while a page out is, whose value nobody wants any more."""
    layer = make_managed_layer(skip)
    layer(torch.ones(1, 96)).sum().backward()
    engine = handle_of(layer)._runtime.engine
    engine.evict_segments([segment for segment in engine.space.segments if segment.kind == "gradient"])
    layer.weight.grad = None
    handle_of(layer).close()


# -- training --------------------------------------------------------------------------------------------------


def train(case: Case, num_steps: int = 3, **knobs: Any) -> list[torch.Tensor]:
    """Losses and parameters of a few steps of Adam, managed with ``knobs`` if there are any."""
    model = case.model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if knobs:
        pager.manage(model, optimizer, device="cpu", page_size="16KiB", **knobs)
    losses = []
    loss: torch.Tensor | None = None
    try:
        for step in range(num_steps):
            args, kwargs = case.make_batch(step)
            loss = case.loss(model(*args, **kwargs), (args, kwargs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
    finally:
        if knobs:
            loss = None
            gc.collect()
            handle_of(model).close()
    return losses + [param.detach().clone() for param in model.parameters()]


def state_bytes(case: Case) -> int:
    """Bytes of parameters, gradients and Adam's states."""
    return 4 * sum(param.nbytes for param in case.model.parameters())


@functools.cache
def plain_training() -> list[torch.Tensor]:
    """What the same steps give without pager."""
    return train(BUILDERS["mlp"]())


def train_with(skip: Skip, *, poison: bool, **knobs: Any) -> None:
    """Train a model four times the device budget on late streams, and compare with plain torch."""
    case = BUILDERS["mlp"]()
    checks = Checks(streams="late", happens_before=True, poison=poison, daemon="inline", skip_wait=skip)
    managed = train(case, device_budget=state_bytes(case) // 4, checks=checks, **knobs)
    check_tensors(managed, plain_training(), "training")


def train_over_host(skip: Skip, folder: Path) -> None:
    """Homes in host memory."""
    train_with(skip, poison=False)


def train_over_disk(skip: Skip, folder: Path) -> None:
    """Homes on disk."""
    train_with(skip, poison=False, disk=folder, host_budget="1KiB")


def train_with_poison(skip: Skip, folder: Path) -> None:
    """Freed frames are overwritten at once."""
    train_with(skip, poison=True)


def train_layers(
    skip: Skip,
    num_layers: int,
    budget: str,
    look: Callable[[Any], bool],
    *,
    evaluates: bool = False,
    **knobs: Any,
) -> list[list[torch.Tensor]]:
    """Weights after four steps of plain layers, unmanaged and managed; WrongBytes if ``look`` misses something in the
    runtime. ``evaluates``: looks at the model between backward and step too.
    """
    results = []
    for managed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(num_layers)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if managed:
            checks = Checks(streams="late", happens_before=True, poison=True, daemon="inline", skip_wait=skip)
            knobs = {"device": "cpu", "page_size": "16KiB", "device_budget": budget, **knobs}
            pager.manage(model, optimizer, checks=checks, **knobs)
        x = torch.linspace(-1, 1, 96).repeat(2, 1)
        for step in range(4):
            optimizer.zero_grad()
            model(x * (step + 1)).square().sum().backward()
            if evaluates:
                with torch.no_grad():
                    model(x)
            optimizer.step()
        results.append([param.detach().clone() for param in model.parameters()])
        if managed:
            if not look(handle_of(model)._runtime):
                raise WrongBytes("nothing went the way that this is about")
            handle_of(model).close()
    return results


def train_through_staging(skip: Skip, folder: Path) -> None:
    """Optimizer states stream through slots, while parameters stream too."""
    plain, managed = train_layers(skip, 8, "480KiB", lambda runtime: bool(runtime.engine.streamed))
    check_tensors(managed, plain, "training")


def train_on_the_cpu(skip: Skip, folder: Path) -> None:
    """Parameters that stay are updated in host memory, inside backward, and sent back."""
    _train_on_the_cpu(skip, update_at="backward")


def step_on_the_cpu_after_a_look(skip: Skip, folder: Path) -> None:
    """The new value must not reach the device while somebody still reads the old one."""
    _train_on_the_cpu(skip, evaluates=True)


def _train_on_the_cpu(skip: Skip, **knobs: Any) -> None:
    plain, managed = train_layers(
        skip, 6, "600KiB", lambda runtime: bool(runtime.on_cpu.assigned), update_on="cpu", **knobs
    )
    for index, (one, other) in enumerate(zip(plain, managed, strict=True)):
        if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
            raise WrongBytes(f"training: tensor {index} differs")


def send_home_what_is_being_made(skip: Skip, folder: Path) -> None:
    """A gradient must not be copied before the compute has made it.

    Compute on the CPU is over when it is enqueued, and the gradient is no frame of ours: so the wait itself is
    looked for.
    """
    waits: list[tuple[Any, Any]] = []

    def spy(stream: Any, event: Any) -> bool:
        left_out = skip(stream, event)
        if stream is not None and not left_out:
            waits.append((stream.name, event.stream.name))
        return left_out

    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=spy)
    gradient = torch.from_numpy(~values[0])
    rig.transfers.send_home(rig.segments[0], gradient, at_most_bytes=PAGE)
    home = rig.transfers.home_bytes(rig.segments[0], write=False)
    assert home is not None
    check_bytes(home.numpy().copy(), ~values[0], "sent home")
    rig.close()
    if ("d2h", "compute") not in waits:
        raise WrongBytes("the copy home does not wait for the compute")


def send_home_over_a_page_in(skip: Skip, folder: Path) -> None:
    """A gradient must not overwrite a home that a page in still reads."""
    rig, values = make_filled([PAGE], arena_frames=1, skip_wait=skip)
    assert rig.prefetch(0)
    gradient = torch.from_numpy(~values[0])
    rig.transfers.send_home(rig.segments[0], gradient, at_most_bytes=PAGE)
    check_bytes(rig.read(0), values[0], "paged in before")
    rig.close()


def send_home_more_than_may_be_kept(skip: Skip, folder: Path) -> None:
    """The memory of the oldest gradient is the allocator's again: the compute waits for the copy that reads it."""
    rig, values = make_filled([PAGE] * 2, arena_frames=2, skip_wait=skip)
    for segment, value in zip(rig.segments, values, strict=True):
        rig.transfers.send_home(segment, torch.from_numpy(~value), at_most_bytes=PAGE)
    try:
        for index, value in enumerate(values):
            check_bytes(rig.home_value(index), ~value, "sent home")
    finally:
        rig.close()


def train_inside_backward(skip: Skip, folder: Path) -> None:
    """Updates run beside the backward; what they read and write is used again afterwards."""
    with mock.patch.object(Residency, "lent_bytes", return_value=2**20):
        plain, managed = train_layers(
            skip, 8, "480KiB", lambda runtime: bool(runtime.engine.streamed), update_at="backward"
        )
    check_tensors(managed, plain, "training")


class _Lending:
    """Updates of one page each, on a device that says of no compute that it is over before somebody waited for it."""

    def __init__(self, skip: Skip) -> None:
        self.device = SimulatedDevice(lazy_compute=True, skip_wait=skip)
        self.lent_bytes = 0
        self.stream = UpdateStream(self.device, lambda: self.lent_bytes)

    def lend(self) -> None:
        """One update."""
        with self.stream.lend(torch.ones(PAGE, dtype=torch.uint8), []):
            assert self.device.current_stream() is self.device.beside


def lend_more_than_may_be_lent(skip: Skip, folder: Path) -> None:
    """The memory of the oldest gradient is the allocator's again: the compute waits for the update that reads it."""
    lending = _Lending(skip)
    for _ in range(3):
        lending.lend()
    assert lending.stream.num_bytes == PAGE


def join_at_the_end_of_a_backward(skip: Skip, folder: Path) -> None:
    """After the backward all that was lent is the allocator's."""
    lending = _Lending(skip)
    lending.lent_bytes = 9 * PAGE
    for _ in range(3):
        lending.lend()
    lending.stream.join()
    assert not lending.stream.num_bytes


def join_from_another_stream(skip: Skip, folder: Path) -> None:
    """Gradients made on one stream, and the backward's end seen from another."""
    lending = _Lending(skip)
    lending.lend()
    with lending.device.computing_on(SimulatedStream(lending.device, "second", 9)):
        lending.stream.join()
    assert not lending.stream.num_bytes
