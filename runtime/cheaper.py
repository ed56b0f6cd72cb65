"""Autograd's formulas made cheaper without changing a value: rewrites of the captured graph, before names are given.

- A number times (or over) an expanded tensor: first the number, then the expansion. The gradient of a mean is such.
- The sum of two padded slices that lie side by side: one concatenation. The gradient of a rotary embedding is such.

Graph in, graph out; what is no longer read is left for dead code elimination.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardwright.ir import Graph, Node, Ref, TensorType

__all__ = ["cheaper"]

_BY_NUMBER = frozenset({"aten.div.Scalar", "aten.mul.Scalar"})
_ELEMENTWISE = frozenset({"aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor", "aten.div.Tensor"})
_PADDED = "aten.slice_backward.default"


def cheaper(graph: Graph) -> Graph:
    """The same values by fewer passes over memory."""
    return _Rewriting(graph, dict(graph.types)).run()


@dataclass
class _Rewriting:
    graph: Graph
    types: dict[str, TensorType]
    producers: dict[str, Node] = field(default_factory=dict)
    """As rewritten so far."""

    def run(self) -> Graph:
        nodes: list[Node] = []
        for node in self.graph.nodes:
            for written in self._rewritten(node):
                nodes.append(written)
                self.producers.update(dict.fromkeys(written.results, written))
        return replace(self.graph, nodes=tuple(nodes), types=self.types)

    def _rewritten(self, node: Node) -> Iterator[Node]:
        if node.op in _BY_NUMBER and self._expands(node):
            yield from self._number_first(node)
        elif (joined := self._joined(node)) is not None:
            yield joined
        else:
            yield node

    def _expands(self, node: Node) -> bool:
        """Whether the operand is an expansion, and every reader gives a dense result for an expanded operand too."""
        made = self.producers.get(node.operands[0])
        readers = [self.graph.nodes[position] for position in self.graph.users.get(node.name, ())]
        return (
            made is not None
            and made.op == "aten.expand.default"
            and self.types[made.name].dtype == self.types[node.name].dtype
            and node.name not in self.graph.returned
            and all(self._gives_dense(reader, node.name) for reader in readers)
        )

    def _gives_dense(self, reader: Node, name: str) -> bool:
        others = [self.types[operand] for operand in reader.operands if operand != name]
        result = self.types[reader.name]
        return reader.op in _ELEMENTWISE and result.strides is None and result in others

    def _number_first(self, node: Node) -> Iterator[Node]:
        expansion = self.producers[node.operands[0]]
        narrow, small = expansion.operands[0], f"{node.name}:narrow"
        self.types[small] = TensorType(self.types[node.name].dtype, self.types[narrow].shape)
        self.types[node.name] = self.types[expansion.name]
        yield replace(node.with_operands((narrow,)), results=(small,))
        yield replace(expansion.with_operands((small,)), results=node.results, phase=node.phase)

    def _joined(self, node: Node) -> Node | None:
        """A concatenation in place of a sum of two slices, each padded with zeros where the other is not."""
        if node.op != "aten.add.Tensor" or node.kwargs or len(node.operands) != 2:
            return None
        first, second = (_Slice.of(self.producers.get(name), self.types) for name in node.operands)
        if first is None or second is None or first.dim != second.dim:
            return None
        low, high = sorted((first, second), key=lambda piece: piece.start)
        size = self.types[node.name].shape[low.dim]
        if (low.start, low.end, high.end) != (0, high.start, size) or self.types[node.name].strides is not None:
            return None
        return replace(node, op="aten.cat.default", args=((Ref(low.value), Ref(high.value)), low.dim))


@dataclass(frozen=True, slots=True)
class _Slice:
    """What a padded slice holds beside zeros."""

    value: str
    dim: int
    start: int
    end: int

    @classmethod
    def of(cls, node: Node | None, types: dict[str, TensorType]) -> "_Slice | None":
        if node is None or node.op != _PADDED or len(node.args) != 6:
            return None
        _, _, dim, start, end, step = node.args
        if not (isinstance(dim, int) and isinstance(start, int) and isinstance(end, int)) or step != 1:
            return None
        shape = types[node.name].shape
        dim %= len(shape)
        return cls(node.operands[0], dim, start, min(end, shape[dim]))
