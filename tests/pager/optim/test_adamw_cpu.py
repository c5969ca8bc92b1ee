"""The one-pass update on the CPU against torch's own, in ulp."""

from __future__ import annotations

import logging
import re
import sys
from functools import partial
from typing import Any

import numba
import numpy as np
import pytest
import torch

from pager.errors import ConfigError
from pager.optim.adamw_cpu import AdamValues, CpuAdam, _compile
from pager.optim.cpu_pool import UpdatePool, cut_into_slices
from pager.optim.master import join, split

NUM_ELEMENTS = 20_011  # no multiple of any vector's length


def make_values(**changes: Any) -> AdamValues:
    values: dict[str, Any] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 7,
    }
    return AdamValues(**(values | changes))


def make_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, both moments and gradient, fp32, of magnitudes from 2**-20 to 2**8."""
    generator = torch.Generator().manual_seed(seed)

    def spread() -> torch.Tensor:
        exponent = torch.randint(-20, 8, (NUM_ELEMENTS,), generator=generator).float()
        return torch.randn(NUM_ELEMENTS, generator=generator) * torch.exp2(exponent)

    return spread(), spread(), spread() ** 2, spread()


def step_of_torch(
    values: AdamValues,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    param = weight.clone().requires_grad_()
    param.grad = gradient.clone()
    kind = torch.optim.AdamW if values.decoupled else torch.optim.Adam
    optimizer = kind(
        [param],
        lr=values.lr,
        betas=(values.beta1, values.beta2),
        eps=values.eps,
        weight_decay=values.weight_decay,
        maximize=values.maximize,
        fused=fused,
        foreach=False,
    )
    optimizer.state[param] = {
        "step": torch.tensor(float(values.step - 1)),
        "exp_avg": exp_avg.clone(),
        "exp_avg_sq": exp_avg_sq.clone(),
    }
    optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


def ulp(tensor: torch.Tensor) -> torch.Tensor:
    tiny = np.float32(np.finfo(np.float32).tiny)
    return torch.from_numpy(np.spacing(np.maximum(tensor.abs().numpy(), tiny)))


def largest(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor.abs() for tensor in tensors]).amax(0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"step": 1},
        {"step": 100_000, "lr": 3e-2},
        {"weight_decay": 0.0},
        {"maximize": True},
        {"beta1": 0.5, "beta2": 0.95},
        {"beta1": 0.3},
        {"beta1": 0.0, "beta2": 0.9},
        {"eps": 1e-3},
        {"decoupled": False, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_a_step_is_torchs_within_the_stated_tolerance(changes: dict[str, Any], fused: bool) -> None:
    values = make_values(**changes)
    weight, exp_avg, exp_avg_sq, gradient = make_inputs()
    expected = step_of_torch(values, weight, exp_avg, exp_avg_sq, gradient, fused)
    new = [weight.clone(), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(new[0], None, new[1], new[2], gradient).run(0, NUM_ELEMENTS, values.scalars())

    first = largest(exp_avg, gradient)
    assert ((new[1] - expected[1]).abs() <= 2 * ulp(first)).all()
    assert ((new[2] - expected[2]).abs() <= ulp(expected[2])).all()
    denominator = new[2].sqrt() / (1 - values.beta2**values.step) ** 0.5 + values.eps
    step = values.lr / (1 - values.beta1**values.step) * first / denominator
    assert ((new[0] - expected[0]).abs() <= 2 * ulp(largest(weight, expected[0])) + step * 2**-22).all()


@pytest.mark.parametrize("maximize", [False, True])
def test_adams_own_decay_is_part_of_the_gradient(maximize: bool) -> None:
    values = make_values(decoupled=False, maximize=maximize)
    generator = torch.Generator().manual_seed(1)
    weight, exp_avg, gradient = (torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(3))
    exp_avg_sq = torch.rand(NUM_ELEMENTS, generator=generator) + 0.5
    expected = step_of_torch(values, weight, exp_avg, exp_avg_sq, gradient)
    without = step_of_torch(make_values(weight_decay=0.0), weight, exp_avg, exp_avg_sq, gradient)
    new = [weight.clone(), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(new[0], None, new[1], new[2], gradient).run(0, NUM_ELEMENTS, values.scalars())
    for ours, theirs, other in zip(new, expected, without, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-7, atol=4e-7)
        assert (theirs - other).abs().max() > 5e-6


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_a_split_master_is_stepped_as_the_master_and_split_again(gradient_dtype: torch.dtype) -> None:
    values = make_values()
    master, exp_avg, exp_avg_sq, gradient = make_inputs(2)
    gradient = gradient.to(gradient_dtype)
    weight, low = (
        torch.empty(NUM_ELEMENTS, dtype=torch.bfloat16),
        torch.empty(NUM_ELEMENTS, dtype=torch.int16),
    )
    split(master, weight, low)
    whole = [join(weight, low, torch.empty_like(master)), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(whole[0], None, whole[1], whole[2], gradient).run(0, NUM_ELEMENTS, values.scalars())
    CpuAdam(weight, low, exp_avg, exp_avg_sq, gradient).run(0, NUM_ELEMENTS, values.scalars())

    expected_weight, expected_low = torch.empty_like(weight), torch.empty_like(low)
    split(whole[0], expected_weight, expected_low)
    assert torch.equal(weight, expected_weight)
    assert torch.equal(low, expected_low)
    assert torch.equal(exp_avg, whole[1])
    assert torch.equal(exp_avg_sq, whole[2])


def test_a_weight_that_is_its_own_master_is_rounded() -> None:
    values = make_values(lr=0.1)
    master, exp_avg, exp_avg_sq, gradient = make_inputs(3)
    weight = master.to(torch.bfloat16)
    gradient = gradient.to(torch.bfloat16)
    whole = [weight.float(), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(whole[0], None, whole[1], whole[2], gradient).run(0, NUM_ELEMENTS, values.scalars())
    CpuAdam(weight, None, exp_avg, exp_avg_sq, gradient).run(0, NUM_ELEMENTS, values.scalars())
    assert torch.equal(weight, whole[0].to(torch.bfloat16))
    assert torch.equal(exp_avg, whole[1])


@pytest.mark.parametrize("lower", [0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_every_weight_is_split_as_torch_splits_it(lower: int) -> None:
    """A step of zero writes back what it read, rounded anew: also infinities, NaNs, denormals and ties."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(lower)
    master = torch.from_numpy(bits.view(np.float32))
    weight, low = torch.empty(1 << 16, dtype=torch.bfloat16), torch.empty(1 << 16, dtype=torch.int16)
    split(master, weight, low)
    new_weight, new_low = weight.clone(), low.clone()
    exp_avg, exp_avg_sq = torch.zeros(1 << 16), torch.zeros(1 << 16)
    gradient = torch.zeros(1 << 16, dtype=torch.bfloat16)
    values = make_values(lr=0.0, weight_decay=0.0)
    CpuAdam(new_weight, new_low, exp_avg, exp_avg_sq, gradient).run(0, 1 << 16, values.scalars())
    number = ~torch.isnan(weight)
    assert torch.equal(torch.isnan(new_weight), ~number)
    assert torch.equal(new_weight.view(torch.int16)[number], weight.view(torch.int16)[number])
    assert torch.equal(new_low[number], low[number])


