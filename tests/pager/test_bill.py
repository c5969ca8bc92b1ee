"""The bill against what happens: each state has the home it was planned to have, and what has none is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager import bill
from pager.config import Checks, Config
from pager.device.simulated import SimulatedDevice
from pager.device_budget import DeviceBudget
from pager.errors import BudgetError, ConfigError
from pager.homes import Wanted
from pager.model_checks import sort_parameters
from pager.optim.probe import ExpectedStates
from pager.page_table import Home

PAGE = 16 * 2**10
CHECKS = Checks(streams="late", happens_before=True, poison=True, daemon="inline", page_all=True)
# Two weights of 128 x 128 floats, 4 pages each; with gradients 16 pages.
NUM_WEIGHTS, WEIGHT_BYTES = 2, 4 * PAGE
STATE_BYTES = NUM_WEIGHTS * WEIGHT_BYTES  # of one state of every weight
DEVICE_BYTES = 24 * PAGE


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh(), nn.Linear(128, 128, bias=False))


def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(num_steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 128)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with the bytes that homes may take in host memory, whatever else the process holds."""

    def give(num_bytes: int) -> None:
        monkeypatch.setattr(bill, "host_room", lambda *args: (num_bytes, num_bytes))

    return give


def manage(model: nn.Module, optimizer: Any = None, **knobs: Any) -> Any:
    settings: dict[str, Any] = {
        "device": "cpu",
        "page_size": PAGE,
        "checks": CHECKS,
        "device_budget": DEVICE_BYTES,
    }
    return pager.manage(model, optimizer, **{**settings, **knobs})


def bytes_by_home(model: Any, kind: str | None = None) -> dict[str, int]:
    """Bytes of the segments (of one kind) by where the page table has their home."""
    runtime = model.pager._runtime
    found = {home.name.lower(): 0 for home in Home}
    for segment in runtime.space.segments:
        if kind in (None, segment.kind):
            home = Home(int(runtime.table.home[segment.first_page]))
            found[home.name.lower()] += segment.num_pages * PAGE
    return found


def check_trains_as_plain(model: Any, optimizer: torch.optim.Optimizer) -> None:
    plain = make_model()
    expected, found = train(plain, amsgrad(plain)), train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("when", ["given", "found later"])
def test_a_third_state_goes_to_the_disk(tmp_path: Path, host: Any, when: str) -> None:
    """AdamW's bill would need no disk."""
    host(2 * STATE_BYTES + 2 * STATE_BYTES)
    model = make_model()
    optimizer = amsgrad(model)
    paged = manage(model, optimizer if when == "given" else None, disk=tmp_path, device_budget=16 * PAGE)
    on_device = bytes_by_home(paged)["device"]
    check_trains_as_plain(paged, optimizer)
    homes = bytes_by_home(paged)
    assert sum(homes.values()) == 5 * STATE_BYTES
    assert homes["disk"] == STATE_BYTES - on_device
    assert homes["disk"] > 0
    paged.pager._runtime.engine.transfers.settle()  # what is still in the ring, newer values in place of older ones
    statistics = paged.pager.statistics()
    assert statistics.disk_bytes == homes["disk"]
    assert statistics.disk_write_bytes > 0
    assert statistics.disk_budget_bytes > 2**30 or statistics.disk_budget_bytes == bill.disk_room(
        paged.pager.config
    )
    assert paged.pager.plan.budgets["disk"] == statistics.disk_budget_bytes
    paged.pager.close()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_budget_is_a_limit_and_named(tmp_path: Path, host: Any) -> None:
    host(4 * STATE_BYTES)
    model = make_model()
    optimizer = amsgrad(model)
    paged = manage(model, disk=tmp_path, disk_budget=PAGE, device_budget=16 * PAGE)
    assert paged.pager.statistics().disk_budget_bytes == PAGE
    paged(torch.ones(1, 128)).sum().backward()
    with pytest.raises(
        BudgetError, match=r"states 384.00 KiB\).* and 16.00 KiB of disk it misses .*raise disk_budget"
    ):
        optimizer.step()
    paged.pager.close()
    with pytest.raises(BudgetError, match=r"states 384.00 KiB\).*raise disk_budget"):
        manage(
            make_model_with(optimizer), optimizer, disk=tmp_path, disk_budget=PAGE, device_budget=16 * PAGE
        )


def make_model_with(optimizer: torch.optim.Optimizer) -> nn.Module:
    """A module of the optimizer's own parameters."""
    return nn.ParameterList(optimizer.param_groups[0]["params"])


