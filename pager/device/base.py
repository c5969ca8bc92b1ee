"""What the runtime needs of a device: streams, events, copies, and memory handed to torch.

The problem. Bytes move between tiers while the compute goes on, so nothing that is issued has happened yet.
On CUDA an operation put on a stream starts when everything before it on that stream is done, and two streams
know nothing of each other unless one waits for an event of the other. A forgotten wait gives wrong numbers
now and then, on a busy machine, at a size nobody tests. So the runtime speaks to devices only through the
small surface below, and that surface exists twice: `pager.device.cuda` hands the calls to CUDA,
`pager.device.simulated` carries each of them out as late (or as early) as the waits allow. Both tell every
access to a frame to the same checker (`pager.device.happens_before`), which finds a missing wait at the first
run instead of the thousandth.

The protocol.

1. Each direction of the link has one stream: ``device.h2d`` brings pages in, ``device.d2h`` takes them out, and
   ``device.poison`` overwrites freed frames, where that is asked for. The compute stream is the calling thread's
   own (``device.current_stream()``): torch puts kernels there by itself.
2. ``stream.copy`` and ``stream.fill`` name the frames they read and write as `Region`; work that torch does
   by itself on the compute stream is told by ``stream.touch``, what the host does by ``device.host_touch``. A
   tensor that is not made of frames (a gradient of the allocator) has region None, and must live until the
   copy is known to be done.
3. ``stream.record()`` notes a place in a stream, ``other.wait(event)`` makes later work of ``other`` start
   after it. Neither blocks the host. ``event.synchronize()`` does, and is for real faults only.
4. Memory is one slab at a time (``allocate_slab``), and frames of it are handed to torch by ``wrap``: a
   tensor with its own storage whose owner is an object of ours. When the last tensor or view of that storage
   is gone ``on_release`` is called. That may be inside garbage collection and under any lock, so it must do
   nothing but append to a queue.

Public methods check and tell the checker, then call the back end's underscored method of the same name.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from pager.errors import ConfigError

if TYPE_CHECKING:
    from pager.device.happens_before import Clock, HappensBefore

# Copied to measure the link with.
_LINK_BYTES = 64 * 2**20
SLAB_ALIGNMENT = 512  # bytes; a misaligned weight changes the bits of a product (DESIGN, "The MMU")

LinkDirection = Literal["h2d", "d2h", "both"]
SkipWait = Callable[["Stream | None", "Event"], bool]


class Region(NamedTuple):
    """Frames ``[begin, end)`` of the memory ``"device"`` or ``"host"``."""

    memory: str
    begin: int
    end: int


class Event(ABC):
    """A place in a stream, made by ``Stream.record``. ``number`` increases by one per event of a stream."""

    __slots__ = ("__weakref__", "clock", "number", "stream")

    def __init__(self, stream: Stream, number: int) -> None:
        self.stream = stream
        self.number = number
        self.clock: Clock | None = None

    def query(self) -> bool:
        """Whether everything before this place has happened. Never blocks and never makes it happen."""
        done = self._query()
        checker = self.stream.device.checker
        if done and checker is not None:
            checker.host_waits(self)
        return done

    def synchronize(self) -> None:
        """Block the calling thread until everything before this place has happened."""
        if self.stream.device.is_wait_skipped(None, self):
            return
        self._synchronize()
        checker = self.stream.device.checker
        if checker is not None:
            checker.host_waits(self)

    @abstractmethod
    def _query(self) -> bool: ...

    @abstractmethod
    def _synchronize(self) -> None: ...

    def __repr__(self) -> str:
        return f"<event {self.number} of {self.stream.name}>"


class Moment(ABC):
    """When a stream came by a place in it, made by ``Stream.moment``; on the device's own clock."""

    @abstractmethod
    def seconds_until(self, later: Moment) -> float | None:
        """Seconds from here to ``later``, of the same device; None as long as one of them is still to come."""


