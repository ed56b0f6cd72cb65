"""Why one problem: layouts first and fates afterwards is worse, by replay of the programs that both would run."""

from dataclasses import replace
from functools import cache

import torch
from tests.planner.small_graphs import cluster
from tests.planner.solving import formulated, known_rules, solved
from torch import Tensor, nn
from torch.nn import functional

from shardwright.ir import Budget, Graph, Mesh
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.candidates import Candidate, best, evaluate
from shardwright.planner.decode import decode
from shardwright.planner.fold import fold_of
from shardwright.planner.formulation import Machine
from shardwright.planner.search import Request, search
from shardwright.planner.sequence import everything_kept, with_layouts
from shardwright.runtime.capture import capture

TWO = Mesh(("dp",), (2,))
LINK = 1.17e7
WIDTH, ROWS = 32, 4096


class Branches(nn.Module):
    """What each branch saves can be computed again from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) for name in "abcdef"})
        self.back = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) for name in "abcdef"})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = [functional.silu(x @ self.into[name]) @ self.back[name] for name in self.into]
        return {"loss": sum(parts).square().sum()}


@cache
def branches() -> Graph:
    return capture(Branches(), (torch.randn(ROWS, WIDTH),), {}).keeping(()).graph


def slow_links() -> Machine:
    """Just so slow that computing everything twice is a little faster than reducing gradients."""
    machines = cluster(2, overlap=0.0)
    link = replace(machines.intra, bytes_per_second=LINK)
    machines = replace(machines, intra=link, inter=link)
    return Machine(machines, AnalyticalPrices(machines), optimizer_spec("sgd"), 0)


def sequential(graph: Graph, machines: Machine, budget: Budget) -> Candidate:
    """The fastest layouts with everything kept and no limit; then the best fates for them within the budget, with as
    many tries at the difference between rows and replay as it takes."""
    formulation = formulated(graph, TWO, machines, rules=known_rules())
    first = solved(formulation, bounds=everything_kept(formulation), gap=1e-4)
    fixed = with_layouts(formulation, first.values)
    tried = [evaluate("kept", graph, decode(formulation, first.values), machines, budget)]
    for share in (1.06, 1.03, 1.0, 0.97, 0.94, 0.9, 0.85):
        second = solved(formulation, share * budget.device_bytes, fixed, gap=1e-3)
        if second.values:
            tried.append(evaluate("sequential", graph, decode(formulation, second.values), machines, budget))
    return best(tried)


def joint(graph: Graph, machines: Machine, budget: Budget) -> Candidate:
    return search(
        Request(graph, fold_of(graph), known_rules(), machines, budget, (TWO,), 60.0, 1e-3, lambda progress: None)
    ).chosen


def test_layouts_first_and_fates_afterwards_is_at_least_five_percent_slower() -> None:
    graph, machines = branches(), slow_links()
    loose = sequential(graph, machines, Budget(2**40, 0))
    budget = Budget(int(0.8 * loose.replay.peak_bytes), 0)
    one, two = joint(graph, machines, budget), sequential(graph, machines, budget)
    assert one.fits
    assert not two.fits or one.replay.step_seconds <= 0.95 * two.replay.step_seconds
