"""Late and early streams, what a pending copy holds, and how a device is made."""

from __future__ import annotations

import threading

import pytest
import torch

from pager.device import base
from pager.device.base import Device, Region, make_device
from pager.device.simulated import SimulatedDevice
from pager.errors import ConfigError, PagerClosed, RaceError


def make_pair(device: SimulatedDevice, num_bytes: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    """Two slabs: zeros and ones."""
    one, other = device.allocate_slab(num_bytes), device.allocate_slab(num_bytes)
    one.fill_(0)
    other.fill_(1)
    return one, other


def copy(stream: base.Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
    """A copy that the checker does not look at: these tests are about when it happens."""
    stream.copy(dst, src, reads=None, writes=None)


# ---- when things happen


def test_late_runs_nothing_by_itself_and_early_runs_at_once() -> None:
    for streams, expected in (("late", 0), ("early", 1)):
        device = SimulatedDevice(streams)  # type: ignore[arg-type]
        dst, src = make_pair(device)
        copy(device.h2d, dst, src)
        event = device.h2d.record()
        assert (int(dst[0]), event.query()) == (expected, bool(expected))
        assert device.h2d.num_pending == 1 - expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("force", ["compute waits", "event", "stream", "close"])
def test_what_forces_a_late_stream(force: str) -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device)
    copy(device.h2d, dst, src)
    event = device.h2d.record()
    if force == "compute waits":
        device.current_stream().wait(event)
    elif force == "event":
        event.synchronize()
    elif force == "stream":
        device.h2d.synchronize()
    else:
        device.close()
    assert event.query()
    assert dst.tolist() == [1] * 1024


def test_another_copy_streams_wait_forces_nothing() -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device)
    copy(device.h2d, dst, src)
    event = device.h2d.record()
    device.d2h.wait(event)
    copy(device.d2h, src, dst)
    assert not event.query()
    assert not device.d2h.record().query()


def test_only_what_stands_before_the_event_is_forced() -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device)
    device.h2d.fill(dst[:10], 7, writes=None)
    event = device.h2d.record()
    copy(device.h2d, dst, src)
    event.synchronize()
    assert dst.tolist() == [7] * 10 + [0] * 1014


def test_forcing_follows_waits_across_streams() -> None:
    device = SimulatedDevice("late")
    a, b = make_pair(device)
    device.h2d.fill(a, 3, writes=None)
    device.d2h.wait(device.h2d.record())
    copy(device.d2h, b, a)
    device.h2d.wait(device.d2h.record())
    device.h2d.fill(a, 9, writes=None)
    done = device.h2d.record()
    device.d2h.fill(b[:1], 100, writes=None)  # after what is needed: stays pending
    device.compute.wait(done)
    assert a.tolist() == [9] * 1024
    assert b.tolist() == [3] * 1024
    assert device.d2h.num_pending == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(("left_out", "expected"), [(None, 3), ("d2h", 0)])
def test_a_missing_wait_between_copy_streams_changes_the_bytes(left_out: str | None, expected: int) -> None:
    def skip_wait(stream: base.Stream | None, event: base.Event) -> bool:
        return stream is not None and stream.name == left_out

    device = SimulatedDevice("late", skip_wait=skip_wait)
    a, b = make_pair(device)
    device.h2d.fill(a, 3, writes=None)
    device.d2h.wait(device.h2d.record())
    copy(device.d2h, b, a)
    device.d2h.synchronize()
    assert int(b[0]) == expected


def test_a_chain_of_many_waits_is_no_recursion() -> None:
    device = SimulatedDevice("late", check_races=False)
    a, _ = make_pair(device)
    for number in range(5000):
        stream, other = (device.h2d, device.d2h) if number % 2 else (device.d2h, device.h2d)
        stream.fill(a[:1], number % 251, writes=None)
        other.wait(stream.record())
    device.h2d.synchronize()
    assert int(a[0]) == 4999 % 251


