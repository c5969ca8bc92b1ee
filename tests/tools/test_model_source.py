"""Models by name, by config and by function; each built on meta; and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pager.graph.capture import step_loss
from pager.tools.captured import capture_model
from pager.tools.errors import CommandFailed, InputError
from pager.tools.machine import Machine
from pager.tools.model_source import load_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "mistral": LLAMA | {"model_type": "mistral"},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
    },
    "t5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": 256,
        "d_ff": 512,
        "d_kv": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 1000,
    },
    "vit": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "image_size": 64,
    },
}
# Its table has a row for padding, and one before that.
ROBERTA = {
    "model_type": "roberta",
    "architectures": ["RobertaForMaskedLM"],
    "max_position_embeddings": 514,
    "pad_token_id": 1,
}
# Its table has two rows before the first position.
OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "max_position_embeddings": 512,
    "ffn_dim": 512,
}


def test_a_preset_has_its_inputs() -> None:
    source = load_model("tiny", batch=3, seq=None)
    assert (source.name, source.dtype, source.tokens) == ("tiny", "float32", 3 * 128)
    assert all(parameter.is_meta for parameter in source.model.parameters())


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hugging_face_config_is_built_and_captured(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    source = load_model(str(path), batch=2, seq=32)
    assert all(parameter.is_meta for parameter in source.model.parameters())
    found = capture_model(source, Machine(), page_size=2**14)
    assert found.step.num_parameters > 500_000
    trained = found.step.gradient_tick >= 0
    assert trained.mean() > 0.9
    assert source.tokens == (2 if kind == "vit" else 64)
    assert source.name == tmp_path.name
    assert found.way in ("captured on meta", "captured on fake")


@pytest.mark.parametrize(
    ("kind", "more", "tokens"),
    [
        ("bert", {}, 512),
        ("bert", ROBERTA, 512),
        ("bert", OPT, 512),
        ("gpt2", {}, 1024),
        ("gpt2", {"n_positions": 4096}, 2048),
        ("t5", {}, 2048),
        ("llama", {"max_position_embeddings": 512}, 2048),
    ],
    ids=str,
)
def test_a_sequence_is_no_longer_than_positions_are_looked_up(
    kind: str, more: dict[str, Any], tokens: int, tmp_path: Path
) -> None:
    """Those that are computed (rotary, relative) have no end."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind] | more))
    source = load_model(str(path), batch=1, seq=None)
    assert source.tokens == tokens
    capture_model(source, Machine(), page_size=2**14)
    if tokens < 2048:
        with pytest.raises(
            InputError, match=rf"{tokens + 1} tokens, and the model {tokens} positions; pass --seq"
        ):
            load_model(str(path), batch=1, seq=tokens + 1)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "vit"])
def test_with_a_seed_weights_and_inputs_are_drawn(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    one, same, other = (load_model(str(path), batch=2, seq=32, seed=seed) for seed in (5, 5, 6))
    for name, value in one.kwargs.items():
        assert value.float().std() > 0, name
        assert torch.equal(value, same.kwargs[name])
        assert not torch.equal(value, other.kwargs[name])
    for parameter, twin in zip(one.model.parameters(), same.model.parameters(), strict=True):
        assert torch.equal(parameter, twin)
    loss = step_loss(one.model(**one.kwargs))
    assert loss is not None
    assert torch.isfinite(loss)


def test_a_preset_with_a_seed_has_targets_of_their_own() -> None:
    source = load_model("tiny", batch=2, seq=64, seed=1)
    inputs, targets = source.args
    assert not torch.equal(inputs, targets)
    assert 128 < int(inputs.max()) < 256
    assert not any(parameter.is_meta for parameter in source.model.parameters())


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text("import torch\nfrom torch import nn\n" + text)
    return path


def test_a_function_in_a_file_gives_model_and_inputs(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "def make(batch, seq):\n    return nn.Linear(512, 512), (torch.zeros(batch, seq, 512),)\n"
        "def words():\n    return nn.Embedding(512, 512), torch.ones(2, 5, dtype=torch.int64)\n"
        "def named():\n    return nn.Linear(512, 512), {'input': torch.zeros(4, 512)}\n",
    )
    source = load_model(f"{path}:make", batch=3, seq=7)
    assert source.args[0].shape == (3, 7, 512)
    assert source.tokens == 3
    assert next(source.model.parameters()).is_meta
    assert load_model(f"{path}:words", batch=1, seq=None).args[0].tolist() == [[0] * 5] * 2
    assert load_model(f"{path}:named", batch=1, seq=None).kwargs["input"].shape == (4, 512)
    assert capture_model(source, Machine(), page_size=2**14).step.num_parameters == 512 * 512


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("def make(): return 5", "make", "returned int; expected a torch.nn.Module"),
        ("def make(): return nn.Linear(2, 2)", "make", "returned a model without inputs"),
        ("def make(): return nn.ReLU(), (torch.zeros(2),)", "make", "has no parameters"),
        ("def make(): raise KeyError('no such layer')", "make", "make raised KeyError: 'no such layer'"),
        ("def make(): return 1", "makes", "has no function 'makes'; did you mean 'make'"),
        ("1 / 0", "make", "mine.py raised ZeroDivisionError: division by zero"),
        ("def (", "make", "raised SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_used_says_why_after_its_traceback(
    text: str, function: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=message):
        load_model(f"{path}:{function}", batch=1, seq=None)
    shows = "raised" in message
    assert ("Traceback" in capsys.readouterr().err) == shows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "llama"}, "says no sizes: none of hidden_size"),
        ({"model_type": "llama", "hidden_size": 64}, "says no sizes: none of num_hidden_layers"),
        ({"architectures": ["LlamaForCausalLM"]}, "names no model_type"),
        (LLAMA | {"model_type": "lama"}, "makes no model of it"),
        (LLAMA | {"dtype": "int8"}, "dtype is 'int8'; expected a floating type"),
        (LLAMA | {"num_attention_heads": 0}, "makes no model of it"),
    ],
)
def test_a_config_that_is_no_model_is_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_model(str(path), batch=1, seq=16)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("7bb", "unknown model '7bb'; did you mean '7b'"),
        ("nowhere.py:make", "there is no such file"),
        ("nowhere.py", "names no function; write nowhere.py:FUNCTION"),
        ("nowhere.json", "cannot read the model sizes"),
    ],
)
def test_an_unknown_model_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(spec, batch=1, seq=None)


def test_what_cannot_be_captured_or_paged_says_so(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "class Data(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.zeros(512, 512))\n"
        "    def forward(self, x):\n        return (x @ self.w)[x.sum().item() > 0]\n"
        "def data(): return Data(), (torch.zeros(2, 512),)\n"
        "def small(): return nn.Linear(4, 4), (torch.zeros(2, 4),)\n",
    )
    with pytest.raises(CommandFailed, match="cannot be captured without data"):
        capture_model(load_model(f"{path}:data", batch=1, seq=None), Machine(), page_size=2**14)
    with pytest.raises(CommandFailed, match="no parameter is as large as a page"):
        capture_model(load_model(f"{path}:small", batch=1, seq=None), Machine(), page_size=2**14)
