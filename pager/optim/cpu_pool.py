"""The threads that update parameters on the CPU.

A job is an extent's update: wait until its gradient is there, run its slices, tell that it is done. Of the jobs that
are ready the one that is due first is served first, and of those due together the one submitted first. All threads work
on the slices of one job before they go on to the next, so that each is done as early as can be and what follows it (a
copy to the device) starts. What is not urgent so gives way: the gradients of the last layers come first, and their
parameters are used last.

Where a thread looks for work, in this order:

1. the wait of the oldest job that has not been waited for, if no thread is in a wait and others work on slices: what is
   due sooner shall be known of;
2. a slice of the job that is due first, if fewer threads than ``limit`` allows are at work;
3. the wait, if there is no slice;
4. nothing: it sleeps until something changes.

One thread waits at a time, since gradients become final in the order of their jobs: more of them would sleep in
waits of later jobs while the first has slices to share. A job without a wait is ready at once, also behind
one that waits. The thread that ends a job's last slice runs its ``done``.

A job is no barrier: the next one begins while the last slices of this one still run. A job that needs what another
writes (the next step of the same extent) is submitted after that one's ``done``, or waits for its handle.

Slices are Python callables that give up the GIL for their work (`pager.optim.adamw_cpu`). By default there is a
thread for each core that this process may use, but one: that is the launching thread's.
"""

from __future__ import annotations

import heapq
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from pager.core_limit import core_limit
from pager.errors import PagerClosed
from pager.exiting import end_at_exit
from pager.units import ceil_div

__all__ = ["SLICE_ELEMENTS", "UpdateHandle", "UpdatePool", "cut_into_slices", "default_num_threads"]

# About 7 MB of traffic, 0.5 ms of a core: a hundred times what Python takes to hand a slice out.
SLICE_ELEMENTS = 256 * 1024
# Cuts stand on multiples of this: two cache lines of the narrowest tensor, so that no line is written by two threads.
ALIGNMENT = 64


def default_num_threads() -> int:
    """The cores this process may use less one, which is the launching thread's; at least one."""
    return max(1, core_limit() - 1)