@pytest.mark.parametrize("low", [torch.zeros(64, dtype=torch.int16), None], ids=["split", "rounded"])
def test_a_nan_stays_a_nan(low: torch.Tensor | None) -> None:
    """Rounding up the largest payload would carry into the sign and leave a zero."""
    gradient = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    weight = torch.ones(64, dtype=torch.bfloat16)
    CpuAdam(weight, low, torch.zeros(64), torch.zeros(64), gradient).run(0, 64, make_values().scalars())
    assert torch.isnan(weight).all()


def test_without_momentum_the_first_moment_is_the_gradient() -> None:
    weight, exp_avg, exp_avg_sq, gradient = make_inputs(8)
    CpuAdam(weight, None, exp_avg, exp_avg_sq, gradient).run(
        0, NUM_ELEMENTS, make_values(beta1=0.0).scalars()
    )
    assert torch.equal(exp_avg, gradient)


def test_any_cut_gives_the_same_bits() -> None:
    values = make_values()
    results = []
    for bounds in (
        [0, NUM_ELEMENTS],
        [0, 1, 64, 71, 9_999, 10_000, NUM_ELEMENTS],
        [*range(NUM_ELEMENTS + 1)][::13],
    ):
        master, exp_avg, exp_avg_sq, gradient = make_inputs(4)
        weight, low = master.to(torch.bfloat16), torch.empty(NUM_ELEMENTS, dtype=torch.int16)
        split(master, weight, low)
        update = CpuAdam(weight, low, exp_avg, exp_avg_sq, gradient.to(torch.bfloat16))
        ends = [*bounds[1:], NUM_ELEMENTS]
        for begin, end in zip(bounds, ends, strict=True):
            update.run(begin, end, values.scalars())
        results.append((weight, low, exp_avg, exp_avg_sq))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_threads_give_the_same_bits() -> None:
    """Slices in a pool of four threads, several steps; against one thread."""
    num_elements = 300_007
    generator = torch.Generator().manual_seed(9)
    start = torch.randn(num_elements, generator=generator)
    gradients = [torch.randn(num_elements, generator=generator).to(torch.bfloat16) for _ in range(3)]
    results = []
    for num_threads in (1, 4):
        weight, low = (
            torch.empty(num_elements, dtype=torch.bfloat16),
            torch.empty(num_elements, dtype=torch.int16),
        )
        split(start, weight, low)
        exp_avg, exp_avg_sq = torch.zeros(num_elements), torch.zeros(num_elements)
        pool = UpdatePool(num_threads)
        for step, gradient in enumerate(gradients, start=1):
            update = CpuAdam(weight, low, exp_avg, exp_avg_sq, gradient)
            scalars = make_values(step=step).scalars()
            slices = [
                partial(update.run, begin, end, scalars)
                for begin, end in cut_into_slices(num_elements, 4 * num_threads)
            ]
            pool.submit(slices).result(60)
        pool.close()
        results.append((weight, low, exp_avg, exp_avg_sq))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
    assert not torch.equal(results[0][0], start.to(torch.bfloat16))


