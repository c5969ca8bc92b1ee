"""Control tests of the waits: each place where a stream or the host waits for an event is left out once.

The sites are read from the source, so a new wait without a control fails here, and so does a wait that nothing needs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pager.errors import RaceError
from tests.races import scenarios
from tests.races.scenarios import Scenario, WrongBytes
from tests.races.sites import skip_only, wait_sites

# (site, stream whose events are left out or None for all of them, scenario that notices)
CONTROLS: list[tuple[str, str | None, Scenario]] = [
    ("tiers/device_arena.py:DeviceArena.poison:wait", None, scenarios.poison_a_run_in_use),
    ("tiers/device_arena.py:DeviceArena.poison:wait", None, scenarios.train_with_poison),
    ("engine/faults.py:Faults._begin_use:wait", None, scenarios.use_what_was_paged_in),
    ("engine/faults.py:Faults._begin_use:wait", "d2h", scenarios.in_place_write_after_a_write_back),
    ("engine/faults.py:Faults._begin_use:wait", None, scenarios.train_over_host),
    ("engine/staging.py:Staging._begin_use:wait", None, scenarios.train_through_staging),
    ("engine/transfer.py:Transfers.send_home:wait#1", None, scenarios.send_home_what_is_being_made),
    ("engine/transfer.py:Transfers.send_home:wait#2", None, scenarios.send_home_over_a_page_in),
    ("engine/transfer.py:Transfers.send_home:wait#3", None, scenarios.send_home_more_than_may_be_kept),
    ("engine/reclaim.py:Reclaimer.write_back:wait", None, scenarios.write_through_a_view_after_a_write_back),
    ("engine/transfer.py:Transfers._page_in_from_host:wait", None, scenarios.page_in_over_a_page_out),
    ("engine/transfer.py:Transfers._page_in_from_host:wait", None, scenarios.train_over_host),
    ("engine/transfer.py:Transfers._page_in_from_host:wait", None, scenarios.page_in_what_is_on_its_way_out),
    ("engine/transfer.py:Transfers.page_out_all:wait", None, scenarios.page_out_what_was_written),
    ("engine/transfer.py:Transfers.page_out_all:wait", None, scenarios.train_over_host),
    ("engine/transfer.py:Transfers.page_out_all:wait", None, scenarios.page_out_over_an_unused_page_in),
    (
        "engine/transfer.py:Transfers.page_out_all:wait",
        "slots out",
        scenarios.page_out_over_a_write_back_of_a_slot,
    ),
    (
        "engine/transfer.py:Transfers._page_in_from_host:wait",
        "slots out",
        scenarios.page_in_after_a_write_back_of_a_slot,
    ),
    ("engine/ring.py:Slot.settle:synchronize", None, scenarios.three_pages_through_two_slots),
    ("engine/ring.py:Slot.settle:synchronize", None, scenarios.train_over_disk),
    ("engine/disk_queue.py:DiskQueue._run_write:synchronize", None, scenarios.write_to_disk_what_has_arrived),
    (
        "engine/disk_queue.py:DiskQueue._fill:synchronize",
        None,
        scenarios.read_back_what_is_on_its_way_to_the_disk,
    ),
    (
        "engine/disk_transfer.py:DiskTransfers.begin_page_in:wait",
        None,
        scenarios.page_in_from_disk_over_a_page_out,
    ),
    (
        "engine/disk_transfer.py:DiskTransfers.page_out:synchronize",
        None,
        scenarios.write_again_to_a_run_of_which_a_part_went_out,
    ),
    ("engine/transfer.py:Transfers.home_bytes:synchronize#1", None, scenarios.read_a_home_being_written),
    ("engine/transfer.py:Transfers.home_bytes:synchronize#2", None, scenarios.store_over_a_page_in),
    ("engine/transfer.py:Transfers.forget:synchronize", None, scenarios.reuse_the_home_of_a_retired_segment),
    ("engine/transfer.py:Transfers.send_to_device:wait", None, scenarios.step_on_the_cpu_after_a_look),
    ("optim/update_stream.py:UpdateStream.lend:wait", None, scenarios.train_inside_backward),
    ("optim/update_stream.py:UpdateStream._take_back:wait", None, scenarios.lend_more_than_may_be_lent),
    ("optim/update_stream.py:UpdateStream.join:wait#1", None, scenarios.join_at_the_end_of_a_backward),
    ("optim/update_stream.py:UpdateStream.join:wait#2", None, scenarios.join_from_another_stream),
    ("closing.py:Closing._synchronize:synchronize", "compute", scenarios.close_after_a_forward),
    ("closing.py:Closing._synchronize:synchronize", "h2d", scenarios.close_with_a_page_in_under_way),
    ("closing.py:Closing._synchronize:synchronize", "d2h", scenarios.close_with_a_page_out_under_way),
    (
        "home_moves.py:HomeMoves.release:synchronize",
        None,
        scenarios.give_host_memory_back_with_a_page_in_under_way,
    ),
    (
        "tiers/device_arena.py:DeviceArena.remove_slab:synchronize",
        None,
        scenarios.give_back_a_slab_being_copied_out,
    ),
]


def _id(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(("site", "stream", "scenario"), CONTROLS, ids=_id)
def test_a_wait_left_out_is_noticed(
    site: str, stream: str | None, scenario: Scenario, tmp_path: Path
) -> None:
    with pytest.raises((RaceError, WrongBytes)):
        scenario(skip_only(site, stream=stream), tmp_path)
    # What a backward that failed had left to do, and all that hangs on it, torch keeps until the next one.
    torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.parametrize("scenario", dict.fromkeys(scenario for _, _, scenario in CONTROLS), ids=_id)
def test_with_all_waits_nothing_is_wrong(scenario: Scenario, tmp_path: Path) -> None:
    scenario(skip_only(None), tmp_path)
    assert scenario.__doc__


def test_every_wait_has_a_control() -> None:
    assert {site for site, _, _ in CONTROLS} == set(wait_sites().values())
