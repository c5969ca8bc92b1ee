"""Homes on their way between host memory and the disk while the disk fails, or Ctrl-C comes: no page is lost."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pager.engine.moving import HomeMover
from pager.engine.transfer import Transfers
from pager.errors import BudgetError, DiskFull, TierError, TierIOError
from pager.home_frames import HomeFrames
from pager.home_moves import HomeMoves
from pager.host_cap import HostCap
from pager.tiers.host_arena import HostArena
from tests.faults.media import Medium, backward, check_equal, train_plainly, train_stubbornly
from tests.faults.moves import BASE, check_books, homes_of, manage_in_host_memory

ERRORS: dict[str, tuple[int, type[TierError]]] = {
    "EIO": (errno.EIO, TierIOError),
    "ENOSPC": (errno.ENOSPC, DiskFull),
    "EROFS": (errno.EROFS, TierIOError),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two homes at a time, so that there is a middle."""
    monkeypatch.setattr("pager.engine.moving.BATCH_BYTES", 2 * 2**16)


def values_at_the_end(model: Any, losses: list[torch.Tensor]) -> list[torch.Tensor]:
    """As `train_plainly` gives them."""
    check_books(model)
    model.pager.close()
    return [*losses, *(param.detach() for param in model.parameters())]


@pytest.mark.pairwise(name=ERRORS, after=[0, 5, 11], daemon=["inline", "thread"])
def test_a_disk_that_fails_while_homes_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int, daemon: str
) -> None:
    """What has moved stays there, the rest here; the error is told once, and a further wish is fulfilled."""
    number, kind = ERRORS[name]
    medium = Medium(monkeypatch)
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks={"daemon": daemon})
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    before = handle.config, handle.statistics().host_budget_bytes, host.budget_bytes
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full // 2)
    medium.fail(write=number, after=after)
    optimizer.zero_grad()
    losses.append(backward(model, 2))
    optimizer.step()
    medium.heal()
    assert (handle.config, handle.statistics().host_budget_bytes, host.budget_bytes) == before
    on_disk = homes_of(model)["state", "DISK"]
    assert after // 2 * 2 - 2 <= on_disk <= after
    assert host.reserved_bytes == full - on_disk * 2**16, "what moved is given back"
    check_books(model)
    more, errors = train_stubbornly(model, optimizer, 2, first=3)
    assert [type(error) for error in errors] == [kind]
    assert (errors[0].errno, errors[0].filename) == (number, str(tmp_path))  # type: ignore[attr-defined]
    handle.set(host_budget=BASE + full // 2)
    rest, errors = train_stubbornly(model, optimizer, 2, first=5)
    assert errors == []
    assert host.reserved_bytes <= full // 2
    check_equal(values_at_the_end(model, [*losses, *more, *rest]), train_plainly(7))


@pytest.mark.parametrize("after", [0, 3])
def test_a_disk_that_fails_while_homes_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    medium = Medium(monkeypatch)
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks={"daemon": "inline"})
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full // 2)
    losses += train_stubbornly(model, optimizer, 2, first=2)[0]
    move = HomeMoves.to_host
    failing = [True]

    def to_host(moves: HomeMoves, room_bytes: int, *, at_most_bytes: int) -> int:
        if failing:
            failing.clear()
            medium.fail(read=errno.EIO, after=after)
        try:
            return move(moves, room_bytes, at_most_bytes=at_most_bytes)
        finally:
            medium.heal()

    monkeypatch.setattr(HomeMoves, "to_host", to_host)
    handle.set(host_budget=BASE + 2 * full)
    more, errors = train_stubbornly(model, optimizer, 3, first=4)
    assert [(type(error), error.errno) for error in errors] == [(TierIOError, errno.EIO)]  # type: ignore[attr-defined]
    assert homes_of(model)["state", "DISK"], "it is not tried again by itself"
    check_books(model)
    handle.set(host_budget=BASE + 3 * full)
    rest, errors = train_stubbornly(model, optimizer, 2, first=7)
    assert (errors, homes_of(model)["state", "DISK"]) == ([], 0)
    check_equal(values_at_the_end(model, [*losses, *more, *rest]), train_plainly(9))


