"""The rig that the tests of threads share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pager.page_table import Home
from tests.engine_rig import PAGE, make_filled
from tests.races.gates import DiskRig


@pytest.fixture
def disk_rig(tmp_path: Path) -> Iterator[DiskRig]:
    """Three one-page segments at home on disk, two frames on the device."""
    rig, values = make_filled([PAGE] * 3, arena_frames=2, homes=[Home.DISK] * 3, disk_folder=tmp_path)
    yield rig, values
    rig.close()
