"""Rows of memory: counts of what is alive, none lost; on one device never below the program's own liveness."""

import random

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from tests.planner.small_graphs import ONE, graphs, machine
from tests.planner.solving import captured, formulated, known_rules, peak_bytes
from tests.rank_graphs import expected_peak_bytes

from shardwright.ir import Graph
from shardwright.passes.lower import lower
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions, State
from shardwright.planner.linear import solve
from shardwright.planner.memory_rows import Items

SPANS = draw.lists(draw.tuples(draw.integers(0, 9), draw.integers(0, 9), draw.sampled_from("abc")), max_size=8)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(spans=SPANS)
def test_rows_bound_every_position_and_each_is_some_position(spans: list[tuple[int, int, str]]) -> None:
    """Against counting by hand: each position's counts are covered by a row, and no row is made up."""
    items, variables = Items(), {"a": 0, "b": 1, "c": 2}
    for start, end, key in spans:
        items.add(key, {variables[key]: 1.0}, start, end)
    rows = items.rows(list(range(11)))
    counted = [
        {variables[k]: sum(s <= position <= e for s, e, key in spans if key == k) for k in variables}
        for position in range(11)
    ]
    for alive in counted:
        assert any(all(row.get(v, 0.0) >= count for v, count in alive.items()) for row in rows)
    for row in rows:
        assert any(all(row.get(v, 0.0) == count for v, count in alive.items()) for alive in counted)


def test_only_positions_asked_for_count() -> None:
    items = Items()
    items.add("seen", {0: 1.0}, 0, 4)
    items.add("between", {1: 1.0}, 2, 2)
    assert items.rows([0, 4]) == [{0: 1.0}]
    assert items.rows([0, 2, 4]) == [{0: 1.0, 1: 1.0}]


def test_items_without_bytes_or_span_are_left_out() -> None:
    items = Items()
    items.add("empty", {}, 0, 3)
    items.add("never", {0: 1.0}, 3, 2)
    assert items.rows([0, 1, 2, 3]) == [{}]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(graph=graphs((2, 5), (1, 3)), seed=draw.integers(0, 99))
def test_on_one_device_the_program_never_needs_more_than_the_rows_say(graph: Graph, seed: int) -> None:
    """Random fates; liveness counted on the rank graph itself."""
    formulation = formulated(graph, ONE, machine(1, host_bytes=10**6), FateOptions(offload=True))
    dice = random.Random(seed)
    counts = [count for fate in formulation.fates.values() for count in fate.counts.values()]
    cost = {formulation.peak: 1e-3} | {count: dice.random() for count in counts}
    solution = solve(formulation.model.with_cost(cost), time_limit_seconds=10.0, relative_gap=0.0)
    lowered = lower(graph, decode(formulation, solution.values))
    assert expected_peak_bytes(lowered) <= peak_bytes(formulation, solution) + 0.5


def test_what_the_first_layer_alone_is_recomputed_from_counts() -> None:
    """In bfloat16 backward reads a layer's input only to make its casts again: here those of the first of two layers,
    from the embedding, while the second's wait on the host."""
    graph, options = captured("llama", torch.bfloat16), FateOptions(offload=True)
    formulation = formulated(graph, ONE, machine(1, host_bytes=10**9), options, rules=known_rules())
    cast = formulation.fates["model.layers.0.input_layernorm/to_copy"].counts
    once = {cast[State.RECOMPUTE]: (1.0, 1.0), cast[State.OFFLOAD]: (1.0, 1.0)}
    program = formulation.model.with_cost({formulation.peak: 1.0}).with_bounds(once)
    solution = solve(program, time_limit_seconds=10.0, relative_gap=1e-3)
    lowered = lower(graph, decode(formulation, solution.values))
    assert expected_peak_bytes(lowered) <= peak_bytes(formulation, solution) + 0.5
