"""Tails: what still happens to a gradient once its first reduction starts, where nothing else depends on it.

Needs a rank graph. Gives, for each gradient that ends in reductions, the chain of nodes from the first start to the
gradient itself: per reduction its start and wait with what is done to the value in between, and what follows the last.
Everything in a tail has one reader, the next in the tail, so the whole of it can be moved or merged with others.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.ir import Graph, Node, Phase

__all__ = ["Level", "Tail", "tails"]


@dataclass(frozen=True, slots=True)
class Level:
    """One reduction."""

    before: tuple[Node, ...]
    """From the wait of the level before to this start; empty at the first level."""
    start: Node
    wait: Node


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of one gradient."""

    gradient: str
    levels: tuple[Level, ...]
    after: tuple[Node, ...]
    """Behind the last wait."""
    position: int
    """Of the first start."""

    @property
    def nodes(self) -> Iterator[Node]:
        for level in self.levels:
            yield from (*level.before, level.start, level.wait)
        yield from self.after


def tails(graph: Graph) -> tuple[Tail, ...]:
    """The tails of all gradients, in the order in which their first starts stand."""
    starts = {node.name: position for position, node in enumerate(graph.nodes) if node.op in _REDUCTIONS}
    others = {graph.loss, *graph.outputs.values(), *graph.updates.values()}
    found = []
    for gradient in dict.fromkeys(graph.gradients.values()):
        tail = None if gradient in others else _tail(gradient, _chain(graph, gradient), starts)
        if tail is not None:
            found.append(tail)
    return tuple(sorted(found, key=lambda tail: tail.position))


_REDUCTIONS = frozenset({"mesh.all_reduce", "mesh.reduce_scatter"})


def _chain(graph: Graph, gradient: str) -> list[Node]:
    """Nodes that lead to the gradient and to nothing else, in execution order."""
    chain: list[Node] = []
    value, num_readers = gradient, 0
    while True:
        node = graph.producers.get(value)
        if node is None or not _leads_on(graph, node, value, num_readers):
            break
        if node.op == "mesh.wait":
            chain += (node, graph.producers[node.operands[0]])
            # What was sent has two readers: its start and its wait.
            value, num_readers = node.operands[1], 2
        else:
            chain.append(node)
            value, num_readers = node.operands[0], 1
        if value in graph.returned:
            break
    chain.reverse()
    return chain


def _leads_on(graph: Graph, node: Node, value: str, num_readers: int) -> bool:
    """Whether `value` has no readers but those in the tail, and its node reads a single value."""
    if node.phase is not Phase.BACKWARD or len(node.results) != 1 or len(graph.users.get(value, ())) != num_readers:
        return False
    if node.op != "mesh.wait":
        return len(set(node.operands)) == 1
    handle = node.operands[0]
    return graph.producers[handle].op in _REDUCTIONS and len(graph.users[handle]) == 1


def _tail(gradient: str, chain: list[Node], starts: dict[str, int]) -> Tail | None:
    """The chain from its first start on, cut at its waits; None where nothing is reduced."""
    levels: list[Level] = []
    pending: list[Node] = []
    for node in chain:
        if node.op == "mesh.wait":
            *before, start = pending
            levels.append(Level(tuple(before) if levels else (), start, node))
            pending = []
        else:
            pending.append(node)
    if not levels:
        return None
    return Tail(gradient, tuple(levels), tuple(pending), starts[levels[0].start.name])
