"""A device without a GPU whose streams are as late, or as early, as the waits allow.

The problem. ``torch.cpu.Stream`` does nothing: on it every copy is done at once, in the order of the calls,
and no ordering bug can show. Here a stream is a queue of operations, and *late* streams run an operation only
when something depends on it: a copy whose event nobody waits for has not happened when its bytes are used.
*Early* streams run everything when it is enqueued, the other extreme that CUDA allows. A program that gives
the same bits on both has, as far as its copies go, the waits it needs.

The protocol.

1. A stream counts the operations put on it; an event is a position in that count. An event is done when as
   many have run. Late streams run nothing by themselves.
2. Something forces an event: the compute stream waits for it (CPU compute is finished when it is enqueued, so
   its inputs must be there now), the host synchronizes, or the device closes. Forcing runs the event's stream
   up to the position; a wait met on the way forces that event first, across streams. An event is recorded
   before anyone can wait for it, so this ends.
3. The compute stream (index 0) and the one beside it hold no queue. Their events are done when recorded.
4. A pending copy holds what CUDA would hold: addresses. Memory of a slab is looked up by address and read
   through the slab, so a tensor made by ``wrap`` may die meanwhile and the frames may be reused (the checker
   sees that). Registered host memory is held as it is. Any other tensor belongs to torch's allocator, which
   on CUDA may hand it to the next tensor as soon as it is freed. So it is held weakly, and where it is gone
   when the copy runs RaceError is raised: the copy would have read (or overwritten) whatever stands there by
   then.

Why a compute wait cannot be simulated the same way: the compute is done before anything else is said, so that
a copy into frames it is still reading does no harm here. Those waits are the business of the happens-before
checker. To keep it from being told too much, ``lazy_compute=True`` answers False to ``query()`` on a compute
event until something waited for it: code that only asks, and does not wait, then takes the path it would take
on a busy GPU.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pager.device.base import (
    SLAB_ALIGNMENT,
    Device,
    Event,
    LinkDirection,
    Note,
    SkipWait,
    Stream,
    call_on_release,
)
from pager.device.happens_before import HappensBefore
from pager.errors import ConfigError, PagerClosed, RaceError

__all__ = ["SimulatedDevice", "SimulatedEvent", "SimulatedStream"]

T = TypeVar("T")


class SimulatedEvent(Event):
    """A position in the count of operations of its stream."""

    __slots__ = ("is_seen", "position")
    stream: SimulatedStream

    def __init__(self, stream: SimulatedStream, number: int, position: int) -> None:
        super().__init__(stream, number)
        self.position = position
        self.is_seen = False

    @property
    def is_done(self) -> bool:
        """Whether the stream has run as many operations as stood before this event."""
        return self.stream.num_run >= self.position

    def _query(self) -> bool:
        device = self.stream.device
        if self.stream.computes and device.lazy_compute:
            return self.is_seen
        return self.is_done

    def _synchronize(self) -> None:
        self.stream.device.force(self)


class _Wait:
    """A queued wait: the stream goes on when ``event`` is done."""

    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event

    def run(self) -> None:
        self.event.is_seen = True


class _Copy:
    def __init__(self, what: str, dst: _Memory, src: _Memory) -> None:
        self.what = what
        self.dst = dst
        self.src = src

    def run(self) -> None:
        source = self.src.take(f"source freed while its copy was pending: {self.what}")
        target = self.dst.take(f"destination freed while its copy was pending: {self.what}")
        # A view made in inference mode may be written to there only; memory knows no such difference.
        with torch.inference_mode():
            target.copy_(source)


class _Fill:
    def __init__(self, what: str, dst: _Memory, value: int) -> None:
        self.what = what
        self.dst = dst
        self.value = value

    def run(self) -> None:
        target = self.dst.take(f"destination freed while its fill was pending: {self.what}")
        with torch.inference_mode():
            target.fill_(self.value)


class _Memory:
    """The memory of a queued operation: held, or (``owned`` by torch's allocator) only remembered."""

    def __init__(self, tensor: torch.Tensor, *, is_held: bool) -> None:
        self.num_bytes = tensor.numel()
        self._held = tensor if is_held else None
        self._offset = 0 if is_held else tensor.storage_offset()
        # A weak reference to the tensor is not enough: the caller's view may be gone while the storage lives
        # on.
        self._storage = None if is_held else StorageWeakRef(tensor.untyped_storage())

    def take(self, error: str) -> torch.Tensor:
        """The bytes as a tensor; RaceError with ``error`` where the memory was freed."""
        if self._storage is None:
            assert self._held is not None
            return self._held
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise RaceError(f"{error} ({self.num_bytes} bytes of torch's allocator)")
        return torch.empty(0, dtype=torch.uint8).set_(storage, self._offset, (self.num_bytes,), (1,))


class SimulatedStream(Stream):
    """A queue of copies, fills and waits. ``num_run`` of the ``num_put`` operations have happened."""

    device: SimulatedDevice

    def __init__(self, device: SimulatedDevice, name: str, index: int) -> None:
        super().__init__(device, name, index)
        self.queue: deque[_Copy | _Fill | _Wait] = deque()
        self.num_put = 0
        self.num_run = 0
        self._num_events = 0

    @property
    def computes(self) -> bool:
        """Whether torch runs its operations on it, which are done when they are enqueued."""
        return self is self.device.compute or self is self.device.beside

    @property
    def num_pending(self) -> int:
        """Operations put on this stream that have not happened."""
        return self.num_put - self.num_run

    def _record(self) -> SimulatedEvent:
        with self.device.lock:
            self._num_events += 1
            return SimulatedEvent(self, self._num_events, self.num_put)

    def _wait(self, event: Event, timed: bool) -> None:
        assert isinstance(event, SimulatedEvent)
        if event.stream.device is not self.device:
            raise ValueError(f"{event} belongs to another device")
        begin = time.perf_counter()
        self._put(_Wait(event))
        if timed:
            self.device.add_stall(time.perf_counter() - begin)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        what = f"copy of {src.numel()} bytes on {self.name}"
        self._put(_Copy(what, self.device.memory_of(dst), self.device.memory_of(src)))

    def _fill(self, dst: torch.Tensor, value: int) -> None:
        self._put(_Fill(f"fill of {dst.numel()} bytes on {self.name}", self.device.memory_of(dst), value))

    def _put(self, operation: _Copy | _Fill | _Wait) -> None:
        with self.device.lock:
            if self.device.is_closed:
                raise PagerClosed(f"stream {self.name} belongs to a device that was closed")
            self.queue.append(operation)
            self.num_put += 1
            if self.device.is_early or self.computes:
                self.device.run_until(self, self.num_put)


class SimulatedDevice(Device):
    """Host memory that behaves as a device with two copy streams and a compute stream.

    ``streams`` is ``"late"`` or ``"early"``, ``check_races`` gives it a happens-before checker,
    ``skip_wait(stream, event)`` leaves out the waits for which it answers True (``stream`` None is a host
    wait) and exists for control tests only, ``lazy_compute`` see the head of this file. Raises ConfigError
    for other values of ``streams``.
    """

    is_simulated = True

    def __init__(
        self,
        streams: Literal["late", "early"] = "late",
        *,
        check_races: bool = True,
        skip_wait: SkipWait | None = None,
        lazy_compute: bool = False,
    ) -> None:
        if streams not in ("late", "early"):
            raise ConfigError(f'streams is {streams!r}; expected "late" or "early"')
        self.torch_device = torch.device("cpu")
        self.is_early = streams == "early"
        self.lazy_compute = lazy_compute
        self.skip_wait = skip_wait
        self.checker = HappensBefore() if check_races else None
        self.lock = threading.RLock()
        self.is_closed = False
        self.compute = SimulatedStream(self, "compute", 0)
        self.h2d = SimulatedStream(self, "h2d", 1)
        self.d2h = SimulatedStream(self, "d2h", 2)
        self.poison = SimulatedStream(self, "poison", 3)
        self.beside = SimulatedStream(self, "beside", 4)
        self.slots_in = SimulatedStream(self, "slots in", 5)
        self.slots_out = SimulatedStream(self, "slots out", 6)
        self._current = threading.local()
        self._stall_seconds = 0.0
        self._slabs: _Ranges[_Slab] = _Ranges()
        self._registered: _Ranges[bool] = _Ranges()

    def current_stream(self) -> SimulatedStream:
        """The compute stream, but in `computing_on`."""
        stream: SimulatedStream = getattr(self._current, "stream", self.compute)
        return stream

    @contextlib.contextmanager
    def computing_on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def force(self, event: SimulatedEvent) -> None:
        """Make ``event`` happen, and first all that it depends on."""
        self.run_until(event.stream, event.position)
        event.is_seen = True

    def run_until(self, stream: SimulatedStream, position: int) -> None:
        """Run ``stream`` until ``position`` operations of it are done; a wait runs its event's stream first.

        An explicit stack: a chain of waits back and forth between two streams is as long as the program.
        """
        with self.lock:
            stack = [(stream, position)]
            while stack:
                stream, position = stack[-1]
                if stream.num_run >= position:
                    stack.pop()
                    continue
                operation = stream.queue[0]
                if isinstance(operation, _Wait) and not operation.event.is_done:
                    stack.append((operation.event.stream, operation.event.position))
                    continue
                stream.queue.popleft()
                stream.num_run += 1
                operation.run()

    def memory_of(self, tensor: torch.Tensor) -> _Memory:
        """How a queued operation holds ``tensor``: see point 4 at the head of this file."""
        address, num_bytes = tensor.data_ptr(), tensor.numel()
        if num_bytes == 0:
            return _Memory(tensor, is_held=True)
        slab = self._slabs.find(address, num_bytes)
        if slab is not None:
            return _Memory(torch.from_numpy(slab.bytes_at(address, num_bytes)), is_held=True)
        return _Memory(tensor, is_held=self._registered.find(address, num_bytes) is not None)

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        if num_bytes <= 0:
            raise ValueError(f"a slab of {num_bytes} bytes")
        # NaN bytes: recycled memory may hold, by chance, just what a forgotten copy would have brought.
        room = np.full(num_bytes + SLAB_ALIGNMENT, 0xFF, dtype=np.uint8)
        address = room.ctypes.data + -room.ctypes.data % SLAB_ALIGNMENT
        # The device only knows where slabs are. Their tensor, wraps and pending copies keep the memory alive:
        # numpy makes ``room`` the base of each of them, so its end is the slab's.
        slab = _Slab(room)
        self._slabs.add(address, num_bytes, slab)
        call_on_release(room, _Forget(self._slabs, address))
        return torch.from_numpy(slab.bytes_at(address, num_bytes))

    def wrap(
        self, slab: torch.Tensor, offset: int, num_bytes: int, on_release: Callable[[], None] | Note
    ) -> torch.Tensor:
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > slab.numel():
            raise ValueError(f"bytes {offset}..{offset + num_bytes} of a slab of {slab.numel()} bytes")
        found = self._slabs.find(slab.data_ptr() + offset, num_bytes)
        if found is None:
            raise ValueError("wrap takes a slab of this device's allocate_slab")
        owner = found.bytes_at(slab.data_ptr() + offset, num_bytes).view(_Owner)
        call_on_release(owner, on_release)
        return torch.from_numpy(owner)

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def total_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def process_bytes(self) -> int:
        return 0

    def register_host(self, address: int, num_bytes: int) -> None:
        self._registered.add(address, num_bytes, True)

    def unregister_host(self, address: int) -> None:
        self._registered.remove(address)

    def release_cached_memory(self) -> None:
        pass

    def allocator_bytes(self) -> int:
        return 0

    def limit_allocator(self, num_bytes: int | None) -> None:
        return

    def allocator_peak_bytes(self) -> int:
        return 0

    def reset_allocator_peak(self) -> None:
        pass

    def num_out_of_memory(self) -> int:
        return 0

    def add_stall(self, seconds: float) -> None:
        """Count ``seconds`` in which a stream stood still."""
        with self.lock:
            self._stall_seconds += seconds

    def measure_bandwidth(self, num_bytes: int, *, direction: LinkDirection = "h2d") -> float:
        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.ones(num_bytes, dtype=torch.uint8)
        started = time.perf_counter()
        target.copy_(source)
        return num_bytes / max(time.perf_counter() - started, 1e-9)

    def drain_stall_seconds(self) -> float:
        with self.lock:
            seconds, self._stall_seconds = self._stall_seconds, 0.0
        return seconds

    def close(self) -> None:
        with self.lock:
            if self.is_closed:
                return
            for stream in self.own_streams:
                assert isinstance(stream, SimulatedStream)
                self.run_until(stream, stream.num_put)
            self.is_closed = True


class _Owner(np.ndarray):
    """The owner of a wrapped storage: torch holds this very object until the storage dies."""


class _Slab:
    """One allocation, known but not kept alive."""

    def __init__(self, room: npt.NDArray[np.uint8]) -> None:
        self._begin = room.ctypes.data
        self._room = weakref.ref(room)

    def bytes_at(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        room = self._room()
        assert room is not None, "a tensor over the slab keeps it alive"
        return room[address - self._begin : address - self._begin + num_bytes]


class _Forget:
    """Takes a dead slab out of the known ones; called wherever its last tensor dies."""

    def __init__(self, ranges: _Ranges[_Slab], address: int) -> None:
        self.ranges = ranges
        self.address = address

    def __call__(self) -> None:
        self.ranges.dead.append(self.address)


class _Ranges(Generic[T]):
    """Disjoint address ranges, each with something to find there.

    Addresses in ``dead`` are removed before the next use: they are appended by finalizers, which may run in
    the middle of a method. Memory is reused only after its finalizer ran, so a new range never meets its own
    removal.
    """

    def __init__(self) -> None:
        self.dead: deque[int] = deque()
        self._lock = threading.RLock()
        self._begins: list[int] = []
        self._entries: dict[int, tuple[int, T]] = {}

    def add(self, begin: int, num_bytes: int, value: T) -> None:
        with self._lock:
            self._bury()
            bisect.insort(self._begins, begin)
            self._entries[begin] = (begin + num_bytes, value)

    def remove(self, begin: int) -> None:
        with self._lock:
            self.dead.append(begin)
            self._bury()

    def find(self, begin: int, num_bytes: int) -> T | None:
        """What was added for the range that holds ``[begin, begin + num_bytes)``."""
        with self._lock:
            self._bury()
            place = bisect.bisect_right(self._begins, begin) - 1
            if place < 0:
                return None
            end, value = self._entries[self._begins[place]]
            return value if begin + num_bytes <= end else None

    def _bury(self) -> None:
        while self.dead:
            begin = self.dead.popleft()
            if self._entries.pop(begin, None) is not None:
                self._begins.remove(begin)
