"""Our plans beside torch's `activation_memory_budget`, on one device, by the same replay and without offload.

    python benchmarks/torch_budget.py [--models llama-8,vit,t5,mixture] [--budgets 0,0.1,...,1] [--json FILE]

For each budget torch's min-cut partitioner splits the captured step; what it saves becomes fates of ours
(`torch_fates`) and is replayed. Torch's own two graphs are counted by another program (`fx_liveness`), too; of both
peaks the smaller is torch's, and a plan is sought under it. Prints peaks and seconds of recomputation of both, and
how far torch's own graphs are from what replay says of the translation.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from fx_joint import joint_program
from fx_liveness import Measured, measure
from memory_models import MODELS
from torch_fates import Partition, fates_of, partition

from shardwright.ir import Budget, Decisions, Graph, Mesh, format_size, load_cluster, replicated
from shardwright.passes.lifetimes import rounded
from shardwright.passes.node_prices import NodePrices
from shardwright.planner.candidates import Candidate, evaluate
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search

UNLIMITED: Final = 2**45
GAP: Final = 1e-4
TIME_LIMIT_SECONDS: Final = 60.0
STANDARD_BUDGETS: Final = tuple(n / 10 for n in range(11))
STANDARD_MODELS: Final = ("llama-8", "vit", "t5", "mixture")
NEGLIGIBLE_SECONDS: Final = 1e-9
"""Sums of the same prices in another order differ by less."""


@dataclass(frozen=True)
class Line:
    """One model under one budget."""

    model: str
    budget: float
    partition_seconds: float
    torch_peak_bytes: int
    torch_recompute_seconds: float
    own_peak_bytes: int
    """Of torch's own graphs, by `fx_liveness`."""
    own_recompute_seconds: float
    """Of the forward operators in torch's backward graph, at the same prices."""
    plan_seconds: float
    """Of planning."""
    peak_bytes: int
    recompute_seconds: float

    @property
    def verdict(self) -> str:
        """`better` is at least as good in both and strictly better in one; of the translation and torch's own graphs
        the smaller counts."""
        peak_bytes = min(self.torch_peak_bytes, self.own_peak_bytes)
        seconds = min(self.torch_recompute_seconds, self.own_recompute_seconds)
        less, same = self.peak_bytes < peak_bytes, self.peak_bytes == peak_bytes
        sooner = self.recompute_seconds < seconds - NEGLIGIBLE_SECONDS
        level = abs(self.recompute_seconds - seconds) <= NEGLIGIBLE_SECONDS
        if less and (sooner or level) or same and sooner:
            return "better"
        return "equal" if same and level else "WORSE"


def lines(model_name: str, budgets: Sequence[float]) -> Iterator[Line]:
    """In the order of budgets."""
    problem = _pose(model_name)
    graph, machine = problem.request.graph, problem.request.machine
    block_bytes = machine.cluster.device.block_bytes
    search, decisions = Search(problem.request), step_of(graph)
    kept = evaluate("kept", graph, decisions, machine, Budget(UNLIMITED, 0))
    program = joint_program(graph, decisions)
    for budget in budgets:
        start = time.perf_counter()
        found = partition(program, graph, budget)
        partitioned = time.perf_counter()
        fates = fates_of(found, graph)
        torchs = evaluate("torch", graph, replace(decisions, fates=fates), machine, Budget(UNLIMITED, 0))
        own_bytes = torchs_peak_bytes(measure(found, block_bytes), torchs, problem)
        start_plan = time.perf_counter()
        ours = search.under(min(torchs.replay.peak_bytes, own_bytes)).chosen
        yield Line(
            model=model_name,
            budget=budget,
            partition_seconds=partitioned - start,
            torch_peak_bytes=torchs.replay.peak_bytes,
            torch_recompute_seconds=recompute_seconds(torchs, kept),
            own_peak_bytes=own_bytes,
            own_recompute_seconds=torchs_recompute_seconds(found, problem),
            plan_seconds=time.perf_counter() - start_plan,
            peak_bytes=ours.replay.peak_bytes,
            recompute_seconds=recompute_seconds(ours, kept),
        )


def _pose(model_name: str) -> Problem:
    model = MODELS[model_name]
    module, batch = model.build(model.of_one)
    one = replace(load_cluster("h100x8"), name="h100", ranks_per_node=1)
    return pose(module, (), batch, cluster=one, budget=UNLIMITED, gap=GAP, time_limit=TIME_LIMIT_SECONDS)


def step_of(graph: Graph) -> Decisions:
    """One device, everything kept."""
    alone = Mesh((), ())
    layouts = {name: replicated(alone) for name in graph.types}
    return Decisions(alone, layouts, {n.name: (replicated(alone),) * len(n.operands) for n in graph.nodes})


def recompute_seconds(candidate: Candidate, kept: Candidate) -> float:
    return candidate.replay.compute_seconds - kept.replay.compute_seconds


def torchs_peak_bytes(measured: Measured, translated: Candidate, problem: Problem) -> int:
    """With what is there whatever is decided; the optimizer's step is the same for both."""
    graph, machine = problem.request.graph, problem.request.machine
    block, optimizer = machine.cluster.device.block_bytes, machine.optimizer
    held = sum(rounded(graph.types[given.name].num_bytes, block) for given in graph.inputs)
    for name in graph.gradients:
        held += (
            optimizer.num_state_tensors * rounded(graph.types[name].num_bytes, block) + optimizer.num_scalars * block
        )
    return max(held + measured.peak_bytes, translated.replay.curve_bytes[-1])


def torchs_recompute_seconds(found: Partition, problem: Problem) -> float:
    """Of the forward operators in torch's backward graph, each once, at the prices of the plan."""
    request = problem.request
    prices = NodePrices(request.graph, request.meshes[0], request.machine.prices)
    again = dict.fromkeys(request.graph.producers[value].name for value in sorted(found.again))
    return sum(prices.compute_seconds(request.graph.producers[name]) for name in again)


HEADER: Final = (
    f"{'budget':>6} {'torch peak':>11} {'recompute':>10} {'its graphs':>17} {'partition':>9}"
    f" | {'our peak':>9} {'recompute':>10} {'plan':>6}"
)


def row(line: Line) -> str:
    own_peak = line.own_peak_bytes / line.torch_peak_bytes - 1
    own_time = line.own_recompute_seconds / max(line.torch_recompute_seconds, NEGLIGIBLE_SECONDS) - 1
    return (
        f"{line.budget:6.2f} {format_size(line.torch_peak_bytes):>11} {line.torch_recompute_seconds * 1e3:7.2f} ms"
        f" {own_peak:+8.2%} {own_time:+8.2%} {line.partition_seconds:8.1f}s | {format_size(line.peak_bytes):>9}"
        f" {line.recompute_seconds * 1e3:7.2f} ms {line.plan_seconds:5.1f}s  {line.verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(STANDARD_MODELS))
    parser.add_argument("--budgets", default=",".join(map(str, STANDARD_BUDGETS)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.models.split(","):
        model = MODELS[name]
        print(f"{name}: {model.title}, batch {model.of_one}, one H100\n{HEADER}", flush=True)
        for line in lines(name, [float(b) for b in given.budgets.split(",")]):
            found.append(line)
            print(row(line), flush=True)
    verdicts = [line.verdict for line in found]
    print(", ".join(f"{verdicts.count(v)} {v}" for v in ("better", "equal", "WORSE")))
    if given.json:
        given.json.write_text(json.dumps([asdict(line) | {"verdict": line.verdict} for line in found], indent=1))


if __name__ == "__main__":
    main()
