"""Buckets of gathers: small split parameters (norm weights, biases) are gathered together.

Needs a rank graph. Gives the graph in which neighbouring small all-gathers of one axis, dtype and phase are one:
the operands packed, gathered, seen as [parts, piece], cut along dim 1 and made dense again. Results keep their names.
A gather joins a bucket where its operand exists when the first member starts, so nothing starts late; what is gathered
early waits for its use, which is why only small ones join.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Arg, Graph, Node, Phase, Ref, TensorType, Token

__all__ = ["BucketGathers"]

Key = tuple[str, str, Phase]


@dataclass(frozen=True, slots=True)
class BucketGathers:
    """Merge small all-gathers."""

    name: ClassVar[str] = "bucket-gathers"

    member_bytes: int = 64 * 2**10
    """A gather whose result is larger stays by itself. 0 merges nothing."""
    bucket_bytes: int = 2**20
    """Gathered bytes of a bucket, at most: they live from the first use of any member on."""

    def run(self, graph: Graph) -> Graph:
        writer = _Writer(dict(graph.types))
        merged: dict[int, list[Node]] = {}
        removed: set[str] = set()
        for bucket in self._buckets(graph):
            starts = [graph.nodes[position] for position in bucket]
            waits = [graph.nodes[graph.users[start.name][0]] for start in starts]
            merged[bucket[0]] = writer.write(starts, waits)
            removed.update(node.name for node in (*starts, *waits))
            for start in starts:
                del writer.types[start.name]
        nodes = []
        for position, node in enumerate(graph.nodes):
            nodes += merged.get(position, [])
            if node.name not in removed:
                nodes.append(node)
        return replace(graph, nodes=tuple(nodes), types=writer.types)

    def _buckets(self, graph: Graph) -> list[list[int]]:
        """Positions of starts that travel together, at least two."""
        positions = {result: i for i, node in enumerate(graph.nodes) for result in node.results}
        open_buckets: dict[Key, list[int]] = {}
        sizes: dict[Key, int] = {}
        found: list[list[int]] = []
        for position, node in enumerate(graph.nodes):
            if not self._is_small(graph, node):
                continue
            kind = graph.types[node.name]
            key = (str(node.args[1]), kind.dtype, node.phase)
            bucket = open_buckets.get(key)
            made = positions.get(node.operands[0], -1)
            if bucket is None or made > bucket[0] or sizes[key] + kind.num_bytes > self.bucket_bytes:
                bucket = open_buckets[key] = []
                sizes[key] = 0
                found.append(bucket)
            bucket.append(position)
            sizes[key] += kind.num_bytes
        return [bucket for bucket in found if len(bucket) > 1]

    def _is_small(self, graph: Graph, node: Node) -> bool:
        if node.op != "mesh.all_gather" or graph.types[node.name].num_bytes > self.member_bytes:
            return False
        users = graph.users.get(node.name, ())
        return len(users) == 1 and graph.nodes[users[0]].op == "mesh.wait"


@dataclass
class _Writer:
    types: dict[str, TensorType]
    nodes: list[Node] = field(default_factory=list)
    _stem: str = ""
    _phase: Phase = Phase.FORWARD

    def write(self, starts: Sequence[Node], waits: Sequence[Node]) -> list[Node]:
        """The nodes of one bucket, named after its first member."""
        axis, self._phase, self.nodes = starts[0].args[1], starts[0].phase, []
        self._stem = f"{waits[0].name}~bucket"
        dtype = self.types[waits[0].name].dtype
        sizes = tuple(self.types[start.operands[0]].num_elements for start in starts)
        num_parts = self.types[waits[0].name].num_elements // sizes[0]
        piece = TensorType(dtype, (sum(sizes),))
        packed = self._emit("pack", "mesh.pack", tuple(Ref(start.operands[0]) for start in starts), piece)
        whole = TensorType(dtype, (num_parts * piece.num_elements,))
        started = self._emit("all_gather", "mesh.all_gather", (Ref(packed), axis), whole)
        waited = self._emit("wait", "mesh.wait", (Ref(started), Ref(packed)), whole)
        rows = TensorType(dtype, (num_parts, piece.num_elements))
        parts = self._emit("parts", "aten.view.default", (Ref(waited), rows.shape), rows)
        self._cut(parts, sizes, rows, waits)
        return self.nodes

    def _cut(self, parts: str, sizes: tuple[int, ...], rows: TensorType, waits: Sequence[Node]) -> None:
        """Columns of the rows, each dense and in the shape of the wait whose name it takes."""
        num_parts, stride = rows.shape
        columns = tuple(f"{self._stem}/column.{number}" for number in range(len(sizes)))
        for name, size in zip(columns, sizes, strict=True):
            self.types[name] = TensorType.of(rows.dtype, (num_parts, size), (stride, 1))
        split = Node("aten.split_with_sizes.default", (Ref(parts), sizes, 1), (), columns, self._phase)
        self.nodes.append(split)
        for number, (column, wait) in enumerate(zip(columns, waits, strict=True)):
            dense = TensorType(rows.dtype, self.types[column].shape)
            layout = (("memory_format", Token("contiguous_format")),)
            cloned = self._emit(f"dense.{number}", "aten.clone.default", (Ref(column),), dense, layout)
            shape = self.types[wait.name].shape
            self.types[wait.name] = TensorType(rows.dtype, shape)
            view = Node("aten.view.default", (Ref(cloned), shape), (), (wait.name,), self._phase, wait.module)
            self.nodes.append(view)

    def _emit(
        self, what: str, op: str, args: tuple[Arg, ...], result: TensorType, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> str:
        name = f"{self._stem}/{what}"
        self.nodes.append(Node(op, args, kwargs, (name,), self._phase))
        self.types[name] = result
        return name
