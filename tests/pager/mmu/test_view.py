"""Views of paged weights: autograd keeps no frames of theirs, and all else is as of ordinary tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pager.errors import BudgetError
from pager.graph.access_trace import Phase
from pager.mmu import mmu as mmu_module
from tests.cases.same import Report, batch_loss, check_same, manage
from tests.models import BATCH, VOCABULARY, Case

WIDTH = 96


class Products(nn.Module):
    """``multiply(x, weight)`` layer by layer, (batch, WIDTH) in and out."""

    def __init__(
        self, multiply: Callable[[Tensor, Tensor], Tensor], depth: int = 6, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.multiply = multiply
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / WIDTH**0.5) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(self.multiply(x, weight))
        return x


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class TransposedBlock(nn.Module):
    """A decoder's block of ``x @ w.t()`` alone, (batch, length, width) in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Parameter(torch.randn(3 * width, width) / width**0.5)
        self.project = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 2 * width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = F.layer_norm(x, (width,)) @ self.qkv.t()
        query, key, value = qkv.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ self.project.t()
        return x + F.gelu(F.layer_norm(x, (width,)) @ self.up.t()) @ self.down.t()


class Experts(nn.Module):
    """Experts with one weight for all, ``w[i]``; each token goes to the better of a fixed two."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(num_experts, width))
        self.up = nn.Parameter(torch.randn(num_experts, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(x @ self.router.t(), -1)
        mixed = torch.zeros_like(x)
        for index in range(len(self.up)):
            hidden = F.silu(F.linear(x, self.up[index]))
            mixed = mixed + scores[..., index, None] * torch.einsum("bli,oi->blo", hidden, self.down[index])
        return x + mixed


class Language(nn.Module):
    """Blocks between a table of tokens and a tied head, ``x @ w.t()``; (batch, length) int64 in."""

    def __init__(self, blocks: list[nn.Module], width: int, checkpointing: str) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.table = nn.Parameter(torch.randn(VOCABULARY, width) * 0.1)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens]
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x @ self.table.t()


def make_decoder(checkpointing: str = "none") -> Case:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [TransposedBlock(64, 4) for _ in range(12)]
    return _language("transposed decoder", blocks, 64, checkpointing)


def make_mixture(checkpointing: str = "none") -> Case:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [Experts(64, 4) for _ in range(12)]
    return _language("mixture", blocks, 64, checkpointing)


def _language(name: str, blocks: list[nn.Module], width: int, checkpointing: str) -> Case:
    def make_batch(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        return (torch.randint(VOCABULARY, (BATCH, 12), generator=generator),), {}

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[0][0][:, 1:].flatten())

    return Case(name, Language(blocks, width, checkpointing), make_batch, loss)


def leased(model: Any) -> list[str]:
    """The paged tensors with a lease that is alive."""
    runtime = model.pager._runtime
    return [
        binding.name
        for binding in runtime.mmu.bindings.values()
        if binding.fixed is None and runtime.engine.in_use(binding.segment)
    ]


def report_leases(model: Any, report: Report, expected: list[str]) -> None:
    """Report what is leased; of a plain model what ought to be."""
    report("leased", leased(model) if hasattr(model, "pager") else expected)


# -- training within a quarter of the weights ------------------------------------------------------


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "nonreentrant"])
@pytest.mark.parametrize("make", [make_decoder, make_mixture])
def test_what_multiplies_with_views_trains_within_a_quarter_of_its_weights(
    make: Callable[[str], Case], checkpointing: str
) -> None:
    case = make(checkpointing)
    weights = sum(p.nbytes for p in case.model.parameters())

    def train(model: Any, report: Report) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            for micro_batch in range(2):
                loss = batch_loss(case, model, 2 * step + micro_batch)
                report("loss", loss)
                report_leases(model, report, [])
                loss.backward()
            report("gradients", {name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()

    paged = check_same(lambda: make(checkpointing).model, train, close=False, device_budget=weights // 4)
    statistics = paged.pager.statistics()
    paged.pager.close()
    assert statistics.peak_resident_bytes <= weights // 4
    assert statistics.page_in_bytes > weights


def test_without_the_views_class_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmu_module, "mark_views", lambda *_: None)
    case = make_decoder()
    weights = sum(p.nbytes for p in case.model.parameters())
    optimizer = torch.optim.SGD(case.model.parameters())
    model = manage(case.model, optimizer, device_budget=weights // 4)
    with pytest.raises(BudgetError, match="drop views"):
        batch_loss(case, model, 0)
    model.pager.close()


@pytest.mark.parametrize("make", [make_decoder, make_mixture])
@pytest.mark.parametrize("checkpointing", ["none", "nonreentrant"])
def test_the_captured_order_has_a_view_once_in_forward_and_once_in_backward(
    make: Callable[[str], Case], checkpointing: str
) -> None:
    case = make(checkpointing)
    batch = case.make_batch(0)
    optimizer = torch.optim.SGD(case.model.parameters())
    model = manage(case.model, optimizer, share=0.4, example_inputs=batch[0])
    runtime = model.pager._runtime
    assert runtime.planner.way == "captured on meta", runtime.planner.note
    trace = runtime.planner.trace
    expected = list(zip(trace.segment.tolist(), trace.phase.tolist(), strict=True))
    case.loss(model(*batch[0]), batch).backward()
    seen = [(row.segment, row.phase) for row in runtime.engine.timeline.recorded]
    names = {segment.index: segment.name for segment in runtime.space.segments}
    deviations = model.pager.statistics().deviations
    model.pager.close()
    assert seen == [row for row in expected if row[1] < Phase.UPDATE]
    assert deviations == 0
    weight = "blocks.3.up"
    phases = [Phase(phase).name for segment, phase in seen if names[segment] == weight]
    used = 4 if make is make_mixture else 1
    recomputed = ["RECOMPUTE"] * used if checkpointing != "none" else []
    assert phases[:-1] == ["FORWARD"] * used + recomputed + ["BACKWARD"] * used
    assert phases[-1] == "GRADIENT"


# -- kinds of views --------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "t": transposed,
    "T": lambda x, w: x @ w.T,
    "mT": lambda x, w: x @ w.mT,
    "transpose": lambda x, w: x @ w.transpose(0, 1),
    "permute": lambda x, w: x @ w.permute(1, 0),
    "view": lambda x, w: torch.einsum("bhd,hde->be", x.view(-1, 4, WIDTH // 4), w.view(4, WIDTH // 4, WIDTH)),
    "reshape": lambda x, w: torch.einsum("bh,hde->bde", x, w.reshape(WIDTH, 8, -1)).flatten(1),
    "slice": lambda x, w: torch.cat([F.linear(x, w[:40]), F.linear(x, w[40:])], -1),
    "strided": lambda x, w: torch.cat([F.linear(x, w[::2]), F.linear(x, w[1::2])], -1),
    "index": lambda x, w: torch.stack([x @ w[i] for i in range(WIDTH)], -1),
    "iterate": lambda x, w: torch.stack([x @ row for row in w], -1),
    "chunk": lambda x, w: torch.cat([x @ part.t() for part in w.chunk(3)], -1),
    "split": lambda x, w: torch.cat([x @ part for part in w.split(32, dim=1)], -1),
    "unbind": lambda x, w: torch.stack([x @ column for column in w.unbind(1)], -1),
    "narrow": lambda x, w: torch.cat([x @ w.narrow(1, 0, 50), x @ w.narrow(1, 50, 46)], -1),
    "expand": lambda x, w: torch.bmm(x[:, None], w.expand(len(x), WIDTH, WIDTH))[:, 0],
    "broadcast a row": lambda x, w: x * w[0].expand_as(x) + x @ w,
    "unsqueeze": lambda x, w: (x[:, None, :] * w.unsqueeze(0)).sum(-1),
    "diagonal": lambda x, w: x * w.diagonal(),
    "as_strided": lambda x, w: x @ w.as_strided((WIDTH, WIDTH), (1, WIDTH)),
    "unfold": lambda x, w: (
        (w.unfold(0, 4, 4) * x[0]).sum((0, 1, 3)) * x if False else x @ w.unfold(0, WIDTH, 1)[0]
    ),
    "a view of a view": lambda x, w: (
        x
        @ w.view(4, 24, WIDTH)
        .transpose(1, 2)
        .reshape(4, WIDTH, 24)[:2]
        .permute(1, 0, 2)
        .reshape(WIDTH, 48)
        .repeat(1, 2)
    ),
    "detached": lambda x, w: x @ w.detach().t() + x @ w,
    "made without grad": lambda x, w: x @ _without_grad(w),
    "numpy's order": lambda x, w: (w.flatten()[: x.numel()].view_as(x) * x).exp() + x @ w,
    "alias of all": lambda x, w: F.linear(x, w.view_as(w)),
    "split with sizes": lambda x, w: torch.cat([x @ a for a in torch.tensor_split(w, (10, 30), 1)], -1),
    "as a vector": lambda x, w: torch.addmv(w[1], w.t(), x.sum(0)) * x,
    "in a norm": lambda x, w: F.layer_norm(x, (WIDTH,), w[0], w[1]),
    "as an activation": lambda x, w: F.layer_norm(w[: len(x)], (WIDTH,)) * x,
    "in a list": lambda x, w: torch.linalg.multi_dot([x, w.t(), w]),
    "out of place of a batch": lambda x, w: torch.baddbmm(x[None], x[None], w.t()[None])[0],
}


def _without_grad(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.t()


def step_and_gradients(model: Any, report: Report) -> None:
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    output = model(x)
    report_leases(model, report, [])
    output.square().sum().backward()
    report("output", output)
    report("gradient", x.grad)
    report_leases(model, report, [])
    report("gradients", {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_view_holds_frames_for_backward(kind: str) -> None:
    check_same(lambda: Products(KINDS[kind]), step_and_gradients, share=0.2)


COMPLEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "conj": lambda x, w: x @ w.conj(),
    "adjoint": lambda x, w: x @ w.mH,
    "real": lambda x, w: torch.complex(x.real @ w.real, x.imag @ w.imag.t()),
    "view_as_real": lambda x, w: x * torch.view_as_complex(torch.view_as_real(w).exp()).sum(0),
    "negative": lambda x, w: torch.complex(x.real @ w.conj().imag, x.imag * w.conj().imag[0]),
}


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_weights(kind: str) -> None:
    def script(model: Any, report: Report) -> None:
        x = torch.randn(BATCH, WIDTH, dtype=torch.complex64, requires_grad=True)
        output = model(x)
        report_leases(model, report, [])
        output.abs().sum().backward()
        report("gradient", x.grad)
        report("gradients", {name: p.grad for name, p in model.named_parameters()})

    check_same(lambda: Products(COMPLEX[kind], dtype=torch.complex64), script, share=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        model = Products(transposed, dtype=dtype)
        for weight in model.weights:
            weight.data = weight.data.t().contiguous().t()
        return model

    def script(model: Any, report: Report) -> None:
        x = torch.randn(BATCH, WIDTH, dtype=dtype, requires_grad=True)
        output = model(x)
        bits = model.weights[0].t().view(torch.int16)
        report("bits", bits + 0)
        del bits
        report_leases(model, report, [])
        output.sum().backward()
        report("gradient", x.grad)

    check_same(make, script, share=0.2)


SQUARE: dict[str, Callable[[Tensor], Tensor]] = {
    "t": lambda v: v.t(),
    "halves": lambda v: v.view(2, -1, v.shape[1]).transpose(0, 1).reshape(v.shape),
    "fewer rows": lambda v: v[: max(1, len(v) - 3)],
    "fewer columns": lambda v: v[:, 1:] if v.shape[1] > 1 else v,
    "every other": lambda v: v[::2],
    "detach": lambda v: v.detach(),
    "row": lambda v: v[len(v) // 2].expand(7, v.shape[1]),
    "chunk": lambda v: v.chunk(2)[0],
    "last of unbound": lambda v: v.unbind()[-1][None],
    "diagonal": lambda v: v.diagonal()[:, None],
    "two": lambda v: v.unsqueeze(1).expand(-1, 2, -1)[:, 1],
    "windows": lambda v: v.unfold(1, 1, 1).squeeze(-1),
}


@given(
    chains=st.lists(
        st.lists(st.sampled_from(sorted(SQUARE)), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    twice=st.booleans(),
    late=st.booleans(),
)
@settings(max_examples=40)
def test_chains_of_views(chains: list[list[str]], twice: bool, late: bool) -> None:
    """Views of views, several of a weight, used once or twice, backward once or twice."""

    def use(view: Tensor) -> Tensor:
        factor = torch.full((view.shape[-1],), 0.5, requires_grad=True)
        return (view * factor).exp().sum() + (view @ factor).sin().sum()

    def script(model: Any, report: Report) -> None:
        total = torch.zeros(())
        for weight in model.weights:
            views = []
            for chain in chains:
                view: Tensor = weight
                for step in chain:
                    try:
                        view = SQUARE[step](view)
                    except RuntimeError:  # a size that does not divide, as of any tensor
                        continue
                if not late:
                    total = total + use(view)
                views.append(view)
            for view in views if late or twice else []:
                total = total + use(view)
            views.clear()
            del view
        report("total", total)
        report_leases(model, report, [])
        if total.requires_grad:
            total.backward(retain_graph=twice)
            if twice:
                total.backward()
        report("gradients", {name: p.grad for name, p in model.named_parameters()})

    check_same(lambda: Products(transposed, depth=4), script, share=0.3)


def test_what_a_view_lies_on_is_not_copied_with_its_attributes() -> None:
    """So not by ``deepcopy`` or pickle of a view either, while another thread turns it back from an ordinary tensor."""
    model = manage(Products(transposed), share=0.5)
    attributes = vars(model.weights[0].t())
    assert attributes["_pager_view"] is not None
    for copies in copy.deepcopy(attributes), pickle.loads(pickle.dumps(attributes)):
        assert copies == {"_pager_view": None}
    del attributes
    model.pager.close()
