"""Ctrl-C and other signals between any two lines of the runtime: raised, and training goes on as if earlier."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.engine.leases import Leases
from pager.graph.access import hooks_beneath
from pager.graph.access_trace import AccessTrace
from pager.mmu.binding import Binding
from pager.page_table import PageTable

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_managed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    checks = Checks(daemon="inline", poison=True, streams="late", happens_before=True)
    pager.manage(model, optimizer, device="cpu", device_budget="272KiB", page_size="16KiB", checks=checks)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    loss: Tensor = model(X).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, hit: Callable[[], None]
) -> None:
    """Run ``hit`` inside the ``call``-th call of ``owner.name``, after its work."""
    original = getattr(owner, name)
    calls = [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] == call:
            hit()
        return result

    monkeypatch.setattr(owner, name, wrapped)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def check_goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, plain: Any, done: int) -> None:
    twin, twin_optimizer = plain
    losses = [step(twin, twin_optimizer) for _ in range(done + 3)]
    optimizer.zero_grad()
    for expected in losses[done:]:
        assert torch.equal(step(model, optimizer), expected)
    handle: Any = model.pager
    handle.close()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("name", ["typed", "point_at"])
def test_an_error_while_a_tensor_is_pointed_at_its_frames(
    name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that no signal handler could hold back leaves no tensor without its values."""
    model, optimizer = make_managed()
    step(model, optimizer)
    with monkeypatch.context() as patch:
        interrupt_at(patch, Binding, name, call, raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(X).square().mean().backward()
    check_goes_on(model, optimizer, make(), done=1)


class Struck(Exception):
    """What the handlers of these tests raise."""


def strike(number: int, frame: FrameType | None) -> None:
    raise Struck(number)


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM], ids=lambda s: s.name)
def striking(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal whose handler raises."""
    number: int = request.param
    before = signal.signal(number, strike)
    yield number
    assert signal.getsignal(number) is strike
    signal.signal(number, before)


@pytest.mark.parametrize("verb", ["begin_page_in", "end_page_in", "materialize", "pin", "unpin", "evict"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_signal_inside_the_page_table(
    verb: str, call: int, striking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one while records change: what its handler raises is raised once they agree again."""
    model, optimizer = make_managed()
    step(model, optimizer)
    with monkeypatch.context() as patch:
        interrupt_at(patch, PageTable, verb, call, lambda: signal.raise_signal(striking))
        with pytest.raises(Struck):
            model(X).square().mean().backward()
    check_goes_on(model, optimizer, make(), done=1)


def test_a_signal_while_notes_of_dead_leases_are_worked_off(
    striking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each note is taken once: one that was dropped would keep its frames pinned for ever."""
    model, optimizer = make_managed()
    step(model, optimizer)
    params: Any = [model.get_parameter("0.weight"), model.get_parameter("2.weight")]
    engine = params[0]._pager.mmu.engine
    views = [param.detach() for param in params]
    views.clear()
    with monkeypatch.context() as patch:
        interrupt_at(patch, Leases, "_record_uses", 1, lambda: signal.raise_signal(striking))
        with pytest.raises(Struck):
            engine.drain()
    assert [run.pins for param in params for run in engine.runs_of(param._pager.segment)] == [0, 0]
    check_goes_on(model, optimizer, make(), done=1)


def test_a_signal_while_a_new_trace_is_taken_up(striking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of micro-batches changes, and with it the trace that is followed: the second in these steps."""
    model, optimizer = make_managed()
    step(model, optimizer)
    with monkeypatch.context() as patch:
        interrupt_at(patch, AccessTrace, "next_access", 2, lambda: signal.raise_signal(striking))
        num_struck = 0
        for turn in range(6):
            try:
                for _ in range(1 + turn % 2):
                    model(X).square().mean().backward()
                optimizer.step()
            except Struck:
                num_struck += 1
            optimizer.zero_grad()
        assert num_struck == 1
    assert torch.isfinite(step(model, optimizer))
    handle: Any = model.pager
    handle.close()


@pytest.mark.parametrize("microseconds", [300, 700, 1100, 1900, 2900, 4300])
def test_a_timeout_anywhere_in_a_step(microseconds: int) -> None:
    """An alarm clock that rings again and again while steps run."""
    model, optimizer = make_managed()
    step(model, optimizer)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(10):
            with contextlib.suppress(Struck):
                signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
                model(X).square().mean().backward()
                signal.setitimer(signal.ITIMER_REAL, 0)  # inside: it may ring just now
            assert signal.getsignal(signal.SIGALRM) is strike
            assert hooks_beneath() is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check_goes_on(model, optimizer, make(), done=1)


def test_a_timeout_leaves_no_hooks_of_ours_behind() -> None:
    """Saved-tensor hooks that stayed in force would take other tensors for frames that are gone."""
    model, optimizer = make_managed()
    step(model, optimizer)
    before = signal.signal(signal.SIGALRM, strike)
    try:
        for turn in range(600):
            with contextlib.suppress(Struck):
                signal.setitimer(signal.ITIMER_REAL, (30 + turn) / 1e6)
                model(X)
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert hooks_beneath() is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check_goes_on(model, optimizer, make(), done=1)
