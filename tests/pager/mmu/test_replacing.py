"""``p.data = t``: who holds the old value keeps it, bit for bit as in torch, and the parameter has the new one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pager
from pager.errors import TierFull
from pager.mmu import values
from pager.page_table import Home
from tests import models
from tests.cases.plainly import MAKERS, Pair
from tests.cases.same import Report, check_equal, check_same, copied, manage, num_pages, train

CASE = models.make_mlp()
WIDTH = 96
X = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
NEW = torch.linspace(-0.1, 0.1, WIDTH * WIDTH).view(WIDTH, WIDTH)


def make_mlp() -> Any:
    return models.make_mlp().model


def make_layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


# The last weight streams from host memory, stays on the device, has its home there, or on a disk.
PLACES = {"streams": Home.HOST, "stays": Home.HOST, "wired": Home.DEVICE, "disk": Home.DISK}


def check_everywhere(place: str, script: Callable[[Any, Report], None], folder: Path) -> None:
    """Run ``script``, which trains, with the last weight at such a place."""

    def placed(model: Any, report: Report) -> None:
        script(model, report)
        if "pager" in model.__dict__:
            binding = model[3].weight._pager
            home = model.pager._runtime.table.home[binding.segment.first_page]
            assert (home, binding.keep) == (PLACES[place], place in ("stays", "wired"))

    knobs: dict[str, Any] = {"share": {"stays": 0.6, "wired": 8.0}.get(place, 0.35)}
    if place == "disk":
        knobs |= {"disk": folder, "host_budget": "1KiB"}
    check_same(make_layers, placed, **knobs)


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_layers(model: Any, report: Report, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Two steps."""
    optimizer = adamw(model) if optimizer is None else optimizer
    for _ in range(2):
        loss = model(X).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report("loss", loss)


# -- habits ------------------------------------------------------------------------------------------------------------


