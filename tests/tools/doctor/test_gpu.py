"""The GPU and its link, as an NVML that is made up tells them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pager.tools.doctor import gpu
from pager.tools.doctor.gpu import GpuFacts, PcieLink
from tests.tools.doctor.fake_nvml import FakeNvml, make_nvml


def test_a_session_is_closed_and_may_be_impossible() -> None:
    nvml = make_nvml()
    with gpu.open_nvml(nvml) as session:
        assert session is nvml
        assert nvml.open == 1
    assert nvml.open == 0
    with gpu.open_nvml(make_nvml(no_driver=True)) as session:
        assert session is None
    with gpu.open_nvml(None) as session:
        assert session is None


def test_what_nvml_tells_of_a_gpu() -> None:
    nvml = make_nvml(
        nvmlDeviceGetName=b"A card",
        nvmlDeviceGetPciInfo=SimpleNamespace(busId=b"00000000:3B:00.0"),
        nvmlDeviceGetMemoryInfo=SimpleNamespace(total=80 * 2**30),
        nvmlSystemGetDriverVersion="570.1",
        nvmlDeviceGetCount=2,
    )
    assert gpu.read_gpu(nvml, "GPU-1") == GpuFacts("A card", "0000:3b:00.0", 80 * 2**30, "570.1")
    assert gpu.num_driver_gpus(nvml) == 2
    assert gpu.read_gpu(make_nvml(), "GPU-1") == GpuFacts("GPU", None, 0, "unknown")
    assert gpu.read_gpu(FakeNvml(), "GPU-1") is None
    assert gpu.read_gpu(None, "GPU-1") is None
    assert gpu.num_driver_gpus(None) == 0


def test_what_nvml_tells_of_the_link() -> None:
    nvml = make_nvml(
        nvmlDeviceGetCurrPcieLinkGeneration=1,
        nvmlDeviceGetCurrPcieLinkWidth=16,
        nvmlDeviceGetMaxPcieLinkGeneration=4,
        nvmlDeviceGetMaxPcieLinkWidth=8,
        nvmlDeviceGetGpuMaxPcieLinkGeneration=5,
    )
    assert gpu.read_pcie(nvml, "GPU-1") == PcieLink(1, 16, 4, 8, 5)
    assert gpu.read_pcie(make_nvml(), "GPU-1") == PcieLink(None, None, None, None, None)
    assert gpu.read_pcie(FakeNvml(), "GPU-1") is None


def test_an_old_nvml_that_lacks_a_question() -> None:
    assert gpu._ask(make_nvml(), "nvmlNotInThisVersion") is None


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [
        (3, 16, 15.8),
        (4, 16, 31.5),
        (5, 16, 63.0),
        (5, 8, 31.5),
        (None, 16, None),
        (5, None, None),
        (9, 16, None),
    ],
)
def test_what_a_link_carries(generation: int | None, width: int | None, gigabytes: float | None) -> None:
    rate = PcieLink(generation, width, None, None, None).bytes_per_second
    assert rate == (None if gigabytes is None else pytest.approx(gigabytes * 1e9, rel=0.01))


@pytest.mark.parametrize(
    ("facts", "num_torch", "num_driver", "verdict", "found"),
    [
        (GpuFacts("A card", None, 80 * 2**30, "570"), 1, 1, "ok", "A card, 80.00 GiB, driver 570, torch 2.9"),
        (None, 1, 0, "ok", "NVML does not know the one in use"),
        (None, 0, 1, "broken", "the driver has 1, torch 2.9 sees none"),
        (None, 0, 0, "not here", "no GPU; the rest is checked"),
    ],
)
def test_a_gpu(facts: GpuFacts | None, num_torch: int, num_driver: int, verdict: str, found: str) -> None:
    result = gpu.check_gpu(facts, num_torch, num_driver, "2.9")
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("idle", "loaded", "verdict", "found"),
    [
        (None, None, "not here", "virtual machines"),
        (None, PcieLink(None, 16, 5, 16, 5), "not here", "virtual machines"),
        (
            PcieLink(1, 16, 5, 16, 5),
            PcieLink(5, 16, 5, 16, 5),
            "ok",
            "gen 5 x16 under load, at rest gen 1 x16",
        ),
        (None, PcieLink(4, 16, None, None, None), "ok", "at most gen ? x?"),
        (None, PcieLink(5, 8, 5, 16, 5), "slow", "8 lanes are missing"),
        (PcieLink(1, 16, 5, 16, 5), PcieLink(1, 16, 5, 16, 5), "slow", "does not come up under load"),
        (None, PcieLink(4, 16, 4, 16, 5), "slow", "the card itself does generation 5"),
    ],
)
def test_the_link_counts_under_load(
    idle: PcieLink | None, loaded: PcieLink | None, verdict: str, found: str
) -> None:
    result = gpu.check_pcie(idle, loaded)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict == "slow")


def test_a_link_that_copies_outrun_is_not_believed() -> None:
    told = PcieLink(1, 16, 5, 16, 5)
    assert gpu.is_believable(told, 3.9e9)
    assert not gpu.is_believable(told, 55e9)
    assert gpu.is_believable(None, 55e9)
    assert gpu.is_believable(told, None)
    result = gpu.check_pcie(told, told, 55e9)
    assert result.verdict == "not here"
    assert "gen 1 x16 under load, but copies reach 55.0 GB/s" in result.found
    assert gpu.check_pcie(told, PcieLink(5, 16, 5, 16, 5), 55e9).verdict == "ok"
