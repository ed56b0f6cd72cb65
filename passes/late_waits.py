"""Late waits: compute waits for a start only where it needs the result.

Needs a rank graph. Gives the same nodes in another order. A wait, with the views and merges of its result, stands right
before the first node that reads it. Nothing leaves its phase.

Waits of gradients are read by nothing that computes. They could wait until the phase ends, but what was sent lives
until then. So they end first in, first out, as soon as more bytes are under way than allowed; what was reduced in place
holds nothing extra and is free to wait, unless its gradient is to die before the phase ends. Where a second reduction
follows the first (a gradient reduced over two axes), the first ends when the next one has started, so that both axes
stay busy. Waits of copies to the host are left to `copy-room`.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Graph, Node
from shardwright.ir.ops import COPY_OPS, aliased_operand, is_async_start
from shardwright.passes.early_starts import REDUCTIONS
from shardwright.passes.lifetimes import first_backward, storage_roots

__all__ = ["LateWaits"]

_WAITS = frozenset({"mesh.wait", "tier.wait"})
_COPIES = COPY_OPS | {"aten.cat.default"}


@dataclass(frozen=True, slots=True)
class LateWaits:
    """Move waits to the first use of what they wait for."""

    name: ClassVar[str] = "late-waits"

    reduce_bytes: int = 64 * 2**20
    """Whole gradients that live only because their reduction is under way; the newest may exceed it alone."""
    apart: frozenset[str] = frozenset()
    """Parameters whose gradients die before the phase ends."""

    def run(self, graph: Graph) -> Graph:
        dying = frozenset(graph.gradients[name] for name in self.apart if name in graph.gradients)
        return replace(graph, nodes=_Sinking(graph, self.reduce_bytes, dying).run())


@dataclass
class _Sinking:
    graph: Graph
    reduce_bytes: int
    dying: frozenset[str]
    """Gradients that do not live until the phase ends."""
    emitted: list[int] = field(default_factory=list)
    """Positions in the given graph, in the new order."""
    done: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    """Positions that were passed, or are tails, and are not emitted yet."""
    readers: dict[str, list[int]] = field(default_factory=dict)
    """Storage to held positions that read it, some of them emitted since."""
    reductions: deque[int] = field(default_factory=deque)
    """Waits of gradients under way, oldest first."""
    reducing_bytes: int = 0
    first_of_two: list[int] = field(default_factory=list)
    """Waits of gradients under way on which another start hangs."""

    def __post_init__(self) -> None:
        self.roots = storage_roots(self.graph)
        self.freed = {self.roots[gradient] for gradient in self.dying}
        self.makers = {r: i for i, node in enumerate(self.graph.nodes) for r in node.results}
        self.tails = _tails(self.graph, self.makers)
        self.chained = _chained(self.graph, self.tails)
        self.lazy = _lazy(self.graph, self.makers) | self.tails
        self.wait_of = {n.operands[0]: i for i, n in enumerate(self.graph.nodes) if n.op in _WAITS}

    def run(self) -> tuple[Node, ...]:
        border = first_backward(self.graph)
        self._hold(self.tails)
        for position in range(len(self.graph.nodes)):
            if position == border:
                self._flush(self.held - self.tails)
            if position not in self.lazy:
                self._emit(position)
            elif position not in self.done and position not in self.tails:
                self._hold([position])
        while self.reductions or self.first_of_two:
            self._release(self.first_of_two.pop() if self.first_of_two else self.reductions.popleft())
        self._flush(self.held)
        return tuple(self.graph.nodes[position] for position in self.emitted)

    def _hold(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.held.add(position)
            for name in self.graph.nodes[position].operands:
                self.readers.setdefault(self.roots[name], []).append(position)

    def _flush(self, positions: set[int]) -> None:
        for position in sorted(positions):
            self._emit(position)

    def _emit(self, position: int) -> None:
        """A node, behind everything held that it needs. Chains of those may be too long for Python's stack."""
        waiting = [position]
        while waiting:
            missing = self._missing(waiting[-1]) if waiting[-1] not in self.done else None
            if missing is not None:
                waiting.append(missing)
            else:
                self._emit_ready(waiting.pop())

    def _missing(self, position: int) -> int | None:
        makers = (self.makers[name] for name in self.graph.nodes[position].operands if name in self.makers)
        return next((maker for maker in makers if maker not in self.done), None)

    def _emit_ready(self, position: int) -> None:
        if position in self.done:
            return
        node = self.graph.nodes[position]
        if node.op == "mesh.all_reduce_":
            # It overwrites what held nodes still have to read.
            earlier = self.readers.get(self.roots[node.operands[0]], ())
            self._flush({p for p in earlier if p < position and p in self.held})
        if position in self.done:
            return
        self.done.add(position)
        self.held.discard(position)
        self.emitted.append(position)
        if node.op in REDUCTIONS:
            self._count_reduction(node)

    def _count_reduction(self, start: Node) -> None:
        while self.first_of_two:
            self._release(self.first_of_two.pop())
        wait = self.wait_of.get(start.name)
        if wait is None or wait not in self.tails or wait in self.done:
            return
        if wait in self.chained:
            self.first_of_two.append(wait)
            return
        self.reductions.append(wait)
        self.reducing_bytes += self._sent_bytes(wait)
        while len(self.reductions) > 1 and self.reducing_bytes > self.reduce_bytes:
            self._end_oldest()

    def _end_oldest(self) -> None:
        wait = self.reductions.popleft()
        self.reducing_bytes -= self._sent_bytes(wait)
        self._release(wait)

    def _sent_bytes(self, wait: int) -> int:
        handle, sent = self.graph.nodes[wait].operands
        holds_nothing = self.roots[handle] == self.roots[sent] and self.roots[handle] not in self.freed
        return 0 if holds_nothing else self.graph.types[sent].num_bytes

    def _release(self, position: int) -> None:
        """Emit a tail from here up to the next start, as far as it is ready."""
        if position in self.done:
            return
        self._emit(position)
        node = self.graph.nodes[position]
        for user in [u for result in node.results for u in self.graph.users.get(result, ())]:
            ready = all(self.makers.get(name, position) in self.done for name in self.graph.nodes[user].operands)
            if user in self.tails and ready and self.graph.nodes[user].op not in _WAITS:
                self._release(user)


