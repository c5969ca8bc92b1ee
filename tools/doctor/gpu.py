"""Checks of the GPU and its place on PCIe, as NVML tells them.

``nvml`` is the module ``pynvml``, or anything that answers like it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pager.tools.doctor.result import CheckResult
from pager.units import format_bytes

__all__ = [
    "GpuFacts",
    "PcieLink",
    "check_gpu",
    "check_pcie",
    "is_believable",
    "open_nvml",
    "read_gpu",
    "read_pcie",
]

# Of what is measured beyond what a link carries, before it is another link.
TOLERANCE = 1.02
# GB/s of one lane in one direction, by generation, after line coding.
_LANE_GB = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


class GpuFacts(NamedTuple):
    """``bus_id`` as /sys writes it."""

    name: str
    bus_id: str | None
    total_bytes: int
    driver: str


class PcieLink(NamedTuple):
    """Generation and width now; the most that card and slot do together; the most that the card could do. None: NVML
    does not tell, as in many virtual machines.
    """

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None
    card_generation: int | None

    @property
    def bytes_per_second(self) -> float | None:
        """What the link carries now in one direction."""
        lane = _LANE_GB.get(self.generation or 0)
        return None if lane is None or not self.width else lane * self.width * 1e9


@contextlib.contextmanager
def open_nvml(nvml: Any) -> Iterator[Any]:
    """``nvml`` initialised; None where there is no module or no driver."""
    if nvml is None:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """The answer of one call; None where the driver has none."""
    call: Callable[..., Any] | None = getattr(nvml, name, None)
    if call is None:
        return None
    try:
        answer = call(*arguments)
    except nvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


def num_driver_gpus(nvml: Any) -> int:
    """GPUs that the driver knows, whatever torch thinks of them."""
    return 0 if nvml is None else int(_ask(nvml, "nvmlDeviceGetCount") or 0)


def read_gpu(nvml: Any, uuid: str) -> GpuFacts | None:
    """The GPU with this uuid; None where NVML does not know it."""
    handle = None if nvml is None else _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    if handle is None:
        return None
    place = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    bus_id = None if place is None else place.busId
    if isinstance(bus_id, bytes):
        bus_id = bus_id.decode()
    return GpuFacts(
        name=str(_ask(nvml, "nvmlDeviceGetName", handle) or "GPU"),
        # NVML writes the domain with eight digits, the kernel with four.
        bus_id=None if not bus_id else bus_id.lower()[-len("0000:00:00.0") :],
        total_bytes=0 if memory is None else int(memory.total),
        driver=str(_ask(nvml, "nvmlSystemGetDriverVersion") or "unknown"),
    )


def read_pcie(nvml: Any, uuid: str) -> PcieLink | None:
    """Where the link of the GPU stands now; None where NVML does not know the GPU."""
    handle = None if nvml is None else _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
    if handle is None:
        return None
    return PcieLink(
        generation=_ask(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
        width=_ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_generation=_ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        max_width=_ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
        card_generation=_ask(nvml, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
    )


def check_gpu(facts: GpuFacts | None, num_torch: int, num_driver: int, torch_version: str) -> CheckResult:
    """``num_torch``, ``num_driver``: the GPUs that each of the two sees."""
    values = {"torch_gpus": num_torch, "driver_gpus": num_driver}
    if num_torch:
        found = f"{num_torch} for torch {torch_version}; NVML does not know the one in use"
        if facts is not None:
            found = f"{facts.name}, {format_bytes(facts.total_bytes)}, driver {facts.driver}, torch {torch_version}"
        return CheckResult(name="GPU", verdict="ok", found=found, values=values)
    if num_driver:
        return CheckResult(
            name="GPU",
            verdict="broken",
            found=f"the driver has {num_driver}, torch {torch_version} sees none",
            advice="install torch's build for CUDA, and look at CUDA_VISIBLE_DEVICES and at the driver's age",
            values=values,
        )
    return CheckResult(
        name="GPU",
        verdict="not here",
        found="no GPU; the rest is checked, and training runs on the simulated device",
        advice="in a container: start it with `--gpus all`",
        values=values,
    )


def is_believable(loaded: PcieLink | None, measured: float | None) -> bool:
    """Whether the link can be what NVML says, if copies reached ``measured`` bytes per second. In some virtual machines
    it tells of a bridge that is not there.
    """
    carries = None if loaded is None else loaded.bytes_per_second
    return carries is None or measured is None or measured <= carries * TOLERANCE


def check_pcie(idle: PcieLink | None, loaded: PcieLink | None, measured: float | None = None) -> CheckResult:
    """``loaded``: while copies run, which is what counts: at rest a link saves power. ``measured``: bytes per second
    that copies reached.
    """
    name = "PCIe link"
    if loaded is None or loaded.generation is None or loaded.width is None:
        found = "NVML does not tell generation and width, as in many virtual machines"
        return CheckResult(name=name, verdict="not here", found=found)
    values = {"idle": None if idle is None else idle._asdict(), "loaded": loaded._asdict()}
    if measured is not None and not is_believable(loaded, measured):
        return CheckResult(
            name=name,
            verdict="not here",
            found=f"NVML tells {_named(loaded.generation, loaded.width)} under load, but copies reach "
            f"{measured / 1e9:.1f} GB/s, more than that carries: a virtual machine",
            values=values,
        )
    at_rest = f", at rest {_named(idle.generation, idle.width)}" if idle is not None else ""
    found = (
        f"{_named(loaded.generation, loaded.width)} under load{at_rest}; "
        f"at most {_named(loaded.max_generation, loaded.max_width)}"
    )
    if loaded.max_width is not None and loaded.width < loaded.max_width:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{found}: {loaded.max_width - loaded.width} lanes are missing",
            advice="seat the card anew, use a slot with all its lanes, and look for a riser or bifurcation in the BIOS",
            values=values,
        )
    if loaded.max_generation is not None and loaded.generation < loaded.max_generation:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{found}: it does not come up under load",
            advice="look at ASPM and the link speed in the BIOS, at the power limit, and at `dmesg` for PCIe errors",
            values=values,
        )
    if loaded.card_generation is not None and loaded.generation < loaded.card_generation:
        return CheckResult(
            name=name,
            verdict="slow",
            found=f"{found}; the card itself does generation {loaded.card_generation}",
            advice="the slot or the mainboard is the limit: another slot or machine",
            values=values,
        )
    return CheckResult(name=name, verdict="ok", found=found, values=values)


def _named(generation: int | None, width: int | None) -> str:
    return f"gen {'?' if generation is None else generation} x{'?' if width is None else width}"
