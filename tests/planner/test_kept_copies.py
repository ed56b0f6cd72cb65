"""A copy in another layout that both phases read is kept for backward where that pays, else made again.

The model: columns, rows, columns, rows. What the second matmul makes is summed over ranks, and read by the third, whose
gradient wants it again in backward.
"""

from dataclasses import replace
from functools import cache

import torch
from tests.planner.small_graphs import cluster
from tests.planner.solving import known_rules
from torch import Tensor, nn

from shardwright.ir import Budget, Decisions, Gather, Graph, Mesh, Schedule
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.lower import lower
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.candidates import Candidate, judge
from shardwright.planner.defaults import silent
from shardwright.planner.fold import fold_of
from shardwright.planner.formulation import Machine
from shardwright.planner.search import Found, Request, search
from shardwright.runtime.capture import capture

TWO = Mesh(("tp",), (2,))
WIDTH, ROWS = 512, 8
LOOSE_BYTES = 2**30


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.blocks(x).square().sum()}


@cache
def wide() -> Graph:
    return capture(Wide(), (torch.randn(ROWS, WIDTH),), {}).keeping(()).graph


def two_ranks() -> Machine:
    machines = cluster(2, overlap=0.0)
    return Machine(machines, AnalyticalPrices(machines), optimizer_spec("sgd"), 0)


@cache
def planned() -> Found:
    budget = Budget(LOOSE_BYTES, 0)
    return search(Request(wide(), fold_of(wide()), known_rules(), two_ranks(), budget, (TWO,), 60.0, 1e-3, silent))


def judged(decisions: Decisions) -> Candidate:
    plain = replace(decisions, schedule=Schedule(0, 0, 0, 0))
    return judge("", wide(), plain, two_ranks(), Budget(LOOSE_BYTES, 0))


def num_reductions(decisions: Decisions) -> int:
    return sum(node.op.startswith("mesh.all_reduce") for node in lower(wide(), decisions).nodes)


def test_a_sum_over_ranks_that_backward_reads_too_is_kept_where_there_is_room() -> None:
    decisions = planned().chosen.decisions
    kept = [name for name in decisions.gathers if name in wide().producers]
    again = replace(decisions, gathers={})
    assert kept
    assert num_reductions(decisions) == num_reductions(again) - len(kept)
    assert judged(decisions).replay.step_seconds < judged(again).replay.step_seconds


def test_layers_of_one_matrix_are_split_one_by_columns_and_the_next_by_rows() -> None:
    """Equal as they are, they are not folded: one split for all would need twice the traffic."""
    decisions = planned().chosen.decisions
    layouts = [decisions.layouts[f"blocks.{i}.weight"] for i in range(4)]
    assert layouts[0] == layouts[2] != layouts[1] == layouts[3]


def test_keeping_every_copy_there_is_adds_no_reduction() -> None:
    decisions = planned().chosen.decisions
    everything = dict.fromkeys(wide().producers, Gather.KEEP)
    assert num_reductions(replace(decisions, gathers=everything)) <= num_reductions(decisions)
