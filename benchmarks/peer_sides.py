"""The sides of `peers.py` on one rank: a model of its own, its optimizer, and the part of the batch it is given.

All run eager torch with one thread a rank and `AdamW(fused=True)`; peers are in the form their tutorials show.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from peer_models import Batch, PeerModel, loss_of
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shardwright.ir import StoredPlan, Tier
from shardwright.runtime.apply import apply
from shardwright.runtime.optimizer import optimizer as tiered
from shardwright.runtime.tracker import held_tensors

__all__ = ["DDP", "FSDP", "FSDP_AC", "PEERS", "TP", "Side", "make_peer", "make_planned"]

LEARNING_RATE: Final = 1e-4


@dataclass
class Side:
    """One way to train the model."""

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    takes_part: bool
    """Whether a rank is given its part of the batch, by which its loss is that of the part."""
    buckets: list[Tensor] = field(default_factory=list)
    """Gradients of DDP: views of its buckets, which it holds between steps."""
    on_host: frozenset[str] = frozenset()
    """Parameters whose optimizer state a plan keeps on the host."""

    def part(self, batch: Batch) -> Batch:
        """What this rank passes to forward."""
        if not self.takes_part:
            return batch
        rank, size = dist.get_rank(), dist.get_world_size()
        return {name: tensor.chunk(size)[rank].contiguous() for name, tensor in batch.items()}

    def step(self, part: Batch) -> Tensor:
        """One step; gives the loss of what this rank was given."""
        loss = loss_of(self.module(**part))
        loss.backward()  # type: ignore[no-untyped-call]
        if isinstance(self.module, DistributedDataParallel):
            self.buckets = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def held(self) -> Iterator[Tensor]:
        """What is on the device between two steps."""
        yield from held_tensors(self.module)
        yield from self.buckets
        away = {parameter for name, parameter in self.module.named_parameters() if name in self.on_host}
        for parameter, state in self.optimizer.state.items():
            if parameter not in away:
                yield from (value for value in state.values() if isinstance(value, Tensor))


Maker: TypeAlias = Callable[[PeerModel, nn.Module], nn.Module]


def _ddp(model: PeerModel, module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def _fsdp(model: PeerModel, module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.get_submodule(model.blocks):  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _fsdp_checkpointed(model: PeerModel, module: nn.Module) -> nn.Module:
    blocks = module.get_submodule(model.blocks)
    for name, block in list(blocks.named_children()):
        setattr(blocks, name, checkpoint_wrapper(block))
    return _fsdp(model, module)


def _tensor_parallel(model: PeerModel, module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.get_submodule(model.blocks):  # type: ignore[attr-defined]
        parallelize_module(block, mesh, model.block_styles())
    return parallelize_module(module, mesh, model.outer_styles()) if model.outer_styles() else module


DDP, FSDP, FSDP_AC, TP = "DDP", "FSDP2", "FSDP2+AC", "DTensor TP"
PEERS: Final[dict[str, Maker]] = {DDP: _ddp, FSDP: _fsdp, FSDP_AC: _fsdp_checkpointed, TP: _tensor_parallel}


def make_peer(name: str, model: PeerModel, seed: int) -> Side:
    """A peer; collective."""
    torch.manual_seed(seed)
    module = PEERS[name](model, model.build().train())
    return Side(name, module, _adamw(module), takes_part=name != TP)


def make_planned(name: str, model: PeerModel, seed: int, plan: StoredPlan, batch: Batch) -> Side:
    """The same model under a plan; collective."""
    torch.manual_seed(seed)
    module = apply(model.build().train(), plan, (), dict(batch))
    on_host = frozenset(name for name, tier in plan.plan.decisions.tiers.items() if tier is Tier.HOST)
    optimizer = tiered(module, torch.optim.AdamW, lr=LEARNING_RATE) if on_host else _adamw(module)
    return Side(name, module, optimizer, takes_part=False, on_host=on_host)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    """One group for tensors and one for DTensors: fused kernels take no mixture."""
    parameters = list(module.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=LEARNING_RATE, fused=True)
