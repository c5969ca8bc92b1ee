"""The host budget between steps: watermarks, what is given back, and another budget while the model trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager import host_cap
from pager.config import Checks
from pager.device.simulated import SimulatedDevice
from pager.errors import BudgetError, ConfigError, PagerClosed
from pager.homes import Homes
from pager.host_cap import HIGH, LOW, HostCap
from pager.host_limit import free_host_bytes, host_limit_bytes, process_bytes
from pager.page_table import PageTable
from pager.tiers.host_arena import HostArena

MIB = 2**20
PAGE = 16384


class FakeHomes:
    """What the cap asks of the homes; giving back takes ``pageable`` off the process."""

    def __init__(self, machine: Machine, pageable: int) -> None:
        self.machine = machine
        self.pageable = pageable
        self.host_used_bytes = 7 * MIB
        self.spare_host_bytes = self.untouched_host_bytes = 0
        self.resized: list[int] = []

    def release_host(self) -> int:
        """As the homes."""
        self.machine.used -= self.pageable
        released, self.pageable = self.pageable, 0
        return released

    def resize_host(self, extra_bytes: int) -> None:
        """As the homes."""
        self.resized.append(extra_bytes)


class Machine:
    """Memory as the module sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, used: int, free: int = 900 * MIB) -> None:
        self.used, self.free = used, free
        monkeypatch.setattr(host_cap, "process_bytes", lambda: self.used)
        monkeypatch.setattr(host_cap, "free_host_bytes", lambda: self.free)
        monkeypatch.setattr(host_cap, "host_limit_bytes", lambda: 1000 * MIB)
        monkeypatch.setattr(host_cap, "SECONDS_BETWEEN_LOOKS", 0.0)
        monkeypatch.setattr(host_cap, "_trim_heap", lambda: None)


def make_cap(machine: Machine, budget: int, pageable: int = 0) -> tuple[HostCap, FakeHomes]:
    """A cap over homes that are not there."""
    homes = FakeHomes(machine, pageable)
    return HostCap(budget, homes, budget), homes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "gives"), [(LOW, False), (HIGH - 0.01, False), (HIGH + 0.01, True), (1.5, True)]
)
def test_above_the_high_watermark_the_pageable_part_is_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, share: float, gives: bool
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(monkeypatch, used=int(share * 100 * MIB))
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)
    cap.look()
    assert (homes.pageable == 0) is gives
    lines = [
        record.message
        for record in caplog.records
        if "gave back 10.00 MiB that was pageable" in record.message
    ]
    assert len(lines) == gives


def test_the_heap_is_trimmed_as_often_as_it_has_grown_over_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, used=96 * MIB)
    trimmed: list[int] = []

    def trim() -> None:
        trimmed.append(machine.used)
        machine.used = min(machine.used, 98 * MIB)

    monkeypatch.setattr(host_cap, "_trim_heap", trim)
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)
    for used in (96, 99, 101, 103, 103, 200, 98):
        machine.used = used * MIB
        cap.look_at_heap()
    assert trimmed == [99 * MIB, 103 * MIB, 103 * MIB, 200 * MIB]
    assert homes.pageable == 10 * MIB
    cap.look()
    assert homes.pageable == 0, "what else can be given back has not been tried"


def test_in_the_midst_of_a_step_the_heap_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, used=99 * MIB)
    trimmed: list[int] = []
    monkeypatch.setattr(host_cap, "_trim_heap", lambda: trimmed.append(machine.used))
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)
    cap.look_in_step()
    assert trimmed == [99 * MIB]
    machine.used = 120 * MIB
    cap.look_in_step()
    assert trimmed == [99 * MIB, 120 * MIB]
    monkeypatch.setattr(host_cap, "SECONDS_BETWEEN_LOOKS", 1000.0)
    machine.used = 140 * MIB
    cap.look_in_step()
    assert len(trimmed) == 2
    assert homes.pageable == 10 * MIB


def test_when_other_processes_eat_the_memory_it_is_given_back_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(monkeypatch, used=50 * MIB, free=10 * MIB)
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)
    cap.look()
    assert homes.pageable == 0
    assert "only 10.00 MiB of memory are left to all processes" in caplog.text