def test_an_optimizer_that_keeps_too_much_is_refused_with_the_bytes_and_the_knob(host: Any) -> None:
    host(4 * STATE_BYTES)
    model = make_model()
    optimizer = amsgrad(model)
    message = r"states 384.00 KiB\).*it misses .* KiB. Raise host_budget or device_budget, or give .*disk="
    with pytest.raises(BudgetError, match="training state needs .*" + message):
        manage(model, optimizer, device_budget=16 * PAGE)
    assert all(type(param) is nn.Parameter for param in model.parameters())
    paged = manage(model, device_budget=16 * PAGE)
    paged(torch.ones(1, 128)).sum().backward()
    with pytest.raises(BudgetError, match="optimizer needs .*" + message):
        optimizer.step()
    paged.pager.close()


def test_an_optimizer_that_keeps_nothing_needs_no_room_for_states(host: Any) -> None:
    host(2 * STATE_BYTES)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    paged = manage(model, optimizer, device_budget=16 * PAGE)
    train(paged, optimizer)
    assert bytes_by_home(paged, "state") == {"device": 0, "host": 0, "disk": 0}
    paged.pager.close()
    with pytest.raises(BudgetError, match=r"states 256.00 KiB"):
        manage(make_model(), device_budget=16 * PAGE)


@pytest.mark.parametrize("when", ["given", "found later"])
def test_states_meant_for_the_device_are_there_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, when: str
) -> None:
    model = make_model()
    optimizer = amsgrad(model)
    device_bytes = 6 * STATE_BYTES + 10 * WEIGHT_BYTES
    with caplog.at_level(logging.INFO, logger="pager"):
        paged = manage(model, optimizer if when == "given" else None, device_budget=device_bytes)
    assumed = 3 if when == "given" else 2
    told = f"{(1 + assumed) * STATE_BYTES // 1024:.2f} KiB on the device, {STATE_BYTES / 1024:.2f} KiB in host memory"
    assert told in caplog.text
    check_trains_as_plain(paged, optimizer)
    assert bytes_by_home(paged, "state") == {"device": 3 * STATE_BYTES, "host": 0, "disk": 0}
    assert bytes_by_home(paged, "gradient") == {"device": 0, "host": STATE_BYTES, "disk": 0}
    assert paged.pager.statistics().wired_bytes == 4 * STATE_BYTES
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)  # states leave their frames and come back
    train(paged, optimizer, 1)
    paged.pager.close()


def test_a_late_parameter_without_room_is_a_budget_error(host: Any) -> None:
    host(4 * STATE_BYTES)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    paged = manage(model, optimizer, device_budget=16 * PAGE)
    train(paged, optimizer, 1)
    paged.late = nn.Parameter(torch.zeros(1024, 512))
    with pytest.raises(
        BudgetError, match=r"no tier has room for late, 2.00 MiB .*Raise host_budget, or give .*disk="
    ):
        train(paged, optimizer, 1)
    del paged.late
    paged.pager.close()


def test_the_bill_goes_by_the_states_dtypes() -> None:
    parameters = sort_parameters(make_model().to(torch.bfloat16), PAGE)
    (name, param), _ = parameters.paged
    half = WEIGHT_BYTES // 2
    wanted = bill.training_state(parameters, {id(param): ExpectedStates((torch.float32,), in_slices=True)})
    assert [item for item in wanted if item.kind == "state"] == [
        Wanted("state", f"{name}.state0", WEIGHT_BYTES, in_slices=True),
        Wanted("state", "2.weight.state0", half),
        Wanted("state", "2.weight.state1", half),
    ]


def test_a_folder_that_is_not_there_is_refused_also_with_a_budget(tmp_path: Path) -> None:
    config = Config(disk=tmp_path / "none", disk_budget="1MiB")
    with pytest.raises(ConfigError, match="none.*give an existing folder"):
        bill.disk_room(config)
    assert bill.disk_room(Config(disk=tmp_path, disk_budget="1MiB")) == 2**20
    assert bill.disk_room(Config(disk=tmp_path, disk_budget=2**60)) < 2**60
    assert bill.disk_room(Config()) == 0


def test_the_headroom_that_takes_the_largest_tensors_room_is_named() -> None:
    budget = DeviceBudget(
        SimulatedDevice(), Config(device_budget=20 * PAGE, device_headroom=18 * PAGE), small_bytes=0
    )
    with pytest.raises(BudgetError, match=r"device_headroom 288.00 KiB.* or lower device_headroom"):
        bill.check_largest([Wanted("parameter", "w", WEIGHT_BYTES)], PAGE, 2 * PAGE, budget)


