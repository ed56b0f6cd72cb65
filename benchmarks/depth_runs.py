"""What one rank of `deepest_llama.py` does: train a Llama of some depth, count every storage, time steps.

The same tracker counts both sides: tensor storages outside the host pool, FSDP2's resized ones included. Optimizer
state that the plan keeps on the host does not count, and is reported by itself.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from peer_memory import PeerMemory
from peer_models import Batch, PeerModel
from peer_sides import FSDP_AC, LEARNING_RATE, Side, make_peer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.ir import StoredPlan, Tier
from shardwright.runtime.copies import Copies
from shardwright.runtime.session import Session, find_session
from shardwright.runtime.tracker import held_tensors

__all__ = [
    "BATCH",
    "TOKENS",
    "VOCABULARY",
    "WIDTH",
    "DeviceMemory",
    "Measured",
    "batch_of",
    "build",
    "train_fsdp",
    "train_planned",
]

WIDTH: Final = 512
MLP_WIDTH: Final = 1376
VOCABULARY: Final = 2048
BATCH, TOKENS = 8, 256
SEED: Final = 0
TRACKED_STEPS, TIMED_STEPS = 2, 3


@dataclass(frozen=True)
class Measured:
    """One side at one depth; the fullest rank, the slowest rank."""

    peak_bytes: int
    """Storages of the device, over whole steps with optimizer state in place."""
    pool_bytes: int
    """Most that the host pool handed out at once."""
    state_bytes: int
    """Optimizer state on the host."""
    step_seconds: float
    loss: float
    """Of the first step, on the whole batch."""


def build(depth: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP_WIDTH, num_hidden_layers=depth,
        num_attention_heads=8, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def batch_of(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train_fsdp(depth: int, timed_steps: int = TIMED_STEPS) -> Measured:
    """FSDP2 over checkpointed blocks. Collective."""
    torch.set_num_threads(1)
    model = PeerModel("llama", lambda: build(depth), batch_of, "model.layers", dict, dict)
    side = make_peer(FSDP_AC, model, SEED)
    return _measured(side, (), lambda _: False, None, timed_steps)


def train_planned(depth: int, plan: StoredPlan) -> Measured:
    """By a plan, from the weights that the other side has. Collective."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    batch = batch_of(torch.Generator().manual_seed(SEED))
    module = shardwright.apply(build(depth), plan, (), dict(batch))
    optimizer = shardwright.optimizer(module, torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    side = Side("planned", module, optimizer, takes_part=False)
    session = find_session(module)
    if session is None:
        raise RuntimeError("expected a planned module, found one without a plan")
    copies = _copies(session)
    on_host = {name for name, tier in plan.plan.decisions.tiers.items() if tier is Tier.HOST}

    def is_host(tensor: Tensor) -> bool:
        return copies is not None and copies.pool.owns(tensor)

    return _measured(side, on_host, is_host, session, TIMED_STEPS)


def _measured(
    side: Side,
    state_on_host: Iterable[str],
    is_host: Callable[[Tensor], bool],
    session: Session | None,
    timed_steps: int,
) -> Measured:
    part = side.part(batch_of(torch.Generator().manual_seed(SEED)))
    loss = _mean(float(side.step(part)))
    host_state = list(_host_state(side, frozenset(state_on_host)))
    addresses = {tensor.untyped_storage()._cdata for tensor in host_state}
    constants = session.installed.captured.tensors.values() if session else ()
    peak = 0
    for _ in range(TRACKED_STEPS):
        held = [*held_tensors(side.module, side.optimizer), *part.values(), *constants]
        with DeviceMemory(held, addresses, is_host) as memory:
            side.step(part)
        peak = max(peak, memory.peak_bytes)
    copies = _copies(session) if session else None
    seconds = [_timed(side, part) for _ in range(timed_steps)]
    return Measured(
        peak_bytes=int(_largest(peak)),
        pool_bytes=int(_largest(copies.pool.peak_bytes if copies else 0)),
        state_bytes=int(_largest(sum(tensor.untyped_storage().nbytes() for tensor in host_state))),
        step_seconds=_largest(statistics.median(seconds) if seconds else 0.0),
        loss=loss,
    )


def _timed(side: Side, part: Batch) -> float:
    dist.barrier()
    start = time.perf_counter()
    side.step(part)
    return time.perf_counter() - start


def _mean(value: float) -> float:
    """Over ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


def _largest(value: float) -> float:
    """Over ranks; whole numbers are exact up to 2**53."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


class DeviceMemory(PeerMemory):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Without what is on the host, which on a CPU looks like anything else."""

    def __init__(self, held: Iterable[Tensor], on_host: set[int], is_host: Callable[[Tensor], bool]) -> None:
        self._on_host = on_host
        self._is_host = is_host
        super().__init__(held, block_bytes=1)

    def _count(self, tensor: Tensor) -> None:
        if not isinstance(tensor, DTensor) and self._is_host(tensor):
            return
        super()._count(tensor)

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._on_host:
            super().count_storage(storage)


def _host_state(side: Side, names: frozenset[str]) -> Iterator[Tensor]:
    for name, parameter in side.module.named_parameters():
        if name in names:
            for value in side.optimizer.state[parameter].values():
                if isinstance(value, Tensor):
                    yield value._local_tensor if isinstance(value, DTensor) else value


def _copies(session: Session) -> Copies | None:
    """The engine that the program moves tensors with; None where it moves none."""
    program = session.installed.program
    modules = (program.forward_module, program.backward_module)
    return next((module.copies for module in modules if hasattr(module, "copies")), None)  # type: ignore[return-value]
