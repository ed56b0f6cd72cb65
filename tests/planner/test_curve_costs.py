"""What a curve says its plans pay: figures worked out by hand for baselines of a model of two matmuls."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.planner.candidates import Candidate
from shardwright.planner.point_costs import Costs, costs_of
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Found, Search

BATCH, WIDTH, WIDE = 32, 64, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(torch.relu(self.up(x))).square().mean()
        return loss


@pytest.fixture(scope="module")
def searched() -> tuple[Problem, Found]:
    problem = pose(Net(), (torch.zeros(BATCH, WIDTH),), None, cluster="h100x8", budget=2**30)
    return problem, Search(problem.request).under(2**30)


def judged(searched: tuple[Problem, Found], name: str) -> tuple[Costs, Candidate]:
    problem, found = searched
    baseline = next(candidate for candidate in found.baselines if candidate.name == name)
    plan = problem.plan(Found(**{**vars(found), "chosen": baseline}), 2**30)
    return costs_of(plan, problem.captured.graph, baseline.replay), baseline


def test_data_parallel_pays_nothing_and_holds_all_weights(searched: tuple[Problem, Found]) -> None:
    costs, _ = judged(searched, "ddp")
    whole = 4 * (2 * WIDTH * WIDE + WIDTH + WIDE)
    assert costs == Costs(whole, whole, 0, 0.0, 0, 0, 0)


def test_split_weights_that_backward_reads_are_gathered_again(searched: tuple[Problem, Found]) -> None:
    """`down.weight` is, for the gradient of what it multiplies; `up.weight` is not: its input has no gradient."""
    costs, _ = judged(searched, "fsdp")
    assert costs.regathered_bytes == 4 * WIDTH * WIDE
    assert costs.weight_bytes == costs.whole_weight_bytes // 8
    assert costs.recomputed_bytes == 0


def test_what_is_recomputed_takes_the_time_that_forward_took(searched: tuple[Problem, Found]) -> None:
    costs, candidate = judged(searched, "fsdp+recompute")
    seconds: dict[str, float] = {}
    for event in candidate.replay.timeline.events:
        seconds[event.name] = seconds.get(event.name, 0.0) + event.end_seconds - event.start_seconds
    again = [name.removesuffix("~again") for name in seconds if name.endswith("~again")]
    assert again
    assert costs.recompute_seconds == pytest.approx(sum(seconds[name] for name in again))
    assert costs.recomputed_bytes > 0
