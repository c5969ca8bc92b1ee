"""Which parameters are paged, and the words for models that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pager
from pager.errors import ConfigError
from pager.model_checks import sort_parameters

PAGE = 16384


def make_module(**parameters: Any) -> nn.Module:
    """A module with these parameters."""
    module = nn.Module()
    for name, param in parameters.items():
        module.register_parameter(name, param)
    return module


def make_parameter(*size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An ordinary parameter."""
    return nn.Parameter(torch.zeros(size, dtype=dtype))


def test_a_page_is_the_line_between_paged_and_small() -> None:
    module = make_module(page=make_parameter(4096), under=make_parameter(4095), scalar=make_parameter())
    found = sort_parameters(module, PAGE)
    assert [name for name, _ in found.paged] == ["page"]
    assert [name for name, _ in found.small] == ["under", "scalar"]


def test_the_span_counts_not_the_elements() -> None:
    strided = nn.Parameter(torch.empty_strided((100,), (64,)))
    assert [name for name, _ in sort_parameters(make_module(w=strided), PAGE).paged] == ["w"]


def test_a_tied_parameter_is_one() -> None:
    weight = make_parameter(4096)
    assert len(sort_parameters(make_module(a=weight, b=weight), PAGE).paged) == 1


def make_lazy() -> nn.Module:
    """A lazy layer whose shapes are not known."""
    return nn.LazyLinear(4)


def make_managed() -> nn.Module:
    """A module that shares a paged parameter with a managed one."""
    model = pager.manage(nn.Linear(96, 96), device="cpu", page_size="16KiB", device_budget="1MiB")
    sharing = make_module(w=model.weight)
    sharing.__dict__["owner"] = model
    return sharing


class DistributedDataParallel(nn.Module):
    """Known by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


class FSDPModule:
    """Known by its name."""


class Sharded(FSDPModule, nn.Linear):
    """What FSDP2 makes of a layer."""


class Quantised(torch.Tensor):
    """Another library's tensor."""


def make_quantised() -> nn.Module:
    """A parameter of another library's class."""
    return make_module(w=nn.Parameter(torch.zeros(4096).as_subclass(Quantised), requires_grad=False))


def make_sparse() -> nn.Module:
    """A parameter in a sparse layout."""
    return make_module(w=nn.Parameter(torch.eye(64).to_sparse(), requires_grad=False))


def make_overlapping(shift: int) -> nn.Module:
    """Two parameters over one memory, ``shift`` elements apart."""
    memory = torch.zeros(10000)
    return make_module(a=nn.Parameter(memory[:5000]), b=nn.Parameter(memory[shift : shift + 5000]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.ReLU, "ReLU has no parameters"),
        (make_lazy, "is lazy; run one forward pass"),
        (
            DistributedDataParallel,
            r"\(the model\) is wrapped in DistributedDataParallel. Manage the model first",
        ),
        (lambda: nn.Sequential(DistributedDataParallel()), "module 0 is wrapped in DistributedDataParallel"),
        (lambda: Sharded(2, 2), "sharded by FSDP2"),
        (lambda: nn.Embedding(9, 9, sparse=True), "sparse=False"),
        (lambda: nn.EmbeddingBag(9, 9, sparse=True), "sparse=False"),
        (make_quantised, "'w' is a Quantised"),
        (make_sparse, "only strided tensors"),
        (lambda: make_module(w=nn.Parameter(torch.zeros(1).expand(9))), "expanded"),
        (lambda: make_overlapping(0), "'a' and 'b' are different objects over the same memory"),
        (lambda: make_overlapping(4999), "'a' and 'b' are different objects over the same memory"),
    ],
)
def test_what_cannot_be_managed_is_refused_by_name(make: Callable[[], nn.Module], message: str) -> None:
    module = make()
    with pytest.raises(ConfigError, match=message):
        sort_parameters(module, PAGE)


def test_a_parameter_that_is_managed_already_is_refused() -> None:
    sharing = make_managed()
    with pytest.raises(ConfigError, match="'w' is managed already"):
        sort_parameters(sharing, PAGE)
    sharing.__dict__["owner"].pager.close()
    assert [name for name, _ in sort_parameters(sharing, PAGE).paged] == ["w"]


def test_neighbours_in_one_memory_are_two_parameters() -> None:
    assert len(sort_parameters(make_overlapping(5000), PAGE).paged) == 2


def test_meta_parameters_have_no_memory_to_share() -> None:
    module = make_module(
        a=nn.Parameter(torch.zeros(5000, device="meta")), b=nn.Parameter(torch.zeros(5000, device="meta"))
    )
    assert len(sort_parameters(module, PAGE).paged) == 2


def test_something_else_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="takes a torch.nn.Module, not a Tensor"):
        sort_parameters(torch.zeros(3), PAGE)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::DeprecationWarning")
def test_torchscript_with_weights_is_refused() -> None:
    """It reads weights without asking for them; what has none may be."""
    scripted = torch.jit.script(nn.Linear(96, 96))
    for model, name in ((scripted, "(the model)"), (nn.Sequential(nn.Linear(96, 96), scripted), "1")):
        with pytest.raises(ConfigError, match=f"module {re.escape(name)} is TorchScript"):
            sort_parameters(model, PAGE)
    without = nn.Sequential(nn.Linear(96, 96), torch.jit.script(nn.ReLU()))
    assert len(sort_parameters(without, PAGE).paged) == 1
