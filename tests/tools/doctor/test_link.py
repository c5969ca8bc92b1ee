"""Copies between host memory and device: the measurement on the simulated device, the verdicts on made-up rates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pager.device.base import Device, make_device
from pager.errors import TierError
from pager.tools.doctor import link
from pager.tools.doctor.link import LinkRates, measure_link

FAST = LinkRates(
    num_bytes=2**27,
    pageable_in=8e9,
    pageable_out=8e9,
    registered_in=55e9,
    registered_out=55e9,
    both_ways=50e9,
    refused="",
    is_known=True,
    issue_share=0.02,
)


def make_rates(**changes: Any) -> LinkRates:
    return FAST._replace(**changes)


@pytest.fixture
def device() -> Iterator[Device]:
    device = make_device("cpu", streams="early", check_races=False)
    yield device
    device.close()


def test_every_rate_is_measured_and_the_link_is_busy_meanwhile(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []
    monkeypatch.setattr(device, "register_host", lambda address, size: registered.append(address))
    monkeypatch.setattr(device, "unregister_host", registered.remove)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in registered)
    rates, seen = measure_link(
        device,
        lambda: [thread.name for thread in threading.enumerate()],
        num_bytes=2**16,
        load_seconds=0.0,
    )
    assert min(rates.pageable_in, rates.pageable_out, rates.registered_in, rates.registered_out) > 0
    assert rates.both_ways > 0
    assert (rates.num_bytes, rates.refused, rates.is_known) == (2**17, "", True)
    assert 0 < rates.issue_share <= 1
    assert seen
    assert all("pager-doctor-load" in names for names in seen)
    assert registered == [], "given back"


def test_a_refusal_is_kept_and_what_was_registered_is_given_back(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []

    def refuse_the_second(address: int, num_bytes: int) -> None:
        if registered:
            raise TierError("no more")
        registered.append(address)

    monkeypatch.setattr(device, "register_host", refuse_the_second)
    monkeypatch.setattr(device, "unregister_host", registered.remove)
    rates, _ = measure_link(device, lambda: None, num_bytes=2**16, load_seconds=0.0)
    assert (rates.refused, rates.is_known, rates.registered_in, rates.both_ways) == ("no more", False, 0, 0)
    assert rates.pageable_in > 0
    assert registered == []


def test_a_copy_that_fails_under_load_is_raised(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = device.h2d.copy

    def fail_in_the_thread(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TierError("the link is down")
        copy(*arguments, **options)

    monkeypatch.setattr(device.h2d, "copy", fail_in_the_thread)
    with pytest.raises(TierError, match="the link is down"):
        measure_link(device, lambda: None, num_bytes=2**16, load_seconds=0.0)


@pytest.mark.parametrize(
    ("rates", "verdict", "found"),
    [
        (None, "not here", "no GPU"),
        (FAST, "ok", "copies 6.9 times as fast, the host held up for 2%"),
        (make_rates(pageable_in=50e9), "ok", "copies 1.1 times as fast"),
        (make_rates(refused="CUDA error 2"), "broken", "refused: CUDA error 2"),
        (make_rates(is_known=False), "broken", "did nothing: the driver does not know the memory"),
        (
            make_rates(registered_in=8e9, issue_share=0.99),
            "broken",
            "was accepted and did nothing: copies 1.0",
        ),
        (make_rates(issue_share=0.99), "slow", "the host held up for 99%"),
    ],
)
def test_a_lock_that_does_nothing_is_found(rates: LinkRates | None, verdict: str, found: str) -> None:
    result = link.check_gpu_lock(rates)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict in ("slow", "broken"))


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [(None, "not here"), (FAST, "ok"), (make_rates(pageable_out=0.9e9), "slow")],
)
def test_pageable_copies(rates: LinkRates | None, verdict: str) -> None:
    assert link.check_pageable(rates).verdict == verdict


@pytest.mark.parametrize(
    ("rates", "carries", "verdict", "found"),
    [
        (None, None, "not here", "no GPU"),
        (make_rates(refused="no"), 63e9, "not here", "nothing could be registered"),
        (FAST, 63e9, "ok", "87% of what the link carries (63.0 GB/s)"),
        (make_rates(registered_out=47e9), 63e9, "slow", "55.0 GB/s in, 47.0 GB/s out, 75%"),
        (make_rates(registered_in=15e9), 63e9, "broken", "24%"),
        (make_rates(registered_in=12e9), None, "ok", "12.0 GB/s in"),
        (make_rates(registered_in=9e9), None, "slow", "9.0 GB/s in"),
    ],
)
def test_registered_copies_against_the_link(
    rates: LinkRates | None, carries: float | None, verdict: str, found: str
) -> None:
    result = link.check_registered(rates, carries)
    assert result.verdict == verdict
    assert found in result.found
    assert bool(result.advice) == (verdict in ("slow", "broken"))


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        (None, "not here"),
        (make_rates(refused="no"), "not here"),
        (FAST, "ok"),
        (make_rates(both_ways=27e9), "slow"),
        (make_rates(registered_out=30e9, both_ways=27e9), "ok"),
    ],
)
def test_both_directions_at_once(rates: LinkRates | None, verdict: str) -> None:
    result = link.check_both_ways(rates)
    assert result.verdict == verdict
    assert bool(result.advice) == (verdict == "slow")
