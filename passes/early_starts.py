"""Early starts: reductions begin right behind what makes their operand.

Needs a rank graph. Gives the same nodes in another order: every start of a reduction, with the data movement that only
feeds it (`mesh.stack`, `mesh.pack`, views), stands behind the last of the nodes it depends on. Nothing leaves its
phase, and what depends on nothing in its own phase stays where it is: starting it at the border would only hold memory.
Offloads stand behind the last reader of their storage in forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from shardwright.ir import Graph, Node
from shardwright.ir.ops import aliased_operand
from shardwright.passes.lifetimes import first_backward, storage_roots

__all__ = ["EarlyStarts", "REDUCTIONS"]

REDUCTIONS = frozenset({"mesh.all_reduce", "mesh.all_reduce_", "mesh.reduce_scatter"})
_FEEDERS = frozenset({"mesh.stack", "mesh.pack", "aten.contiguous.default"})


@dataclass(frozen=True, slots=True)
class EarlyStarts:
    """Move starts of reductions to where their operands are made."""

    name: ClassVar[str] = "early-starts"

    def run(self, graph: Graph) -> Graph:
        anchors = _anchors(graph, _movable(graph))
        order = sorted(range(len(graph.nodes)), key=lambda i: (anchors[i], anchors[i] != i, i))
        return replace(graph, nodes=tuple(graph.nodes[i] for i in order))


def _movable(graph: Graph) -> frozenset[int]:
    """Positions of reduction starts, offload starts, and nodes that do nothing but feed a reduction."""
    positions: set[int] = set()
    returned = set(graph.returned)
    for position in reversed(range(len(graph.nodes))):
        node = graph.nodes[position]
        if node.op in REDUCTIONS or node.op == "tier.offload" or _only_feeds(graph, node, positions, returned):
            positions.add(position)
    return frozenset(positions)


def _only_feeds(graph: Graph, node: Node, movable: set[int], returned: set[str]) -> bool:
    if node.op not in _FEEDERS and (aliased_operand(node) is None or node.op.endswith(".wait")):
        return False
    if not returned.isdisjoint(node.results):
        return False
    users = [user for result in node.results for user in graph.users.get(result, ())]
    # The wait that ends a reduction names what was sent, and so does not count as a reader of it.
    readers = [user for user in users if graph.nodes[user].op != "mesh.wait"]
    return bool(readers) and all(user in movable for user in readers)


def _anchors(graph: Graph, movable: frozenset[int]) -> list[int]:
    """For each node the position behind which it belongs: its own, where it does not move."""
    border = first_backward(graph)
    roots = storage_roots(graph)
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    anchors: list[int] = []
    for position, node in enumerate(graph.nodes):
        anchor = position
        if position in movable:
            earliest = _earliest(node, roots, made, read)
            same_phase = earliest >= (border if position >= border else 0)
            anchor = earliest if same_phase else position
        anchors.append(anchor)
        made.update(dict.fromkeys(node.results, anchor))
        for root in {roots[name] for name in node.operands}:
            read[root] = max(read.get(root, -1), anchor)
    return anchors


def _earliest(node: Node, roots: Mapping[str, str], made: Mapping[str, int], read: Mapping[str, int]) -> int:
    after = [made.get(name, -1) for name in node.operands]
    if node.op in ("mesh.all_reduce_", "tier.offload"):
        # In place: only when all others have read the old value. Offload: earlier would free nothing earlier.
        after += [read.get(roots[name], -1) for name in node.operands]
    return max(after)
