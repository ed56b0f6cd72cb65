"""From captured graph and decisions to the program that runs: every pass, in order."""

from shardwright.ir import Decisions, Graph, Schedule
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.copy_room import CopyRoom
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.lower import lower
from shardwright.passes.prefetch import Prefetch
from shardwright.passes.schedule_check import check_schedule

__all__ = ["rank_graph", "scheduled", "scheduling_passes"]


def scheduling_passes(schedule: Schedule) -> tuple[Pass, ...]:
    """Which collectives there are is decided before; these merge and move them."""
    return (
        EarlyStarts(),
        BucketGathers(bucket_bytes=schedule.gather_bucket_bytes),
        Bucket(schedule.bucket_bytes),
        InPlace(),
        LateWaits(schedule.reduce_bytes),
        Prefetch(schedule.gather_bytes),
        CopyRoom(schedule.room_bytes),
    )


def rank_graph(graph: Graph, decisions: Decisions) -> Graph:
    """The program of one rank, the same text on every rank; a plan means exactly this.

    Raises PlanError for decisions that cannot be carried out.
    """
    return scheduled(lower(graph, decisions), decisions.schedule)


def scheduled(lowered: Graph, schedule: Schedule) -> Graph:
    """The passes behind `lower`, and a check of what they did."""
    for step in scheduling_passes(schedule):
        lowered = step.run(lowered)
    check_schedule(lowered)
    return lowered
