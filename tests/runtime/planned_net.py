"""A small net with everything that matters at the edge, its batches, and its installation under a batch-split plan."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tests.runtime.decided import batch_split
from torch import Tensor, nn

from shardwright.ir import Decisions, Graph, Layout, Mesh, Shard, Tier
from shardwright.passes.lower import lower
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.engines import Room
from shardwright.runtime.module import install
from shardwright.runtime.optimizer import optimizer

__all__ = [
    "BATCH",
    "Net",
    "Planned",
    "batch",
    "built",
    "copied_state",
    "plain_steps",
    "planned",
    "planned_net",
    "same_when_tied",
]

BATCH = 8
AT_REST: dict[str, Layout] = {
    "embed.weight": (Shard(0),),
    "up.weight": (Shard(0),),
    "mix.weight": (Shard(1),),
}
"""Fully sharded but for what is small; embed.weight is tied to the head."""


class Net(nn.Module):
    """Tied and frozen parameters, buffers that training writes, a dict output with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 16, bias=False)  # a bias before BatchNorm has a gradient of pure rounding
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.mix.bias.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        hidden = self.mix(self.norm(self.up(self.embed(ids))).relu())
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def built(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(seed: int = 0, size: int = BATCH) -> dict[str, Tensor]:
    """The global batch; two labels of the first half are ignored, so ranks weigh differently."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 12, (size,), generator=random)
    labels[:2] = -100
    return {"ids": torch.randint(0, 12, (size,), generator=random), "labels": labels}


Planned = tuple[Captured, Graph, Decisions]


@cache
def planned(
    num_ranks: int, on_host: bool = False, with_logits: bool = True, dtype: torch.dtype = torch.float32
) -> Planned:
    """Made in the test's own process: ranks then need not load what traces."""
    captured = capture(built(dtype=dtype), (), batch())
    if not with_logits:
        captured = replace(captured, graph=replace(captured.graph, outputs={}))
    mesh = Mesh(("dp",), (num_ranks,))
    at_rest = AT_REST if num_ranks > 1 else {}
    tiers = {"up.weight": Tier.HOST, "embed.weight": Tier.HOST} if on_host else {}
    decisions = batch_split(captured.graph, mesh, at_rest, tiers)
    return captured, lower(captured.graph, decisions), decisions


def planned_net(plan: Planned, net: Net | None = None, **options: Any) -> Net:
    net = net or built()
    install(net, *plan, **{"room": Room(2**20), **options})
    return net


def copied_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def plain_steps(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: list[int], clip: float = 0.0) -> list[float]:
    """The user's loop; the losses."""
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = net(**batch(seed))["loss"]
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_when_tied(late_plan: Planned, early_plan: Planned) -> None:
    """Tied weights, whose gradient is final at the end, and a net that evaluates between steps."""
    nets = [planned_net(plan, built(), optimizer="adamw-fused") for plan in (late_plan, early_plan)]
    mades = [optimizer(net, torch.optim.AdamW, lr=1e-2) for net in nets]
    for seed in range(3):
        assert plain_steps(nets[0], mades[0], [seed]) == plain_steps(nets[1], mades[1], [seed])
        outputs = []
        for net in nets:
            net.eval()
            with torch.no_grad():
                outputs.append(net(**batch(seed))["logits"])
            net.train()
        assert torch.equal(*outputs)