def cut_into_slices(
    num_elements: int, num_threads: int = 1, *, longest: int = SLICE_ELEMENTS
) -> list[tuple[int, int]]:
    """``[begin, end)`` of the slices of an extent: at most ``longest`` elements, alike, one per thread at least.

    Fewer where a slice would be under 16 Ki elements, which cost a thread more to take than to do.
    """
    most = max(1, num_elements // (SLICE_ELEMENTS // 16))
    wanted = min(most, max(num_threads, ceil_div(num_elements, longest)))
    length = ceil_div(ceil_div(num_elements, wanted), ALIGNMENT) * ALIGNMENT
    return [(begin, min(begin + length, num_elements)) for begin in range(0, num_elements, max(1, length))]


class UpdateHandle:
    """A submitted job. What it refers to is let go of when it is done."""

    __slots__ = (
        "__weakref__",
        "_done",
        "_due",
        "_error",
        "_finished",
        "_num_running",
        "_order",
        "_slices",
        "_wait",
    )

    def __init__(
        self,
        order: int,
        due: int,
        wait: Callable[[], object] | None,
        slices: Sequence[Callable[[], object]],
        done: Callable[[BaseException | None], object] | None,
    ) -> None:
        self._order = order
        self._due = due
        self._wait = wait  # until it has returned or raised
        self._slices = deque(slices or (_nothing,))  # those that nobody took yet
        self._done = done
        self._num_running = 0
        self._error: BaseException | None = None
        self._finished = threading.Event()

    def is_done(self) -> bool:
        """Whether nothing of the job is left to do, its ``done`` included."""
        return self._finished.is_set()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the job is done, and raise what its callables raised first.

        Raises TimeoutError after ``timeout`` seconds, PagerClosed in a forked child. Not to be called by the job
        itself.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the update is not done after {timeout} s")
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """Keep the first error; slices that nobody took yet are not run."""
        # Without the pool's own frame, which would keep the job's callables alive.
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace is not None else None
        if self._error is None:
            self._error = error
        self._slices.clear()


def _nothing() -> None:
    """The slice of a job that has none."""


class _Shared:
    """What the threads know. They hold this and not the pool, so that a forgotten pool ends its threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_submitted = 0
        self.unfinished: dict[int, UpdateHandle] = {}  # by order of submission
        # A heap by when they are due, and that order: jobs with slices to take.
        self.ready: list[tuple[int, int, UpdateHandle]] = []
        self.limit = 0  # threads that may be at slices, and those that are
        self.num_busy = 0
        self.not_waited_for: deque[UpdateHandle] = deque()  # oldest first
        self.is_waiting = False  # a thread is in a job's wait
        self.is_closed = False
        self.is_forked = False

    def make_ready(self, job: UpdateHandle) -> None:
        """The job's slices may be taken (locked). Wakes as many threads as may take them, and no more: each that wakes
        up asks for the GIL, which the training wants too.
        """
        heapq.heappush(self.ready, (job._due, job._order, job))
        self.changed.notify(min(max(self.limit - self.num_busy, 1), len(job._slices)))


class UpdatePool:
    """Threads that run jobs; see the head of this file.

    Daemon threads: ``close`` it before the memory it updates goes away. A pool that is collected unclosed ends its
    threads after the work that was submitted.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads``: by default `default_num_threads`."""
        if num_threads is None:
            num_threads = default_num_threads()
        if num_threads < 1:
            raise ValueError(f"a pool needs at least one thread, not {num_threads}")
        self._shared = _Shared()
        self._shared.limit = num_threads
        self._threads = [
            threading.Thread(target=_work, args=(self._shared,), name=f"pager-update-{index}", daemon=True)
            for index in range(num_threads)
        ]
        _pools.add(self)
        self._stop = weakref.finalize(self, _stop, self._shared)
        self._stop.atexit = False
        end_at_exit(self.close)
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        return len(self._threads)

    def submit(
        self,
        slices: Sequence[Callable[[], object]],
        *,
        wait: Callable[[], object] | None = None,
        done: Callable[[BaseException | None], object] | None = None,
        due: int = 0,
    ) -> UpdateHandle:
        """Queue a job; returns at once. Safe from any thread, also from a job's own callables. ``due``: when, in any
        unit; the smallest comes first.

        ``wait`` runs first, on one thread, and blocks until the job may begin (an event's ``synchronize``); it must
        not depend on a later job. Then ``slices``, in any order on any thread. ``done`` runs last, once, on one
        thread, with None or the first exception of the others: after one, slices that were not begun are left out.
        Raises PagerClosed after ``close`` and in a forked child.
        """
        shared = self._shared
        with shared.changed:
            self._check_usable()
            job = UpdateHandle(shared.num_submitted, due, wait, slices, done)
            shared.num_submitted += 1
            shared.unfinished[job._order] = job
            if wait is None:
                shared.make_ready(job)
            else:
                shared.not_waited_for.append(job)
                shared.changed.notify()
        return job

    def limit(self, num_threads: int) -> None:
        """Let so many threads be at work at a time, at least one; slices under way are finished."""
        shared = self._shared
        with shared.changed:
            shared.limit = min(max(num_threads, 1), self.num_threads)
            num_slices = sum(len(job._slices) for *_, job in shared.ready)
            shared.changed.notify(max(min(shared.limit - shared.num_busy, num_slices), 0))

    def close(self) -> None:
        """Wait for all that was submitted, and for the threads. May be called again; not from a job.

        Errors stay with their handles.
        """
        if threading.current_thread() in self._threads:
            raise RuntimeError("an update's own thread cannot close the pool: it would wait for itself")
        self._stop()
        if not self._shared.is_forked:
            for thread in self._threads:
                thread.join()

    def _check_usable(self) -> None:
        if self._shared.is_forked:
            raise PagerClosed(
                "this process was forked from the one whose threads run the updates, and has none of them: "
                "train in the parent, or call manage() in the child"
            )
        if self._shared.is_closed:
            raise PagerClosed("the update threads were closed; call manage() again to go on training")


def _stop(shared: _Shared) -> None:
    with shared.changed:
        shared.is_closed = True
        shared.changed.notify_all()


def _work(shared: _Shared) -> None:
    """A thread's life: find work, do it, until there is none and none will come."""
    while True:
        with shared.changed:
            found = _find(shared)
            while found is None:
                if shared.is_closed and not shared.unfinished:
                    return
                shared.changed.wait()
                found = _find(shared)
        job, call = found
        # Let go of before the job is accounted for: nothing of it may outlive it in a thread that sleeps.
        del found
        error = _outcome(call)
        del call
        _account(shared, job, error)
        del job, error


def _find(shared: _Shared) -> tuple[UpdateHandle, Callable[[], object]] | None:
    """A job and one of its callables, taken; None if there is nothing to do now."""
    may_wait = bool(shared.not_waited_for) and not shared.is_waiting
    while shared.ready and shared.num_busy < shared.limit and not (may_wait and shared.num_busy):
        *_, job = shared.ready[0]
        call = job._slices.popleft() if job._slices else None  # none are left after an error
        if not job._slices:
            heapq.heappop(shared.ready)
        if call is not None:
            job._num_running += 1
            shared.num_busy += 1
            return job, call
    if not may_wait:
        return None
    job = shared.not_waited_for.popleft()
    assert job._wait is not None
    shared.is_waiting = True
    job._num_running += 1
    if shared.ready:
        shared.changed.notify()  # somebody else can take what this thread leaves
    return job, job._wait


def _account(shared: _Shared, job: UpdateHandle, error: BaseException | None) -> None:
    """One of the job's callables has ended; with the last of them the job does."""
    with shared.changed:
        if error is not None:
            job._fail(error)
        if job._wait is not None:
            job._wait = None
            shared.is_waiting = False
            if job._slices:
                shared.make_ready(job)
            if shared.not_waited_for:
                shared.changed.notify()
        else:
            shared.num_busy -= 1
        if job._slices or job._num_running > 1:
            job._num_running -= 1
            return
        if shared.ready:
            shared.changed.notify()  # this thread has something else to do first
    # The last one out. `_num_running` stays above zero, so that nobody else ends the job.
    done, job._done = job._done, None
    if done is not None:
        error = _outcome(done, job._error)
        if error is not None:
            job._fail(error)
    del done, error
    with shared.changed:
        del shared.unfinished[job._order]
        if shared.is_closed and not shared.unfinished:
            shared.changed.notify_all()
    job._finished.set()


def _outcome(call: Callable[..., object], *arguments: object) -> BaseException | None:
    """What ``call`` raises."""
    try:
        call(*arguments)
    except BaseException as error:
        return error
    return None


_pools: weakref.WeakSet[UpdatePool] = weakref.WeakSet()


def _after_fork() -> None:
    """In a child: none of the threads is there, and locks may be held for ever. Handles must not wait for them."""
    for pool in list(_pools):
        shared = pool._shared
        shared.changed = threading.Condition()
        shared.is_forked = True
        pool._threads = []
        for job in shared.unfinished.values():
            job._slices.clear()
            job._wait = job._done = None
            job._finished = threading.Event()
            job._error = PagerClosed("this update is done by the process this one was forked from")
            job._finished.set()
        shared.unfinished.clear()
        shared.ready.clear()
        shared.not_waited_for.clear()


os.register_at_fork(after_in_child=_after_fork)
