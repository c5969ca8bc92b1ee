"""The order that capture predicts is the order in which the door sees the accesses of a real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.graph.access_trace import AccessRow, Phase
from tests import models
from tests.equality.training import make_case

Batch = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any, Batch], Tensor]
Access = tuple[int, str, str, int, int, bool, str]

# Every parameter has a page of its own size, however small the test models.
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "page_size": "16KiB",
    "device_budget": "8MiB",
    "checks": Checks(happens_before=True, poison=True, daemon="inline", page_all=True),
}


def predicted_and_seen(model: nn.Module, batch: Batch, loss: Loss) -> tuple[list[Access], list[Access]]:
    """Forward and backward of one step: what the captured trace expects, and what the door recorded.

    Reads the runtime behind the handle, since no public face shows single accesses.
    """
    args, kwargs = batch
    pager.manage(model, **KNOBS)
    handle: Any = model.pager
    runtime = handle._runtime
    try:
        loss(model(*args, **kwargs), batch).backward()
        assert runtime.planner.way.startswith("captured"), runtime.planner.note
        assert runtime.engine.timeline.deviations == 0
        trace = runtime.planner.trace
        columns = (trace.tick, trace.segment, trace.first_page, trace.num_pages, trace.write, trace.phase)
        expected = [AccessRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        names = [(segment.kind, segment.name) for segment in runtime.space.segments]
        return _readable(expected, names), _readable(runtime.engine.timeline.recorded, names)
    finally:
        handle.close()


def _readable(rows: list[AccessRow], names: list[tuple[str, str]]) -> list[Access]:
    first = rows[0].tick if rows else 0
    return [
        (
            row.tick - first,
            *names[row.segment],
            row.first_page,
            row.num_pages,
            bool(row.write),
            Phase(row.phase).name,
        )
        for row in rows
    ]


@pytest.mark.parametrize("name", models.BUILDERS)
def test_shipped_models(name: str) -> None:
    case = models.BUILDERS[name]()
    expected, seen = predicted_and_seen(case.model, case.make_batch(0), case.loss)
    assert seen == expected
    assert {"FORWARD", "BACKWARD", "GRADIENT"} <= {access[-1] for access in seen}
    assert ("RECOMPUTE" in {access[-1] for access in seen}) == name.startswith("decoder_")


@pytest.mark.parametrize("training", ["reentrant", "nonreentrant"])
@pytest.mark.parametrize("name", ["mlp", "called_twice", "encoder_decoder"])
def test_checkpointed_blocks(name: str, training: str) -> None:
    case = make_case(name, training)
    args, _ = batch = case.make_batch(0)
    for arg in args:
        arg.requires_grad_(arg.is_floating_point())
    expected, seen = predicted_and_seen(case.model, batch, case.loss)
    assert seen == expected
    assert "RECOMPUTE" in {access[-1] for access in seen}


def make_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def make_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=models.VOCABULARY,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


@pytest.mark.parametrize("checkpointing", models.CHECKPOINTING)
@pytest.mark.parametrize("make", [make_llama, make_gpt2])
def test_hugging_face(make: Callable[[], nn.Module], checkpointing: str) -> None:
    torch.manual_seed(0)
    model: Any = make()
    if checkpointing != "none":
        # The newer name came with version 5, which warns of the older one.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": checkpointing == "reentrant"})
        model.config.use_cache = False
    ids = torch.randint(models.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    batch: Batch = ((), {"input_ids": ids, "labels": ids})
    expected, seen = predicted_and_seen(model, batch, lambda output, _: output.loss)
    assert seen == expected
    assert len(seen) > 2 * sum(1 for p in model.parameters() if p.dim() > 1)
