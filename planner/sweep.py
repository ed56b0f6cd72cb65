"""One model under many budgets: what a smaller memory costs, as a curve that can be trusted to be one.

Every budget is searched in turn, the largest first, with what the others found at hand; at the end each takes the best
plan of all that fit it. So the curve is monotone: under a tighter budget time never falls and the peak never rises.

Without budgets the range is found: from what the fastest plan of all needs down to the smallest budget that works, each
budget smaller than the one before by the same factor. That puts more points where memory is short and dear.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardwright.ir import Budget, Clip, Cluster, InfeasibleError, Mesh, format_size, parse_size
from shardwright.planner.api import PlanResult
from shardwright.planner.baselines import BASELINES, UNAVAILABLE
from shardwright.planner.candidates import Candidate, best, refitted
from shardwright.planner.curve import Curve, Point, Rival
from shardwright.planner.defaults import GAP, TIME_LIMIT_SECONDS, silent
from shardwright.planner.infeasible import smallest_budget
from shardwright.planner.point_costs import costs_of
from shardwright.planner.problem import Problem, pose, size_of
from shardwright.planner.progress import Progress, ProgressSink
from shardwright.planner.search import Found, Request, Search
from shardwright.runtime.loss import LossFunction

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NUM_POINTS", "sweep"]

NUM_POINTS: Final = 8


def sweep(
    module: "nn.Module",
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    cluster: str | Cluster,
    budgets: Sequence[str | int] | None = None,
    num_points: int = NUM_POINTS,
    host: str | int = 0,
    disk: str | int = 0,
    optimizer: str = "adamw",
    clip: str | None = Clip.UNKNOWN,
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    seed: int = 0,
    accumulate: int = 1,
    outputs: Collection[str] = (),
    mesh: Mesh | None = None,
    rules: str | Path | None = None,
    time_limit: float = TIME_LIMIT_SECONDS,
    gap: float = GAP,
    target: str = "",
    progress: ProgressSink = silent,
) -> Curve:
    """A plan for each of the budgets, the largest first; other arguments as those of `plan`, `time_limit` for each.

    Without `budgets` there are `num_points`, both ends included; fewer where they would print alike. Baselines are
    judged with the schedule that suits the largest budget, and the planner is given the memory of each that no plan
    beats by then. Raises InfeasibleError for the first budget, from the largest down, that nothing fits.
    """
    sizes = None if budgets is None else sorted({size_of(budget) for budget in budgets}, reverse=True)
    if sizes == []:
        return Curve((), (), None)
    problem = pose(
        module,
        args,
        kwargs,
        cluster=cluster,
        budget=1 if sizes is None else sizes[0],
        host=host,
        disk=disk,
        optimizer=optimizer,
        clip=clip,
        loss=loss,
        loss_fn=loss_fn,
        seed=seed,
        accumulate=accumulate,
        outputs=outputs,
        mesh=mesh,
        rules=rules,
        time_limit=time_limit,
        gap=gap,
        target=target,
        progress=progress,
    )
    return _Sweep(problem, Search(problem.request)).curve(sizes, num_points)


def spaced(largest: int, smallest: int, num_points: int) -> list[int]:
    """From the largest down by equal factors; between the ends sizes that print in three digits, each once.

    >>> spaced(800, 100, 4)
    [800, 400, 200, 100]
    """
    factor = (smallest / largest) ** (1 / max(num_points - 1, 1))
    between = [parse_size(format_size(round(largest * factor**number))) for number in range(1, num_points - 1)]
    return sorted({largest, smallest, *(size for size in between if smallest < size < largest)}, reverse=True)


@dataclass
class _Sweep:
    """Searches of one problem, and what each found."""

    problem: Problem
    search: Search
    found: dict[int, Found] = field(default_factory=dict)
    """By budget in bytes."""

    def curve(self, sizes: list[int] | None, num_points: int) -> Curve:
        smallest = None
        if sizes is None:
            largest, smallest = self._ends()
            sizes = spaced(largest, smallest, num_points)
        for number, size in enumerate(sizes, 1):
            if size not in self.found:
                self.found[size] = self._under(size, f"{number} of {len(sizes)}: {format_size(size)}")
        baselines = self.found[sizes[0]].baselines
        self._contest([c for c in baselines if sizes[-1] <= c.replay.peak_bytes <= sizes[0]])
        return Curve(tuple(self._point(size) for size in sizes), self._rivals(baselines), smallest)

    def _ends(self) -> tuple[int, int]:
        """What the fastest plan needs, and the smallest budget that works."""
        fastest = self._under(self._roomy_bytes(), "no limit")
        alone = self._alone("smallest")
        try:
            alone.under(1)
        except InfeasibleError as refusal:
            smallest = refusal.smallest_bytes
        else:
            smallest = 1
        self.search.pool.extend(alone.pool)
        largest = max(smallest_budget(fastest.chosen), smallest)
        self.found[largest] = fastest
        return largest, smallest

    def _roomy_bytes(self) -> int:
        """More than any plan holds: all values of the graph, whole, several times. Not a number without measure: a
        bound far beyond what can be costs the solver its precision."""
        return 4 * sum(kind.num_bytes for kind in self.problem.captured.graph.types.values())

    def _under(self, device_bytes: int, note: str) -> Found:
        """Where nothing fits, the refusal is the one of planning for this budget alone, so that `plan` keeps to it."""
        self.search.request = self._noted(note)
        try:
            return self.search.under(device_bytes)
        except InfeasibleError:
            if not self.found:
                raise
            alone = self._alone(note)
            found = alone.under(device_bytes)
            self.search.pool.extend(alone.pool)
            return found

    def _alone(self, note: str) -> Search:
        """A search that knows nothing of what the others found."""
        return Search(self._noted(note), self.search.formulations)

    def _noted(self, note: str) -> Request:
        """The request, with progress that says for which budget."""
        request = self.problem.request

        def report(found: Progress) -> None:
            request.progress(replace(found, stage=f"{note}  {found.stage}"))

        return replace(request, progress=report)

    def _contest(self, baselines: Sequence[Candidate]) -> None:
        """Give the planner the memory of each baseline that no plan beats: between two budgets nobody has looked."""
        for baseline in sorted(baselines, key=lambda c: -c.replay.peak_bytes):
            peak_bytes = baseline.replay.peak_bytes
            chosen = best([refitted(c, self._budget(peak_bytes)) for c in self.search.pool])
            if chosen.replay.step_seconds >= baseline.replay.step_seconds:
                self._under(peak_bytes, f"beside {baseline.name}: {format_size(peak_bytes)}")

    def _budget(self, device_bytes: int) -> Budget:
        return replace(self.problem.request.budget, device_bytes=device_bytes)

    def _point(self, size: int) -> Point:
        chosen = _best_of_all(self.found[size], self.search.pool, self._budget(size))
        captured = self.problem.captured
        plan = self.problem.plan(chosen, size)
        return Point(PlanResult(plan, captured.graph, captured), costs_of(plan, captured.graph, chosen.chosen.replay))

    def _rivals(self, baselines: Sequence[Candidate]) -> tuple[Rival, ...]:
        missing = [Rival(name, note=why) for name, why in (*self.search.unavailable, *UNAVAILABLE)]
        ordered = sorted(baselines, key=lambda c: _NAMES.index(c.name))
        return (*map(self._rival, ordered), *missing)

    def _rival(self, baseline: Candidate) -> Rival:
        judged, budget = baseline.replay, self._budget(baseline.replay.peak_bytes)
        beside = best([refitted(candidate, budget) for candidate in self.search.pool])
        return Rival(
            name=baseline.name,
            step_seconds=judged.step_seconds,
            peak_bytes=judged.peak_bytes,
            host_peak_bytes=judged.host_peak_bytes,
            planned_seconds=beside.replay.step_seconds if beside.fits else None,
            note=_host_note(baseline, budget.host_bytes),
        )


_NAMES: Final = [recipe.name for recipe in BASELINES]


def _host_note(baseline: Candidate, host_bytes: int) -> str:
    needed = baseline.replay.host_peak_bytes
    return f"needs {format_size(needed)} of host memory" if needed > host_bytes else ""


def _best_of_all(found: Found, pool: Sequence[Candidate], budget: Budget) -> Found:
    """What the budget's own search found, with the best plan of any search in its place."""
    chosen = best([refitted(candidate, budget) for candidate in pool])
    bound_seconds = min(found.bound_seconds, chosen.objective_seconds)
    return replace(
        found,
        chosen=chosen,
        objective_seconds=chosen.objective_seconds,
        bound_seconds=bound_seconds,
        baselines=tuple(refitted(candidate, budget) for candidate in found.baselines),
        pool=tuple(pool),
    )
