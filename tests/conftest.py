"""What holds for every test: nothing leaks, and the tests that need a GPU run only where there is one."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, however slow the machine: a red test is red for everyone.
settings.register_profile("pager", derandomize=True, deadline=None, database=None)
settings.load_profile("pager")

# How long a thread that was told to end may take to do so on a loaded machine.
THREAD_END_SECONDS = 10.0

# Device files of a GPU, and files that installed packages keep for the life of the process (fonts).
KEPT_OPEN = ("/dev/nvidia", "/proc/driver/nvidia", sys.prefix, sys.base_prefix)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-product",
        action="store_true",
        help="run the whole product of models, optimizers and settings instead of pairwise combinations",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in the background so, and tests of interrupts would see none.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "pairwise(**factors): run with combinations that hold every pair of values of two factors, hashable all",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is marked ``pairwise``; ``--full-product`` makes it every combination."""
    from tests.equality.pairwise import pairwise

    for mark in metafunc.definition.iter_markers("pairwise"):
        factors = {name: tuple(values) for name, values in mark.kwargs.items()}
        if metafunc.config.getoption("--full-product"):
            rows = list(itertools.product(*factors.values()))
        else:
            rows = [tuple(row.values()) for row in pairwise(factors)]
        metafunc.parametrize(tuple(factors), rows)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    from pager.device.cuda import num_devices

    if num_devices() == 0:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _open_descriptors() -> dict[str, str]:
    """Descriptor -> what it stands for, without what is kept open on purpose (device files, fonts)."""
    descriptors = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the descriptor of this very listing
            continue
        if not target.startswith(KEPT_OPEN):
            descriptors[entry] = target
    return descriptors


def _new_descriptors(before: dict[str, str]) -> dict[str, str]:
    return {number: target for number, target in _open_descriptors().items() if before.get(number) != target}


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def _is_torchs(thread: threading.Thread) -> bool:
    # Autograd's threads appear as dummy threads when Python code runs on them, and live on with the process.
    return isinstance(thread, threading._DummyThread)


def find_leaked_threads(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that were not there in ``before`` and do not end by themselves in time."""
    deadline = time.monotonic() + THREAD_END_SECONDS
    leaked = []
    for thread in _new_threads(before):
        if _is_torchs(thread):
            continue
        while thread.is_alive() and time.monotonic() < deadline:
            thread.join(0.2)
            # A thread at work holds what it works on, and so perhaps the very object whose end ends it: what was no
            # garbage a moment ago may be now.
            gc.collect()
        if thread.is_alive():
            leaked.append(thread.name)
    return leaked


def _where(names: list[str]) -> str:
    """What the threads are at, innermost call last."""
    frames = sys._current_frames()
    return "; ".join(
        f"{thread.name}: "
        + " > ".join(f"{entry.name}:{entry.lineno}" for entry in traceback.extract_stack(frame))
        for thread in threading.enumerate()
        if thread.name in names
        and thread.ident is not None
        and (frame := frames.get(thread.ident)) is not None
    )


def find_leaked_descriptors(before: dict[str, str]) -> dict[str, str]:
    """The descriptors that were not open in ``before``, after what nobody refers to has been collected."""
    leaked = _new_descriptors(before)
    if leaked:
        gc.collect()
        leaked = _new_descriptors(before)
    return leaked


def _start_gpu() -> None:
    """CUDA, its libraries and autograd's thread open files for the life of the process at their first use."""
    import torch

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None
    x.grad.cpu()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread running or a file open."""
    if request.node.get_closest_marker("gpu"):
        _start_gpu()
    threads = set(threading.enumerate())
    descriptors = _open_descriptors()
    yield
    if _new_threads(threads):
        gc.collect()  # a handle dropped without close() ends its thread when it is collected
    leaked_threads = find_leaked_threads(threads)
    leaked_descriptors = find_leaked_descriptors(descriptors)
    assert not leaked_threads, (
        f"threads still running after the test: {leaked_threads}; {_where(leaked_threads)}"
    )
    assert not leaked_descriptors, f"files still open after the test: {leaked_descriptors}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def full_product(request: pytest.FixtureRequest) -> bool:
    """True where ``--full-product`` asks for every combination."""
    return bool(request.config.getoption("--full-product"))
