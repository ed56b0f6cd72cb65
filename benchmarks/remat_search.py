"""Find a schedule with recomputation under a budget, on two threads: one program solved whole, and parts of others.

A first schedule comes from the program of depth 1. Then one thread solves the deepest program that is small enough as
a whole (a proof), the other improves; where none is small enough both improve. To improve: solve the linear
relaxation with durations disturbed and a price on leaving the best schedule, fix every decision in which it agrees
with that schedule, and solve what is left; after some failures, in a program one level deeper. Every schedule passes
`remat_check` before it counts. The clock cuts in and threads race, so two runs may differ. Seconds of wall clock;
durations in the graph's unit.
"""

import itertools
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from remat_check import Step, WrongScheduleError, check
from remat_graph import RematGraph
from remat_model import Formulation, assignment, formulate, steps

from shardwright.planner.linear import Engine, LinearModel, Solution, Status, solve

__all__ = ["Outcome", "search"]

START, DEEPEST = 2, 6
WHOLE, DEEP = 6_000, 40_000
"""Decisions of a program that is solved as a whole, and of one whose relaxation is solved again and again."""
FIRST_SECONDS, PART_SECONDS, LEAST_SECONDS = 8.0, 8.0, 1.0
MARGIN_SECONDS = 2.0
"""Engines overrun their limits by about a second."""
FIRST_GAP, GAP = 1e-2, 1e-5
PATIENCE = 6
"""Parts without success before the threads look one level deeper."""
NOISE = 0.5
"""A duration is disturbed by up to this part of it."""
PULL, WINDOW = 0.01, 0.05
"""At first: price of a changed decision in mean durations; stages, of all, in which every decision is free."""


@dataclass(frozen=True)
class Outcome:
    schedule: list[Step] | None
    """None when there is none, or none was found."""
    bound: float
    """The program of `depth` has nothing shorter; inf when it has nothing at all."""
    depth: int
    """0: the bound holds for every order and schedule."""
    optimal: bool
    """The program of `depth` was solved as a whole, or has no solution."""
    seconds: float


