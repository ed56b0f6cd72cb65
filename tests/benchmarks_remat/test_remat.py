"""Recomputation benchmark: the program against every schedule there is, the judge against schedules made by hand."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from remat_check import Checked, Step, WrongScheduleError, check
from remat_graph import RematGraph, load
from remat_model import assignment, formulate, steps
from remat_search import search

from shardwright.planner.linear import Status, solve

CHAIN = RematGraph("chain", ((), (0,), (1,), (0, 2)), (4, 3, 2, 1), (5, 7, 1, 1))
"""Node 3 reads node 0 again: 9 bytes while node 2 runs, 7 when node 0 is computed twice."""
ALL = (Step(0, ()), Step(1, ()), Step(2, (1,)), Step(3, (0, 2, 3)))
TWICE = (Step(0, ()), Step(1, (0,)), Step(2, (1,)), Step(0, ()), Step(3, (0, 2, 3)))


def random_graph(seed: int) -> RematGraph:
    source = random.Random(seed)
    count = source.choice((5, 6, 7))
    inputs = tuple(
        tuple(sorted({source.randrange(node) for _ in range(source.choice((1, 1, 2, 3)))})) if node else ()
        for node in range(count)
    )
    sizes = tuple(source.randint(1, 9) for _ in inputs)
    return RematGraph(str(seed), inputs, sizes, tuple(source.randint(0, 6) for _ in inputs))


def smallest(graph: RematGraph) -> int:
    return max(size + sum(graph.sizes[v] for v in read) for size, read in zip(graph.sizes, graph.inputs, strict=True))


def prunable(graph: RematGraph, budget: int, value: int, stage: int) -> bool:
    used = max(use for use in (value, *graph.consumers[value]) if use < stage)
    return all(live <= budget for live in graph.live[used + 1 : stage])


def sequences(graph: RematGraph, budget: int) -> Iterator[list[list[int]]]:
    """What each stage computes, for every choice of recomputations in which each is read in its own stage."""
    count = len(graph.inputs)
    pairs = [(v, p) for p in range(count) for v in range(p) if not prunable(graph, budget, v, p)]
    reading = [(v, p) for v, p in pairs if any(v in graph.inputs[w] for w in range(v + 1, p + 1))]
    for chosen in itertools.product((False, True), repeat=len(reading)):
        again = [pair for pair, taken in zip(reading, chosen, strict=True) if taken]
        stages = [[*(v for v, p in again if p == stage), stage] for stage in range(count)]
        if all(any(v in graph.inputs[w] for w in stages[p]) for v, p in again):
            yield stages


def late(graph: RematGraph, stages: list[list[int]]) -> list[Step]:
    """The schedule that releases after the last reader, but in a stage not before its recomputations are all done."""
    flat = [node for stage in stages for node in stage]
    ends = list(itertools.accumulate(map(len, stages)))
    released: list[list[int]] = [[] for _ in flat]
    for place, node in enumerate(flat):
        following = next((later for later in range(place + 1, len(flat)) if flat[later] == node), len(flat))
        reading = (later for later in range(place, following) if node in graph.inputs[flat[later]])
        last = max(reading, default=place)
        end = next(end for end in ends if end > last)
        last_again = end - 2 if last < end - 1 else last
        released[last_again].append(node)
    return [Step(node, tuple(values)) for node, values in zip(flat, released, strict=True)]


def shortest(graph: RematGraph, budget: int) -> float:
    best = math.inf
    for stages in sequences(graph, budget):
        duration = sum(graph.durations[node] for stage in stages for node in stage)
        if duration < best:
            try:
                best = check(graph, late(graph, stages), budget).duration
            except WrongScheduleError:
                continue
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_optimum_is_that_of_trying_every_schedule(seed: int) -> None:
    graph = random_graph(seed)
    for budget in sorted({graph.peak - 1, (graph.peak + smallest(graph)) // 2, smallest(graph)}):
        best = shortest(graph, budget)
        formulation = formulate(graph, budget, depth=len(graph.inputs))
        found = solve(formulation.model, time_limit_seconds=10.0, relative_gap=0.0)
        assert (found.status is Status.INFEASIBLE) == math.isinf(best)
        if found.values:
            assert graph.duration + found.objective * formulation.cost_unit == pytest.approx(best)
            assert check(graph, steps(formulation, found.values), budget).duration == best


def test_some_of_these_graphs_need_recomputation_and_some_have_no_schedule() -> None:
    """Otherwise the test above compares little."""
    added = [shortest(graph, smallest(graph)) - graph.duration for graph in map(random_graph, range(40))]
    assert sum(0 < extra < math.inf for extra in added) >= 8
    assert any(math.isinf(extra) for extra in added)


@pytest.mark.parametrize("seed", range(40))
def test_a_schedule_can_be_said_in_every_deeper_program(seed: int) -> None:
    graph = random_graph(seed)
    budget = (graph.peak + smallest(graph)) // 2
    shallow = formulate(graph, budget, depth=1)
    found = solve(shallow.model, time_limit_seconds=10.0, relative_gap=0.0)
    for depth in (1, 2, 3) if found.values else ():
        program = formulate(graph, budget, depth)
        values = assignment(program, steps(shallow, found.values))
        assert all(
            lower - 1e-9 <= sum(factor * values[variable] for variable, factor in terms.items()) <= upper + 1e-9
            for terms, lower, upper in program.model.rows
        )
        assert steps(program, values) == steps(shallow, found.values)


def test_search_proves_what_trying_everything_finds() -> None:
    graphs = [random_graph(seed) for seed in range(12)]
    budgets = [(smallest(graph), (graph.peak + smallest(graph)) // 2) for graph in graphs]
    for graph, budget in ((graph, budget) for graph, both in zip(graphs, budgets, strict=True) for budget in both):
        best, outcome = shortest(graph, budget), search(graph, budget, seconds=20.0)
        assert outcome.optimal
        assert outcome.bound == pytest.approx(best, rel=1e-4)
        assert (outcome.schedule is None) == math.isinf(best)
        if outcome.schedule:
            assert check(graph, outcome.schedule, budget).duration == best


def test_a_budget_below_one_node_with_its_inputs_has_no_schedule() -> None:
    outcome = search(CHAIN, smallest(CHAIN) - 1, seconds=5.0)
    assert outcome.schedule is None
    assert (outcome.optimal, outcome.depth, outcome.bound) == (True, 0, math.inf)


def test_the_judge_counts_what_exists_together() -> None:
    assert check(CHAIN, ALL, 9) == Checked(peak=9, duration=14)
    assert check(CHAIN, TWICE, 7) == Checked(peak=7, duration=19)
    assert CHAIN.peak == 9


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((Step(0, (0,)), Step(1, ())), "inputs to exist"),
        ((Step(0, ()), Step(0, ())), "held already"),
        ((Step(0, ()), Step(0, (0,))), "held already"),
        ((Step(0, ()), Step(1, (2,))), "release what exists"),
        (ALL[:3], "4 nodes to be computed"),
        ((*ALL[:3], Step(3, (0, 2))), "held"),
        ((Step(0, ()), Step(1, ()), Step(2, ()), Step(3, (0, 1, 2, 3))), "peak of at most"),
    ],
)
def test_the_judge_refuses(schedule: tuple[Step, ...], message: str) -> None:
    with pytest.raises(WrongScheduleError, match=message):
        check(CHAIN, schedule, 9)


def test_the_judge_refuses_another_order() -> None:
    wide = RematGraph("wide", ((), (0,), (0,)), (1, 1, 1), (1, 1, 1))
    with pytest.raises(WrongScheduleError, match="node 1 to be computed first"):
        check(wide, (Step(0, ()), Step(2, ())), 9)


def test_both_kinds_of_files_give_one_graph(tmp_path: Path) -> None:
    """Moccasin's file lists nodes in any order and says the order apart."""
    checkmate = {
        "nodes": [{"id": node, "cost_ram": CHAIN.sizes[node], "cost_cpu": CHAIN.durations[node]} for node in range(4)],
        "links": [{"source": read, "target": node} for node in range(4) for read in CHAIN.inputs[node]],
    }
    names = (7, 3, 9, 1)
    moccasin = {
        "graph": {"order": names},
        "nodes": [
            {"name": names[node], "out_cost": CHAIN.sizes[node], "duration": CHAIN.durations[node]}
            for node in (2, 0, 3, 1)
        ],
        "links": [{"0": names[read], "1": names[node]} for node in range(4) for read in CHAIN.inputs[node]],
    }
    for content in (checkmate, moccasin):
        path = tmp_path / "chain.json"
        path.write_text(json.dumps(content))
        assert load(path) == CHAIN
    path.write_text(json.dumps(moccasin | {"graph": {"order": names[::-1]}}))
    with pytest.raises(ValueError, match="an order in which inputs come first"):
        load(path)
