"""Fates: which states a storage may be in, chains, host capacity, and what a tighter budget does."""

import pytest
import torch
from tests.planner.small_graphs import ONE, TENSOR_BYTES, FixedPrices, machine, square_graph
from tests.planner.solving import captured, formulated, known_rules, peak_bytes, smallest_bytes, solved
from tests.zoo.machines import compute_bound

from shardwright.ir import Fate, Mesh, Tier
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions, State
from shardwright.planner.formulation import Machine
from shardwright.planner.linear import Status, solve

TWO = Mesh(("x",), (2,))
CHAIN = square_graph(
    [("mm", "x", "p0"), ("relu", "f0"), ("relu", "f1"), ("relu", "f2")],
    [("mul", "f2", "f3"), ("mul", "b0", "f1"), ("mul", "b1", "x")],
)
"""f1, f2 and f3 are read in backward, f0 only to make f1 again."""


def test_states_are_those_that_make_sense() -> None:
    """Dropped is only what backward does not read; offloaded only what it does; returned values are simply held."""
    fates = formulated(CHAIN, ONE, machine(1, host_bytes=10**6), FateOptions(offload=True)).fates
    read = {State.KEEP, State.RECOMPUTE, State.OFFLOAD}
    assert {name: set(fate.counts) for name, fate in fates.items()} == {
        "f0": {State.KEEP, State.RECOMPUTE, State.DROP}, "f1": read, "f2": read, "f3": read,
    }  # fmt: skip
    held = square_graph([("relu", "x"), ("relu", "f0")], [("mul", "f0", "f1")], returned=("f1",))
    assert set(formulated(held, ONE, machine(1)).fates) == {"f0"}


@pytest.mark.parametrize(
    ("options", "states"),
    [
        (FateOptions(recompute=False), {State.KEEP, State.DROP}),
        (FateOptions(offload=True, smallest_offload_bytes=TENSOR_BYTES + 1), {State.KEEP, State.RECOMPUTE, State.DROP}),
        (FateOptions(smallest_bytes=TENSOR_BYTES + 1), set()),
    ],
)
def test_options_limit_the_states(options: FateOptions, states: set[State]) -> None:
    fates = formulated(CHAIN, ONE, machine(1, host_bytes=10**6), options).fates
    assert {state for fate in fates.values() for state in fate.counts} == states


def test_nothing_is_recomputed_from_what_is_dropped() -> None:
    formulation = formulated(CHAIN, ONE, machine(1), FateOptions())
    counts = {name: fate.counts for name, fate in formulation.fates.items()}
    both = {counts["f0"][State.DROP]: (1.0, 1.0), counts["f1"][State.RECOMPUTE]: (1.0, 1.0)}
    assert solved(formulation, bounds=both).status is Status.INFEASIBLE
    chain = {counts["f0"][State.RECOMPUTE]: (1.0, 1.0), counts["f1"][State.RECOMPUTE]: (1.0, 1.0)}
    assert solved(formulation, bounds=chain).status is Status.OPTIMAL


def test_the_host_holds_no_more_than_its_budget() -> None:
    """Of three storages worth moving, as many move as there is room for."""
    prices = FixedPrices(copy_byte_seconds=1e-9, element_seconds=1e-3)
    moved = []
    for room in range(4):
        machines = machine(1, prices, host_bytes=max(room * TENSOR_BYTES, 1))
        formulation = formulated(CHAIN, ONE, machines, FateOptions(offload=True))
        program = formulation.model.with_cost({formulation.peak: 1e3} | {
            fate.counts[State.OFFLOAD]: -1.0 for fate in formulation.fates.values() if State.OFFLOAD in fate.counts
        })  # fmt: skip
        solution = solve(program, time_limit_seconds=10.0, relative_gap=0.0)
        fates = decode(formulation, solution.values).fates
        moved.append(sum(fate is Fate.OFFLOAD for fate in fates.values()))
    assert moved == [0, 1, 2, 3]


def test_the_disk_holds_whole_blocks_and_takes_buffers_of_the_host() -> None:
    """As many of three storages go to disk as it has blocks for, and none where the host has no room for buffers."""
    prices = FixedPrices(copy_byte_seconds=1e-9, element_seconds=1e-3)
    moved = []
    for host, blocks in ((3 * 4096, 1), (3 * 4096, 2), (3 * 4096, 9), (3 * 4096 - 1, 9)):
        machines = machine(1, prices, host_bytes=host, disk_bytes=blocks * 4096 + 4095)
        formulation = formulated(CHAIN, ONE, machines, FateOptions(offload=True, spill_host_bytes=host))
        spilled = [fate.counts[State.SPILL] for fate in formulation.fates.values() if State.SPILL in fate.counts]
        program = formulation.model.with_cost({formulation.peak: 1e3} | dict.fromkeys(spilled, -1.0))
        decisions = decode(formulation, solve(program, time_limit_seconds=10.0, relative_gap=0.0).values)
        on_disk = [name for name, tier in decisions.tiers.items() if tier is Tier.DISK]
        assert all(decisions.fates[name] is Fate.OFFLOAD for name in on_disk)
        moved.append(len(on_disk))
    assert moved == [1, 2, 3, 0]


