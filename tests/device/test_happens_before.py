"""The checker: each missing wait is found, nothing else is, and an oracle that walks the graph agrees."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pager.device.base import Event, Region
from pager.device.simulated import SimulatedDevice
from pager.errors import PagerInternalError, RaceError

FRAMES = Region("device", 4, 8)


def make_device() -> SimulatedDevice:
    return SimulatedDevice("late")


def num_checked(device: SimulatedDevice) -> int:
    assert device.checker is not None
    return device.checker.num_checked


@pytest.mark.parametrize("first_writes", [True, False])
@pytest.mark.parametrize("second_writes", [True, False])
@pytest.mark.parametrize("second", [Region("device", 7, 20), Region("device", 8, 9), Region("host", 4, 8)])
def test_two_streams_race_exactly_if_they_overlap_and_one_writes(
    first_writes: bool, second_writes: bool, second: Region
) -> None:
    device = make_device()
    device.h2d.touch(FRAMES, write=first_writes)
    races = (first_writes or second_writes) and second == Region("device", 7, 20)
    if races:
        with pytest.raises(RaceError, match=r"frames 7 \(1 in all\).*on d2h.*on h2d"):
            device.d2h.touch(second, write=second_writes)
    else:
        device.d2h.touch(second, write=second_writes)
        assert num_checked(device) == 2


def test_both_sides_of_a_copy_are_accesses() -> None:
    device = make_device()
    slab = device.allocate_slab(1024)
    frame, home = Region("device", 0, 1), Region("host", 0, 1)
    device.h2d.copy(slab[:512], slab[512:], reads=home, writes=frame)
    with pytest.raises(
        RaceError, match="device frames 0 .* copy on d2h reads .* after the copy on h2d that wrote"
    ):
        device.d2h.copy(slab[:512], slab[512:], reads=frame, writes=None)
    with pytest.raises(
        RaceError, match="host frames 0 .* copy on d2h writes .* after the copy on h2d that read"
    ):
        device.d2h.copy(slab[:512], slab[512:], reads=None, writes=home)
    device.d2h.copy(slab[:512], slab[512:], reads=home, writes=None)
    assert num_checked(device) == 2


@pytest.mark.parametrize("write", [True, False])
def test_a_wait_orders(write: bool) -> None:
    device = make_device()
    device.h2d.touch(FRAMES, write=True)
    event = device.h2d.record()
    device.d2h.wait(event)
    device.d2h.touch(FRAMES, write=write)
    assert num_checked(device) == 2


def test_an_event_does_not_cover_what_comes_after_it() -> None:
    device = make_device()
    event = device.h2d.record()
    device.h2d.touch(FRAMES, write=True)
    device.d2h.wait(event)
    with pytest.raises(RaceError):
        device.d2h.touch(FRAMES, write=False)
    device.d2h.wait(device.h2d.record())
    device.d2h.touch(FRAMES, write=False)


def test_order_passes_through_a_third_stream() -> None:
    device = make_device()
    device.h2d.touch(FRAMES, write=True)
    device.compute.wait(device.h2d.record())
    device.d2h.wait(device.compute.record())
    device.d2h.touch(FRAMES, write=True)
    assert num_checked(device) == 2


def test_a_write_waits_for_every_reader() -> None:
    device = make_device()
    for stream in (device.h2d, device.d2h, device.compute):
        stream.touch(FRAMES, write=False)
    device.compute.wait(device.h2d.record())
    with pytest.raises(RaceError, match="on d2h that read"):
        device.compute.touch(FRAMES, write=True)
    device.compute.wait(device.d2h.record())
    device.compute.touch(FRAMES, write=True)


@pytest.mark.parametrize("how", ["synchronize", "query", "stream", "nothing"])
def test_the_host_orders_what_it_knows(how: str) -> None:
    device = make_device()
    device.h2d.touch(FRAMES, write=True)
    event = device.h2d.record()
    if how == "synchronize":
        event.synchronize()
    elif how == "query":
        assert event.query()  # nothing but a touch is on the stream
    elif how == "stream":
        device.h2d.synchronize()
    if how == "nothing":
        with pytest.raises(RaceError, match="host access on host"):
            device.host_touch(FRAMES, write=True)
        with pytest.raises(RaceError):
            device.d2h.touch(FRAMES, write=True)
    else:
        device.host_touch(FRAMES, write=True)
        device.d2h.touch(FRAMES, write=True)


def test_what_the_host_did_is_over_when_it_enqueues_but_not_what_it_does_later() -> None:
    device = make_device()
    device.host_touch(FRAMES, write=True)
    device.h2d.touch(FRAMES, write=False)
    with pytest.raises(RaceError, match="on h2d that read"):
        device.host_touch(FRAMES, write=True)
    event = device.d2h.record()
    device.host_touch(Region("host", 0, 1), write=True)
    device.compute.wait(event)
    device.compute.touch(Region("host", 0, 1), write=False)
    assert num_checked(device) == 4


def test_a_query_that_answers_no_orders_nothing() -> None:
    device = make_device()
    slab = device.allocate_slab(512)
    device.h2d.fill(slab, 1, writes=FRAMES)
    event = device.h2d.record()
    assert not event.query()
    with pytest.raises(RaceError):
        device.d2h.touch(FRAMES, write=True)


def test_an_error_is_not_noted_as_an_access() -> None:
    device = make_device()
    device.h2d.touch(FRAMES, write=True)
    with pytest.raises(RaceError):
        device.d2h.touch(FRAMES, write=True)
    device.h2d.touch(FRAMES, write=True)  # would race with d2h's write, had it been noted
    assert num_checked(device) == 2


def test_the_message_names_frames_operations_and_streams() -> None:
    device = make_device()
    slab = device.allocate_slab(512)
    for begin in (1, 3, 4, 9):
        device.h2d.fill(slab, 0, writes=Region("device", begin, begin + 1))
    with pytest.raises(
        RaceError, match=r"^device frames 1, 3-4, 9 \(4 in all\): kernel on compute reads"
    ) as info:
        device.compute.touch(Region("device", 0, 12), write=False)
    assert "after the fill on h2d that wrote them" in str(info.value)


def test_resize_forgets_frames_that_went_away() -> None:
    device = make_device()
    assert device.checker is not None
    device.checker.resize("device", 8)
    device.h2d.touch(FRAMES, write=True)
    device.h2d.touch(Region("device", 0, 2), write=False)
    device.checker.resize("device", 4)
    device.checker.resize("device", 8)
    device.d2h.touch(FRAMES, write=True)
    with pytest.raises(RaceError):
        device.d2h.touch(Region("device", 1, 2), write=True)


def test_frames_that_are_no_range_are_a_bug() -> None:
    device = make_device()
    with pytest.raises(PagerInternalError, match="not a range"):
        device.h2d.touch(Region("device", 3, 1), write=True)
    with pytest.raises(PagerInternalError, match="not a range"):
        device.h2d.touch(Region("device", -1, 1), write=True)


def test_without_checker_nothing_is_checked() -> None:
    device = SimulatedDevice("late", check_races=False)
    device.h2d.touch(FRAMES, write=True)
    device.d2h.touch(FRAMES, write=True)
    device.host_touch(FRAMES, write=True)
    assert device.checker is None


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_each_wait_of_a_page_in_and_out_is_needed(left_out: int) -> None:
    """in on h2d, used by compute, out on d2h, and the frames used again: three waits."""
    count = iter(range(100))
    device = SimulatedDevice("late", skip_wait=lambda stream, event: next(count) == left_out)
    with pytest.raises(RaceError):
        run_a_page(device)


def test_with_every_wait_a_page_goes_in_and_out() -> None:
    device = make_device()
    assert run_a_page(device).tolist() == [2] * 512


def run_a_page(device: SimulatedDevice):  # type: ignore[no-untyped-def]
    """One page in, doubled, out, and its frame filled anew."""
    slab = device.allocate_slab(512)
    host = device.allocate_slab(512)
    host.fill_(1)
    frame, home = Region("device", 0, 1), Region("host", 0, 1)
    device.h2d.copy(slab, host, reads=home, writes=frame)
    device.compute.wait(device.h2d.record())
    device.compute.touch(frame, write=True)
    slab.mul_(2)
    device.d2h.wait(device.compute.record())
    device.d2h.copy(host, slab, reads=frame, writes=home)
    gone = device.d2h.record()
    device.h2d.wait(gone)
    device.h2d.fill(slab, 255, writes=frame)
    device.close()
    return host


# Random programs against an oracle: the graph of operations is built, and two accesses are ordered exactly if
# one is reachable from the other.

NUM_STREAMS = 3
HOST = NUM_STREAMS


@dataclass
class Graph:
    """Operations in program order; ``before[i]`` are all that happen before i. O(n^2), no clocks."""

    before: list[set[int]] = field(default_factory=list)
    accesses: list[tuple[int, int, int, bool]] = field(default_factory=list)  # node, begin, end, write
    last: dict[int, int] = field(default_factory=dict)  # actor -> its newest node

    def add(self, actor: int, *others: int) -> int:
        direct = {*others, *([self.last[actor]] if actor in self.last else [])}
        if actor != HOST and HOST in self.last:
            direct.add(self.last[HOST])
        node = len(self.before)
        self.before.append(direct.union(*(self.before[other] for other in direct)) if direct else set())
        self.last[actor] = node
        return node

    def is_race(self, node: int, begin: int, end: int, write: bool) -> bool:
        return any(
            other not in self.before[node] and (write or other_write) and b < end and begin < e
            for other, b, e, other_write in self.accesses
        )


spans = st.tuples(st.integers(0, 5), st.integers(1, 3)).map(lambda span: (span[0], span[0] + span[1]))
operations = st.one_of(
    st.tuples(st.just("access"), st.integers(0, NUM_STREAMS), spans, st.booleans()),
    st.tuples(st.just("record"), st.integers(0, NUM_STREAMS - 1)),
    st.tuples(st.just("wait"), st.integers(0, NUM_STREAMS), st.integers(0, 20)),
)


@given(st.lists(operations, max_size=40))
@settings(max_examples=400)
def test_random_programs_agree_with_reachability(program: list[tuple]) -> None:
    device = make_device()
    streams = [device.compute, device.h2d, device.d2h]
    graph = Graph()
    events: list[tuple[Event, int]] = []
    for operation in program:
        if operation[0] == "record":
            actor = operation[1]
            events.append((streams[actor].record(), graph.add(actor)))
        elif operation[0] == "wait" and events:
            actor, (event, node) = operation[1], events[operation[2] % len(events)]
            graph.add(actor, node)
            if actor == HOST:
                event.synchronize()
            else:
                streams[actor].wait(event)
        elif operation[0] == "access":
            _, actor, (begin, end), write = operation
            node = graph.add(actor)
            region = Region("device", begin, end)
            expected = graph.is_race(node, begin, end, write)
            try:
                if actor == HOST:
                    device.host_touch(region, write=write)
                else:
                    streams[actor].touch(region, write=write)
                found = False
            except RaceError:
                found = True
            assert found == expected, (operation, graph)
            if not found:
                graph.accesses.append((node, begin, end, write))
