"""The search for a plan: baselines, one program per mesh shape, and replay as the judge of everything found.

The program's memory rows are close to replay but not equal to it, so a solution that does not fit is solved again under
a budget smaller by what it overshot, and one that leaves room under a larger one. The bound is that of the first solve,
whose budget is the true one.
"""

import math
import time
from dataclasses import dataclass, field, replace

from shardwright.ir import Budget, Decisions, Graph, InfeasibleError, Mesh
from shardwright.passes.strategies import Rules
from shardwright.planner.baselines import BASELINES, Recipe, restrict
from shardwright.planner.candidates import Candidate, best, evaluate
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.fold import Fold
from shardwright.planner.formulate import Formulation, Machine, formulate
from shardwright.planner.infeasible import infeasible
from shardwright.planner.linear import LinearModel, Solution, Status, solve
from shardwright.planner.progress import Progress, ProgressSink
from shardwright.planner.space import build_space

__all__ = ["Found", "Request", "search"]

ROUNDS = 4
"""Solves per mesh, the first included."""
ROOM = 0.03
"""A plan that leaves more of the budget than this is solved again with what it left."""
BASELINE_GAP = 0.01
SMALLEST_SECONDS = 10.0
"""Per mesh, to find the plan that needs least."""


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    graph: Graph
    fold: Fold
    rules: Rules
    machine: Machine
    budget: Budget
    meshes: tuple[Mesh, ...]
    time_limit_seconds: float
    gap: float
    progress: ProgressSink


@dataclass(frozen=True)
class Found:
    """The best plan by replay, and what is known about it."""

    chosen: Candidate
    objective_seconds: float
    bound_seconds: float
    baselines: tuple[Candidate, ...]
    unavailable: tuple[tuple[str, str], ...]
    space: str
    interrupted: bool
    pool: tuple[Candidate, ...]
    """Everything that was replayed."""


def search(request: Request) -> Found:
    """Raises InfeasibleError when nothing fits, with the smallest budget that would."""
    return _Search(request).run()


