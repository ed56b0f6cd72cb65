"""Every redistribution of every layout gives each rank its part of the whole, on one and on two axes."""

import itertools

import pytest
import torch

from shardwright.ir import (
    Arg,
    Graph,
    Input,
    InputKind,
    Layout,
    Mesh,
    Node,
    Partial,
    Placement,
    PlanError,
    Replicate,
    Shard,
    Strided,
    TensorType,
    divides,
    format_layout,
    local_shape,
)
from shardwright.passes.redistribute import emit_step, steps
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.shards import shard, unshard

SHAPE = (8, 12)
SOURCES: tuple[Placement, ...] = (
    Replicate(),
    Shard(0),
    Shard(1),
    Strided(0, 2),
    Strided(0, 4),
    Strided(1, 3),
    Partial(),
)
TARGETS = SOURCES[:-1]


def _program(source: Layout, target: Layout, mesh: Mesh) -> tuple[Graph, str]:
    nodes: list[Node] = []
    types = {"x": TensorType("f64", local_shape(SHAPE, source, mesh))}

    def emit(op: str, args: tuple[Arg, ...], result: TensorType) -> str:
        name = f"v{len(types)}"
        nodes.append(Node(op, args, (), (name,)))
        types[name] = result
        return name

    current, local, layout = "x", types["x"], source
    for step in steps(source, target):
        current, local = emit_step(step, current, local, layout, mesh, emit)
        layout = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
    return Graph("g", (Input("x", InputKind.INPUT),), tuple(nodes), types), current


def _moved(whole: torch.Tensor, source: Layout, target: Layout, mesh: Mesh) -> list[torch.Tensor]:
    graph, name = _program(source, target, mesh)
    given = [{"x": shard(whole, source, mesh, rank)} for rank in range(mesh.num_ranks)]
    found = [values[name] for values in run_lockstep(graph, mesh, given, watch=[name])]
    assert all(tuple(part.shape) == graph.types[name].shape for part in found)
    return found


@pytest.mark.parametrize("mesh", [Mesh(("dp",), (2,)), Mesh(("dp", "tp"), (2, 2))], ids=str)
def test_every_redistribution_gives_each_rank_its_part(mesh: Mesh) -> None:
    whole = torch.arange(96, dtype=torch.float64).reshape(SHAPE) + 1
    num_tried = 0
    for source in itertools.product(SOURCES, repeat=len(mesh.sizes)):
        for target in itertools.product(TARGETS, repeat=len(mesh.sizes)):
            if not divides(SHAPE, source, mesh) or not divides(SHAPE, target, mesh):
                continue
            found = _moved(whole, source, target, mesh)
            what = f"{format_layout(source)} to {format_layout(target)}"
            expected = [shard(whole, target, mesh, rank) for rank in range(mesh.num_ranks)]
            assert torch.equal(unshard(found, target, mesh), whole), what
            assert all(map(torch.equal, found, expected)), what
            num_tried += 1
    assert num_tried > 30


def test_nothing_becomes_partial_again() -> None:
    with pytest.raises(PlanError, match="only an operator makes a partial value"):
        steps((Shard(0),), (Partial(),))


def test_gradients_are_reduced_over_the_inner_axis_first() -> None:
    found = steps((Partial(), Partial()), (Shard(1), Shard(0)))
    assert [step.axis for step in found] == [1, 0]


def test_parameters_are_gathered_over_the_outer_axis_first() -> None:
    found = steps((Shard(1), Shard(0)), (Replicate(), Replicate()))
    assert [step.axis for step in found] == [0, 1]
