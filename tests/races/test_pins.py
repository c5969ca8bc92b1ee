"""Control tests of the pins: each place that pins a run is left out once, and what it protected is lost."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

import pytest

from pager.engine.engine import Engine
from pager.engine.run import Run
from pager.errors import BudgetError, RaceError
from tests.engine_rig import PAGE, make_filled
from tests.races.scenarios import WrongBytes, check_bytes
from tests.races.sites import current_site, find_sites

PIN_SITES = sorted(find_sites("_pin").values())


def leave_out(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    """Pins of this site, and the unpins that belong to them, do nothing."""
    sites = find_sites("_pin")
    left_out: Counter[int] = Counter()
    pin, unpin = Engine._pin, Engine._unpin

    def pin_but_there(engine: Engine, run: Run) -> None:
        if current_site(sites) == site:
            left_out[id(run)] += 1
        else:
            pin(engine, run)

    def unpin_but_there(engine: Engine, run: Run) -> None:
        if left_out[id(run)]:
            left_out[id(run)] -= 1
        else:
            unpin(engine, run)

    monkeypatch.setattr(Engine, "_pin", pin_but_there)
    monkeypatch.setattr(Engine, "_unpin", unpin_but_there)


def hold_a_lease_under_pressure(*, resident_before: bool) -> None:
    """A lease of the only frame is held while another segment wants it."""
    rig, values = make_filled([PAGE, PAGE], arena_frames=1)
    if resident_before:
        rig.read(0)
    _, held = rig.lease(0)
    with contextlib.suppress(BudgetError):
        rig.read(1)
    check_bytes(held.numpy().copy(), values[0], "held")
    del held
    rig.close()


def hold_a_run_under_pressure() -> None:
    """A run without a lease is held while another segment wants its frame."""
    rig, values = make_filled([PAGE, PAGE], arena_frames=1)
    rig.read(0)
    (run,) = rig.engine.runs_of(rig.segments[0])
    rig.engine.hold(run)
    with contextlib.suppress(BudgetError):
        rig.read(1)
    if run.frame < 0:
        raise WrongBytes("the run was sent away")
    check_bytes(rig.arena.bytes_of(run.frame, PAGE).numpy().copy(), values[0], "held")
    rig.engine.release(run)
    rig.engine.drain()
    rig.close()


SCENARIOS: dict[str, Callable[[], None]] = {
    "engine/faults.py:Faults._page_in:_pin": lambda: hold_a_lease_under_pressure(resident_before=False),
    "engine/faults.py:Faults.acquire:_pin": lambda: hold_a_lease_under_pressure(resident_before=True),
    "engine/leases.py:Leases.hold:_pin": hold_a_run_under_pressure,
}


@pytest.mark.parametrize("site", PIN_SITES)
def test_a_pin_left_out_is_noticed(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, site)
    with pytest.raises((RaceError, WrongBytes)):
        SCENARIOS[site]()


@pytest.mark.parametrize("site", PIN_SITES)
def test_with_all_pins_a_lease_keeps_its_frames(site: str) -> None:
    SCENARIOS[site]()
    assert site in SCENARIOS
