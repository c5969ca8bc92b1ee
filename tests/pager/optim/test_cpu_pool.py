"""The update threads: who runs what, in which order, and what happens when something goes wrong.

Interleavings are made with events; nothing here sleeps.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pager.core_limit import core_limit
from pager.errors import PagerClosed
from pager.optim import cpu_pool
from pager.optim.cpu_pool import ALIGNMENT, SLICE_ELEMENTS, UpdateHandle, UpdatePool, cut_into_slices

ROOT = Path(__file__).resolve().parents[3]
# How long a step of a test may take on a loaded machine.
LONG = 30.0


@pytest.fixture
def pool() -> Iterator[UpdatePool]:
    pool = UpdatePool(3)
    yield pool
    pool.close()


def check_wait(event: threading.Event) -> None:
    assert event.wait(LONG)


class Log:
    """Callables that note that they ran."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.errors: list[BaseException | None] = []

    def note(self, name: str) -> Callable[[], None]:
        return lambda: self.names.append(name)

    def done(self, name: str) -> Callable[[BaseException | None], None]:
        def done(error: BaseException | None) -> None:
            self.names.append(name)
            self.errors.append(error)

        return done


def make_failing(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("num_elements", "num_threads", "expected"),
    [
        (0, 4, 0),
        (1, 4, 1),
        (16 * 1024, 4, 1),
        (64 * 1024, 4, 4),
        (SLICE_ELEMENTS, 1, 1),
        (SLICE_ELEMENTS + 1, 1, 2),
        (8 * SLICE_ELEMENTS, 3, 8),
        (1_000_003, 15, 15),
    ],
)
def test_slices(num_elements: int, num_threads: int, expected: int) -> None:
    slices = cut_into_slices(num_elements, num_threads)
    assert len(slices) == expected
    assert [begin for begin, _ in slices] == [0, *(end for _, end in slices)][:expected]
    assert not slices or slices[-1][1] == num_elements
    assert all(begin % ALIGNMENT == 0 and 0 < end - begin <= SLICE_ELEMENTS for begin, end in slices)


def test_a_job_runs_wait_then_slices_then_done(pool: UpdatePool) -> None:
    log = Log()
    handle = pool.submit([log.note("slice")] * 20, wait=log.note("wait"), done=log.done("done"))
    handle.result(LONG)
    assert handle.is_done()
    assert log.names == ["wait", *["slice"] * 20, "done"]
    assert log.errors == [None]


def test_all_threads_share_a_job() -> None:
    with_all = threading.Barrier(3)
    names: set[str] = set()

    def meet() -> None:
        with_all.wait(LONG)
        names.add(threading.current_thread().name)

    pool = UpdatePool(3)
    pool.submit([meet] * 3, wait=lambda: None).result(LONG)
    pool.close()
    assert len(names) == 3
    assert pool.num_threads == 3


def test_jobs_of_one_thread_run_in_order_of_submission() -> None:
    log = Log()
    pool = UpdatePool(1)
    gate = threading.Event()
    handles = [pool.submit([], wait=lambda: check_wait(gate))]
    for index in range(10):
        wait = log.note(f"wait {index}")
        handles.append(pool.submit([log.note(f"a {index}"), log.note(f"b {index}")], wait=wait))
    gate.set()
    handles[-1].result(LONG)
    pool.close()
    assert log.names == [name for i in range(10) for name in (f"wait {i}", f"a {i}", f"b {i}")]
    assert all(handle.is_done() for handle in handles)


def test_the_oldest_ready_job_goes_first_and_one_thread_waits(pool: UpdatePool) -> None:
    """Two threads are busy. The third waits for the first job, and serves it before a later one that was ready."""
    log = Log()
    busy, first_ready = threading.Event(), threading.Event()
    in_slices, waits_for_first = threading.Barrier(3), threading.Event()
    second_waits = threading.Event()

    def occupy() -> None:
        in_slices.wait(LONG)
        check_wait(busy)

    def wait_for_first() -> None:
        waits_for_first.set()
        check_wait(first_ready)

    occupying = pool.submit([occupy, occupy])
    in_slices.wait(LONG)
    first = pool.submit([log.note("first")], wait=wait_for_first)
    check_wait(waits_for_first)
    second = pool.submit([log.note("second")], wait=second_waits.set)
    third = pool.submit([log.note("third")])
    first_ready.set()
    first.result(LONG)
    second.result(LONG)
    third.result(LONG)
    busy.set()
    occupying.result(LONG)
    assert log.names == ["first", "second", "third"]


def test_a_second_wait_does_not_begin_beside_the_first(pool: UpdatePool) -> None:
    began, go = threading.Event(), threading.Event()
    second_began = threading.Event()

    def wait() -> None:
        began.set()
        check_wait(go)

    first = pool.submit([], wait=wait)
    check_wait(began)
    second = pool.submit([], wait=second_began.set)
    # Threads are awake and find work, but not that wait.
    pool.submit([lambda: None] * 30).result(LONG)
    assert not second_began.is_set()
    go.set()
    first.result(LONG)
    second.result(LONG)
    assert second_began.is_set()


