"""A chain of linear layers that is stepped on the host, and what its steps are and hold."""

import copy
from dataclasses import replace
from functools import cache, partial

import torch
from tests.runtime.decided import batch_split
from tests.runtime.planned_net import Planned
from tests.tracker import StorageTracker
from torch import Tensor, nn

from shardwright.ir import Clip, Mesh, Schedule, Shard, Tier
from shardwright.passes.footprint import Footprint, footprint
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.capture import capture
from shardwright.runtime.engines import Room
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.module import install
from shardwright.runtime.optimizer import TieredOptimizer, optimizer
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.session import find_session

__all__ = [
    "BUCKETS", "KINDS", "NUM_LAYERS", "ROOM", "TIGHT", "WIDTH", "Chain", "backward", "chain", "chain_plan", "installed",
    "peaks", "predicted", "require_shards_foreseen", "rows", "same_bit_by_bit", "train",
]  # fmt: skip

KINDS = [(torch.float32, "adamw-fused"), (torch.bfloat16, "adamw-master")]
WIDTH, NUM_LAYERS, ROWS = 64, 8, 4
ROOM = Room(2**22)
TIGHT = Schedule(bucket_bytes=0, reduce_bytes=WIDTH * WIDTH * 4)
"""No buckets; one gradient on its way at a time."""
BUCKETS = Schedule(bucket_bytes=3 * WIDTH * WIDTH * 4)


class Chain(nn.Module):
    """Weights larger than activations; a few small parameters whose state stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": x.square().mean()}


def chain(dtype: torch.dtype = torch.float32) -> Chain:
    torch.manual_seed(0)
    return Chain().to(dtype)


def rows(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def chain_plan(
    num_ranks: int,
    clip: Clip,
    dtype: torch.dtype = torch.float32,
    on_host: bool = True,
    schedule: Schedule = TIGHT,
    lying: bool = False,
) -> Planned:
    """Weights split where there are several ranks; with their state, or with that lying themselves, on the host."""
    captured = capture(chain(dtype), (rows(0, dtype),), {})
    weights = [f"layers.{i}.weight" for i in range(NUM_LAYERS)]
    at_rest = dict.fromkeys(weights, (Shard(0),)) if num_ranks > 1 else {}
    tiers = dict.fromkeys(weights, Tier.HOST) if on_host else {}
    decisions = batch_split(captured.graph, Mesh(("dp",), (num_ranks,)), at_rest, tiers)
    decisions = replace(decisions, clip=clip, schedule=schedule, parameters=tiers if lying else {})
    return captured, rank_graph(captured.graph, decisions), decisions


def installed(plan: Planned, name: str = "adamw-fused") -> tuple[Chain, TieredOptimizer]:
    net = chain(plan[0].dtype)
    install(net, *plan, room=ROOM, optimizer=name)
    made = optimizer(net, torch.optim.AdamW, lr=1e-2)
    assert isinstance(made, TieredOptimizer)
    return net, made


def backward(net: nn.Module, seed: int = 0) -> float:
    loss = net(rows(seed, next(net.parameters()).dtype))["loss"]
    loss.backward()
    return float(loss.detach())


def train(net: nn.Module, made: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        made.zero_grad()
        losses.append(backward(net, seed))
        made.step()
    return losses


def same_bit_by_bit(late_plan: Planned, early_plan: Planned, name: str) -> None:
    late, early = (installed(plan, name) for plan in (late_plan, early_plan))
    for seeds in (range(3), range(3, 5)):
        assert train(*late, seeds) == train(*early, seeds)
        for one, other in zip(late[0].parameters(), early[0].parameters(), strict=True):
            assert torch.equal(whole(one), whole(other))
        # In between the state goes through a checkpoint, on both sides.
        for _, made in (late, early):
            made.load_state_dict(copy.deepcopy(made.state_dict()))
    one, other = (made.state_dict()["state"] for _, made in (late, early))
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert state.keys() == other[index].keys()
        assert all(torch.equal(whole(value), whole(other[index][key])) for key, value in state.items())


def peaks(plan: Planned, name: str, num_steps: int = 2) -> tuple[list[int], int]:
    """Device bytes at most in each step, the first without state; and the most that the host pool had in use."""
    net, made = installed(plan, name) if plan[2].tiers else device_only(plan, name)
    session = find_session(net)
    assert session is not None
    pool = session.installed.steps.pool
    found = []
    for seed in range(num_steps):
        made.zero_grad()
        batch = rows(seed, plan[0].dtype)
        state = [v for s in made.state.values() for v in s.values() if isinstance(v, Tensor)]
        held = [getattr(t, "_local_tensor", t) for t in (*net.parameters(), *state)]
        with StorageTracker(held, excluded=partial(_not_on_device, pool, batch)) as tracker:
            loss = net(batch)["loss"]
            loss.backward()
            del loss
            made.step()
        found.append(tracker.peak_bytes)
    return found, pool.peak_bytes


def _not_on_device(pool: HostPool, batch: Tensor, found: Tensor) -> bool:
    """The batch is the script's; the program has its own part."""
    storages = (found.untyped_storage(), batch.untyped_storage())
    return found.is_meta or pool.owns(found) or storages[0].data_ptr() == storages[1].data_ptr()


def device_only(plan: Planned, name: str) -> tuple[Chain, torch.optim.Optimizer]:
    net = chain(plan[0].dtype)
    install(net, *plan, room=ROOM, optimizer=name)
    return net, optimizer(net, torch.optim.AdamW, lr=1e-2)


def predicted(plan: Planned, name: str) -> Footprint:
    _, graph, decisions = plan
    return footprint(graph, optimizer_spec(name), StepKind.FUSED, decisions.tiers, block_bytes=1)


def require_shards_foreseen(ranks: RankPool, plan: Planned) -> None:
    """Of later steps the least: gloo's threads sometimes hold what they have sent a moment longer."""
    foreseen = predicted(plan, "adamw-fused")
    for (_, *later), host in ranks.run(peaks, plan, "adamw-fused", 4):
        assert min(later) <= foreseen.peak_bytes <= 1.01 * min(later)
        assert host <= foreseen.host_peak_bytes
