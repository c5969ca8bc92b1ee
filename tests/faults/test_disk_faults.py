"""A disk that goes wrong in the middle of training: a named error, and then training goes on as if it had not been."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import pager.runtime
from pager.errors import BudgetError, CorruptPage, DiskFull, TierError, TierIOError
from pager.tiers import disk_file
from pager.tiers.disk_probe import RingShape
from tests.faults.media import (
    Medium,
    check_equal,
    check_it_was_compressed,
    compression,
    make_layers,
    make_optimizer,
    manage_over_three_tiers,
    train_plainly,
    train_stubbornly,
    train_until_refused,
)

__all__ = ["compression"]

NUM_STEPS = 6


def values_at_the_end(model: Any, losses: list[torch.Tensor], compression: str | None) -> list[torch.Tensor]:
    """As `train_plainly` gives them."""
    check_it_was_compressed(model, compression)
    model.pager.close()
    return [*losses, *(param.detach() for param in model.parameters())]


ERRORS: dict[str, tuple[str, int, type[TierError]]] = {
    "write, EIO": ("write", errno.EIO, TierIOError),
    "write, ENOSPC": ("write", errno.ENOSPC, DiskFull),
    "write, EROFS": ("write", errno.EROFS, TierIOError),
    "read, EIO": ("read", errno.EIO, TierIOError),
}


@pytest.mark.pairwise(name=ERRORS, after=[0, 7], daemon=["inline", "thread"])
def test_an_error_of_the_disk_is_told_and_training_goes_on_exactly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compression: str | None,
    name: str,
    after: int,
    daemon: str,
) -> None:
    """Case 28: another process fills the disk, a cable is loose, the kernel remounts read-only; then it is well."""
    what, number, kind = ERRORS[name]
    medium = Medium(monkeypatch)
    model = make_layers()
    optimizer = make_optimizer(model)
    manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late", daemon=daemon
    )
    losses, _ = train_stubbornly(model, optimizer, 2)
    medium.fail(**{what: number}, after=after, times=3)
    more, errors = train_stubbornly(model, optimizer, 2, first=2)
    medium.heal()
    rest, late = train_stubbornly(model, optimizer, NUM_STEPS - 4, first=4)
    errors += late  # of the last writes before
    assert errors
    assert all(type(error) is kind for error in errors)
    told = {(error.errno, error.filename) for error in errors}  # type: ignore[attr-defined]
    assert told == {(number, str(tmp_path))}
    check_equal(values_at_the_end(model, [*losses, *more, *rest], compression), train_plainly(NUM_STEPS))


@pytest.mark.parametrize("after", [0, 3, 11])
def test_the_commit_of_an_update_cannot_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None, after: int
) -> None:
    """The ring has room for one write, and nothing may be kept beyond: units are refused, and none is stepped twice."""
    medium = Medium(monkeypatch)
    monkeypatch.setattr(pager.runtime, "measured_shape", lambda disk: RingShape(2**20, 2, 1))
    model = make_layers()
    optimizer = make_optimizer(model)
    runtime = manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams="early", daemon="inline"
    )
    losses, _ = train_stubbornly(model, optimizer, 2)
    runtime.engine.transfers.settle()
    runtime.engine.transfers._disk.queue._spare_room = int
    medium.fail(write=errno.EIO, after=after, times=6)
    more, errors = train_stubbornly(model, optimizer, 2, first=2)
    assert errors
    check_equal(values_at_the_end(model, [*losses, *more], compression), train_plainly(4))


def test_a_disk_that_stays_sick_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    """No write succeeds any more. Parameters and states can be saved as they were after one of the last two steps."""
    medium = Medium(monkeypatch)
    model = make_layers()
    optimizer = make_optimizer(model)
    manage_over_three_tiers(monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late")
    train_stubbornly(model, optimizer, 3)
    medium.fail(write=errno.EIO)
    with pytest.raises(TierIOError) as info:
        train_until_refused(model, optimizer, 3)
    assert (info.value.errno, info.value.filename) == (errno.EIO, str(tmp_path))
    saved = [value.clone() for value in model.state_dict().values()]
    plain = [train_plainly(number)[number:] for number in (3, 4)]
    assert any(all(map(torch.equal, saved, values)) for values in plain)
    states = [entry["exp_avg"].clone() for entry in optimizer.state_dict()["state"].values()]
    assert len(states) == len(saved)
    assert not any(state.isnan().any() for state in states)
    medium.heal()
    # A write in the background that failed before, and was not told yet, is told when everything is out.
    with contextlib.suppress(TierIOError):
        model.pager.close()
    assert all(map(torch.equal, saved, model.state_dict().values()))


def test_short_reads_and_writes_are_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    medium = Medium(monkeypatch)
    medium.step = 2 * disk_file.BLOCK_BYTES
    model = make_layers()
    optimizer = make_optimizer(model)
    manage_over_three_tiers(monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late")
    losses, errors = train_stubbornly(model, optimizer, 3)
    assert errors == []
    check_equal(values_at_the_end(model, losses, compression), train_plainly(3))


def test_a_file_cut_short_under_the_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    model = make_layers()
    optimizer = make_optimizer(model)
    runtime = manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late"
    )
    train_stubbornly(model, optimizer, 2)
    runtime.engine.transfers.settle()
    os.ftruncate(runtime.disk._fd, 0)
    # What is written meanwhile makes the file longer again, with holes in it.
    with pytest.raises((TierIOError, CorruptPage), match="the file ends too early|is not what was written"):
        train_until_refused(model, optimizer, 2)
    abandon(model)


def abandon(model: Any) -> None:
    """Give a model up whose optimizer's states are lost with the disk."""
    model.pager._runtime.pagerd.close()
    model.pager._runtime.engine.transfers.stop()
    model.pager._runtime.disk.close()


def test_wrong_bytes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    model = make_layers()
    optimizer = make_optimizer(model)
    runtime = manage_over_three_tiers(
        monkeypatch, model, optimizer, tmp_path, compression=compression, streams="late"
    )
    train_stubbornly(model, optimizer, 2)
    runtime.engine.transfers.settle()
    state = optimizer.state[model[5].weight]["exp_avg"]._pager.segment
    frame = int(runtime.table.home_frame[state.first_page])
    fd = os.open(f"/proc/self/fd/{runtime.disk._fd}", os.O_RDWR)
    os.pwrite(fd, b"\xff" * 8, frame * runtime.disk.page_size)
    os.close(fd)
    with pytest.raises(CorruptPage, match=f"frame {frame} "):
        train_until_refused(model, optimizer, 2)
    abandon(model)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model = make_layers()
    before = [param.detach().clone() for param in model.parameters()]

    def refuse(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_file.os, "posix_fallocate", refuse)
    with pytest.raises(BudgetError, match=r"cannot reserve .* are free there; lower disk_budget") as info:
        manage_over_three_tiers(monkeypatch, model, make_optimizer(model), tmp_path)
    assert isinstance(info.value.__cause__, DiskFull)
    assert info.value.__cause__.errno == number
    assert list(tmp_path.iterdir()) == []
    check_equal([param.detach() for param in model.parameters()], before)
