"""A planned training step on real ranks, with the bytes it really holds: what a plan's peak is measured against.

Ranks import this file by itself: nothing here knows the planner.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from tests.tracker import StorageTracker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright
from shardwright.ir import Graph, Plan, Tier
from shardwright.runtime.copies import Copies
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.session import Session, find_session

__all__ = ["Measured", "Size", "llama", "measured_peak"]


NUM_STEPS = 3
"""The least of these counts: now and then a thread of gloo lets go of a tensor some microseconds late."""


@dataclass(frozen=True)
class Size:
    """Of a Llama and its batch."""

    batch: int = 8
    length: int = 64
    hidden: int = 64
    num_layers: int = 4
    vocabulary: int = 256


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank over a whole step: forward, backward, optimizer."""

    device_bytes: int
    pool_bytes: int
    """Most that the host pool handed out at once, buffers of the disk included."""
    loss: float
    disk_bytes: int = 0
    """Most that was on disk at once."""


def llama(size: Size) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """The same weights and batch on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=2 * size.hidden,
            num_hidden_layers=size.num_layers, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        tokens = torch.randint(size.vocabulary, (size.batch, size.length))
        return transformers.LlamaForCausalLM(config).train(), (), {"input_ids": tokens, "labels": tokens.clone()}


def measured_peak(plan: Plan, graph: Graph, size: Size, torch_default: bool) -> Measured:
    """Of steps from the second on: optimizer state is there. With `torch_default` AdamW is made without asking us."""
    module, args, kwargs = llama(size)
    shardwright.apply(module, shardwright.Plan(plan, graph), args, kwargs)
    if torch_default:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    else:
        optimizer = shardwright.optimizer(module, torch.optim.AdamW, lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        for _ in range(plan.identity.accumulate):
            loss = module(*args, **kwargs)["loss"]
            loss.backward()
        optimizer.step()
        return float(loss.item())

    step()
    optimizer.zero_grad()
    session = find_session(module)
    assert session is not None
    on_host = {_local(t).untyped_storage().data_ptr() for t in _state(module, optimizer, plan, Tier.HOST)}
    copies, disk = _engine(session, "copies"), _engine(session, "disk")
    pools = [engine.pool for engine in (copies, disk) if engine is not None]
    held = [*module.parameters(), *module.buffers(), *session.installed.captured.tensors.values(), *kwargs.values()]
    held.extend(_state(module, optimizer, plan, Tier.DEVICE))

    def excluded(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in on_host or any(pool.owns(tensor) for pool in pools)

    peaks = []
    for _ in range(NUM_STEPS):
        with StorageTracker(map(_local, held), excluded=excluded) as memory:
            loss = step()
        peaks.append(memory.peak_bytes)
        optimizer.zero_grad()
    pool_bytes = max((pool.peak_bytes for pool in pools), default=0)
    return Measured(min(peaks), pool_bytes, loss, disk.file.peak_bytes if isinstance(disk, DiskCopies) else 0)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _state(module: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, tier: Tier) -> Iterator[Tensor]:
    """Optimizer state that the plan keeps on that tier."""
    for name, parameter in module.named_parameters():
        if plan.decisions.tiers.get(name, Tier.DEVICE) is tier:
            yield from (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))


def _engine(session: Session, name: str) -> Copies | DiskCopies | None:
    """An engine that the program moves storages with; None where it does not. Both have one pool."""
    program = session.installed.program
    modules = (program.forward_module, program.backward_module)
    return next((getattr(module, name) for module in modules if hasattr(module, name)), None)
