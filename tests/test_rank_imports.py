"""A rank that is given a plan trains by it and loads neither the solver nor the planner's half that decides."""

import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from tests.zoo.machines import compute_bound
from torch import Tensor, nn

import shardwright
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.session import find_session

BATCH, WIDTH = 16, 8
SOLVER = ("ortools", *(f"shardwright.planner.{name}" for name in ("formulate", "linear", "search", "space")))
Way = Literal["apply", "decorator"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


def build(way: Way, plan: str) -> nn.Module:
    if way == "apply":
        return shardwright.apply(Net(), plan, (torch.zeros(BATCH, WIDTH),))

    @shardwright.parallelize(budget="1GiB", plan=plan)
    class Decorated(Net):
        """Under another name than the planned class."""

    return Decorated()


def train(way: Way, plan: str) -> tuple[float, float, list[str]]:
    """On a rank: losses of two steps on one batch, and what of the solver is loaded."""
    torch.manual_seed(0)
    model = build(way, plan)
    assert find_session(model) is not None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH)
    losses = []
    for _ in range(2):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    loaded = [name for name in sys.modules if any(name == s or name.startswith(f"{s}.") for s in SOLVER)]
    return losses[0], losses[1], loaded


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_ranks_train_by_a_plan_file_without_the_solver(tmp_path: Path) -> None:
    """On ranks of its own: those of other tests may have loaded anything."""
    plan = tmp_path / "net.plan"
    batch = (torch.zeros(BATCH, WIDTH),)
    shardwright.plan(Net(), batch, cluster=compute_bound(2), budget="1GiB", time_limit=5.0).save(plan)
    with RankPool(2) as ranks:
        for way in ("apply", "decorator"):
            for first, second, loaded in ranks.run(train, way, str(plan), timeout_seconds=80.0):
                assert second < first
                assert loaded == []
    assert "ortools" in sys.modules, "planning, here, needs it: the names above are right"
