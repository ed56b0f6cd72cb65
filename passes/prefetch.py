"""Prefetch: parameter gathers start before compute needs them.

Needs a rank graph whose waits stand at their first use (`late-waits`). Gives the same nodes in another order. On every
mesh axis starts keep their order and move up to `lookahead_nodes` nodes ahead, as long as what has started and is not
yet waited for stays within a number of bytes. So memory is bounded, every wait makes room for the next start, and
nothing leaves its phase.

A parameter gather is one whose operand comes from parameters by data movement alone. What leads to it moves with it;
where that is itself a gather (a parameter split over two axes) the inner one has a window of its own and goes first.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Graph, InputKind, Node
from shardwright.ir.ops import COPY_OPS, aliased_operand
from shardwright.passes.lifetimes import first_backward

__all__ = ["Prefetch", "block_gather_bytes"]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start gathers early."""

    name: ClassVar[str] = "prefetch"

    gather_bytes: int
    """Gathered bytes under way on one axis, at most; a larger gather starts where it is needed. 0 moves nothing."""
    lookahead_nodes: int = 1000
    """How many nodes before its place a start may stand."""

    def run(self, graph: Graph) -> Graph:
        return replace(graph, nodes=_Moving(graph, self).run())


def block_gather_bytes(graph: Graph) -> int:
    """Bytes that the parameter gathers of one block bring in on one axis: the largest over blocks, axes and phases.

    A block is a module path up to its first integer segment; gathers outside blocks do not count. A sensible
    `gather_bytes` is this: one block computes while the next arrives.
    """
    totals: dict[tuple[str, str, str], int] = {}
    for position in _candidates(graph, _from_parameters(graph)):
        node = graph.nodes[position]
        block = _block(node.module)
        if block:
            key = (block, _axis(node), node.phase.value)
            totals[key] = totals.get(key, 0) + graph.types[node.name].num_bytes
    return max(totals.values(), default=0)


def _block(module: str) -> str:
    segments = module.split(".")
    number = next((i for i, segment in enumerate(segments) if segment.isdecimal()), None)
    return "" if number is None else ".".join(segments[: number + 1])


def _from_parameters(graph: Graph) -> frozenset[int]:
    """Positions of nodes that move data and read nothing but parameters, buffers and each other."""
    known = set(graph.inputs_of(InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER))
    found = set()
    for position, node in enumerate(graph.nodes):
        moves = node.op.startswith(("mesh.", "tier.")) or node.op in COPY_OPS or aliased_operand(node) is not None
        if moves and node.operands and known.issuperset(node.operands):
            found.add(position)
            known.update(node.results)
    return frozenset(found)


def _candidates(graph: Graph, movable: frozenset[int]) -> list[int]:
    return [
        position for position, node in enumerate(graph.nodes) if node.op == "mesh.all_gather" and position in movable
    ]


def _axis(node: Node) -> str:
    return str(node.args[1])


@dataclass
class _Moving:
    graph: Graph
    options: Prefetch
    emitted: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    under_way_bytes: dict[str, int] = field(default_factory=dict)
    """By axis."""

    def __post_init__(self) -> None:
        self.makers = {r: i for i, node in enumerate(self.graph.nodes) for r in node.results}
        self.border = first_backward(self.graph)
        self.candidates = frozenset(_candidates(self.graph, _from_parameters(self.graph)))
        self.queues: dict[str, list[int]] = {}
        for position in sorted(self.candidates, reverse=True):
            self.queues.setdefault(_axis(self.graph.nodes[position]), []).append(position)
        # Inner gathers first: theirs is the axis that starts first.
        self.axes = sorted(self.queues, key=lambda axis: self.queues[axis][-1])

    def run(self) -> tuple[Node, ...]:
        for position in range(len(self.graph.nodes)):
            while any([self._fill(axis, position) for axis in self.axes]):
                pass
            self._emit(position)
        return tuple(self.graph.nodes[position] for position in self.emitted)

    def _fill(self, axis: str, position: int) -> bool:
        """Start what may stand before the node at `position`, and say whether that was anything."""
        num_started = len(self.queues[axis])
        while self._advance(axis, position):
            pass
        return len(self.queues[axis]) < num_started

    def _advance(self, axis: str, position: int) -> bool:
        """Start the next gather over an axis, if it may stand there."""
        queue = self.queues[axis]
        while queue and queue[-1] in self.done:
            queue.pop()
        if not queue or not self._may_start(axis, queue[-1], position):
            return False
        self._emit(queue.pop())
        return True

    def _may_start(self, axis: str, start: int, position: int) -> bool:
        fits = self.under_way_bytes.get(axis, 0) + self._num_bytes(start) <= self.options.gather_bytes
        same_phase = (start < self.border) == (position < self.border)
        near = start - position <= self.options.lookahead_nodes
        return fits and same_phase and near and not self._needs_a_start(start)

    def _needs_a_start(self, position: int) -> bool:
        """Whether a gather that has not started leads here: it has to fit its own window first."""
        makers = [self.makers[name] for name in self.graph.nodes[position].operands if name in self.makers]
        pending = [maker for maker in makers if maker not in self.done]
        return any(maker in self.candidates or self._needs_a_start(maker) for maker in pending)

    def _emit(self, position: int) -> None:
        """A node, behind what leads to it: of a gather that is data movement from parameters, and its waits."""
        if position in self.done:
            return
        self.done.add(position)
        node = self.graph.nodes[position]
        for name in node.operands:
            if name in self.makers:
                self._emit(self.makers[name])
        self.emitted.append(position)
        self._count(position, node)

    def _count(self, position: int, node: Node) -> None:
        started = self.makers.get(node.operands[0]) if node.op == "mesh.wait" else None
        if position in self.candidates:
            axis = _axis(node)
            self.under_way_bytes[axis] = self.under_way_bytes.get(axis, 0) + self._num_bytes(position)
        elif started is not None and started in self.candidates:
            self.under_way_bytes[_axis(self.graph.nodes[started])] -= self._num_bytes(started)

    def _num_bytes(self, position: int) -> int:
        return self.graph.types[self.graph.nodes[position].name].num_bytes
