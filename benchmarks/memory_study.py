"""Joint planning of layouts, recomputation and offload against deciding one after the other, by one replay.

    python benchmarks/memory_study.py [--models llama-8,llama-8b,...] [--budgets 70GiB,50GiB] [--host 100GiB]
                                      [--cluster h100x8] [--json FILE] [--pictures FOLDER]

Nothing is run: steps and peaks are replayed for machines that need not be here. `memory_measured.py` runs some points.
For each model and budget prints the joint plan, its proven gap and the seconds it took to find, and every alternative
of `memory_alternatives.py` with how much longer its step takes; `-` where an alternative has no plan that fits.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from memory_alternatives import Outcome, Rivals
from memory_models import MODELS
from memory_picture import study_svg

from shardwright.ir import InfeasibleError, format_size, parse_size
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Found, Search

GAP: Final = 0.01
TIME_LIMIT_SECONDS: Final = 120.0
OPTIMIZER: Final = "adamw-master"
"""Float32 masters and state beside bfloat16 parameters and gradients."""
NEGLIGIBLE: Final = 1e-6
"""Steps that differ by less, relatively, are equal."""


@dataclass(frozen=True)
class Entry:
    """One way to plan under one budget."""

    name: str
    step_seconds: float | None
    """None where nothing fits."""
    peak_bytes: int | None
    host_bytes: int | None
    note: str


@dataclass(frozen=True)
class Point:
    """One model under one budget."""

    model: str
    budget_bytes: int
    host_bytes: int
    search_seconds: float
    gap: float | None
    """Proven, of the joint program."""
    joint: Entry
    rivals: tuple[Entry, ...]

    def ratio(self, rival: Entry) -> float | None:
        """Of the rival's step and the joint plan's; None where either has none."""
        if self.joint.step_seconds is None or rival.step_seconds is None:
            return None
        return rival.step_seconds / self.joint.step_seconds

    @property
    def loses_to(self) -> tuple[str, ...]:
        """Alternatives that are faster than the joint plan, or fit where it found none."""
        return tuple(
            r.name for r in self.rivals if r.step_seconds is not None and (self.ratio(r) or 0) < 1 - NEGLIGIBLE
        )

    @property
    def is_best(self) -> bool:
        """Whether the joint plan is strictly faster than everything else."""
        ratios = [self.ratio(rival) for rival in self.rivals]
        return self.joint.step_seconds is not None and all(r is None or r > 1 + NEGLIGIBLE for r in ratios)


def points(problem: Problem, model: str, budgets: Sequence[int]) -> Iterator[Point]:
    """From the largest budget to the smallest, each planned as if alone but for the programs and the baselines."""
    search = Search(problem.request)
    rivals = Rivals(search)
    for budget in sorted(budgets, reverse=True):
        start = time.perf_counter()
        found, refusal = _found(search, budget)
        seconds = time.perf_counter() - start
        others = tuple(_entry(outcome) for outcome in rivals.under(budget))
        gap = None if found is None else 1 - found.bound_seconds / found.objective_seconds
        joint = Outcome("joint", None if found is None else found.chosen, refusal)
        spent = time.perf_counter() - start - seconds
        print(
            f"{model} {format_size(budget)}: {seconds:.0f} s, alternatives {spent:.0f} s", file=sys.stderr, flush=True
        )
        yield Point(model, budget, problem.request.budget.host_bytes, seconds, gap, _entry(joint), others)


def _found(search: Search, budget: int) -> tuple[Found | None, str]:
    try:
        return search.under(budget), ""
    except InfeasibleError as error:
        return None, f"smallest {format_size(error.smallest_bytes)}"


def _entry(outcome: Outcome) -> Entry:
    if outcome.candidate is None:
        return Entry(outcome.name, None, None, None, outcome.note)
    judged = outcome.candidate.replay
    return Entry(outcome.name, judged.step_seconds, judged.peak_bytes, judged.host_peak_bytes, outcome.note)


def table(found: Sequence[Point]) -> str:
    """A line per way to plan, a column per budget."""
    names = [entry.name for entry in (found[0].joint, *found[0].rivals)]
    lines = [f"{'':21}" + "".join(f"{format_size(point.budget_bytes):>12}" for point in found)]
    joint = [point.joint.step_seconds for point in found]
    lines.append(f"{'joint':21}" + "".join(f"{'-' if s is None else f'{s * 1e3:.1f} ms':>12}" for s in joint))
    lines.append(f"{'  proven gap':21}" + "".join(f"{'-' if p.gap is None else f'{p.gap:.2%}':>12}" for p in found))
    lines.append(f"{'  found in':21}" + "".join(f"{f'{p.search_seconds:.0f} s':>12}" for p in found))
    for number, name in enumerate(names[1:]):
        ratios = [_ratio_text(point, point.rivals[number]) for point in found]
        lines.append(f"{name:21}" + "".join(f"{text:>12}" for text in ratios))
    return "\n".join(lines)


def _ratio_text(point: Point, rival: Entry) -> str:
    ratio = point.ratio(rival)
    if ratio is None:
        return "-" if rival.step_seconds is None else f"{rival.step_seconds * 1e3:.1f} ms"
    return f"{ratio - 1:+.2%}"


def verdict(found: Sequence[Point]) -> str:
    """What the table shows, in a line."""
    best = [format_size(point.budget_bytes) for point in found if point.is_best]
    worse = [f"{format_size(p.budget_bytes)} ({', '.join(p.loses_to)})" for p in found if p.loses_to]
    return f"joint strictly better than all at {', '.join(best) or 'none'}; worse at {', '.join(worse) or 'none'}"


def study(model_name: str, cluster: str, budgets: Sequence[int], host: int, gap: float) -> Iterator[Point]:
    model = MODELS[model_name]
    module, batch = model.build(model.of_eight // model.micro_batches)
    problem = pose(module, (), batch, cluster=cluster, budget=max(budgets), host=host, optimizer=OPTIMIZER, gap=gap,
                   accumulate=model.micro_batches, time_limit=TIME_LIMIT_SECONDS)  # fmt: skip
    return points(problem, model_name, budgets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budgets", help="comma separated; each model's own by default")
    parser.add_argument("--host", default="100GiB", help="host memory of a rank; 0B for none")
    parser.add_argument("--cluster", default="h100x8")
    parser.add_argument("--gap", type=float, default=GAP)
    parser.add_argument("--json", type=Path, help="write every point to this file")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write a picture for each model")
    given = parser.parse_args()
    host = parse_size(given.host, zero=True)
    records: list[dict[str, object]] = []
    for name in given.models.split(","):
        model = MODELS[name]
        budgets = [parse_size(text) for text in given.budgets.split(",")] if given.budgets else list(model.budgets)
        start = time.perf_counter()
        found = list(study(name, given.cluster, budgets, host, given.gap))
        micro = f" in {model.micro_batches} micro-batches" if model.micro_batches > 1 else ""
        title = f"{name}: {model.title}"
        setting = f"batch {model.of_eight}{micro}, {given.cluster}, host {format_size(host)}"
        print(
            f"{title}, {setting}\n{table(found)}\n{verdict(found)}; {time.perf_counter() - start:.0f} s\n", flush=True
        )
        records += [asdict(point) for point in found]
        if given.json:
            given.json.write_text(json.dumps(records, indent=1))
        if given.pictures:
            given.pictures.mkdir(parents=True, exist_ok=True)
            (given.pictures / f"memory-study-{name}.svg").write_text(study_svg(title, setting, found))


if __name__ == "__main__":
    main()
