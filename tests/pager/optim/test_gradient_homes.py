"""Host memory that is lent to gradients, when the host budget takes it away and gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pager.address_space import AddressSpace
from pager.device.simulated import SimulatedDevice
from pager.homes import Homes
from pager.optim.gradient_homes import GradientHomes
from pager.page_table import PageTable
from pager.tiers.host_arena import HostArena

PAGE = 16384


@pytest.fixture
def rig() -> Iterator[Any]:
    """Four gradients of four pages, which have no homes."""
    host = HostArena(PAGE, SimulatedDevice(), 100 * PAGE)
    table = PageTable()
    homes = Homes(AddressSpace(PAGE), table, host, None, PAGE)
    gradients: list[Any] = [
        SimpleNamespace(
            segment=homes.new_segment(
                name=f"w{number}",
                kind="gradient",
                size=torch.Size((4 * PAGE,)),
                stride=(1,),
                dtype=torch.uint8,
                later=True,
            )
        )
        for number in range(4)
    ]
    mmu: Any = SimpleNamespace(engine=SimpleNamespace(table=table))
    lent = GradientHomes(mmu, homes, lambda gradient: homes.settle(gradient.segment))
    yield SimpleNamespace(host=host, homes=homes, gradients=gradients, lent=lent)
    host.close()


def test_what_a_smaller_budget_took_is_had_again_when_there_is_room(rig: Any) -> None:
    under_way: Any = SimpleNamespace(is_over=False)
    assert rig.lent.reserve(rig.gradients)
    assert rig.lent.lend(rig.gradients[0])
    rig.lent.note(rig.gradients[0], under_way)
    assert (rig.host.reserved_bytes, rig.homes.spare_host_bytes) == (8 * PAGE, 4 * PAGE)
    rig.lent.renew()
    assert rig.host.reserved_bytes == 8 * PAGE, "nothing is missing"
    rig.homes.release_host(locked=True)
    rig.homes.limit_host(0)
    assert rig.host.reserved_bytes == 4 * PAGE, "what is lent stays"
    rig.lent.renew()
    assert not rig.lent.lend(rig.gradients[1])
    rig.homes.resize_host(4 * PAGE)
    rig.lent.renew()
    assert rig.host.reserved_bytes == 8 * PAGE
    assert rig.lent.lend(rig.gradients[1])
    rig.lent.renew()
    assert rig.host.reserved_bytes == 8 * PAGE


def test_who_lends_nothing_has_nothing_renewed(rig: Any) -> None:
    rig.lent.renew()
    assert rig.host.reserved_bytes == 0
