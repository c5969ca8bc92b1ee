"""What README.md and docs/ tell people to run, run or found: the example, the commands, the paths, the knobs."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pager
from pager.tools.cli import make_parser
from pager.tools.train import make_job
from tests.models import make_mlp

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Where a path without a folder of its own may start, as people write it.
STARTS = [ROOT, ROOT / "pager", ROOT / "docs"]


def code_block(language: str) -> str:
    """The first block of ``language`` in the README."""
    block = re.search(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block.group(1)


def inline_code(path: Path) -> list[str]:
    """What stands in backticks, and the indented blocks."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (\S.*)$", text, re.MULTILINE)


def test_the_example_runs_and_trains_like_plain_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    plain, managed = make_mlp(), make_mlp()
    initial = {name: tensor.clone() for name, tensor in plain.model.state_dict().items()}
    data = [torch.randn(4, 96, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    budget = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    example = code_block("python").replace('"12GiB"', str(budget))
    assert str(budget) in example
    manage = functools.partial(pager.manage, device="cpu", page_size="16KiB")

    def run(model: Any) -> Any:
        names = {
            "pager": SimpleNamespace(manage=manage),
            "model": model,
            "data": data,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        }
        exec(compile(example, "README.md", "exec"), names)
        return names["model"]

    assert run(managed.model) is managed.model
    output = capsys.readouterr().out
    assert "plan: " in output
    assert re.search(r"page_in_bytes=[1-9]", output)
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2)
    for batch in data:
        plain.model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in plain.model.state_dict().items():
        assert not torch.equal(tensor, initial[name])
        assert torch.equal(tensor, managed.model.state_dict()[name]), name


def test_the_make_targets_exist_and_their_arguments_parse() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [*README.splitlines(), *inline_code(ROOT / "README.md")]
    made = [match for line in commands if (match := re.match(r'make ([a-z]+)(?: ARGS="([^"]*)")?', line))]
    assert {match.group(1) for match in made} == {"train", "test"}
    assert {match.group(1) for match in made} <= set(targets)
    given = [match.group(2) for match in made if match.group(2) and "--help" not in match.group(2)]
    assert given
    for arguments in given:
        job = make_job(make_parser().parse_args(["train", *shlex.split(arguments)]))
        assert (job.model, job.check) == ("tiny", True)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_files_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    for code in inline_code(document):
        named += [
            word for word in re.split(r"[\s,]+", code) if re.fullmatch(r"[\w/.-]+(\.(py|txt|toml)|/)", word)
        ]
    made_by_runs = {"runs/"}
    missing = [
        path
        for path in named
        if path not in made_by_runs and not any((start / path).exists() for start in STARTS)
    ]
    assert named
    assert missing == []


def test_the_table_of_knobs_names_knobs() -> None:
    fields = {field.name for field in dataclasses.fields(pager.Config)}
    table = README.partition("## Knobs")[2].partition("## ")[0]
    knobs = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert set(knobs) == fields - {"checks"}  # those are for tests
