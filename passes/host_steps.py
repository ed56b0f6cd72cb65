"""Host steps: parameters whose optimizer state is on the host are stepped while backward goes on.

Needs a scheduled rank graph and the tiers of the state; for scripts that do nothing with gradients but step. Gives, for
each such parameter p with gradient g, where g is final and nobody reads p any more,

  %p~step = tier.step(%g, %p, "p")      starts: g is copied out, stepped on the host, p written
  %p~sent = tier.sent(%p~step, %g)      g has left, its memory is free
  %p~stepped = tier.stepped(%p, %p~sent)

and the last in place of the gradient. Steps are waited for first in, first out, as soon as more bytes of gradients are
on the host than allowed, the rest at the end of backward. A gradient's copy is waited for when the gradients after the
next are final, or sooner where more bytes than allowed are under way.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Graph, Node, Phase, Ref, TensorType, Tier
from shardwright.passes.lifetimes import first_backward, storage_roots

__all__ = ["HostSteps", "stepped_in_backward"]


@dataclass(frozen=True, slots=True)
class HostSteps:
    """Step in backward what has its state on the host."""

    name: ClassVar[str] = "host-steps"

    tiers: Mapping[str, Tier]
    """Of parameters, as in `Decisions`."""
    window_bytes: int = 256 * 2**20
    """Gradients whose copy to the host is under way, and gradients there whose step is; the newest may exceed it."""

    def run(self, graph: Graph) -> Graph:
        ready = _ready(graph, [p for p in graph.gradients if self.tiers.get(p) is Tier.HOST])
        if not ready:
            return graph
        writer = _Writer(graph, self.window_bytes)
        for position, node in enumerate(graph.nodes):
            writer.nodes.append(node)
            if position in ready:
                writer.start(ready[position])
        writer.finish()
        gradients = {p: writer.stepped.get(p, g) for p, g in graph.gradients.items()}
        return replace(graph, nodes=tuple(writer.nodes), types=writer.types, gradients=gradients)


def stepped_in_backward(graph: Graph) -> dict[str, Node]:
    """Parameters that the program steps itself, with the `tier.step` of each."""
    return {str(node.args[2]): node for node in graph.nodes if node.op == "tier.step"}


def _ready(graph: Graph, parameters: Sequence[str]) -> dict[int, list[str]]:
    """Position behind which a parameter can be stepped, to the parameters: its gradient is final, its value read."""
    roots = storage_roots(graph)
    made = {result: position for position, node in enumerate(graph.nodes) for result in node.results}
    read = {roots[name]: position for position, node in enumerate(graph.nodes) for name in node.operands}
    found: dict[int, list[str]] = {}
    for parameter in parameters:
        position = max(made.get(graph.gradients[parameter], -1), read.get(roots[parameter], -1), first_backward(graph))
        found.setdefault(min(position, len(graph.nodes) - 1), []).append(parameter)
    return found


@dataclass
class _Writer:
    graph: Graph
    window_bytes: int
    nodes: list[Node] = field(default_factory=list)
    stepped: dict[str, str] = field(default_factory=dict)
    """Parameter to the value that stands for its gradient."""
    sending: deque[tuple[int, str]] = field(default_factory=deque)
    """(group, parameter) of copies under way, oldest first; gradients that are final at one position are a group."""
    stepping: deque[str] = field(default_factory=deque)
    group: int = 0

    def __post_init__(self) -> None:
        self.types: dict[str, TensorType] = dict(self.graph.types)

    def start(self, parameters: Sequence[str]) -> None:
        self.group += 1
        while self.sending and self.sending[0][0] < self.group - 1:
            self._wait_for_copy()
        for parameter in parameters:
            size = self._bytes(parameter)
            while self.sending and sum(self._bytes(p) for _, p in self.sending) + size > self.window_bytes:
                self._wait_for_copy()
            while self.stepping and sum(map(self._bytes, self.stepping)) + size > self.window_bytes:
                self._wait_for_step()
            gradient = self.graph.gradients[parameter]
            self._emit(parameter, "step", (Ref(gradient), Ref(parameter), parameter))
            self.sending.append((self.group, parameter))
            self.stepping.append(parameter)

    def finish(self) -> None:
        while self.sending:
            self._wait_for_copy()
        while self.stepping:
            self._wait_for_step()

    def _bytes(self, parameter: str) -> int:
        return self.graph.types[parameter].num_bytes

    def _wait_for_copy(self) -> None:
        _, parameter = self.sending.popleft()
        self._emit(parameter, "sent", (Ref(f"{parameter}~step"), Ref(self.graph.gradients[parameter])))

    def _wait_for_step(self) -> None:
        parameter = self.stepping.popleft()
        while any(parameter == sent for _, sent in self.sending):
            self._wait_for_copy()
        self.stepped[parameter] = self._emit(parameter, "stepped", (Ref(parameter), Ref(f"{parameter}~sent")))

    def _emit(self, parameter: str, what: str, args: tuple[Ref | str, ...]) -> str:
        name = f"{parameter}~{what}"
        made = self.graph.producers.get(self.graph.gradients[parameter])
        module, source = (made.module, made.source) if made else ("", "")
        self.nodes.append(Node(f"tier.{what}", args, (), (name,), Phase.BACKWARD, module, source))
        self.types[name] = self.graph.types[parameter]
        return name
