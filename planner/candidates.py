"""Candidates: decisions turned into the program that runs, and judged by its replay."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.ir import Budget, Decisions, Graph, Schedule
from shardwright.passes.footprint import lasting_bytes
from shardwright.passes.lower import lower
from shardwright.passes.pipeline import planned
from shardwright.passes.prefetch import block_gather_bytes
from shardwright.passes.replay import Replay, replay
from shardwright.planner.formulation import Machine

__all__ = ["Candidate", "best", "evaluate", "judge", "polish", "refitted"]

MIB = 2**20


def schedules(lowered: Graph, room_bytes: int) -> tuple[Schedule, ...]:
    """From the one that hides most, with a block's parameters arriving while another computes, to the one that holds
    least. Copies between tiers have the room that there is; where there are none it does not matter."""
    block_bytes = block_gather_bytes(lowered)
    copies = any(node.op.startswith("tier.") for node in lowered.nodes)
    room_bytes = max(room_bytes, 0) if copies else 0
    return (
        Schedule(gather_bytes=block_bytes, room_bytes=room_bytes),
        Schedule(8 * MIB, MIB // 4, block_bytes // 4, 16 * MIB, room_bytes),
        Schedule(MIB, 0, 0, MIB, room_bytes),
        Schedule(0, 0, 0, 0, room_bytes),
    )


@dataclass(frozen=True)
class Candidate:
    """A plan to be, with what replay says of it."""

    name: str
    decisions: Decisions
    replay: Replay
    fits: bool
    objective_seconds: float = math.inf
    """In the program that it was solved with; infinite where it is from elsewhere."""
    spread: Replay | None = None
    """Of the schedule, or the order of layers, that hides most, where that one does not fit; None where it does."""

    @property
    def rank_key(self) -> tuple[bool, float, int]:
        """Smaller is better: what fits, then what is fast, then what is small."""
        return (not self.fits, self.replay.step_seconds if self.fits else 0.0, self.replay.peak_bytes)


def evaluate(name: str, graph: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Candidate:
    """The best of the schedules; a tighter one is tried only where a looser one does not fit."""
    tried = []
    for candidate in _scheduled(name, graph, decisions, machine, budget):
        tried.append(candidate)
        if candidate.fits:
            break
    return replace(best(tried), spread=None if tried[0].fits else tried[0].replay)


def polish(candidate: Candidate, graph: Graph, machine: Machine, budget: Budget) -> Candidate:
    """The candidate under the best of all schedules: holding less sometimes is faster, where collectives queue."""
    others = _scheduled(candidate.name, graph, candidate.decisions, machine, budget)
    found = best([candidate, *others])
    return replace(found, objective_seconds=candidate.objective_seconds)


def _scheduled(name: str, graph: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Iterator[Candidate]:
    """The same decisions under every schedule that suits the budget."""
    lowered = lower(graph, decisions)
    room_bytes = budget.device_bytes - lasting_bytes(
        lowered,
        machine.optimizer,
        decisions.tiers,
        machine.cluster.device.block_bytes,
        accumulates=machine.accumulate > 1,
    )
    for schedule in schedules(lowered, room_bytes):
        yield _judge(name, lowered, replace(decisions, schedule=schedule), machine, budget)


def judge(name: str, graph: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Candidate:
    """Replay one plan as it stands."""
    return _judge(name, lower(graph, decisions), decisions, machine, budget)


def _judge(name: str, lowered: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Candidate:
    program = planned(lowered, decisions)
    judged = replay(
        program,
        decisions.mesh,
        machine.prices,
        machine.cluster,
        machine.optimizer,
        decisions.tiers,
        accumulate=machine.accumulate,
    )
    return Candidate(name, decisions, judged, _fits(judged, budget))


def refitted(candidate: Candidate, budget: Budget) -> Candidate:
    """The same plan under another budget."""
    return replace(candidate, fits=_fits(candidate.replay, budget))


def _fits(judged: Replay, budget: Budget) -> bool:
    needed = (judged.peak_bytes, judged.host_peak_bytes, judged.disk_peak_bytes)
    limits = (budget.device_bytes, budget.host_bytes, budget.disk_bytes)
    return all(peak <= limit for peak, limit in zip(needed, limits, strict=True))


def best(candidates: Sequence[Candidate]) -> Candidate:
    """First in (fits, seconds, peak); of equals the earlier."""
    return min(candidates, key=lambda c: c.rank_key)
