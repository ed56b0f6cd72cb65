"""The schedule check accepts what the passes make and names what is wrong with anything else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.passes.layer_graphs import Layer, layer_graph

from shardwright.ir import Graph, GraphError, Node, Phase, Schedule
from shardwright.passes.pipeline import scheduled
from shardwright.passes.schedule_check import (
    check_schedule,
    check_streams,
    collective_schedule,
    schedule_hash,
)

LAYERS = [Layer("a0"), Layer("a0", True), Layer("replicated"), Layer("replicated")]
GRAPH = scheduled(layer_graph(LAYERS), Schedule())
WAITS = [node.name for node in GRAPH.nodes if node.op.endswith(".wait")]


def edited(edit: Callable[[list[Node]], object]) -> Graph:
    nodes = list(GRAPH.nodes)
    edit(nodes)
    return replace(GRAPH, nodes=tuple(nodes))


def position(name: str) -> int:
    return GRAPH.nodes.index(GRAPH.producers[name])


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_missed(wait: str) -> None:
    """Read by its handle in its place, or not at all."""
    node = GRAPH.producers[wait]
    nodes = tuple(
        n.with_operands(tuple(node.operands[0] if o == wait else o for o in n.operands))
        for n in GRAPH.nodes
        if n.name != wait
    )
    with pytest.raises(GraphError, match="still under way|a wait for it"):
        check_schedule(replace(GRAPH, nodes=nodes))


@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_may_come_twice(wait: str) -> None:
    again = replace(GRAPH.producers[wait], results=("again",))
    with pytest.raises(GraphError, match="has no other wait"):
        check_schedule(edited(lambda nodes: nodes.insert(position(wait) + 1, again)))


@pytest.mark.parametrize("wait", WAITS)
def test_no_wait_may_stand_before_its_start(wait: str) -> None:
    def swap(nodes: list[Node]) -> None:
        nodes.insert(position(GRAPH.producers[wait].operands[0]), nodes.pop(position(wait)))

    with pytest.raises(GraphError):
        check_schedule(edited(swap))


def test_a_start_and_its_wait_are_in_one_phase() -> None:
    wait = next(node for node in GRAPH.nodes if node.op == "mesh.wait")
    moved = replace(wait, phase=Phase.BACKWARD)
    with pytest.raises(GraphError, match="to be in forward"):
        check_schedule(edited(lambda nodes: nodes.__setitem__(position(wait.name), moved)))


def test_a_wait_names_what_was_sent() -> None:
    wait = next(node for node in GRAPH.nodes if node.op == "mesh.wait")
    other = wait.with_operands((wait.operands[0], "x"))
    with pytest.raises(GraphError, match="to name layers.0.w~whole.a~bucket/pack"):
        check_schedule(edited(lambda nodes: nodes.__setitem__(position(wait.name), other)))


def test_what_is_under_way_is_not_overwritten() -> None:
    """Two reductions of one tensor, the second in place, before the first is done."""
    graph = layer_graph([Layer()])
    start = graph.producers["grad(layers.0.w).a.start"]
    second = replace(start, op="mesh.all_reduce_", results=("second",))
    wait = replace(graph.producers["grad(layers.0.w).a"], results=("done",)).with_operands(
        ("second", start.operands[0])
    )
    nodes = list(graph.nodes)
    nodes.insert(nodes.index(start) + 1, second)
    nodes.insert(nodes.index(second) + 2, wait)
    types = {**graph.types, "second": graph.types[start.name], "done": graph.types[start.name]}
    with pytest.raises(GraphError, match="to overwrite"):
        check_schedule(replace(graph, nodes=tuple(nodes), types=types))


def test_the_schedule_lists_collectives_in_order() -> None:
    graph = layer_graph([Layer("b1")])
    entries = [(e.kind, e.axis, e.reduce, e.dtype, e.num_elements) for e in collective_schedule(graph)]
    assert entries == [
        ("all_gather", "b", "", "f32", 32),
        ("all_reduce", "a", "sum", "f32", 1),
        ("all_gather", "b", "", "f32", 32),
        ("all_reduce", "a", "sum", "f32", 64),
        ("reduce_scatter", "b", "sum", "f32", 64),
    ]


def test_the_hash_sees_order_and_size_and_nothing_else() -> None:
    graph = layer_graph([Layer("a0"), Layer("b1")])
    assert schedule_hash(graph) == schedule_hash(replace(graph, name="other"))
    assert schedule_hash(graph) != schedule_hash(scheduled(graph, Schedule()))
    assert schedule_hash(graph) != schedule_hash(layer_graph([Layer("a0"), Layer("b1")], width=16))


def test_ranks_that_differ_are_told_where() -> None:
    one = collective_schedule(layer_graph([Layer("a0"), Layer("b1")]))
    check_streams((one, one))
    with pytest.raises(GraphError, match="expected collective 1 of rank 1 .* found all_reduce"):
        check_streams((one, (one[0], *one[2:])))
    with pytest.raises(GraphError, match="found no more"):
        check_streams((one, one[:-1]))