def test_a_slice_leaves_its_neighbours_alone() -> None:
    master, exp_avg, exp_avg_sq, gradient = make_inputs(5)
    before = [master.clone(), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(master, None, exp_avg, exp_avg_sq, gradient).run(100, 1001, make_values().scalars())
    for old, new in zip(before, (master, exp_avg, exp_avg_sq), strict=True):
        assert torch.equal(old[:100], new[:100])
        assert torch.equal(old[1001:], new[1001:])
        assert not torch.equal(old[100:1001], new[100:1001])


@pytest.mark.parametrize("grad_scale", [0.25, 0.3])
def test_grad_scale_scales_the_gradient(grad_scale: float) -> None:
    weight, exp_avg, exp_avg_sq, gradient = make_inputs(6)
    scaled = [weight.clone(), exp_avg.clone(), exp_avg_sq.clone()]
    CpuAdam(weight, None, exp_avg, exp_avg_sq, gradient).run(
        0, NUM_ELEMENTS, make_values(grad_scale=grad_scale).scalars()
    )
    CpuAdam(scaled[0], None, scaled[1], scaled[2], gradient * grad_scale).run(
        0, NUM_ELEMENTS, make_values().scalars()
    )
    assert torch.equal(weight, scaled[0])
    assert torch.equal(exp_avg, scaled[1])
    assert torch.equal(exp_avg_sq, scaled[2])


def test_many_steps_stay_beside_torch() -> None:
    generator = torch.Generator().manual_seed(7)
    master = torch.randn(NUM_ELEMENTS, generator=generator) * 0.02
    weight, low = master.to(torch.bfloat16), torch.empty(NUM_ELEMENTS, dtype=torch.int16)
    split(master, weight, low)
    param = join(weight, low, torch.empty_like(master)).requires_grad_()
    optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=0.1)
    exp_avg, exp_avg_sq = torch.zeros(NUM_ELEMENTS), torch.zeros(NUM_ELEMENTS)
    gradient = torch.zeros(NUM_ELEMENTS, dtype=torch.bfloat16)
    update = CpuAdam(weight, low, exp_avg, exp_avg_sq, gradient)
    for step in range(1, 51):
        gradient.copy_(torch.randn(NUM_ELEMENTS, generator=generator))
        param.grad = gradient.float()
        optimizer.step()
        update.run(0, NUM_ELEMENTS, make_values(step=step).scalars())
    moved = (param.detach() - master).abs().max()
    error = (join(weight, low, torch.empty_like(master)) - param.detach()).abs().max()
    assert moved > 5e-3
    assert error < 1e-5 * moved


