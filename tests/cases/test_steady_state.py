"""No bubbles: after a few steps nothing is allocated, registered, opened or waited for, and no work grows with pages.

Counted at the boundaries that whatever moves pages has to pass: arenas, registration, files, events, copies, the
page table's verbs. A profile of a step on a GPU asks the same of CUDA (``tests/gpu/test_bubbles.py``).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import pager
from pager import bill
from pager.config import Checks
from pager.device.base import Event, Region, Stream
from pager.device.simulated import SimulatedDevice
from pager.optim.on_cpu import CpuUpdates
from pager.page_table import Home, PageTable
from pager.tiers.device_arena import DeviceArena
from pager.tiers.disk_file import DiskFile
from pager.tiers.host_arena import HostArena
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes

KIB = 2**10
# Paged tensors are multiples of 32 KiB, and nothing else reaches 16 KiB: the same layout at either page size.
SIZES = ModelSizes(hidden=256, layers=2, heads=4, ffn=768, dtype="bfloat16", checkpoint=True)
# A slot (a fortieth) holds a whole unit of the update at either page size: 12 bytes of each of 16 Ki elements.
ARENA_BYTES = 40 * 192 * KIB
WARM_UP_STEPS = 5
NUM_STEPS = 2

MODES: dict[str, dict[str, Any]] = {
    "step": {},
    "step, masters": {"master": "float32"},
    "backward, masters": {"master": "float32", "update_at": "backward"},
    "backward on the CPU, masters": {"master": "float32", "update_at": "backward", "update_on": "cpu"},
}

# What a steady state has none of: allocation, registration, growth.
RESERVES = {
    DeviceArena: ("add_slab", "remove_slab"),
    HostArena: ("grow", "trim", "allocate", "free"),
    DiskFile: ("grow", "allocate", "free"),
    SimulatedDevice: ("allocate_slab", "register_host", "unregister_host", "measure_bandwidth"),
}
VERBS = sorted(name for name, value in vars(PageTable).items() if name[0] != "_" and callable(value))


class Counts:
    """What happened since `begin`; counts by wrapping methods, in all threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reserved: Counter[str] = Counter()
        # Names of the threads that waited on the host.
        self.waits: Counter[str] = Counter()
        self.verbs: Counter[str] = Counter()
        self.num_copies: Counter[str] = Counter()
        # Of each stream what its copies between frames read and wrote, in order.
        self.copies: dict[str, list[tuple[Region, Region]]] = {}
        for owner, names in RESERVES.items():
            for name in names:
                self._wrap(patch, owner, name, self.reserved, f"{owner.__name__}.{name}")
        self._wrap(patch, Event, "synchronize", self.waits, None)
        for name in VERBS:
            self._wrap(patch, PageTable, name, self.verbs, name)
        copy = Stream.copy

        def copied(stream: Stream, *args: Any, **regions: Any) -> None:
            self.num_copies[stream.name] += 1
            reads, writes = regions["reads"], regions["writes"]
            if reads is not None and writes is not None:
                self.copies.setdefault(stream.name, []).append((reads, writes))
            copy(stream, *args, **regions)

        patch.setattr(Stream, "copy", copied)

    def _wrap(
        self, patch: pytest.MonkeyPatch, owner: type, name: str, counter: Counter[str], key: str | None
    ) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counter[key or threading.current_thread().name] += 1
            return method(*args, **kwargs)

        patch.setattr(owner, name, counted)

    def num_copies_on(self, *streams: str) -> int:
        """Of pages, and of slots."""
        return sum(self.num_copies[stream] for stream in streams)

    def begin(self) -> None:
        """Count from now on."""
        for counter in (self.reserved, self.waits, self.verbs, self.num_copies, self.copies):
            counter.clear()


class Training:
    """A managed decoder that does not fit, and its loop."""

    def __init__(self, mode: str, *, page_size: int = 16 * KIB, daemon: str = "inline", **knobs: Any) -> None:
        self.model: Any = make_model(SIZES, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batches = torch.randint(256, (4, 2, 2, 32))
        self.num_steps = 0
        pager.manage(
            self.model,
            self.optimizer,
            device="cpu",
            device_budget=ARENA_BYTES * 2,
            page_size=page_size,
            prefetch_distance="auto",
            example_inputs=tuple(self.batches[0]),
            checks=Checks(daemon=daemon, arena_bytes=ARENA_BYTES),
            **{**MODES[mode], **knobs},
        )
        handle: Any = self.model.pager
        self.runtime = handle._runtime

    def train(self, num_steps: int) -> None:
        """A user's loop."""
        for _ in range(num_steps):
            tokens, targets = self.batches[self.num_steps % len(self.batches)]
            self.model(tokens, targets).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.num_steps += 1

    def moved_bytes(self) -> int:
        """Bytes over the link so far."""
        statistics = self.model.pager.statistics()
        return int(statistics.page_in_bytes + statistics.page_out_bytes)

    def at_rest(self) -> tuple[int, int, int]:
        """Tensors that are alive, their bytes, and threads, once nothing is under way."""
        for param in self.model.parameters():
            param.sum()  # who reads a parameter finishes its update
        self.runtime.pagerd.pause()
        try:
            gc.collect()
            # By exact class: looking at an object's attributes wakes some that warn.
            alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
            with torch._C.DisableTorchFunction():
                storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in alive}
            num_bytes = sum(storage.nbytes() for storage in storages.values())
            return len(alive), num_bytes, threading.active_count()
        finally:
            self.runtime.pagerd.resume()


