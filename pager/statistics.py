"""What happened so far: counters the runtime adds to, and the immutable view users get."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """A snapshot; every name carries its unit (``_bytes``, ``_seconds``) or is a count.

    An access is one segment named by one operation. It is a *hit* when its pages were on the device, a *minor
    fault* when they were on their way, a *major fault* when nobody had asked for them in time.

    ``peak_resident_bytes`` counts pages; ``peak_device_process_bytes`` all that the process took on the device,
    which is what ``device_budget_bytes`` bounds (0 on the simulated device, whose budget counts pages).
    ``disk_budget_bytes`` is what may be taken there, ``disk_bytes`` what is (0 without ``disk``).
    ``disk_read_bytes`` and ``disk_write_bytes`` are what moves; ``disk_saved_bytes``, which would have moved too, what
    ``disk_compression`` has spared both.
    """

    page_in_bytes: int = 0
    page_out_bytes: int = 0
    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    disk_saved_bytes: int = 0
    hits: int = 0
    minor_faults: int = 0
    major_faults: int = 0
    refaults: int = 0
    prefetch_late: int = 0
    prefetch_unused: int = 0
    stall_seconds: float = 0.0
    num_steps: int = 0
    deviations: int = 0
    resident_bytes: int = 0
    peak_resident_bytes: int = 0
    peak_device_process_bytes: int = 0
    wired_bytes: int = 0
    device_budget_bytes: int = 0
    host_bytes: int = 0
    peak_host_bytes: int = 0
    host_budget_bytes: int = 0
    disk_bytes: int = 0
    peak_disk_bytes: int = 0
    disk_budget_bytes: int = 0

    @property
    def num_accesses(self) -> int:
        """Accesses in all: hits and faults."""
        return self.hits + self.minor_faults + self.major_faults

    @property
    def hit_rate(self) -> float:
        """Share of accesses that found their pages on the device, in [0, 1]; 1.0 before the first access."""
        return self.hits / self.num_accesses if self.num_accesses else 1.0

    def as_dict(self) -> dict[str, float]:
        """Plain floats under ``pager/...`` names, for TensorBoard, W&B and others."""
        values = {f"pager/{name}": float(value) for name, value in dataclasses.asdict(self).items()}
        values["pager/hit_rate"] = self.hit_rate
        return values

    def log_to(self, writer: Any, step: int) -> None:
        """Write all of :meth:`as_dict` to a TensorBoard ``SummaryWriter`` (or whatever has its ``add_scalar``)."""
        for name, value in self.as_dict().items():
            writer.add_scalar(name, value, step)


class Counters:
    """The mutable counters behind :class:`Statistics`.

    Hits and faults are counted under the engine's lock, by plain additions. Bytes, stalls and steps are counted
    where that lock is not held (never over a copy): by :meth:`add`, under a lock of their own.
    """

    __slots__ = (
        "_history",
        "_lock",
        "_start",
        "deviations",
        "disk_read_bytes",
        "disk_saved_bytes",
        "disk_write_bytes",
        "hits",
        "major_faults",
        "minor_faults",
        "num_steps",
        "page_in_bytes",
        "page_out_bytes",
        "prefetch_late",
        "prefetch_unused",
        "refaults",
        "stall_seconds",
    )

    # One sample is two numbers; 65536 of them are a few minutes of page traffic in 4 MB.
    HISTORY_SAMPLES = 65536

    def __init__(self) -> None:
        self.page_in_bytes = 0
        self.page_out_bytes = 0
        self.disk_read_bytes = 0
        self.disk_write_bytes = 0
        self.disk_saved_bytes = 0
        self.hits = 0
        self.minor_faults = 0
        self.major_faults = 0
        self.refaults = 0
        self.prefetch_late = 0
        self.prefetch_unused = 0
        self.stall_seconds = 0.0
        self.num_steps = 0
        self.deviations = 0
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._history: collections.deque[tuple[float, int]] = collections.deque(maxlen=self.HISTORY_SAMPLES)

    def add(
        self,
        *,
        page_in_bytes: int = 0,
        page_out_bytes: int = 0,
        disk_read_bytes: int = 0,
        disk_write_bytes: int = 0,
        disk_saved_bytes: int = 0,
        stall_seconds: float = 0.0,
        num_steps: int = 0,
    ) -> None:
        """Add to counters from any thread, whatever other locks it holds."""
        with self._lock:
            self.page_in_bytes += page_in_bytes
            self.page_out_bytes += page_out_bytes
            self.disk_read_bytes += disk_read_bytes
            self.disk_write_bytes += disk_write_bytes
            self.disk_saved_bytes += disk_saved_bytes
            self.stall_seconds += stall_seconds
            self.num_steps += num_steps

    def sample_resident(self, resident_bytes: int) -> None:
        """Note the resident bytes now, for the sawtooth."""
        self._history.append((time.perf_counter() - self._start, resident_bytes))

    def resident_history(self) -> list[tuple[float, int]]:
        """(seconds since ``manage()``, resident bytes), oldest first, at most ``HISTORY_SAMPLES``."""
        return list(self._history)

    def as_fields(self) -> dict[str, float]:
        """The counters by the names of :class:`Statistics`."""
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
