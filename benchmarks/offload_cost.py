"""What offloaded activations cost where replay says that their copies hide: steps with and without, in turns.

    python benchmarks/offload_cost.py [--ranks 1,2] [--models square-mlp,llama] [--rounds 15] [--fresh-memory]

For each model and number of ranks: the smallest plan that recomputes nothing and keeps optimizer state on the device,
without the moves whose windows are too short (those of what forward makes last), so that no copy is waited for; beside
it the same layouts with everything kept. A copy of the model trains by each, a step of one and a step of the other, in
one process a rank. Prints the median over rounds of the ratio of the same round, by the clock and in processor time,
beside what replay says: what ranks lose to copies that share their cores and memory. Bytes that move, and peaks.

As in `peers.py`, freed memory stays with the process unless `--fresh-memory` is given.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from peer_models import MODELS
from peer_runs import Case, SideResult, run_case
from peers import STEADY_MEMORY, TIME_LIMIT_SECONDS, ratio

from shardwright.ir import (
    Budget,
    Decisions,
    Fate,
    InfeasibleError,
    StoredPlan,
    UserRules,
    format_size,
)
from shardwright.ir.rules_text import FateRule
from shardwright.passes.optimizers import optimizer_spec
from shardwright.passes.pipeline import rank_graph
from shardwright.planner.candidates import Candidate, evaluate
from shardwright.planner.problem import Problem, pose, prediction
from shardwright.planner.search import Found, Search
from shardwright.planner.storages import find_storages
from shardwright.runtime.rank_pool import RankPool

KEPT, OFFLOADED = "kept", "offloaded"
PLENTY: Final = 2**40
HIDDEN: Final = 1e-3
"""Exposed seconds of copies, of a step's, that count as none."""
NO_RECOMPUTE: Final = UserRules(fates=(FateRule("*", Fate.RECOMPUTE, pinned=False, line=1),))


@dataclass(frozen=True)
class Pair:
    """Two plans of the same layouts."""

    kept: Candidate
    offloaded: Candidate
    stored: dict[str, StoredPlan]
    moved_bytes: int
    """To the host in a step, by one rank; as much comes back."""


def prepare(model_name: str, num_ranks: int) -> Pair | None:
    """None where nothing can be moved without being waited for."""
    model = MODELS[model_name]
    torch.manual_seed(0)
    batch = dict(model.batch(torch.Generator().manual_seed(0)))
    problem = pose(
        model.build().train(), (), batch, cluster=f"cpu:{num_ranks}", budget=PLENTY, host=PLENTY,
        optimizer="adamw-fused",
    )  # fmt: skip
    found = _smallest(problem)
    budget = Budget(PLENTY, PLENTY)
    request, decisions = problem.request, found.chosen.decisions
    kept = evaluate(KEPT, request.graph, replace(decisions, fates={}), request.machine, budget)
    offloaded = _hidden(decisions, problem)
    if offloaded is None:
        return None
    stored = {one.name: _stored(problem, found, one) for one in (kept, offloaded)}
    ranked = rank_graph(request.graph, offloaded.decisions)
    moved = [node.operands[0] for node in ranked.nodes if node.op == "tier.offload"]
    return Pair(kept, offloaded, stored, sum(ranked.types[name].num_bytes for name in moved))


def _smallest(problem: Problem) -> Found:
    """Planned for an optimizer without state, so that only activations can move; the steps are AdamW's."""
    machine = replace(problem.request.machine, optimizer=optimizer_spec("sgd"))
    searching = Search(replace(problem.request, machine=machine, user_rules=NO_RECOMPUTE))
    try:
        return searching.under(1)
    except InfeasibleError as error:
        return searching.under(error.smallest_bytes)


def _hidden(decisions: Decisions, problem: Problem) -> Candidate | None:
    """With the moves that would hide on a host that takes nothing from compute. What is made last has the shortest
    window."""
    request, budget = problem.request, Budget(PLENTY, PLENTY)
    cluster = request.machine.cluster
    apart = replace(request.machine, cluster=replace(cluster, host=replace(cluster.host, overlap=1.0)))
    born = find_storages(request.graph, {}).forward
    moved = sorted(decisions.fates, key=lambda name: born[name].born)
    while moved:
        fewer = replace(decisions, fates=dict.fromkeys(moved, Fate.OFFLOAD))
        found = evaluate(OFFLOADED, request.graph, fewer, apart, budget)
        if found.replay.exposed_copy_seconds <= HIDDEN * found.replay.step_seconds:
            return evaluate(OFFLOADED, request.graph, fewer, request.machine, budget)
        moved.pop()
    return None


def _stored(problem: Problem, found: Found, candidate: Candidate) -> StoredPlan:
    plan = problem.plan(found, PLENTY)
    predicted = prediction(candidate, problem.request.machine.cluster)
    plan = replace(plan, decisions=candidate.decisions, prediction=predicted, certificate=None)
    return StoredPlan(plan, problem.captured.graph)


def report(model_name: str, num_ranks: int, pair: Pair, results: Sequence[SideResult]) -> str:
    """One table as text."""
    by_name = {result.name: result for result in results}
    kept, offloaded = by_name[KEPT], by_name[OFFLOADED]
    wall = ratio(offloaded.wall_seconds, kept.wall_seconds)
    cpu = ratio(offloaded.cpu_seconds, kept.cpu_seconds)
    predicted = pair.offloaded.replay.step_seconds / pair.kept.replay.step_seconds
    lines = [
        f"{model_name}, {num_ranks} ranks, {len(kept.wall_seconds)} rounds:"
        f" {format_size(pair.moved_bytes)} out and back a step, {len(pair.offloaded.decisions.fates)} tensors",
        f"  {'side':10} {'step':>8} {'cpu':>8} {'peak':>10} {'predicted':>19}",
    ]
    for result, candidate in ((kept, pair.kept), (offloaded, pair.offloaded)):
        lines.append(
            f"  {result.name:10} {statistics.median(result.wall_seconds):7.3f}s"
            f" {statistics.median(result.cpu_seconds):7.3f}s {format_size(max(result.peak_bytes)):>10}"
            f" {candidate.replay.step_seconds:8.3f}s {format_size(candidate.replay.peak_bytes):>9}"
        )
    measured = f"{wall - 1:+.1%} of a step, {cpu - 1:+.1%} in processor time"
    lines.append(f"  offloading costs {measured}; by replay {predicted - 1:+.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="comma separated")
    parser.add_argument("--models", default="square-mlp,llama", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fresh-memory", action="store_true", help="let glibc give freed memory back")
    given = parser.parse_args()
    if not given.fresh_memory and "MALLOC_MMAP_MAX_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY_MEMORY)
    torch.set_num_threads(1)
    for num_ranks in map(int, given.ranks.split(",")):
        for model_name in given.models.split(","):
            pair = prepare(model_name, num_ranks)
            if pair is None:
                print(f"{model_name}, {num_ranks} ranks: nothing can be moved without being waited for", flush=True)
                continue
            case = Case(model_name, pair.stored, (), given.rounds, {}, given.fresh_memory)
            with RankPool(num_ranks) as pool:
                results = pool.run(run_case, case, timeout_seconds=TIME_LIMIT_SECONDS)[0]
            print(report(model_name, num_ranks, pair, results), flush=True)


if __name__ == "__main__":
    main()
