"""``model.pager.clip_grad_norm_``: whatever a user does around it, every bit is that of torch's own clipping."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pager.engine.staging import Staging
from pager.errors import ConfigError, PagerClosed
from tests import models
from tests.cases.clipping import HELD, Halves, clip, expect_owed, numpy_of
from tests.cases.plainly import MAKERS, Pair, checks
from tests.cases.same import Report, check_equal, check_same, copied, manage, train_step
from tests.pager.optim.waiting import (
    BUDGETS,
    NUM_LAYERS,
    backward,
    batch,
    check_corner,
    expect_waiting,
    make_adamw,
    optimizer_state,
    pending,
    weight,
)

# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("name", MAKERS)
def test_training_is_torchs(name: str, share: float) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = MAKERS[name](model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            report("loss", train_step(case, model, step))
            report("norm", clip(model))
            if step:
                expect_owed(model)
            optimizer.step()
        report("states", optimizer_state(model, optimizer) if optimizer.state else 0)

    check_same(lambda: models.make_mlp().model, script, share=share)


@pytest.mark.parametrize(
    "name", ["cnn", "decoder", "decoder_reentrant", "decoder_nonreentrant", "called_twice", "lstm"]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_models_and_micro_batches(name: str, micro_batches: int) -> None:
    case = models.BUILDERS[name]()

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                report("loss", train_step(case, model, micro_batches * step + micro))
            report("norm", clip(model))
            optimizer.step()

    check_same(lambda: models.BUILDERS[name]().model, script, share=0.25)


@pytest.mark.pairwise(
    norm_type=[2, 1.0, 3.5, float("inf"), 0.0, float("-inf")], max_norm=[0.01, 1e6], budget=BUDGETS
)
def test_kinds_of_norms(norm_type: float, max_norm: float, budget: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step in range(2, 4):
            optimizer.zero_grad()
            backward(model, step)
            report("norm", clip(model, max_norm, norm_type=norm_type))
            report("grad", weight(model).grad)
            optimizer.step()

    check_corner(corner, budgets=(budget,))


@pytest.mark.pairwise(name=MAKERS, budget=[0.3, 1.5], master=[True, False])
def test_bf16_with_and_without_masters(name: str, budget: float, master: bool) -> None:
    pair = Pair(
        lambda: models.make_mlp(width=160, depth=2),
        MAKERS[name],
        master=master,
        budget=budget,
        checks=checks(),
    )
    try:
        for step in range(4):
            norms = []
            for model, trainer in ((pair.plain.model, pair.plain), (pair.model, pair.optimizer)):
                trainer.zero_grad()
                for micro in range(2):
                    args = [arg.bfloat16() for arg in pair.case.make_batch(2 * step + micro)[0]]
                    model(*args).square().mean().backward()
                norms.append(clip(model, 1e-3))
                trainer.step()
            check_equal(norms[0], norms[1], f"norm {step}")
        pair.close()
    finally:
        Pair.close_all()


def test_gradients_of_several_dtypes() -> None:
    """Torch stacks the norms dtype by dtype, and a factor in fp32 does not widen a product."""

    def make() -> Any:
        torch.manual_seed(0)
        layers = [nn.Linear(128, 128, bias=bool(i % 2)) for i in range(6)]
        return nn.Sequential(
            *(layer.bfloat16() if i in (1, 2, 4) else layer for i, layer in enumerate(layers))
        )

    def script(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 128).repeat(2, 1) * (step + 1)
            for layer in model:
                x = layer(x.to(layer.weight.dtype))
            x.float().square().sum().backward()
            report("norm", clip(model))
            optimizer.step()

    check_same(make, script, share=0.25)


class Own(torch.optim.AdamW):
    """Not torch's own: it does not wait."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Halves(p, lr=0.1),
        lambda p: Own(p, lr=0.01),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ],
)
def test_updates_that_do_not_wait_stream_or_are_cut(make: Any) -> None:
    """And what is left in the gradients is torch's, too."""
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = make(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            report("norm", clip(model))
            optimizer.step()
            report("norm after the step", clip(model, 3e-4))
            report("grads", [p.grad for p in model.parameters()])

    check_same(lambda: models.make_mlp().model, script, share=0.25)


def test_homes_on_disk(tmp_path: Any) -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            report("norm", clip(model))
            optimizer.step()

    check_same(lambda: models.make_mlp().model, script, share=0.25, disk=tmp_path, host_budget=2**19)


def test_a_model_that_fits() -> None:
    case = models.make_mlp()

    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            report("norm", clip(model))
            optimizer.step()

    check_same(lambda: models.make_mlp().model, script, device_budget="64MiB", checks=checks(page_all=False))


# -- between clipping and the step ---------------------------------------------------------------------------------


def again(model: Any, optimizer: Any) -> Any:
    return clip(model, 3e-4)


def torchs_own(model: Any, optimizer: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 3e-4, foreach=False)


def another_backward(model: Any, optimizer: Any) -> Any:
    return backward(model, 9)


def set_to_none(model: Any, optimizer: Any) -> Any:
    weight(model).grad = None


def assign(model: Any, optimizer: Any) -> Any:
    weight(model).grad = weight(model, 1).grad.clone()


def write_data(model: Any, optimizer: Any) -> Any:
    weight(model).grad.data.add_(1)


def assign_data(model: Any, optimizer: Any) -> Any:
    weight(model).grad.data = weight(model, 1).grad.data * 2


def differentiate_through(model: Any, optimizer: Any) -> Any:
    x = torch.ones(96, requires_grad=True)
    (weight(model).grad @ x).sum().backward()
    return x.grad


def unscale(model: Any, optimizer: Any) -> Any:
    grads = [p.grad for p in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.full((1,), 0.5))


def channels_last(model: Any, optimizer: Any) -> Any:
    model.to(torch.float32)
    return [p.grad for p in model.parameters()]


def pickled(model: Any, optimizer: Any) -> Any:
    buffer = io.BytesIO(pickle.dumps(weight(model).grad))
    return pickle.load(buffer)


def zero_in_place(model: Any, optimizer: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)


def keep_over_zero_grad(model: Any, optimizer: Any) -> Any:
    kept = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    backward(model, 7)
    return kept


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda m, o: [p.grad for p in m.parameters()],
    "one of them": lambda m, o: weight(m).grad,
    "row": lambda m, o: weight(m).grad[3],
    "data": lambda m, o: weight(m).grad.data.clone(),
    "numpy": lambda m, o: numpy_of(weight(m).grad),
    "clone": lambda m, o: weight(m).grad.clone(),
    "detached": lambda m, o: weight(m).grad.detach().clone(),
    "norm": lambda m, o: nn.utils.get_total_norm([p.grad for p in m.parameters()], foreach=False),
    "foreach": lambda m, o: torch._foreach_mul([p.grad for p in m.parameters()], 2.0),
    "deep copy of the gradient": lambda m, o: copy.deepcopy(weight(m).grad),
    "deep copy of the model": lambda m, o: [p.grad for p in copy.deepcopy(m).parameters()],
    "into another": lambda m, o: torch.zeros(96, 96).copy_(weight(m).grad),
    "mul_": lambda m, o: weight(m).grad.mul_(0.5),
    "view written": lambda m, o: weight(m).grad[3].fill_(1),
    "clip again": again,
    "clip by torch": torchs_own,
    "clip values": lambda m, o: nn.utils.clip_grad_value_(m.parameters(), 1e-4),
    **{
        f.__name__: f
        for f in (
            another_backward, set_to_none, assign, write_data, assign_data, differentiate_through,
            unscale, channels_last, pickled, zero_in_place, keep_over_zero_grad,
        )
    },
}  # fmt: skip