@contextmanager
def training(mode: str, **knobs: Any) -> Iterator[Training]:
    """A training that has warmed up; closed at the end."""
    made = Training(mode, **knobs)
    try:
        made.train(WARM_UP_STEPS)
        yield made
    finally:
        made.model.pager.close()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def check_whole_copies(counts: Counts, runtime: Any) -> None:
    """No copy goes on where the one before it on its stream ended, at both ends and in one segment: one copy a run."""
    table = runtime.table
    segments = {
        int(table.home_frame[segment.first_page]) + page: segment.name
        for segment in runtime.space.segments
        if segment.num_pages and table.home[segment.first_page] == Home.HOST
        for page in range(segment.num_pages)
    }
    for stream, copies in counts.copies.items():
        for (reads, writes), (next_reads, next_writes) in pairwise(copies):
            goes_on = reads.end == next_reads.begin and writes.end == next_writes.begin
            home, next_home = (reads, next_reads) if reads.memory == "host" else (writes, next_writes)
            name = segments[home.begin]
            assert not goes_on or name != segments[next_home.begin], (
                f"{stream} moved a run of {name} in pieces"
            )


@pytest.mark.parametrize("daemon", ["inline", "thread"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_reserved_and_nobody_waits(mode: str, daemon: str, counts: Counts) -> None:
    with training(mode, daemon=daemon) as trained:
        assert counts.reserved["DeviceArena.add_slab"] == 1  # else nothing is counted
        before = trained.at_rest()
        trained.train(2)
        counts.begin()
        moved = trained.moved_bytes()
        trained.train(NUM_STEPS)
        moved = trained.moved_bytes() - moved
        reserved, waits = dict(counts.reserved), dict(counts.waits)
        assert trained.at_rest() == before
        # Each step moves more than the arena holds, or the arena would be no cache but the place of everything.
        assert moved > NUM_STEPS * 2**20
        assert reserved == {}
        # The update's threads wait for gradients: that is what they are there for, and the training does not.
        assert [name for name in waits if not name.startswith("pager-update")] == []
        assert counts.num_copies_on("h2d", "slots in") > 0
        check_whole_copies(counts, trained.runtime)


class StepWork(NamedTuple):
    """What one step costs the host."""

    calls: int  # of functions, Python's and C's
    verbs: int
    copies_in: int
    copies_out: int


def step_work(trained: Training, counts: Counts) -> StepWork:
    """The least of a few steps: what a step boundary does now and then (rescale a plan) is not what is asked."""
    found = []
    for _ in range(NUM_STEPS):
        counts.begin()
        calls: Counter[str] = Counter()

        def called(frame: Any, event: str, argument: Any, calls: Counter[str] = calls) -> None:
            calls[event] += 1

        sys.setprofile(called)
        try:
            trained.train(1)
        finally:
            sys.setprofile(None)
        copies = counts.num_copies_on("h2d", "slots in"), counts.num_copies_on("d2h", "slots out")
        found.append((calls["call"] + calls["c_call"], sum(counts.verbs.values()), *copies))
    return StepWork(*map(min, zip(*found, strict=True)))


@pytest.mark.parametrize("mode", MODES)
def test_work_does_not_grow_with_the_pages(mode: str, counts: Counts) -> None:
    """With a quarter of the page size the same bytes move in the same runs, by as many calls: no loop over pages."""
    work, num_pages = {}, {}
    for page_size in (32 * KIB, 16 * KIB):
        with training(mode, page_size=page_size) as trained:
            num_pages[page_size] = trained.runtime.table.num_pages
            work[page_size] = step_work(trained, counts)
    assert num_pages[16 * KIB] == 2 * num_pages[32 * KIB]
    for name, coarse, fine in zip(StepWork._fields, work[32 * KIB], work[16 * KIB], strict=True):
        assert 0 < fine <= 1.05 * coarse, f"{name}: {fine} for pages of 16 KiB, {coarse} for pages of 64 KiB"


@pytest.mark.parametrize("mode", ["step, masters", "backward, masters"])
def test_nothing_is_brought_twice(mode: str) -> None:
    """What is fetched ahead is what is needed next: a step brings no more than it sends home changed."""
    with training(mode) as trained:
        before = trained.model.pager.statistics()
        trained.train(NUM_STEPS)
        after = trained.model.pager.statistics()
        brought = after.page_in_bytes - before.page_in_bytes
        sent = after.page_out_bytes - before.page_out_bytes
        assert 0 < sent <= brought < 1.1 * sent


def test_a_share_of_the_cpu_that_grows_late_asks_for_no_memory(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "auto" the CPU's part follows rates that are never quite the same: its gradients are lent their homes."""
    share = 0.5
    monkeypatch.setattr(CpuUpdates, "_find_share", lambda *arguments: share)
    with training("backward on the CPU, masters", update_on="auto") as trained:
        on_cpu = trained.runtime.in_backward.on_cpu
        share = 0.2
        trained.train(5)
        few = set(on_cpu.assigned)
        share = 0.9
        counts.begin()
        before = trained.model.pager.statistics().host_bytes
        trained.train(1 + NUM_STEPS)
        lent = [counts.reserved.pop(f"HostArena.{name}") for name in ("allocate", "free")]
        assert dict(counts.reserved) == {}
        assert trained.model.pager.statistics().host_bytes == before
        assert min(lent) > 0
        assert 0 < len(few) < len(on_cpu.assigned)


def test_a_disk_does_not_grow(counts: Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With homes on a disk the host waits for it; but its file stays as it is, and so does the memory."""
    monkeypatch.setattr(bill, "host_room", lambda *arguments: (2**20, 2**40))
    with training("step", disk=tmp_path) as trained:
        assert counts.reserved["DiskFile.allocate"] > 0
        before = trained.at_rest()
        trained.train(2)
        counts.begin()
        trained.train(NUM_STEPS)
        assert dict(counts.reserved) == {}
        assert trained.at_rest() == before
        assert trained.model.pager.statistics().disk_read_bytes > 0
