"""Timeline: when every node of a rank graph runs, on which stream, and what compute waits for.

Needs a rank graph, `Prices` and the cluster's links. Gives seconds from the start of the step.

There is one compute stream, one stream per mesh axis, one for copies to the host and one back, and one for the disk,
which reads or writes. Compute runs its nodes in graph order. A start is queued on its stream when compute reaches it
and runs when what was queued before is done. A wait holds compute until the start is done, and at least for the share
of it that link or host cannot hide: what compute lost while it ran, to cores or memory bandwidth shared with it.

Optimizer steps in backward have the stream of the host. One starts when its gradient has been copied out; then the
value is copied where it is needed, the parameter stepped, and the value copied back unless it lies there, one parameter
after another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir import Graph, GraphError, Mesh, Node, Phase, Tier
from shardwright.ir.cluster import Cluster, Host, Link
from shardwright.ir.ops import is_async_start, is_collective
from shardwright.passes.collective_model import span_of
from shardwright.passes.copies import lost_seconds, on_host, tier_of
from shardwright.passes.node_prices import NodePrices
from shardwright.passes.optimizers import OptimizerSpec
from shardwright.passes.prices import Prices
from shardwright.passes.step_prices import StepPrices

__all__ = ["COMPUTE", "COPY_IN", "COPY_OUT", "DISK", "HOST", "Event", "Timeline", "axis_link", "phase_of", "timeline"]

COMPUTE = "compute"
COPY_OUT = "copy-out"
COPY_IN = "copy-in"
DISK = "disk"
HOST = "host"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time."""

    stream: str
    """`compute`, the name of a mesh axis, `copy-out`, `copy-in`, `disk` or `host`."""
    start_seconds: float
    end_seconds: float
    name: str
    """`Node.name`, or what the optimizer does."""
    phase: str
    """`forward`, `backward` or `optimizer`."""


@dataclass(frozen=True)
class Timeline:
    """Forward and backward of one step."""

    events: tuple[Event, ...]
    """In the order in which compute reaches them; views and waits take no time and are left out."""
    end_seconds: float
    """When the last node is done."""
    compute_seconds: float
    """Operators alone, recomputed ones included."""
    exposed_communication_seconds: float
    """What compute lost to collectives: end = compute + exposed communication, copies and host steps."""
    exposed_copy_seconds: float
    """What compute lost to copies between tiers."""
    exposed_host_seconds: float
    """What compute lost to optimizer steps on the host."""


def axis_link(cluster: Cluster, mesh: Mesh, axis: str) -> Link:
    """The slowest level that a group of this axis uses: ranks are numbered row-major, node after node."""
    span = span_of(mesh.sizes, mesh.axes.index(axis), cluster.ranks_per_node)
    return cluster.inter if span.num_nodes > 1 else cluster.intra


def timeline(
    graph: Graph, mesh: Mesh, prices: Prices, cluster: Cluster, optimizer: OptimizerSpec | None = None
) -> Timeline:
    """Run the graph on a clock; `optimizer` is needed where the graph steps parameters itself."""
    overlaps = {axis: axis_link(cluster, mesh, axis).overlap for axis in mesh.axes}
    steps = None if optimizer is None else StepPrices(prices, optimizer)
    clock = _Clock(NodePrices(graph, mesh, prices), overlaps, cluster.host, steps, on_host(graph))
    for node in graph.nodes:
        clock.step(node)
    return clock.read()


@dataclass(frozen=True, slots=True)
class _Flight:
    """A start whose wait has not come."""

    end_seconds: float
    lost_seconds: float
    """Of compute, however well it is hidden."""
    is_collective: bool


