"""The tree of errors: what a caller may catch, and that it costs no torch to have it."""

from __future__ import annotations

import errno
import pickle
import re
import subprocess
import sys

import pytest
import torch

from pager import errors


@pytest.mark.parametrize(
    ("name", "parents"),
    [
        ("ConfigError", (errors.PagerError, ValueError)),
        ("BudgetError", (errors.PagerError, torch.OutOfMemoryError, RuntimeError)),
        ("TierError", (errors.PagerError,)),
        ("TierFull", (errors.TierError,)),
        ("TierIOError", (errors.TierError, OSError)),
        ("DiskFull", (errors.TierFull, errors.TierIOError)),
        ("CorruptPage", (errors.TierError,)),
        ("PagerClosed", (errors.PagerError,)),
        ("TornStateError", (errors.PagerError,)),
        ("PagerInternalError", (errors.PagerError,)),
        ("RaceError", (errors.PagerInternalError,)),
    ],
)
def test_an_error_is_what_its_callers_catch(name: str, parents: tuple[type[BaseException], ...]) -> None:
    kind = getattr(errors, name)
    assert all(issubclass(kind, parent) for parent in parents)
    assert kind.__name__ == name
    assert kind.__doc__


def test_every_error_is_drawn_in_the_tree_of_the_module() -> None:
    drawn = set(re.findall(r"(?:-- |^    )([A-Z]\w+)", errors.__doc__ or "", flags=re.MULTILINE))
    assert drawn == set(errors.__all__) | {"PagerError"}


def test_a_budget_error_is_one_class_and_keeps_its_message() -> None:
    error = errors.BudgetError("CUDA out of memory. pager: 3 GiB needed")
    assert errors.BudgetError is errors.BudgetError
    assert error.args == ("CUDA out of memory. pager: 3 GiB needed",)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is errors.BudgetError
    assert str(again) == str(error)


def test_an_input_output_error_keeps_errno_and_file() -> None:
    error = errors.TierIOError(errno.ENOSPC, "no space left", "/disk/pages")
    assert error.errno == errno.ENOSPC
    assert error.filename == "/disk/pages"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = getattr(errors, "NoSuch" + "Error")


def test_the_errors_cost_no_torch_until_the_budget_error_is_wanted() -> None:
    program = (
        "import sys, pager.errors as errors\n"
        "assert 'torch' not in sys.modules\n"
        "errors.BudgetError\n"
        "assert 'torch' in sys.modules\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
