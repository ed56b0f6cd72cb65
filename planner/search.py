"""The search for a plan: baselines, one program per mesh shape, and replay as the judge of everything found.

The program's memory rows are close to replay but not equal to it, so a solution that does not fit is solved again under
a budget smaller by what it overshot, and one that leaves room under a larger one. The bound is that of the first solve,
whose budget is the true one.
"""

import math
import time
from dataclasses import dataclass, field, replace

from shardwright.ir import Budget, Fate, Graph, InfeasibleError, Mesh, Phase, PlanError, UserRules
from shardwright.ir.ops import aliased_operand
from shardwright.passes.strategies import Rules
from shardwright.planner.baselines import BASELINES, Recipe, restrict
from shardwright.planner.candidates import Candidate, best, evaluate, polish, refitted
from shardwright.planner.decode import decode
from shardwright.planner.fates import MOVED, FateOptions
from shardwright.planner.fold import Fold
from shardwright.planner.formulate import formulate
from shardwright.planner.formulation import Formulation, Machine
from shardwright.planner.infeasible import infeasible
from shardwright.planner.limits import ROOM, Limits
from shardwright.planner.linear import Bounds, LinearModel, Solution, Status, solve
from shardwright.planner.progress import Progress, ProgressSink
from shardwright.planner.sequence import layouts_alone, with_layouts
from shardwright.planner.space import build_space
from shardwright.planner.user_rules import obey

__all__ = ["Found", "Request", "Search", "search"]

ROUNDS = 4
"""Solves per mesh, the first included."""
BINDS = 0.97
"""A solution whose peak is below this part of its limit does not want more memory."""
BASELINE_GAP = 0.01
SMALLEST_SECONDS = 10.0
"""Per mesh, to find the plan that needs least."""
TIME_WEIGHT = 1e-3
"""Of time against peak, both relative to a plan in hand, when the smallest is sought."""
JOINT, SMALLEST = "joint", "smallest"
"""Names of candidates that are not baselines."""
COUNTED = 10_000
"""Storages smaller than this part of all that forward makes are kept: too small to matter, too many to decide on. It
does not depend on the budget, so that all budgets see one program."""


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
    user_rules: UserRules = UserRules()


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
    return Search(request).under(request.budget.device_bytes)


