"""Bad input gets a clear error, and a model whose `manage` failed is exactly as before and trains without us."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from tests import models
from tests.cases.refusals import adamw, check_refused
from tests.cases.same import PAGE, check_equal, check_ordinary, manage, train


@pytest.mark.parametrize(
    ("knobs", "error", "match"),
    [
        ({"page_size": 100_000}, ValueError, "page_size is 100000.*power of two"),
        ({"page_size": "8KiB"}, ValueError, "page_size.*from 16.*KiB to 4.*MiB"),
        ({"page_size": "8MiB"}, ValueError, "page_size.*from 16.*KiB to 4.*MiB"),
        ({"page_size": 0}, ValueError, "page_size"),
        ({"page_size": -(2**17)}, ValueError, "page_size"),
        ({"page_size": "large"}, ValueError, "page_size.*large"),
        ({"page_size": None}, TypeError, "page_size"),
        ({"page_size": 1e5}, (TypeError, ValueError), "page_size"),
        ({"eviction": "random"}, ValueError, "random.*belady.*clock.*lru"),
        ({"eviction": 7}, (TypeError, ValueError), "eviction|polic"),
        ({"prefetch_distance": -1}, ValueError, "prefetch_distance"),
        ({"prefetch_distance": "far"}, TypeError, "prefetch_distance"),
        ({"device_budget": 0}, ValueError, "device_budget"),
        ({"device_budget": 1.5}, ValueError, "device_budget.*1.5"),
        ({"device_budget": "2 parsecs"}, ValueError, "device_budget.*parsecs"),
        ({"device_budget": True}, (TypeError, ValueError), "device_budget"),
        ({"host_budget": None}, TypeError, "host_budget"),
        ({"host_budget": 0.0}, ValueError, "host_budget"),
        ({"device": "tpu"}, ValueError, "device.*tpu"),
        ({"disk_budget": "1GiB"}, ValueError, "disk_budget.*disk is None"),
        ({"disk": "/nonexistent/folder"}, ValueError, "/nonexistent/folder"),
        ({"disk": "/proc"}, pager.ConfigError, "disk='/proc': .*Name a folder"),
        (
            {"disk": __file__},
            pager.ConfigError,
            "disk='.*test_bad_input.*': .*Not a directory.*Name a folder",
        ),
        ({"update_on": "moon"}, ValueError, "update_on.*moon"),
        ({"update_at": "later"}, ValueError, "update_at.*later"),
        ({"master": "float64"}, ValueError, "master.*float64"),
        ({"example_inputs": 3}, TypeError, "example_inputs"),
        ({"init": 3}, TypeError, "init"),
        ({"prefetch": 4}, TypeError, "prefetch.*known.*prefetch_distance"),
        ({"config": 3}, TypeError, "config"),
        ({"config": {"page_size": PAGE}}, TypeError, "config"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_knobs_that_cannot_work(knobs: dict[str, Any], error: Any, match: str) -> None:
    check_refused(models.make_mlp, error, match, **knobs)


def test_a_budget_smaller_than_the_largest_parameter_says_which_and_how_much() -> None:
    def make() -> models.Case:
        return models.make_mlp(width=256, depth=1)

    check_refused(
        make, pager.BudgetError, r"0\.weight.*256\.00 KiB.*Raise device_budget", device_budget="200KiB"
    )


def test_pages_larger_than_every_tensor_are_too_large_not_the_budget_too_small() -> None:
    def make() -> models.Case:
        return models.make_mlp(width=256, depth=1)

    message = r"1\.00 MiB.*0\.weight is the largest \(256\.00 KiB\): lower page_size to 256\.00 KiB"
    check_refused(make, pager.BudgetError, message, device_budget="600KiB", page_size="1MiB")
    manage(make().model, device_budget="600KiB", page_size="256KiB").pager.close()


def test_a_budget_below_tensors_that_no_page_is_small_enough_for() -> None:
    def make() -> models.Case:
        return models.make_mlp(width=32, depth=1)

    message = r"nothing is left for pages\. Raise device_budget\."
    check_refused(make, pager.BudgetError, message, device_budget="2KiB", page_size="1MiB")


def test_a_budget_smaller_than_the_largest_operation_says_which_and_how_much() -> None:
    """An LSTM's weights are one operation's arguments, so they must be there together."""
    case = models.make_lstm()
    knobs = {"device_budget": "208KiB", "example_inputs": case.make_batch(0)[0]}
    message = r"lstm\.weight_ih_l0.*KiB.*Raise device_budget"
    check_refused(models.make_lstm, pager.BudgetError, message, storages=False, **knobs)


def test_a_budget_found_too_small_in_training_says_so_and_nothing_is_lost() -> None:
    case = models.make_lstm()
    expected = copy.deepcopy(case.model.state_dict())
    model = manage(case.model, device_budget="208KiB")
    with pytest.raises(pager.BudgetError, match=r"lstm.*KiB"):
        model(*case.make_batch(0)[0])
    model.pager.close()
    check_equal(dict(expected), dict(model.state_dict()), "after the error")


def test_a_host_budget_below_the_state_is_refused_with_the_bill() -> None:
    check_refused(
        models.make_mlp,
        pager.BudgetError,
        r"parameters .*KiB.*gradients.*states.*host_budget",
        host_budget="1MiB",
    )


def test_a_host_budget_beyond_the_machine_is_refused() -> None:
    """It would keep nobody from being swapped out or killed."""
    check_refused(
        models.make_mlp, pager.ConfigError, r"host_budget is '900TiB'.*give less", host_budget="900TiB"
    )


def test_a_host_budget_raised_by_what_it_lacks_is_enough() -> None:
    with pytest.raises(pager.BudgetError, match="which so lacks") as caught:
        manage(models.make_mlp().model, host_budget="1MiB")
    lacks = re.search(r"so lacks (\d+)\.\d+ MiB", str(caught.value))
    assert lacks is not None
    host_budget = (int(lacks[1]) + 16) * 2**20  # the process may have grown meanwhile
    manage(models.make_mlp().model, host_budget=host_budget).pager.close()


def test_a_disk_budget_below_the_state_is_refused(tmp_path: Path) -> None:
    check_refused(
        models.make_mlp, pager.BudgetError, "disk", host_budget="1MiB", disk=tmp_path, disk_budget="64KiB"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "match"),
    [
        ((torch.zeros(2, 5),), r"RuntimeError: .*\[2, 5\] X \[96, 96\]"),
        ((torch.zeros(2, 96), torch.zeros(2)), "too many positional arguments"),
        ((), "missing a required argument: 'input'"),
        ({"x": torch.zeros(2, 96)}, "missing a required argument|unexpected keyword argument 'x'"),
        (("text",), "TypeError: linear.*must be Tensor, not str"),
    ],
)
def test_example_inputs_that_the_model_does_not_take(
    example: Any, match: str, capfd: pytest.CaptureFixture[str]
) -> None:
    message = rf"example_inputs are no inputs of \w+, whose forward\(\) says: .*{match}.*leave them out"
    check_refused(models.make_mlp, pager.ConfigError, message, example_inputs=example, storages=False)
    assert "Traceback" not in capfd.readouterr().err


class LooksAtValues(nn.Module):
    """Capture cannot run it, on inputs that are right."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(96, 96)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return self.linear(y) if y.sum() > 0 else y


