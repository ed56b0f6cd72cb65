"""A captured graph as one fx graph of forward and backward, as torch's partitioner wants it, at one rank's shapes.

Needs the graph and decisions: layouts and reads count, fates do not. Gives the fx graph, whose nodes have fake tensors
in `meta["val"]`, and which value of ours each stands for. A value that is read in another layout than it is made in is
one more node; of a parameter, one more input, since who gathers parameters does so outside of what is partitioned.

Attention is the CUDA operator of the same kind: torch knows it as worth keeping and knows its work, and the machines
are GPUs. The CPU's it would take for a pointwise operator.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from shardwright.ir import Arg, Decisions, Graph, InputKind, Layout, Node, Ref, TensorType, local_shape
from shardwright.passes.localize import localize
from shardwright.passes.strides import strides_of
from shardwright.runtime.compat import FakeTensorMode
from shardwright.runtime.kernels import STRIDE_SAFE
from shardwright.runtime.torch_ops import TORCH_DTYPES, torch_arg, torch_op

__all__ = ["JointProgram", "joint_program"]

Args: TypeAlias = tuple[object, ...]
Kwargs: TypeAlias = dict[str, object]
_CPU: Final = torch.device("cpu")
_CPU_ATTENTION: Final = "aten._scaled_dot_product_flash_attention_for_cpu.default"


@dataclass(frozen=True)
class JointProgram:
    """Forward and backward in one fx graph; partitioning changes it, so ask for a `copy`."""

    module: fx.GraphModule
    num_forward_outputs: int
    """The first of its outputs: loss, other outputs, updates. Gradients follow."""
    values: Mapping[str, str]
    """fx name to the value it stands for; redistributed copies stand for what they are copies of."""

    def copy(self) -> fx.GraphModule:
        graph = fx.Graph()
        returned = graph.graph_copy(self.module.graph, {})
        graph.output(returned)
        return fx.GraphModule(self.module, graph)


def joint_program(graph: Graph, decisions: Decisions) -> JointProgram:
    """The program of one rank before anything is decided about what is saved."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return _Writer(graph, decisions).run()


