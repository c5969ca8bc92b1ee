"""The step on the twin shows the accesses of the real step, in order, and leaves the user's model alone."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pager.graph.access import METADATA, AccessRecorder, hooks_beneath
from pager.graph.access_trace import Phase
from pager.graph.capture import Capture, capture, run_step
from pager.graph.twin import REAL_LIMIT_BYTES
from tests import models

Rows = npt.NDArray[Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Step = Callable[[nn.Module, Inputs], None]


def observe_by_recorder(model: nn.Module, inputs: Inputs, step: Step) -> Rows:
    """The accesses of one real step on the CPU, as the recorder sees them on real tensors."""
    recorder = AccessRecorder()
    for segment, parameter in enumerate(list(model.parameters())):
        recorder.adopt(parameter, segment)
    recorder.active = True
    step(model, inputs)
    return recorder.array()


# Each takes a model, its inputs and the step to run, and gives rows of ACCESS_DTYPE. A parameter's segment is
# its place in model.parameters().
OBSERVERS: dict[str, Callable[[nn.Module, Inputs, Step], Rows]] = {"recorder": observe_by_recorder}


def capture_all(model: nn.Module, inputs: Inputs, **options: Any) -> Capture:
    managed = {parameter: segment for segment, parameter in enumerate(model.parameters())}
    return capture(model, managed, *inputs, **options)


def plain_step(model: nn.Module, inputs: Inputs) -> None:
    run_step(model, *inputs)


def tokens(*shape: int) -> Tensor:
    return torch.randint(models.VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def make_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(vocab_size=models.VOCABULARY, **sizes, **heads)
    return transformers.LlamaForCausalLM(config).train()


def make_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=models.VOCABULARY, **sizes)
    return transformers.GPT2LMHeadModel(config).train()


HUGGING_FACE = {"llama": make_llama, "gpt2": make_gpt2}


class Masked(nn.Module):
    """Decides on the values of an integer mask, as many models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        x = self.a(x)
        if not bool(mask.all()):
            x = self.b(x * mask[:, None])
        return x * torch.rand(1) * random.random()


