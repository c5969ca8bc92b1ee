"""The systems by themselves: first weights, the hand-written update, what each refuses."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pager.device.base import make_device
from pager.host_limit import process_bytes
from pager.tools.bench import ceilings, child
from pager.tools.bench.child import MemorySampler
from pager.tools.bench.job import BETAS, EPS, LR, WEIGHT_DECAY, StepJob
from pager.tools.bench.managed import _Managed, make_managed
from pager.tools.bench.peers import PEERS, _Deepspeed, update_states
from pager.tools.bench.system import Refused, fill_module, make_filled_model
from pager.tools.language_model import make_model
from pager.tools.model_sizes import ModelSizes

CPU = torch.device("cpu")
SIZES = ModelSizes(hidden=32, layers=1, heads=2, ffn=64, dtype="bfloat16", checkpoint=True)


def make_job(**changes: Any) -> StepJob:
    job = StepJob(
        workload="wee",
        sizes=SIZES,
        batches=(1,),
        seq=16,
        systems=(),
        cap_bytes=2**20,
        steps=3,
        clips=(None,),
        knobs={},
        deterministic=False,
        timeout=60.0,
        device="cpu",
    )
    return dataclasses.replace(job, **changes)


def test_first_weights_do_not_depend_on_order_or_precision() -> None:
    model = make_filled_model(SIZES, seed=1, device=CPU)
    other = make_model(dataclasses.replace(SIZES, dtype="float32"), seed=7)
    for path, module in reversed(list(other.named_modules())):
        fill_module(module, path, seed=1, dtype="bfloat16", device=CPU)
    named = dict(other.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param.float(), named[name]), name
    assert not torch.equal(named["blocks.0.gate.weight"], named["blocks.0.up.weight"])
    assert named["blocks.0.gate.weight"].abs().max() <= 32**-0.5
    assert torch.equal(named["norm.weight"], torch.ones(32))
    again = make_filled_model(SIZES, seed=2, device=CPU)
    assert not torch.equal(model.head.weight, again.head.weight)  # type: ignore[union-attr,arg-type]


def test_the_update_by_hand_is_torchs() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000))
    states = torch.zeros(3, 1000)
    states[0] = weight.detach()
    step = torch.zeros(())
    optimizer = torch.optim.AdamW(
        [weight], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )
    for _ in range(3):
        weight.grad = torch.randn(1000)
        update_states(states, weight.grad, step)
        optimizer.step()
    assert torch.equal(states[0], weight.detach())
    assert torch.equal(states[2], optimizer.state[weight]["exp_avg_sq"])
    assert step.item() == 3


@pytest.mark.parametrize("name", ["gpu", "traditional"])
def test_clipping_changes_the_step(name: str) -> None:
    tokens = torch.randint(256, (2, 1, 16))
    heads = []
    for clip in (None, 1e-9):
        device = make_device("cpu")
        system: Any = PEERS[name](make_job(), CPU, device)
        before = system.states[0].clone()
        system.step(tokens[0], tokens[1], clip)
        assert not torch.equal(system.states[0][0], before[0])
        assert all(weight.grad is None for weight in system.weights)
        for weight, states in zip(system.weights, system.states, strict=True):
            assert torch.equal(weight.detach().flatten(), states[0].bfloat16())
        heads.append(system.states[0][1].abs().max().item())
        system.close()
    assert heads[1] < heads[0] / 100
    gc.collect()


def test_knobs_that_are_not_there_are_refused() -> None:
    with pytest.raises(Refused, match="has no knob not_a_knob"):
        make_managed(make_job(), CPU, {"not_a_knob": 1})


def test_knob_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(Refused, match="host_budget"):
        make_managed(make_job(), CPU, {"host_budget": "many"})


def test_pager_refuses_to_clip_what_is_updated_in_backward() -> None:
    system = object.__new__(_Managed)
    system.handle = SimpleNamespace(config=SimpleNamespace(update_at="backward"))
    with pytest.raises(Refused, match="before the norm of all gradients is known"):
        system.step(torch.zeros(1), torch.zeros(1), 1.0)


def test_torchao_refuses_to_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def optimizer(params: Any, kind: type, **options: Any) -> Any:
        made.update(options, kind=kind, params=list(params))
        return torch.optim.SGD(made["params"], lr=0.0)

    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(CPUOffloadOptimizer=optimizer))
    system = PEERS["torchao"](make_job(), CPU, make_device("cpu"))
    tokens = torch.randint(256, (2, 1, 16))
    assert system.step(tokens[0], tokens[1], None) > 0
    assert system.traffic().h2d_bytes == sum(param.nbytes for param in made["params"])
    assert made["kind"] is torch.optim.AdamW
    assert made["offload_gradients"] is made["fused"] is True
    with pytest.raises(Refused, match="copies gradients to the host in backward"):
        system.step(tokens[0], tokens[1], 1.0)


def test_deepspeed_is_told_the_clip_of_each_step() -> None:
    norms = []

    class Engine:
        optimizer = SimpleNamespace(clip_grad=None)

        def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return tokens.sum()

        def backward(self, loss: torch.Tensor) -> None:
            norms.append(self.optimizer.clip_grad)

        def step(self) -> None:
            return

    system = object.__new__(_Deepspeed)
    system.engine = Engine()
    for clip in (None, 1.0):
        assert system.step(torch.ones(3), torch.ones(3), clip).item() == 3
    assert norms == [0.0, 1.0]


@pytest.mark.parametrize("name", ["torchao", "deepspeed-zero2", "deepspeed-zero3"])
def test_who_is_not_installed_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchao", "torchao.optim", "deepspeed"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        PEERS[name](make_job(), CPU, make_device("cpu"))


@pytest.mark.parametrize(
    ("name", "knobs", "error", "refused"),
    [
        ("torchao", {}, "not installed: no module torchao.optim", True),
        ("pager", {"not_a_knob": 1}, "this version of pager has no knob not_a_knob", True),
        ("pager", {"page_size": "4MiB"}, "BudgetError: ", False),
    ],
)
def test_a_child_leaves_the_reason_in_words(
    name: str,
    knobs: dict[str, Any],
    error: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    make_job(knobs=knobs, cap_bytes=2**16).write(tmp_path / "job.json")
    assert child.main([str(tmp_path / "job.json"), name, str(tmp_path / "result.json")]) == 1
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["error"].startswith(error)
    assert result["refused"] is refused
    assert result["runs"] == []
    assert "Traceback" in capsys.readouterr().err


def test_the_sampler_sees_memory_that_was_touched() -> None:
    sampler = MemorySampler(make_device("cpu"))
    sampler.sample()
    before = sampler.resident_bytes
    block = torch.ones(2**25)
    sampler.start()
    sampler.sample()
    sampler.close()
    assert sampler.resident_bytes >= before + block.nbytes // 2
    assert sampler.allocator_bytes == 0
    assert not sampler.is_alive()


def test_a_disk_is_a_ceiling_only_where_there_is_one(tmp_path: Path) -> None:
    assert ceilings._disk(make_job()) == {}
    before = process_bytes()
    found = ceilings._disk(make_job(knobs={"disk": str(tmp_path), "host_budget": "16GiB"}))
    assert found["disk_bytes_per_second"] > 1e6
    assert found["host_budget_bytes"] == pytest.approx(2**34 - before, abs=2**28)
    assert (
        ceilings._disk(make_job(knobs={"disk": str(tmp_path), "host_budget": "1MiB"}))["host_budget_bytes"]
        == 0
    )
    assert not list(tmp_path.iterdir())