# -- what a step moves -------------------------------------------------------------------------------------------------


class FakeHomes:
    """Homes by kind."""

    def __init__(self, **homes: Home) -> None:
        self.homes = homes

    def home_planned(self, item: Wanted) -> Home:
        """As the homes."""
        return self.homes[item.kind]


@pytest.mark.parametrize(
    ("homes", "expected"),
    [
        ((Home.DEVICE, Home.DEVICE, Home.DEVICE), (0, 0, 0, 0)),
        ((Home.DEVICE, Home.HOST, Home.HOST), (50, 50, 0, 0)),
        ((Home.HOST, Home.HOST, Home.DISK), (80, 60, 40, 40)),
        ((Home.DISK, Home.HOST, Home.HOST), (80, 60, 30, 10)),
    ],
)
def test_what_a_step_moves_over_each_link(homes: tuple[Home, Home, Home], expected: tuple[int, ...]) -> None:
    wanted = [Wanted("parameter", "w", 10), Wanted("gradient", "w", 10), Wanted("state", "w.state0", 40)]
    fake = FakeHomes(**dict(zip(("parameter", "gradient", "state"), homes, strict=True)))
    assert bill.movement(wanted, fake)[:4] == expected  # type: ignore[arg-type]


def test_the_disk_writes_so_much_a_day() -> None:
    """Case 30: 40 GB of states on a disk of 1.8 and 2.9 GB/s are read and written in 36 s, 2400 times a day."""
    fake = FakeHomes(state=Home.DISK)
    moved = bill.movement([Wanted("state", "w.state0", 40 * 10**9)], fake)  # type: ignore[arg-type]
    assert moved.step_seconds == pytest.approx(40 / 1.8 + 40 / 2.9)
    assert moved.disk_write_bytes_per_day == pytest.approx(40e9 * 86400 / moved.step_seconds)
    idle = bill.movement([Wanted("state", "w.state0", 40)], FakeHomes(state=Home.DEVICE))  # type: ignore[arg-type]
    assert idle.disk_write_bytes_per_day == 0


def test_the_bill_is_stated_before_any_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="pager")
    monkeypatch.setattr(bill, "host_room", lambda *arguments: (8 * PAGE, 8 * PAGE))
    model: Any = pager.manage(
        make_model(), device="cpu", page_size=PAGE, device_budget=DEVICE_BYTES, checks=CHECKS, disk=tmp_path
    )
    lines = [record.message for record in caplog.records]
    stated = next(index for index, line in enumerate(lines) if line.startswith("a step moves at most "))
    managing = next(index for index, line in enumerate(lines) if line.startswith("managing "))
    assert stated < managing
    assert "TB a day" in lines[stated]
    model(torch.ones(1, 128)).sum().backward()
    assert "on disk" in lines[managing]
    model.pager.close()


@pytest.mark.parametrize("have_disk", [False, True])
def test_a_refusal_names_the_smallest_change_and_it_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, have_disk: bool
) -> None:
    host = 2 * PAGE

    def manage(host_bytes: int, disk_pages: int) -> Any:
        monkeypatch.setattr(bill, "host_room", lambda *arguments: (host_bytes, host_bytes))
        knobs: Any = {"device": "cpu", "page_size": PAGE, "device_budget": DEVICE_BYTES, "checks": CHECKS}
        if disk_pages:
            knobs.update(disk=tmp_path, disk_budget=disk_pages * PAGE)
        return pager.manage(make_model(), **knobs)

    with pytest.raises(BudgetError, match="The smallest change that fits: host_budget larger by ") as info:
        manage(host, int(have_disk))
    text = str(info.value)
    larger = pager.parse_size(text.split("larger by ")[1].split(", or ")[0].replace(" ", ""))
    manage(host + larger, int(have_disk)).pager.close()
    with pytest.raises(BudgetError):
        manage(host + larger - PAGE, int(have_disk))
    if have_disk:
        enough = pager.parse_size(text.split("disk_budget = ")[1].rstrip(".").replace(" ", ""))
        manage(host, enough // PAGE).pager.close()
    else:
        assert "or disk=PATH with " in text
        manage(
            host, pager.parse_size(text.split("with ")[-1].split(" to take")[0].replace(" ", "")) // PAGE
        ).pager.close()