def test_a_disk_without_room_is_told_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """disk_budget allows it, but others have filled the disk since."""
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path)
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes

    def refuse(fd: int, begin: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(BudgetError, match=r"cannot reserve .* No space left on device.* are free there"):
            handle.set(host_budget=BASE + full // 2)
    assert not model.pager._runtime.host_cap.has_work
    losses += train_stubbornly(model, optimizer, 1, first=2)[0]
    assert (host.reserved_bytes, homes_of(model)["state", "DISK"]) == (full, 0)
    check_equal(values_at_the_end(model, losses), train_plainly(3))


def test_writes_that_have_failed_before_are_tried_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring holds a page's only copy: nothing moves before the disk has it."""
    medium = Medium(monkeypatch)
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks={"daemon": "inline"})
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full * 3 // 4)
    losses += train_stubbornly(model, optimizer, 2, first=2)[0]
    before = homes_of(model)
    medium.fail(write=errno.EIO)
    handle.set(host_budget=BASE + full // 2)
    more, errors = train_stubbornly(model, optimizer, 1, first=4)
    assert homes_of(model) == before
    medium.heal()
    rest, late = train_stubbornly(model, optimizer, 2, first=5)
    assert {type(error) for error in [*errors, *late]} == {TierIOError}
    assert handle.statistics().host_budget_bytes == BASE + full * 3 // 4
    check_equal(values_at_the_end(model, [*losses, *more, *rest]), train_plainly(7))


def test_the_disk_has_done_what_it_was_given_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does nothing until somebody waits for it."""
    checks = {"daemon": "inline", "streams": "late"}
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks=checks)
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full * 3 // 4)
    losses += train_stubbornly(model, optimizer, 2, first=2)[0]
    queue = model.pager._runtime.engine.transfers._disk.queue
    held: list[int] = []
    to_disk, lower = HomeMoves.to_disk, HostCap._lower

    def counted(moves: HomeMoves, excess_bytes: int) -> int:
        held.append(len(queue._held))
        return to_disk(moves, excess_bytes)

    def began(cap: HostCap, *arguments: Any) -> None:
        held.append(len(queue._held))
        lower(cap, *arguments)

    monkeypatch.setattr(HomeMoves, "to_disk", counted)
    monkeypatch.setattr(HostCap, "_lower", began)
    handle.set(host_budget=BASE + full // 2)
    losses += train_stubbornly(model, optimizer, 1, first=4)[0]
    assert held[0] > 0
    assert held[1] == 0
    check_equal(values_at_the_end(model, losses), train_plainly(5))


class Stop(BaseException):
    """Our Ctrl-C."""


# What is struck, and whether it is a signal: one that comes inside a batch waits for its end.
PLACES: dict[str, tuple[Any, str]] = {
    "at the begin": (HomeMoves, "standstill"),
    "while it is chosen": (HomeMoves, "_choose"),
    "before a batch": (HomeMover, "_move"),
    "in a batch": (Transfers, "write_to_disk"),
    "at a new home": (HomeFrames, "take"),
    "when memory is given back": (HostArena, "shrink"),
    "at the end": (HomeFrames, "limit_host"),
}


@pytest.mark.pairwise(place=PLACES, call=[1, 2, 5], after=[False, True], by_signal=[False, True])
def test_an_interrupt_leaves_everything_intact_and_the_next_boundary_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, call: int, after: bool, by_signal: bool
) -> None:
    model, optimizer = manage_in_host_memory(monkeypatch, tmp_path, checks={"daemon": "inline"})
    losses, _ = train_stubbornly(model, optimizer, 2)
    handle, host = model.pager, model.pager._runtime.host
    full = host.reserved_bytes
    handle.set(host_budget=BASE + full // 2)
    owner, name = PLACES[place]
    original = getattr(owner, name)
    calls = [0]

    def strike() -> None:
        calls[0] += 1
        if calls[0] == call:
            if by_signal or place == "at the end":  # which nothing but a signal could strike
                signal.raise_signal(signal.SIGINT)
            else:
                raise Stop

    def struck(*args: Any, **kwargs: Any) -> Any:
        if not after:
            strike()
        result = original(*args, **kwargs)
        if after:
            strike()
        return result

    def handler(number: int, frame: Any) -> None:
        raise Stop

    before = signal.signal(signal.SIGINT, handler)
    try:
        optimizer.zero_grad()
        losses.append(backward(model, 2))
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, struck)
            try:
                optimizer.step()
                was_struck = False
            except Stop:
                was_struck = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert was_struck is (calls[0] >= call)
    check_books(model)
    more, errors = train_stubbornly(model, optimizer, 2, first=3)
    assert errors == []
    assert host.reserved_bytes <= full // 2
    assert handle.config.host_budget == handle.statistics().host_budget_bytes == BASE + full // 2
    check_equal(values_at_the_end(model, [*losses, *more]), train_plainly(5))
