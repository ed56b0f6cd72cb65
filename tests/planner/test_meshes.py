"""Mesh shapes: which are tried, and that cutting a uniform axis in two does not change the optimum."""

from dataclasses import replace

import pytest
from tests.planner.small_graphs import FixedPrices, cluster, machine
from tests.planner.solving import captured, formulated, known_rules, solved

from shardwright.ir import Mesh
from shardwright.planner.fates import FateOptions
from shardwright.planner.meshes import candidate_meshes


def sizes(num_nodes: int, ranks_per_node: int) -> list[tuple[int, ...]]:
    machines = replace(cluster(ranks_per_node), num_nodes=num_nodes)
    return [mesh.sizes for mesh in candidate_meshes(machines)]


def test_meshes_hold_all_ranks_and_inner_axes_stay_within_a_node() -> None:
    assert sizes(1, 1) == [()]
    assert sizes(1, 2) == [(2,)]
    assert sizes(1, 4) == [(4,), (2, 2)]
    assert sizes(2, 4) == [(8,), (2, 4), (4, 2)]
    assert sizes(8, 8)[:2] == [(64,), (8, 8)]
    assert all(shape[-1] <= 8 for shape in sizes(8, 8)[1:])


def test_every_mesh_has_distinct_axis_names() -> None:
    for mesh in candidate_meshes(replace(cluster(8), num_nodes=8)):
        assert len(set(mesh.axes)) == len(mesh.sizes)
        assert mesh.num_ranks == 64


@pytest.mark.parametrize("element_seconds", [1e-7, 1e-5])
def test_splitting_a_uniform_axis_does_not_change_the_optimum(element_seconds: float) -> None:
    """Where the best plan splits the batch, which both axes offer: without latency, two steps over two ranks move as
    much as one over four. The inner axis offers more, so two axes are never worse beyond the gap."""
    prices = FixedPrices(element_seconds, launch_seconds=0.0, byte_seconds=1e-10, latency_seconds=0.0, free_cuts=True)
    found = []
    for mesh in (Mesh(("x",), (4,)), Mesh(("a", "b"), (2, 2))):
        formulation = formulated(
            captured("perceptron"), mesh, machine(4, prices), FateOptions(recompute=False), rules=known_rules()
        )
        found.append(solved(formulation, gap=1e-3).objective)
    assert found[1] == pytest.approx(found[0], rel=0.01)