def make_buffers(**changes: torch.Tensor | None) -> dict[str, Any]:
    buffers = {
        "weight": torch.zeros(8, dtype=torch.bfloat16),
        "low": torch.zeros(8, dtype=torch.int16),
        "exp_avg": torch.zeros(8),
        "exp_avg_sq": torch.zeros(8),
        "gradient": torch.zeros(8, dtype=torch.bfloat16),
    }
    return buffers | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.zeros(8)}, TypeError, "takes weight as one of"),
        ({"low": None, "weight": torch.zeros(8).half()}, TypeError, "takes weight as one of"),
        ({"exp_avg": torch.zeros(8).bfloat16()}, TypeError, "takes exp_avg as one of"),
        ({"gradient": torch.zeros(8).half()}, TypeError, "takes gradient as one of"),
        (
            {"exp_avg_sq": torch.zeros(7)},
            ValueError,
            "exp_avg_sq contiguous on the CPU with 8 elements, not 7",
        ),
        ({"exp_avg": torch.zeros(16)[::2]}, ValueError, "with strides \\(2,\\)"),
        ({"exp_avg": torch.zeros(8, device="meta")}, ValueError, "on meta"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(
    changes: dict[str, torch.Tensor | None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        CpuAdam(**make_buffers(**changes))


def test_bounds_and_steps_that_cannot_be() -> None:
    update = CpuAdam(**make_buffers())
    with pytest.raises(ValueError, match=r"elements \[4, 9\) are not among the 8"):
        update.run(4, 9, make_values().scalars())
    with pytest.raises(ConfigError, match="step=0 cannot be"):
        make_values(step=0)


def test_without_numba_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match="needs numba.*Install numba, or leave update_on='device'"):
        _compile(torch.float32, False, torch.float32)


def test_without_a_cache_directory_it_compiles_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = numba.njit

    def njit(signature: Any, *, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(signature, **options)

    monkeypatch.setattr(numba, "njit", njit)
    with caplog.at_level(logging.DEBUG, logger="pager.optim.adamw_cpu"):
        kernel = _compile(torch.float32, False, torch.float32)
    arrays = [np.full(16, 0.5, np.float32) for _ in range(4)]
    kernel(arrays[0], None, arrays[1], arrays[2], arrays[3], *make_values().scalars())
    assert (arrays[0] < 0.5).all()
    assert "no locator available" in caplog.text


def test_the_loop_is_a_vector_loop() -> None:
    """Compiled without the cache, whose entries cannot be inspected."""
    from pager.optim import adamw_cpu

    real = numba.njit
    kernels = {}
    for weight, has_low in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(numba, "njit", lambda signature, cache=False, **options: real(signature, **options))
            kernels[weight, has_low] = adamw_cpu._compile(weight, has_low, torch.bfloat16)
    for kernel in kernels.values():
        text = next(iter(kernel.inspect_llvm().values()))  # type: ignore[attr-defined]
        assert re.search(r"fdiv <\d+ x float>", text)
