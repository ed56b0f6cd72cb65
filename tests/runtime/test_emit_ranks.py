"""Emitted programs on two gloo ranks equal lockstep: right ones, broken ones, and in memory."""

import pytest
import torch
from tests.rank_graphs import KINDS, GraphWriter, expected_peak_bytes, local_inputs, mlp, mlp_values
from tests.rank_steps import Case, Values, gather_many, run_cases

from shardwright.ir import Graph, InputKind, Mesh, Phase, Ref
from shardwright.runtime.faults import Fault, FaultKind, collectives
from shardwright.runtime.lockstep import Lockstep
from shardwright.runtime.ranks import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MESH = Mesh(("x",), (2,))


def case_of(kind: str, fault: Fault | None = None, num_steps: int = 1) -> Case:
    steps = [local_inputs(kind, MESH, mlp_values(seed=seed)) for seed in range(num_steps)]
    return Case(mlp(kind, 2), MESH, steps, fault)


def lockstep_of(case: Case) -> list[list[Values]]:
    """For each rank, for each step: what lockstep hands back."""
    oracle = Lockstep(case.graph, case.mesh, case.fault)
    steps = [oracle.run([{k: v.clone() for k, v in given.items()} for given in step]) for step in case.steps]
    return [[step[rank] for step in steps] for rank in range(case.mesh.num_ranks)]


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_way_of_parallel_training_equals_lockstep_bit_for_bit(two_ranks: RankPool) -> None:
    """Two terms have one sum, whatever the order."""
    cases = [case_of(kind, num_steps=2) for kind in KINDS]
    ranks = two_ranks.run(run_cases, cases)
    for at, case in enumerate(cases):
        for found, expected in zip((rank[at][0] for rank in ranks), lockstep_of(case), strict=True):
            assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_every_broken_collective_is_broken_in_the_same_way_as_in_lockstep(two_ranks: RankPool) -> None:
    cases = [
        case_of(kind, Fault(fault, number), num_steps=2)
        for kind in KINDS
        for number in range(len(collectives(mlp(kind, 2))))
        for fault in FaultKind
    ]
    ranks = two_ranks.run(run_cases, cases)
    right = {kind: lockstep_of(case_of(kind, num_steps=2)) for kind in KINDS}
    for at, case in enumerate(cases):
        expected = lockstep_of(case)
        for rank in range(2):
            found = ranks[rank][at][0]
            assert all(same(a, b) for a, b in zip(found, expected[rank], strict=True))
        wrong = [ranks[rank][at][0] for rank in range(2)]
        assert not all(same(a, b) for r in range(2) for a, b in zip(wrong[r], right[case.graph.name][r], strict=True))


def test_the_peak_on_a_rank_is_that_of_the_lifetimes_but_for_what_gloo_still_holds(two_ranks: RankPool) -> None:
    """gloo's thread may keep what was sent a moment longer than the wait: at most the largest collective's."""
    cases = [case_of(kind, num_steps=3) for kind in KINDS]
    for rank in two_ranks.run(run_cases, cases):
        for case, (_, peak_bytes) in zip(cases, rank, strict=True):
            sent = [case.graph.types[name].num_bytes for name in collectives(case.graph)]
            assert 0 <= peak_bytes - expected_peak_bytes(case.graph) <= max(sent)


def odd_graph() -> Graph:
    """Every kind of collective on tensors that are turned, scalar, whole numbers or half precision; starts and waits
    apart and interleaved, one start in forward with its wait in backward."""
    w = GraphWriter("odd")
    w.given("x", InputKind.INPUT, 4, 6)
    w.given("count", InputKind.INPUT, 4, dtype="i64")
    w.given("scalar", InputKind.INPUT)
    w.given("weight", InputKind.PARAM, 2, 2)
    w.call("aten.t.default", Ref("x"), to="turned", shape=(6, 4))
    w.call("aten._to_copy.default", Ref("x"), to="again", shape=(4, 6))
    w.call("mesh.all_gather", Ref("turned"), "x", to="gather/start", shape=(12, 4))
    w.call("mesh.reduce_scatter", Ref("turned"), "x", "avg", to="scatter/start", shape=(3, 4))
    w.call("aten.mul.Tensor", Ref("again"), 2.0, to="double", shape=(4, 6))
    w.call("aten.t.default", Ref("double"), to="double/t", shape=(6, 4))
    w.call("mesh.all_reduce_", Ref("double/t"), "x", "max", to="in_place/start", shape=(6, 4))
    w.call("mesh.wait", Ref("scatter/start"), Ref("turned"), to="scatter", shape=(3, 4))
    w.call("mesh.wait", Ref("in_place/start"), Ref("double/t"), to="in_place", shape=(6, 4))
    w.call("mesh.wait", Ref("gather/start"), Ref("turned"), to="gather", shape=(12, 4))
    for reduce in ("sum", "min"):
        w.waited("all_reduce", "count", reduce, to=reduce, shape=(4,))
    w.waited("all_to_all", "turned", to="exchange", shape=(6, 4))
    w.waited("all_gather", "scalar", to="scalars", shape=(2,))
    w.call("mesh.coordinate", "x", to="at", shape=(), dtype="i64")
    w.call("mesh.own", Ref("x"), "x", 1, 3, to="own", shape=(4, 3))
    w.call("mesh.all_reduce", Ref("weight"), "x", "sum", to="late/start", shape=(2, 2))
    w.phase = Phase.BACKWARD
    w.call("mesh.wait", Ref("late/start"), Ref("weight"), to="late", shape=(2, 2))
    names = ("scatter", "in_place", "gather", "sum", "min", "exchange", "scalars", "at", "own")
    return w.graph(outputs={name: name for name in names}, gradients={"weight": "late"})


def test_odd_tensors_and_interleaved_starts_equal_lockstep(two_ranks: RankPool) -> None:
    inputs = [
        {
            "x": torch.arange(24.0).view(4, 6) * (1 - 3 * rank),
            "count": torch.arange(4) + 10 * rank,
            "scalar": torch.tensor(float(rank)),
            "weight": torch.full((2, 2), 1.0 + rank),
        }
        for rank in range(2)
    ]
    case = Case(odd_graph(), MESH, [inputs])
    expected = lockstep_of(case)
    for rank, results in enumerate(two_ranks.run(run_cases, [case])):
        assert same(results[0][0][0], expected[rank][0])


def test_many_gathers_in_flight_leave_the_ranks_alive_and_right(two_ranks: RankPool) -> None:
    """torch's coalesced gather, which its functional one calls, corrupts gloo's heap here in about every other run."""
    assert two_ranks.run(gather_many, MESH, 1000, 8) == [0, 0]
