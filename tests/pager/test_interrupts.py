"""``uninterrupted()``: which handlers are held back, when they run, and what the user sees of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import timeit
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from pager.interrupts import uninterrupted

USED = (signal.SIGINT, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGRTMIN)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in USED}
    # Where the tests run in the background of a shell, SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        assert handler is not None
        signal.signal(number, handler)


def raising(name: str) -> Any:
    def handler(number: int, frame: FrameType | None) -> None:
        raise RuntimeError(f"{name} {signal.Signals(number).name}")

    return handler


def raise_inside(*numbers: int, seen: list[Any] | None = None, error: Exception | None = None) -> None:
    """Send these signals inside one block; ``seen`` notes that the block came to its end."""
    with uninterrupted():
        for number in numbers:
            signal.raise_signal(number)
        if error is not None:
            raise error
        if seen is not None:
            seen.append("whole")


def test_an_interrupt_is_delivered_when_the_block_is_left() -> None:
    seen = []

    def interrupted() -> None:
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                seen.append("inner")
            seen.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", USED, ids=lambda number: number.name)
def test_any_handler_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    handler = raising("mine")
    signal.signal(number, handler)
    seen: list[str] = []
    with pytest.raises(RuntimeError, match=f"mine {number.name}"):
        raise_inside(number, seen=seen)
    assert seen == ["whole"]
    assert signal.getsignal(number) is handler


def test_handlers_run_in_the_order_of_their_signals_once_each_with_number_and_frame() -> None:
    seen: list[tuple[int, FrameType | None]] = []
    for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: seen.append((number, frame)))
    with uninterrupted():
        for number in (signal.SIGUSR2, signal.SIGALRM, signal.SIGUSR2, signal.SIGUSR1):
            signal.raise_signal(number)
        assert seen == []
    here = sys._getframe()
    assert seen == [(signal.SIGUSR2, here), (signal.SIGALRM, here), (signal.SIGUSR1, here)]


def test_one_that_raises_does_not_keep_the_others_from_running() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGALRM, raising("first"))
    signal.signal(signal.SIGUSR1, raising("second"))
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    with pytest.raises(RuntimeError, match="second") as caught:
        raise_inside(signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
    assert "first" in str(caught.value.__context__)
    assert seen == [signal.SIGUSR2]


def test_an_error_of_the_block_is_the_context_of_the_handlers() -> None:
    signal.signal(signal.SIGALRM, raising("handler"))
    with pytest.raises(RuntimeError, match="handler") as caught:
        raise_inside(signal.SIGALRM, error=ValueError("the block"))
    assert "the block" in str(caught.value.__context__)


def test_handlers_may_change_between_blocks_and_inside_one() -> None:
    first, second = raising("first"), raising("second")
    signal.signal(signal.SIGUSR1, first)
    with uninterrupted():
        pass
    signal.signal(signal.SIGUSR1, second)
    with pytest.raises(RuntimeError, match="second"), uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
    with uninterrupted():
        signal.signal(signal.SIGUSR1, first)
    assert signal.getsignal(signal.SIGUSR1) is first
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_ignored_and_default_signals_stay_as_they_are() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with uninterrupted():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_the_wakeup_descriptor_is_written_at_once() -> None:
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        reader.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            with uninterrupted():
                signal.raise_signal(signal.SIGUSR1)
                assert reader.recv(8) == bytes([signal.SIGUSR1])
        finally:
            signal.set_wakeup_fd(before)


def test_a_block_of_another_thread_holds_nothing_back() -> None:
    signal.signal(signal.SIGUSR1, raising("main"))
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with uninterrupted():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert entered.wait(10)
        with pytest.raises(RuntimeError, match="main"):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        leave.set()
        thread.join()


def test_a_handler_may_come_here_itself() -> None:
    seen: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGUSR2)
            seen.append("inside")

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append("after"))
    with uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
    assert seen == ["inside", "after"]


def test_what_is_no_handler_any_more_is_not_kept_alive() -> None:
    import weakref

    handler = raising("gone")
    signal.signal(signal.SIGUSR1, handler)
    with uninterrupted():
        pass
    gone = weakref.ref(handler)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    del handler
    with uninterrupted():
        pass
    assert gone() is None


@pytest.mark.parametrize("tick", range(1, 61))
def test_signals_between_the_lines_of_the_block_itself(tick: int) -> None:
    """At each line of entering and leaving: the handler runs, and the next block puts right what was left."""
    signal.signal(signal.SIGUSR1, raising("struck"))
    other = raising("other")
    signal.signal(signal.SIGUSR2, other)
    lines = [0]
    file = uninterrupted().__class__.__enter__.__code__.co_filename

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        lines[0] += event == "line"
        if lines[0] == tick and event == "line":
            os.kill(os.getpid(), signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    struck = False
    sys.settrace(trace)
    try:
        with uninterrupted():
            pass
    except RuntimeError as error:
        struck = "struck" in str(error)
    finally:
        sys.settrace(before)
    assert struck == (lines[0] >= tick)
    assert signal.getsignal(signal.SIGUSR2) is other
    with uninterrupted():
        pass
    assert signal.getsignal(signal.SIGUSR2) is other
    with pytest.raises(RuntimeError, match="other"), uninterrupted():
        signal.raise_signal(signal.SIGUSR2)
    with contextlib.suppress(RuntimeError):
        signal.raise_signal(signal.SIGUSR1)


def cost_microseconds() -> float:
    """Of one block that does nothing."""

    def block() -> None:
        with uninterrupted():
            pass

    return min(timeit.repeat(block, number=10000, repeat=7)) / 10000 * 1e6


if __name__ == "__main__":
    sys.stdout.write(f"SIGINT alone: {cost_microseconds():.2f} us\n")
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    sys.stdout.write(f"and SIGALRM: {cost_microseconds():.2f} us\n")
    with uninterrupted():
        sys.stdout.write(f"inside another: {cost_microseconds():.2f} us\n")