class _HostMoment(Moment):
    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def seconds_until(self, later: Moment) -> float | None:
        assert isinstance(later, _HostMoment)
        return later._seconds - self._seconds


class Stream(ABC):
    """A queue of work that runs in order. ``index`` is small and dense, ``name`` is for messages."""

    def __init__(self, device: Device, name: str, index: int) -> None:
        self.device = device
        self.name = name
        self.index = index

    def record(self) -> Event:
        """An event that is done when everything put on this stream until now is done."""
        with self.device.told():
            event = self._record()
            if self.device.checker is not None:
                self.device.checker.record(event)
        return event

    def wait(self, event: Event, *, timed: bool = False) -> None:
        """Work put on this stream from now on starts after ``event``. Never blocks the host on CUDA.

        ``timed`` adds the time this stream stood still for it to ``Device.drain_stall_seconds``, unless it is
        ``Device.beside``: what waits there stops nobody.
        """
        if self.device.is_wait_skipped(self, event):
            return
        with self.device.told():
            if self.device.checker is not None:
                self.device.checker.wait(self, event)
            self._wait(event, timed and self is not self.device.beside)

    def moment(self) -> Moment:
        """The moment at which everything put on this stream until now is done: on a compute stream, at once, if the
        device is simulated.
        """
        return _HostMoment()

    def copy(
        self, dst: torch.Tensor, src: torch.Tensor, *, reads: Region | None, writes: Region | None
    ) -> None:
        """Copy ``src`` into ``dst`` on this stream: contiguous 1-D uint8 tensors of one size; does not block.

        ``reads`` and ``writes`` are the frames behind ``src`` and ``dst``, None for a tensor that is not made
        of frames; such a tensor must stay alive until the copy is known to be done. Raises ValueError for
        other shapes or dtypes and RaceError where the checker finds an unordered access.
        """
        _check_bytes(dst, "dst")
        _check_bytes(src, "src")
        if dst.numel() != src.numel():
            raise ValueError(f"cannot copy {src.numel()} bytes into {dst.numel()}")
        with self.device.told():
            self._tell("copy", reads, writes)
            self._copy(dst, src)

    def fill(self, dst: torch.Tensor, value: int, *, writes: Region | None) -> None:
        """Set every byte of ``dst`` (contiguous 1-D uint8) to ``value`` on this stream; does not block."""
        _check_bytes(dst, "dst")
        with self.device.told():
            self._tell("fill", None, writes)
            self._fill(dst, value)

    def touch(self, region: Region, *, write: bool) -> None:
        """Tell the checker that work put on this stream up to now reads (or writes) ``region``."""
        checker = self.device.checker
        if checker is not None:
            with self.device.told():
                self._tell("kernel", None if write else region, region if write else None)

    def synchronize(self) -> None:
        """Block the calling thread until everything put on this stream has happened."""
        self.record().synchronize()

    def _tell(self, what: str, reads: Region | None, writes: Region | None) -> None:
        if self.device.checker is not None:
            self.device.checker.access(self, what, reads=reads, writes=writes)

    @abstractmethod
    def _record(self) -> Event: ...

    @abstractmethod
    def _wait(self, event: Event, timed: bool) -> None: ...

    @abstractmethod
    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...

    @abstractmethod
    def _fill(self, dst: torch.Tensor, value: int) -> None: ...

    def __repr__(self) -> str:
        return f"<stream {self.index} {self.name}>"