@pytest.mark.parametrize("where", ["wait", "slice", "done"])
def test_an_error_is_raised_by_result_and_done_hears_of_it(pool: UpdatePool, where: str) -> None:
    log = Log()
    error = ZeroDivisionError(where)
    fail = make_failing(error)
    slices = [fail if where == "slice" else log.note("slice")]
    wait = fail if where == "wait" else log.note("wait")

    def done(heard: BaseException | None) -> None:
        log.errors.append(heard)
        if where == "done":
            fail()

    handle = pool.submit(slices, wait=wait, done=done)
    with pytest.raises(ZeroDivisionError, match=where):
        handle.result(LONG)
    assert log.errors == [None if where == "done" else error]
    assert log.names == {"wait": [], "slice": ["wait"], "done": ["wait", "slice"]}[where]
    pool.submit([log.note("next")]).result(LONG)
    assert log.names[-1] == "next"


def test_after_an_error_slices_not_begun_are_left_out() -> None:
    log = Log()
    pool = UpdatePool(1)
    handle = pool.submit(
        [log.note("one"), make_failing(KeyError("first")), log.note("two"), make_failing(KeyError("last"))],
        done=log.done("done"),
    )
    with pytest.raises(KeyError, match="first"):
        handle.result(LONG)
    pool.close()
    assert log.names == ["one", "done"]


def test_done_waits_for_slices_under_way_after_an_error(pool: UpdatePool) -> None:
    log = Log()
    failed, together = threading.Event(), threading.Barrier(2)

    def slow() -> None:
        together.wait(LONG)
        check_wait(failed)
        log.names.append("slow")

    def fail() -> None:
        together.wait(LONG)
        raise KeyError("failed")

    handle = pool.submit([slow, fail], done=log.done("done"))
    pool.submit([lambda: None]).result(LONG)
    assert not handle.is_done()
    failed.set()
    with pytest.raises(KeyError, match="failed"):
        handle.result(LONG)
    assert log.names == ["slow", "done"]


def test_close_finishes_what_was_submitted() -> None:
    log = Log()
    pool = UpdatePool(2)
    began, go = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        check_wait(go)

    under_way = pool.submit([log.note("first")] * 5, wait=wait)
    queued = pool.submit([log.note("second")] * 5, wait=lambda: None)
    check_wait(began)
    closer = threading.Thread(target=pool.close)
    closer.start()
    go.set()
    closer.join(LONG)
    assert not closer.is_alive()
    assert under_way.is_done()
    assert queued.is_done()
    assert log.names == ["first"] * 5 + ["second"] * 5
    pool.close()
    with pytest.raises(PagerClosed, match="call manage\\(\\) again"):
        pool.submit([])


def test_a_job_cannot_close_its_pool(pool: UpdatePool) -> None:
    with pytest.raises(RuntimeError, match="cannot close the pool"):
        pool.submit([pool.close]).result(LONG)


def test_a_job_may_submit_another(pool: UpdatePool) -> None:
    log = Log()
    handles: list[UpdateHandle] = []
    pool.submit([], done=lambda error: handles.append(pool.submit([log.note("inner")]))).result(LONG)
    handles[0].result(LONG)
    assert log.names == ["inner"]


def test_result_gives_up_after_its_time(pool: UpdatePool) -> None:
    go = threading.Event()
    handle = pool.submit([], wait=lambda: check_wait(go))
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        handle.result(0.01)
    go.set()
    handle.result(LONG)


class Owned:
    """Something a closure may keep alive."""

    def use(self, *_: object) -> None:
        pass

    def fail(self, *_: object) -> None:
        raise KeyError("used")


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_that_is_done_keeps_nothing_alive(pool: UpdatePool, fails: bool) -> None:
    owned = Owned()
    alive = weakref.ref(owned)
    gc.disable()
    try:
        handle = pool.submit([owned.use] * 8, wait=owned.use, done=owned.use)
        handle.result(LONG)
        if fails:
            failing = pool.submit([owned.use, owned.fail, owned.use], done=owned.use)
            with pytest.raises(KeyError):
                failing.result(LONG)
            failing._error = None  # its traceback shows the slice's own variables, as it should
            del failing
        del owned
        assert alive() is None
    finally:
        gc.enable()
    assert handle.is_done()


def test_a_pool_that_is_forgotten_ends_its_threads() -> None:
    pool = UpdatePool(2)
    threads = list(pool._threads)
    handle = pool.submit([lambda: None] * 4)
    del pool
    gc.collect()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    handle.result(LONG)


def test_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least one thread"):
        UpdatePool(0)


def run_python(program: str, **environment: str) -> list[str]:
    completed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=120,
    )
    return completed.stdout.split()


