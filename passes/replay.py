"""Replay: the rank graph on a clock and in memory. Every figure in a plan comes from here.

Needs a rank graph, the mesh, `Prices`, the cluster, the optimizer and the tiers of its state. Gives seconds and bytes
of one rank for one step: forward, backward (`timeline`), the optimizer's step (here), and memory (`footprint`). Where
gradients are accumulated, a step is the program several times over, on top of the gradients of the times before.

The optimizer steps all parameters whose state is on the device at once. Those with state on the host follow one by
one: value and gradient (the gradient alone where there is a master) are copied out, stepped there, and the value is
copied back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardwright.ir import DTYPE_BYTES, Graph, Mesh, TensorType, Tier
from shardwright.ir.cluster import Cluster
from shardwright.passes.footprint import Footprint, footprint, stepped
from shardwright.passes.lifetimes import Storage
from shardwright.passes.optimizers import OptimizerSpec, StepKind
from shardwright.passes.prices import Prices
from shardwright.passes.timeline import COMPUTE, COPY_IN, COPY_OUT, Event, Timeline, phase_of, timeline

__all__ = ["Replay", "replay"]

HOST = "host"
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Replay:
    """One step of one rank."""

    timeline: Timeline
    """Forward and backward, once."""
    footprint: Footprint
    optimizer_events: tuple[Event, ...]
    peak_phase: str
    """`forward`, `backward` or `optimizer`."""
    accumulate: int = 1
    """How often a step runs forward and backward."""

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that takes time in the last forward and backward, and the optimizer behind them."""
        return (*self.timeline.events, *self.optimizer_events)

    @property
    def step_seconds(self) -> float:
        return self.accumulate * self.timeline.end_seconds + self.optimizer_seconds

    @property
    def compute_seconds(self) -> float:
        return self.accumulate * self.timeline.compute_seconds

    @property
    def exposed_communication_seconds(self) -> float:
        return self.accumulate * self.timeline.exposed_communication_seconds

    @property
    def exposed_copy_seconds(self) -> float:
        """Of forward and backward; the optimizer's own copies count as optimizer."""
        return self.accumulate * self.timeline.exposed_copy_seconds

    @property
    def optimizer_seconds(self) -> float:
        if not self.optimizer_events:
            return 0.0
        return self.optimizer_events[-1].end_seconds - self.timeline.end_seconds

    @property
    def peak_bytes(self) -> int:
        return self.footprint.peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        return self.footprint.host_peak_bytes

    @property
    def disk_peak_bytes(self) -> int:
        return self.footprint.disk_peak_bytes

    @property
    def peak_position(self) -> int:
        """Position of the node at the peak; the number of nodes where it is the optimizer's step."""
        return self.footprint.peak_position

    @property
    def peak_storages(self) -> tuple[Storage, ...]:
        """What is alive at the peak, largest first."""
        return self.footprint.peak_storages

    @property
    def curve_bytes(self) -> tuple[int, ...]:
        """Device bytes while each node runs; the last entry is the optimizer's step."""
        return self.footprint.curve_bytes


def replay(
    graph: Graph,
    mesh: Mesh,
    prices: Prices,
    cluster: Cluster,
    optimizer: OptimizerSpec,
    tiers: Mapping[str, Tier],
    step_kind: StepKind | None = None,
    accumulate: int = 1,
) -> Replay:
    """Seconds and bytes of the program `graph`, as one rank of `mesh` runs it; `tiers` as in `Decisions`.

    A step runs it `accumulate` times before the optimizer.
    `step_kind` is how torch runs the optimizer's step; by default as it does on this kind of device.
    """
    kind = step_kind or _STEP_KINDS.get(cluster.device.kind, StepKind.FOREACH)
    clock = timeline(graph, mesh, prices, cluster)
    memory = footprint(graph, optimizer, kind, tiers, cluster.device.block_bytes, accumulates=accumulate > 1)
    return Replay(
        timeline=clock,
        footprint=memory,
        optimizer_events=_optimizer_events(graph, prices, optimizer, tiers, clock.end_seconds),
        peak_phase=phase_of(graph, memory.peak_position),
        accumulate=accumulate,
    )


_STEP_KINDS: Final = {"cpu": StepKind.LOOP, "cuda": StepKind.FOREACH}


def _optimizer_events(
    graph: Graph, prices: Prices, optimizer: OptimizerSpec, tiers: Mapping[str, Tier], begin: float
) -> tuple[Event, ...]:
    parameters = stepped(graph)
    on_host = tuple(p for p in parameters if tiers.get(p, Tier.DEVICE) is Tier.HOST)
    on_device = tuple(graph.types[p] for p in parameters if tiers.get(p, Tier.DEVICE) is Tier.DEVICE)
    durations = []
    if on_device:
        durations.append((COMPUTE, OPTIMIZER, _step_seconds(prices, optimizer, on_device, False)))
    for name in on_host:
        kind = graph.types[name]
        sent_bytes = optimizer.sent_bytes(kind.num_elements, DTYPE_BYTES[kind.dtype])
        durations.append((COPY_OUT, name, prices.copy_seconds(sent_bytes)))
        durations.append((HOST, name, _step_seconds(prices, optimizer, (kind,), True)))
        durations.append((COPY_IN, name, prices.copy_seconds(kind.num_bytes)))
    events = []
    for stream, name, seconds in durations:
        events.append(Event(stream, begin, begin + seconds, name, OPTIMIZER))
        begin += seconds
    return tuple(events)


def _step_seconds(prices: Prices, optimizer: OptimizerSpec, parameters: tuple[TensorType, ...], on_host: bool) -> float:
    state_bytes = sum(optimizer.state_bytes(kind.num_elements, DTYPE_BYTES[kind.dtype]) for kind in parameters)
    return prices.optimizer_seconds(sum(kind.num_elements for kind in parameters), state_bytes, on_host)
