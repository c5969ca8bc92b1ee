"""Sizes of the language model: presets, files, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pager.tools.errors import InputError
from pager.tools.language_model import DecoderModel
from pager.tools.model_sizes import PRESETS, ModelSizes, load_sizes, num_parameters

SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "ffn": 48}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_counted_as_it_is_built(name: str) -> None:
    with torch.device("meta"):
        model = DecoderModel(PRESETS[name])
    assert num_parameters(PRESETS[name]) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("1b", 1.26), ("3b", 3.37), ("7b", 6.74), ("13b", 13.0), ("30b", 32.5)),
        *(("70b", 70.3), ("405b", 405), ("1t", 1007)),
    ],
)
def test_a_preset_is_as_large_as_it_is_called(name: str, billions: float) -> None:
    assert num_parameters(PRESETS[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_state_is_parameters_gradients_and_two_moments() -> None:
    sizes = ModelSizes(**SIZES)
    assert sizes.state_bytes == 4 * 4 * num_parameters(sizes)
    assert ModelSizes(**SIZES, dtype="bfloat16").state_bytes == sizes.state_bytes // 2


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml", ".JSON"])
def test_sizes_come_from_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"mine{suffix}"
    path.write_text(json.dumps({**SIZES, "checkpoint": True}))  # JSON is YAML
    assert load_sizes(str(path)) == ("mine", ModelSizes(**SIZES, checkpoint=True))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smal", "unknown model 'smal'; did you mean 'small'"),
        ("70000", "unknown model '70000'; known are 13b, 1b"),
        ("missing.json", "cannot read the model sizes in missing.json"),
    ],
)
def test_an_unknown_model_is_refused_with_what_there_is(model: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_sizes(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**SIZES, "hiden": 3}, "unknown model size 'hiden'; did you mean 'hidden'"),
        ({"hidden": 32}, "missing model sizes layers, heads, ffn"),
        ({**SIZES, "layers": 0}, "layers is 0; expected a whole number of at least 1"),
        ({**SIZES, "layers": 2.5}, "layers is 2.5; expected a whole number"),
        ({**SIZES, "layers": True}, "layers is True; expected a whole number"),
        ({**SIZES, "heads": 5}, "hidden is 32 with 5 heads"),
        ({**SIZES, "heads": 32}, "must be a whole, even number"),
        ({**SIZES, "vocabulary": 100}, "text is read as bytes, so at least 256"),
        ({**SIZES, "dtype": "float33"}, "did you mean 'float32'"),
        ({**SIZES, "checkpoint": "yes"}, "checkpoint is 'yes'; expected true or false"),
        ([1, 2], "holds list; expected a mapping"),
    ],
)
def test_a_file_of_wrong_sizes_is_refused_by_name(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as raised:
        load_sizes(str(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(("suffix", "text"), [(".json", "{hidden: 3"), (".yaml", "hidden: [3")])
def test_a_broken_file_is_refused(suffix: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"sizes{suffix}"
    path.write_text(text)
    with pytest.raises(InputError, match="is not valid (JSON|YAML)"):
        load_sizes(str(path))