def test_a_model_that_capture_cannot_run_is_recorded_without_a_word_of_torchs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = manage(LooksAtValues(), device_budget="200KiB", example_inputs=(torch.zeros(2, 96),))
    assert "recorded first step" in str(model.pager.plan)
    assert "Traceback" not in capfd.readouterr().err
    model.pager.close()


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module.*list"):
        pager.manage([nn.Linear(2, 2)])  # type: ignore[type-var]


def test_a_model_without_parameters() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    with pytest.raises(pager.ConfigError, match="Sequential has no parameters"):
        manage(model, device_budget="1MiB")
    assert "pager" not in model.__dict__


def test_managing_twice_leaves_the_first_one_working() -> None:
    case, twin = models.make_mlp(), models.make_mlp()
    model = manage(case.model)
    with pytest.raises(pager.ConfigError, match="managed already"):
        manage(model, device_budget="1MiB")
    with pytest.raises(pager.ConfigError, match="managed already"):
        manage(nn.Sequential(model), device_budget="1MiB")
    with pytest.raises(pager.ConfigError, match="managed already"):
        manage(model[0], device_budget="1MiB")
    train(case, model, adamw(model), range(2))
    model.pager.close()
    train(twin, twin.model, adamw(twin.model), range(2))
    check_equal(dict(twin.model.state_dict()), dict(model.state_dict()), "the first one")


