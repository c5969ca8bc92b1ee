"""The step as one fx graph, and as a networkx graph with sizes, work and its critical path.

`capture` gives the order of accesses; this gives the program's structure: which operation needs which, how
large each result is, how much work each does. The whole step (forward, loss, backward) is traced as one
function of parameters, buffers and inputs by `make_fx`, on fake tensors, so it costs no memory.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from pager.graph.capture import is_view, num_bytes, step_loss, undisturbed
from pager.graph.flops import flops_of
from pager.graph.twin import empty_twin, make_twin
from pager.graph.wrong_inputs import quiet_fake_tensors


def joint_graph(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> GraphModule:
    """One training step of `model(*args, **kwargs)` as a graph of ATen operations on fake CPU tensors.

    Its placeholders are the parameters, the buffers and the floating or integer tensors of the inputs; it
    returns the loss (`capture.step_loss`) and the gradients of the parameters that need one (None where
    unused). Each node has its example value in `node.meta["val"]`. The user's model is not touched. Raises
    RuntimeError, with the first cause, where the model cannot be traced as one graph: control flow over
    values, reentrant checkpointing, operations without a fake kernel, an output without a gradient.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = torch.device("cpu")

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            return empty_twin(tensor, device)

    inputs = (tuple(args), dict(kwargs or {}))
    try:
        with undisturbed(), quiet_fake_tensors(), torch.inference_mode(False), torch.enable_grad():
            twin, twin_args, twin_kwargs, _ = make_twin(model, {}, inputs, fake, fake, ())
            parameters = dict(twin.named_parameters())
            buffers = dict(twin.named_buffers())
            tensors = [t for t in tree_leaves((twin_args, twin_kwargs)) if isinstance(t, Tensor)]

            def joint(
                parameters: dict[str, Tensor], buffers: dict[str, Tensor], tensors: list[Tensor]
            ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
                queue = iter(tensors)
                fill = tree_map_only(Tensor, lambda _: next(queue), (twin_args, twin_kwargs))
                output = functional_call(twin, {**parameters, **buffers}, *fill)
                loss = step_loss(output)
                if loss is None:
                    raise RuntimeError("nothing in the output has a gradient")
                wanted = [p for p in parameters.values() if p.requires_grad]
                return loss, torch.autograd.grad(loss, wanted, allow_unused=True)

            with mode:
                return make_fx(joint)(parameters, buffers, tensors)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise RuntimeError(
            f"{type(model).__name__} cannot be traced as one graph: {type(error).__name__}: {words}"
        ) from error


def _value(node: Any) -> Any:
    return torch.fx.node.map_arg(node, lambda n: n.meta.get("val"))


def _flops(node: Node) -> float:
    packet = getattr(node.target, "_overloadpacket", None)
    return flops_of(packet, _value(node.args), _value(node.kwargs), node.meta.get("val"))


def to_networkx(
    graph_module: GraphModule,
    *,
    flops_per_second: float | None = None,
    bytes_per_second: float | None = None,
) -> nx.DiGraph:
    """The fx graph as a directed acyclic graph: nodes by fx name in order of execution, edges from input to
    user.

    Node attributes: `op` (fx's kind), `target` (its name), `shape` (tuple) and `dtype` (str) of the result,
    None where it is not one tensor; `bytes` the memory the result takes, 0 for views and picks out of a
    tuple; `moved_bytes` what is read and written, 0 for the same; `flops` by torch.utils.flop_counter's
    formulas (2 m n k for a product, 0 for what has none). With both rates also `seconds`, by the roofline:
    the longer of flops / flops_per_second and moved_bytes / bytes_per_second. Raises ValueError for a rate
    that is not positive.
    """
    rates = (flops_per_second, bytes_per_second)
    if any(rate is not None and not rate > 0 for rate in rates):
        raise ValueError(f"rates must be positive, not {rates}")
    digraph = nx.DiGraph()
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        tensor = value if isinstance(value, Tensor) else None
        overload = isinstance(node.target, torch._ops.OpOverload)
        free = node.target is operator.getitem or (overload and is_view(node.target)) or node.op == "output"
        size = 0 if free else num_bytes(tree_leaves(value))
        moved = 0
        if overload and not free:
            moved = size + num_bytes(tree_leaves([_value(node.args), _value(node.kwargs)]))
        attributes: dict[str, Any] = {
            "op": node.op,
            "target": str(node.target),
            "shape": None if tensor is None else tuple(tensor.shape),
            "dtype": None if tensor is None else str(tensor.dtype).removeprefix("torch."),
            "bytes": size,
            "moved_bytes": moved,
            "flops": _flops(node),
        }
        if flops_per_second is not None and bytes_per_second is not None:
            attributes["seconds"] = max(attributes["flops"] / flops_per_second, moved / bytes_per_second)
        digraph.add_node(node.name, **attributes)
        digraph.add_edges_from((source.name, node.name) for source in node.all_input_nodes)
    return digraph


def critical_path(digraph: nx.DiGraph, weight: str = "flops") -> tuple[list[str], float]:
    """The heaviest chain of dependent nodes by the node attribute `weight`, and its sum.

    No schedule is shorter, whatever runs side by side. Raises ValueError for an empty graph, for one with a
    cycle, and where a node lacks the attribute ("seconds" needs the rates of `to_networkx`).
    """
    if not len(digraph) or not nx.is_directed_acyclic_graph(digraph):
        raise ValueError("the critical path is defined for an acyclic graph that has nodes")
    lacking = [node for node, value in digraph.nodes(data=weight) if value is None]
    if lacking:
        raise ValueError(f"{len(lacking)} nodes have no {weight!r}, the first is {lacking[0]!r}")
    total: dict[str, float] = {}
    before: dict[str, str | None] = {}
    for node in nx.topological_sort(digraph):
        source = max(digraph.predecessors(node), key=total.__getitem__, default=None)
        before[node] = source
        total[node] = float(digraph.nodes[node][weight]) + (0.0 if source is None else total[source])
    end = max(total, key=total.__getitem__)
    path: list[str] = []
    last: str | None = end
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1], total[end]


def critical_path_graph(digraph: nx.DiGraph, weight: str = "flops") -> nx.DiGraph:
    """`critical_path` as a graph of its own: the nodes of the chain in order, with their attributes, and the
    edges between neighbours.

    Its `graph` dictionary has `weight` (the attribute's name) and `total` (float, its sum along the path).
    Raises ValueError as `critical_path` does.
    """
    names, total = critical_path(digraph, weight)
    path = nx.DiGraph(weight=weight, total=total)
    path.add_nodes_from((name, digraph.nodes[name]) for name in names)
    nx.add_path(path, names)
    return path
