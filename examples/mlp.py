"""A model of your own, without Hugging Face: fit a small network to a sine wave, one plan for all ranks.

torchrun --nproc-per-node 2 examples/mlp.py
shardwright plan examples/mlp.py:build --cluster cpu:2 --budget 64MiB -o mlp.plan
"""

import os

import torch
from torch import Tensor, nn

import shardwright
from shardwright.planner.progress import print_progress
from shardwright.planner.summary import print_summary

BATCH, WIDTH = 64, 256
RANK = int(os.environ.get("RANK", "0"))


class Net(nn.Module):
    """Knows nothing of parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def build() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """What `shardwright plan` asks for: the module and example arguments of the global batch."""
    return Net(), (torch.zeros(BATCH, 1), torch.zeros(BATCH, 1))


def main() -> None:
    torch.manual_seed(0)
    model = shardwright.parallelize(budget="64MiB", progress=print_progress(), on_plan=print_summary)(Net)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 201):
        x = 6.0 * torch.rand(BATCH, 1) - 3.0  # the same on every rank: the global batch
        loss = model(x, torch.sin(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0 and step % 50 == 0:
            print(f"step: {step}  loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
