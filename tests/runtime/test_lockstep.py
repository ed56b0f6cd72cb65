"""All ranks in one process compute what plain torch computes, and show what a wrong program does wrong."""

from dataclasses import replace

import pytest
import torch
from tests.rank_graphs import KINDS, GraphWriter, local_inputs, mlp, mlp_layouts, mlp_values, plain_mlp
from torch import Tensor

from shardwright.ir import Graph, GraphError, InputError, InputKind, Mesh, Phase, Ref, Replicate
from shardwright.runtime.faults import Fault, FaultKind, collectives
from shardwright.runtime.lockstep import Lockstep, run_lockstep
from shardwright.runtime.shards import unshard

FAULTS = [(kind, k) for kind in KINDS for k in range(len(collectives(mlp(kind, 2))))]


def handed_back(kind: str, graph: Graph, mesh: Mesh, found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Global loss, output and gradients from the ranks' values."""
    names = {"loss": graph.loss, **graph.outputs, **graph.gradients}
    layouts, whole = mlp_layouts(kind), (Replicate(),)
    return {
        key: unshard([values[name] for values in found], layouts.get(key, whole), mesh) for key, name in names.items()
    }


def worst_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a tensor relative to its largest entry; NaN counts as infinite."""
    ratios = [(found[name] - value).abs().max() / value.abs().max() for name, value in expected.items()]
    return float(torch.stack(ratios).nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize(("kind", "num_ranks"), [("dp", 2), ("dp", 4), ("fsdp", 2), ("fsdp", 3), ("tp", 2), ("tp", 4)])
def test_every_way_of_parallel_training_equals_plain_torch(kind: str, num_ranks: int) -> None:
    mesh, values = Mesh(("x",), (num_ranks,)), mlp_values(torch.float64)
    graph = mlp(kind, num_ranks)
    ranks = run_lockstep(graph, mesh, local_inputs(kind, mesh, values))
    assert worst_difference(handed_back(kind, graph, mesh, ranks), plain_mlp(values)) < 1e-12
    assert all(torch.equal(rank[graph.loss], ranks[0][graph.loss]) for rank in ranks)


@pytest.mark.parametrize("kind", ["plain", "offload"])
def test_one_rank_equals_plain_torch(kind: str) -> None:
    mesh, values = Mesh(("x",), (1,)), mlp_values(torch.float64)
    found = handed_back(kind, mlp(kind), mesh, run_lockstep(mlp(kind), mesh, [values]))
    assert worst_difference(found, plain_mlp(values)) < 1e-12


@pytest.mark.parametrize("fault", list(FaultKind))
@pytest.mark.parametrize(("kind", "collective"), FAULTS)
def test_every_broken_collective_changes_a_result_in_the_first_step(
    kind: str, collective: int, fault: FaultKind
) -> None:
    mesh, values = Mesh(("x",), (2,)), mlp_values(torch.float64)
    graph = mlp(kind, 2)
    wrong = run_lockstep(graph, mesh, local_inputs(kind, mesh, values), fault=Fault(fault, collective))
    assert worst_difference(handed_back(kind, graph, mesh, wrong), plain_mlp(values)) > 1e-3


def test_a_stale_collective_gives_the_result_of_the_step_before() -> None:
    mesh, graph = Mesh(("x",), (2,)), mlp("dp", 2)
    steps = Lockstep(graph, mesh, Fault(FaultKind.STALE, 0))
    losses = []
    for seed in range(3):
        found = steps.run(local_inputs("dp", mesh, mlp_values(seed=seed)))
        losses.append(float(found[0][graph.loss]))
    right = [float(plain_mlp(mlp_values(seed=seed))["loss"]) for seed in range(2)]
    assert losses == pytest.approx([0.0, *right], rel=1e-5)


def test_axes_of_a_two_dimensional_mesh_are_told_apart() -> None:
    mesh = Mesh(("dp", "tp"), (2, 3))
    w = GraphWriter("axes")
    w.given("x", InputKind.INPUT, 1)
    for axis in mesh.axes:
        w.call("mesh.all_gather", Ref("x"), axis, to=f"{axis}/start", shape=(mesh.size(axis),))
        w.call("mesh.wait", Ref(f"{axis}/start"), Ref("x"), to=axis, shape=(mesh.size(axis),))
        w.call("mesh.coordinate", axis, to=f"at {axis}", shape=(), dtype="i64")
        w.call("mesh.own", Ref(axis), axis, 0, 1, to=f"own {axis}", shape=(1,))
    graph = w.graph(outputs={name: name for name in w.types if "start" not in name})
    found = run_lockstep(graph, mesh, [{"x": torch.tensor([float(rank)])} for rank in range(6)])
    assert [values["tp"].tolist() for values in found] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3
    assert [values["dp"].tolist() for values in found] == [[0, 3], [1, 4], [2, 5]] * 2
    assert [int(values["at tp"]) for values in found] == [0, 1, 2, 0, 1, 2]
    for rank, values in enumerate(found):
        assert values["own dp"].item() == values["own tp"].item() == rank


def test_all_to_all_transposes_what_the_ranks_hold() -> None:
    w = GraphWriter("exchange")
    w.given("x", InputKind.INPUT, 3)
    w.waited("all_to_all", "x", to="y", shape=(3,))
    found = run_lockstep(
        w.graph(outputs={"y": "y"}), Mesh(("x",), (3,)), [{"x": torch.arange(3) + 10 * rank} for rank in range(3)]
    )
    assert [values["y"].tolist() for values in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_reduce_"])
def test_every_reduction_of_terms(kind: str, reduce: str, expected: float) -> None:
    w = GraphWriter("reduce")
    w.given("x", InputKind.INPUT)
    w.waited(kind, "x", reduce, to="y", shape=())
    inputs = [{"x": torch.tensor(value)} for value in (1.0, 3.0, 2.0)]
    found = run_lockstep(w.graph(outputs={"y": "y"}), Mesh(("x",), (3,)), inputs)
    assert [float(values["y"]) for values in found] == [expected] * 3


@pytest.mark.parametrize("kind", ["all_reduce", "all_reduce_", "all_gather"])
def test_reading_a_collective_before_its_wait_gives_nan(kind: str) -> None:
    w = GraphWriter("early")
    w.given("x", InputKind.INPUT, 1)
    w.call(f"mesh.{kind}", Ref("x"), "x", to="start", shape=(1,))
    w.call("aten.neg.default", Ref("start"), to="early", shape=(1,))
    w.call("mesh.wait", Ref("start"), Ref("x"), to="done", shape=(1,))
    found = run_lockstep(
        w.graph(outputs={"early": "early", "done": "done"}), Mesh(("x",), (1,)), [{"x": torch.ones(1)}]
    )
    assert found[0]["early"].isnan().all() and found[0]["done"].tolist() == [1.0]


def test_watched_values_are_handed_back_too() -> None:
    mesh, values = Mesh(("x",), (1,)), mlp_values()
    found = run_lockstep(mlp("plain"), mesh, [values], watch=["act/relu"])
    assert torch.equal(found[0]["act/relu"], torch.relu(values["data"] @ values["up.weight"].T))


def test_an_operator_that_fails_is_named_with_its_module_and_source() -> None:
    graph = mlp("plain")
    nodes = tuple(
        replace(n, args=(Ref("data"), Ref("up.weight")), module="up", source="net.py:7") if n.name == "up/mm" else n
        for n in graph.nodes
    )
    with pytest.raises(GraphError, match=r"expected aten.mm.default of up/mm \(up\) net.py:7 to run"):
        run_lockstep(replace(graph, nodes=nodes), Mesh(("x",), (1,)), [mlp_values()])


def test_missing_inputs_ranks_and_collectives_are_refused() -> None:
    mesh, graph = Mesh(("x",), (1,)), mlp("plain")
    with pytest.raises(InputError, match="inputs for 1 ranks, found 2"):
        run_lockstep(graph, mesh, [mlp_values(), mlp_values()])
    with pytest.raises(InputError, match=r"found none for \['up.weight', 'target', 'tangent'\]"):
        run_lockstep(graph, mesh, [{name: mlp_values()[name] for name in ("down.weight", "data")}])
    with pytest.raises(GraphError, match="one of the 0 collectives"):
        run_lockstep(graph, mesh, [mlp_values()], fault=Fault(FaultKind.DROP, 0))


@pytest.mark.parametrize("text", ["drop", "drop:", "drop:-1", "lose:3", "drop:x"])
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    assert Fault.parse("scale:12") == Fault(FaultKind.SCALE, 12)
    with pytest.raises(InputError, match="expected drop:K"):
        Fault.parse(text)


def test_graph_phases_of_the_examples_are_in_order() -> None:
    """The examples themselves are legal: all forward before all backward."""
    for kind in KINDS:
        phases = [node.phase for node in mlp(kind, 2).nodes]
        assert phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)