class Device(ABC):
    """One compute device with a stream per direction of the link. Safe to use from several threads."""

    torch_device: torch.device
    is_simulated: bool
    h2d: Stream
    d2h: Stream
    poison: Stream
    # A second compute stream, for what may run beside the model's own kernels.
    beside: Stream
    # For slots of the update.
    slots_in: Stream
    slots_out: Stream
    checker: HappensBefore | None
    skip_wait: SkipWait | None = None
    _link_bytes_per_second: float | None = None

    @property
    def own_streams(self) -> tuple[Stream, ...]:
        """All but the user's."""
        return (self.h2d, self.d2h, self.poison, self.beside, self.slots_in, self.slots_out)

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream on which torch runs the calling thread's operations; one object per stream."""

    @abstractmethod
    def computing_on(self, stream: Stream) -> contextlib.AbstractContextManager[Any]:
        """Within it ``stream`` is the calling thread's current stream, and torch allocates for it."""

    @abstractmethod
    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        """A new uint8 1-D tensor of ``num_bytes``, one allocation, 512-byte aligned, contents undefined."""

    @abstractmethod
    def wrap(
        self, slab: torch.Tensor, offset: int, num_bytes: int, on_release: Callable[[], None] | Note
    ) -> torch.Tensor:
        """Bytes ``[offset, offset + num_bytes)`` of ``slab`` as a uint8 1-D tensor with a storage of its own.

        ``on_release`` is called once, when the last tensor or view of that storage is gone, in whatever
        thread that happens, possibly inside garbage collection: it may only append to a queue. The slab is
        kept alive.
        """

    def host_touch(self, region: Region, *, write: bool) -> None:
        """Tell the checker that the host itself reads (or writes) ``region`` now; else does nothing."""
        if self.checker is not None:
            reads, writes = (None, region) if write else (region, None)
            self.checker.access(None, "host access", reads=reads, writes=writes)

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes nobody holds on the device now (host memory for the simulated device)."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Bytes the device has (host memory for the simulated device)."""

    @abstractmethod
    def process_bytes(self) -> int:
        """Bytes this process holds on the device: context, allocator, arena. 0 on the simulated device."""

    @abstractmethod
    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory for fast copies. TierError where the system refuses: it stays pageable."""

    @abstractmethod
    def unregister_host(self, address: int) -> None:
        """Undo ``register_host`` of the piece that begins at ``address``."""

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Give what torch's allocator caches but nobody uses back to the device."""

    @abstractmethod
    def allocator_bytes(self) -> int:
        """Bytes torch's allocator has reserved on the device now; 0 if simulated."""

    @abstractmethod
    def limit_allocator(self, num_bytes: int | None) -> None:
        """Let torch's allocator reserve at most ``num_bytes``: beyond that it raises its out-of-memory error.

        The smallest limit of all open devices of this GPU is in force, and no more than what was there before
        the first, which comes back after the last. None takes this one's off; so does dropping the device. Does
        nothing if simulated.
        """

    @abstractmethod
    def allocator_peak_bytes(self) -> int:
        """Most bytes torch's allocator has reserved on the device since the last reset; 0 if simulated."""

    @abstractmethod
    def reset_allocator_peak(self) -> None:
        """Start a new measurement of ``allocator_peak_bytes``."""

    @abstractmethod
    def num_out_of_memory(self) -> int:
        """How often torch's allocator raised an out-of-memory error in this process; 0 if simulated."""

    @abstractmethod
    def measure_bandwidth(self, num_bytes: int, *, direction: LinkDirection = "h2d") -> float:
        """Bytes per second of copies of ``num_bytes`` between page-locked memory and the device; blocks.

        ``direction`` "both" runs the two directions at once and gives the rate of each, not their sum.
        """

    def link_bytes_per_second(self) -> float:
        """Of each direction with both at work; measured at the first call, which blocks."""
        if self._link_bytes_per_second is None:
            self._link_bytes_per_second = self.measure_bandwidth(_LINK_BYTES, direction="both")
        return self._link_bytes_per_second

    @abstractmethod
    def drain_stall_seconds(self) -> float:
        """Seconds that streams stood still in timed waits, known by now and not yet reported."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is pending. Idempotent; the streams take no work afterwards."""

    def told(self) -> contextlib.AbstractContextManager[Any]:
        """Makes "tell the checker, put on the stream" one act among threads; empty without a checker."""
        return _NOTHING if self.checker is None else self.checker.lock

    def is_wait_skipped(self, stream: Stream | None, event: Event) -> bool:
        """Whether a control test asked to leave this wait out; ``stream`` None is the host's own wait."""
        return self.skip_wait is not None and self.skip_wait(stream, event)


