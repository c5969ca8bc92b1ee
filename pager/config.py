"""The knobs of a managed model. Validated when a :class:`Config` is made, so nothing fails later for a typo."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from pager.errors import ConfigError
from pager.units import format_bytes, parse_size

MIN_PAGE_BYTES = 16 * 2**10
MAX_PAGE_BYTES = 4 * 2**20
# Whether the GPU is there is asked when a model is managed; what no machine has is refused here.
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checks:
    """Switches for tests and for hunting a suspected ordering bug. All cost time; none changes a result.

    streams: of the simulated device; "early" runs an operation when it is enqueued, "late" as late as its
        waits allow.
    happens_before: check that streams and events order every two accesses to a frame (also on CUDA), and that the
        disk gives back what it was given (a checksum per page).
    poison: overwrite freed frames with NaN bytes, so that a stale read cannot look right.
    daemon: "thread" runs pagerd on its own thread, "inline" runs it after each access on the caller's.
    arena_bytes: exactly this much for pages, whatever the budget leaves.
    page_all: page a model also where all of it would fit the device.
    skip_wait: for control tests on the simulated device: drop the stream waits for which it answers True.
    """

    streams: str = "early"
    happens_before: bool = False
    poison: bool = False
    daemon: str = "thread"
    arena_bytes: int | None = None
    page_all: bool = False
    skip_wait: Callable[..., bool] | None = None

    def __post_init__(self) -> None:
        if self.streams not in ("early", "late"):
            raise ConfigError(f'checks.streams is {self.streams!r}; expected "early" or "late"')
        if self.daemon not in ("thread", "inline"):
            raise ConfigError(f'checks.daemon is {self.daemon!r}; expected "thread" or "inline"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything :func:`pager.manage` can be told.

    page_size: bytes, a power of two from 16 KiB to 4 MiB; int or text such as "128KiB".
    prefetch_distance: upcoming extents kept in flight, or "auto" (from measured bandwidth and compute time).
    eviction: "belady", "lru", "clock", or an object with the methods of
        ``pager.policies.protocol.EvictionPolicy``.
    device: "auto" (CUDA when there is one), "cuda", "cuda:1", or "cpu" (the simulated device).
    device_budget: bytes, "24GiB", or a fraction of the device's memory in (0, 1]; None = 90 % of what is
        free, on the simulated device 25 % of the host memory that is free.
    device_headroom: bytes kept free for activations beyond what was measured; "auto" = one thirty-second of the
        budget or a third of the activations, once a few steps were measured one forty-eighth or a twelfth; on the
        simulated device 0 (activations are not counted there).
    host_budget: bytes, "48GiB", or a fraction of the smaller of physical memory and the cgroup limit. Counts the whole
        process; ``handle.set(host_budget=...)`` changes it while the model trains.
    disk: folder for the third tier, or None for two tiers. It is used by what host memory has no room for.
    disk_budget: the most bytes to take there, or "55GiB"; None = what the folder's file system has free, less
        one tenth.
    disk_compression: "zstd", or a level of zstandard from 1 to 22: pages that shrink are moved to and from the disk
        compressed; None = all as they are. It changes no bit and needs the package zstandard. It pays on disks that
        are slower than the cores that are idle; docs/benchmarks.md has the trade.
    update_on: where the optimizer runs; "device" is exact. "auto" gives Adam and AdamW in fp32 (or with a fp32
        master) a part of the parameters to the CPU, as large as it gets done beside the link; "cpu" all it can.
    update_at: "step"; "backward" updates parameters inside the backward, nearly all as soon as their gradient is
        final, so gradients need hardly any storage; whoever needs all of them before the step (clipping,
        GradScaler) cannot have that.
    master: "float32" steps bf16 parameters in fp32, through a fp32 master of which the parameter is the rounded
        value; None steps them in their own dtype, as torch does.
    example_inputs: a tuple of positional or a dict of keyword inputs for capture before the first batch.
    init: called as ``init(module)`` for each module that holds meta parameters, instead of
        ``reset_parameters``.
    checks: switches for tests, see :class:`Checks`.

    Raises ConfigError (a ValueError) or TypeError for values that cannot work.
    """

    page_size: int | str = "128KiB"
    prefetch_distance: int | str = 4
    eviction: Any = "belady"
    device: str = "auto"
    device_budget: int | float | str | None = None
    device_headroom: int | str = "auto"
    host_budget: int | float | str = 0.85
    disk: str | Path | None = None
    disk_budget: int | str | None = None
    disk_compression: int | str | None = None
    update_on: str = "device"
    update_at: str = "step"
    master: str | None = None
    example_inputs: Any = None
    init: Callable[[Any], None] | None = None
    checks: Checks = field(default_factory=Checks)

    def __post_init__(self) -> None:
        page_bytes = parse_size(self.page_size, name="page_size")
        if page_bytes & (page_bytes - 1) or not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
            raise ConfigError(
                f"page_size is {self.page_size!r} ({page_bytes} bytes); expected a power of two from "
                f"{format_bytes(MIN_PAGE_BYTES)} to {format_bytes(MAX_PAGE_BYTES)}"
            )
        self._check_distance()
        self._check_eviction()
        self._check_places()
        _check_budget("device_budget", self.device_budget, optional=True)
        _check_budget("host_budget", self.host_budget, optional=False)
        if self.device_headroom != "auto":
            parse_size(self.device_headroom, name="device_headroom")
        if self.disk_budget is not None:
            parse_size(self.disk_budget, name="disk_budget")
            if self.disk is None:
                raise ConfigError("disk_budget is set but disk is None; name a folder with disk=PATH")
        self._check_compression()
        if self.update_on not in ("device", "auto", "cpu"):
            raise ConfigError(f'update_on is {self.update_on!r}; expected "device", "auto" or "cpu"')
        if self.update_at not in ("step", "backward"):
            raise ConfigError(f'update_at is {self.update_at!r}; expected "step" or "backward"')
        if self.master not in (None, "float32"):
            raise ConfigError(f'master is {self.master!r}; expected "float32" or None')
        if self.example_inputs is not None and not isinstance(self.example_inputs, (tuple, list, dict)):
            raise TypeError(
                f"example_inputs is a {type(self.example_inputs).__name__}; expected a tuple of positional "
                "inputs or a dict of keyword inputs"
            )
        if self.init is not None and not callable(self.init):
            raise TypeError(f"init is a {type(self.init).__name__}; expected a callable taking a module")
        if not isinstance(self.checks, Checks):
            raise TypeError(f"checks is a {type(self.checks).__name__}; expected a pager.config.Checks")

    def example_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``example_inputs`` as positional and keyword arguments."""
        example = self.example_inputs or ()
        return ((), dict(example)) if isinstance(example, dict) else (tuple(example), {})

    def _check_distance(self) -> None:
        distance = self.prefetch_distance
        if distance == "auto":
            return
        if isinstance(distance, bool) or not isinstance(distance, int):
            raise TypeError(f'prefetch_distance is {distance!r}; expected a number of extents or "auto"')
        if distance < 0:
            raise ConfigError(
                f"prefetch_distance is {distance}; it cannot be negative (0 switches prefetch off)"
            )

    def _check_eviction(self) -> None:
        from pager.policies.protocol import make_eviction_policy

        try:
            make_eviction_policy(self.eviction)
        except ValueError as error:  # that room does not know our errors
            raise ConfigError(str(error)) from error

    def _check_places(self) -> None:
        if not isinstance(self.device, str):
            raise TypeError(
                f'device is {self.device!r}; expected text: "auto", "cuda", "cuda:<number>" or "cpu"'
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f'device is {self.device!r}; expected "auto", "cuda", "cuda:<number>" or "cpu" (the simulated device)'
            )
        if self.disk is not None and not isinstance(self.disk, (str, os.PathLike)):
            raise TypeError(f"disk is {self.disk!r}; expected the path of a folder, or None")
        if self.disk is not None and not os.fspath(self.disk):
            raise ConfigError("disk is empty text; expected the path of a folder, or None")

    def _check_compression(self) -> None:
        level = self.disk_compression
        if level is None:
            return
        if isinstance(level, bool) or not isinstance(level, (int, str)):
            raise TypeError(f'disk_compression is {level!r}; expected "zstd", a level from 1 to 22, or None')
        # Levels below 1 leave the entropy coding out, which is all that helps with floats.
        if level != "zstd" and (isinstance(level, str) or not 1 <= level <= 22):
            raise ConfigError(
                f'disk_compression is {level!r}; expected "zstd", a level from 1 to 22, or None'
            )
        if self.disk is None:
            raise ConfigError("disk_compression is set but disk is None; name a folder with disk=PATH")
        if find_spec("zstandard") is None:
            raise ConfigError(
                f"disk_compression={level!r} needs the package zstandard, which is not installed. Install it, as by "
                '`pip install "torch-pager[zstd]"`, or leave disk_compression out'
            )

    @property
    def compression_level(self) -> int | None:
        """``disk_compression`` as a level of zstandard; None where nothing is compressed."""
        return 1 if self.disk_compression == "zstd" else cast("int | None", self.disk_compression)

    @property
    def page_bytes(self) -> int:
        """``page_size`` in bytes."""
        return parse_size(self.page_size)

    def replace(self, **knobs: Any) -> Config:
        """A copy with some knobs changed; unknown names raise TypeError that lists the known ones."""
        known = [f.name for f in dataclasses.fields(self)]
        unknown = sorted(set(knobs) - set(known))
        if unknown:
            raise TypeError(f"unknown knob {', '.join(unknown)}; known: {', '.join(known)}")
        return dataclasses.replace(self, **knobs)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Config:
        """Read knobs from a YAML mapping. Raises ConfigError naming the file where it cannot be read or has
        anything else in it.
        """
        import yaml

        try:
            with open(path, encoding="utf-8") as file:
                knobs = yaml.safe_load(file)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not YAML: {error}") from error
        if knobs is None:
            knobs = {}
        if not isinstance(knobs, dict):
            raise ConfigError(f"{path}: expected a mapping of knobs, found a {type(knobs).__name__}")
        try:
            if isinstance(knobs.get("checks"), dict):
                knobs["checks"] = Checks(**knobs["checks"])
            return cls().replace(**knobs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _check_budget(name: str, value: int | float | str | None, *, optional: bool) -> None:
    if value is None:
        if not optional:
            raise TypeError(f"{name} is None; expected bytes, text such as '24GiB', or a fraction in (0, 1]")
        return
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise ConfigError(
                f"{name} is {value}; a fraction must be above 0 and at most 1 (bytes are an int)"
            )
        return
    if parse_size(value, name=name) == 0:
        raise ConfigError(f"{name} is 0 bytes; nothing fits in that")


def resolve_budget(value: int | float | str, whole_bytes: int, *, name: str) -> int:
    """Bytes meant by a budget knob: a float is a fraction of ``whole_bytes``, the rest are bytes."""
    if isinstance(value, float):
        return int(value * whole_bytes)
    return parse_size(value, name=name)
