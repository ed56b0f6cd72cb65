"""How long one device's budgets take to solve, and how certain the answers are, as a Llama gets deeper.

    python benchmarks/solver_scale.py [--layers 28] [--host 0B] [--points 10]

Plans a Llama-like model of width 2048 in bfloat16 (weights on the meta device, 4 sequences of 4096 tokens) for a single
H100, from 95 % of the peak of the plan with everything kept down to the smallest budget that works. Prints nodes of
the joint graph, and for each budget wall and processor seconds of the search, the certified gap (of the objective over
the bound of the same program under the true budget), the step by replay and the replayed peak over the budget.
"""

import argparse
import time
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.ir import InfeasibleError, format_size, load_cluster
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search

UNLIMITED = 2**41
LARGEST_SHARE = 0.95


def pose_llama(num_layers: int, host: str) -> Problem:
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=num_layers,
                         num_attention_heads=16, num_key_value_heads=8, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(4, 4096, dtype=torch.long)
    one = replace(load_cluster("h100x8"), name="h100", ranks_per_node=1)
    return pose(model, (), {"input_ids": tokens, "labels": tokens}, cluster=one, budget=UNLIMITED, host=host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--host", default="0B")
    parser.add_argument("--points", type=int, default=10)
    given = parser.parse_args()
    problem = pose_llama(given.layers, given.host)
    search = Search(problem.request)
    largest = search.under(UNLIMITED).chosen.replay.peak_bytes
    smallest = _smallest_bytes(search)
    print(f"{len(problem.request.graph.nodes)} nodes; everything kept {format_size(largest)},"
          f" smallest {format_size(smallest)}, host {given.host}")  # fmt: skip
    print(f"{'budget':>10} {'wall':>7} {'cpu':>7} {'gap':>7} {'step':>9} {'peak/budget':>12}")
    top = LARGEST_SHARE * largest
    for number in range(given.points):
        budget = round(top + (smallest - top) * number / max(1, given.points - 1))
        print(_row(search, budget), flush=True)


def _smallest_bytes(search: Search) -> int:
    try:
        search.under(1)
    except InfeasibleError as error:
        return error.smallest_bytes
    raise RuntimeError("a model that fits in one byte")


def _row(search: Search, budget: int) -> str:
    wall, cpu = time.perf_counter(), time.process_time()
    found = search.under(budget)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gap = 1 - found.bound_seconds / found.objective_seconds
    judged = found.chosen.replay
    return (
        f"{format_size(budget):>10} {wall:6.1f}s {cpu:6.1f}s {gap:7.2%} {judged.step_seconds:8.4f}s"
        f" {judged.peak_bytes / budget:12.4f}"
    )


if __name__ == "__main__":
    main()
