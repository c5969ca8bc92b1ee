"""Tiers made of tiers: limited, counted, faulty. Each keeps the contract of `base` and wraps any tier.

They compose: ``CountedTier(FaultyTier(DiskFile(...), ...))`` counts what its users see, and the other way
round what reaches the disk. What a tier has beyond the contract (``HostArena.view``, ``grow``) is passed
through.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pager.errors import TierError, TierFull, TierIOError
from pager.tiers.base import BackingTier
from pager.units import format_bytes


class Adaptor:
    """Passes everything on to ``inner``; the others override what they change."""

    def __init__(self, inner: BackingTier) -> None:
        self.inner = inner

    @property
    def page_size(self) -> int:
        """Bytes in a frame."""
        return self.inner.page_size

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames handed out now."""
        return self.inner.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most ``used_bytes`` has been."""
        return self.inner.peak_bytes

    @property
    def budget_bytes(self) -> int:
        """Bytes that ``used_bytes`` cannot pass."""
        return self.inner.budget_bytes

    def allocate(self, num_frames: int) -> int:
        """See `BackingTier.allocate`."""
        return self.inner.allocate(num_frames)

    def free(self, first_frame: int, num_frames: int) -> None:
        """See `BackingTier.free`."""
        self.inner.free(first_frame, num_frames)

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """See `BackingTier.read`."""
        return self.inner.read(first_frame, out)

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """See `BackingTier.write`."""
        return self.inner.write(first_frame, data)

    def close(self) -> None:
        """See `BackingTier.close`."""
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: without this, looking for it would look for it
            raise AttributeError(name)
        return getattr(self.inner, name)


class LimitedTier(Adaptor):
    """Lets at most ``budget_bytes`` of the inner tier be in use; TierFull beyond."""

    def __init__(self, inner: BackingTier, budget_bytes: int) -> None:
        super().__init__(inner)
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes handed out through this adaptor."""
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most ``used_bytes`` has been."""
        return self._peak_bytes

    @property
    def budget_bytes(self) -> int:
        """The smaller of this limit and the inner tier's."""
        return min(self._budget_bytes, self.inner.budget_bytes)

    def allocate(self, num_frames: int) -> int:
        """As the inner tier; TierFull where the limit would be passed."""
        num_bytes = num_frames * self.page_size
        with self._lock:
            if self._used_bytes + num_bytes > self._budget_bytes:
                raise TierFull(
                    f"{format_bytes(num_bytes)} more than the {format_bytes(self._used_bytes)} in use would "
                    f"pass the limit of {format_bytes(self._budget_bytes)}"
                )
            self._used_bytes += num_bytes
        try:
            first = self.inner.allocate(num_frames)
        except BaseException:
            with self._lock:
                self._used_bytes -= num_bytes
            raise
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return first

    def free(self, first_frame: int, num_frames: int) -> None:
        """As the inner tier."""
        self.inner.free(first_frame, num_frames)
        with self._lock:
            self._used_bytes -= num_frames * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """What went through a `CountedTier`. Only what succeeded is in the bytes."""

    num_allocations: int = 0
    num_frees: int = 0
    num_reads: int = 0
    num_writes: int = 0
    num_errors: int = 0
    allocated_bytes: int = 0
    freed_bytes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0