_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _check_bytes(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        found = f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"
        raise ValueError(f"{name} must be a contiguous 1-D uint8 tensor, not {found}")


class _Watch(weakref.ref):
    """A weak reference that stays alive until its referent dies, and then calls ``on_release`` once."""

    __slots__ = ("on_release",)
    on_release: Callable[[], None] | Note


_watches: dict[int, _Watch] = {}


class Note:
    """An ``on_release`` that runs no line of Python: a signal's handler cannot come in between and be lost there.

    When the owner dies, ``queue`` gets a weak reference, for which :meth:`take` gives ``what``. ``kept`` holds the
    references until then; who drops it is told nothing more.
    """

    __slots__ = ("kept", "queue", "what")

    def __init__(self, queue: SimpleQueue[Any], what: object, kept: dict[int, Any]) -> None:
        self.queue = queue
        self.what = what
        self.kept = kept

    @staticmethod
    def take(found: Any) -> Any:
        """What a reference from the queue stands for; anything else stands for itself."""
        if not isinstance(found, _Watch):
            return found
        note = found.on_release
        assert isinstance(note, Note)
        note.kept.pop(id(found), None)
        return note.what


def _released(watch: _Watch) -> None:
    del _watches[id(watch)]
    on_release = watch.on_release
    assert not isinstance(on_release, Note)
    on_release()


def call_on_release(owner: object, on_release: Callable[[], None] | Note) -> None:
    """Call ``on_release`` once when ``owner`` dies, also where it dies in a collected cycle.

    The reference is kept by this module, not by the device: a device dropped before its tensors must not lose
    their release. `weakref.finalize` would do the same at several times the cost and run at exit as well.
    """
    if isinstance(on_release, Note):
        watch = _Watch(owner, on_release.queue.put)
        watch.on_release = on_release
        on_release.kept[id(watch)] = watch
        return
    watch = _Watch(owner, _released)
    watch.on_release = on_release
    _watches[id(watch)] = watch


_SPEC = re.compile(r"auto|cpu|cuda(?::(\d+))?")


def make_device(
    spec: str,
    *,
    streams: Literal["late", "early"] = "late",
    check_races: bool | None = None,
    skip_wait: SkipWait | None = None,
    lazy_compute: bool = False,
) -> Device:
    """The device named by ``spec``: ``"auto"``, ``"cuda"``, ``"cuda:1"`` or ``"cpu"`` (the simulated device).

    ``"auto"`` is CUDA where there is a usable GPU. ``streams`` and ``lazy_compute`` (see `simulated`) say
    when simulated streams run their work and ``skip_wait`` leaves waits out in control tests; a CUDA device
    takes none of them. ``check_races`` switches the happens-before checker (None: on for the simulated
    device, off on CUDA). Raises ConfigError for other text and for a GPU that is not there.
    """
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise ConfigError(f'device is {spec!r}; expected "auto", "cuda", "cuda:<number>" or "cpu"')
    from pager.device import cuda, simulated

    num_gpus = cuda.num_devices()
    if spec == "cpu" or (spec == "auto" and num_gpus == 0):
        return simulated.SimulatedDevice(
            streams, check_races=check_races is not False, skip_wait=skip_wait, lazy_compute=lazy_compute
        )
    if num_gpus == 0:
        raise ConfigError(
            f"device is {spec!r}, but torch {torch.__version__} sees no CUDA device; "
            'device="cpu" simulates one'
        )
    index = int(match.group(1)) if match.group(1) else cuda.current_index()
    if index >= num_gpus:
        known = ", ".join(f"cuda:{number}" for number in range(num_gpus))
        raise ConfigError(f"device is {spec!r}, but torch sees only {known}")
    return cuda.CudaDevice(index, check_races=bool(check_races))
