"""One model under many budgets: what a smaller memory costs, as a curve that can be trusted to be one.

Every budget is searched in turn, the largest first, with what the others found at hand; at the end each takes the best
plan of all that fit it. So the curve is monotone: under a tighter budget time never falls and the peak never rises.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.ir import Budget, Cluster, Mesh
from shardwright.planner.api import PlanResult
from shardwright.planner.candidates import Candidate, best, refitted
from shardwright.planner.defaults import GAP, TIME_LIMIT_SECONDS, silent
from shardwright.planner.problem import pose, size_of
from shardwright.planner.progress import ProgressSink
from shardwright.planner.search import Found, Search
from shardwright.runtime.loss import LossFunction

if TYPE_CHECKING:
    from torch import nn

__all__ = ["sweep"]


def sweep(
    module: "nn.Module",
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    cluster: str | Cluster,
    budgets: Sequence[str | int],
    host: str | int = 0,
    optimizer: str = "adamw",
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    seed: int = 0,
    outputs: Collection[str] = (),
    mesh: Mesh | None = None,
    rules: str | Path | None = None,
    time_limit: float = TIME_LIMIT_SECONDS,
    gap: float = GAP,
    target: str = "",
    progress: ProgressSink = silent,
) -> list[PlanResult]:
    """A plan for each of the budgets, in their order; other arguments as those of `plan`, `time_limit` for each.

    Baselines are judged with the schedule that suits the largest budget. Raises InfeasibleError for the first budget,
    from the largest down, that nothing fits.
    """
    sizes = [size_of(budget) for budget in budgets]
    if not sizes:
        return []
    problem = pose(
        module,
        args,
        kwargs,
        cluster=cluster,
        budget=max(sizes),
        host=host,
        optimizer=optimizer,
        loss=loss,
        loss_fn=loss_fn,
        seed=seed,
        accumulate=1,
        outputs=outputs,
        mesh=mesh,
        rules=rules,
        time_limit=time_limit,
        gap=gap,
        target=target,
        progress=progress,
    )
    search = Search(problem.request)
    found = {size: search.under(size) for size in sorted(set(sizes), reverse=True)}
    host_bytes = problem.request.budget.host_bytes
    chosen = {size: _best_of_all(one, search.pool, Budget(size, host_bytes)) for size, one in found.items()}
    plans = {size: problem.plan(one, size) for size, one in chosen.items()}
    return [PlanResult(plans[size], problem.captured.graph, problem.captured) for size in sizes]


def _best_of_all(found: Found, pool: Sequence[Candidate], budget: Budget) -> Found:
    """What the budget's own search found, with the best plan of any search in its place."""
    chosen = best([refitted(candidate, budget) for candidate in pool])
    bound_seconds = min(found.bound_seconds, chosen.objective_seconds)
    return replace(
        found, chosen=chosen, objective_seconds=chosen.objective_seconds, bound_seconds=bound_seconds, pool=tuple(pool)
    )
