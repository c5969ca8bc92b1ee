"""Gates that stop a thread at one place until another lets it go on. Nothing sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine_rig import Rig

PATIENCE_SECONDS = 20.0


class Gate:
    """A thread that comes through stops and says so; another lets it go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def stop(self) -> None:
        """Called by the thread that is to stop; only the first call stops."""
        if not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS), "the gate was never opened"

    def wait_until_reached(self) -> None:
        """Called by the other thread."""
        assert self.reached.wait(PATIENCE_SECONDS), "nobody came to the gate"

    def open(self) -> None:
        """Let the stopped thread go on."""
        self.opened.set()


class Worker:
    """Runs a function in a thread; ``result`` gives what it returned, or raises what it raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        """Whether the function has not come back."""
        return self._thread.is_alive()

    def result(self) -> Any:
        """Wait for the end."""
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the worker does not come back"
        if self._error is not None:
            raise self._error
        return self._value


def stop_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Gate:
    """A gate in front of a method of one object."""
    gate = Gate()
    original = getattr(owner, name)

    def stopping(*args: Any, **kwargs: Any) -> Any:
        gate.stop()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, stopping)
    return gate


def waiters(rig: Rig) -> int:
    """Threads that wait for a change of the engine."""
    return len(rig.engine.changed._waiters)  # type: ignore[attr-defined]


def let_it_wait(rig: Rig, worker: Worker) -> None:
    """Return when the worker stands in the engine's condition: it has nothing else left to do."""
    for _ in range(10**7):
        with rig.engine.lock:
            if waiters(rig):
                return
        if not worker.is_running:
            return
    raise AssertionError("the worker neither waits nor ends")


DiskRig = tuple[Rig, list[np.ndarray]]
