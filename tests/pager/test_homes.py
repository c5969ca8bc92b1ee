"""Where segments live: the plan at ``manage()``, the refusal with its bill, and the frames."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pager.address_space import AddressSpace, Segment
from pager.device.simulated import SimulatedDevice
from pager.errors import BudgetError
from pager.homes import Homes, Wanted
from pager.page_table import Home, PageTable
from pager.tiers.disk_file import DiskFile
from pager.tiers.host_arena import HostArena

PAGE = 16384
MIB = 2**20


def make_homes(host_bytes: int, disk: DiskFile | None = None) -> Homes:
    """Homes over empty tiers."""
    host = HostArena(PAGE, SimulatedDevice(), host_bytes)
    return Homes(AddressSpace(PAGE), PageTable(), host, disk, PAGE)


def make_wanted(num_parameters: int, num_bytes: int = MIB) -> list[Wanted]:
    """Parameters, their gradients, and two states each."""
    names = [f"w{number}" for number in range(num_parameters)]
    return [
        *(Wanted("parameter", name, num_bytes) for name in names),
        *(Wanted("gradient", name, num_bytes) for name in names),
        *(Wanted("state", f"{name}.{number}", num_bytes) for name in names for number in range(2)),
    ]


def plan(homes: Homes, wanted: list[Wanted], *, arena: int, host: int, disk: int = 0) -> dict[str, int]:
    """MiB per tier of the plan."""
    homes.plan(wanted, arena_bytes=arena, host_bytes=host, disk_bytes=disk)
    return {tier: num_bytes // MIB for tier, num_bytes in homes.report(wanted).items()}


def add(homes: Homes, kind: str, name: str, num_bytes: int = MIB) -> Segment:
    """A segment of bytes."""
    return homes.new_segment(
        kind=kind, name=name, size=torch.Size((num_bytes,)), stride=(1,), dtype=torch.uint8
    )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    """64 MiB of disk."""
    file = DiskFile(tmp_path, PAGE, 64 * MIB // PAGE)
    yield file
    file.close()


def test_everything_that_fits_is_wired_but_the_gradients() -> None:
    wanted = make_wanted(4)
    assert plan(make_homes(0), wanted, arena=64 * MIB, host=64 * MIB) == {"device": 12, "host": 4, "disk": 0}


def test_under_pressure_only_parameters_are_wired_up_to_half_the_arena() -> None:
    wanted = make_wanted(16)
    tiers = plan(make_homes(0), wanted, arena=16 * MIB, host=64 * MIB)
    assert tiers == {"device": 7, "host": 57, "disk": 0}


@pytest.mark.parametrize(
    ("host", "wires", "tiers"),
    [
        (57, True, {"device": 7, "host": 57, "disk": 0}),
        (56, True, {"device": 8, "host": 56, "disk": 0}),
        # A quarter of the arena for the update of the largest, half of that for slots.
        (53, True, {"device": 10, "host": 53, "disk": 1}),
        (40, True, {"device": 10, "host": 40, "disk": 14}),
        (64, False, {"device": 0, "host": 64, "disk": 0}),
        (60, False, {"device": 4, "host": 60, "disk": 0}),
    ],
)
def test_where_the_host_lacks_room_streaming_gets_no_more_than_it_needs(
    disk: DiskFile, host: int, wires: bool, tiers: dict[str, int]
) -> None:
    homes, wanted = make_homes(0, disk), make_wanted(16)
    known = {"arena_bytes": 16 * MIB, "host_bytes": host * MIB}
    homes.plan(wanted, **known, disk_bytes=64 * MIB, wires=wires)
    assert {tier: num_bytes // MIB for tier, num_bytes in homes.report(wanted).items()} == tiers
    assert homes.lacks_room(wanted, **known) == (host < 57)


def test_states_that_pass_in_slices_need_no_room_as_a_whole(disk: DiskFile) -> None:
    """Of twice the parameters' bytes each, as moments of halves are."""
    for in_slices, wired in ((True, 10), (False, 5)):
        wanted = [Wanted("parameter", f"p{index}", MIB) for index in range(16)]
        wanted += [Wanted("state", f"p{index}.state0", 2 * MIB, in_slices) for index in range(16)]
        homes = make_homes(0, disk)
        homes.plan(wanted, arena_bytes=16 * MIB, host_bytes=16 * MIB, disk_bytes=64 * MIB, wires=False)
        assert homes.report(wanted)["device"] == wired * MIB


def test_where_the_host_lacks_room_the_largest_are_wired_first(disk: DiskFile) -> None:
    """So that what streams is small and needs little room: updates in slices, gradients that have no homes."""
    names = {f"w{number}": (4 if number in (0, 13) else 1) * MIB for number in range(14)}
    wanted = [Wanted("parameter", name, num_bytes) for name, num_bytes in names.items()]
    wanted += [Wanted("state", f"{name}.0", 2 * size, in_slices=True) for name, size in names.items()]
    homes = make_homes(16 * MIB, disk)
    # Four of 1 MiB stream beside 2 MiB of slots; with the large ones among them four of 4 MiB would.
    found = plan(homes, wanted, arena=18 * MIB, host=16 * MIB, disk=64 * MIB)
    assert found["device"] == 12
    assert [homes.planned("parameter", name) for name in ("w0", "w13")] == [Home.DEVICE] * 2
    # With room below, they are spread: half of the arena less the largest tensor.
    relaxed = make_homes(64 * MIB)
    assert plan(relaxed, wanted, arena=34 * MIB, host=64 * MIB)["device"] == 2


