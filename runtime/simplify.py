"""The captured graph in order: what changes nothing is removed, forward first, gradients in storage of their own.

All functions are graph in, graph out, and keep what every remaining value is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shardwright.ir import Graph, InputKind, Node, Phase, Ref, TensorType, Token
from shardwright.ir.ops import aliased_operand
from shardwright.passes.dead_code import without_dead_code
from shardwright.runtime.cheaper import cheaper

__all__ = ["simplified"]

_SAME = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})
"""Always the operand itself: nothing writes in place, and what autograd needed to know is in the graph already."""
_SAME_IF_TYPE = frozenset(
    f"aten.{name}" for name in ("view.default", "_unsafe_view.default", "expand.default", "slice.Tensor")
)
"""The operand itself where the type stays: a view that changes no size moves nothing."""
_OWN_INVERSE = frozenset({"aten.t.default"})
_COPIES_CONSTANT = "aten.lift_fresh_copy.default"
_COPY = "aten.clone.default"
"""What dropout of nothing leaves behind, among others."""
_WRITTEN = "aten.copy.default"
"""Its second operand in the place of the first: what an assignment to a slice leaves behind."""


def simplified(graph: Graph) -> Graph:
    """Everything in this file and in `cheaper`, in order."""
    return _with_own_gradients(_forward_first(without_dead_code(cheaper(_without_no_ops(graph)))))


def _without_no_ops(graph: Graph) -> Graph:
    same: dict[str, str] = {}
    kept = _needed_copies(graph)
    producers: dict[str, Node] = {}
    nodes: list[Node] = []
    for original in graph.nodes:
        node = original.with_operands(tuple(same.get(name, name) for name in original.operands))
        operand = None if node.name in kept else _equal_operand(node, producers, graph.types)
        if operand is None:
            nodes.append(node)
            producers.update(dict.fromkeys(node.results, node))
        else:
            same[node.name] = operand
    return _with_returned(replace(graph, nodes=tuple(nodes)), same)


def _needed_copies(graph: Graph) -> frozenset[str]:
    """Copies that are not just the same value again: what is handed back, and of what the caller holds."""
    roots, given = _roots(graph), {i.name for i in graph.inputs}
    copies = [node for node in graph.nodes if node.op in (_COPY, _WRITTEN)]
    return frozenset(n.name for n in copies if n.name in graph.returned or roots[n.operands[-1]] in given)


def _equal_operand(node: Node, producers: Mapping[str, Node], types: Mapping[str, TensorType]) -> str | None:
    """The earlier value that the only result of `node` equals, or None."""
    if not node.operands or len(node.results) != 1:
        return None
    operand = node.operands[0]
    if node.op in _SAME or node.op == _COPIES_CONSTANT:
        return operand
    if node.op in _OWN_INVERSE and operand in producers and producers[operand].op == node.op:
        return producers[operand].operands[0]
    if node.op == _WRITTEN and len(node.args) == 2 and _same_kind(types[node.name], types[node.operands[-1]]):
        return node.operands[-1]
    same_type = types[node.name] == types[operand]
    if same_type and (node.op == _COPY or (node.op == "aten.pow.Tensor_Scalar" and node.args[1] == 1)):
        return operand
    return operand if node.op in _SAME_IF_TYPE and same_type else None


def _same_kind(one: TensorType, other: TensorType) -> bool:
    """Wherever their elements lie."""
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _with_returned(graph: Graph, same: Mapping[str, str]) -> Graph:
    def moved(names: Mapping[str, str]) -> dict[str, str]:
        return {key: same.get(name, name) for key, name in names.items()}

    return replace(
        graph,
        loss=same.get(graph.loss, graph.loss),
        outputs=moved(graph.outputs),
        updates=moved(graph.updates),
        gradients=moved(graph.gradients),
    )


def _forward_first(graph: Graph) -> Graph:
    """Forward is what loss, outputs and updates need. What only backward reads but does not need the tangent stands
    right before its first reader, so that it is not held from the start."""
    wanted = _ancestors(graph, {graph.loss, *graph.outputs.values(), *graph.updates.values()})
    late = _descendants(graph, graph.inputs_of(InputKind.TANGENT))
    forward = [node for node in graph.nodes if not wanted.isdisjoint(node.results)]
    rest = [node for node in graph.nodes if wanted.isdisjoint(node.results)]
    waiting = {result: node for node in rest if late.isdisjoint(node.results) for result in node.results}
    backward: list[Node] = []
    for node in rest:
        if not late.isdisjoint(node.results):
            backward.extend(_take(node, waiting))
            backward.append(node)
    for name in graph.returned:
        if name in waiting:
            backward.extend([*_take(waiting[name], waiting), waiting[name]])
    return replace(graph, nodes=(*forward, *(replace(node, phase=Phase.BACKWARD) for node in backward)))


def _take(node: Node, waiting: dict[str, Node]) -> Iterator[Node]:
    """The waiting nodes that `node` reads, in order, which then wait no more."""
    for name in node.operands:
        producer = waiting.get(name)
        if producer is None:
            continue
        for result in producer.results:
            del waiting[result]
        yield from _take(producer, waiting)
        yield producer


def _ancestors(graph: Graph, names: set[str]) -> set[str]:
    found = set(names)
    for node in reversed(graph.nodes):
        if not found.isdisjoint(node.results):
            found.update(node.results, node.operands)
    return found


def _descendants(graph: Graph, names: tuple[str, ...]) -> set[str]:
    found = set(names)
    for node in graph.nodes:
        if not found.isdisjoint(node.operands):
            found.update(node.results)
    return found


def _with_own_gradients(graph: Graph) -> Graph:
    """A gradient is a dense row-major tensor that nothing else shares: optimizers and clipping write into it."""
    roots = _roots(graph)
    taken = {roots.get(i.name, i.name) for i in graph.inputs}
    taken |= {roots[name] for name in (graph.loss, *graph.outputs.values(), *graph.updates.values())}
    copies: list[Node] = []
    types = dict(graph.types)
    gradients: dict[str, str] = {}
    for parameter, value in graph.gradients.items():
        type_ = types[value]
        gradients[parameter] = value
        if roots[value] in taken or type_.strides is not None:
            gradients[parameter] = name = f"own gradient of {parameter}"
            types[name] = TensorType(type_.dtype, type_.shape)
            producer = graph.producers.get(value)
            copies.append(
                Node(
                    "aten.clone.default",
                    (Ref(value),),
                    (("memory_format", Token("contiguous_format")),),
                    (name,),
                    Phase.BACKWARD,
                    *((producer.module, producer.source) if producer else ("", "")),
                )  # fmt: skip
            )
        taken.add(roots[value])
    return replace(graph, nodes=(*graph.nodes, *copies), types=types, gradients=gradients)


def _roots(graph: Graph) -> dict[str, str]:
    """Value to the value whose storage it is a view of, itself where it is no view."""
    roots = {i.name: i.name for i in graph.inputs}
    for node in graph.nodes:
        shared = aliased_operand(node)
        for result in node.results:
            roots[result] = result if shared is None else roots[shared]
    return roots
