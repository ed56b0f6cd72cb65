"""Three points of the memory study on gloo ranks of this machine: measured step and peak beside predicted.

    python benchmarks/memory_measured.py [--ranks 2] [--rounds 7] [--points llama,llama-host,vit-host] [--json FILE]

Models are those of `peers.py`. A budget is a share of what keeping everything under the baseline fsdp needs. The joint
plan and every alternative of `memory_alternatives.py` that fits train a copy of the model each, in turns; their first
losses must agree. Peaks are counted by a dispatch mode that knows nothing of plans; what waits on the host is not in
them. Memory is steady as in `peers.py`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from memory_alternatives import Outcome, Rivals
from peer_models import MODELS
from peer_runs import Case, SideResult, run_case
from peers import STEADY_MEMORY, TIME_LIMIT_SECONDS, ratio

from shardwright.ir import StoredPlan, format_size, parse_size
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search
from shardwright.runtime.rank_pool import RankPool

JOINT: Final = "joint"
ROOMY: Final = 4 * 2**30
GAP: Final = 0.01


@dataclass(frozen=True)
class MeasuredPoint:
    """One model under one budget."""

    model: str
    share: float
    """Of the peak of the baseline fsdp with everything kept."""
    host: str


POINTS: Final = {
    "llama": MeasuredPoint("llama", 0.6, "0B"),
    "llama-host": MeasuredPoint("llama", 0.5, "512MiB"),
    "vit-host": MeasuredPoint("vit", 0.5, "512MiB"),
}


def prepare(point: MeasuredPoint, num_ranks: int, rounds: int) -> tuple[Case, int]:
    """Plan everything; the case and the budget in bytes."""
    problem = _pose(point, num_ranks)
    search = Search(problem.request)
    roomy = search.under(ROOMY)
    whole = next(c for c in roomy.baselines if c.name == "fsdp")
    budget = round(point.share * whole.replay.peak_bytes)
    found = search.under(budget)
    outcomes = [Outcome(JOINT, found.chosen), *Rivals(search).under(budget)]
    plans, predicted = {}, {}
    for outcome in outcomes:
        if outcome.candidate is not None:
            made = problem.plan(replace(found, chosen=outcome.candidate), budget)
            plans[outcome.name] = StoredPlan(made, problem.captured.graph)
            predicted[outcome.name] = (made.prediction.step_seconds, made.prediction.device_bytes)
    return Case(point.model, plans, (), rounds, predicted, False), budget


def _pose(point: MeasuredPoint, num_ranks: int) -> Problem:
    model = MODELS[point.model]
    torch.manual_seed(0)
    batch, host = dict(model.batch(torch.Generator().manual_seed(0))), parse_size(point.host, zero=True)
    return pose(model.build().train(), (), batch, cluster=f"cpu:{num_ranks}", budget=ROOMY, host=host,
                optimizer="adamw-fused", gap=GAP)  # fmt: skip


def report(case: Case, point: MeasuredPoint, budget: int, results: Sequence[SideResult]) -> str:
    joint = next(result for result in results if result.name == JOINT)
    lines = [
        f"{case.model}, budget {format_size(budget)}, host {point.host}, {len(joint.wall_seconds)} rounds",
        f"  {'way':21} {'step':>8} {'cpu':>8} {'way/joint':>10} {'predicted':>10}"
        f" {'peak':>10} {'predicted':>10} {'off':>7}",
    ]
    planned = case.predicted[JOINT][0]
    for result in results:
        seconds, num_bytes = case.predicted[result.name]
        peak = max(result.peak_bytes)
        lines.append(
            f"  {result.name:21} {statistics.median(result.wall_seconds):7.3f}s"
            f" {statistics.median(result.cpu_seconds):7.3f}s {ratio(result.wall_seconds, joint.wall_seconds):10.3f}"
            f" {seconds / planned:10.3f} {format_size(peak):>10} {format_size(num_bytes):>10}"
            f" {peak / num_bytes - 1:+7.2%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--json", type=Path, help="write every round to this file")
    given = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY_MEMORY)
    torch.set_num_threads(1)
    records = []
    for name in given.points.split(","):
        case, budget = prepare(POINTS[name], given.ranks, given.rounds)
        with RankPool(given.ranks) as pool:
            results = pool.run(run_case, case, timeout_seconds=TIME_LIMIT_SECONDS)[0]
        print(report(case, POINTS[name], budget, results), flush=True)
        records.append({"point": name, "budget_bytes": budget, "predicted": case.predicted,
                        "ways": [asdict(result) for result in results]})  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