def test_where_the_largest_takes_it_all_nothing_is_wired() -> None:
    wanted = make_wanted(4)
    assert plan(make_homes(0), wanted, arena=2 * MIB, host=64 * MIB)["device"] == 0


def test_wired_parameters_are_spread_over_the_model() -> None:
    homes = make_homes(0)
    plan(homes, make_wanted(16), arena=16 * MIB, host=64 * MIB)
    wired = [number for number in range(16) if homes.planned("parameter", f"w{number}") == Home.DEVICE]
    gaps = [after - before for before, after in itertools.pairwise(wired)]
    assert max(gaps) <= 3


def test_what_the_host_cannot_hold_goes_to_the_disk() -> None:
    homes = make_homes(0)
    wanted = make_wanted(8)
    tiers = plan(homes, wanted, arena=2 * MIB, host=20 * MIB, disk=64 * MIB)
    assert tiers == {"device": 0, "host": 20, "disk": 12}
    assert homes.disk_bytes_planned(wanted) == 12 * MIB
    assert all(homes.planned("parameter", f"w{number}") == Home.HOST for number in range(8))


@pytest.mark.parametrize(
    ("disk_bytes", "message"),
    [
        (0, r"it misses 12.00 MiB. Raise host_budget or device_budget, or give a folder with disk=PATH"),
        (2 * MIB, r"and 2.00 MiB of disk it misses 10.00 MiB. .*, or raise disk_budget"),
    ],
)
def test_what_fits_nowhere_is_refused_with_its_bill(disk_bytes: int, message: str) -> None:
    bill = r"needs 32.00 MiB \(parameters 8.00 MiB, gradients 8.00 MiB, states 16.00 MiB\)"
    with pytest.raises(BudgetError, match=f"{bill}; .*{message}"):
        plan(make_homes(0), make_wanted(8), arena=2 * MIB, host=20 * MIB, disk=disk_bytes)


def test_a_host_budget_below_the_process_lacks_what_the_process_takes_too() -> None:
    homes = make_homes(0)
    message = (
        r"misses 32.00 MiB; the process without it takes 5.00 MiB more .*, which so lacks 37.00 MiB. Raise"
    )
    with pytest.raises(BudgetError, match=message):
        plan(homes, make_wanted(8), arena=2 * MIB, host=-5 * MIB, disk=0)
    tiers = plan(homes, make_wanted(8), arena=2 * MIB, host=-5 * MIB, disk=64 * MIB)
    assert tiers == {"device": 0, "host": 0, "disk": 32}


def test_a_segment_gets_frames_at_its_planned_home(disk: DiskFile) -> None:
    homes = make_homes(20 * MIB, disk)
    wanted = make_wanted(8)
    plan(homes, wanted, arena=16 * MIB, host=20 * MIB, disk=64 * MIB)
    table = homes._table
    for item in wanted:
        segment = add(homes, item.kind, item.name)
        planned = homes.planned(item.kind, item.name)
        assert table.home[segment.first_page : segment.last_page].tolist() == [planned] * segment.num_pages
        frames = table.home_frame[segment.first_page : segment.last_page].tolist()
        assert frames == (
            [-1] * segment.num_pages if planned == Home.DEVICE else list(range(frames[0], frames[0] + 64))
        )
    assert disk.used_bytes == homes.disk_bytes_planned(wanted)


def test_nobody_planned_it_so_it_goes_where_there_is_room(disk: DiskFile) -> None:
    homes = make_homes(MIB, disk)
    one, other = add(homes, "state", "a"), add(homes, "state", "b")
    homes_found = [Home(int(homes._table.home[segment.first_page])) for segment in (one, other)]
    assert homes_found == [Home.HOST, Home.DISK]


def test_without_a_disk_a_full_host_says_so() -> None:
    homes = make_homes(MIB)
    add(homes, "state", "a")
    with pytest.raises(
        BudgetError, match=r"no tier has room for b, 1.00 MiB .*Raise host_budget, or give .*disk="
    ):
        add(homes, "state", "b")


def test_reserved_memory_is_mapped_once() -> None:
    homes = make_homes(8 * MIB)
    homes.reserve_host([MIB, MIB, 5])
    reserved = homes._host.reserved_bytes
    assert reserved == 2 * MIB + PAGE
    homes.reserve_host([MIB])  # still spare
    add(homes, "state", "a")
    add(homes, "state", "b")
    assert homes._host.reserved_bytes == reserved
    homes.reserve_host([MIB])
    assert homes._host.reserved_bytes > reserved


def test_with_a_disk_no_more_is_reserved_than_the_budget(disk: DiskFile) -> None:
    homes = make_homes(2 * MIB, disk)
    homes.reserve_host([MIB] * 5)
    assert homes._host.reserved_bytes == 2 * MIB


@pytest.mark.parametrize("home", [Home.HOST, Home.DISK, Home.DEVICE])
def test_frames_are_given_back(disk: DiskFile, home: Home) -> None:
    homes = make_homes(4 * MIB, disk)
    homes._planned["state", "a"] = home
    segment = add(homes, "state", "a")
    assert homes._host.used_bytes + disk.used_bytes == (0 if home is Home.DEVICE else MIB)
    homes.free(segment)
    assert homes._host.used_bytes + disk.used_bytes == 0
