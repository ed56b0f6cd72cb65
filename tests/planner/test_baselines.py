"""Baselines are plans of the same space: what each does, seen in the program that a rank would run."""

from collections import Counter
from functools import cache

import pytest
from tests.planner.small_graphs import FixedPrices, machine
from tests.planner.solving import captured, formulated, known_rules, solved

from shardwright.ir import Fate, Graph, InputKind, Mesh, Phase, Replicate, Shard
from shardwright.ir.ops import is_collective
from shardwright.passes.lower import lower
from shardwright.planner.baselines import BASELINES, UNAVAILABLE, restrict
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.formulation import Formulation

TWO = Mesh(("x",), (2,))
RECIPES = {recipe.name: recipe for recipe in BASELINES}


@cache
def formulation() -> Formulation:
    machines = machine(2, FixedPrices(latency_seconds=1e-6, byte_seconds=1e-9), host_bytes=10**9)
    return formulated(captured("decoder"), TWO, machines, FateOptions(offload=True), rules=known_rules())


@cache
def program(name: str) -> Graph:
    solution = solved(formulation(), bounds=restrict(formulation(), RECIPES[name]), gap=0.01)
    assert solution.values
    return lower(captured("decoder"), decode(formulation(), solution.values))


def collectives(graph: Graph, phase: Phase | None = None) -> Counter[str]:
    return Counter(n.op for n in graph.nodes if is_collective(n.op) and phase in (None, n.phase))


def weights(graph: Graph) -> list[str]:
    """Parameters that a matmul reads."""
    return [name for name in graph.inputs_of(InputKind.PARAM) if len(graph.types[name].shape) == 2]


def test_all_have_names_and_those_that_cannot_be_a_reason() -> None:
    assert set(RECIPES) == {"ddp", "fsdp", "fsdp+selective", "fsdp+recompute", "tp+sp", "offload-all"}
    assert dict(UNAVAILABLE).keys() == {"zero-1"}
    assert all(reason for _, reason in UNAVAILABLE)


@pytest.mark.parametrize("name", RECIPES)
def test_every_baseline_is_feasible(name: str) -> None:
    assert program(name).gradients.keys() == captured("decoder").gradients.keys()


def test_ddp_keeps_every_parameter_whole_and_moves_gradients_and_little_else() -> None:
    """Beside one reduction a gradient: what the loss needs at the end of forward."""
    graph = program("ddp")
    assert all(graph.types[name] == captured("decoder").types[name] for name in graph.inputs_of(InputKind.PARAM))
    assert collectives(graph, Phase.FORWARD).total() <= 2
    assert not any(_gathered(graph, phase) for phase in Phase)
    reduced = [n for n in graph.nodes if n.op == "mesh.all_reduce" and n.operands[0].startswith("grad(")]
    assert len(reduced) >= len(graph.gradients) - 1
    assert collectives(graph, Phase.BACKWARD).total() <= len(graph.gradients) + 1


def test_fsdp_cuts_every_parameter_and_gathers_it_in_forward_and_again_in_backward() -> None:
    graph = program("fsdp")
    whole = captured("decoder")
    for name in graph.inputs_of(InputKind.PARAM):
        assert 2 * graph.types[name].num_elements == whole.types[name].num_elements
    gathered = {phase: _gathered(graph, phase) for phase in Phase}
    assert gathered[Phase.FORWARD] == set(graph.inputs_of(InputKind.PARAM))
    read_in_backward = {n for node in whole.nodes if node.phase is Phase.BACKWARD for n in node.operands}
    assert gathered[Phase.BACKWARD] >= set(weights(graph)) & read_in_backward
    assert collectives(graph, Phase.BACKWARD)["mesh.reduce_scatter"] >= len(weights(graph)) - 1


def _gathered(graph: Graph, phase: Phase) -> set[str]:
    params = set(graph.inputs_of(InputKind.PARAM))
    return {n.operands[0] for n in graph.nodes if n.op == "mesh.all_gather" and n.phase is phase} & params


def test_tensor_parallel_matmuls_read_cut_weights() -> None:
    solution = solved(formulation(), bounds=restrict(formulation(), RECIPES["tp+sp"]), gap=0.01)
    decisions = decode(formulation(), solution.values)
    graph = captured("decoder")
    cut = []
    for node in graph.nodes:
        if node.op in ("aten.mm.default", "aten.addmm.default") and node.phase is Phase.FORWARD:
            reads = decisions.reads[node.name]
            assert any(layout != (Replicate(),) for layout in reads), node.name
            cut.append(isinstance(reads[-1][0], Shard))
    assert sum(cut) >= len(cut) - 1


def test_recompute_baselines_differ_by_whether_matmuls_run_again() -> None:
    def again(name: str) -> Counter[str]:
        return Counter(n.op for n in program(name).nodes if n.name.endswith("~again"))

    assert again("fsdp")["aten.mm.default"] == again("fsdp+selective")["aten.mm.default"] == 0
    assert again("fsdp+recompute")["aten.mm.default"] > 0
    assert again("fsdp+selective").total() > again("fsdp").total()


def test_offload_all_moves_what_is_saved() -> None:
    solution = solved(formulation(), bounds=restrict(formulation(), RECIPES["offload-all"]), gap=0.01)
    fates = decode(formulation(), solution.values).fates
    assert fates and set(fates.values()) == {Fate.OFFLOAD}
