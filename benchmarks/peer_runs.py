"""What one rank of `peers.py` does for one model: make the sides, check that they compute the same, time them in turns.

Seconds of a round are those of the slowest rank; processor time is the mean over ranks, threads of gloo included.
"""

import gc
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from peer_memory import PeerMemory
from peer_models import MODELS, Batch
from peer_sides import Side, make_peer, make_planned

from shardwright.ir import ShardwrightError, StoredPlan

__all__ = ["Case", "SideResult", "run_case"]

LOSS_TOLERANCE: Final = 1e-4
SEED: Final = 0
WARM_UP: Final = 2


@dataclass(frozen=True)
class Case:
    """One table of the output."""

    model: str
    plans: dict[str, StoredPlan]
    """Sides by a plan, by name."""
    peers: tuple[str, ...]
    rounds: int
    predicted: dict[str, tuple[float, int]]
    """Seconds of a step and bytes of a rank, by side."""
    fresh_memory: bool
    """Whether glibc gives freed memory back."""


@dataclass(frozen=True)
class SideResult:
    """One side, in the order of rounds."""

    name: str
    wall_seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    """By rank."""
    first_loss: float


def run_case(case: Case) -> tuple[SideResult, ...]:
    """Collective; the same on every rank."""
    torch.set_num_threads(1)
    model = MODELS[case.model]
    batch = model.batch(torch.Generator().manual_seed(SEED))
    sides = [make_planned(name, model, SEED, plan, batch) for name, plan in case.plans.items()]
    sides += [make_peer(name, model, SEED) for name in case.peers]
    losses = [_warm_up(side, batch) for side in sides]
    _require_equal(dict(zip((side.name for side in sides), losses, strict=True)))
    peaks = [_peak_bytes(side, batch) for side in sides]
    gc.collect()
    gc.disable()
    try:
        taken = _rounds(sides, batch, case.rounds)
    finally:
        gc.enable()
    return tuple(
        SideResult(side.name, *_over_ranks(taken[side.name]), peak, loss)
        for side, peak, loss in zip(sides, peaks, losses, strict=True)
    )


def _warm_up(side: Side, batch: Batch) -> float:
    """Loss of the first step, on the whole batch."""
    part = side.part(batch)
    loss = side.step(part).double()
    dist.all_reduce(loss)
    for _ in range(WARM_UP - 1):
        side.step(part)
    return float(loss) / dist.get_world_size()


def _require_equal(losses: dict[str, float]) -> None:
    expected = statistics.median(losses.values())
    for name, loss in losses.items():
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            raise ShardwrightError(
                f"expected a first loss of {expected:.6f} as of the other sides, {name} has {loss:.6f}"
            )


def _peak_bytes(side: Side, batch: Batch) -> tuple[int, ...]:
    part = side.part(batch)
    with PeerMemory([*side.held(), *part.values()]) as memory:
        side.step(part)
    found = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    found[dist.get_rank()] = memory.peak_bytes
    dist.all_reduce(found)
    return tuple(found.tolist())


def _rounds(sides: list[Side], batch: Batch, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, cpu) seconds of this rank by side; every other round goes the other way round."""
    parts = {side.name: side.part(batch) for side in sides}
    taken: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            part = parts[side.name]
            dist.barrier()
            taken[side.name].append(_timed(lambda side=side, part=part: side.step(part)))  # type: ignore[misc]
    return taken


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    before, start = _cpu_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - start, _cpu_seconds() - before


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _over_ranks(taken: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    table = torch.tensor(taken, dtype=torch.float64)
    wall, cpu = table[:, 0].clone(), table[:, 1].clone()
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return tuple(wall.tolist()), tuple((cpu / dist.get_world_size()).tolist())
