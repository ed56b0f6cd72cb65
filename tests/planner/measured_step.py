"""Planned training steps on real ranks, with the bytes they really hold: what a plan's peak is measured against.

Ranks import this file by itself: nothing here knows the planner.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import transformers
from tests.tracker import StorageTracker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwright
from shardwright.ir import Decisions, Graph, Plan, Tier
from shardwright.runtime.captured import Captured
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.engines import Room
from shardwright.runtime.module import install
from shardwright.runtime.session import Session, find_session

__all__ = ["Example", "Measured", "Size", "llama", "measured_peak", "measured_peaks"]

NUM_STEPS = 4
Example = tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]


class Maker(Protocol):
    """Gives the same weights and batch on every call; goes to ranks by name."""

    def __call__(self) -> Example: ...


@dataclass(frozen=True)
class Size:
    """Of a Llama and its batch; called, it builds them."""

    batch: int = 8
    length: int = 64
    hidden: int = 64
    num_layers: int = 4
    vocabulary: int = 256

    def __call__(self) -> Example:
        return llama(self)


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank over whole steps: forward, backward, optimizer."""

    first_bytes: int
    """Of the first step, which makes the optimizer's state."""
    device_bytes: int
    """Of later steps the least: now and then a thread of gloo lets go of a tensor late."""
    pool_bytes: int
    """Most that the host pool handed out at once: copies, buffers of the disk, optimizer state."""
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


def measured_peak(plan: Plan, graph: Graph, make: Maker, torch_default: bool) -> Measured:
    """With `torch_default` AdamW is made without asking us."""
    module, args, kwargs = make()
    shardwright.apply(module, shardwright.Plan(plan, graph), args, kwargs)
    return _measured(module, args, kwargs, plan.decisions, torch_default, plan.identity.accumulate)


def measured_peaks(
    make: Maker, captured: Captured, programs: Iterable[tuple[Graph, Decisions]], host_bytes: int
) -> list[Measured]:
    """The same of rank graphs that no plan was made for."""
    found = []
    for graph, decisions in programs:
        module, args, kwargs = make()
        install(module, captured, graph, decisions, room=Room(host_bytes))
        found.append(_measured(module, args, kwargs, decisions, True, 1))
    return found


def _measured(
    module: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
    decisions: Decisions,
    torch_default: bool,
    accumulate: int,
) -> Measured:
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    parameters = module.parameters()
    optimizer = make(parameters, lr=1e-3) if torch_default else shardwright.optimizer(module, make, lr=1e-3)
    session = find_session(module)
    assert session is not None
    pool, disk = session.installed.steps.pool, _disk(session)
    given = [*session.installed.captured.tensors.values(), *args, *kwargs.values()]
    peaks = []
    for _ in range(NUM_STEPS):
        state = [value for tier in Tier for value in _state(module, optimizer, decisions, tier)]
        held = [*module.parameters(), *module.buffers(), *given, *state]
        with StorageTracker(map(_local, held), excluded=pool.owns) as memory:
            loss = _step(module, args, kwargs, optimizer, accumulate)
        on_host = [_local(value) for value in _state(module, optimizer, decisions, Tier.HOST)]
        peaks.append(memory.peak_bytes_without(on_host))
        optimizer.zero_grad()
    first, *later = peaks
    return Measured(
        first_bytes=first,
        device_bytes=min(later),
        pool_bytes=pool.peak_bytes,
        loss=loss,
        disk_bytes=disk.file.peak_bytes if disk else 0,
    )


def _step(
    module: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
    accumulate: int,
) -> float:
    for _ in range(accumulate):
        output = module(*args, **kwargs)
        loss: Tensor = output[0] if isinstance(output, tuple) else output["loss"]
        del output
        loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.item())


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _state(module: nn.Module, optimizer: torch.optim.Optimizer, decisions: Decisions, tier: Tier) -> list[Tensor]:
    """Optimizer state that the plan keeps on that tier."""
    return [
        value
        for name, parameter in module.named_parameters()
        if decisions.tiers.get(name, Tier.DEVICE) is tier
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor)
    ]


def _disk(session: Session) -> DiskCopies | None:
    """The engine that the program moves storages to disk with; None where it does not."""
    program = session.installed.program
    modules = (program.forward_module, program.backward_module)
    engines = (getattr(module, "disk", None) for module in modules)
    return next((engine for engine in engines if isinstance(engine, DiskCopies)), None)