@dataclass
class _Clock:
    prices: NodePrices
    overlaps: Mapping[str, float]
    """Of the links, by mesh axis."""
    host: Host
    steps: StepPrices | None
    residents: frozenset[str]
    """Parameters that lie on the host."""
    now: float = 0.0
    """When compute is free."""
    compute_seconds: float = 0.0
    exposed_communication_seconds: float = 0.0
    exposed_copy_seconds: float = 0.0
    exposed_host_seconds: float = 0.0
    free: dict[str, float] = field(default_factory=dict)
    """Stream to when all that is queued on it is done."""
    flights: dict[str, _Flight] = field(default_factory=dict)
    """By the value of the start."""
    steps_under_way: dict[str, _Flight] = field(default_factory=dict)
    """By the value of the start, then by that of the sent gradient: until the parameter is written."""
    events: list[Event] = field(default_factory=list)

    def step(self, node: Node) -> None:
        if is_async_start(node.op):
            self._start(node)
        elif node.op in ("mesh.wait", "tier.wait"):
            self._wait(node.operands[0])
        elif node.op == "tier.step":
            self._step(node)
        elif node.op == "tier.sent":
            self._wait(node.operands[0])
            self.steps_under_way[node.name] = self.steps_under_way.pop(node.operands[0])
        elif node.op == "tier.stepped":
            self.exposed_host_seconds += self._held_until(self.steps_under_way.pop(node.operands[1]))
        else:
            self._compute(node)

    def _compute(self, node: Node) -> None:
        seconds = self.prices.compute_seconds(node)
        if not seconds:
            return
        begin, self.now = self.now, self.now + seconds
        self.compute_seconds += seconds
        self.events.append(Event(COMPUTE, begin, self.now, node.name, node.phase.value))

    def _start(self, node: Node) -> None:
        stream = _stream(self.prices.graph, node)
        seconds = self.prices.move_seconds(node)
        begin = max(self.now, self.free.get(stream, 0.0))
        self.free[stream] = begin + seconds
        self.flights[node.name] = _Flight(begin + seconds, self._lost(node, seconds), is_collective(node.op))
        self.events.append(Event(stream, begin, begin + seconds, node.name, node.phase.value))

    def _lost(self, node: Node, seconds: float) -> float:
        """Of compute, to a start that takes so long."""
        if is_collective(node.op):
            return (1.0 - self.overlaps[str(node.args[1])]) * seconds
        num_bytes = self.prices.graph.types[node.operands[0]].num_bytes
        return lost_seconds(self.prices.prices, self.host, num_bytes)

    def _step(self, node: Node) -> None:
        if self.steps is None:
            raise GraphError(f"expected an optimizer for {node.op} {node.name}, found none; pass the one planned for")
        parameter = node.operands[1]
        kind, lies_there = self.prices.graph.types[parameter], parameter in self.residents
        seconds = self.steps.host_seconds(kind, lies_there=lies_there)
        out = max(self.now, self.free.get(COPY_OUT, 0.0))
        sent = self.free[COPY_OUT] = out + seconds.gradient_out
        begin = max(sent, self.free.get(HOST, 0.0))
        self.free[HOST] = begin + seconds.busy
        share = 1.0 - self.host.overlap
        self.steps_under_way[node.name] = _Flight(begin + seconds.busy, share * seconds.busy, False)
        self.flights[node.name] = _Flight(sent, share * seconds.gradient_out, False)
        self.events.append(Event(COPY_OUT, out, sent, node.name, node.phase.value))
        self.events.append(Event(HOST, begin, begin + seconds.busy, node.name, node.phase.value))

    def _wait(self, handle: str) -> None:
        flight = self.flights.pop(handle, None)
        if flight is None:
            return
        seconds = self._held_until(flight)
        if flight.is_collective:
            self.exposed_communication_seconds += seconds
        else:
            self.exposed_copy_seconds += seconds

    def _held_until(self, flight: _Flight) -> float:
        """Hold compute until it is done; gives what compute loses to that."""
        begin, self.now = self.now, max(self.now + flight.lost_seconds, flight.end_seconds)
        return self.now - begin

    def read(self) -> Timeline:
        return Timeline(
            events=tuple(self.events),
            end_seconds=self.now,
            compute_seconds=self.compute_seconds,
            exposed_communication_seconds=self.exposed_communication_seconds,
            exposed_copy_seconds=self.exposed_copy_seconds,
            exposed_host_seconds=self.exposed_host_seconds,
        )


def _stream(graph: Graph, node: Node) -> str:
    if is_collective(node.op):
        return str(node.args[1])
    if tier_of(graph, node) is Tier.DISK:
        return DISK
    return COPY_OUT if node.op == "tier.offload" else COPY_IN


def phase_of(graph: Graph, position: int) -> str:
    """`forward`, `backward`, or `optimizer` behind the last node."""
    if position >= len(graph.nodes):
        return "optimizer"
    return Phase(graph.nodes[position].phase).value
