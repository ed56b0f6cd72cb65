"""Seconds of every node of a rank graph, each distinct question asked once.

Needs a rank graph, its mesh and `Prices`. Gives seconds of one rank. Views are free; starts are priced by what they
move, on the stream that moves it; waits cost nothing by themselves.
"""

from dataclasses import dataclass, field
from itertools import repeat

from shardwright.ir import Graph, GraphError, Mesh, Node, TensorType, Tier, substitute
from shardwright.ir.ops import aliased_operand, is_collective
from shardwright.passes.copies import tier_of
from shardwright.passes.prices import Prices

__all__ = ["NodePrices", "collective_bytes"]

Move = tuple[str, int, int, Tier]
"""Operator, bytes, axis (-1 for copies), tier (device for collectives)."""
Key = tuple[str, object, tuple[int, ...], tuple[TensorType, ...], tuple[TensorType, ...]]


def collective_bytes(graph: Graph, node: Node) -> int:
    """Size of the whole tensor of a collective: gathered, to be reduced, or exchanged."""
    moved = node.results[0] if node.op == "mesh.all_gather" else node.operands[0]
    return graph.types[moved].num_bytes


@dataclass(frozen=True)
class NodePrices:
    """Answers from `prices`, remembered."""

    graph: Graph
    mesh: Mesh
    prices: Prices
    _ops: dict[Key, float] = field(default_factory=dict)
    _moves: dict[Move, float] = field(default_factory=dict)

    def compute_seconds(self, node: Node) -> float:
        """An operator that is neither start nor wait. Not for starts."""
        if aliased_operand(node) is not None:
            return 0.0
        operands = node.operands
        types = tuple(self.graph.types[name] for name in operands)
        results = tuple(self.graph.types[name] for name in node.results)
        # Prices know types, not names; but reading one tensor twice is not reading two.
        ordinals = {name: number for number, name in enumerate(dict.fromkeys(operands))}
        same = tuple(ordinals[name] for name in operands)
        constants = substitute(node.args, repeat("")), *((k, substitute(a, repeat(""))) for k, a in node.kwargs)
        key = (node.op, constants, same, types, results)
        if key not in self._ops:
            self._ops[key] = self.prices.op_seconds(node, types, results)
        return self._ops[key]

    def move_seconds(self, node: Node) -> float:
        """A collective, or a copy between tiers. Only for starts."""
        if is_collective(node.op):
            key = (node.op, collective_bytes(self.graph, node), self.axis_index(node), Tier.DEVICE)
        else:
            key = (node.op, self.graph.types[node.operands[0]].num_bytes, -1, tier_of(self.graph, node))
        if key not in self._moves:
            self._moves[key] = self._ask(key)
        return self._moves[key]

    def _ask(self, move: Move) -> float:
        op, num_bytes, axis, tier = move
        if axis < 0:
            return self.prices.copy_seconds(num_bytes, tier, op == "tier.reload")
        return self.prices.collective_seconds(op.removeprefix("mesh."), num_bytes, self.mesh.sizes, axis)

    def axis_index(self, node: Node) -> int:
        """Number of the mesh axis of a collective. Raises GraphError for an axis that the mesh lacks."""
        axis = node.args[1]
        if axis not in self.mesh.axes:
            raise GraphError(
                f"expected an axis of the mesh {self.mesh}, found {axis!r} in {node.name}; lower the graph for it"
            )
        return self.mesh.axes.index(str(axis))