def test_parameters_shared_with_another_managed_model() -> None:
    first = manage(models.make_mlp().model)
    second: Any = models.make_mlp(seed=1).model
    second[0].weight = first[0].weight
    before = [(id(p), type(p)) for p in second.parameters()]
    with pytest.raises(pager.ConfigError, match=r"'0\.weight' is managed already"):
        manage(second, device_budget="1MiB")
    assert [(id(p), type(p)) for p in second.parameters()] == before
    first.pager.close()
    manage(second).pager.close()


def test_small_parameters_shared_with_another_managed_model() -> None:
    first = manage(models.make_mlp().model)
    second: Any = models.make_mlp(seed=1).model
    second[0].bias = first[0].bias
    with pytest.raises(pager.ConfigError, match=r"0\.bias"):
        manage(second, device_budget="1MiB")
    first.pager.close()


def test_a_model_with_an_attribute_of_our_name() -> None:
    case = models.make_mlp()
    case.model.pager = nn.Linear(4, 4)
    with pytest.raises(pager.ConfigError, match="pager"):
        manage(case.model, device_budget="1MiB")
    assert isinstance(case.model.pager, nn.Linear)


def test_lazy_parameters() -> None:
    model = nn.Sequential(nn.LazyLinear(96))
    with pytest.raises(pager.ConfigError, match=r"'0\.weight' is lazy.*forward"):
        manage(model, device_budget="1MiB")
    model(torch.zeros(1, 96))
    manage(model, device_budget="1MiB").pager.close()


