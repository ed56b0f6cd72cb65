"""Redistributions: priced once per copy, shared by readers of one phase, and none of them for nothing."""

from dataclasses import replace

import pytest
from tests.planner.small_graphs import FixedPrices, cluster, machine, square_graph
from tests.planner.solving import captured, formulated, known_rules, peak_bytes, smallest_bytes, solved

from shardwright.ir import Graph, Mesh, Partial, Phase, Replicate, Shard
from shardwright.ir.ops import is_collective
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.lower import lower
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.flows import build_flows
from shardwright.planner.formulate import Machine
from shardwright.planner.linear import LinearModel

TWO = Mesh(("x",), (2,))


def superfluous(graph: Graph) -> list[str]:
    """Gathers and exchanges after which, whatever is computed from the copy, each rank keeps its own part of it only."""
    found = []
    for node in graph.nodes:
        if node.op not in ("mesh.all_gather", "mesh.all_to_all"):
            continue
        reached = set(node.results)
        pending = list(node.results)
        while pending:
            for user in (graph.nodes[position] for position in graph.users.get(pending.pop(), ())):
                if not (user.op == "mesh.own" and user.args[1] == node.args[1]):
                    pending.extend(result for result in user.results if result not in reached)
                    reached.update(user.results)
        if reached.isdisjoint(graph.returned):
            found.append(node.name)
    return found


def linked(bytes_per_second: float, overlap: float) -> Machine:
    machines = cluster(2, overlap)
    link = replace(machines.intra, bytes_per_second=bytes_per_second)
    device = replace(machines.device, launch_seconds=1e-7)
    machines = replace(machines, intra=link, inter=link, device=device)
    return Machine(machines, AnalyticalPrices(machines), optimizer_spec("adamw"), 0)


@pytest.mark.parametrize(("bytes_per_second", "overlap"), [(1e9, 0.3), (1e10, 1.0)])
@pytest.mark.parametrize("name", ["perceptron", "decoder", "llama"])
def test_nothing_is_gathered_that_nobody_needs_whole(name: str, bytes_per_second: float, overlap: float) -> None:
    """With room, and half way to the smallest budget there is."""
    graph = captured(name)
    formulation = formulated(graph, TWO, linked(bytes_per_second, overlap), rules=known_rules())
    loose = solved(formulation, gap=1e-3)
    budget = (peak_bytes(formulation, loose) + smallest_bytes(formulation)) / 2
    tight = solved(formulation, budget, gap=1e-2)
    for solution in (loose, tight):
        assert solution.values
        assert superfluous(lower(graph, decode(formulation, solution.values))) == []


def test_the_check_for_superfluous_gathers_sees_one() -> None:
    """A copy gathered, doubled and cut again is found; one that is returned is not."""
    from shardwright.ir import parse_graph

    text = """graph "cut" {
  input   %x: f32[4, 8]
  forward {
    %g: f32[8, 8] = mesh.all_gather(%x, "x")
    %w: f32[8, 8] = mesh.wait(%g, %x)
    %d: f32[8, 8] = aten.neg.default(%w)
    %o: f32[4, 8] = mesh.own(%d, "x", 0, 1)
  }
  return {
    output "y" = %RETURNED
  }
}
"""
    assert superfluous(parse_graph(text.replace("RETURNED", "o"))) == ["g"]
    assert superfluous(parse_graph(text.replace("RETURNED", "d"))) == []