WHO_RUNS = """
import os, threading
import torch
import pager.optim.cpu_pool as cpu_pool
torch.set_num_threads(1)
{limit}
pool = cpu_pool.UpdatePool()
meeting, names = threading.Barrier(pool.num_threads), set()
def meet():
    meeting.wait(60)
    names.add(threading.current_thread().name)
pool.submit([meet] * pool.num_threads).result(60)
pool.close()
print(len(names), torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("cpu_pool.core_limit = lambda: 9", 8),
        ("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", 1),
        ("", max(1, core_limit() - 1)),
    ],
    ids=["nine cores", "one core", "as here"],
)
def test_the_threads_are_the_cores_allowed_whatever_openmp_is_told(limit: str, expected: int) -> None:
    assert run_python(WHO_RUNS.format(limit=limit), OMP_NUM_THREADS="1") == [str(expected), "1"]


FORK = """
import os, threading, warnings
warnings.simplefilter("ignore")
from pager.errors import PagerClosed
from pager.optim import cpu_pool
from pager.optim.cpu_pool import UpdatePool
pool = UpdatePool(2)
began, go = threading.Event(), threading.Event()
def wait():
    began.set()
    go.wait(60)
handle = pool.submit([], wait=wait)
began.wait(60)
child = os.fork()
if child == 0:
    said = []
    for call in (lambda: pool.submit([]), lambda: handle.result(60)):
        try:
            call()
        except PagerClosed as error:
            said.append("forked" in str(error))
    pool.close()
    os._exit(0 if said == [True, True] and pool.num_threads == 0 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
handle.result(60)
pool.submit([lambda: None]).result(60)
pool.close()
print("parent")
"""


def test_a_forked_child_has_no_pool_and_says_so() -> None:
    assert run_python(FORK) == ["0", "parent"]


def test_what_is_due_first_goes_first_once_it_is_ready() -> None:
    """One thread: three jobs become ready while it is busy."""
    log = Log()
    pool = UpdatePool(1)
    gate = threading.Event()
    handles = [pool.submit([lambda: check_wait(gate)])]
    for name, due in (("late", 9), ("soon", 1), ("then", 5), ("soon too", 1)):
        handles.append(pool.submit([log.note(name)], due=due))
    gate.set()
    for handle in handles:
        handle.result(LONG)
    pool.close()
    assert log.names == ["soon", "soon too", "then", "late"]


def test_a_job_that_is_due_sooner_is_known_of_while_others_work() -> None:
    """Both threads have enough to do for good; one of them waits for the urgent job all the same."""
    log = Log()
    pool = UpdatePool(2)
    gates = [threading.Event() for _ in range(3)]
    begun = threading.Semaphore(0)

    def work(index: int) -> None:
        begun.release()
        check_wait(gates[index])

    slow = pool.submit([lambda index=index: work(index) for index in range(3)], due=9)  # type: ignore[misc]
    for _ in range(2):
        assert begun.acquire(timeout=LONG)
    waited = threading.Event()
    urgent = pool.submit([log.note("urgent")], wait=waited.set, due=1)
    gates[0].set()
    check_wait(waited)
    urgent.result(LONG)
    for gate in gates[1:]:
        gate.set()
    slow.result(LONG)
    pool.close()
    assert log.names == ["urgent"]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_threads_work_than_may(limit: int) -> None:
    pool = UpdatePool(4)
    pool.limit(limit)
    at_work: list[int] = []
    most: list[int] = []
    lock = threading.Lock()
    gate = threading.Semaphore(0)

    def work() -> None:
        with lock:
            at_work.append(1)
            most.append(len(at_work))
        assert gate.acquire(timeout=LONG)
        with lock:
            at_work.pop()

    handle = pool.submit([work] * 8)
    gate.release(4)
    pool.limit(limit)
    gate.release(4)
    handle.result(LONG)
    assert max(most) <= limit
    pool.limit(99)
    meet = threading.Barrier(4)
    pool.submit([lambda: check_meeting(meet)] * 4).result(LONG)
    pool.close()


def test_a_higher_limit_lets_others_in_at_once() -> None:
    pool = UpdatePool(4)
    pool.limit(1)
    meet = threading.Barrier(4)
    handle = pool.submit([lambda: check_meeting(meet)] * 4)
    pool.limit(4)
    handle.result(LONG)
    pool.close()


def test_who_has_nothing_to_do_is_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that wakes up takes the GIL from the training."""
    looks: list[object] = []
    find = cpu_pool._find

    def counted(shared: cpu_pool._Shared) -> object:
        looks.append(shared)
        return find(shared)

    monkeypatch.setattr(cpu_pool, "_find", counted)
    pool = UpdatePool(16)
    pool.submit([lambda: None]).result(LONG)
    looks.clear()
    num_jobs = 50
    for _ in range(num_jobs):
        pool.submit([lambda: None, lambda: None], wait=lambda: None).result(LONG)
    # Two slices and a wait, and for each that was woken the look before it sleeps again.
    assert len(looks) <= 8 * num_jobs
    pool.close()


def check_meeting(barrier: threading.Barrier) -> None:
    barrier.wait(LONG)