class Wrapped(Tensor):
    """A tensor subclass of somebody else's."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data: Tensor) -> None:
        self.wrapped = data

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].wrapped)
        raise NotImplementedError(func)


class PlainSubclass(Tensor):
    """A subclass with data of its own kind of meaning, by `as_subclass`."""


@pytest.mark.parametrize(
    "make_param",
    [
        lambda: nn.Parameter(Wrapped(torch.zeros(96, 96))),
        lambda: nn.Parameter(torch.zeros(96, 96).as_subclass(PlainSubclass)),
    ],
)
def test_tensor_subclasses_of_others(make_param: Callable[[], nn.Parameter]) -> None:
    model = models.make_mlp().model
    param = make_param()
    model.register_parameter("other", param)
    with pytest.raises(pager.ConfigError, match="'other' is a .*subclass"):
        manage(model, device_budget="1MiB")
    assert model.other is param


def test_a_parameter_class_of_the_users_stays() -> None:
    class Tagged(nn.Parameter):
        """Parameter with a tag, as quantisers and partitioners use."""

    model: Any = models.make_mlp().model
    param: Any = Tagged(model[0].weight.detach())
    param.tag = "mine"
    model[0].weight = param
    manage(model)
    managed: Any = model[0].weight
    assert managed is param
    assert managed.tag == "mine"
    assert isinstance(managed, nn.Parameter)
    model.pager.close()
    assert type(model[0].weight) is Tagged


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_modules_with_sparse_gradients(make: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(make(200, 96, sparse=True))
    with pytest.raises(pager.ConfigError, match="sparse=False"):
        manage(model, device_budget="1MiB")


def test_a_sparse_gradient_that_comes_unannounced() -> None:
    model = manage(models.make_decoder().model)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(pager.ConfigError, match=r"embed\.weight.*sparse"):
        nn.functional.embedding(tokens, model.embed.weight, sparse=True).sum().backward()
    model.embed.weight.grad = None
    model.pager.close()


def test_sparse_and_quantised_parameters() -> None:
    model = nn.Module()
    model.sparse = nn.Parameter(torch.eye(200).to_sparse())
    with pytest.raises(pager.ConfigError, match="'sparse'.*strided"):
        manage(model, device_budget="1MiB")


def test_an_expanded_parameter() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.zeros(200, 1).expand(200, 200))
    with pytest.raises(pager.ConfigError, match="'wide'.*expanded"):
        manage(model, device_budget="1MiB")


def test_parameters_over_one_memory() -> None:
    model = nn.Module()
    data = torch.randn(400, 100)
    model.whole = nn.Parameter(data)
    model.part = nn.Parameter(data[:200])
    with pytest.raises(pager.ConfigError, match="'part' and 'whole'.*same memory"):
        manage(model, device_budget="4MiB")
    model.part = nn.Parameter(data[200:])
    with pytest.raises(pager.ConfigError, match="'whole' and 'part'.*same memory"):
        manage(model, device_budget="4MiB")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_module_in_ddp() -> None:
    wrapped = nn.parallel.DistributedDataParallel(models.make_mlp().model)
    with pytest.raises(pager.ConfigError, match="DistributedDataParallel"):
        manage(wrapped, device_budget="1MiB")
    with pytest.raises(pager.ConfigError, match="DistributedDataParallel"):
        manage(nn.Sequential(wrapped), device_budget="1MiB")


@pytest.mark.usefixtures("process_group")
def test_a_module_in_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = models.make_mlp().model
    fully_shard(model)
    with pytest.raises(pager.ConfigError, match="FSDP2"):
        manage(model, device_budget="1MiB")


def test_the_handle_after_close() -> None:
    case = models.make_mlp()
    model = manage(case.model)
    handle = model.pager
    assert "5 paged" in repr(handle)
    handle.close()
    handle.close()
    assert "closed" in repr(handle)
    uses: list[Callable[[], Any]] = [
        lambda: handle.plan,
        lambda: handle.config,
        handle.statistics,
        handle.resident_history,
        lambda: handle.set(prefetch_distance=2),
        lambda: handle.resident(model).__enter__(),
    ]
    for use in uses:
        with pytest.raises(pager.PagerClosed, match="manage"):
            use()
    manage(model).pager.close()


@pytest.mark.parametrize(
    ("knobs", "error"),
    [
        ({"page_size": "1MiB"}, ValueError),
        ({"device_budget": "1GiB"}, ValueError),
        ({"eviction": "nobody"}, ValueError),
        ({"prefetch_distance": -3}, ValueError),
        ({"nonsense": 1}, TypeError),
    ],
)
def test_set_refuses_at_once_and_changes_nothing(knobs: dict[str, Any], error: type[Exception]) -> None:
    model = manage(models.make_mlp().model)
    before = model.pager.config
    with pytest.raises(error, match=next(iter(knobs))):
        model.pager.set(
            prefetch_distance=7, **{k: v for k, v in knobs.items() if k != "prefetch_distance"}
        ) if ("prefetch_distance" not in knobs) else model.pager.set(**knobs)
    case = models.make_mlp()
    train(case, model, adamw(model), range(1))
    assert model.pager.config == before
    model.pager.close()


def test_set_takes_effect_at_the_step_boundary() -> None:
    case = models.make_mlp()
    model = manage(case.model)
    optimizer = adamw(model)
    model.pager.set(prefetch_distance=1, eviction="lru")
    assert model.pager.config.prefetch_distance == 4
    train(case, model, optimizer, range(1))
    assert (model.pager.config.prefetch_distance, model.pager.config.eviction) == (1, "lru")
    model.pager.close()


def test_checks_refuse_unknown_values() -> None:
    with pytest.raises(pager.ConfigError, match="streams.*late"):
        Checks(streams="whenever")
    with pytest.raises(pager.ConfigError, match="daemon"):
        Checks(daemon="none")


def test_resident_of_a_module_that_does_not_fit_or_is_foreign() -> None:
    model = manage(models.make_mlp(depth=6).model, share=0.2)
    with pytest.raises(pager.BudgetError, match=r"resident.*KiB"), model.pager.resident(model):
        pass
    with (
        pytest.raises(pager.ConfigError, match="ReLU has no parameters that are managed"),
        model.pager.resident(nn.ReLU()),
    ):
        pass
    with pytest.raises(pager.ConfigError, match="managed"), model.pager.resident(nn.Linear(96, 96)):
        pass
    with model.pager.resident(model[0]):
        assert bool(torch.isfinite(model[0].weight).all())
    model.pager.close()


def test_errors_half_way_through_manage_give_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host arena dies after some parameters have moved."""
    from pager.paging import PagedModel

    original = PagedModel.take_in_parameter

    def dying(self: Any, name: str, param: nn.Parameter) -> Any:
        if name == "4.weight":
            raise MemoryError("no more")
        return original(self, name, param)

    case, twin = models.make_mlp(), models.make_mlp()
    optimizer = adamw(case.model)
    with monkeypatch.context() as patched:
        patched.setattr(PagedModel, "take_in_parameter", dying)
        with pytest.raises(MemoryError, match="no more"):
            manage(case.model, optimizer)
    check_ordinary(case.model)
    train(case, case.model, optimizer, range(2))
    train(twin, twin.model, adamw(twin.model), range(2))
    check_equal(dict(twin.model.state_dict()), dict(case.model.state_dict()), "trained after the failure")