@pytest.mark.pairwise(name=LOOKS, when=["before the step", "after it"], budget=BUDGETS)
def test_who_looks_sees_clipped_gradients(name: str, when: str, budget: str) -> None:
    """The update waits with what clipping owed when step() was called, whatever becomes of the gradient."""

    def before(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step in range(4, 6):
            optimizer.zero_grad()
            backward(model, step)
            clip(model)
            expect_owed(model)
            report(name, LOOKS[name](model, optimizer))
            report("grads", [p.grad for p in model.parameters()])
            optimizer.step()

    def after(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step in range(4, 6):
            optimizer.zero_grad()
            backward(model, step)
            clip(model)
            optimizer.step()
            expect_waiting(model)
            expect_owed(model)
            report(name, LOOKS[name](model, optimizer))
            report("grads", [p.grad for p in model.parameters()])
            report("values", list(model.parameters()))

    check_corner(before if when == "before the step" else after, budgets=(budget,), steps_after=1)


@pytest.mark.parametrize("name", LOOKS)
def test_looks_of_which_nobody_looks_further(name: str) -> None:
    """The step itself finds what the look has left."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 4)
        clip(model)
        LOOKS[name](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        report("values", list(model.parameters()))

    check_corner(corner, budgets=BUDGETS[:1])


@pytest.mark.pairwise(name=HELD, zeroes=[False, True], budget=BUDGETS)
def test_what_was_taken_before_clipping_shows_it(name: str, zeroes: bool, budget: str) -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 4)
        held = HELD[name](model)
        report("norm", clip(model))
        report("clipped", held)
        report("norm again", clip(model, 3e-4))
        report("clipped again", held)
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        report("after the step", held)
        model(batch(0))
        report("after a forward", held)

    check_corner(corner, budgets=(budget,))


def test_a_graph_over_a_gradient_is_refused_once_that_is_clipped() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 4)
        x = torch.ones(96, requires_grad=True)
        loss = (weight(model).grad @ x).sum()
        report("norm", clip(model))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    check_corner(corner, expects_waiting=False)


def test_closing_keeps_clipped_gradients() -> None:
    def script(model: Any, report: Report) -> None:
        optimizer = make_adamw(model)
        for step in range(3):
            optimizer.zero_grad()
            train_step(case, model, step)
            report("norm", clip(model))
            if step < 2:
                optimizer.step()

    case = models.make_mlp()
    paged = check_same(lambda: models.make_mlp().model, script, close=False)
    expect_owed(paged)
    paged.pager.close()
    plain = models.make_mlp().model
    script(plain, lambda name, value: None)
    check_equal(
        [p.grad for p in plain.parameters()], copied([p.grad for p in paged.parameters()]), "gradients"
    )


def test_a_step_without_a_backward_between_two_clippings() -> None:
    """Each update waits with its own factor."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        backward(model, 4)
        for max_norm in (0.05, 0.01, 0.005):
            report("norm", clip(model, max_norm))
            optimizer.step()
        report("values", list(model.parameters()))
        report("grads", [p.grad for p in model.parameters()])

    check_corner(corner)


def test_parameters_that_are_not_used_in_every_step() -> None:
    """Their updates wait over several clippings of the others."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for step, used in enumerate((NUM_LAYERS, 3, 4, NUM_LAYERS, 2), 4):
            model.used = used
            optimizer.zero_grad()
            backward(model, step)
            report("norm", clip(model))
            optimizer.step()
        model.used = NUM_LAYERS
        report("values", list(model.parameters()))

    check_corner(corner)


# -- refusals and errors -------------------------------------------------------------------------------------------


def test_updates_in_backward_leave_nothing_to_clip() -> None:
    model = manage(models.make_mlp().model, update_at="backward")
    with pytest.raises(ConfigError, match=r"update_at='backward'.*update_at='step'"):
        model.pager.clip_grad_norm_(1.0)
    model.pager.close()


def test_a_closed_handle_does_not_clip() -> None:
    model = manage(models.make_mlp().model)
    handle = model.pager
    handle.close()
    with pytest.raises(PagerClosed):
        handle.clip_grad_norm_(1.0)


def test_norms_that_are_not_finite() -> None:
    """They raise if asked to, with the gradients as they were; else everything becomes NaN or 0, as in torch."""

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        for value in (float("nan"), float("inf")):
            optimizer.zero_grad()
            backward(model, 4)
            with torch.no_grad():
                weight(model).grad[1, 1] = value
            with pytest.raises(RuntimeError, match="non-finite"):
                clip(model, error_if_nonfinite=True)
            report("kept", [p.grad for p in model.parameters()])
            report("norm", clip(model))
            report("grads", [p.grad for p in model.parameters()])
        optimizer.zero_grad()
        backward(model, 5)
        report("finite", clip(model, error_if_nonfinite=True))

    check_corner(corner)


def test_odd_arguments_do_what_they_do_in_torch() -> None:
    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        optimizer.zero_grad()
        report("no gradients", clip(model))
        with pytest.raises((TypeError, ValueError)):
            clip(model, "much")  # type: ignore[arg-type]
        backward(model, 4)
        with pytest.raises((TypeError, ValueError)):
            clip(model, None)  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            clip(model, norm_type="round")
        report("unharmed", [p.grad for p in model.parameters()])
        report("as a string", clip(model, "0.5", norm_type="2"))  # type: ignore[arg-type]
        report("as a tensor", clip(model, torch.tensor(0.25)))  # type: ignore[arg-type]
        report("negative", clip(model, -1.0))
        report("grads", [p.grad for p in model.parameters()])
        report("not a number", clip(model, float("nan")))
        report("NaN", [p.grad for p in model.parameters()])

    check_corner(corner, expects_waiting=False)


# -- interruptions -------------------------------------------------------------------------------------------------


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt; in the background of a shell it would arrive ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def step_and_use(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    model(batch(5))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("call", [1, 3, 6])
def test_an_interrupted_update_is_finished_with_its_factor(
    call: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In step() or in the next forward; a look at the gradients comes before the rest."""
    make = functools.partial(Own if own else torch.optim.AdamW, lr=0.01)
    original = Staging.write_back
    calls = 0

    def write_back(staging: Staging, *args: Any) -> None:
        nonlocal calls
        original(staging, *args)
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)

    def corner(model: Any, optimizer: torch.optim.Optimizer, report: Report) -> None:
        nonlocal calls
        optimizer.zero_grad()
        backward(model, 4)
        clip(model)
        if hasattr(model, "pager"):
            calls = 0
            with monkeypatch.context() as patch:
                patch.setattr(Staging, "write_back", write_back)
                with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                    step_and_use(model, optimizer)
            assert bool(pending(model)) is not own
        else:
            optimizer.step()
        report("norm", clip(model, 3e-4))
        report("grads", [p.grad for p in model.parameters()])
        report("values", list(model.parameters()))

    check_corner(corner, lambda model: make(model.parameters()), expects_waiting=not own)
