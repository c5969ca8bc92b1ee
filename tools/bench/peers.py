"""The other ways to train the same model: all on the GPU, and those that keep the optimizer's state in host memory.

Each is written as its own documentation says, with the least that makes it run: same model code, same optimizer
options, same first weights. Libraries that are not installed raise ImportError, which the bench reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from pager.device.base import Device
from pager.host_limit import host_limit_bytes
from pager.tiers.host_arena import HostArena
from pager.tools.bench.job import BETAS, EPS, LR, WEIGHT_DECAY, StepJob
from pager.tools.bench.system import (
    Refused,
    System,
    Traffic,
    adamw_options,
    fill_module,
    make_filled_model,
)
from pager.tools.language_model import make_model

__all__ = ["PEERS", "update_states"]

# torch's fused AdamW on fp32 copies: master, first and second moment.
_STATES = 3
_FRAME_BYTES = 2**21


def update_states(states: Tensor, gradient: Tensor, step: Tensor) -> None:
    """Fused AdamW on ``states`` (3, numel) fp32: master, first and second moment. ``gradient``: numel, fp32."""
    master, first, second = states
    adamw(
        [master],
        [gradient],
        [first],
        [second],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=BETAS[0],
        beta2=BETAS[1],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        eps=EPS,
        maximize=False,
    )


def _update(weight: Tensor, gradient: Tensor, states: Tensor, step: Tensor) -> None:
    update_states(states, gradient.flatten().float(), step)
    weight.view(-1).copy_(states[0])  # the weight follows its master


class _Plain(System):
    """The whole model on the device, with a hand-written update of fp32 states."""

    def __init__(self, job: StepJob, device: torch.device) -> None:
        self.model = make_filled_model(job.sizes, seed=job.seed, device=device)
        self.weights = list(self.model.parameters())
        self.steps = [torch.zeros((), device=device) for _ in self.weights]

    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.weights, clip)
        with torch.no_grad():
            for number, weight in enumerate(self.weights):
                gradient, weight.grad = weight.grad, None
                assert gradient is not None
                self.update(number, weight, gradient)
        return loss.detach()

    def update(self, number: int, weight: Tensor, gradient: Tensor) -> None:
        """Update parameter ``number``."""
        raise NotImplementedError


class _OnDevice(_Plain):
    """fp32 masters and moments on the device."""

    @torch.no_grad()
    def __init__(self, job: StepJob, device: torch.device) -> None:
        super().__init__(job, device)
        self.states = [torch.zeros(_STATES, weight.numel(), device=device) for weight in self.weights]
        for weight, states in zip(self.weights, self.states, strict=True):
            states[0].copy_(weight.flatten())

    def update(self, number: int, weight: Tensor, gradient: Tensor) -> None:
        _update(weight, gradient, self.states[number], self.steps[number])

    def traffic(self) -> Traffic:
        return Traffic(0, 0, None)


class _Traditional(_Plain):
    """fp32 masters and moments in page-locked host memory of exactly their size: to the device and back, in turn.

    One stream, so that nothing overlaps; parameter by parameter, so that the device holds one parameter's states.
    """

    @torch.no_grad()
    def __init__(self, job: StepJob, device: torch.device, machine: Device) -> None:
        super().__init__(job, device)
        sizes = [_STATES * 4 * weight.numel() for weight in self.weights]
        frames = [-(-size // _FRAME_BYTES) for size in sizes]
        # Pieces of the arena end where a parameter would not fit any more.
        spare = 0 if sum(sizes) < 2**35 else max(frames)
        self.arena = HostArena(_FRAME_BYTES, machine, host_limit_bytes())
        self.arena.grow(sum(frames) + spare)
        self.states = []
        self.moved_bytes = 0
        for weight, size, count in zip(self.weights, sizes, frames, strict=True):
            memory = self.arena.view(self.arena.allocate(count), size).view(torch.float32)
            states = memory.view(_STATES, -1)
            states[0].copy_(weight.flatten().float())
            self.states.append(states)  # the moments are zero: fresh memory of the system is

    def update(self, number: int, weight: Tensor, gradient: Tensor) -> None:
        here = self.states[number].to(weight.device, non_blocking=True, copy=True)
        _update(weight, gradient, here, self.steps[number])
        self.states[number].copy_(here, non_blocking=True)
        self.moved_bytes += here.nbytes

    def traffic(self) -> Traffic:
        return Traffic(self.moved_bytes, self.moved_bytes, None)

    def close(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # copies into the arena
        self.states.clear()
        self.arena.close()


class _Fsdp2(System):
    """PyTorch's fully_shard on one process: fp32 shards, gradients and moments on the host, bf16 on the device."""

    def __init__(self, job: StepJob, device: torch.device) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        self.folder = tempfile.TemporaryDirectory(prefix="pager-bench-")
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{self.folder.name}/store",
            rank=0,
            world_size=1,
        )
        sizes = dataclasses.replace(job.sizes, dtype="float32")
        self.model = make_model(sizes, seed=job.seed, device="meta")
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, job.sizes.dtype)),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        }
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        # The fp32 shards come into being on the host; values are drawn where the other systems draw theirs.
        self.model.to_empty(device="cpu")
        for path, module in self.model.named_modules():
            fill_module(module, path, seed=job.seed, dtype=job.sizes.dtype, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **adamw_options())

    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        self.folder.cleanup()  # the process group ends with its process


