"""Cases 1-3, 9-11, 26, 31, 34: long runs, changing control flow, late parameters, full residency, memory."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.host_limit import process_bytes
from pager.tiers.views import Views
from tests import models
from tests.cases.same import (
    PAGE,
    Report,
    budget_bytes,
    check_equal,
    check_same,
    copied,
    manage,
    num_pages,
    small_bytes,
    state_bytes,
    train,
    train_step,
)


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Wandering(nn.Module):
    """Control flow that changes from step to step, modules in another order, experts chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.router = nn.Linear(96, 4)
        self.experts = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.order = [0, 1, 2]
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        choice = self.router(x).argmax(-1)
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = choice == index
            if bool(rows.any()):
                mixed = mixed.index_put((rows,), expert(x[rows]))
        if self.twice:
            mixed = self.layers[0](torch.tanh(self.layers[0](mixed)))
        return mixed


@pytest.mark.parametrize("daemon", ["thread", "inline"])
@pytest.mark.parametrize("eviction", ["belady", "lru", "clock"])
def test_control_flow_that_changes(eviction: str, daemon: str) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        for step in range(9):
            model.order = [[0, 1, 2], [2, 0, 1], [1], [0, 0, 2]][step % 4]
            model.twice = step in (4, 5, 6)
            optimizer.zero_grad()
            for micro in range(1 + step % 2):
                x = torch.randn(6, 96, generator=torch.Generator().manual_seed(10 * step + micro))
                loss = model(x).square().mean()
                loss.backward()
                report("loss", loss)
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    checks = Checks(streams="late", happens_before=True, poison=True, daemon=daemon)
    check_same(Wandering, script, share=0.25, eviction=eviction, checks=checks)


def test_parameters_added_after_manage_are_managed_from_the_next_step() -> None:
    def script(model: Any, report: Report) -> None:
        case = models.make_mlp()
        optimizer = adamw(model)
        train(case, model, optimizer, range(2), report)
        torch.manual_seed(3)
        model.append(nn.Linear(96, 96))
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(case, model, optimizer, range(2, 5), report)
        model[2] = nn.Linear(96, 96)
        optimizer.add_param_group({"params": model[2].parameters()})
        train(case, model, optimizer, range(5, 8), report)
        del model[4]
        train(case, model, optimizer, range(8, 10), report)

    paged = check_same(lambda: models.make_mlp().model, script, share=0.6, close=False)
    assert any("9.weight" in s.name for s in paged.pager.plan.segments)
    assert type(paged[-1].weight).__name__ == "PagedParameter"
    paged.pager.close()


def tensors_and_holders() -> Counter[tuple[Any, ...]]:
    """The process's plain tensors by shape and by the types that hold them: whose they are."""
    found: Counter[tuple[Any, ...]] = Counter()
    for tensor in [o for o in gc.get_objects() if type(o) is Tensor]:
        holders = {type(holder).__name__ for holder in gc.get_referrers(tensor)}
        key = (tuple(tensor.shape), *sorted(holders))
        found[key] += 1
    return found


def test_150_steps_use_no_more_of_anything() -> None:
    """Device and host bytes, descriptors, threads, segments and Python objects are constant."""
    case, twin = models.make_mlp(depth=2), models.make_mlp(depth=2)
    # Early streams: late ones hold on to work that nobody waits for.
    model = manage(case.model, share=0.3, checks=Checks(streams="early", poison=True))
    optimizer, plain = adamw(model), adamw(twin.model)

    def usage() -> dict[str, Any]:
        # What pagerd is at holds tensors for a moment.
        pagerd = model.pager._runtime.pagerd
        pagerd.pause()
        gc.collect()
        # Slices of host memory are remembered, a bounded number of them: which there are by now is a matter of timing.
        remembered = sum(len(o) for o in gc.get_objects() if type(o) is Views)
        tensors = sum(1 for o in gc.get_objects() if type(o) is Tensor) - remembered
        pagerd.resume()
        statistics = model.pager.statistics()
        return {
            "host": statistics.host_bytes,
            "host peak": statistics.peak_host_bytes,
            "device": statistics.peak_resident_bytes,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "segments": len(model.pager._runtime.space.segments),
            "tensors": tensors,
        }

    train(case, model, optimizer, range(30))
    before = usage()
    train(case, model, optimizer, range(30, 150))
    after = usage()
    grown = {name: now for name, now in after.items() if now > before[name]}
    assert grown == {}, tensors_and_holders() if "tensors" in grown else ""
    assert after["device"] <= model.pager.statistics().device_budget_bytes
    train(twin, twin.model, plain, range(150))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "150 steps")


def test_nothing_grows_over_hostile_steps() -> None:
    """State dicts, evaluations, exceptions and assigned gradients leave nothing behind either."""
    case = models.make_mlp(depth=2)
    model = manage(case.model, share=0.5, checks=Checks(streams="early", poison=True, daemon="inline"))
    optimizer = adamw(model)

    def hostile(step: int) -> None:
        train(case, model, optimizer, [step])
        model.load_state_dict(copied(model.state_dict()))
        optimizer.load_state_dict(copied(optimizer.state_dict()))
        with torch.no_grad():
            model(torch.ones(1, 96))
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        grads = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        del grads
        model[0].weight.grad = torch.ones(96, 96)
        model[0].requires_grad_(False)
        model[0].requires_grad_(True)

    def usage() -> tuple[int, ...]:
        gc.collect()
        statistics = model.pager.statistics()
        runtime = model.pager._runtime
        return (
            statistics.host_bytes,
            len(runtime.space.segments),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            sum(1 for o in gc.get_objects() if type(o) is Tensor),
        )

    for step in range(10):
        hostile(step)
    before = usage()
    for step in range(10, 40):
        hostile(step)
    after = usage()
    # What an earlier test left to the garbage collector may still go away.
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    model.pager.close()


