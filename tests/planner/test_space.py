"""The space of plans: equal layers are decided once, nothing uneven is offered, followers follow."""

from functools import cache

import pytest
import torch
import transformers
from tests.planner.small_graphs import FixedPrices, TableRules, machine, square_graph
from tests.planner.solving import UNFOLDED, formulated, known_rules, peak_bytes, solved
from tests.zoo.small import Perceptron

from shardwright.ir import Graph, Mesh, Node, Partial, Replicate, Shard, divides
from shardwright.passes.strategies import Strategy
from shardwright.planner.fates import FateOptions
from shardwright.planner.fold import fold_of
from shardwright.planner.space import build_space
from shardwright.runtime.capture import capture

TWO = Mesh(("x",), (2,))


@cache
def llama(num_layers: int) -> Graph:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=num_layers, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(4, 8, dtype=torch.int64)
    return capture(transformers.LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}).keeping(()).graph


@cache
def perceptron(num_blocks: int) -> Graph:
    return capture(Perceptron(8, 16, num_blocks), (torch.zeros(4, 8), torch.zeros(4, 8)), {}).keeping(()).graph


def test_folding_equal_layers_does_not_change_the_optimum() -> None:
    """Three layers of Llama, decided once for all or one by one."""
    graph, machines = llama(3), machine(2, FixedPrices(byte_seconds=1e-8), overlap=0.3)
    folded = formulated(graph, TWO, machines, FateOptions(recompute=False), rules=known_rules())
    flat = formulated(graph, TWO, machines, FateOptions(recompute=False), rules=known_rules(), fold=UNFOLDED)
    assert len(folded.model.cost) < 0.7 * len(flat.model.cost)
    one, all_of_them = solved(folded, gap=1e-3), solved(flat, gap=1e-3)
    assert one.objective == pytest.approx(all_of_them.objective, rel=2e-3)
    assert peak_bytes(folded, one) == pytest.approx(peak_bytes(flat, all_of_them), rel=0.25)


def test_more_equal_layers_are_not_a_larger_program() -> None:
    few, many = (formulated(perceptron(n), TWO, machine(2), rules=known_rules()) for n in (6, 18))
    assert len(few.model.cost) == len(many.model.cost)
    assert sum(few.model.integer) == sum(many.model.integer)
    assert len(many.model.rows) <= 1.1 * len(few.model.rows)
    assert solved(many, gap=1e-2).objective > 2 * solved(few, gap=1e-2).objective


@pytest.mark.parametrize("mesh", [TWO, Mesh(("a", "b"), (2, 2))], ids=str)
def test_every_layout_offered_divides(mesh: Mesh) -> None:
    graph, machines = llama(3), machine(mesh.num_ranks)
    space = build_space(graph, mesh, fold_of(graph), known_rules(), machines.prices)
    for unit in space.units:
        for value in unit.values:
            assert all(divides(graph.types[value].shape, layout, mesh) for layout in set(unit.layouts_of(value)))


def test_units_partition_the_values() -> None:
    """Every value of a representative layer is in exactly one unit, with as many instances as layers."""
    graph = llama(3)
    fold = fold_of(graph)
    space = build_space(graph, TWO, fold, known_rules(), machine(2).prices)
    listed = [value for unit in space.units for value in unit.values]
    assert sorted(listed) == sorted({fold.key(name) for name in graph.types})
    members = fold.members()
    assert all(unit.multiplicity == len(members.get(unit.values[0], (0,))) for unit in space.units)


def test_an_operator_follows_only_what_it_accepts_in_every_layout() -> None:
    """`relu` cannot follow `mm`, which may make a partial sum; `neg` can follow `relu`; a product of two cannot."""
    graph = square_graph([("mm", "x", "p0"), ("relu", "f0"), ("neg", "f1"), ("mul", "f1", "f2")], [("neg", "f3")])
    space = formulated(graph, TWO, machine(2)).space
    assert [unit.values for unit in space.units if unit.nodes] == [("f0",), ("f1", "f2"), ("f3",), ("b0",)]
    made = {layout for layout in space.units[space.unit_of["f0"]].layouts_of("f0")}
    assert made == {(Replicate(),), (Shard(0),), (Shard(1),), (Partial("sum"),)}


class Growing(TableRules):
    """`neg` may also make a part from the whole, as expanding does."""

    def strategies(self, graph: Graph, node: Node, num_shards: int) -> tuple[Strategy, ...]:
        known = super().strategies(graph, node, num_shards)
        return (*known, Strategy((Replicate(),), (Shard(0),))) if node.op == "aten.neg.default" else known


def test_an_operator_with_a_choice_of_its_own_does_not_follow() -> None:
    graph = square_graph([("relu", "x"), ("neg", "f0")], [("neg", "f1")])
    followed = formulated(graph, TWO, machine(2)).space
    free = formulated(graph, TWO, machine(2), rules=Growing()).space
    assert followed.unit_of["f0"] == followed.unit_of["f1"]
    assert free.unit_of["f0"] != free.unit_of["f1"]
    made = {(c.reads[0], c.layouts[0]) for c in free.units[free.unit_of["f1"]].choices}
    assert ((Replicate(),), (Shard(0),)) in made