def _lazy(graph: Graph, makers: dict[str, int]) -> frozenset[int]:
    """Waits, and views and merges of what they give; not waits of copies out, which nobody reads in their phase."""
    found: set[int] = set()
    for position, node in enumerate(graph.nodes):
        if node.op == "tier.wait" and graph.producers[node.operands[0]].op == "tier.offload":
            continue
        moves = aliased_operand(node) is not None or node.op == "mesh.merge"
        follows = moves and not is_async_start(node.op) and makers.get(node.operands[0]) in found
        if node.op in _WAITS or follows:
            found.add(position)
    return frozenset(found)


def _tails(graph: Graph, makers: dict[str, int]) -> frozenset[int]:
    """Nodes of backward behind the wait of a reduction that lead to gradients and nothing else."""
    behind: set[int] = set()
    for position in range(first_backward(graph), len(graph.nodes)):
        node = graph.nodes[position]
        ends = node.op == "mesh.wait" and graph.producers[node.operands[0]].op in REDUCTIONS
        # All of backward leads to gradients: a node that computes is no tail.
        if ends or _moves(node) and any(makers.get(name, -1) in behind for name in node.operands):
            behind.add(position)
    for position in sorted(behind, reverse=True):
        users = [user for result in graph.nodes[position].results for user in graph.users.get(result, ())]
        if not behind.issuperset(users):
            behind.discard(position)
    return frozenset(behind)


def _moves(node: Node) -> bool:
    return aliased_operand(node) is not None or node.op.startswith("mesh.") or node.op in _COPIES


def _chained(graph: Graph, tails: frozenset[int]) -> frozenset[int]:
    """Those tail nodes on which another start hangs."""
    found: set[int] = set()
    for position in sorted(tails, reverse=True):
        users = {user for result in graph.nodes[position].results for user in graph.users.get(result, ())}
        if any(user in found or is_async_start(graph.nodes[user].op) for user in users):
            found.add(position)
    return frozenset(found)
