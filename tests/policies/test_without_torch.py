"""The policies import numpy and nothing else of weight: checked in a process that cannot import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "networkx"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import numpy as np
from pager.policies import belady, clock, lru, placement, prefetch, protocol

for name in protocol.EVICTION_POLICY_NAMES:
    policy = protocol.make_eviction_policy(name)
    policy.resize(3)
    for key in (2, 0, 1):
        policy.record_access(key, key)
    order = policy.eviction_order(np.arange(3), np.array([5, 9, 1]))
    print(name, *order.tolist())
print(prefetch.FixedDistance(2).select(np.ones(3), np.ones(3), np.zeros(3, dtype=bool), 1.0).tolist())
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "networkx", "graph", "policies"}))
print(sorted(name for name in sys.modules if name.startswith("pager.") and not
name.startswith("pager.policies")))
"""


def test_policies_work_where_torch_cannot_be_imported() -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n") == [
        "belady 1 0 2",
        "clock 2 0 1",
        "lru 2 0 1",
        "[0, 1]",
        "[]",
        "[]",
        "",
    ]
