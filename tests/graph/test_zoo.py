"""Architectures that people train: how each is captured, and that the door then sees just the captured order.

Each model trains two steps on the simulated device with less memory than its state needs, and must end with the bits of
the same steps in plain torch. What is compared is each access of forward and backward: the tick it shares with others,
the tensor, the pages, whether it writes, the phase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pager
from pager.config import Checks
from pager.graph.access_trace import AccessRow, AccessTrace, Phase
from pager.graph.capture import capture
from pager.planning import renumbered
from tests import models, zoo
from tests.equality.training import collect, same_bits, state_bytes

NUM_STEPS = 2

CAPTURED = {name: "captured on meta" for name in zoo.ZOO if name not in ("mixtral_float", "mixtral_loop")}
# Whether a mask hides anything is asked of its values, once it has been sent to the model's device: meta has none. Of a
# fake tensor `transformers` does not ask it.
CAPTURED["bert"] = "captured on fake tensors"

# The share of the state that is the device budget.
SHARE = 0.25

Access = tuple[int, str, str, int, int, bool, str]


@dataclass
class Run:
    """What a run leaves. Of a managed one also, by step: the trace before it, what the door saw, deviations so far."""

    losses: list[Tensor] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    way: str = ""
    note: str = ""
    expected: list[list[Access] | None] = field(default_factory=list)
    seen: list[list[Access]] = field(default_factory=list)
    deviations: list[int] = field(default_factory=list)
    statistics: Any = None


def accesses(rows: Iterable[AccessRow], segments: Any) -> list[Access]:
    """Forward and backward, readable; ticks from 0."""
    return [
        (
            row.tick,
            segments[row.segment].kind,
            segments[row.segment].name,
            row.first_page,
            row.num_pages,
            bool(row.write),
            Phase(row.phase).name,
        )
        # Updates that wait for their parameter's next use stand in the forward.
        for row in renumbered([row for row in rows if row.phase < Phase.UPDATE])
    ]


def rows_of(trace: AccessTrace) -> list[AccessRow]:
    columns = (trace.tick, trace.segment, trace.first_page, trace.num_pages, trace.write, trace.phase)
    return [AccessRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def train(case: models.Case, *, share: float | None = None) -> Run:
    """Two steps; managed where there is a ``share`` of the state for the device."""
    run = Run()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.01)
    if share is not None:
        args, kwargs = case.make_batch(0)
        pager.manage(
            case.model,
            optimizer,
            device="cpu",
            page_size="16KiB",
            device_budget=int(share * state_bytes(case.model, 2)),
            example_inputs=args or kwargs,
            checks=Checks(streams="late", happens_before=True, poison=True, daemon="inline"),
        )
    handle: Any = getattr(case.model, "pager", None)
    try:
        _steps(case, optimizer, run, handle)
        run.tensors = dict(collect(case.model, optimizer))
        run.statistics = handle and handle.statistics()
    finally:
        if handle is not None:
            handle.close()
    return run


def _steps(case: models.Case, optimizer: torch.optim.Optimizer, run: Run, handle: Any) -> None:
    runtime = handle and handle._runtime  # no public face shows single accesses
    if runtime:
        run.way, run.note = runtime.planner.way, runtime.planner.note
    torch.manual_seed(7)  # of dropout: capture and pager must not have drawn anything
    for step in range(NUM_STEPS):
        if runtime:
            segments, trace = runtime.space.segments, runtime.planner.trace
            run.expected.append(None if trace is None else accesses(rows_of(trace), segments))
        args, kwargs = batch = case.make_batch(step)
        loss = case.loss(case.model(*args, **kwargs), batch)
        loss.backward()
        run.losses.append(loss.detach().clone())
        if runtime:
            run.seen.append(accesses(runtime.engine.timeline.recorded, segments))
            run.deviations.append(handle.statistics().deviations)
        optimizer.step()
        if step < NUM_STEPS - 1:
            optimizer.zero_grad()


def make(name: str) -> Callable[[], models.Case]:
    family = name.split("_")[0]
    if family in zoo.HUGGING_FACE:
        # Before 5 a mixture's experts were modules of their own, and nothing but a loop ran them.
        pytest.importorskip("transformers", minversion="5.0" if family == "mixtral" else None)
    return zoo.ZOO[name]


def managed_and_plain(build: Callable[[], models.Case], share: float) -> Run:
    """The managed run, after it was found equal in every bit to the plain one, and to have paged."""
    plain, run = train(build()), train(build(), share=share)
    assert [same_bits(*pair) for pair in zip(run.losses, plain.losses, strict=True)] == [True] * NUM_STEPS
    assert list(run.tensors) == list(plain.tensors)
    assert [name for name, value in plain.tensors.items() if not same_bits(run.tensors[name], value)] == []
    assert run.statistics.page_in_bytes > 0
    assert run.statistics.page_out_bytes > 0
    assert run.statistics.peak_resident_bytes <= share * state_bytes(build().model, 2)
    return run


@pytest.mark.parametrize("name", CAPTURED)
def test_the_door_sees_the_captured_order(name: str) -> None:
    run = managed_and_plain(make(name), SHARE)
    assert run.way == CAPTURED[name], run.note
    assert run.seen[0] == run.expected[0]
    assert run.seen[1] == run.expected[1] == run.expected[0]
    assert run.deviations == [0, 0]
    assert {"FORWARD", "BACKWARD", "GRADIENT"} == {access[-1] for access in run.seen[0]}


def test_bert_without_a_mask_needs_no_values() -> None:
    run = train(_without_mask(make("bert")()), share=SHARE)
    assert run.way == "captured on meta", run.note
    assert run.seen[0] == run.seen[1] == run.expected[0]


def _without_mask(case: models.Case) -> models.Case:
    def make_batch(step: int) -> zoo.Batch:
        args, kwargs = case.make_batch(step)
        return args, {name: value for name, value in kwargs.items() if name != "attention_mask"}

    return models.Case(case.name, case.model, make_batch, case.loss)


def test_a_mixture_in_single_precision_is_recorded() -> None:
    """Torch's stand-in for `grouped_mm` refuses fp32 on meta and on fake tensors, the kernel of the CPU does not.

    That is no fault of the inputs, so `manage()` takes the model. Its first step has no trace; it is the trace of the
    second, and just what the captured step of the same model in bf16 is.
    """
    run = managed_and_plain(make("mixtral_float"), SHARE)
    assert run.way == "recorded first step"
    assert run.expected[0] is None
    assert run.seen[1] == run.expected[1] == run.seen[0]
    assert run.deviations == [0, 0]
    half = train(make("mixtral")(), share=SHARE).expected[0]
    assert half is not None
    # A page holds twice as many elements of it.
    assert [(*row[:4], *row[5:]) for row in run.seen[0]] == [(*row[:4], *row[5:]) for row in half]


def test_flops_of_experts_are_those_of_the_chosen_ones() -> None:
    """Two of eight experts work as hard as two of four, and half as hard as four of eight."""
    flops = {}
    for num_experts, num_chosen in ((4, 2), (8, 2), (8, 4)):
        make("mixtral")
        sizes = {"num_local_experts": num_experts, "num_experts_per_tok": num_chosen}
        case = zoo.make_hugging_face("mixtral", experts="grouped_mm", dtype=torch.bfloat16, sizes=sizes)
        args, kwargs = case.make_batch(0)
        found = capture(case.model, {p: i for i, p in enumerate(case.model.parameters())}, args, kwargs)
        flops[num_experts, num_chosen] = found.flops.sum()
    # 32 tokens, 2 layers; forward and twice as much in backward; gate, up and down of each expert are 128 x 64.
    of_chosen = 3 * 2 * 32 * 2 * (3 * 128 * 64)
    routing = 3 * 2 * 32 * 2 * 128
    assert flops[8, 4] - flops[8, 2] == 2 * of_chosen
    assert flops[8, 2] - flops[4, 2] == (8 - 4) * routing


def visits_of(case: models.Case) -> list[list[int]]:
    """A list to which each forward adds how many experts each layer of the case's model ran."""
    counts: list[list[int]] = []

    def count(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        chosen = output[2]
        if type(chosen) is not Tensor or chosen.is_meta:
            return  # the twin, which carries a copy of this hook
        if layer == 0:
            counts.append([])
        counts[-1].append(len(chosen.unique()))

    routers = [module for name, module in case.model.named_modules() if name.endswith("mlp.gate")]
    for layer, router in enumerate(routers):
        router.register_forward_hook(functools.partial(count, layer))
    return counts


def test_a_loop_over_experts_differs_by_the_experts_that_have_tokens() -> None:
    """Which experts run depends on the router's values, which no capture knows: the first step is recorded.

    Each expert that has a token is one access to each of the layer's two tensors of experts in forward (its weight is a
    view, `w[i]`), and one in backward, which reads what autograd saved of the view. So a later step with other visits
    differs from the recording in the number of just these rows, and is off the trace in at most as many accesses.
    """

    def build() -> models.Case:
        make("mixtral_loop")
        return zoo.make_hugging_face(
            "mixtral", experts="eager", batch=1, length=3, sizes={"num_local_experts": 8}
        )

    case = build()
    counts = visits_of(case)
    run = managed_and_plain(build, SHARE)
    seen = train(case, share=SHARE).seen
    assert run.way == "recorded first step"
    assert run.expected[0] is None
    assert run.expected[1] == run.seen[0]
    assert counts[0] != counts[1]  # or this test would show nothing
    assert seen == run.seen
    for rows, visits in zip(seen, counts, strict=True):
        for layer, num_visits in enumerate(visits):
            for tensor in ("gate_up_proj", "down_proj"):
                name = f"model.layers.{layer}.mlp.experts.{tensor}"
                found = [row[-1] for row in rows if row[1:3] == ("parameter", name)]
                assert found == ["FORWARD"] * num_visits + ["BACKWARD"] * num_visits
    first, second = ([row[1:] for row in rows if ".experts." not in row[2]] for rows in seen)
    assert first == second
    fewer_or_more = 4 * sum(abs(a - b) for a, b in zip(*counts, strict=True))
    assert 0 < run.deviations[1] - run.deviations[0] <= fewer_or_more
