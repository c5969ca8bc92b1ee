"""The command line as a whole: help, version, exit codes, and being cut off."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import pager
from pager.errors import BudgetError, ConfigError, PagerInternalError
from pager.tools import cli
from pager.tools.errors import CommandFailed, InputError


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Set ``raising.error`` and ``pager sample`` raises it."""

    class Raising(Exception):
        error: BaseException | None = None

    def run(arguments: argparse.Namespace) -> int:
        if Raising.error is not None:
            raise Raising.error
        return arguments.code

    module = SimpleNamespace(
        __doc__="A command for tests.",
        add_arguments=lambda parser: parser.add_argument("--code", type=int, default=0),
        run=run,
    )
    command = cli.Command(name="sample", help="for tests", module="pager.tools.sample")
    monkeypatch.setitem(sys.modules, "pager.tools.sample", module)
    monkeypatch.setattr(cli.make_parser, "__defaults__", ((command,),))
    return Raising


def test_a_commands_own_code_is_the_exit_code(raising: type[BaseException]) -> None:
    assert cli.main(["sample"]) == 0
    assert cli.main(["sample", "--code", "3"]) == 3


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("--text x: there is no such file"), 2, "pager: --text x: there is no such file\n"),
        (ConfigError("page_size is 3"), 2, "pager: page_size is 3\n"),
        (CommandFailed("check FAILED"), 1, "pager: check FAILED\n"),
        (pager.PagerClosed("closed"), 1, "pager: closed\n"),
        (KeyboardInterrupt(), 130, "pager: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_a_code(
    error: BaseException, code: int, message: str, raising: type, capsys: pytest.CaptureFixture[str]
) -> None:
    raising.error = error  # type: ignore[attr-defined]
    assert cli.main(["sample"]) == code
    assert capsys.readouterr() == ("", message)


def test_a_budget_that_cannot_hold_is_a_failure_with_its_message(
    raising: type, capsys: pytest.CaptureFixture[str]
) -> None:
    raising.error = BudgetError("3 GiB needed, 2 GiB allowed")  # type: ignore[attr-defined]
    assert cli.main(["sample"]) == 1
    assert capsys.readouterr().err == "pager: 3 GiB needed, 2 GiB allowed\n"
    raising.error = BudgetError("pager: 3 GiB needed")  # type: ignore[attr-defined]
    assert cli.main(["sample"]) == 1
    assert capsys.readouterr().err == "pager: 3 GiB needed\n"


@pytest.mark.parametrize("error", [PagerInternalError("a bug"), ZeroDivisionError("a bug")])
def test_a_bug_shows_its_traceback(error: Exception, raising: type) -> None:
    raising.error = error  # type: ignore[attr-defined]
    with pytest.raises(type(error), match="a bug"):
        cli.main(["sample"])


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["--version"], 0, f"pager {pager.__version__}"),
        (["--help"], 0, "train a byte-level language model"),
        (["train", "--help"], 0, "--prefetch-distance"),
        ([], 2, "usage: pager"),
        (["trian"], 2, "invalid choice: 'trian'"),
        (["train", "--steps", "0"], 2, "'0' is not a number from 1 up"),
        (["train", "--steps", "ten"], 2, "'ten' is not a number"),
        (["train", "--lr", "nan"], 2, "'nan' is not a number"),
        (["train", "--lr", "inf"], 2, "'inf' is not a number"),
        (["train", "--prefetch-distance", "-1"], 2, "'-1' is not a number from 0 up"),
    ],
)
def test_use_and_misuse(
    argv: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == code
    output = capsys.readouterr()
    assert expected in (output.out if code == 0 else output.err)


def test_every_command_has_help_and_a_module_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert [command.name for command in cli.COMMANDS] == [
        "train",
        "bench",
        "plan",
        "estimate",
        "verify",
        "tune",
        "doctor",
        "monitor",
    ]
    for command in cli.COMMANDS:
        assert cli.main([command.name, "--help"]) == 0
        assert "usage: pager" in capsys.readouterr().out
        assert command.help


def test_a_reader_that_goes_away_is_no_error(repository: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    completed = subprocess.run(
        [sys.executable, "-m", "pager.tools.cli", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=repository,
        env=environment,
    )
    os.close(writer)
    assert completed.returncode == 141
    assert completed.stderr == ""


def test_output_that_nobody_can_take_is_said(
    raising: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        full.write("what a command prints")
        assert cli.main(["sample"]) == 1
        full.flush()  # what comes after it goes nowhere, and complains no more
    assert capsys.readouterr().err == (
        "pager: cannot write the output: No space left on device; free space there, or write it elsewhere\n"
    )


def test_an_error_of_a_file_is_not_taken_for_one_of_the_output(raising: type) -> None:
    raising.error = FileNotFoundError(2, "No such file")  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError):
        cli.main(["sample"])
