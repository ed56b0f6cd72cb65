"""Replay: the rank graph on a clock and in memory. Every figure in a plan comes from here.

Needs a rank graph, the mesh, `Prices`, the cluster, the optimizer and the tiers of its state. Gives seconds and bytes
of one rank for one step: forward, backward (`timeline`), the optimizer's step (here), and memory (`footprint`). Where
gradients are accumulated, a step is the program several times over, on top of the gradients of the times before.

The optimizer steps all parameters whose state is on the device at once. Those with state on the host follow one by
one: value and gradient (the gradient alone where there is a master) are copied out, stepped there, and the value is
copied back. Those that the program steps in backward are on its timeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardwright.ir import Graph, Mesh, Tier
from shardwright.ir.cluster import Cluster
from shardwright.passes.footprint import Footprint, footprint, stepped
from shardwright.passes.host_steps import stepped_in_backward
from shardwright.passes.lifetimes import Storage
from shardwright.passes.optimizers import OptimizerSpec, StepKind
from shardwright.passes.prices import Prices
from shardwright.passes.step_prices import StepPrices
from shardwright.passes.timeline import COMPUTE, COPY_IN, COPY_OUT, HOST, Event, Timeline, phase_of, timeline

__all__ = ["Replay", "replay"]

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
    def exposed_host_seconds(self) -> float:
        """What compute lost to steps on the host in backward; those after it count as optimizer."""
        return self.timeline.exposed_host_seconds

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
    clock = timeline(graph, mesh, prices, cluster, optimizer)
    memory = footprint(graph, optimizer, kind, tiers, cluster.device.block_bytes, accumulates=accumulate > 1)
    return Replay(
        timeline=clock,
        footprint=memory,
        optimizer_events=_optimizer_events(graph, StepPrices(prices, optimizer), tiers, clock.end_seconds),
        peak_phase=phase_of(graph, memory.peak_position),
        accumulate=accumulate,
    )


_STEP_KINDS: Final = {"cpu": StepKind.LOOP, "cuda": StepKind.FOREACH}


def _optimizer_events(graph: Graph, steps: StepPrices, tiers: Mapping[str, Tier], begin: float) -> tuple[Event, ...]:
    done = stepped_in_backward(graph)
    parameters = [name for name in stepped(graph) if name not in done]
    on_device = tuple(graph.types[p] for p in parameters if tiers.get(p, Tier.DEVICE) is Tier.DEVICE)
    durations = []
    if on_device:
        durations.append((COMPUTE, OPTIMIZER, steps.device_seconds(on_device)))
    for name in parameters:
        if tiers.get(name, Tier.DEVICE) is Tier.HOST:
            seconds = steps.host_seconds(graph.types[name])
            durations.append((COPY_OUT, name, seconds.gradient_out + seconds.value_out))
            durations.append((HOST, name, seconds.step))
            durations.append((COPY_IN, name, seconds.value_in))
    events = []
    for stream, name, duration in durations:
        events.append(Event(stream, begin, begin + duration, name, OPTIMIZER))
        begin += duration
    return tuple(events)