def test_what_cannot_be_given_back_is_warned_of_once_for_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(monkeypatch, used=150 * MIB)
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)

    def num_warnings() -> int:
        return sum("more than host_budget = 100.00 MiB" in record.message for record in caplog.records)

    cap.look()
    homes.pageable = 3 * MIB
    for _ in range(3):
        cap.look()
    assert num_warnings() == 1
    assert homes.pageable == 3 * MIB, "it was in vain, and nothing has grown"
    machine.used += 10 * MIB
    cap.look()
    assert (num_warnings(), homes.pageable) == (1, 0)
    machine.used = 50 * MIB
    cap.look()
    machine.used = 150 * MIB
    cap.look()
    assert num_warnings() == 2


def test_it_looks_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, used=150 * MIB)
    monkeypatch.setattr(host_cap, "SECONDS_BETWEEN_LOOKS", 1000.0)
    cap, homes = make_cap(machine, 100 * MIB)
    cap.look()
    homes.pageable = 5
    cap.look()
    assert homes.pageable == 5


def test_a_smaller_budget_gives_back_first_and_is_refused_if_that_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, used=80 * MIB)
    cap, homes = make_cap(machine, 100 * MIB, pageable=10 * MIB)
    cap.set(75 * MIB)
    assert (cap.budget_bytes, homes.pageable, homes.resized) == (75 * MIB, 0, [-25 * MIB])
    with pytest.raises(
        BudgetError, match=r"60.00 MiB is less than the 70.00 MiB .* 7.00 MiB are .* can be set now is"
    ):
        cap.set("60MiB")
    assert cap.budget_bytes == 75 * MIB
    assert not cap.has_work
    cap.set(0.5)
    assert (cap.budget_bytes, cap.knob) == (500 * MIB, 0.5)


# -- with a model ------------------------------------------------------------------------------------------------------