class _Torchao(System):
    """torchao's CPUOffloadOptimizer: gradients leave in backward, one fused CPU AdamW a parameter, all in bf16."""

    def __init__(self, job: StepJob, device: torch.device) -> None:
        optimizers = import_module("torchao.optim")
        self.model = make_filled_model(job.sizes, seed=job.seed, device=device)
        self.optimizer = optimizers.CPUOffloadOptimizer(
            self.model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, **adamw_options()
        )
        self.bytes_per_step = sum(weight.nbytes for weight in self.model.parameters())
        self.num_steps = 0

    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        if clip is not None:
            raise Refused(
                "CPUOffloadOptimizer copies gradients to the host in backward, before a norm is known"
            )
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return loss.detach()

    def traffic(self) -> Traffic:
        moved = self.num_steps * self.bytes_per_step
        return Traffic(moved, moved, None)


class _Deepspeed(System):
    """DeepSpeed ZeRO-2 or ZeRO-3 with the optimizer (3: and the parameters) offloaded to the CPU."""

    def __init__(self, job: StepJob, device: torch.device, stage: int) -> None:
        deepspeed = import_module("deepspeed")
        self.folder = tempfile.TemporaryDirectory(prefix="pager-bench-")
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = "0"
        os.environ |= {
            "WORLD_SIZE": "1",
            "LOCAL_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29531",
        }
        deepspeed.init_distributed(
            dist_backend="nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{self.folder.name}/store",
            rank=0,
            world_size=1,
        )
        to_cpu = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": stage, "offload_optimizer": to_cpu}
        if stage == 3:
            zero["offload_param"] = to_cpu
        options = adamw_options()
        model = make_filled_model(job.sizes, seed=job.seed, device=device)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": job.batches[0],
                "gradient_accumulation_steps": 1,
                "bf16": {"enabled": True},
                "gradient_clipping": 0.0,
                "optimizer": {"type": "AdamW", "params": {**options, "betas": list(options["betas"])}},
                "zero_optimization": zero,
                "steps_per_print": 10**9,
            },
        )

    def step(self, tokens: Tensor, targets: Tensor, clip: float | None) -> Tensor:
        self.engine.optimizer.clip_grad = clip or 0.0
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.cleanup()


PEERS: Mapping[str, Callable[[StepJob, torch.device, Device], System]] = {
    "gpu": lambda job, device, machine: _OnDevice(job, device),
    "traditional": _Traditional,
    "fsdp2": lambda job, device, machine: _Fsdp2(job, device),
    "torchao": lambda job, device, machine: _Torchao(job, device),
    "deepspeed-zero2": lambda job, device, machine: _Deepspeed(job, device, 2),
    "deepspeed-zero3": lambda job, device, machine: _Deepspeed(job, device, 3),
}
