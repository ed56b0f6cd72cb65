"""Plans of a small model at a loose and at a tight budget, by one search on one mesh."""

from dataclasses import dataclass

from tests.zoo.machines import compute_bound

from shardwright.ir import Budget, Cluster, InfeasibleError, Mesh, Plan
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.optimizers import optimizer_spec
from shardwright.passes.strategies import Rules
from shardwright.planner.api import silent
from shardwright.planner.fold import fold_of
from shardwright.planner.formulate import Machine
from shardwright.planner.infeasible import smallest_budget
from shardwright.planner.problem import Problem
from shardwright.planner.search import Request, Search
from shardwright.runtime.captured import Captured
from shardwright.runtime.identity import identify

__all__ = ["MESHES", "loose_and_tight"]

MESHES = {1: Mesh((), ()), 2: Mesh(("dp",), (2,)), 4: Mesh(("dp", "tp"), (2, 2))}
LOOSE_BYTES = 1 << 30
SLACK = 1.1
"""The tight budget relative to the smallest that works."""


def loose_and_tight(
    captured: Captured, mesh: Mesh, rules: Rules, target: str, *, cluster: Cluster | None = None, host_bytes: int = 0
) -> tuple[Plan, Plan]:
    """On a machine where splitting compute pays, unless another is given."""
    machines = cluster or compute_bound(mesh.num_ranks)
    request = Request(
        graph=captured.graph,
        fold=fold_of(captured.graph),
        rules=rules,
        machine=Machine(machines, AnalyticalPrices(machines), optimizer_spec("adamw"), host_bytes),
        budget=Budget(LOOSE_BYTES, host_bytes),
        meshes=(mesh,),
        time_limit_seconds=10.0,
        gap=0.05,
        progress=silent,
    )
    problem = Problem(captured, request, identify(captured, optimizer="adamw", seed=0, accumulate=1), target)
    search = Search(request)
    loose = problem.plan(search.under(LOOSE_BYTES), LOOSE_BYTES)
    tight_bytes = int(_smallest(search) * SLACK)
    return loose, problem.plan(search.under(tight_bytes), tight_bytes)


def _smallest(search: Search) -> int:
    try:
        search.under(1)
    except InfeasibleError:
        return min(smallest_budget(candidate) for candidate in search.pool)
    raise AssertionError("a plan within one byte")
