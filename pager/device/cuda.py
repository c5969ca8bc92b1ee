"""CUDA behind the runtime's view of a device. The only file that touches ``torch.cuda``, with `cuda_allocator.py`.

Streams and events are torch's; a copy is ``copy_(non_blocking=True)`` under a stream, which does not block
the host as long as the host side is page-locked. No `record_stream` per copy: slabs are ours for as long as
the arena lives, and who may reuse a frame when is decided by events. Streams are made with the default
priority. Page-locking goes through ``cudaHostRegister`` on memory that is already there, since
``pin_memory=True`` rounds up to a power of two and takes four times as long (DESIGN, section 5).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from pager.device.base import (
    SLAB_ALIGNMENT,
    Device,
    Event,
    LinkDirection,
    Moment,
    Note,
    Stream,
    call_on_release,
)
from pager.device.cuda_allocator import AllocatorCaps, use_expandable_segments
from pager.device.happens_before import HappensBefore
from pager.errors import PagerClosed, TierError
from pager.units import format_bytes

__all__ = ["CudaDevice", "CudaEvent", "CudaStream", "current_index", "device_uuid", "num_devices"]


def num_devices() -> int:
    """GPUs that torch can use here; 0 without a driver or in a build without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def current_index() -> int:
    """The number of torch's current CUDA device."""
    return torch.cuda.current_device()


def device_uuid(index: int) -> str:
    """The GPU as NVML knows it: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's."""
    return _nvml_uuid(str(torch.cuda.get_device_properties(index).uuid))


class CudaEvent(Event):
    """A torch event without timing, taken from the device's pool and given back when this object dies.

    Giving it back is safe while other streams still have to wait for it: a wait takes the event's state at
    the call, and recording the event anew does not change what was already waited for.
    """

    __slots__ = ("_event", "_pool")

    def __init__(self, stream: Stream, number: int, event: torch.cuda.Event, pool: deque[Any]) -> None:
        super().__init__(stream, number)
        self._event = event
        self._pool = pool

    def _query(self) -> bool:
        return bool(self._event.query())

    def _synchronize(self) -> None:
        self._event.synchronize()

    @property
    def native(self) -> torch.cuda.Event:
        """The torch event."""
        return self._event

    def __del__(self) -> None:
        self._pool.append(self._event)


class _Moment(Moment):
    """An event with timing. Two a step, so none is pooled."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_until(self, later: Moment) -> float | None:
        assert isinstance(later, _Moment)
        if not (self._event.query() and later._event.query()):
            return None
        return float(self._event.elapsed_time(later._event)) / 1000


class CudaStream(Stream):
    """One torch stream."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, name: str, index: int, native: torch.cuda.Stream) -> None:
        super().__init__(device, name, index)
        self.native = native
        self._lock = threading.Lock()
        self._num_events = 0

    def _record(self) -> CudaEvent:
        pool = self.device.event_pool
        try:
            event = pool.popleft()
        except IndexError:
            event = torch.cuda.Event()
        # One act among threads, so that a higher number never stands before a lower one in the stream.
        with self._lock:
            event.record(self.native)
            self._num_events += 1
            return CudaEvent(self, self._num_events, event, pool)

    def _wait(self, event: Event, timed: bool) -> None:
        assert isinstance(event, CudaEvent)
        if event.stream is self:
            return
        if not timed or event.native.query():
            self.native.wait_event(event.native)
            return
        begin, end = self.device.timing_events()
        begin.record(self.native)
        self.native.wait_event(event.native)
        end.record(self.native)
        self.device.pending_stalls.append((begin, end))

    def moment(self) -> Moment:
        return _Moment(self.native)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.device.check_open(self)
        copy = _memcpy_async()
        if copy is None:
            with torch.cuda.stream(self.native):
                dst.copy_(src, non_blocking=True)
            return
        status = copy(dst.data_ptr(), src.data_ptr(), dst.numel(), _COPY_DEFAULT, self.native.cuda_stream)
        if status:
            raise TierError(f"cudaMemcpyAsync of {format_bytes(dst.numel())} failed: CUDA error {status}")

    def _fill(self, dst: torch.Tensor, value: int) -> None:
        self.device.check_open(self)
        with torch.cuda.stream(self.native):
            dst.fill_(value)


# cudaMemcpyDefault: CUDA tells host from device addresses by itself.
_COPY_DEFAULT = 4


