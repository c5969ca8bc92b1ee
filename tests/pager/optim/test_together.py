"""Copies of many small tensors at once are those of each by itself."""

from __future__ import annotations

import pytest
import torch

from pager.optim.together import clone_all, copy_all, single_ones


# Made anew for each test: other tests look at all tensors that there are.
def kinds() -> dict[str, torch.Tensor]:
    """Tensors of all kinds, by name."""
    return {
        "fp32": torch.arange(6.0),
        "bf16": torch.linspace(-3, 3, 7, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "integers": torch.arange(4),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "a view": torch.arange(12.0)[3:9:2],
        "nothing": torch.empty(0),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.ones(5)),
    }


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Dtype, shape, and every bit but for a NaN's payload."""
    dense = [t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (left, right)]
    return left.dtype == right.dtype and torch.equal(dense[0].nan_to_num(7.0), dense[1].nan_to_num(7.0))


def test_clones_are_equal_and_their_own() -> None:
    originals = list(kinds().values())
    clones = clone_all(originals)
    for original, clone in zip(originals, clones, strict=True):
        assert same(original, clone)
        assert type(clone) is torch.Tensor
        assert not clone.requires_grad
        if original.layout == torch.strided:
            assert clone.stride() == original.detach().clone().stride()
            assert original.numel() == 0 or clone.data_ptr() != original.data_ptr()


def test_clones_of_another_dtype() -> None:
    originals = [kinds()[name].detach() for name in ("fp32", "bf16", "scalar", "sparse", "transposed")]
    for original, clone in zip(originals, clone_all(originals, dtype=torch.float32), strict=True):
        assert same(original.float(), clone)


def test_each_target_takes_its_source_and_counts_it_as_a_write() -> None:
    sources = [tensor.detach() for tensor in kinds().values()]
    targets = [torch.zeros_like(source) for source in sources]
    with_other_dtype = (torch.zeros(6, dtype=torch.bfloat16), kinds()["fp32"])
    expanded = (torch.zeros(2, 6), kinds()["fp32"])
    pairs = [*zip(targets, sources, strict=True), with_other_dtype, expanded]
    before = [target._version for target, _ in pairs]
    copy_all(pairs)
    assert all(same(target, source) for target, source in zip(targets, sources, strict=True))
    assert same(with_other_dtype[0], kinds()["fp32"].bfloat16())
    assert same(expanded[0], kinds()["fp32"].expand(2, 6))
    assert all(target._version > version for (target, _), version in zip(pairs, before, strict=True))


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_all([(torch.zeros(2), torch.zeros(3))])


def test_many_of_a_kind_are_one_operation() -> None:
    many = [torch.full((3,), float(index)) for index in range(50)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        clones = clone_all(many)
    assert sum(event.count for event in profiled.key_averages() if event.key == "aten::_foreach_copy_") == 1
    assert all(map(torch.equal, many, clones))


def test_single_ones_are_those_that_were_asked_for_and_do_not_touch_each_other() -> None:
    dtypes = [torch.float32, torch.int16, torch.float32, torch.bfloat16, torch.int16]
    ones = single_ones(dtypes, torch.device("cpu"))
    assert [one.dtype for one in ones] == dtypes
    assert all(one.tolist() == [1] and one.is_leaf and not one._is_view() for one in ones)
    ones[0].add_(1)
    assert [one.item() for one in ones] == [2, 1, 1, 1, 1]
    assert len({one.untyped_storage().data_ptr() for one in ones}) == 3  # a launch for each dtype
    assert single_ones([], torch.device("cpu")) == []
