"""Buckets: gradient reductions of one kind travel together, since few large collectives beat many small ones.

Needs a rank graph whose reductions start where their operands are made (`early-starts`). Gives the graph with the
tails of gradients (`gradient_tails`) merged, in order of readiness, into buckets of about `bucket_bytes`:

- all_reduce: `mesh.pack`, `mesh.all_reduce_` in place, `mesh.unpack`;
- reduce_scatter: every stacked gradient is seen as [parts, piece] and joined along dim 1, so that what one rank gets is
  contiguous; the result is the rank's pieces one after the other, and `mesh.unpack` cuts them apart.

Results are views of the bucket: the gradients live in it. Gradients keep their names. A bucket of one stays as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Arg, Graph, Node, Phase, Ref, TensorType
from shardwright.passes.gradient_tails import Level, Tail, tails

__all__ = ["Bucket"]

Key = tuple[tuple[str, Arg, Arg, str], ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Merge gradient reductions."""

    name: ClassVar[str] = "bucket"

    bucket_bytes: int = 25 * 2**20
    """A bucket is sent off before it would grow past this; counted before the reduction."""
    apart: frozenset[str] = frozenset()
    """Parameters whose gradients die before others': they have buckets of their own."""

    def run(self, graph: Graph) -> Graph:
        merged: dict[int, list[Node]] = {}
        removed: set[str] = set()
        writer = _Writer(dict(graph.types))
        apart = frozenset(graph.gradients[name] for name in self.apart if name in graph.gradients)
        for bucket in _buckets(graph, self.bucket_bytes, apart):
            merged[bucket[-1].position] = writer.write(bucket)
            removed.update(node.name for tail in bucket for node in tail.nodes)
        nodes: list[Node] = []
        for position, node in enumerate(graph.nodes):
            nodes += merged.get(position, ())
            if node.name not in removed:
                nodes.append(node)
        return replace(graph, nodes=tuple(nodes), types=_types_of(graph, nodes, writer.types))


def _buckets(graph: Graph, bucket_bytes: int, apart: frozenset[str]) -> list[tuple[Tail, ...]]:
    """Tails that travel together, at least two, in the order in which the last of each is ready."""
    open_tails: dict[tuple[bool, Key], list[Tail]] = {}
    sizes: dict[tuple[bool, Key], int] = {}
    closed: list[list[Tail]] = []
    for tail in tails(graph):
        if not _is_dense(tail, graph.types):
            continue
        key = tail.gradient in apart, _key(tail, graph.types)
        num_bytes = graph.types[tail.levels[0].start.operands[0]].num_bytes
        if key in open_tails and sizes[key] + num_bytes > bucket_bytes:
            closed.append(open_tails.pop(key))
        if key not in open_tails:
            open_tails[key], sizes[key] = [], 0
        open_tails[key].append(tail)
        sizes[key] += num_bytes
    closed += open_tails.values()
    return sorted((tuple(b) for b in closed if len(b) > 1), key=lambda bucket: bucket[-1].position)


def _key(tail: Tail, types: Mapping[str, TensorType]) -> Key:
    return tuple((s.op, s.args[1], s.args[2], types[s.operands[0]].dtype) for s in (lv.start for lv in tail.levels))


def _is_dense(tail: Tail, types: Mapping[str, TensorType]) -> bool:
    """Whether flattening keeps every type of the tail; a lone all-reduce may change strides, since nothing follows."""
    if len(tail.levels) == 1 and not tail.after and tail.levels[0].start.op == "mesh.all_reduce":
        return True
    return all(types[name].strides is None for level in tail.levels for name in level.wait.operands)


