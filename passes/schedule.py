"""The order of passes that turn a lowered rank graph into the one that runs: all that moves, in one tuple.

Needs a rank graph as `lower` writes it, starts and waits side by side. Gives the same program with small collectives
merged, starts early and waits late. Which collectives there are, on which axes, was decided before.
"""

from shardwright.ir import Graph
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.prefetch import Prefetch, block_gather_bytes
from shardwright.passes.schedule_check import check_schedule

__all__ = ["schedule", "schedule_passes"]


def schedule_passes(gather_bytes: int) -> tuple[Pass, ...]:
    """Every pass with its defaults; `gather_bytes` as in `Prefetch`."""
    return (EarlyStarts(), BucketGathers(), Bucket(), InPlace(), LateWaits(), Prefetch(gather_bytes))


def schedule(graph: Graph, passes: tuple[Pass, ...] | None = None) -> Graph:
    """Run the passes, by default with one block's gathers under way, and check the result.

    Raises GraphError where a start would be read too early or never waited for.
    """
    for step in schedule_passes(block_gather_bytes(graph)) if passes is None else passes:
        graph = step.run(graph)
    check_schedule(graph)
    return graph
