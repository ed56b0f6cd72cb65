"""Where the link to the host is slower, a plan moves fewer bytes over it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwright.ir import load_cluster, print_cluster
from shardwright.passes.pipeline import rank_graph
from shardwright.planner.api import PlanResult, plan

GIB = 2**30
RATES = (13e9, 2e8, 2e7)
"""Bytes a second: memory to memory, a slow disk, next to nothing."""
ROWS, WIDTH, BLOCKS = 4096, 512, 6


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def moved_bytes(found: PlanResult) -> int:
    graph = rank_graph(found.graph, found.plan.decisions)
    return sum(graph.types[node.operands[0]].num_bytes for node in graph.nodes if node.op == "tier.offload")


def cluster_file(folder: Path, copy_bytes_per_second: float) -> Path:
    """One device of modelled speed, so that nothing is measured."""
    preset = load_cluster("cpu:1")
    host = replace(preset.host, copy_bytes_per_second=copy_bytes_per_second, memory_bytes=8 * GIB)
    device = replace(preset.device, measured=False)
    path = folder / f"{copy_bytes_per_second:.0f}.toml"
    path.write_text(print_cluster(replace(preset, name="throttled", device=device, host=host)))
    return path


@pytest.mark.timeout(120)
def test_the_slower_the_link_the_less_is_offloaded(tmp_path: Path) -> None:
    with torch.device("meta"):
        module, x = Tower(), torch.empty(ROWS, WIDTH)
    everything = plan(module, (x,), cluster=str(cluster_file(tmp_path, RATES[0])), budget="64GiB").plan
    budget = int(0.6 * everything.prediction.device_bytes)
    found = [
        plan(module, (x,), cluster=str(cluster_file(tmp_path, rate)), budget=budget, host=4 * GIB) for rate in RATES
    ]
    moved = [moved_bytes(result) for result in found]
    assert all(faster > slower for faster, slower in pairwise(moved)), moved
    for result in found:
        assert result.plan.prediction.device_bytes <= budget