def test_a_tensor_freed_while_its_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are dropped, assigned and evicted while late streams still copy them; 60 repetitions."""
    case = models.make_mlp(depth=2)

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(60):
            train_step(case, model, step)
            grad = model[2].weight.grad * 2
            model[2].weight.grad = None
            train_step(case, model, step + 1)
            model[2].weight.grad = grad
            del grad
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                report("weights", list(model.parameters()))
                report("finite", all(bool(torch.isfinite(p).all()) for p in model.parameters()))

    check_same(lambda: models.make_mlp(depth=2).model, script, share=0.3)


@pytest.mark.parametrize("page_all", [True, False])
def test_what_fits_is_resident_and_nothing_moves(page_all: bool) -> None:
    case, twin = models.make_mlp(), models.make_mlp()
    model = manage(
        case.model, share=2.0, checks=Checks(streams="late", happens_before=True, page_all=page_all)
    )
    optimizer = adamw(model)
    train(case, model, optimizer, range(2))
    before = model.pager.statistics()
    train(case, model, optimizer, range(2, 6))
    after = model.pager.statistics()
    assert after.page_in_bytes == before.page_in_bytes
    assert after.page_out_bytes == before.page_out_bytes
    assert after.major_faults == before.major_faults
    assert after.hit_rate == 1.0 or after.major_faults == before.major_faults
    train(twin, twin.model, adamw(twin.model), range(6))
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")


def test_resident_bytes_stay_within_and_near_the_budget() -> None:
    case = models.make_mlp(depth=8)
    model = manage(case.model, share=0.5)
    train(case, model, adamw(model), range(3))
    statistics = model.pager.statistics()
    assert statistics.peak_resident_bytes <= statistics.device_budget_bytes
    assert statistics.peak_resident_bytes >= 0.75 * (statistics.device_budget_bytes - small_bytes(case.model))
    model.pager.close()


def test_host_memory_is_no_more_than_the_bill() -> None:
    """Homes take what their pages need, within one page a tensor: no rounding up to powers of two."""
    model: Any = nn.Module()
    model.odd = nn.Parameter(torch.zeros(1894, 358, dtype=torch.float16))
    manage(model, device_budget="4MiB")
    statistics = model.pager.statistics()
    need = model.odd.nbytes
    assert statistics.host_bytes + statistics.wired_bytes <= 4 * (need + PAGE) + 4 * need
    model.pager.close()
    big: Any = models.make_mlp(width=256, depth=4).model
    bill = state_bytes(big)
    expected = sum(num_pages(p) * PAGE for p in big.parameters())
    manage(big, share=0.3)
    optimizer = adamw(big)
    big(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    statistics = big.pager.statistics()
    assert expected <= statistics.host_bytes + statistics.wired_bytes <= bill
    assert statistics.peak_host_bytes <= statistics.host_budget_bytes
    big.pager.close()


def test_state_on_disk_trains_as_in_memory(tmp_path: Path) -> None:
    """Six steps on one batch with much of the state on disk, since host memory has no room for it."""
    case, twin = models.make_mlp(width=640, depth=2), models.make_mlp(width=640, depth=2)
    model: Any = case.model
    on_cpu = sum(p.nbytes for p in model.parameters())
    # Room for about half of the state beside what the process holds already; the simulated device is host memory too.
    limit = process_bytes() - on_cpu + budget_bytes(model, 0.4) + state_bytes(model) // 2
    manage(model, share=0.4, host_budget=limit, disk=tmp_path)
    optimizer, plain = adamw(model), adamw(twin.model)
    for _ in range(6):
        for each, its in ((model, optimizer), (twin.model, plain)):
            train(case, each, its, [0])
    statistics = model.pager.statistics()
    assert statistics.disk_bytes > 0
    assert statistics.disk_write_bytes > 0
    model.pager.close()
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "weights")
    check_equal(plain.state_dict()["state"], optimizer.state_dict()["state"], "state")
    assert list(tmp_path.iterdir()) == []


def test_a_handle_dropped_without_close_ends_by_itself() -> None:
    model = manage(models.make_mlp().model)
    train(models.make_mlp(), model, adamw(model), range(1))
    runtime, arena = weakref.ref(model.pager._runtime), weakref.ref(model.pager._runtime.host)
    thread = next(t for t in threading.enumerate() if t.name == "pagerd")
    del model
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        gc.collect()  # pagerd holds the runtime while it works, and a collection just then finds it in use
        thread.join(0.01)
    assert not thread.is_alive()
    gc.collect()
    assert runtime() is None
    assert arena() is None


def test_the_statistics_are_immutable_and_add_up() -> None:
    case = models.make_mlp()
    model = manage(case.model, share=0.3)
    train(case, model, adamw(model), range(3))
    statistics = model.pager.statistics()
    with pytest.raises(AttributeError):
        statistics.num_steps = 7
    assert statistics.num_steps == 3
    assert 0 <= statistics.hit_rate <= 1
    assert all(name.startswith("pager/") and isinstance(v, float) for name, v in statistics.as_dict().items())
    history = model.pager.resident_history()
    assert max(bytes_ for _, bytes_ in history) == statistics.peak_resident_bytes
    assert isinstance(statistics, pager.Statistics)
    model.pager.close()
