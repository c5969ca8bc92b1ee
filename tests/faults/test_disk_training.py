"""Training with homes on three tiers: exact, each byte once a step, and steady."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pager.page_table import Home
from tests.faults.media import (
    Medium,
    check_equal,
    check_it_was_compressed,
    compression,
    make_layers,
    make_optimizer,
    manage_over_three_tiers,
    train_plainly,
    train_stubbornly,
)

__all__ = ["compression"]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("streams", "daemon"), [("late", "inline"), ("early", "inline"), ("late", "thread"), ("early", "thread")]
)
def test_homes_on_three_tiers_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, streams: str, daemon: str
) -> None:
    """Case 9, with 20 % of the state on the device, 30 % in host memory and 50 % on the disk."""
    model = make_layers()
    optimizer = make_optimizer(model)
    runtime = manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams=streams, daemon=daemon
    )
    losses, errors = train_stubbornly(model, optimizer, 6)
    table = runtime.table
    homes = [
        int(table.home[page])
        for segment in runtime.space.segments
        for page in range(segment.first_page, segment.last_page)
    ]
    shares = [homes.count(home) / len(homes) for home in Home]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=0.06)
    assert errors == []
    check_it_was_compressed(model, compression)
    model.pager.close()
    check_equal([*losses, *(param.detach() for param in model.parameters())], train_plainly(6))


def test_each_page_on_disk_is_read_once_and_written_once_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    medium = Medium(monkeypatch)
    model = make_layers()
    optimizer = make_optimizer(model)
    runtime = manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late", daemon="inline"
    )
    train_stubbornly(model, optimizer, 3)
    runtime.engine.transfers.settle()
    medium.reads.clear()
    medium.writes.clear()
    num_steps = 5
    train_stubbornly(model, optimizer, num_steps)
    runtime.engine.transfers.settle()
    on_disk = {
        int(runtime.table.home_frame[page]): (segment.kind, segment.name, page)
        for segment in runtime.space.segments
        for page in range(segment.first_page, segment.last_page)
        if int(runtime.table.home[page]) == Home.DISK
    }
    assert on_disk
    # What the last step wrote and the next has begun to read lies on both sides of the count's ends.
    for frame, what in on_disk.items():
        least = num_steps - 1 if what[0] == "state" else 0  # a gradient may find room on the device
        assert least <= medium.reads[frame] <= num_steps + 1, what
        assert least <= medium.writes[frame] <= num_steps + 1, what
    assert sum(medium.reads.values()) <= num_steps * len(on_disk)
    assert sum(medium.writes.values()) <= num_steps * len(on_disk)
    model.pager.close()


def test_three_hundred_steps_take_no_more_than_one_hundred(tmp_path: Path) -> None:
    """Case 34. What grows by a page a step is seen."""
    command = [sys.executable, "-m", "tests.faults.steady", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after.pop("resident") - before.pop("resident") < 2 * 2**20
    assert after == before
