"""Plans of a small model at a loose and at a tight budget: what a search comes to, from three solves.

`search` also solves baselines and sharpens its limit by replay; here a test needs plans that split, recompute and
offload, and needs them in seconds.
"""

from dataclasses import dataclass

from shardwright.ir import Budget, Clip, Cluster, Mesh, Plan, Prediction
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.optimizers import optimizer_spec
from shardwright.passes.strategies import Rules
from shardwright.planner.candidates import Candidate, best, evaluate
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.fold import fold_of
from shardwright.planner.formulate import formulate
from shardwright.planner.formulation import Formulation, Machine
from shardwright.planner.linear import LinearModel, solve
from shardwright.planner.space import build_space
from shardwright.runtime.captured import Captured
from shardwright.runtime.identity import identify

__all__ = ["MESHES", "Planned", "loose_and_tight"]

MESHES = {1: Mesh((), ()), 2: Mesh(("dp",), (2,)), 4: Mesh(("dp", "tp"), (2, 2))}
LOOSE_BYTES = 1 << 40
SLACK = 1.1
"""The tight budget relative to the smallest."""
GAP = 0.05
SECONDS = 60.0
"""Of one solve; a few on a quiet core. A machine that is busy must not fail a test."""


@dataclass(frozen=True)
class Planned:
    """Two plans of one model on one mesh."""

    loose: Plan
    tight: Plan


def loose_and_tight(
    captured: Captured,
    mesh: Mesh,
    rules: Rules,
    target: str,
    cluster: Cluster,
    *,
    host_bytes: int = 0,
    clip: Clip = Clip.UNKNOWN,
) -> Planned:
    """The fastest plan, and the fastest within a little more than the least that is possible."""
    machine = Machine(cluster, AnalyticalPrices(cluster), optimizer_spec("adamw"), host_bytes, clip=clip)
    space = build_space(captured.graph, mesh, fold_of(captured.graph), rules, machine.prices)
    options = FateOptions(offload=host_bytes > 0, smallest_offload_bytes=1)
    planner = _Planner(captured, formulate(space, machine, options), target, host_bytes)
    (loose,) = planner.solved(planner.formulation.model, LOOSE_BYTES)
    (smallest,) = planner.solved(planner.least_peak(loose), 0)
    tight_bytes = int(smallest.replay.peak_bytes * SLACK)
    found = [smallest, *planner.solved(planner.within(tight_bytes), tight_bytes)]
    fitting = [planner.judged(candidate, tight_bytes) for candidate in found]
    return Planned(planner.plan(loose, LOOSE_BYTES), planner.plan(best(fitting), tight_bytes))


@dataclass(frozen=True)
class _Planner:
    captured: Captured
    formulation: Formulation
    target: str
    host_bytes: int

    def solved(self, program: LinearModel, budget_bytes: int) -> list[Candidate]:
        """One, or none: the program's own peak may be above replay's, so that what fits is out of its reach."""
        solution = solve(program, time_limit_seconds=SECONDS, relative_gap=GAP)
        if not solution.values:
            return []
        decisions = decode(self.formulation, solution.values)
        budget = Budget(budget_bytes, self.host_bytes)
        return [evaluate("", self.captured.graph, decisions, self.formulation.machine, budget)]

    def within(self, budget_bytes: int) -> LinearModel:
        limit = budget_bytes / self.formulation.unit_bytes
        return self.formulation.model.with_bounds({self.formulation.peak: (0.0, limit)})

    def least_peak(self, loose: Candidate) -> LinearModel:
        """Seconds count a little: what is moved for nothing needs room, too."""
        model, peak = self.formulation.model, self.formulation.peak
        scale = 0.1 * loose.replay.peak_bytes / self.formulation.unit_bytes / (loose.replay.step_seconds * 1e3)
        costs = {variable: cost * scale for variable, cost in enumerate(model.cost)}
        return model.with_cost({**costs, peak: 1.0})

    def judged(self, candidate: Candidate, budget_bytes: int) -> Candidate:
        budget = Budget(budget_bytes, self.host_bytes)
        return evaluate("", self.captured.graph, candidate.decisions, self.formulation.machine, budget)

    def plan(self, candidate: Candidate, budget_bytes: int) -> Plan:
        judged = candidate.replay
        return Plan(
            target=self.target,
            identity=identify(self.captured, optimizer="adamw", seed=0, accumulate=1),
            cluster=self.formulation.machine.cluster.name,
            budget=Budget(budget_bytes, self.host_bytes),
            decisions=candidate.decisions,
            prediction=Prediction(judged.step_seconds, 0.3, judged.peak_bytes, judged.host_peak_bytes),
            certificate=None,
        )
