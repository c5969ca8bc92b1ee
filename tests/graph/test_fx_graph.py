"""The step as an fx graph and as a networkx graph: acyclic, with the work that arithmetic says."""

from __future__ import annotations

import itertools
import logging

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pager.graph.capture import capture
from pager.graph.fx_graph import critical_path, critical_path_graph, joint_graph, to_networkx
from tests import models

TRACEABLE = [name for name in models.BUILDERS if name not in ("decoder_reentrant", "encoder_decoder")]


def make_linear_graph(rows: int = 8, inner: int = 16, columns: int = 32) -> GraphModule:
    return joint_graph(nn.Linear(inner, columns, bias=False), (torch.randn(rows, inner),))


@pytest.mark.parametrize("name", TRACEABLE)
def test_graph_of_a_shipped_model(name: str) -> None:
    case = models.BUILDERS[name]()
    args, kwargs = case.make_batch(0)
    graph = joint_graph(case.model, args, kwargs)
    digraph = to_networkx(graph, flops_per_second=1e12, bytes_per_second=1e11)
    assert nx.is_directed_acyclic_graph(digraph)
    assert len(digraph) == len(graph.graph.nodes)
    assert digraph.in_degree("output") > 1
    assert digraph.out_degree("output") == 0
    assert {"op", "target", "shape", "dtype", "bytes", "flops", "seconds"} <= set(digraph.nodes["output"])
    for weight in ("flops", "seconds"):
        path, total = critical_path(digraph, weight)
        assert 0 < total <= sum(value for _, value in digraph.nodes(data=weight))
        assert total == pytest.approx(sum(digraph.nodes[node][weight] for node in path))
        assert all(digraph.has_edge(a, b) for a, b in itertools.pairwise(path))
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_graph_takes_the_real_step() -> None:
    case, again = models.make_mlp(), models.make_mlp()
    args, kwargs = case.make_batch(0)
    graph = joint_graph(case.model, args, kwargs)
    loss, gradients = graph(dict(case.model.named_parameters()), {}, list(args))
    expected = again.model(*args).sum()
    expected.backward()
    assert torch.equal(loss, expected)
    for gradient, parameter in zip(gradients, again.model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_flops_of_a_linear_are_two_m_n_k() -> None:
    rows, inner, columns = 8, 16, 32
    digraph = to_networkx(make_linear_graph(rows, inner, columns))
    work = {node: flops for node, flops in digraph.nodes(data="flops") if flops}
    # One product forward; backward only for the weight, since the input needs no gradient.
    assert list(work.values()) == [2 * rows * inner * columns] * 2
    product = digraph.nodes[next(iter(work))]
    assert product["shape"] == (rows, columns)
    assert product["dtype"] == "float32"
    assert product["bytes"] == 4 * rows * columns
    assert product["moved_bytes"] == 4 * (rows * inner + inner * columns + rows * columns)


def test_views_take_no_memory() -> None:
    digraph = to_networkx(make_linear_graph())
    views = [data for _, data in digraph.nodes(data=True) if data["target"] == "aten.t.default"]
    assert views
    assert all(data["bytes"] == data["moved_bytes"] == 0 for data in views)


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
def test_flops_equal_those_of_the_capture(name: str) -> None:
    case = models.BUILDERS[name]()
    inputs = case.make_batch(0)
    captured = capture(case.model, {p: i for i, p in enumerate(case.model.parameters())}, *inputs)
    digraph = to_networkx(joint_graph(case.model, *inputs))
    assert sum(flops for _, flops in digraph.nodes(data="flops")) == captured.flops.sum()


def test_critical_path_takes_the_heavier_branch() -> None:
    digraph = nx.DiGraph([("a", "b"), ("b", "d"), ("a", "c"), ("c", "d")])
    nx.set_node_attributes(digraph, {"a": 1.0, "b": 2.0, "c": 5.0, "d": 1.0}, "seconds")
    assert critical_path(digraph, "seconds") == (["a", "c", "d"], 7.0)


def test_critical_path_as_a_graph_is_the_chain_alone() -> None:
    digraph = nx.DiGraph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d")])
    nx.set_node_attributes(digraph, {"a": 1.0, "b": 2.0, "c": 5.0, "d": 1.0}, "seconds")
    path = critical_path_graph(digraph, "seconds")
    assert isinstance(path, nx.DiGraph)
    assert list(path.nodes(data="seconds")) == [("a", 1.0), ("c", 5.0), ("d", 1.0)]
    assert list(path.edges) == [("a", "c"), ("c", "d")]
    assert path.graph == {"weight": "seconds", "total": 7.0}
    with pytest.raises(ValueError, match="nodes have no 'flops'"):
        critical_path_graph(digraph)


def test_critical_path_needs_its_weight() -> None:
    with pytest.raises(ValueError, match="'seconds'"):
        critical_path(to_networkx(make_linear_graph()), "seconds")


@pytest.mark.parametrize("edges", [[], [("a", "b"), ("b", "a")]], ids=["empty", "cycle"])
def test_critical_path_needs_an_acyclic_graph(edges: list[tuple[str, str]]) -> None:
    with pytest.raises(ValueError, match="acyclic"):
        critical_path(nx.DiGraph(edges))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rates_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        to_networkx(make_linear_graph(), flops_per_second=rate, bytes_per_second=1.0)


def test_what_cannot_be_traced_says_why() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else x

    with pytest.raises(RuntimeError, match="Branches cannot be traced as one graph: "):
        joint_graph(Branches(), (torch.randn(2, 4),))
    case = models.make_decoder("reentrant")
    with pytest.raises(RuntimeError, match="use_reentrant"):
        joint_graph(case.model, *case.make_batch(0))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(RuntimeError, match="nothing in the output has a gradient"):
        joint_graph(frozen, (torch.randn(2, 4),))


def test_an_operation_that_fails_is_not_logged_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    class Mismatched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) @ x

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's own do not hand on to the root
    try:
        with pytest.raises(RuntimeError, match="Mismatched cannot be traced as one graph: "):
            joint_graph(Mismatched(), (torch.randn(2, 4),))
    finally:
        logger.removeHandler(caplog.handler)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