class CountedTier(Adaptor):
    """Counts operations, bytes and errors of the inner tier."""

    def __init__(self, inner: BackingTier) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._statistics = TierStatistics()

    def statistics(self) -> TierStatistics:
        """The counts until now, as one consistent value."""
        return self._statistics

    def allocate(self, num_frames: int) -> int:
        """As the inner tier."""
        first = self._counting(lambda: self.inner.allocate(num_frames))
        self._add(num_allocations=1, allocated_bytes=num_frames * self.page_size)
        return first

    def free(self, first_frame: int, num_frames: int) -> None:
        """As the inner tier."""
        self._counting(lambda: self.inner.free(first_frame, num_frames))
        self._add(num_frees=1, freed_bytes=num_frames * self.page_size)

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """As the inner tier."""
        moved = int(self._counting(lambda: self.inner.read(first_frame, out)))
        self._add(num_reads=1, read_bytes=out.numel())
        return moved

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """As the inner tier."""
        moved = int(self._counting(lambda: self.inner.write(first_frame, data)))
        self._add(num_writes=1, write_bytes=data.numel())
        return moved

    def _counting(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except TierError:
            self._add(num_errors=1)
            raise

    def _add(self, **amounts: int) -> None:
        with self._lock:
            new = {name: getattr(self._statistics, name) + amount for name, amount in amounts.items()}
            self._statistics = replace(self._statistics, **new)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong at the ``at``-th (from 1) call of ``operation``, and if ``lasting`` at all later ones.

    ``error`` is raised (None: TierFull for an allocation, TierIOError EIO else), for a write after
    ``num_bytes`` of it have reached the tier. With ``wrong_byte`` nothing is raised: that byte of what is
    read or written has its bits turned.
    """

    operation: Literal["allocate", "free", "read", "write"]
    at: int
    error: Exception | None = None
    num_bytes: int = 0
    wrong_byte: int | None = None
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.operation not in ("allocate", "free", "read", "write"):
            raise ValueError(f"no operation {self.operation!r}")
        if self.at < 1:
            raise ValueError(f"a fault at call {self.at}; the first call is 1")
        if self.wrong_byte is not None and self.operation not in ("read", "write"):
            raise ValueError(f"an {self.operation} moves no bytes that could be wrong")


class FaultyTier(Adaptor):
    """Does what the inner tier does, but for the ``faults``, and takes ``latency_seconds`` per read or write.

    The latency goes through ``sleep``, so that a test can count it, or block there until it has set the
    stage. ``calls`` counts the calls of each operation.
    """

    def __init__(
        self,
        inner: BackingTier,
        faults: Iterable[Fault] = (),
        *,
        latency_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.faults = tuple(faults)
        self.calls = {"allocate": 0, "free": 0, "read": 0, "write": 0}
        self._latency_seconds = latency_seconds
        self._sleep = sleep
        self._lock = threading.Lock()

    def allocate(self, num_frames: int) -> int:
        """As the inner tier, unless a fault says otherwise."""
        fault = self._next_fault("allocate")
        if fault is not None:
            raise fault.error or TierFull(f"injected: no room for {num_frames} frames")
        return self.inner.allocate(num_frames)

    def free(self, first_frame: int, num_frames: int) -> None:
        """As the inner tier, unless a fault says otherwise."""
        fault = self._next_fault("free")
        if fault is not None:
            raise fault.error or _input_output_error("free")
        self.inner.free(first_frame, num_frames)

    def read(self, first_frame: int, out: torch.Tensor) -> int:
        """As the inner tier, unless a fault says otherwise."""
        fault = self._next_fault("read")
        self._take_time()
        if fault is not None and fault.wrong_byte is None:
            raise fault.error or _input_output_error("read")
        moved = self.inner.read(first_frame, out)
        if fault is not None and fault.wrong_byte is not None:
            out[fault.wrong_byte] ^= 0xFF
        return moved

    def write(self, first_frame: int, data: torch.Tensor) -> int:
        """As the inner tier, unless a fault says otherwise."""
        fault = self._next_fault("write")
        self._take_time()
        if fault is None:
            return self.inner.write(first_frame, data)
        if fault.wrong_byte is not None:
            data = data.clone()
            data[fault.wrong_byte] ^= 0xFF
            return self.inner.write(first_frame, data)
        if fault.num_bytes:
            self.inner.write(first_frame, data[: fault.num_bytes])
        raise fault.error or _input_output_error("write")

    def _next_fault(self, operation: str) -> Fault | None:
        with self._lock:
            self.calls[operation] += 1
            call = self.calls[operation]
        for fault in self.faults:
            if fault.operation == operation and (call == fault.at or (fault.lasting and call > fault.at)):
                return fault
        return None

    def _take_time(self) -> None:
        if self._latency_seconds:
            self._sleep(self._latency_seconds)


def _input_output_error(what: str) -> TierIOError:
    return TierIOError(errno.EIO, f"injected: cannot {what}", "faulty tier")
