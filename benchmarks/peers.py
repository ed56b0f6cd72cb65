"""The planned program against what people write by hand, in turns in one process a rank, on this machine's CPUs.

    python benchmarks/peers.py [--ranks 2,4] [--models llama,vit,wide-mlp] [--rounds 9] [--fresh-memory] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/peers.py

For each model and number of ranks: plan under a loose budget, then train a copy of the model in every form, a step of
each in turn, and print the median over rounds of the *ratio of the same round* of planned and peer (wall and processor
time), the measured storage-level peak of a rank, and what replay predicts. `--tight` adds a plan under a budget that
only sharding meets: half way between what the baselines ddp and fsdp take.

Freed memory stays with the process, on all sides, while planning and while training, as it does on a GPU; otherwise the
page faults of large tensors are most of what is compared. `--fresh-memory` leaves glibc as it is.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import platformdirs
import torch
import torch.distributed as dist
from peer_models import MODELS
from peer_replay import predict_peers
from peer_runs import Case, SideResult, run_case
from peer_sides import FSDP, FSDP_AC, PEERS

from shardwright.ir import Plan, StoredPlan, format_size
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search
from shardwright.runtime.processor import num_cores
from shardwright.runtime.rank_pool import RankPool

PLANNED, TIGHT = "planned", "planned, tight"
LOOSE: Final = "4GiB"
STEADY_MEMORY: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "XDG_CACHE_HOME": platformdirs.user_cache_dir("shardwright-steady-memory"),  # prices of the same kind of memory
}
"""glibc never gives freed memory back: large tensors cost page faults once, not every step."""
TIME_LIMIT_SECONDS: Final = 60.0 * 30
BUSY: Final = 1.5
"""Seconds over processor seconds from which on a run says that it was disturbed."""


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    ranks: tuple[int, ...]
    models: tuple[str, ...]
    rounds: int
    tight: bool
    fresh_memory: bool
    peers: tuple[str, ...]


def prepare(model_name: str, num_ranks: int, options: Options) -> Case:
    """Plan; needs no ranks."""
    problem = _pose(model_name, num_ranks)
    searching = Search(problem.request)
    found = searching.under(problem.request.budget.device_bytes)
    plans = {PLANNED: problem.plan(found, problem.request.budget.device_bytes)}
    predicted = predict_peers(found, problem.request)
    if options.tight:
        tight = tight_bytes(plans[PLANNED])
        plans[TIGHT] = problem.plan(searching.under(tight), tight)
    predicted |= {name: (made.prediction.step_seconds, made.prediction.device_bytes) for name, made in plans.items()}
    sides = {name: StoredPlan(made, problem.captured.graph) for name, made in plans.items()}
    return Case(model_name, sides, options.peers, options.rounds, predicted, options.fresh_memory)


def _pose(model_name: str, num_ranks: int) -> Problem:
    model = MODELS[model_name]
    torch.manual_seed(0)
    batch = dict(model.batch(torch.Generator().manual_seed(0)))
    return pose(model.build().train(), (), batch, cluster=f"cpu:{num_ranks}", budget=LOOSE, optimizer="adamw-fused")


def tight_bytes(found: Plan) -> int:
    """Too little to hold everything on every rank, enough to hold parts of it."""
    peaks = {baseline.name: baseline.device_bytes or 0 for baseline in found.baselines}
    return (peaks["ddp"] + peaks["fsdp"]) // 2


def report(case: Case, num_ranks: int, results: Sequence[SideResult]) -> str:
    """One table as text."""
    by_name = {result.name: result for result in results}
    planned = by_name[PLANNED]
    lines = [
        f"{case.model}, {num_ranks} ranks, {len(planned.wall_seconds)} rounds"
        + (", fresh memory" if case.fresh_memory else ""),
        f"  {'side':15} {'step':>8} {'cpu':>8} {'planned/side':>13} {'cpu':>6}"
        f" {'peak':>10} {'predicted':>19} {'off':>6}",
    ]
    for result in results:
        wall, cpu = ratio(planned.wall_seconds, result.wall_seconds), ratio(planned.cpu_seconds, result.cpu_seconds)
        lines.append(
            f"  {result.name:15} {statistics.median(result.wall_seconds):7.3f}s"
            f" {statistics.median(result.cpu_seconds):7.3f}s {wall:13.3f} {cpu:6.3f}"
            f" {format_size(max(result.peak_bytes)):>10} {_predicted_text(case, result)}"
        )
    peers = [by_name[name] for name in case.peers]
    best = min(peers, key=lambda peer: statistics.median(peer.wall_seconds), default=None)
    if best:
        lines.append(f"  best peer: {best.name}; planned {ratio(planned.wall_seconds, best.wall_seconds):.3f} of it")
    lines += _tight_lines(case, by_name) + _busy_lines(planned, num_ranks)
    return "\n".join(lines)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of paired ratios."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def _predicted_text(case: Case, result: SideResult) -> str:
    if result.name not in case.predicted:
        return f"{'n/a':>19}"
    seconds, num_bytes = case.predicted[result.name]
    off = seconds / statistics.median(result.wall_seconds) - 1
    return f"{seconds:8.3f}s {format_size(num_bytes):>9} {off:+6.0%}"


def _busy_lines(planned: SideResult, num_ranks: int) -> list[str]:
    """A warning where other programs had the cores."""
    share = max(1.0, num_ranks / num_cores())
    slowdown = statistics.median(planned.wall_seconds) / statistics.median(planned.cpu_seconds) / share
    if slowdown < BUSY:
        return []
    return [f"  the machine was busy (wall {slowdown:.1f} times cpu): only the cpu columns mean something"]


def _tight_lines(case: Case, results: dict[str, SideResult]) -> list[str]:
    if TIGHT not in results:
        return []
    budget = case.plans[TIGHT].plan.budget.device_bytes
    tight, lines = results[TIGHT], []
    for name in (FSDP, FSDP_AC):
        if name in results:
            fits = "fits" if max(results[name].peak_bytes) <= budget else "does not fit"
            found = ratio(tight.wall_seconds, results[name].wall_seconds)
            lines.append(f"  within {format_size(budget)}: planned {found:.3f} of {name}, which {fits}")
    return lines


def run(options: Options) -> list[dict[str, object]]:
    """Every model on every number of ranks; prints as it goes."""
    records: list[dict[str, object]] = []
    for num_ranks in options.ranks:
        for model_name in options.models:
            case = prepare(model_name, num_ranks, options)
            with RankPool(num_ranks) as pool:
                results = pool.run(run_case, case, timeout_seconds=TIME_LIMIT_SECONDS)[0]
            print(report(case, num_ranks, results), flush=True)
            records.append(_record(case, num_ranks, results))
    return records


def run_under_launcher(options: Options) -> list[dict[str, object]]:
    """The same on the ranks of torchrun: rank 0 plans."""
    dist.init_process_group("gloo")
    records: list[dict[str, object]] = []
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for model_name in options.models:
        cases = [prepare(model_name, num_ranks, options) if rank == 0 else None]
        dist.broadcast_object_list(cases)
        if cases[0] is None:
            raise RuntimeError("rank 0 sent no case")
        results = run_case(cases[0])
        if rank == 0:
            print(report(cases[0], num_ranks, results), flush=True)
        records.append(_record(cases[0], num_ranks, results))
    dist.destroy_process_group()
    return records if rank == 0 else []


def _record(case: Case, num_ranks: int, results: Sequence[SideResult]) -> dict[str, object]:
    return {
        "model": case.model,
        "ranks": num_ranks,
        "fresh_memory": case.fresh_memory,
        "sides": [{**asdict(r), "predicted": case.predicted.get(r.name)} for r in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2", help="comma separated; torchrun's own number under torchrun")
    parser.add_argument("--models", default="llama,vit,wide-mlp", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tight", action="store_true", help="also plan under a budget that only sharding meets")
    parser.add_argument("--fresh-memory", action="store_true", help="let glibc give freed memory back")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    given = parser.parse_args()
    if not given.fresh_memory and "MALLOC_MMAP_MAX_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY_MEMORY)
    options = Options(
        ranks=tuple(map(int, given.ranks.split(","))),
        models=tuple(given.models.split(",")),
        rounds=given.rounds,
        tight=given.tight,
        fresh_memory=given.fresh_memory,
        peers=tuple(filter(None, given.peers.split(","))),
    )
    torch.set_num_threads(1)
    records = run_under_launcher(options) if "LOCAL_RANK" in os.environ else run(options)
    if given.json and records:
        given.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
