"""Bytes of one rank by what they are for: weights, gradients, optimizer state, batch, saved activations.

Needs a plan and its graph. These are sums at rest and say where memory goes; the peak is in the plan's `predict` line,
found by replay, and is not their sum: gradients grow while activations shrink, and temporaries come and go.
"""

from dataclasses import dataclass

from shardwright.ir import DTYPE_BYTES, Fate, Graph, InputKind, Tier
from shardwright.ir.plan import Plan
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.module_classes import local_bytes, saved_storages

__all__ = ["RankTotals", "rank_totals"]


@dataclass(frozen=True, slots=True)
class RankTotals:
    """Everything in bytes, on one rank."""

    weight_bytes: int
    gradient_bytes: int
    state_device_bytes: int
    state_host_bytes: int
    buffer_bytes: int
    batch_bytes: int
    kept_bytes: int
    """Saved activations that stay on the device between forward and backward."""
    offloaded_bytes: int
    """Saved activations that wait on the host."""
    recomputed_bytes: int
    """What recomputing avoids holding; on no tier."""
    spilled_bytes: int = 0
    """Saved activations that wait on disk."""
    weight_host_bytes: int = 0
    """Of the weights, those that lie on the host."""

    @property
    def host_bytes(self) -> int:
        return self.state_host_bytes + self.offloaded_bytes + self.weight_host_bytes


def rank_totals(plan: Plan, graph: Graph) -> RankTotals:
    """Sums over the graph at the plan's layouts. Raises PlanError for an optimizer that is not known."""
    decisions = plan.decisions
    spec = optimizer_spec(plan.identity.optimizer)

    def total(names: tuple[str, ...]) -> int:
        return sum(local_bytes(graph, decisions, name) for name in names)

    def state(names: tuple[str, ...]) -> int:
        sizes = ((local_bytes(graph, decisions, name), DTYPE_BYTES[graph.types[name].dtype]) for name in names)
        return sum(spec.state_bytes(num_bytes // element_bytes, element_bytes) for num_bytes, element_bytes in sizes)

    trained = graph.inputs_of(InputKind.PARAM)
    on_host = tuple(name for name in trained if decisions.tiers.get(name, Tier.DEVICE) is Tier.HOST)
    weights = graph.inputs_of(InputKind.PARAM, InputKind.FROZEN)
    lying = tuple(name for name in weights if decisions.parameters.get(name) is Tier.HOST)
    saved = tuple(dict.fromkeys((*saved_storages(graph), *decisions.fates)))

    def held(fate: Fate) -> tuple[str, ...]:
        return tuple(name for name in saved if decisions.fates.get(name, Fate.KEEP) is fate)

    spilled = tuple(name for name in held(Fate.OFFLOAD) if decisions.tiers.get(name) is Tier.DISK)

    return RankTotals(
        weight_bytes=total(weights),
        gradient_bytes=total(trained),
        state_device_bytes=state(trained) - state(on_host),
        state_host_bytes=state(on_host),
        buffer_bytes=total(graph.inputs_of(InputKind.BUFFER)),
        batch_bytes=total(graph.inputs_of(InputKind.INPUT)),
        kept_bytes=total(held(Fate.KEEP)),
        offloaded_bytes=total(held(Fate.OFFLOAD)) - total(spilled),
        recomputed_bytes=total(held(Fate.RECOMPUTE)),
        spilled_bytes=total(spilled),
        weight_host_bytes=total(lying),
    )
