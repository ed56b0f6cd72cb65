"""Redistributions: priced once per copy, shared by readers of one phase, and none of them for nothing."""

from dataclasses import replace

import pytest
from tests.planner.small_graphs import FixedPrices, cluster, machine, square_graph
from tests.planner.solving import captured, formulated, known_rules, peak_bytes, smallest_bytes, solved

from shardwright.ir import Graph, Mesh, Phase, parse_graph
from shardwright.ir.ops import is_view
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.lower import lower
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.decode import decode
from shardwright.planner.formulation import Machine

TWO = Mesh(("x",), (2,))


POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "neg.default",
        "relu.default",
        "silu.default",
        "add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "clone.default",
    )
)  # fmt: skip


def superfluous(graph: Graph) -> list[str]:
    """Gathers and exchanges from whose copy, or what is computed from it point by point, each rank keeps its own part
    only: the part could have been computed from a part. (Gathering to compute a gradient whole instead of reducing it
    is another matter: reductions cost more.)"""
    found = []
    for node in graph.nodes:
        if node.op not in ("mesh.all_gather", "mesh.all_to_all"):
            continue
        pending, wanted = [*node.results], False
        for name in pending:
            users = [graph.nodes[position] for position in graph.users.get(name, ())]
            cut = [u.op == "mesh.own" and u.args[1] == node.args[1] for u in users]
            passed = [u.op in POINTWISE or is_view(u.op) or u.op in ("mesh.wait", "mesh.merge") for u in users]
            wanted |= name in graph.returned or not all(c or p for c, p in zip(cut, passed, strict=True))
            pending.extend(
                r for user, p in zip(users, passed, strict=True) if p for r in user.results if r not in pending
            )
        if not wanted:
            found.append(node.name)
    return found


def linked(bytes_per_second: float, overlap: float) -> Machine:
    machines = cluster(2, overlap)
    link = replace(machines.intra, bytes_per_second=bytes_per_second)
    device = replace(machines.device, launch_seconds=1e-7)
    machines = replace(machines, intra=link, inter=link, device=device)
    return Machine(machines, AnalyticalPrices(machines), optimizer_spec("adamw"), 0)


@pytest.mark.parametrize(
    ("name", "bytes_per_second", "overlap"),
    [
        ("perceptron", 1e9, 0.3),
        ("perceptron", 1e10, 1.0),
        ("decoder", 1e10, 0.3),
        pytest.param("llama", 1e10, 1.0, marks=pytest.mark.study),
    ],
)
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


def test_readers_of_one_phase_share_a_copy_and_backward_makes_its_own() -> None:
    """`f0` is summed over ranks once for two readers that need it whole, and once more for backward."""
    prices = FixedPrices(element_seconds=1e-4, launch_seconds=0.0, byte_seconds=1e-7, latency_seconds=1e-3)
    once = square_graph([("mm", "x", "p0"), ("relu", "f0")], [("neg", "p0")], returned=("f1",))
    formulation = formulated(once, TWO, machine(2, prices))
    kinds = {(v.value, v.phase) for v in formulation.flows.versions if v.value == "f0"}
    assert kinds == {("f0", Phase.FORWARD)}
    both = square_graph(
        [("mm", "x", "p0"), ("relu", "f0"), ("mm", "f0", "f1")], [("mul", "f0", "p0")], returned=("f2",)
    )
    formulation = formulated(both, TWO, machine(2, prices))
    shared = [v for v in formulation.flows.versions if v.value == "f0" and v.phase is Phase.FORWARD]
    assert max(len({edge.consumer for edge in version.readers}) for version in shared) == 2
    assert {v.phase for v in formulation.flows.versions if v.value == "f0"} == {Phase.FORWARD, Phase.BACKWARD}
