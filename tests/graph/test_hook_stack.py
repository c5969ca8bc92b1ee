"""The saved-tensor hooks in force: torch's own answer, and the stack that is kept where torch has none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from pager.graph.hook_stack import HookStack, top_hooks

C: Any = torch._C._autograd


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[HookStack]:
    """A stack that watches torch, beside its own answer."""
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(C, name, getattr(C, name))  # put back afterwards
    watching = HookStack()
    watching.watch(C)
    yield watching
    assert watching.top(False) is None, "all that was put in force has ended"


def hooks(name: str, found: list[str]) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(name)
        return tensor

    return saved_tensors_hooks(pack, lambda packed: packed)


def check(stack: HookStack) -> None:
    assert stack.top(False) == top_hooks(False)


def test_the_innermost_hooks_of_this_thread_are_on_top(stack: HookStack) -> None:
    found: list[str] = []
    check(stack)
    with hooks("outer", found):
        check(stack)
        top = stack.top(False)
        assert top is not None
        with contextlib.suppress(ZeroDivisionError), hooks("inner", found):
            assert stack.top(False) != top
            check(stack)
            torch.ones(2, requires_grad=True).exp()
            _ = 1 / 0
        assert stack.top(False) == top
        with torch.autograd.graph.save_on_cpu():
            check(stack)
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(stack.top(False)))
        thread.start()
        thread.join()
        assert seen == [None]
        torch.ones(2, requires_grad=True).exp()
    assert found == ["inner", "outer"]


def test_what_torch_refuses_is_not_on_the_stack(stack: HookStack) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        with pytest.raises(RuntimeError, match="not here"), hooks("refused", []):
            pass
        assert stack.top(False) is None


def test_hooks_from_before_end_as_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(C, name, getattr(C, name))
    found: list[str] = []
    stack = HookStack()
    with hooks("before", found):
        stack.watch(C)
        with hooks("after", found):
            torch.ones(2, requires_grad=True).exp()
        assert stack.top(False) is None
        torch.ones(2, requires_grad=True).exp()
    torch.ones(2, requires_grad=True).exp()
    assert found == ["after", "before"]
    assert stack.top(False) is None


def test_checkpoints_put_theirs_on_it(stack: HookStack) -> None:
    inside: list[bool] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        inside.append(stack.top(False) is not None)
        check(stack)
        return x.exp()

    checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert inside == [True, True]
