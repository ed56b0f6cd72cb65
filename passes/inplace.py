"""In place: an all-reduce whose operand nobody needs afterwards writes its result over it.

Needs a rank graph. Gives the same graph with `mesh.all_reduce_` where that is sound: no fresh tensor, no page faults.
Sound means that the operand's storage was made by a node (never something the caller handed in), is as large as the
operand (the result would keep a larger one alive), is dense in memory, is read by nobody once the start runs, and is
not handed back by another name. Passes behind this one keep its readers in front of the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from shardwright.ir import Graph, Node
from shardwright.passes.lifetimes import storage_roots

__all__ = ["InPlace"]


@dataclass(frozen=True, slots=True)
class InPlace:
    """Turn `mesh.all_reduce` into `mesh.all_reduce_`."""

    name: ClassVar[str] = "in-place"

    def run(self, graph: Graph) -> Graph:
        roots = storage_roots(graph)
        readers = _readers(graph, roots)
        held = {roots[name] for name in graph.returned}
        nodes = tuple(
            replace(node, op="mesh.all_reduce_")
            if node.op == "mesh.all_reduce"
            and _is_whole(graph, node.operands[0], roots)
            and roots[node.operands[0]] not in held
            and all(p <= position or _ends(graph.nodes[p], node) for p in readers[roots[node.operands[0]]])
            else node
            for position, node in enumerate(graph.nodes)
        )
        return replace(graph, nodes=nodes)


def _readers(graph: Graph, roots: Mapping[str, str]) -> dict[str, list[int]]:
    """Storage to the positions that read it or a view of it."""
    found: dict[str, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for root in dict.fromkeys(roots[name] for name in node.operands):
            found.setdefault(root, []).append(position)
    return found


def _ends(node: Node, start: Node) -> bool:
    return node.op == "mesh.wait" and node.operands[0] == start.name


def _is_whole(graph: Graph, operand: str, roots: Mapping[str, str]) -> bool:
    """Whether a node made the storage and the operand is all of it, in order."""
    kind = graph.types[operand]
    root = roots[operand]
    return root in graph.producers and kind.strides is None and kind.num_bytes == graph.types[root].num_bytes
