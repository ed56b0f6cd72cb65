"""Whatever the program allows is a program that computes what the model computes, and reads nothing that is gone."""

import random
from functools import cache

import pytest
import torch
from tests.planner.small_graphs import machine
from tests.planner.solving import captured, formulated, known_rules

from shardwright.ir import Fate, InputKind, Mesh, Phase
from shardwright.ir.ops import aliased_operand
from shardwright.passes.lower import lower
from shardwright.passes.schedule_check import check_schedule
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions, State
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Solution, solve
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.shards import shard, unshard

MESHES = (Mesh(("x",), (2,)), Mesh(("a", "b"), (2, 2)))


@cache
def formulation(mesh: Mesh) -> Formulation:
    machines = machine(mesh.num_ranks, host_bytes=10**9)
    return formulated(captured("perceptron"), mesh, machines, FateOptions(offload=True), rules=known_rules())


@cache
def random_solution(mesh: Mesh, seed: int) -> Solution:
    """The best of a random objective: a random corner of what is allowed."""
    dice = random.Random(seed)
    found = formulation(mesh)
    choices = [variable for variables in found.flows.choices for variable in variables]
    fates = [count for fate in found.fates.values() for count in fate.counts.values()]
    cost = {variable: dice.random() for variable in (*choices, *fates, *found.kept_copies.values())}
    return solve(found.model.with_cost(cost), time_limit_seconds=20.0, relative_gap=0.05)


SOLUTIONS = pytest.mark.parametrize(("mesh", "seed"), [(mesh, seed) for mesh in MESHES for seed in range(4)], ids=str)


@SOLUTIONS
def test_a_random_plan_computes_what_the_model_computes(mesh: Mesh, seed: int) -> None:
    decisions = decode(formulation(mesh), random_solution(mesh, seed).values)
    graph = captured("perceptron")
    lowered = lower(graph, decisions)
    check_schedule(lowered)
    generator = torch.Generator().manual_seed(seed)
    whole = {
        given.name: torch.ones(graph.types[given.name].shape, dtype=torch.float64)
        if given.kind is InputKind.TANGENT
        else torch.randn(graph.types[given.name].shape, generator=generator, dtype=torch.float64)
        for given in graph.inputs
    }
    ranks = [
        {name: shard(value, decisions.layouts[name], mesh, rank) for name, value in whole.items()}
        for rank in range(mesh.num_ranks)
    ]
    (expected,), found = run_lockstep(graph, Mesh((), ()), [whole]), run_lockstep(lowered, mesh, ranks)
    torch.testing.assert_close(found[0][lowered.loss], expected[graph.loss])
    for param, gradient in graph.gradients.items():
        parts = [values[lowered.gradients[param]] for values in found]
        whole_gradient = unshard(parts, decisions.layouts[param], mesh)
        torch.testing.assert_close(whole_gradient, expected[gradient], rtol=1e-10, atol=1e-10)


@SOLUTIONS
def test_no_recomputed_or_offloaded_storage_is_read_across(mesh: Mesh, seed: int) -> None:
    decisions = decode(formulation(mesh), random_solution(mesh, seed).values)
    lowered = lower(captured("perceptron"), decisions)
    gone = {name for name, fate in decisions.fates.items() if fate in (Fate.RECOMPUTE, Fate.OFFLOAD)}
    roots: dict[str, str] = {}
    for node in lowered.nodes:
        base = aliased_operand(node)
        roots.update({name: name if base is None else roots.get(base, base) for name in node.results})
        if node.phase is Phase.BACKWARD:
            assert gone.isdisjoint(roots.get(name, name) for name in node.operands), node.name


@SOLUTIONS
def test_a_chain_of_recomputation_never_starts_at_a_dropped_storage(mesh: Mesh, seed: int) -> None:
    """Judged by the program itself: no node of backward reads a storage whose fate is drop."""
    found, values = formulation(mesh), random_solution(mesh, seed).values
    dropped = {
        name
        for name, fate in found.fates.items()
        if State.DROP in fate.counts and round(values[fate.counts[State.DROP]]) == fate.multiplicity
    }
    lowered = lower(captured("perceptron"), decode(found, values))
    members = found.space.fold.members()
    dropped = {name for key in dropped for name in members.get(key, (key,))}
    read = {name for node in lowered.nodes if node.phase is Phase.BACKWARD for name in node.operands}
    assert dropped.isdisjoint(read)


def test_random_plans_differ() -> None:
    """Else the tests above would try one plan again and again."""
    plans = [decode(formulation(MESHES[0]), random_solution(MESHES[0], seed).values) for seed in range(4)]
    assert len({str(sorted(map(str, plan.layouts.items()))) for plan in plans}) == 4
    assert {fate for plan in plans for fate in plan.fates.values()} >= {Fate.RECOMPUTE, Fate.OFFLOAD}