@functools.cache
def _memcpy_async() -> Callable[..., int] | None:
    """The CUDA runtime's cudaMemcpyAsync, of the very library that torch has loaded; None where it is not found.

    Torch's copy with a stream context around it costs the host ten times as much, and a step has thousands.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "/libcudart.so" in line}
    except OSError:
        return None
    if len(paths) != 1:
        return None
    # PyDLL keeps the GIL: the call takes microseconds, and who gives the GIL up must queue for it again.
    function = ctypes.PyDLL(paths.pop()).cudaMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    call: Callable[..., int] = function
    return call


# Enough copies that one launch (4 us) does not matter.
_BANDWIDTH_COPIES = 8


class _Frames:
    """Device memory as ``torch.as_tensor`` takes it; torch holds this object until the storage dies."""

    def __init__(self, slab: torch.Tensor, address: int, num_bytes: int) -> None:
        self.slab = slab
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
            "stream": None,  # no synchronization on our behalf: events order the accesses
        }


_ALLOCATOR_CAPS = AllocatorCaps()
_HOLDERS = itertools.count()


class CudaDevice(Device):
    """The GPU ``cuda:<index>``. ``check_races`` gives it a happens-before checker, which costs time."""

    is_simulated = False

    def __init__(self, index: int, *, check_races: bool = False) -> None:
        self.torch_device = torch.device("cuda", index)
        self.checker = HappensBefore() if check_races else None
        self.event_pool: deque[torch.cuda.Event] = deque()
        self.pending_stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._timing_pool: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        self._drain_lock = threading.Lock()
        self._streams: dict[int, CudaStream] = {}
        self._registered: set[int] = set()
        self._is_closed = False
        self._holder = next(_HOLDERS)
        self._lift_cap: weakref.finalize[Any, Any] | None = None
        # torch takes streams of the pool in turn and may give out one it gave before; ours are told apart by
        # index.
        self._num_streams = 0
        self.current_stream()
        self.h2d = self._new_stream("h2d", torch.cuda.Stream(self.torch_device))
        self.d2h = self._new_stream("d2h", torch.cuda.Stream(self.torch_device))
        self.poison = self._new_stream("poison", torch.cuda.Stream(self.torch_device))
        self.beside = self._new_stream("beside", torch.cuda.Stream(self.torch_device))
        self.slots_in = self._new_stream("slots in", torch.cuda.Stream(self.torch_device))
        self.slots_out = self._new_stream("slots out", torch.cuda.Stream(self.torch_device))

    def _new_stream(self, name: str, native: torch.cuda.Stream) -> CudaStream:
        stream = CudaStream(self, name, self._num_streams, native)
        self._num_streams += 1
        self._streams[native.cuda_stream] = stream
        return stream

    def check_open(self, stream: Stream) -> None:
        """Raises PagerClosed after ``close``."""
        if self._is_closed:
            raise PagerClosed(f"stream {stream.name} belongs to a device that was closed")

    def current_stream(self) -> CudaStream:
        # The raw handle costs a tenth of torch.cuda.current_stream(), and this is asked at every access.
        stream = self._streams.get(torch._C._cuda_getCurrentRawStream(self.torch_device.index))
        if stream is None:
            native = torch.cuda.current_stream(self.torch_device)
            with self._lock:
                stream = self._streams.get(native.cuda_stream)
                if stream is None:
                    stream = self._new_stream(f"compute {len(self._streams)}", native)
        return stream

    def computing_on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        assert isinstance(stream, CudaStream)
        return torch.cuda.stream(stream.native)

    def timing_events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """A pair of events with timing, from the pool where it has one."""
        try:
            return self._timing_pool.popleft()
        except IndexError:
            return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        if num_bytes <= 0:
            raise ValueError(f"a slab of {num_bytes} bytes")
        use_expandable_segments(self.torch_device.index)
        slab = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        # torch hands out memory that kernels of the current stream may still be using, since later work of
        # that stream comes after them. Ours is used on other streams: so they wait, and torch is told to ask
        # them before it hands the slab to somebody else.
        ready = self.current_stream().record()
        for stream in self.own_streams:
            assert isinstance(stream, CudaStream)
            stream.wait(ready)
            slab.record_stream(stream.native)
        if slab.data_ptr() % SLAB_ALIGNMENT:
            raise TierError(f"torch's allocator gave memory that is not {SLAB_ALIGNMENT}-byte aligned")
        return slab

    def wrap(
        self, slab: torch.Tensor, offset: int, num_bytes: int, on_release: Callable[[], None] | Note
    ) -> torch.Tensor:
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > slab.numel():
            raise ValueError(f"bytes {offset}..{offset + num_bytes} of a slab of {slab.numel()} bytes")
        owner = _Frames(slab, slab.data_ptr() + offset, num_bytes)
        call_on_release(owner, on_release)
        return torch.as_tensor(owner, device=self.torch_device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def process_bytes(self) -> int:
        """As NVML counts this process, context included.

        Where NVML cannot tell (containers with their own process ids, a driver without the figure): all that
        is in use on the GPU, which is no less unless other processes share it.
        """
        used = _nvml_process_bytes(str(torch.cuda.get_device_properties(self.torch_device).uuid))
        if used is not None:
            return used
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(total - free)

    def register_host(self, address: int, num_bytes: int) -> None:
        with torch.cuda.device(self.torch_device):
            status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if int(status) != 0:
            # The refusal stays behind as CUDA's last error, which torch would report as that of its next
            # kernel.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.torch_device)
            raise TierError(f"cudaHostRegister refused {format_bytes(num_bytes)}: CUDA error {int(status)}")
        self._registered.add(address)

    def unregister_host(self, address: int) -> None:
        if address in self._registered:
            self._registered.discard(address)
            torch.cuda.cudart().cudaHostUnregister(address)

    def release_cached_memory(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def allocator_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def limit_allocator(self, num_bytes: int | None) -> None:
        share = None if num_bytes is None else min(num_bytes / self.total_bytes(), 1.0)
        index = self.torch_device.index
        if share is not None and self._lift_cap is None:
            # A model that nobody closes must not leave its cap behind.
            self._lift_cap = weakref.finalize(self, _ALLOCATOR_CAPS.put, index, self._holder, None)
            self._lift_cap.atexit = False
        _ALLOCATOR_CAPS.put(index, self._holder, share)

    def allocator_peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.torch_device))

    def reset_allocator_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def num_out_of_memory(self) -> int:
        return int(torch.cuda.memory_stats(self.torch_device).get("num_ooms", 0))

    def measure_bandwidth(self, num_bytes: int, *, direction: LinkDirection = "h2d") -> float:
        streams = {"h2d": (self.h2d,), "d2h": (self.d2h,), "both": (self.h2d, self.d2h)}[direction]
        copies = []
        for stream in streams:
            assert isinstance(stream, CudaStream)
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
            pair = (device, host) if stream is self.h2d else (host, device)
            # The allocator's memory may still be in use on the compute stream.
            stream.native.wait_stream(torch.cuda.current_stream(self.torch_device))
            with torch.cuda.stream(stream.native):
                pair[0].copy_(pair[1], non_blocking=True)  # the first copy is slower
            stream.native.synchronize()
            times = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            copies.append((stream.native, pair, times))
        for native, _, times in copies:
            times[0].record(native)
        # In turn, so that no direction has the link to itself for long.
        for _ in range(_BANDWIDTH_COPIES):
            for native, pair, _ in copies:
                with torch.cuda.stream(native):
                    pair[0].copy_(pair[1], non_blocking=True)
        for native, _, times in copies:
            times[1].record(native)
        seconds = 0.0
        for _, _, times in copies:
            times[1].synchronize()
            seconds = max(seconds, times[0].elapsed_time(times[1]) / 1000)
        return _BANDWIDTH_COPIES * num_bytes / seconds

    def drain_stall_seconds(self) -> float:
        seconds = 0.0
        with self._drain_lock:
            while self.pending_stalls and self.pending_stalls[0][1].query():
                pair = self.pending_stalls.popleft()
                seconds += pair[0].elapsed_time(pair[1]) / 1000
                self._timing_pool.append(pair)
        return seconds

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for stream in self.own_streams:
            assert isinstance(stream, CudaStream)
            stream.native.synchronize()


def _nvml_uuid(uuid: str) -> str:
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _nvml_process_bytes(uuid: str) -> int | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(_nvml_uuid(uuid))
            processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            # In a container NVML counts the host's process ids; but we hold a context, so a single one is
            # ours.
            own = [process for process in processes if process.pid == os.getpid() or len(processes) == 1]
            return None if not own or own[0].usedGpuMemory is None else int(own[0].usedGpuMemory)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