class NeedsDevice(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if x.is_meta:
            raise NotImplementedError("no meta kernel here")
        return self.b(self.a(x))


class Escapes(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.a(x) * float(x.detach().numpy().sum())


def masked_inputs(full: bool = False) -> Inputs:
    mask = torch.ones(3, dtype=torch.long)
    mask[0] = int(full)
    return (torch.randn(3, 8, generator=torch.Generator().manual_seed(2)),), {"mask": mask}


@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", models.BUILDERS)
def test_order_equals_that_of_a_real_step(
    name: str, training: bool, observe: Callable[[nn.Module, Inputs, Step], Rows]
) -> None:
    case, again = models.BUILDERS[name](), models.BUILDERS[name]()
    inputs = case.make_batch(0)

    def step(model: nn.Module, inputs: Inputs) -> None:
        args, kwargs = inputs
        case.loss(model(*args, **kwargs), inputs).backward()

    captured = capture_all(case.model.train(training), inputs)
    real = observe(again.model.train(training), inputs, step)
    assert captured.way == ("fake" if name == "lstm" else "meta"), captured.reason
    np.testing.assert_array_equal(captured.rows, real)
    assert (captured.rows["phase"] == Phase.GRADIENT).sum() >= len(list(case.model.parameters()))


@pytest.mark.parametrize("observe", OBSERVERS.values(), ids=OBSERVERS.keys())
@pytest.mark.parametrize("checkpointing", models.CHECKPOINTING)
@pytest.mark.parametrize("batch", ["plain", "labels", "mask"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_order_equals_for_hugging_face(
    name: str, batch: str, checkpointing: str, observe: Callable[[nn.Module, Inputs, Step], Rows]
) -> None:
    ids = tokens(2, 16)
    kwargs = {"input_ids": ids}
    if batch != "plain":
        kwargs["labels"] = ids
    if batch == "mask":
        kwargs["attention_mask"] = (torch.arange(16) > torch.tensor([[3], [0]])).long()

    def build() -> nn.Module:
        model: Any = HUGGING_FACE[name]()
        if checkpointing != "none":
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": checkpointing == "reentrant"})
            model.config.use_cache = False
        return model

    captured = capture_all(build(), ((), kwargs))
    real = observe(build(), ((), kwargs), plain_step)
    assert captured.way in ("meta", "fake"), captured.reason
    np.testing.assert_array_equal(captured.rows, real)
    assert (Phase.RECOMPUTE in captured.rows["phase"]) == (checkpointing != "none")


def test_checkpointing_shows_recomputation_with_and_without_nesting() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def inner(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: torch.tanh(self.b(y)), torch.tanh(self.a(x)), use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model = Nested()
    inputs: Inputs = ((torch.randn(3, 8, requires_grad=True),), {})
    captured = capture_all(model, inputs)
    real = observe_by_recorder(model, inputs, plain_step)
    np.testing.assert_array_equal(captured.rows, real)
    recomputed = captured.rows[captured.rows["phase"] == Phase.RECOMPUTE]["segment"]
    assert set(recomputed) == {0, 1, 2, 3}
    assert inputs[0][0].grad is not None  # the real step's; the twin had inputs of its own


def test_nothing_of_the_users_changes() -> None:
    model, inputs = Masked(), masked_inputs()
    model.a.weight.grad = torch.ones(8, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    captured = capture_all(model, inputs)
    assert captured.way == "meta"
    assert model.calls == 0
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == repr(np.random.get_state())  # noqa: NPY002
    assert torch.equal(model.a.weight.grad, torch.ones(8, 8))
    assert model.b.weight.grad is None
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, before[name])
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_parameters_are_asked_for_metadata_only() -> None:
    class Phantom(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.stride:
                return (8, 1) if args[0].dim() == 2 else (1,)
            if func not in METADATA:
                raise AssertionError(f"{func} on a phantom")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    model, inputs = Masked(), masked_inputs()
    expected = capture_all(model, inputs)
    for parameter in model.parameters():
        parameter.data = torch.full((), float("nan")).expand(parameter.shape)
        parameter.__class__ = Phantom
    captured = capture_all(model, inputs)
    assert captured.way == "meta", captured.reason
    np.testing.assert_array_equal(captured.rows, expected.rows)


def test_control_flow_over_integers_is_followed() -> None:
    with_both, with_one = (capture_all(Masked(), masked_inputs(full)) for full in (False, True))
    assert with_both.way == with_one.way == "meta"
    assert set(with_both.rows["segment"]) == {0, 1, 2, 3}
    assert set(with_one.rows["segment"]) == {0, 1}


def test_a_large_integer_result_has_no_data() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.seen = [0]

        def forward(self, x: Tensor, seen: list[bool]) -> Tensor:
            length = 1 + int(REAL_LIMIT_BYTES**0.5)
            index = torch.arange(length)
            seen.append((index[:, None] >= index[None, :]).is_meta)
            seen.append(index.is_meta)
            return self.a(x)

    class Shared:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("shared objects are not copied")

        def __init__(self) -> None:
            self.values: list[bool] = []
            self.append = self.values.append

    seen = Shared()
    captured = capture_all(Wide(), ((torch.randn(2, 4), seen), {}), shared=[seen])
    assert captured.way == "meta", captured.reason
    assert seen.values == [True, False]


def test_fake_tensors_where_meta_fails() -> None:
    captured = capture_all(NeedsDevice(), masked_inputs())
    assert captured.way == "fake"
    assert captured.reason == "meta: NotImplementedError: no meta kernel here"
    real = observe_by_recorder(NeedsDevice(), masked_inputs(), plain_step)
    np.testing.assert_array_equal(captured.rows, real)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_is_followed_on_fake_tensors(inside: bool) -> None:
    class Casts(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                return self.b(self.a(x))

    plain = capture_all(NeedsDevice(), masked_inputs())
    with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        captured = capture_all(Casts(), masked_inputs())
        real = observe_by_recorder(Casts(), masked_inputs(), plain_step)
    assert captured.way == "fake"
    assert "autocast" in str(captured.reason)
    np.testing.assert_array_equal(captured.rows, real)
    # Backward reads the cast copies, not the weights.
    assert Phase.BACKWARD in plain.rows["phase"]
    assert Phase.BACKWARD not in captured.rows["phase"]


def test_a_model_that_cannot_be_captured_is_left_to_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pager.graph.capture"):
        captured = capture_all(Escapes(), masked_inputs())
    assert captured.way == "recorded"
    assert len(captured.rows) == captured.num_ticks == captured.peak_activation_bytes == 0
    reason = str(captured.reason)
    assert "meta: " in reason
    assert "fake: " in reason
    assert "\n" not in reason
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "the first step is recorded" in caplog.text


class Suspended(nn.Module):
    """Fails on meta with hooks in force that end when its frame does, as a checkpoint of torch 2.6 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    @staticmethod
    def hooks() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
            yield

    def forward(self, x: Tensor) -> Tensor:
        suspended = self.hooks()
        next(suspended)
        if self.layer.weight.is_meta:
            raise RuntimeError("not on meta")
        suspended.close()  # type: ignore[attr-defined]
        result: Tensor = self.layer(x)
        return result


def test_a_failed_attempt_leaves_no_hooks_in_force() -> None:
    model = Suspended()
    managed = {param: index for index, param in enumerate(model.parameters())}
    gc.collect()
    gc.disable()
    try:
        outer = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed)
        with outer:
            found = capture(model, managed, (torch.ones(2, 64),))
            assert hooks_beneath() == (outer.pack_hook, outer.unpack_hook)
    finally:
        gc.enable()
    assert found.way == "fake"
    assert hooks_beneath() is None


def test_what_cannot_be_copied_is_recorded_too() -> None:
    model: Any = Masked()
    model.lock = threading.Lock()
    captured = capture_all(model, masked_inputs())
    assert captured.way == "recorded"
    assert "TypeError" in str(captured.reason)


def test_one_line_says_which_way(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pager.graph.capture"):
        captured = capture_all(Masked(), masked_inputs())
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"captured {len(captured.rows)} accesses in {captured.num_ticks} ticks by a step on meta tensors"
    ]


def test_shared_objects_and_their_hooks_stay_with_the_user() -> None:
    class Handle:
        def __init__(self) -> None:
            self.lock, self.begun = threading.Lock(), 0

        def begin(self, *_: Any) -> None:
            self.begun += 1

    model: Any = Masked()
    handle = Handle()
    model.pager = handle
    model.register_forward_pre_hook(handle.begin)
    captured = capture_all(model, masked_inputs(), shared=[handle])
    assert captured.way == "meta", captured.reason
    assert handle.begun == 0
    assert len(model._forward_pre_hooks) == 1


def test_only_managed_parameters_are_traced_and_frozen_ones_have_no_gradient() -> None:
    model: Any = Masked()
    inputs = masked_inputs()
    model.a.weight.requires_grad_(False)
    captured = capture(model, {model.a.weight: 5, model.b.bias: 2}, *inputs)
    assert set(captured.rows["segment"]) == {5, 2}
    gradients = captured.rows[captured.rows["phase"] == Phase.GRADIENT]
    assert gradients["segment"].tolist() == [2]


def test_tied_parameters_are_one_segment() -> None:
    case = models.make_decoder()
    model: Any = case.model
    captured = capture(model, {model.embed.weight: 0}, *case.make_batch(0))
    phases = captured.rows["phase"].tolist()
    assert phases == [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT]
    assert captured.num_ticks == 4


def test_writes_are_marked() -> None:
    class Renormalizes(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.clamp_(-1, 1)
            return self.a(x)

    rows = capture_all(Renormalizes(), masked_inputs()).rows
    forward = rows[rows["phase"] == Phase.FORWARD]
    assert forward["write"].tolist() == [True, False, False]


@pytest.mark.parametrize("output", ["tensor", "loss", "tuple", "dataclass", "integers"])
def test_loss_of_any_output(output: str) -> None:
    @dataclasses.dataclass
    class Output:
        first: Tensor
        rest: dict[str, Any]
        loss: Tensor | None = None

    class Returns(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            a, b = self.a(x), self.b(x)
            return {
                "tensor": a,
                "loss": Output(b, {}, loss=a.mean()),
                "tuple": (a, [b, mask], None, "text"),
                "dataclass": Output(a, {"b": b}),
                "integers": mask,
            }[output]

    captured = capture_all(Returns(), masked_inputs())
    gradients = set(captured.rows[captured.rows["phase"] == Phase.GRADIENT]["segment"])
    both, one = {0, 1, 2, 3}, {0, 1}
    expected = {"tensor": one, "loss": one, "tuple": both, "dataclass": both, "integers": set()}
    assert captured.way == "meta", captured.reason
    assert gradients == expected[output]


def test_flops_and_bytes_fall_on_their_ticks() -> None:
    model = nn.Linear(16, 32, bias=False)
    captured = capture_all(model, ((torch.randn(8, 16, requires_grad=True),), {}))
    assert captured.rows["phase"].tolist() == [Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT]
    product = 2 * 8 * 16 * 32
    # Backward computes the gradient of the weight before it reads the weight, or after: it is two products.
    assert captured.flops[0] in (product, 2 * product)
    assert captured.flops.sum() == 3 * product
    assert captured.moved_bytes[0] >= 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_peak_activations_of_a_chain() -> None:
    width, depth, batch = 64, 6, 32
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Sigmoid()) for _ in range(depth)))
    captured = capture_all(model, ((torch.randn(batch, width),), {}))
    one = 4 * batch * width
    # Each sigmoid keeps its output; at most a few intermediates and one weight's gradient live besides.
    assert depth * one <= captured.peak_activation_bytes <= (depth + 4) * one + 4 * width * (width + 1)
    # By tick they rise through forward and fall through backward, to the same peak.
    live, phase = captured.live_bytes, captured.rows["phase"]
    assert len(live) == captured.num_ticks
    assert live.max() == captured.peak_activation_bytes
    forward = live[captured.rows["tick"][phase == Phase.FORWARD]]
    assert np.all(np.diff(forward) >= 0)
    assert live[-1] < captured.peak_activation_bytes / 2


def test_checkpointing_lowers_the_peak() -> None:
    peaks = {}
    for checkpointing in models.CHECKPOINTING:
        case = models.make_decoder(checkpointing)
        peaks[checkpointing] = capture_all(case.model, case.make_batch(0)).peak_activation_bytes
    assert peaks["reentrant"] < 0.7 * peaks["none"]
    assert peaks["nonreentrant"] < 0.7 * peaks["none"]


def test_strides_of_the_twin_are_the_users() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 8).t())
            self.c = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.e = nn.Parameter(torch.zeros(0, 3))
            self.s = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            contiguous = self.w.is_contiguous() or self.c.is_contiguous()
            y = F.linear(x, self.w) if not contiguous else x.sum()
            return y.sum() * self.s + self.c.sum() + self.e.sum()

    model = Strided()
    inputs: Inputs = ((torch.randn(3, 4),), {})
    captured = capture_all(model, inputs)
    np.testing.assert_array_equal(captured.rows, observe_by_recorder(model, inputs, plain_step))
    assert captured.way == "meta", captured.reason


def test_bad_managed_is_refused() -> None:
    with pytest.raises(ValueError, match="managed parameter"):
        capture(Masked(), {}, *masked_inputs())
    with pytest.raises(ValueError, match="in the model"):
        capture(Masked(), {nn.Parameter(torch.zeros(1)): 0}, *masked_inputs())
