"""What a plan pays for its memory: what is recomputed, moved to host or disk and gathered again, in bytes and seconds.

Needs a plan, its graph and its replay. Figures are those of one rank and one step.
"""

from dataclasses import dataclass

from shardwright.ir import Graph, InputKind, Phase
from shardwright.ir.plan import Plan
from shardwright.passes.lower import lower
from shardwright.passes.replay import Replay
from shardwright.passes.timeline import COMPUTE
from shardwright.planner.rank_totals import rank_totals

__all__ = ["Costs", "costs_of"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Beside the step time itself."""

    weight_bytes: int
    """Weights that a rank holds at rest."""
    whole_weight_bytes: int
    """The same where no weight is split."""
    recomputed_bytes: int
    """What recomputing avoids holding."""
    recompute_seconds: float
    """Operators of forward that run again in backward."""
    offloaded_bytes: int
    """Saved activations that wait on the host."""
    state_host_bytes: int
    """Optimizer state on the host."""
    regathered_bytes: int
    """Whole weights that forward had and freed, and backward gathers again."""
    spilled_bytes: int = 0
    """Saved activations that wait on disk."""
    weight_host_bytes: int = 0
    """Weights that lie on the host."""

    @property
    def host_bytes(self) -> int:
        return self.offloaded_bytes + self.state_host_bytes + self.weight_host_bytes


def costs_of(plan: Plan, graph: Graph, replay: Replay) -> Costs:
    """Raises PlanError for decisions that cannot be carried out."""
    totals = rank_totals(plan, graph)
    return Costs(
        weight_bytes=totals.weight_bytes,
        whole_weight_bytes=sum(graph.types[n].num_bytes for n in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN)),
        recomputed_bytes=totals.recomputed_bytes,
        recompute_seconds=_recompute_seconds(replay),
        offloaded_bytes=totals.offloaded_bytes,
        state_host_bytes=totals.state_host_bytes,
        regathered_bytes=_regathered_bytes(plan, graph),
        spilled_bytes=totals.spilled_bytes,
        weight_host_bytes=totals.weight_host_bytes,
    )


def _recompute_seconds(replay: Replay) -> float:
    """The rewriter calls what an operator makes again `~again`, and results nobody asked for `~unused`."""
    once = sum(
        event.end_seconds - event.start_seconds
        for event in replay.timeline.events
        if event.stream == COMPUTE and event.name.endswith(("~again", "~unused"))
    )
    return replay.accumulate * once


def _regathered_bytes(plan: Plan, graph: Graph) -> int:
    """Before gathers are merged: then each has its weight's name, and the layout it is wanted in, in front."""
    weights = set(graph.inputs_of(InputKind.PARAM, InputKind.FROZEN))
    lowered = lower(graph, plan.decisions)
    gathers = [n for n in lowered.nodes if n.op == "mesh.all_gather" and n.name.partition("~")[0] in weights]
    before = {node.name for node in gathers if node.phase is Phase.FORWARD}
    return sum(
        lowered.types[node.name].num_bytes
        for node in gathers
        if node.phase is Phase.BACKWARD and node.name.replace("~again", "") in before
    )
