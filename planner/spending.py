"""What a plan's modules spend, from the plan and its graph alone: lowered again, priced again.

Prices are those of the plan's cluster: for machines that are modelled the model, without torch; for this machine's own
ranks (`cpu:N`) what the price database already knows, which needs torch to name the device. Nothing is measured here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from shardwright.ir import Cluster, Graph, ShardwrightError, load_cluster
from shardwright.ir.plan import Plan
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.lower import lower
from shardwright.passes.prices import Prices
from shardwright.passes.timeline import timeline
from shardwright.planner.module_seconds import Spent, module_seconds

__all__ = ["Spending", "plan_spending"]


@dataclass(frozen=True, slots=True)
class Spending:
    """Seconds by module path, and where the prices are from."""

    by_module: Mapping[str, Spent]
    source: str
    """`modelled`, `measured here`, or why there is nothing."""


def plan_spending(plan: Plan, graph: Graph) -> Spending:
    """Of one rank and one step. A plan that cannot be lowered, or whose cluster is not here, has no seconds."""
    try:
        cluster = load_cluster(plan.cluster)
        rank_graph = lower(graph, plan.decisions)
        with _prices(cluster) as (prices, source):
            found = timeline(rank_graph, plan.decisions.mesh, prices, cluster)
    except ShardwrightError as error:
        return Spending({}, f"no ms: {error}")
    return Spending(module_seconds(rank_graph, found, plan.identity.accumulate), source)


@contextmanager
def _prices(cluster: Cluster) -> Iterator[tuple[Prices, str]]:
    from shardwright.runtime.profile_db import ProfileDb, default_path

    path = default_path()
    if not cluster.device.measured or not path.exists() or find_spec("torch") is None:
        yield AnalyticalPrices(cluster), "modelled"
        return
    from shardwright.runtime.measured_prices import MeasuredPrices

    with ProfileDb(path) as database:
        yield MeasuredPrices(cluster, database, measure=False), "measured here"
