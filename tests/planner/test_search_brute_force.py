"""On one device the search hands out the best of all plans by replay, and never one that breaks a budget.

The other side is written out here: every fate of every storage that forward makes and every tier of the optimizer's
state, each turned into the program that would run under that budget, and replayed. Nothing of the solver's program is
used.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from tests.planner.small_dags import dags, machines
from tests.planner.small_graphs import ONE, TableRules

from shardwright.ir import Budget, Decisions, Fate, Graph, InfeasibleError, Layout, Phase, Schedule, Tier
from shardwright.passes.footprint import lasting_bytes
from shardwright.passes.lower import lower
from shardwright.passes.replay import Replay
from shardwright.planner.candidates import judge
from shardwright.planner.defaults import silent
from shardwright.planner.fold import fold_of
from shardwright.planner.formulation import Machine
from shardwright.planner.search import Request, search

PROFILE = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Stage.explicit, Stage.generate],  # shrinking takes minutes where each question is a search
)
NUM_GRAPHS, NUM_STUDIED = 25, 240
GAP = 1e-6
EQUAL = 1 + 1e-5
"""Seconds of the search's plan over those of the best, at most: the gap asked of the solver, and rounding."""
IN_THREE_DIGITS = 1.01
"""A size rounded up, over the size."""


@dataclass(frozen=True)
class Tried:
    """A plan and what it comes to."""

    seconds: float
    peak_bytes: int


def every_plan(graph: Graph, machines: Machine, device_bytes: int) -> set[Tried]:
    """Those that fit the host, with the room for copies that the budget leaves; each distinct outcome once."""
    budget = Budget(device_bytes, machines.host_bytes)
    found = set()
    for decisions in every_decision(graph, machines.host_bytes > 0):
        lasting = lasting_bytes(lower(graph, decisions), machines.optimizer, decisions.tiers, 1)
        roomy = replace(decisions, schedule=Schedule(room_bytes=max(device_bytes - lasting, 0)))
        judged = judge("", graph, roomy, machines, budget).replay
        if judged.host_peak_bytes <= machines.host_bytes:
            found.add(Tried(judged.step_seconds, judged.peak_bytes))
    return found


def every_decision(graph: Graph, has_host: bool) -> Iterator[Decisions]:
    layouts: dict[str, Layout] = dict.fromkeys(graph.types, ())
    reads: dict[str, tuple[Layout, ...]] = {node.name: ((),) * len(node.operands) for node in graph.nodes}
    forward = [node.name for node in graph.nodes if node.phase is Phase.FORWARD]
    fates = (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD) if has_host else (Fate.KEEP, Fate.RECOMPUTE)
    tiers = (Tier.DEVICE, Tier.HOST) if has_host else (Tier.DEVICE,)
    saved = saved_or_parents(graph, forward)
    for chosen in product(fates, repeat=len(saved)):
        moved = {name: fate for name, fate in zip(saved, chosen, strict=True) if fate is not Fate.KEEP}
        for tier in tiers:
            yield Decisions(ONE, layouts, reads, moved, tiers={"p": tier} if tier is Tier.HOST else {})


def saved_or_parents(graph: Graph, forward: list[str]) -> list[str]:
    """What backward reads or may have to make again; the fate of others changes nothing."""
    wanted = {name for node in graph.nodes if node.phase is Phase.BACKWARD for name in node.operands}
    for node in reversed(graph.nodes):
        if node.phase is Phase.FORWARD and node.name in wanted:
            wanted.update(node.operands)
    return [name for name in forward if name in wanted]


def sought(graph: Graph, machines: Machine, device_bytes: int) -> Request:
    return Request(
        graph=graph,
        fold=fold_of(graph),
        rules=TableRules(),
        machine=machines,
        budget=Budget(device_bytes, machines.host_bytes),
        meshes=(ONE,),
        time_limit_seconds=60.0,
        gap=GAP,
        progress=silent,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_graphs", [NUM_GRAPHS, pytest.param(NUM_STUDIED, marks=pytest.mark.study)])
def test_the_search_finds_the_best_of_all_plans(num_graphs: int) -> None:
    """Under the smallest budget that any plan fits, and one between that and the largest; below the smallest it refuses
    and names it."""

    @settings(PROFILE, max_examples=num_graphs)
    @given(graph=dags(), machines=machines())
    def ask(graph: Graph, machines: Machine) -> None:
        peaks = sorted({plan.peak_bytes for plan in every_plan(graph, machines, 0)})
        for budget in (peaks[0], peaks[len(peaks) // 2]):
            fitting = [plan.seconds for plan in every_plan(graph, machines, budget) if plan.peak_bytes <= budget]
            seconds = kept(graph, machines, budget).step_seconds
            assert min(fitting) / EQUAL <= seconds <= min(fitting) * EQUAL
        with pytest.raises(InfeasibleError) as refusal:
            search(sought(graph, machines, peaks[0] - 1))
        assert peaks[0] <= refusal.value.smallest_bytes <= peaks[0] * IN_THREE_DIGITS

    ask()


def kept(graph: Graph, machines: Machine, device_bytes: int) -> Replay:
    """What the search finds, within its budgets."""
    found = search(sought(graph, machines, device_bytes)).chosen.replay
    assert found.peak_bytes <= device_bytes
    assert found.host_peak_bytes <= machines.host_bytes
    return found
