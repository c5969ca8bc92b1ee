"""The model under pager, as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import pager
from pager.config import Config
from pager.errors import ConfigError
from pager.tools.bench.job import StepJob
from pager.tools.bench.system import Refused, System, Traffic, adamw_options, fill_module
from pager.tools.language_model import make_model

__all__ = ["make_managed"]


class _Managed(System):
    def __init__(self, job: StepJob, device: torch.device, knobs: Mapping[str, Any]) -> None:
        unknown = sorted(knobs.keys() - Config.__dataclass_fields__.keys())
        if unknown:
            raise Refused(f"this version of pager has no knob {', '.join(unknown)}")
        self.model = make_model(job.sizes, seed=job.seed, device="meta")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), fused=device.type != "cpu" or None, **adamw_options()
        )
        paths = {id(module): path for path, module in self.model.named_modules()}
        example = torch.zeros(2, job.batches[0], job.seq, dtype=torch.long)

        def init(module: Any) -> None:
            fill_module(module, paths[id(module)], seed=job.seed, dtype=job.sizes.dtype, device=device)

        try:
            pager.manage(
                self.model,
                self.optimizer,
                device=job.device,
                device_budget=job.cap_bytes,
                example_inputs=(example[0], example[1]),
                init=init,
                **knobs,
            )
        except ConfigError as error:
            raise Refused(str(error)) from error
        self.handle: Any = self.model.pager
        master = knobs.get("master")
        self.state = "fp32 master, fp32 moments" if master == "float32" else f"moments in {job.sizes.dtype}"

    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        if clip is not None and self.handle.config.update_at == "backward":
            raise Refused('update_at="backward" updates before the norm of all gradients is known')
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        if clip is not None:
            self.handle.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def traffic(self) -> Traffic:
        statistics = self.handle.statistics()
        return Traffic(statistics.page_in_bytes, statistics.page_out_bytes, statistics.stall_seconds)

    def close(self) -> None:
        # Not the handle: that would bring the whole state into this process's memory, to be dropped.
        runtime = self.handle._runtime
        if runtime.disk is not None:
            runtime.engine.transfers.stop()
            runtime.disk.close()

    def facts(self) -> dict[str, Any]:
        plan = self.handle.plan
        return {
            "statistics": self.handle.statistics().as_dict(),
            "arena_bytes": plan.budgets["device"],
            "predicted_page_in_bytes": plan.predicted.page_in_bytes if plan.predicted else None,
        }


def make_managed(job: StepJob, device: torch.device, knobs: Mapping[str, Any]) -> System:
    """pager with ``knobs``, planned for the first batch of the job; Refused where it does not have them."""
    return _Managed(job, device, knobs)