def _types_of(graph: Graph, nodes: Iterable[Node], types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    names = [given.name for given in graph.inputs] + [result for node in nodes for result in node.results]
    return {name: types[name] for name in names}


@dataclass
class _Writer:
    types: dict[str, TensorType]
    nodes: list[Node] = field(default_factory=list)
    _stem: str = ""

    def write(self, bucket: tuple[Tail, ...]) -> list[Node]:
        """The nodes of one bucket, named after its first gradient.

        Level by level; between levels the values stay in the buffer where they can.
        """
        self.nodes = []
        buffer: str | None = None
        for depth, levels in enumerate(zip(*(tail.levels for tail in bucket), strict=True)):
            self._stem = f"{bucket[0].gradient}~bucket.{depth}"
            stays = levels[0].start.op == "mesh.all_reduce" and not any(level.before for level in levels)
            if buffer is not None and not stays:
                self._unpack(buffer, [tail.levels[depth - 1].wait for tail in bucket])
            self.nodes += (node for level in levels for node in level.before)
            buffer = self._reduce(levels, buffer if stays else None)
        if buffer is not None:
            self._unpack(buffer, [tail.levels[-1].wait for tail in bucket])
        self.nodes += (node for tail in bucket for node in tail.after)
        return self.nodes

    def _reduce(self, levels: tuple[Level, ...], buffer: str | None) -> str:
        """One reduction of all members; returns the flat buffer that holds the results."""
        if levels[0].start.op == "mesh.reduce_scatter":
            return self._reduce_scatter(levels)
        _, axis, reduce = levels[0].start.args
        if buffer is None:
            members = tuple(Ref(level.start.operands[0]) for level in levels)
            buffer = self._emit("pack", "mesh.pack", members, self._flat(level.wait.name for level in levels))
        kind = self.types[buffer]
        started = self._emit("all_reduce_", "mesh.all_reduce_", (Ref(buffer), axis, reduce), kind)
        return self._emit("wait", "mesh.wait", (Ref(started), Ref(buffer)), kind)

    def _reduce_scatter(self, levels: tuple[Level, ...]) -> str:
        _, axis, reduce = levels[0].start.args
        piece = self._flat(level.wait.name for level in levels)
        whole = self._flat(level.start.operands[0] for level in levels)
        num_parts = whole.num_elements // piece.num_elements
        parts = [self._parts(number, level, num_parts) for number, level in enumerate(levels)]
        joined_type = TensorType(piece.dtype, (num_parts, piece.num_elements))
        joined = self._emit("cat", "aten.cat.default", (tuple(map(Ref, parts)), 1), joined_type)
        row = TensorType(piece.dtype, (1, piece.num_elements))
        started = self._emit("reduce_scatter", "mesh.reduce_scatter", (Ref(joined), axis, reduce), row)
        waited = self._emit("wait", "mesh.wait", (Ref(started), Ref(joined)), row)
        return self._emit("flat", "aten.view.default", (Ref(waited), piece.shape), piece)

    def _parts(self, number: int, level: Level, num_parts: int) -> str:
        stacked = level.start.operands[0]
        kind = self.types[stacked]
        shape = (num_parts, kind.num_elements // num_parts)
        return self._emit(f"parts.{number}", "aten.view.default", (Ref(stacked), shape), TensorType(kind.dtype, shape))

    def _flat(self, names: Iterable[str]) -> TensorType:
        kinds = [self.types[name] for name in names]
        return TensorType(kinds[0].dtype, (sum(kind.num_elements for kind in kinds),))

    def _unpack(self, buffer: str, waits: list[Node]) -> None:
        """Give the pieces of the buffer the names, and dense types, of what the members' waits gave."""
        names = tuple(wait.name for wait in waits)
        for name in names:
            self.types[name] = TensorType(self.types[name].dtype, self.types[name].shape)
        shapes = tuple(self.types[name].shape for name in names)
        self.nodes.append(Node("mesh.unpack", (Ref(buffer), shapes), (), names, Phase.BACKWARD))

    def _emit(self, what: str, op: str, args: tuple[Arg, ...], result: TensorType) -> str:
        name = f"{self._stem}/{what}"
        self.nodes.append(Node(op, args, (), (name,), Phase.BACKWARD))
        self.types[name] = result
        return name
