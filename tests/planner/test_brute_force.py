"""The solver's plan is the best of all plans: every combination tried, each judged by `oracle`, without the program."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from tests.planner.oracle import Judged, judge_directly, reachable_directly
from tests.planner.small_graphs import ONE, FixedPrices, graphs, machine
from tests.planner.solving import formulated, solved

from shardwright.ir import Decisions, Fate, Graph, InputKind, Layout, Mesh, Partial, Phase, Replicate
from shardwright.planner.decode import decode
from shardwright.planner.fates import GB, FateOptions, State
from shardwright.planner.formulation import Formulation, Machine
from shardwright.planner.linear import Solution, Status
from shardwright.planner.space import Choice, Space

TWO = Mesh(("x",), (2,))
BUFFERS = 3 * 4096
"""Two for tensors smaller than a block, and room to align them."""
QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
PRICES = draw.builds(
    FixedPrices,
    element_seconds=draw.sampled_from([1e-7, 1e-6, 1e-5]),
    byte_seconds=draw.sampled_from([1e-8, 2e-7, 2e-6]),
    latency_seconds=draw.sampled_from([0.0, 2e-5]),
    copy_byte_seconds=draw.sampled_from([1e-8, 1e-7, 1e-6]),
)


@dataclass(frozen=True)
class Plan:
    judged: Judged
    decisions: Decisions
    fates: Mapping[str, str]
    kept: frozenset[tuple[str, Layout]]


def followers(space: Space) -> frozenset[str]:
    return frozenset(node.name for unit in space.units for node in unit.nodes[1:])


def decided(space: Space, choices: tuple[Choice, ...]) -> Decisions:
    layouts: dict[str, Layout] = {}
    reads: dict[str, tuple[Layout, ...]] = {}
    for unit, choice in zip(space.units, choices, strict=True):
        layouts.update(zip(unit.values, choice.layouts, strict=True))
        reads.update((node.name, read) for node, read in zip(unit.nodes, choice.node_reads, strict=True))
    return Decisions(space.mesh, layouts, reads)


def possible(graph: Graph, decisions: Decisions) -> bool:
    """Whether every redistribution exists."""
    layouts = decisions.layouts
    read = ((v, q) for n in graph.nodes for v, q in zip(n.operands, decisions.reads[n.name], strict=True))
    rest = ((gradient, layouts[param]) for param, gradient in graph.gradients.items())
    return all(reachable_directly(layouts[value], layout) for value, layout in (*read, *rest))


def fate_tables(formulation: Formulation) -> Iterator[dict[str, str]]:
    """Every combination of states that the formulation allows by its documented rows."""
    fates, parents = formulation.fates, formulation.storages.forward
    for states in product(*(fate.counts for fate in fates.values())):
        table = dict(zip(fates, map(str, states), strict=True))
        again = [name for name, state in table.items() if state == State.RECOMPUTE]
        if not any(table.get(parent) == State.DROP for name in again for parent in parents[name].parents):
            yield table


def kept_tables(decisions: Decisions, graph: Graph) -> Iterator[frozenset[tuple[str, Layout]]]:
    """No redistributed copy is kept, or, of each value, one that both phases read and that ranks gather or sum for."""
    both = []
    forward = [r for n in graph.nodes if n.phase is Phase.FORWARD for r in n.results]
    for name in (*graph.inputs_of(InputKind.PARAM, InputKind.INPUT), *forward):
        made = decisions.layouts[name]
        found: dict[object, set[Layout]] = {}
        for node in graph.nodes:
            for value, layout in zip(node.operands, decisions.reads[node.name], strict=True):
                if value == name and layout != made and (layout == (Replicate(),) or isinstance(made[0], Partial)):
                    found.setdefault(node.phase, set()).add(layout)
        shared = set.intersection(*found.values()) if len(found) == 2 else set()
        both.append([None, *((name, layout) for layout in sorted(shared))])
    for picked in product(*both):
        yield frozenset(one for one in picked if one is not None)


def every_plan(formulation: Formulation, machines: Machine) -> Iterator[Plan]:
    space, graph = formulation.space, formulation.space.graph
    tables = list(fate_tables(formulation))
    for choices in product(*(unit.choices for unit in space.units)):
        decisions = decided(space, choices)
        if not possible(graph, decisions):
            continue
        for kept in kept_tables(decisions, graph):
            for fates in tables:
                judged = judge_directly(graph, decisions, machines, fates, kept, followers(space))
                yield Plan(judged, decisions, fates, kept)


def judged_solution(formulation: Formulation, machines: Machine, solution: Solution) -> Judged:
    """What the solver's own plan is worth by the direct judge."""
    decisions = decode(formulation, solution.values)
    fates = {
        name: str(next(s for s, v in fate.counts.items() if round(solution.values[v])))
        for name, fate in formulation.fates.items()
    }
    kept = frozenset(
        (value, target) for (value, _, target), share in formulation.kept_shares.items() if solution.values[share] > 0.5
    )
    return judge_directly(formulation.space.graph, decisions, machines, fates, kept, followers(formulation.space))


