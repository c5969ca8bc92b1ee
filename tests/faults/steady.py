"""A training over three tiers in a process of its own, where nobody else takes memory: what it takes, as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pager.statistics import Counters
from tests.faults import media
from tests.faults.media import make_layers, make_optimizer, manage_over_three_tiers, train_stubbornly


def main(folder: Path) -> None:
    """Look after 100 and after 300 steps."""
    with pytest.MonkeyPatch.context() as patch:
        # The sawtooth for people grows to a few MiB by itself.
        patch.setattr(Counters, "HISTORY_SAMPLES", 100)
        # What grows does so per unit and step; half of the units are enough.
        patch.setattr(media, "LAYERS", 5)
        model = make_layers()
        optimizer = make_optimizer(model)
        runtime = manage_over_three_tiers(
            patch, model, optimizer, folder, streams="early", happens_before=False, poison=False
        )
        found = []
        for num_steps in (100, 200):  # by the first look every slot of the ring has been used
            train_stubbornly(model, optimizer, num_steps)
            runtime.engine.transfers.settle()
            gc.collect()
            found.append(
                {
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "host": runtime.host.reserved_bytes,
                    "disk": runtime.disk.used_bytes,
                    "frames": runtime.disk.num_frames,
                    "resident": psutil.Process().memory_info().rss,
                }
            )
        model.pager.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
