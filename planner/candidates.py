"""Candidates: decisions turned into the program that runs, and judged by its replay."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.ir import Budget, Decisions, Graph, Schedule
from shardwright.passes.pipeline import rank_graph
from shardwright.passes.replay import Replay, replay
from shardwright.planner.formulate import Machine

__all__ = ["Candidate", "best", "evaluate"]

MIB = 2**20
SCHEDULES = (
    Schedule(),
    Schedule(8 * MIB, 16 * MIB, 16 * MIB, 32 * MIB, 32 * MIB),
    Schedule(bucket_bytes=MIB, gather_bytes=0, reduce_bytes=0, offload_bytes=0, reload_bytes=0),
)
"""From the one that hides most to the one that holds least."""


@dataclass(frozen=True)
class Candidate:
    """A plan to be, with what replay says of it."""

    name: str
    decisions: Decisions
    replay: Replay
    fits: bool

    @property
    def rank_key(self) -> tuple[bool, float, int]:
        """Smaller is better: what fits, then what is fast, then what is small."""
        return (not self.fits, self.replay.step_seconds if self.fits else 0.0, self.replay.peak_bytes)


def evaluate(name: str, graph: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Candidate:
    """The best of the schedules; a tighter one is tried only where a looser one does not fit."""
    tried = []
    for schedule in SCHEDULES:
        scheduled = replace(decisions, schedule=schedule)
        tried.append(judge(name, graph, scheduled, machine, budget))
        if tried[-1].fits:
            break
    return best(tried)


def judge(name: str, graph: Graph, decisions: Decisions, machine: Machine, budget: Budget) -> Candidate:
    """Replay one plan as it stands."""
    program = rank_graph(graph, decisions)
    judged = replay(program, decisions.mesh, machine.prices, machine.cluster, machine.optimizer, decisions.tiers)
    fits = judged.peak_bytes <= budget.device_bytes and judged.host_peak_bytes <= budget.host_bytes
    return Candidate(name, decisions, judged, fits)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """First in (fits, seconds, peak); of equals the earlier."""
    return min(candidates, key=lambda c: c.rank_key)