class Ema:
    """The average of weights as it stands in a hundred repositories: swapped in and out by assigning ``.data``."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.model = model
        self.decay = decay
        self.shadow = {name: param.data.clone() for name, param in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def update(self) -> None:
        """After each step."""
        for name, param in self.model.named_parameters():
            average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
            self.shadow[name] = average.clone()

    def swap_in(self) -> None:
        """The model computes with the average."""
        for name, param in self.model.named_parameters():
            self.backup[name] = param.data
            param.data = self.shadow[name]

    def swap_out(self) -> None:
        """The model has its own weights again."""
        for name, param in self.model.named_parameters():
            param.data = self.backup[name]
        self.backup = {}


class CopyingEma(Ema):
    """The other habit: store clones, copy the average into the parameters, copy back."""

    def swap_in(self) -> None:
        """The model computes with the average."""
        self.backup = {name: param.data.clone() for name, param in self.model.named_parameters()}
        for name, param in self.model.named_parameters():
            param.data.copy_(self.shadow[name])

    def swap_out(self) -> None:
        """The model has its own weights again."""
        for name, param in self.model.named_parameters():
            param.data.copy_(self.backup[name])


@pytest.mark.parametrize("update_at", ["step", "backward"])
@pytest.mark.parametrize("share", [0.85, 8.0])
@pytest.mark.parametrize("kind", [Ema, CopyingEma])
def test_an_average_is_swapped_in_and_out(kind: type[Ema], share: float, update_at: str) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        train(CASE, model, optimizer, range(1), report)
        ema = kind(model)
        for step in range(1, 4):
            train(CASE, model, optimizer, range(step, step + 1), report)
            ema.update()
            ema.swap_in()
            report("average", list(model.parameters()))
            with torch.no_grad():
                report("evaluated", model(torch.ones(3, WIDTH)))
            ema.swap_out()
            report("own", list(model.parameters()))
        train(CASE, model, optimizer, range(4, 6), report)
        optimizer.zero_grad()

    check_same(make_mlp, script, share=share, update_at=update_at)


def test_what_fits_no_more_is_refused_with_the_way_out_and_nothing_is_lost() -> None:
    plain = make_mlp()
    model = manage(make_mlp(), share=0.2)
    ema = Ema(model)
    with pytest.raises(
        pager.BudgetError, match=r"keep p\.data\.clone\(\) or \.cpu\(\), or model\.state_dict\(\)"
    ):
        ema.swap_in()
    for name, value in ema.backup.items():
        model.get_parameter(name).data = value
    ema.backup.clear()
    model.pager.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("place", PLACES)
def test_two_weights_are_swapped(place: str, tmp_path: Path) -> None:
    def script(model: Any, report: Report) -> None:
        one, other = model[3].weight, model[1].weight
        for _ in range(2):
            one.data, other.data = other.data, one.data
            report("swapped", [one, other])
            train_layers(model, report)

    check_everywhere(place, script, tmp_path)


# -- who holds the old value -------------------------------------------------------------------------------------------

HOLDERS: dict[str, Callable[[Any], Tensor]] = {
    "alias": lambda w: w.data,
    "detached": lambda w: w.detach(),
    "view": lambda w: w.detach()[1:, ::2].t(),
    "view of an alias": lambda w: w.data.view(-1)[5:],
    "array": lambda w: torch.from_numpy(w.detach().numpy()),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_who_holds_the_old_value_keeps_it(holder: str, place: str, tmp_path: Path) -> None:
    def script(model: Any, report: Report) -> None:
        weight = model[3].weight
        old = HOLDERS[holder](weight)
        weight.data = NEW.clone()
        report("assigned", [old, weight])
        with torch.no_grad():
            weight.mul_(2)
        report("written to", [old, weight])
        train_layers(model, report)
        report("trained", [old, weight])
        with torch.no_grad():
            old.mul_(3)
        report("old one written to", [old, weight])
        train_layers(model, report)

    check_everywhere(place, script, tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_a_held_state_dict_keeps_what_it_showed(place: str, tmp_path: Path) -> None:
    def script(model: Any, report: Report) -> None:
        weight = model[3].weight
        before = model.state_dict()["3.weight"]
        with torch.no_grad():
            weight.add_(1)
        weight.data = NEW.clone()
        report("assigned", [before, weight])
        after = model.state_dict()["3.weight"]
        before.mul_(2)  # is nobody's but the user's
        train_layers(model, report)
        report("trained", [before, after, weight])
        weight.data = NEW.half().float()
        report("once more", [before, after, weight])
        after.fill_(3)
        train_layers(model, report)

    check_everywhere(place, script, tmp_path)


@pytest.mark.parametrize("place", PLACES)
def test_an_update_that_waits_is_in_the_old_value(place: str, tmp_path: Path) -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        weight = model[3].weight
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            old = weight.data
            weight.data = weight.data * 0.5
            report("halved", [old, weight])
            weight.data = old
            del old
            model(X).square().sum().backward()
            optimizer.step()
            weight.data = NEW.clone()
            optimizer.zero_grad()
        train_layers(model, report, optimizer)

    check_everywhere(place, script, tmp_path)


GRAPHS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "view is saved": lambda x, w: F.linear(x, w),
    "user's view is saved": lambda x, w: (x @ w.t()).exp(),
    "row is saved": lambda x, w: x * w[3],
    "parameter itself is saved": lambda x, w: x[0] * w,
    "conjugate view": lambda x, w: (x * w[3].to(torch.complex64).conj()).real,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_from_before_computes_as_in_torch(graph: str, place: str, tmp_path: Path) -> None:
    """With the old values of a view, and with the new ones of the parameter itself, and no version has moved."""

    def script(model: Any, report: Report) -> None:
        weight = model[3].weight
        x = X.clone().requires_grad_()
        loss = GRAPHS[graph](x, weight).square().sum()
        version = weight._version
        weight.data = NEW.clone()
        report("version", weight._version - version)
        loss.backward()
        report("gradients", [x.grad, weight.grad])
        model.zero_grad()
        train_layers(model, report)

    check_everywhere(place, script, tmp_path)


def test_a_graph_from_before_that_recomputes_is_refused() -> None:
    model = manage(make_layers())
    loss = checkpoint(lambda x: model[3](x), X.clone().requires_grad_(), use_reentrant=False).sum()
    model[3].weight.data = NEW.clone()
    with pytest.raises(RuntimeError, match=r"3\.weight, whose \.data was assigned.*call backward\(\) before"):
        loss.backward()
    model.pager.close()


def test_only_a_graph_that_may_look_back_costs_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []
    original = values.cpu_bytes

    def copy(mmu: Any, binding: Any) -> Tensor:
        copies.append(binding.name)
        return original(mmu, binding)

    monkeypatch.setattr(values, "cpu_bytes", copy)
    model = manage(make_layers())
    loss = model(X).sum()
    model[3].weight.data = NEW.clone()
    assert copies == ["3.weight"]
    loss.backward()
    model[3].weight.data = NEW * 2
    assert copies == ["3.weight"], "backward has let go of what was saved, though the loss is there"
    model.pager.close()


def test_an_old_graph_is_right_after_closing() -> None:
    grads = []
    for managed in (False, True):
        model = manage(make_layers()) if managed else make_layers()
        x = X.clone().requires_grad_()
        loss = F.linear(x, model[3].weight).sum()
        model[3].weight.data = NEW.clone()
        if managed:
            model.pager.close()
        loss.backward()
        grads.append([copied(x.grad), copied(model[3].weight.grad)])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_a_view_from_before_keeps_its_graph_and_its_value() -> None:
    def script(model: Any, report: Report) -> None:
        weight = model[3].weight
        row, turned = weight[0], weight.t()
        weight.data = NEW.clone()
        ((row * 2).exp().sum() + (X @ turned).square().sum()).backward()
        report("seen", [row, turned, weight, weight.grad])
        with torch.no_grad():
            row.add_(1)
        report("written to", [row, turned, weight])

    check_same(make_layers, script, share=0.8)


# -- what else ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_its_own_data_changes_nothing(place: str, tmp_path: Path) -> None:
    def script(model: Any, report: Report) -> None:
        train_layers(model, report)
        weight = model[3].weight
        old = weight.data
        weight.data = old
        weight.data = weight.data
        weight.data = weight.detach()
        with torch.no_grad():
            weight.add_(1)
        report("same memory", [old, weight])

    check_everywhere(place, script, tmp_path)


def test_a_held_state_dict_shows_the_last_value_before_a_conversion() -> None:
    def script(model: Any, report: Report) -> None:
        held = model.state_dict()["3.weight"]
        model[3].weight.data.mul_(2)
        model[3].weight.data = model[3].weight.data.double()
        report("held", held)
        model[3].weight.data = model[3].weight.data.float()

    check_same(make_layers, script)


def test_what_is_no_dense_tensor_is_refused() -> None:
    model = manage(make_layers())
    weight: Any = model[3].weight
    old = copied(weight)
    for value, what in (
        (torch.ones(WIDTH, WIDTH).to_sparse(), r"torch\.sparse_coo"),
        (5, "int"),
        (None, "NoneType"),
    ):
        with pytest.raises(pager.ConfigError, match=rf"3\.weight: \.data .* not {what}"):
            weight.data = value
    check_equal(old, copied(weight), "refused")
    model.pager.close()


def test_values_that_are_conjugate_only_by_a_flag() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.ParameterList(
            [nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)) for _ in range(3)]
        )

    def script(model: Any, report: Report) -> None:
        other = torch.randn(WIDTH, WIDTH, dtype=torch.complex64)
        with torch.no_grad():
            model[1].copy_(other.conj())
        model[1].data = other.conj()
        report("weights", list(model))

    check_same(make, script)


def test_gradients_and_states_too() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = adamw(model)
        for _ in range(2):
            model(X).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
            grad = model[3].weight.grad
            old = grad.data
            grad.data = NEW.clone()
            report("gradient", [old, grad, model[3].weight.grad])
            del old
            optimizer.step()
            moment = optimizer.state[model[3].weight]["exp_avg"]
            old = moment.data
            moment.data = moment.data * 2
            report("moment", [old, moment])
            del old
            optimizer.zero_grad()
        train_layers(model, report, optimizer)

    check_same(make_layers, script, share=0.6)


def test_inside_resident_the_parameter_points_at_its_new_value() -> None:
    model = manage(make_layers(), share=0.6)
    weight = model[3].weight
    with model.pager.resident(model[3]):
        weight.data = NEW.clone()
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.equal(weight.detach(), NEW)
            torch.from_numpy(weight.detach().numpy())[0] = 7
    model.pager._runtime.engine.evict_segments([weight._pager.segment])
    assert float(weight.detach()[0, 5]) == 7
    model.pager.close()
    assert torch.equal(model[3].weight[1:], NEW[1:])


def test_no_room_for_another_home_beside_a_held_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = manage(make_layers())
    weight, runtime = model[3].weight, model.pager._runtime
    assert runtime.table.home[weight._pager.segment.first_page] == Home.HOST
    held, old = model.state_dict()["3.weight"], copied(weight)
    used = runtime.host.used_bytes

    def full(num_frames: int) -> int:
        raise TierFull("host memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(runtime.host, "allocate", full)
        with pytest.raises(pager.BudgetError, match=r"another value of 3\.weight.*Let go of the state dict"):
            weight.data = NEW.clone()
    check_equal([old, old], [copied(weight), held], "refused")
    with monkeypatch.context() as patch:
        patch.setattr(runtime.engine, "replace", lambda *arguments: full(0))
        with pytest.raises(TierFull):
            weight.data = NEW.clone()
    assert runtime.host.used_bytes == used
    for _ in range(3):
        weight.data = NEW.clone()
        held = model.state_dict()["3.weight"]
    del held
    weight.data = NEW.clone()
    runtime.homes.release_host()
    assert runtime.host.used_bytes == used, "homes that nobody looks at are free again"
    model.pager.close()


def test_the_same_values_keep_the_masters() -> None:
    pair = Pair(models.make_mlp, MAKERS["adamw"], budget=0.6)
    pair.train(2)
    for param in pair.model.parameters():
        param.data = param.data.clone()
    pair.check()
    pair.train(1)
    pair.close()


@pytest.mark.parametrize("how", ["data", "copy"])
@pytest.mark.parametrize("budget", [0.6, 8.0])
def test_masters_begin_anew_from_what_is_assigned_and_outlive_what_is_copied_in_and_out(
    budget: float, how: str
) -> None:
    """As a paged parameter's master does at any counted write; ``.data.copy_`` is none."""
    pair = Pair(models.make_mlp, MAKERS["adamw"], budget=budget)
    pair.train(2)
    for _ in range(2):
        paged = [param for param in pair.model.parameters() if num_pages(param)]
        ema = (Ema if how == "data" else CopyingEma)(pair.model)
        ema.update()
        ema.shadow = {name: value * 0.5 for name, value in ema.shadow.items()}
        ema.swap_in()
        pair.model(torch.ones(3, WIDTH, dtype=torch.bfloat16))
        ema.swap_out()
        if how == "data":
            pair.plain.written(*[p for p in pair.plain.params if num_pages(p)])
        assert len(paged) == 5
        pair.check()
        pair.train(2)
    pair.close()