def test_early_and_late_give_the_same_bytes_where_the_waits_are_there() -> None:
    results = []
    for streams in ("late", "early"):
        device = SimulatedDevice(streams)
        a, b = make_pair(device)
        for number in range(5):
            device.h2d.fill(a[number : number + 500], number, writes=Region("device", 0, 1))
            device.d2h.wait(device.h2d.record())
            device.d2h.copy(b, a, reads=Region("device", 0, 1), writes=Region("host", 0, 1))
            device.h2d.wait(device.d2h.record())
        device.close()
        results.append(b.tolist())
    assert results[0] == results[1]


def test_the_compute_streams_copies_happen_at_once() -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device)
    copy(device.compute, dst, src)
    assert dst.tolist() == [1] * 1024
    assert device.compute.record().query()


def test_lazy_compute_answers_no_until_somebody_waited() -> None:
    device = SimulatedDevice("late", lazy_compute=True)
    first, second = device.compute.record(), device.compute.record()
    assert not first.query()
    first.synchronize()
    assert first.query()
    device.h2d.wait(second)
    assert not second.query()
    device.h2d.synchronize()
    assert second.query()


def test_event_numbers_rise_per_stream() -> None:
    device = SimulatedDevice("late")
    events = [stream.record() for stream in (device.h2d, device.h2d, device.d2h, device.h2d, device.d2h)]
    assert [event.number for event in events] == [1, 2, 1, 3, 2]
    assert [event.stream.name for event in events] == ["h2d", "h2d", "d2h", "h2d", "d2h"]
    assert sorted({device.compute.index, device.h2d.index, device.d2h.index}) == [0, 1, 2]


def test_a_timed_wait_counts_as_stall_once() -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device, 1 << 20)
    copy(device.h2d, dst, src)
    device.compute.wait(device.h2d.record())
    assert device.drain_stall_seconds() == 0
    copy(device.h2d, dst, src)
    device.compute.wait(device.h2d.record(), timed=True)
    assert device.drain_stall_seconds() > 0
    assert device.drain_stall_seconds() == 0