@dataclass
class _Search:
    request: Request
    formulations: dict[Mesh, Formulation] = field(default_factory=dict)
    pool: list[Candidate] = field(default_factory=list)
    objectives: dict[int, float] = field(default_factory=dict)
    """id of a candidate to its seconds in the program's objective."""
    bounds: dict[Mesh, float] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.request.time_limit_seconds

    def run(self) -> Found:
        for mesh in self.request.meshes:
            self._say(f"formulate {mesh}")
            self.formulations[mesh] = self._formulate(mesh)
        try:
            baselines, unavailable = self._baselines()
            self._solve_meshes()
        except KeyboardInterrupt:
            if not any(c.fits for c in self.pool):
                raise
            self.interrupted, baselines, unavailable = True, tuple(self.pool), ()
        if not any(c.fits for c in self.pool):
            self._smallest()
        if not any(c.fits for c in self.pool):
            raise self._infeasible()
        chosen = best(self.pool)
        objective = self.objectives[id(chosen)]
        bound = min(objective, min(self.bounds.values(), default=0.0))
        return Found(
            chosen, objective, bound, baselines, unavailable, self._space(), self.interrupted, tuple(self.pool)
        )

    def _formulate(self, mesh: Mesh) -> Formulation:
        request = self.request
        space = build_space(request.graph, mesh, request.fold, request.rules, request.machine.prices)
        options = FateOptions(
            offload=request.budget.host_bytes > 0,
            smallest_offload_bytes=request.machine.cluster.host.smallest_offload_bytes,
            smallest_bytes=request.budget.device_bytes // 5000,
        )
        return formulate(space, request.machine, options)

    def _say(self, stage: str) -> None:
        fitting = [c.replay.step_seconds for c in self.pool if c.fits]
        bound = min(self.bounds.values(), default=None)
        self.request.progress(Progress(stage, min(fitting, default=None), bound))

    def _remaining(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def _baselines(self) -> tuple[tuple[Candidate, ...], tuple[tuple[str, str], ...]]:
        found, unavailable = [], []
        for recipe in BASELINES:
            self._say(f"baseline {recipe.name}")
            candidate = self._baseline(recipe)
            if candidate is None:
                unavailable.append((recipe.name, "the rules do not allow it for this model and mesh"))
            else:
                found.append(candidate)
        return tuple(found), tuple(unavailable)

    def _baseline(self, recipe: Recipe) -> Candidate | None:
        """On one axis; tensor parallel on the widest pair of axes where there is one."""
        mesh = self.request.meshes[min(1, len(self.request.meshes) - 1) if recipe.split_when_read else 0]
        formulation = self.formulations[mesh]
        program = formulation.model.with_bounds(restrict(formulation, recipe))
        solution = solve(program, time_limit_seconds=min(self._remaining(), 20.0), relative_gap=BASELINE_GAP)
        return self._adopt(recipe.name, formulation, solution) if solution.values else None

    def _adopt(self, name: str, formulation: Formulation, solution: Solution) -> Candidate:
        decisions = decode(formulation, solution.values)
        candidate = evaluate(name, self.request.graph, decisions, self.request.machine, self.request.budget)
        self.pool.append(candidate)
        self.objectives[id(candidate)] = _objective(formulation.model, solution.values)
        return candidate

    def _solve_meshes(self) -> None:
        """Relaxations first: a mesh whose bound is no better than a plan in hand is not solved."""
        budget = self.request.budget.device_bytes
        for mesh, formulation in self.formulations.items():
            self._say(f"relax {mesh}")
            relaxed = replace(formulation.model, integer=[False] * len(formulation.model.integer))
            solution = solve(
                relaxed.with_bounds({formulation.peak: (0.0, budget / formulation.unit_bytes)}),
                time_limit_seconds=self._remaining(),
                relative_gap=self.request.gap,
            )
            self.bounds[mesh] = math.inf if solution.status is Status.INFEASIBLE else max(solution.bound, 0.0) / 1e3
        order = sorted(self.formulations, key=lambda m: self.bounds[m])
        for number, mesh in enumerate(order):
            if self.bounds[mesh] < self._best_objective() * (1 - self.request.gap):
                self._solve_mesh(mesh, self._remaining() / (len(order) - number))

    def _best_objective(self) -> float:
        return min((self.objectives[id(c)] for c in self.pool if c.fits), default=math.inf)

    def _solve_mesh(self, mesh: Mesh, seconds: float) -> None:
        formulation, budget = self.formulations[mesh], self.request.budget.device_bytes
        unit_bytes = formulation.unit_bytes
        limit, deadline = budget / unit_bytes, time.monotonic() + seconds
        before: Decisions | None = None
        for number in range(ROUNDS):
            self._say(f"solve {mesh}")
            solution = solve(
                formulation.model.with_bounds({formulation.peak: (0.0, limit)}),
                time_limit_seconds=max(deadline - time.monotonic(), 1.0) / 2,
                relative_gap=self.request.gap,
            )
            if number == 0:
                self.bounds[mesh] = max(self.bounds[mesh], solution.bound / 1e3)
                self.interrupted |= solution.status is Status.FEASIBLE
            if not solution.values:
                return
            decisions = decode(formulation, solution.values)
            if decisions == before:
                return
            before = decisions
            candidate = self._adopt("joint", formulation, solution)
            change = budget - candidate.replay.peak_bytes
            binds = solution.values[formulation.peak] > 0.97 * limit
            if candidate.fits and (change < ROOM * budget or not binds):
                return
            limit = (limit if candidate.fits else min(limit, solution.values[formulation.peak])) + change / unit_bytes
            if limit <= 0 or time.monotonic() > deadline:
                return

    def _smallest(self) -> None:
        """The plans that need least, whatever they cost; replay says how much that is."""
        for mesh, formulation in self.formulations.items():
            self._say(f"smallest {mesh}")
            program = formulation.model.with_cost({formulation.peak: 1e3})
            solution = solve(program, time_limit_seconds=SMALLEST_SECONDS, relative_gap=BASELINE_GAP)
            if solution.values:
                self._adopt("smallest", formulation, solution)

    def _infeasible(self) -> InfeasibleError:
        smallest = min(self.pool, key=lambda c: c.replay.peak_bytes)
        return infeasible(smallest, self.request.graph, self.request.budget, self.request.machine)

    def _space(self) -> str:
        spaces = [f.space for f in self.formulations.values()]
        choices = sum(len(unit.choices) for space in spaces for unit in space.units)
        pruned = sum(space.num_strategies for space in spaces) - choices
        classes = len(set(self.request.fold.groups.values()))
        return f"{choices:,} choices over {len(spaces)} meshes, {classes} layer classes, {max(pruned, 0):,} uneven or equal ones left out"


def _objective(model: LinearModel, values: tuple[float, ...]) -> float:
    """Seconds of a solution in the program's objective."""
    return sum(cost * value for cost, value in zip(model.cost, values, strict=True)) / 1e3

