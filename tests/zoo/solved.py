"""Plans of a small model at a loose and at a tight budget, from one formulation on one mesh."""

from shardwright.ir import Budget, Cluster, Mesh, Plan
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.optimizers import optimizer_spec
from shardwright.passes.strategies import Rules
from shardwright.planner.api import silent
from shardwright.planner.candidates import evaluate
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.fold import fold_of
from shardwright.planner.formulate import Formulation, Machine, formulate
from shardwright.planner.linear import solve
from shardwright.planner.problem import Problem
from shardwright.planner.search import Request, Search
from shardwright.planner.space import build_space
from shardwright.runtime.captured import Captured
from shardwright.runtime.identity import identify

__all__ = ["MESHES", "loose_and_tight"]

MESHES = {1: Mesh((), ()), 2: Mesh(("dp",), (2,)), 4: Mesh(("dp", "tp"), (2, 2))}
LOOSE_BYTES = 1 << 30
SLACK = 1.1
"""The tight budget relative to the smallest."""
GAP = 0.05
SECONDS = 10.0


def loose_and_tight(
    captured: Captured, mesh: Mesh, rules: Rules, target: str, cluster: Cluster, *, host_bytes: int = 0
) -> tuple[Plan, Plan]:
    """The search as it is, but for its baselines: those would do for most loose budgets, and are no plans of its own."""
    machine = Machine(cluster, AnalyticalPrices(cluster), optimizer_spec("adamw"), host_bytes)
    fold = fold_of(captured.graph)
    space = build_space(captured.graph, mesh, fold, rules, machine.prices)
    formulation = formulate(space, machine, FateOptions(offload=host_bytes > 0, smallest_offload_bytes=1))
    request = Request(
        captured.graph, fold, rules, machine, Budget(LOOSE_BYTES, host_bytes), (mesh,), SECONDS, GAP, silent
    )
    problem = Problem(captured, request, identify(captured, optimizer="adamw", seed=0, accumulate=1), target)
    tight_bytes = int(_smallest_bytes(formulation) * SLACK)
    search = Search(request, formulations={mesh: formulation})
    loose, tight = (problem.plan(search.under(size), size) for size in (LOOSE_BYTES, tight_bytes))
    return loose, tight


def _smallest_bytes(formulation: Formulation) -> int:
    """Peak of the plan that needs least. Seconds count a little: what is moved for nothing needs room, too."""
    fastest = solve(formulation.model, time_limit_seconds=SECONDS, relative_gap=GAP)
    peak, scale = formulation.peak, 0.1 * fastest.values[formulation.peak] / fastest.objective
    costs = {variable: cost * scale for variable, cost in enumerate(formulation.model.cost)}
    solution = solve(formulation.model.with_cost({**costs, peak: 1.0}), time_limit_seconds=SECONDS, relative_gap=GAP)
    machine, graph = formulation.machine, formulation.space.graph
    decisions = decode(formulation, solution.values)
    return evaluate("", graph, decisions, machine, Budget(0, machine.host_bytes)).replay.peak_bytes