def test_two_threads_may_enqueue_and_force() -> None:
    device = SimulatedDevice("late")
    slab = device.allocate_slab(2 * 512)
    slab.fill_(0)
    errors: list[BaseException] = []

    def work(stream: base.Stream, part: int) -> None:
        try:
            view = slab[part * 512 : (part + 1) * 512]
            for number in range(200):
                stream.fill(view, number, writes=Region("device", part, part + 1))
                if number % 7 == 0:
                    device.compute.wait(stream.record())
            stream.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in ((device.h2d, 0), (device.d2h, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert slab.tolist() == [199] * 1024


def test_after_close_streams_take_no_work() -> None:
    device = SimulatedDevice("late")
    dst, src = make_pair(device)
    device.close()
    device.close()
    with pytest.raises(PagerClosed, match="h2d"):
        copy(device.h2d, dst, src)


@pytest.mark.parametrize(
    ("dst", "src"),
    [
        (torch.zeros(4, dtype=torch.uint8), torch.zeros(5, dtype=torch.uint8)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        (torch.zeros(8, dtype=torch.uint8)[::2], torch.zeros(4, dtype=torch.uint8)),
    ],
)
def test_only_bytes_are_copied(dst: torch.Tensor, src: torch.Tensor) -> None:
    device = SimulatedDevice("late")
    with pytest.raises(ValueError, match="bytes|uint8"):
        copy(device.h2d, dst, src)
    assert device.h2d.num_pending == 0  # type: ignore[attr-defined]


def test_events_of_another_device_are_refused() -> None:
    one, other = SimulatedDevice("late", check_races=False), SimulatedDevice("late", check_races=False)
    with pytest.raises(ValueError, match="another device"):
        one.h2d.wait(other.h2d.record())


# ---- what a pending copy holds (case 11)


def test_a_source_freed_while_its_copy_is_pending_is_found() -> None:
    device = SimulatedDevice("late")
    dst, _ = make_pair(device)
    gradient = torch.ones(1024, dtype=torch.uint8)
    copy(device.d2h, dst, gradient)
    del gradient
    with pytest.raises(RaceError, match="source freed while its copy was pending: copy of 1024 bytes on d2h"):
        device.d2h.synchronize()
    assert dst.tolist() == [0] * 1024


@pytest.mark.parametrize("operation", ["copy", "fill"])
def test_a_destination_freed_while_pending_is_found(operation: str) -> None:
    device = SimulatedDevice("late")
    _, src = make_pair(device)
    gradient = torch.zeros(1024, dtype=torch.uint8)
    if operation == "copy":
        copy(device.h2d, gradient, src)
    else:
        device.h2d.fill(gradient, 1, writes=None)
    del gradient
    with pytest.raises(RaceError, match="destination freed"):
        device.h2d.synchronize()
    assert device.h2d.num_pending == 0  # type: ignore[attr-defined]


def test_a_view_made_for_the_copy_may_die_while_its_storage_lives() -> None:
    device = SimulatedDevice("late")
    dst, _ = make_pair(device, 400)
    gradient = torch.full((100,), 2.0)
    copy(device.d2h, dst, gradient.view(torch.uint8))
    gradient.add_(1.0)  # CUDA would read what stands there when the copy runs
    device.d2h.synchronize()
    assert dst.view(torch.float32).tolist() == [3.0] * 100


def test_a_copy_of_part_of_an_allocators_tensor_reads_that_part() -> None:
    device = SimulatedDevice("late")
    dst, _ = make_pair(device, 10)
    source = torch.arange(100, dtype=torch.uint8)
    copy(device.d2h, dst, source[40:50])
    device.d2h.synchronize()
    assert dst.tolist() == list(range(40, 50))


def test_a_pending_copy_does_not_keep_a_wrap_alive() -> None:
    device = SimulatedDevice("late")
    slab, dst = make_pair(device)
    released: list[int] = []
    wrap = device.wrap(slab, 512, 512, lambda: released.append(1))
    wrap.fill_(6)
    copy(device.d2h, dst[:512], wrap)
    del wrap
    assert released == [1]
    device.d2h.synchronize()
    assert dst[:512].tolist() == [6] * 512


def test_registered_host_memory_is_held() -> None:
    device = SimulatedDevice("late")
    dst, _ = make_pair(device)
    host = torch.full((1024,), 5, dtype=torch.uint8)
    device.register_host(host.data_ptr(), 1024)
    address = host.data_ptr()
    copy(device.h2d, dst, host)
    del host
    device.h2d.synchronize()
    device.unregister_host(address)
    assert dst.tolist() == [5] * 1024


# ---- making one


@pytest.mark.parametrize("streams", ["late", "early"])
def test_make_device_gives_the_simulated_one(streams: str) -> None:
    device: Device = make_device("cpu", streams=streams)  # type: ignore[arg-type]
    assert device.is_simulated
    assert isinstance(device, SimulatedDevice)
    assert device.is_early == (streams == "early")
    assert device.torch_device == torch.device("cpu")
    assert device.checker is not None
    assert make_device("cpu", check_races=False).checker is None
    assert device.process_bytes() == 0 == device.num_out_of_memory() == device.allocator_peak_bytes()
    assert 0 < device.free_bytes() <= device.total_bytes()
    assert device.measure_bandwidth(1 << 20) > 0
    assert device.measure_bandwidth(1 << 20, direction="both") > 0
    device.limit_allocator(1)
    assert device.allocator_bytes() == 0


@pytest.mark.parametrize("spec", ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", None])
def test_an_unknown_device_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r'expected "auto", "cuda", "cuda:<number>" or "cpu"'):
        make_device(spec)


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pager.device.cuda.num_devices", lambda: 0)
    assert make_device("auto").is_simulated
    with pytest.raises(ConfigError, match=r'torch .* sees no CUDA device; device="cpu" simulates one'):
        make_device("cuda")
    monkeypatch.setattr("pager.device.cuda.num_devices", lambda: 2)
    with pytest.raises(ConfigError, match="sees only cuda:0, cuda:1"):
        make_device("cuda:2")


def test_streams_are_late_or_early() -> None:
    with pytest.raises(ConfigError, match="late"):
        SimulatedDevice("lazy")  # type: ignore[arg-type]
