"""What is to be measured: workload, systems, knobs. No torch here: ``pager --help`` stays quick."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pager.tools.errors import InputError, closest
from pager.tools.model_sizes import ModelSizes, load_sizes, num_parameters

__all__ = ["CEILINGS", "SYSTEMS", "StepJob", "SystemFacts", "parse_systems"]

# AdamW as language models are trained; the same for every system.
LR = 1e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPS = 1e-8

# The first two steps build what a system builds lazily; over a third of them a system may still adapt.
LEAST_DROPPED_STEPS = 2
DROPPED_SHARE = 1 / 3

CEILINGS = "ceilings"

CAPS: Mapping[str, int] = {"3b": 12 * 2**30, "7b": 24 * 2**30, "13b": 24 * 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemFacts:
    """What to know before a system's numbers are compared.

    ``cap_on``: what the cap bounds: the whole process, torch's allocator, or nothing. ``state``: the optimizer
    state it keeps. ``note`` is shown with its row. ``knobs``: of pager.Config where it is pager, else None.
    """

    cap_on: str
    state: str
    needs_gpu: bool = True
    note: str = ""
    knobs: Mapping[str, Any] | None = None

    @property
    def is_pager(self) -> bool:
        """Whether it is pager, with whatever knobs."""
        return self.knobs is not None


FP32 = "fp32 master, fp32 moments"

SYSTEMS: Mapping[str, SystemFacts] = {
    "pager": SystemFacts(cap_on="process", state="by --master", needs_gpu=False, knobs={}),
    "pager-step": SystemFacts(
        cap_on="process",
        state=FP32,
        needs_gpu=False,
        knobs={"update_at": "step", "update_on": "device", "master": "float32"},
    ),
    "pager-backward": SystemFacts(
        cap_on="process",
        state=FP32,
        needs_gpu=False,
        knobs={"update_at": "backward", "update_on": "auto", "master": "float32"},
    ),
    "gpu": SystemFacts(cap_on="nothing", state=FP32, needs_gpu=False, note="no cap: all of it on the GPU"),
    "traditional": SystemFacts(
        cap_on="nothing",
        state=FP32,
        needs_gpu=False,
        note="no cap: weights and gradients stay on the GPU, see its peak",
    ),
    "fsdp2": SystemFacts(cap_on="allocator", state=FP32),
    "torchao": SystemFacts(
        cap_on="allocator",
        state="bf16 weights, bf16 moments, no master",
        note="less precision: no fp32 master, moments in bf16; no clipping: gradients leave in backward",
    ),
    "deepspeed-zero2": SystemFacts(cap_on="allocator", state=FP32),
    "deepspeed-zero3": SystemFacts(cap_on="allocator", state=FP32),
}

DEFAULT_SYSTEMS = (
    "pager-backward,pager-step,gpu,traditional,fsdp2,torchao,deepspeed-zero2,deepspeed-zero3,pager-backward"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepJob:
    """One ``pager bench step``. ``batches``: sequences a step, one run after another. ``clips``: None is no clipping.
    ``knobs``: those of pager.Config that were named; they win over a system's own.

    ``cap_bytes`` None is no cap; ``device`` "cuda" or "cpu" (the simulated device).
    """

    workload: str
    sizes: ModelSizes
    batches: tuple[int, ...]
    seq: int
    systems: tuple[str, ...]
    cap_bytes: int | None
    steps: int
    clips: tuple[float | None, ...]
    knobs: Mapping[str, Any]
    deterministic: bool
    timeout: float
    device: str
    seed: int = 0

    @property
    def num_parameters(self) -> int:
        """Of the workload's model."""
        return num_parameters(self.sizes)

    @property
    def num_dropped(self) -> int:
        """Steps of a run that do not count."""
        return max(LEAST_DROPPED_STEPS, int(self.steps * DROPPED_SHARE))

    def knobs_of(self, system: str) -> dict[str, Any] | None:
        """What ``system`` hands to pager.manage; None for one that is not pager."""
        own = SYSTEMS[system].knobs
        return None if own is None else {**own, **self.knobs}

    def write(self, path: Path) -> None:
        """Leave it for a child to ``read``."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> StepJob:
        """What ``write`` left."""
        content = json.loads(path.read_text(encoding="utf-8"))
        content["sizes"] = ModelSizes(**content["sizes"])
        for name in ("systems", "clips", "batches"):
            content[name] = tuple(content[name])
        return cls(**content)


def parse_systems(text: str) -> tuple[str, ...]:
    """The names in ``"pager,gpu"``; InputError for one that is not known, or for none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in SYSTEMS:
            raise InputError(f"--systems: unknown system {name!r}{closest(name, SYSTEMS)}")
    if not names:
        raise InputError(f"--systems names none; known are {', '.join(SYSTEMS)}")
    return names


def load_workload(name: str) -> tuple[str, ModelSizes, int | None]:
    """Short name, sizes and the cap in bytes that goes with a workload (None: say it with --cap)."""
    workload, sizes = load_sizes(name)
    return workload, sizes, CAPS.get(workload)