def moved(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for collectives: another layout of the same value."""
    return x.new_empty(shape)


@dataclass
class _Writer:
    graph: Graph
    decisions: Decisions
    fx_graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[tuple[str, Layout], fx.Node] = field(default_factory=dict)
    """(value, layout) to its node."""
    values: dict[str, str] = field(default_factory=dict)

    def run(self) -> JointProgram:
        for given in self.graph.inputs:
            self._take(given.name, self._layouts(given.name), given.kind)
        for name, layout in self._other_reads_of_inputs():
            self._take(name, layout, InputKind.PARAM)
        for number, node in enumerate(self.graph.nodes):
            self._write(node, f"n{number}")
        forward = dict.fromkeys((self.graph.loss, *self.graph.outputs.values(), *self.graph.updates.values()))
        names = [*forward, *self.graph.gradients.values()]
        self.fx_graph.output([self.nodes[name, self._layouts(name)] for name in names])
        return JointProgram(fx.GraphModule({}, self.fx_graph), len(forward), self.values)

    def _layouts(self, value: str) -> Layout:
        return self.decisions.layouts[value]

    def _local(self, value: str, layout: Layout) -> TensorType:
        whole = self.graph.types[value]
        if all(size == 1 for size in self.decisions.mesh.sizes):
            return whole
        return TensorType(whole.dtype, local_shape(whole.shape, layout, self.decisions.mesh))

    def _take(self, value: str, layout: Layout, kind: InputKind) -> None:
        if (value, layout) in self.nodes:
            return
        word = "tangents" if kind is InputKind.TANGENT else "primals"
        kind_ = self._local(value, layout)
        node = self.fx_graph.placeholder(f"{word}_{len(self.nodes) + 1}")
        node.meta["val"] = torch.empty_strided(kind_.shape, strides_of(kind_), dtype=TORCH_DTYPES[kind_.dtype])
        self._note(node, value, layout)

    def _note(self, node: fx.Node, value: str, layout: Layout) -> None:
        self.nodes[value, layout] = node
        self.values[node.name] = value

    def _other_reads_of_inputs(self) -> list[tuple[str, Layout]]:
        found: dict[tuple[str, Layout], None] = {}
        for node in self.graph.nodes:
            for name, layout in zip(node.operands, self.decisions.reads[node.name], strict=True):
                if name not in self.graph.producers:
                    found[name, layout] = None
        return list(found)

    def _write(self, node: Node, name: str) -> None:
        reads = self.decisions.reads[node.name]
        operands = [self._read(value, layout) for value, layout in zip(node.operands, reads, strict=True)]
        layouts = tuple(self._layouts(result) for result in node.results)
        local, _ = localize(
            node,
            tuple(self._local(value, layout) for value, layout in zip(node.operands, reads, strict=True)),
            tuple(self.graph.types[result] for result in node.results),
            layouts,
            self.decisions.mesh,
        )
        by_slot = iter(operands)
        args = tuple(_filled(arg, by_slot) for arg in local.args)
        kwargs = {key: _filled(arg, by_slot) for key, arg in local.kwargs}
        made = self._call(local.op, args, kwargs, name)
        if not isinstance(made.meta["val"], tuple | list):
            return self._note(made, node.name, layouts[0])
        for position, (result, layout) in enumerate(zip(node.results, layouts, strict=True)):
            item = self.fx_graph.create_node(
                "call_function", operator.getitem, (made, position), name=f"{name}r{position}"
            )
            item.meta["val"] = made.meta["val"][position]
            self._note(item, result, layout)

    def _read(self, value: str, layout: Layout) -> fx.Node:
        if (value, layout) not in self.nodes:
            source = self.nodes[value, self._layouts(value)]
            shape = self._local(value, layout).shape
            node = self.fx_graph.create_node("call_function", moved, (source, shape), name=f"m{len(self.nodes)}")
            node.meta["val"] = moved(source.meta["val"], shape)
            self._note(node, value, layout)
        return self.nodes[value, layout]

    def _call(self, op: str, args: Args, kwargs: Kwargs, name: str) -> fx.Node:
        value = _run(op, args, kwargs)
        target, args, kwargs = _cuda_attention(args, kwargs) if op == _CPU_ATTENTION else (torch_op(op), args, kwargs)
        node = self.fx_graph.create_node("call_function", target, args, kwargs, name=name)  # type: ignore[arg-type]
        node.meta["val"] = value
        return node


def _filled(arg: Arg, operands: Iterator[fx.Node]) -> object:
    if isinstance(arg, Ref):
        return next(operands)
    if isinstance(arg, tuple):
        return [_filled(item, operands) for item in arg]
    return torch_arg(arg, {}, _CPU)


def _run(op: str, args: Args, kwargs: Kwargs) -> object:
    """On fake tensors; a view that a part's strides do not allow is a copy, as in the program that runs."""
    given = [_fake(arg) for arg in args]
    named = {key: _fake(arg) for key, arg in kwargs.items()}
    try:
        return torch_op(op)(*given, **named)
    except (RuntimeError, ValueError):
        if op not in STRIDE_SAFE:
            raise
        return torch_op(STRIDE_SAFE[op])(*given, **named)


def _fake(arg: object) -> object:
    if isinstance(arg, fx.Node):
        return arg.meta["val"]
    return [_fake(item) for item in arg] if isinstance(arg, list) else arg


def _cuda_attention(args: Args, kwargs: Kwargs) -> tuple[OpOverload, Args, Kwargs]:
    """The same attention on a GPU."""
    query, key, value, *rest = args
    dropout = rest[0] if rest else 0.0
    causal = rest[1] if len(rest) > 1 else False
    scale = {"scale": kwargs.get("scale")}
    mask = kwargs.get("attn_mask")
    if mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention.default, (query, key, value, dropout, causal), scale
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return efficient, (query, key, value, mask, True, dropout, causal), scale