@dataclass
class Search:
    """Searches under one budget after the other: programs and everything that was replayed serve the next as well. With
    the programs of another search it finds what a search of its own would."""

    request: Request
    formulations: dict[Mesh, Formulation] = field(default_factory=dict)
    pool: list[Candidate] = field(default_factory=list)
    unavailable: list[tuple[str, str]] = field(default_factory=list)
    """Baselines that cannot be had, with the reason."""
    bounds: dict[Mesh, float] = field(default_factory=dict)
    """Of the budget at hand."""
    interrupted: bool = False
    floors: dict[Mesh, float] = field(default_factory=dict)
    """Seconds in the program's objective that no budget gets below."""

    def under(self, device_bytes: int) -> Found:
        """Raises InfeasibleError when nothing fits, with the smallest budget that would."""
        self.deadline = time.monotonic() + self.request.time_limit_seconds
        self.budget = replace(self.request.budget, device_bytes=device_bytes)
        self.pool = [refitted(candidate, self.budget) for candidate in self.pool]
        self.bounds, self.interrupted = {}, False
        is_first = not self.pool
        for mesh in self.request.meshes:
            if mesh not in self.formulations:
                self._say(f"formulate {mesh}")
                self.formulations[mesh] = self._formulate(mesh)
        try:
            if is_first:
                self._solve_baselines()
            self._solve_meshes()
        except KeyboardInterrupt:
            if not any(c.fits for c in self.pool):
                raise
            self.interrupted = True
        if not is_first and not any(c.fits for c in self.pool):
            self.pool.extend([self._rescheduled(c) for c in self.pool])
        if not any(c.fits for c in self.pool):
            self._smallest()
        if not self.pool:
            raise PlanError(
                f"expected a plan within {self.request.time_limit_seconds:g} s, found none in that time; give a longer"
                " time limit, or fix the mesh"
            )
        if not any(c.fits for c in self.pool):
            raise self._infeasible()
        return self._found()

    def _rescheduled(self, candidate: Candidate) -> Candidate:
        """The same plan with the schedule that suits the budget at hand."""
        request = self.request
        found = evaluate(candidate.name, request.graph, candidate.decisions, request.machine, self.budget)
        return replace(found, objective_seconds=candidate.objective_seconds)

    def _found(self) -> Found:
        names = {recipe.name for recipe in BASELINES}
        chosen = polish(best(self.pool), self.request.graph, self.request.machine, self.budget)
        self.pool.append(chosen)
        return Found(
            chosen=chosen,
            objective_seconds=chosen.objective_seconds,
            bound_seconds=min(chosen.objective_seconds, min(self.bounds.values(), default=0.0)),
            baselines=tuple({c.name: c for c in reversed(self.pool) if c.name in names}.values())[::-1],
            unavailable=tuple(self.unavailable),
            space=self._space(),
            interrupted=self.interrupted,
            pool=tuple(self.pool),
        )

    def _formulate(self, mesh: Mesh) -> Formulation:
        request = self.request
        space = build_space(request.graph, mesh, request.fold, request.rules, request.machine.prices)
        budget = request.budget
        options = FateOptions(
            offload=budget.host_bytes > 0,
            spill_host_bytes=budget.host_bytes if budget.disk_bytes else 0,
            smallest_offload_bytes=request.machine.cluster.host.smallest_offload_bytes,
            smallest_bytes=_saved_bytes(request.graph) // mesh.num_ranks // COUNTED,
        )
        formulation = formulate(space, request.machine, options)
        obey(formulation, request.user_rules)
        return formulation

    def _say(self, stage: str) -> None:
        fitting = [c.replay.step_seconds for c in self.pool if c.fits]
        bound = min(self.bounds.values(), default=None)
        self.request.progress(Progress(stage, min(fitting, default=None), bound))

    def _remaining(self) -> float:
        return max(self.deadline - time.monotonic(), 1.0)

    def _solve_baselines(self) -> None:
        for recipe in BASELINES:
            if recipe.needs_host and not self.request.budget.host_bytes:
                self.unavailable.append((recipe.name, "no host memory to move anything to: give --host"))
                continue
            self._say(f"baseline {recipe.name}")
            if not self._baseline(recipe):
                self.unavailable.append((recipe.name, "the rules do not allow it for this model and mesh"))

    def _baseline(self, recipe: Recipe) -> bool:
        """The best by replay over the meshes that a person would try; whether there is one."""
        found = []
        for mesh in self._baseline_meshes(recipe):
            formulation = self.formulations[mesh]
            program = formulation.model.with_bounds(restrict(formulation, recipe))
            solution = solve(program, time_limit_seconds=min(self._remaining(), 20.0), relative_gap=BASELINE_GAP)
            if solution.values:
                found.append(self._judged(recipe.name, formulation, solution))
        if found:
            self.pool.append(best(found))
        return bool(found)

    def _baseline_meshes(self, recipe: Recipe) -> tuple[Mesh, ...]:
        """One axis; for tensor parallel the widest pair of axes too, and one axis only inside a node."""
        meshes = self.request.meshes
        if not recipe.split_when_read or len(meshes) == 1:
            return meshes[:1]
        is_one_node = meshes[0].num_ranks <= self.request.machine.cluster.ranks_per_node
        return meshes[:2] if is_one_node else meshes[1:2]

    def _adopt(self, name: str, formulation: Formulation, solution: Solution) -> Candidate:
        self.pool.append(self._judged(name, formulation, solution))
        return self.pool[-1]

    def _judged(self, name: str, formulation: Formulation, solution: Solution) -> Candidate:
        wanted = [decode(formulation, solution.values)]
        if Fate.OFFLOAD in wanted[0].fates.values():
            copies_first = decode(formulation, solution.values, copies_first=True)
            wanted.extend([copies_first] if copies_first != wanted[0] else [])
        tried = [evaluate(name, self.request.graph, d, self.request.machine, self.budget) for d in wanted]
        spread = min((c.spread or c.replay for c in tried), key=lambda replay: replay.step_seconds)
        found = replace(best(tried), objective_seconds=_objective(formulation.model, solution.values))
        return found if spread.peak_bytes <= self.budget.device_bytes else replace(found, spread=spread)

    def _solve_meshes(self) -> None:
        """Relaxations first: but for the best of all, a mesh whose bound is no better than a plan in hand is skipped.
        Where a baseline is the program's best, another plan may yet be the best by replay."""
        budget = self.budget.device_bytes
        for mesh in self.formulations:
            self.bounds[mesh] = self._relaxed(mesh, budget) if len(self.formulations) > 1 else 0.0
        order = sorted((m for m, bound in self.bounds.items() if bound < math.inf), key=lambda m: self.bounds[m])
        for number, mesh in enumerate(order):
            if number == 0 or self.bounds[mesh] < self._best_objective() * (1 - self.request.gap):
                self._solve_mesh(mesh, self._remaining() / (len(order) - number), {})
        self._try_sequence()

    def _relaxed(self, mesh: Mesh, device_bytes: float) -> float:
        """Seconds that no plan on the mesh gets below, in the program's objective; infinite where none fits."""
        self._say(f"relax {mesh}")
        formulation = self.formulations[mesh]
        solution = solve(
            formulation.model.relaxed().with_bounds({formulation.peak: (0.0, device_bytes / formulation.unit_bytes)}),
            time_limit_seconds=self._remaining(),
            relative_gap=self.request.gap,
        )
        return math.inf if solution.status is Status.INFEASIBLE else max(solution.bound, 0.0) / 1e3

    def _try_sequence(self) -> None:
        """Where memory binds, layouts alone, on the mesh that is best for that, and then their fates."""
        if not self._memory_binds():
            return
        promising = [mesh for mesh, bound in self.bounds.items() if bound < self._best_objective()]
        alone = [(mesh, self._layouts_alone(mesh, self._remaining() / 2 / len(promising))) for mesh in promising]
        with_values = [(mesh, solution) for mesh, solution in alone if solution.values]
        if not with_values:
            return
        mesh, solution = min(with_values, key=lambda item: item[1].objective)
        self._solve_mesh(mesh, self._remaining(), with_layouts(self.formulations[mesh], solution.values))

    def _memory_binds(self) -> bool:
        """Whether the best plan pays for memory, or something faster does not fit."""
        if not self.pool:
            return False
        found = best(self.pool)
        pays = bool(found.decisions.fates or found.decisions.tiers)
        return pays or any(not c.fits and c.objective_seconds < found.objective_seconds for c in self.pool)

    def _layouts_alone(self, mesh: Mesh, seconds: float) -> Solution:
        return layouts_alone(
            self.formulations[mesh],
            self.budget.device_bytes,
            time_limit_seconds=seconds,
            relative_gap=self.request.gap,
        )

    def _best_objective(self) -> float:
        return min((c.objective_seconds for c in self.pool if c.fits), default=math.inf)

    def _solve_mesh(self, mesh: Mesh, seconds: float, bounds: Bounds) -> None:
        """With everything allowed that the bounds leave; then, where replay finds that copies do not hide, with all
        parameters on the device, with no activations moved to host or disk, and with nothing moved."""
        moving, deadline = _moving(self.formulations[mesh]), time.monotonic() + seconds
        found = self._refine(mesh, seconds / 2 if any(moving) else seconds, bounds)
        fixed = {**bounds}
        for number, variables in enumerate(moving):
            if variables and any(_stalls(candidate, self.request.gap) for candidate in found):
                fixed.update(dict.fromkeys(variables, (0.0, 0.0)))
                found = self._refine(mesh, (deadline - time.monotonic()) / (len(moving) - number), fixed)

    def _refine(self, mesh: Mesh, seconds: float, bounds: Bounds) -> list[Candidate]:
        """Solve under the budget, then under limits on the program's peak that replay asks for."""
        found: list[Candidate] = []
        formulation, budget, gap = self.formulations[mesh], self.budget.device_bytes, self.request.gap
        limits, deadline = Limits(budget / formulation.unit_bytes), time.monotonic() + seconds
        for number in range(ROUNDS):
            self._say(f"solve {mesh}")
            solution = solve(
                formulation.model.with_bounds({**bounds, formulation.peak: (0.0, limits.now)}),
                time_limit_seconds=max(deadline - time.monotonic(), 1.0) / 2,
                relative_gap=gap,
            )
            if number == 0 and not bounds:
                self.bounds[mesh] = max(self.bounds[mesh], solution.bound / 1e3)
                self.interrupted |= solution.status is Status.FEASIBLE
            if not solution.values:
                break
            candidate = self._adopt(JOINT, formulation, solution)
            if any(candidate.decisions == other.decisions for other in found):
                break
            found.append(candidate)
            room, peak = budget - _wanted_bytes(candidate, gap), solution.values[formulation.peak]
            if 0 <= room and (room < ROOM * budget or peak < BINDS * limits.now or not self._gains(mesh, candidate)):
                break
            if not limits.move(peak, room / formulation.unit_bytes) or time.monotonic() > deadline:
                break
        return found

    def _gains(self, mesh: Mesh, candidate: Candidate) -> bool:
        """Whether more memory could make the plan faster by more than the gap."""
        if mesh not in self.floors:
            self.floors[mesh] = self._relaxed(mesh, math.inf)
        return candidate.objective_seconds * (1 - self.request.gap) > self.floors[mesh]

    def _smallest(self) -> None:
        """The plans that need least; replay says how much that is."""
        for mesh, formulation in self.formulations.items():
            self._say(f"smallest {mesh}")
            solution = solve(
                self._least_peak(formulation),
                time_limit_seconds=SMALLEST_SECONDS,
                relative_gap=min(BASELINE_GAP, self.request.gap),
            )
            if solution.values:
                self._adopt(SMALLEST, formulation, solution)

    def _least_peak(self, formulation: Formulation) -> LinearModel:
        """The program that minimises its peak, and a very little its time: with no price on time a plan moves bytes for
        nothing, and what is in flight costs memory that the rows do not know."""
        known = [c for c in self.pool if 0 < c.objective_seconds < math.inf]
        cost = {formulation.peak: 1.0}
        if known:
            fastest = min(known, key=lambda c: c.objective_seconds)
            weight = (
                TIME_WEIGHT * fastest.replay.peak_bytes / formulation.unit_bytes / (fastest.objective_seconds * 1e3)
            )
            cost = {i: c * weight for i, c in enumerate(formulation.model.cost) if c} | cost
        return formulation.model.with_cost(cost)

    def _infeasible(self) -> InfeasibleError:
        """Names the least of what planning at that budget finds again, whatever it was asked for before."""
        again = [c for c in self.pool if c.name != JOINT] or self.pool
        unlimited = replace(self.budget, device_bytes=2**63)
        smallest = min(again, key=lambda c: (not refitted(c, unlimited).fits, c.replay.peak_bytes))
        return infeasible(smallest, self.request.graph, self.budget, self.request.machine)

    def _space(self) -> str:
        spaces = [f.space for f in self.formulations.values()]
        choices = sum(len(unit.choices) for space in spaces for unit in space.units)
        pruned = sum(space.num_strategies for space in spaces) - choices
        classes = len(set(self.request.fold.groups.values()))
        return (
            f"{choices:,} choices over {len(spaces)} meshes, outer axes by batch, {classes} layer classes,"
            f" {max(pruned, 0):,} uneven or equal ones left out"
        )


