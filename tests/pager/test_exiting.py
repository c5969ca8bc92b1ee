"""Scripts that end without close(): their exit status is theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# With homes on a disk that takes nothing any more, or with updates on the CPU under way.
SCRIPT = """
import errno, os, sys, tempfile
import torch
import pager
from pager import bill

torch.manual_seed(0)
kind = sys.argv[1]
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
knobs = {"update_at": "backward", "update_on": "cpu"}
if kind.startswith("disk"):
    bill.host_room = lambda *arguments: (2**20, 2**40)
    knobs = {"disk": tempfile.mkdtemp(dir=sys.argv[2])}
pager.manage(model, optimizer, device="cpu", device_budget="1MiB", page_size="16KiB", **knobs)

def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")

for step in range(5):
    if step == 2 and kind == "disk full":
        os.pwritev = full
    try:
        optimizer.zero_grad()
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
    except pager.errors.TierError:
        pass
print("the end")
"""


@pytest.mark.parametrize("kind", ["disk", "disk full", "CPU"])
def test_the_interpreter_ends_well(kind: str, tmp_path: Path) -> None:
    """It was aborted in half of the runs with a full disk: a thread of the disk came back from torch too late."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, kind, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3 if kind == "disk full" else 1)
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out == "the end\n"