def test_of_equal_layers_the_first_go_to_disk_and_the_next_to_the_host() -> None:
    """The first wait longest; the disk is slowest."""
    machines = machine(1, FixedPrices(), host_bytes=10**9, disk_bytes=10**9)
    options = FateOptions(offload=True, spill_host_bytes=10**9)
    formulation = formulated(captured("llama"), ONE, machines, options, rules=known_rules())
    fate = next(f for f in formulation.fates.values() if f.multiplicity == 2 and State.SPILL in f.counts)
    wanted = {fate.counts[State.SPILL]: (1.0, 1.0), fate.counts[State.OFFLOAD]: (1.0, 1.0)}
    decisions = decode(formulation, solved(formulation, bounds=wanted).values)
    first, second = formulation.space.fold.members()[fate.storage]
    assert decisions.tiers[first] is Tier.DISK and second not in decisions.tiers
    assert decisions.fates[first] is decisions.fates[second] is Fate.OFFLOAD


@pytest.mark.parametrize("host_bytes", [0, 10**9])
def test_a_tighter_budget_never_costs_less_and_bounds_stay_below(host_bytes: int) -> None:
    """Six budgets from loose to the smallest, on two ranks; one below it is infeasible; the relaxation is a bound."""
    machines = machine(2, FixedPrices(byte_seconds=1e-8), host_bytes=host_bytes)
    formulation = formulated(
        captured("perceptron"), TWO, machines, FateOptions(offload=host_bytes > 0), rules=known_rules()
    )
    largest, smallest = peak_bytes(formulation, solved(formulation, gap=1e-3)), smallest_bytes(formulation)
    before = 0.0
    for step in range(6):
        budget = largest + (smallest * 1.002 - largest) * step / 5
        solution = solved(formulation, budget, gap=1e-3)
        assert peak_bytes(formulation, solution) <= budget * (1 + 1e-6)
        assert solution.bound <= solution.objective
        assert solution.objective >= before * (1 - 1e-3)
        before = max(before, solution.objective)
    limited = formulation.model.with_bounds({formulation.peak: (0.0, budget / formulation.unit_bytes)})
    relaxed = limited.relaxed()
    assert solve(relaxed, time_limit_seconds=10.0, relative_gap=1e-6).objective <= before * (1 + 1e-6)
    assert solved(formulation, 0.99 * smallest).status is Status.INFEASIBLE


def test_no_layer_recomputes_from_what_the_layer_before_dropped() -> None:
    """In bfloat16 backward reads a layer's output only to make the next layer's cast of it again. Of two layers, both
    casts are made again: the output of the last may be dropped, that of the first may not."""
    graph, cluster = captured("llama", torch.bfloat16), compute_bound(1)
    modelled = Machine(cluster, AnalyticalPrices(cluster), optimizer_spec("adamw"), 0)
    formulation = formulated(graph, ONE, modelled, FateOptions(), rules=known_rules())
    cast = formulation.fates["model.layers.0.input_layernorm/to_copy"].counts[State.RECOMPUTE]
    output = formulation.fates["model.layers.0/add:2"].counts[State.DROP]
    both, one = {cast: (2.0, 2.0), output: (2.0, 2.0)}, {cast: (2.0, 2.0), output: (1.0, 1.0)}
    assert solved(formulation, bounds=both).status is Status.INFEASIBLE
    assert solved(formulation, bounds=one).status is Status.OPTIMAL


def test_optimizer_state_moves_to_the_host_as_often_as_the_program_says_and_pays() -> None:
    """A loose budget moves none; under a tight one the decoded plan holds what the rows hold."""
    adam = machine(1, host_bytes=10**6, optimizer=optimizer_spec("adamw"))
    formulation = formulated(CHAIN, ONE, adam, FateOptions(recompute=False))
    assert formulation.host
    loose = solved(formulation)
    assert not decode(formulation, loose.values).tiers
    least = solved(formulation, smallest_bytes(formulation) * 1.001)
    assert set(decode(formulation, least.values).tiers) == set(formulation.host)
    assert least.objective > loose.objective