def _moving(formulation: Formulation) -> tuple[list[int], ...]:
    """Variables that put parameters, activations, and optimizer state, on host or disk."""
    moved = [c.counts[state] for c in formulation.fates.values() for state in MOVED if state in c.counts]
    return list(formulation.host_parameters.values()), moved, list(formulation.host.values())


def _stalls(candidate: Candidate, gap: float) -> bool:
    """Whether replay finds that the plan waits for what it moves, or that it does not fit."""
    judged = candidate.replay
    waits = judged.exposed_copy_seconds + judged.exposed_host_seconds
    return not candidate.fits or waits > gap * judged.step_seconds


def _wanted_bytes(candidate: Candidate, gap: float) -> int:
    """What the plan needs to run as fast as it can: of the schedule that hides most, where hiding less is slower."""
    spread, judged = candidate.spread, candidate.replay
    if spread is not None and judged.step_seconds > spread.step_seconds * (1 + gap):
        return spread.peak_bytes
    return judged.peak_bytes


def _objective(model: LinearModel, values: tuple[float, ...]) -> float:
    """Seconds of a solution in the program's objective."""
    return sum(cost * value for cost, value in zip(model.cost, values, strict=True)) / 1e3


def _saved_bytes(graph: Graph) -> int:
    """Of all that forward makes, whole: about what backward would want kept."""
    made = [n for n in graph.nodes if n.phase is Phase.FORWARD and aliased_operand(n) is None]
    return sum(graph.types[result].num_bytes for node in made for result in node.results)
