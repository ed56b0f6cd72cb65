"""From captured graph and decisions to the program that runs: every pass, in order."""

from shardwright.ir import Clip, Decisions, Graph, PlanError, Schedule, Tier
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.copy_room import CopyRoom
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.host_steps import HostSteps
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.lower import lower
from shardwright.passes.prefetch import Prefetch
from shardwright.passes.schedule_check import check_schedule

__all__ = ["planned", "rank_graph", "scheduled", "scheduling_passes"]


def scheduling_passes(schedule: Schedule, apart: frozenset[str] = frozenset()) -> tuple[Pass, ...]:
    """Which collectives there are is decided before; these merge and move them.

    `apart`: parameters whose gradients die within backward.
    """
    return (
        EarlyStarts(),
        BucketGathers(bucket_bytes=schedule.gather_bucket_bytes),
        Bucket(schedule.bucket_bytes, apart),
        InPlace(),
        LateWaits(schedule.reduce_bytes, apart),
        Prefetch(schedule.gather_bytes),
        CopyRoom(schedule.room_bytes),
    )


def rank_graph(graph: Graph, decisions: Decisions) -> Graph:
    """The program of one rank, the same text on every rank; a plan means exactly this.

    Raises PlanError for decisions that cannot be carried out.
    """
    return planned(lower(graph, decisions), decisions)


def planned(lowered: Graph, decisions: Decisions) -> Graph:
    """What runs, from what `lower` gives for the same decisions: scheduled, and stepped in backward where that is
    declared sound. Raises PlanError for a trained parameter on the host that backward does not step there."""
    _require_stepped(lowered, decisions)
    if decisions.clip is not Clip.NONE:
        return scheduled(lowered, decisions.schedule)
    on_host = frozenset(name for name, tier in decisions.tiers.items() if tier is Tier.HOST)
    program = scheduled(lowered, decisions.schedule, on_host)
    return HostSteps(decisions.tiers, decisions.schedule.reduce_bytes).run(program)


def _require_stepped(lowered: Graph, decisions: Decisions) -> None:
    for name in lowered.gradients:
        if decisions.parameters.get(name) is not Tier.HOST:
            continue
        if decisions.tiers.get(name) is not Tier.HOST:
            raise PlanError(
                f"expected the optimizer state of {name} on the host, as the parameter, found it on the device;"
                f" add `state {name} host`, or take `parameter {name} host` out"
            )
        if decisions.clip is not Clip.NONE:
            raise PlanError(
                f"expected clip none for `parameter {name} host`, found clip {decisions.clip}: only backward steps"
                " parameters on the host; declare --clip none, or take the line out"
            )


def scheduled(lowered: Graph, schedule: Schedule, apart: frozenset[str] = frozenset()) -> Graph:
    """The passes behind `lower`, and a check of what they did."""
    for step in scheduling_passes(schedule, apart):
        lowered = step.run(lowered)
    check_schedule(lowered)
    return lowered
