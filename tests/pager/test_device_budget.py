"""What the arena may take of the device: the arithmetic, on a stand-in for a GPU and on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest

from pager.config import Checks, Config
from pager.device.simulated import SimulatedDevice
from pager.device_budget import DeviceBudget
from pager.errors import BudgetError

GIB = 2**30
MIB = 2**20
LAZY = 384 * MIB
LATER = 128 * MIB


class Gpu:
    """The questions a budget asks of a device; 80 GiB, of which a context of 1 GiB is taken."""

    is_simulated = False

    def __init__(self) -> None:
        self.cap: int | None = -1
        self.peak_bytes = 0
        self.ooms = 0
        self.loaded_bytes = 0
        self.num_resets = 0

    def total_bytes(self) -> int:
        """Bytes of the device."""
        return 80 * GIB

    def free_bytes(self) -> int:
        """Bytes nobody holds."""
        return 70 * GIB

    def process_bytes(self) -> int:
        """Context and allocator."""
        return 3 * GIB + self.loaded_bytes

    def allocator_bytes(self) -> int:
        """What torch reserved so far."""
        return 2 * GIB

    def num_out_of_memory(self) -> int:
        """Out-of-memory errors so far."""
        return self.ooms

    def limit_allocator(self, num_bytes: int | None) -> None:
        """The cap."""
        self.cap = num_bytes

    def allocator_peak_bytes(self) -> int:
        """Most bytes since the last reset."""
        return self.peak_bytes

    def reset_allocator_peak(self) -> None:
        """Start again."""
        self.num_resets += 1


def make_budget(device: Any, small_bytes: int = 0, **knobs: Any) -> DeviceBudget:
    """The budget of a model with ``small_bytes`` of small tensors."""
    return DeviceBudget(device, Config(**knobs), small_bytes=small_bytes)


@pytest.mark.parametrize(
    ("knob", "expected"),
    [("24GiB", 24 * GIB), (0.5, 40 * GIB), (5 * GIB, 5 * GIB), (None, 63 * GIB + 3 * GIB)],
)
def test_the_limit(knob: Any, expected: int) -> None:
    assert make_budget(Gpu(), device_budget=knob).limit_bytes == expected


def test_the_context_is_not_the_allocators_and_the_allocator_is_capped() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB")
    assert budget.allocator_bytes == 24 * GIB - GIB - LAZY
    assert gpu.cap == budget.allocator_bytes
    budget.close()
    assert gpu.cap is None


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        (None, (24 * GIB - GIB - LAZY - MIB - GIB) // 2),
        (4 * GIB, 24 * GIB - GIB - LAZY - MIB - GIB - 4 * GIB),
        (99 * GIB, 0),
    ],
)
def test_activations_come_first(activations: int | None, expected: int) -> None:
    budget = make_budget(Gpu(), small_bytes=MIB, device_budget="24GiB", device_headroom="1GiB")
    assert budget.arena_bytes(activations) == expected


def test_the_headroom_is_a_thirty_second_unless_somebody_says() -> None:
    assert make_budget(Gpu(), device_budget="32GiB").headroom_bytes == GIB
    assert make_budget(Gpu(), device_budget="32GiB", device_headroom="1GiB").headroom_bytes == GIB
    assert make_budget(SimulatedDevice(), device_budget="32GiB").headroom_bytes == 0


def test_a_budget_that_leaves_nothing_for_pages_is_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"device_budget is 1.00 GiB, of which the CUDA context takes 1.38 GiB"
    ):
        make_budget(Gpu(), device_budget="1GiB")
    with pytest.raises(BudgetError, match=r"tensors under a page 2.00 MiB; nothing is left"):
        make_budget(SimulatedDevice(), small_bytes=2 * MIB, device_budget="2MiB")


def test_what_the_last_step_left_over() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB", device_headroom="1GiB")
    gpu.peak_bytes = 10 * GIB
    gpu.loaded_bytes = LAZY - LATER
    assert budget.spare_bytes(9 * GIB) == 24 * GIB - GIB - LAZY - GIB - 10 * GIB
    assert gpu.num_resets == 2  # when it was made, and now


def test_the_headroom_grows_with_activations_unless_somebody_says() -> None:
    """The allocator leaves pieces of what they took."""
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="32GiB")
    left = 32 * GIB - GIB - LAZY
    assert budget.arena_bytes(GIB) == left - GIB - GIB
    assert budget.arena_bytes(6 * GIB) == left - 2 * GIB - 6 * GIB
    gpu.peak_bytes = 20 * GIB
    gpu.loaded_bytes = LAZY
    assert budget.spare_bytes(17 * GIB) == left - GIB - 20 * GIB
    assert budget.spare_bytes(2 * GIB) == left - 3 * GIB - 20 * GIB  # it was measured with its pieces
    assert (
        make_budget(Gpu(), device_budget="32GiB", device_headroom="1GiB").arena_bytes(6 * GIB)
        == left - 7 * GIB
    )


def test_what_the_first_steps_show_need_not_be_kept_free() -> None:
    """Of an arena of 2 GiB, with 18 GiB beside it in each step: a twelfth of these for fragments in the end."""
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="48GiB")
    left = 48 * GIB - GIB
    gpu.peak_bytes = 20 * GIB
    gpu.loaded_bytes = 100 * MIB
    assert gpu.cap == left - LAZY
    spare = [budget.spare_bytes(2 * GIB) for _ in range(4)]
    left -= gpu.loaded_bytes + LATER
    assert gpu.cap == left
    assert [left - 20 * GIB - each for each in spare] == [3 * GIB, 3 * GIB, 1.5 * GIB, 1.5 * GIB]


def test_a_settled_headroom_is_a_forty_eighth() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="48GiB")
    gpu.loaded_bytes = LAZY
    gpu.peak_bytes = 20 * GIB
    left = 48 * GIB - GIB - LAZY - 20 * GIB
    assert [left - budget.spare_bytes(20 * GIB) for _ in range(3)] == [1.5 * GIB, 1.5 * GIB, GIB]


def test_the_hungriest_step_counts_but_for_the_first_which_warms_up() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB", device_headroom="1GiB")
    gpu.loaded_bytes = LAZY
    left = 24 * GIB - GIB - LAZY - GIB - 9 * GIB
    beside = []
    for peak in (14, 11, 12, 10):
        gpu.peak_bytes = peak * GIB
        beside.append(left - budget.spare_bytes(9 * GIB))
    assert beside == [5 * GIB, 2 * GIB, 3 * GIB, 3 * GIB]
    # A slab more since then: only what stands beside it is the same.
    gpu.peak_bytes = 13 * GIB
    assert left - budget.spare_bytes(10 * GIB) == GIB + 3 * GIB


def test_a_context_that_has_grown_by_more_than_expected_lifts_no_cap() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB")
    gpu.loaded_bytes = 2 * LAZY
    budget.spare_bytes(0)
    assert gpu.cap == 24 * GIB - GIB - LAZY


def test_an_arena_that_has_settled_leaves_less_free() -> None:
    budget = make_budget(Gpu(), device_budget="48GiB")
    left = 48 * GIB - GIB - LAZY
    assert budget.arena_bytes(GIB, settled=True) == left - GIB - GIB
    assert budget.arena_bytes(24 * GIB, settled=True) == left - 2 * GIB - 24 * GIB


def test_a_headroom_that_leaves_nothing_is_named() -> None:
    message = r"device_headroom 6.00 MiB, tensors under a page 0 B; nothing .* or lower device_headroom"
    with pytest.raises(BudgetError, match=message):
        make_budget(SimulatedDevice(), device_budget="4MiB", device_headroom="6MiB")


def test_the_peak_of_the_process_is_the_allocators_and_what_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB")
    gpu.peak_bytes = 10 * GIB
    assert budget.spare_bytes(0) > 0  # a step boundary, which starts a new measurement
    gpu.peak_bytes = 7 * GIB
    assert budget.peak_process_bytes() == 11 * GIB
    monkeypatch.setattr(Gpu, "process_bytes", lambda gpu: 5 * GIB)
    assert budget.peak_process_bytes() == 11 * GIB  # the driver was asked a moment ago
    monkeypatch.setattr("pager.device_budget._SECONDS_BETWEEN_MEASUREMENTS", 0.0)
    assert budget.peak_process_bytes() == 13 * GIB
    assert make_budget(SimulatedDevice(), device_budget="24MiB").peak_process_bytes() == 0


def test_after_an_out_of_memory_error_once_less() -> None:
    gpu = Gpu()
    budget = make_budget(gpu, device_budget="24GiB")
    gpu.ooms = 2
    assert budget.spare_bytes(0) == -1
    assert budget.spare_bytes(0) > 0


def test_on_the_simulated_device_the_budget_is_the_arena_and_small_tensors() -> None:
    budget = make_budget(SimulatedDevice(), small_bytes=MIB, device_budget="24MiB")
    assert budget.arena_bytes(None) == budget.arena_bytes(5 * GIB) == 23 * MIB
    assert budget.spare_bytes(0) == 0


def test_without_a_budget_a_simulated_device_takes_a_quarter_of_what_is_free() -> None:
    device = SimulatedDevice()
    limit = make_budget(device).limit_bytes
    assert 0 < limit <= device.total_bytes() // 4


def test_a_fixed_arena_for_tests_is_what_it_says() -> None:
    budget = make_budget(Gpu(), device_budget="24GiB", checks=Checks(arena_bytes=5 * MIB))
    assert budget.arena_bytes(None) == budget.arena_bytes(20 * GIB) == 5 * MIB
    assert budget.spare_bytes(0) == 0