def check_optimum(formulation: Formulation, machines: Machine, plans: list[Plan], budget_gb: float) -> None:
    """The solver's optimum is the best plan within the budget, and it is worth what the solver says."""
    solution = solved(formulation, budget_gb * GB)
    fitting = [plan.judged.total_ms for plan in plans if plan.judged.peak_gb <= budget_gb * (1 + 1e-9)]
    if not fitting:
        assert solution.status is Status.INFEASIBLE
        return
    own = judged_solution(formulation, machines, solution)
    assert own.peak_gb <= budget_gb * (1 + 1e-6)
    assert own.total_ms == pytest.approx(solution.objective, rel=1e-5, abs=1e-9)
    assert solution.objective == pytest.approx(min(fitting), rel=1e-5, abs=1e-9)
    assert solution.bound <= solution.objective + 1e-9


@QUICK
@given(graph=graphs((2, 3), (1, 1)), prices=PRICES, overlap=draw.sampled_from([1.0, 0.4]))
def test_layouts_are_the_best_of_all_layouts(graph: Graph, prices: FixedPrices, overlap: float) -> None:
    machines = machine(2, prices, overlap=overlap)
    formulation = formulated(graph, TWO, machines, FateOptions(recompute=False))
    check_optimum(formulation, machines, list(every_plan(formulation, machines)), float("inf"))


def budgets(plans: list[Plan], steps: int) -> list[float]:
    """From below the smallest peak to above the largest, in even steps through the peaks that occur."""
    peaks = sorted({plan.judged.peak_gb for plan in plans})
    return [peaks[0] * 0.99, *(peaks[i * (len(peaks) - 1) // steps] for i in range(steps + 1))]


@QUICK
@given(
    graph=graphs((3, 5), (1, 3)),
    prices=PRICES,
    host_bytes=draw.sampled_from([0, 600, 10**6]),
    host_overlap=draw.sampled_from([1.0, 0.6, 0.0]),
)
def test_fates_on_one_device_are_the_best_within_every_budget(
    graph: Graph, prices: FixedPrices, host_bytes: int, host_overlap: float
) -> None:
    machines = machine(1, prices, host_bytes=host_bytes, host_overlap=host_overlap)
    formulation = formulated(graph, ONE, machines, FateOptions(offload=host_bytes > 0))
    plans = [plan for plan in every_plan(formulation, machines) if host_use(plan, graph) <= host_bytes]
    for budget in budgets(plans, 4):
        check_optimum(formulation, machines, plans, budget)


def host_use(plan: Plan, graph: Graph) -> int:
    return sum(graph.types[name].num_bytes for name, fate in plan.fates.items() if fate == Fate.OFFLOAD)


@QUICK
@given(
    graph=graphs((3, 4), (1, 2)),
    prices=PRICES,
    host_bytes=draw.sampled_from([100, BUFFERS, BUFFERS + 300, 10**6]),
    disk_bytes=draw.sampled_from([4096, 10**6]),
    host_overlap=draw.sampled_from([1.0, 0.6]),
)
def test_fates_with_a_disk_are_the_best_within_every_budget(
    graph: Graph, prices: FixedPrices, host_bytes: int, disk_bytes: int, host_overlap: float
) -> None:
    """A copy takes a block there, and the host has to hold the buffers as soon as there is one."""
    machines = machine(1, prices, host_bytes=host_bytes, disk_bytes=disk_bytes, host_overlap=host_overlap)
    formulation = formulated(graph, ONE, machines, FateOptions(offload=True, spill_host_bytes=host_bytes))
    plans = [
        plan
        for plan in every_plan(formulation, machines)
        if host_use(plan, graph) + (BUFFERS if disk_use(plan) else 0) <= host_bytes and disk_use(plan) <= disk_bytes
    ]
    for budget in budgets(plans, 3):
        check_optimum(formulation, machines, plans, budget)


def disk_use(plan: Plan) -> int:
    return 4096 * sum(fate == State.SPILL for fate in plan.fates.values())


@settings(QUICK, max_examples=12)
@given(graph=graphs((2, 2), (1, 1)), prices=PRICES)
def test_layouts_and_fates_together_are_the_best_within_every_budget(graph: Graph, prices: FixedPrices) -> None:
    machines = machine(2, prices)
    formulation = formulated(graph, TWO, machines, FateOptions())
    plans = list(every_plan(formulation, machines))
    for budget in budgets(plans, 4):
        check_optimum(formulation, machines, plans, budget)