def make_managed(**knobs: Any) -> Any:
    """A small paged model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(4)))
    checks = Checks(daemon="inline", page_all=True)
    return pager.manage(model, device="cpu", page_size=PAGE, device_budget="256KiB", checks=checks, **knobs)


def test_another_budget_while_the_model_trains() -> None:
    model = make_managed(host_budget=0.5)
    before = model.pager.statistics().host_budget_bytes
    arena = model.pager._runtime.host
    room = arena.budget_bytes
    model.pager.set(host_budget=before - 64 * MIB)
    assert model.pager.statistics().host_budget_bytes == before - 64 * MIB
    assert model.pager.config.host_budget == before - 64 * MIB
    assert arena.budget_bytes == room - 64 * MIB
    with pytest.raises(BudgetError, match="is less than the .* that the process takes"):
        model.pager.set(host_budget="1MiB")
    with pytest.raises(ConfigError, match="a fraction must be above 0"):
        model.pager.set(host_budget=-0.5)
    with pytest.raises(ConfigError, match=r"host_budget is 1000000000000000, .* has .*; give less"):
        model.pager.set(host_budget=10**15)
    assert model.pager.statistics().host_budget_bytes == before - 64 * MIB
    model(torch.ones(2, 96)).sum().backward()
    model.pager.close()


WRONG: list[tuple[Any, type[Exception], str]] = [
    (-1, ConfigError, "host_budget is -1; a size in bytes cannot be negative"),
    (-0.5, ConfigError, "a fraction must be above 0"),
    (0, ConfigError, "host_budget is 0 bytes"),
    (0.0, ConfigError, "a fraction must be above 0"),
    (1.5, ConfigError, "at most 1"),
    (float("nan"), ConfigError, "host_budget is nan"),
    (float("inf"), ConfigError, "host_budget is inf"),
    ("-1GiB", ConfigError, "host_budget is '-1GiB'; expected a number and a unit"),
    ("85%", ConfigError, "host_budget is '85%'; expected a number and a unit"),
    ("0.5", ConfigError, "give a fraction as a float"),
    ("", ConfigError, "host_budget is ''"),
    ("900TiB", ConfigError, r"host_budget is '900TiB', .* has .*; give less"),
    (10**30, ConfigError, "give less"),
    (True, TypeError, "host_budget is True"),
    (None, TypeError, "host_budget is None; expected bytes"),
    ([1], TypeError, r"host_budget is \[1\]"),
    ("1B", BudgetError, "host_budget = 1 B is less than .* The least that can be set now is"),
    (1e-12, BudgetError, "The least that can be set now is"),
]


@pytest.mark.parametrize("page_all", [True, False])
def test_what_cannot_be_set_changes_nothing(page_all: bool) -> None:
    """Also where all of the model fits the device, and nothing of ours is in host memory."""
    torch.manual_seed(0)
    model: Any = nn.Linear(96, 96, bias=False)
    budget = "1GiB" if not page_all else "256KiB"
    pager.manage(
        model,
        device="cpu",
        page_size=PAGE,
        device_budget=budget,
        checks=Checks(page_all=page_all),
        host_budget=0.9,
    )
    handle = model.pager

    def settings() -> Any:
        return handle.config, handle.statistics().host_budget_bytes, handle._runtime.host.budget_bytes

    before = settings()
    for value, kind, message in WRONG:
        with pytest.raises(kind, match=message):
            handle.set(host_budget=value)
        with pytest.raises(kind, match=message):
            handle.set(host_budget=value, prefetch_distance=7)
        assert settings() == before, value
    with pytest.raises(ConfigError, match="disk cannot change"):
        handle.set(host_budget=0.5, disk="/tmp")
    assert settings() == before
    assert not handle._runtime.boundary._pending
    limit = host_limit_bytes()
    for value, num_bytes in (
        (0.5, int(limit * 0.5)),
        (limit, limit),
        (1.0, limit),
        (f"{limit // 2**20}MiB", None),
    ):
        handle.set(host_budget=value)
        assert handle.statistics().host_budget_bytes == (num_bytes or limit // 2**20 * 2**20)
        assert handle.config.host_budget == value
    handle.close()
    with pytest.raises(PagerClosed, match="this handle is closed"):
        handle.set(host_budget=0.5)


def test_free_pageable_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()

    def refuse(address: int, num_bytes: int) -> None:
        raise OSError("no locking here")

    monkeypatch.setattr(device, "register_host", refuse)
    arena = HostArena(PAGE, device, 64 * MIB)
    arena.grow(64 * MIB // PAGE)
    kept = arena.allocate(1)
    freed = arena.allocate(63 * MIB // PAGE)
    arena.view(kept, PAGE).fill_(3)
    arena.view(freed, 63 * MIB).fill_(5)
    arena.free(freed, 63 * MIB // PAGE)
    before = process_bytes()
    assert arena.release_free() == 64 * MIB - PAGE
    assert before - process_bytes() > 50 * MIB
    assert arena.view(kept, PAGE).unique().tolist() == [3]
    assert arena.view(freed, PAGE).unique().tolist() == [0]
    arena.close()


def test_locked_memory_in_use_stays_and_free_pieces_go() -> None:
    device = SimulatedDevice()
    arena = HostArena(PAGE, device, 8 * PAGE)
    homes = Homes(None, PageTable(), arena, None, PAGE)  # type: ignore[arg-type]
    homes.reserve_host([4 * PAGE])
    kept = arena.allocate(2)
    arena.grow(4)
    homes._spare_frames += 4
    assert homes.release_host() == 4 * PAGE
    assert (arena.reserved_bytes, homes.host_used_bytes) == (4 * PAGE, 2 * PAGE)
    assert arena.view(kept, PAGE).numel() == PAGE
    homes.resize_host(-100 * MIB)
    assert arena.budget_bytes == arena.reserved_bytes, "what is reserved stays allowed"
    arena.close()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000000", "memory.current": "400000"}, 600_000),
        (
            {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "inactive_file 100000\n"},
            700_000,
        ),
        ({"memory.max": "1000", "memory.current": "4000"}, 0),
        ({"memory.max": "max", "memory.current": "400000"}, None),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "2000"}, 7000),
    ],
)
def test_what_is_left_in_a_cgroup(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text("0::/\n")
    free = free_host_bytes(tmp_path, tmp_path / "membership")
    if expected is None:
        assert 10**6 < free <= host_limit_bytes()
    else:
        assert free == expected