class Best:
    """What is known so far; threads share it."""

    def __init__(self, graph: RematGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.schedule: list[Step] = []
        self.duration = math.inf
        self.depth = START
        """Threads look for schedules that the program of this depth can say; it can say the best."""
        self.failures = 0
        self.optimal_depth = 0
        self.bounds: dict[int, float] = {}
        """By depth."""
        self._programs: dict[int, Formulation] = {}
        self._lock = Lock()

    def program(self, depth: int) -> Formulation:
        with self._lock:
            if depth not in self._programs:
                self._programs[depth] = formulate(self.graph, self.budget, depth)
            return self._programs[depth]

    def offer(self, schedule: list[Step], depth: int) -> bool:
        try:
            duration = check(self.graph, schedule, self.budget).duration
        except WrongScheduleError:  # the engine's tolerances let it pass
            return False
        with self._lock:
            if duration >= self.duration:
                return False
            self.schedule, self.duration, self.failures = schedule, duration, 0
            self.depth = max(self.depth, depth)
            return True

    def failed(self) -> None:
        with self._lock:
            self.failures += 1
            if self.failures < PATIENCE or self.depth == DEEPEST:
                return
        deeper = self.program(self.depth + 1)
        with self._lock:
            if self.failures >= PATIENCE and deeper.decisions <= DEEP:
                self.depth, self.failures = self.depth + 1, 0

    def bounded(self, depth: int, cost: float) -> None:
        """A cost, in the programs' unit, that nothing in the program of the depth undercuts."""
        unit = self.program(depth).cost_unit
        with self._lock:
            self.bounds[depth] = max(self.bounds.get(depth, 0.0), self.graph.duration + cost * unit)


def search(graph: RematGraph, budget: int, seconds: float) -> Outcome:
    begin = time.monotonic()
    deadline = begin + seconds - MARGIN_SECONDS
    needed = max(size + sum(graph.sizes[v] for v in read) for size, read in zip(graph.sizes, graph.inputs, strict=True))
    if needed > budget:
        return Outcome(None, math.inf, 0, True, time.monotonic() - begin)
    best = Best(graph, budget)
    if _first(best, deadline):
        small = itertools.takewhile(lambda depth: best.program(depth).decisions <= WHOLE, range(1, DEEPEST + 1))
        whole = max(small, default=0)
        with ThreadPoolExecutor(2) as threads:
            second = threads.submit(_improve, best, 2, deadline)
            first = threads.submit(_whole, best, whole, deadline) if whole else None
            (first or threads.submit(_improve, best, 1, deadline)).result()
            second.result()
    depth = best.optimal_depth or max(best.bounds, default=0)
    bound = best.bounds.get(depth, 0.0)
    settled = best.optimal_depth > 0 or math.isinf(bound)
    return Outcome(best.schedule or None, bound, depth, settled, time.monotonic() - begin)


def _first(best: Best, deadline: float) -> bool:
    """A schedule of the least depth that has one; more time if the first share of it found none."""
    for depth in range(1, DEEPEST + 1):
        program = best.program(depth)
        for limit in (FIRST_SECONDS, math.inf):
            left = min(limit, deadline - time.monotonic())
            if left < LEAST_SECONDS:
                return False
            found = solve(program.loose, time_limit_seconds=left, relative_gap=FIRST_GAP, engine=Engine.SCIP)
            if found.status is Status.INFEASIBLE:
                best.bounded(depth, math.inf)
                break
            if found.values and best.offer(steps(program, found.values), depth):
                best.bounded(depth, found.bound)
                best.depth = max(START, depth)
                return True
    return False


def _whole(best: Best, depth: int, deadline: float) -> None:
    program = best.program(depth)
    left = deadline - time.monotonic()
    if left < LEAST_SECONDS:
        return
    found = solve(program.model, time_limit_seconds=left, relative_gap=GAP)
    if found.values:
        best.offer(steps(program, found.values), depth)
        best.bounded(depth, found.bound)
    if found.status is Status.OPTIMAL:
        best.optimal_depth = depth


def _improve(best: Best, seed: int, deadline: float) -> None:
    random_source = random.Random(seed)
    pull, window = PULL, WINDOW
    while not best.optimal_depth and deadline - time.monotonic() > LEAST_SECONDS:
        depth = best.depth
        program, current = best.program(depth), assignment(best.program(depth), best.schedule)
        plain = seed == 1 and depth not in best.bounds
        relaxed = program.model.relaxed()
        if not plain:
            relaxed = relaxed.with_cost(_disturbed(program, current, pull, random_source))
        left = deadline - time.monotonic()
        guide = solve(relaxed, time_limit_seconds=left, relative_gap=GAP)
        if plain and guide.status is Status.OPTIMAL:
            best.bounded(depth, guide.objective)
        if not guide.values:
            return
        free = _free(program, current, guide, window, random_source)
        limit = min(PART_SECONDS, deadline - time.monotonic())
        if limit < LEAST_SECONDS:
            return
        part = solve(
            _part(program.model, free, current),
            time_limit_seconds=limit,
            relative_gap=GAP,
            engine=Engine.SCIP,
            hint=[current[variable] for variable in free],
        )
        values = list(current)
        for variable, value in zip(free, part.values, strict=False):
            values[variable] = value
        if not best.offer(steps(program, values), depth):
            best.failed()
        done = part.status is Status.OPTIMAL
        pull, window = (pull * 0.6, min(1.0, window * 1.2)) if done else (pull * 1.5, window * 0.8)


def _disturbed(program: Formulation, current: list[float], pull: float, source: random.Random) -> dict[int, float]:
    cost, recomputed = program.model.cost, set(program.recomputed.values())
    price = pull * sum(cost) / max(1, len(recomputed))
    return {
        variable: cost[variable] * (1 + NOISE * source.random()) + price * source.random() * (1 - 2 * current[variable])
        for variable in (*program.kept.values(), *program.recomputed.values())
    }


def _free(
    program: Formulation, current: list[float], guide: Solution, window: float, source: random.Random
) -> list[int]:
    """Decisions in which the guide differs, and those in a window of stages."""
    count = len(program.graph.inputs)
    width = int(window * count)
    start = source.randrange(-width // 2, count - width // 2)
    return program.through + [
        variable
        for decisions in (program.kept, program.recomputed)
        for (value, number), variable in decisions.items()
        if abs(guide.values[variable] - current[variable]) > 1e-6
        or start <= program.events[value][number] < start + width
    ]


def _part(model: LinearModel, free: list[int], values: list[float]) -> LinearModel:
    """The program of the free variables, in their order, the others being fixed; the values given stay allowed."""
    places = {variable: place for place, variable in enumerate(free)}
    part = LinearModel(
        [model.lower[variable] for variable in free],
        [model.upper[variable] for variable in free],
        [model.cost[variable] for variable in free],
        [model.integer[variable] for variable in free],
    )
    for terms, lower, upper in model.rows:
        inside = {places[variable]: factor for variable, factor in terms.items() if variable in places}
        if inside:
            fixed = sum(factor * values[variable] for variable, factor in terms.items() if variable not in places)
            now = sum(factor * values[free[place]] for place, factor in inside.items())
            part.row(inside, min(now, lower - fixed), max(now, upper - fixed))
    return part
