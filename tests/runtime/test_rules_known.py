"""What operators offer, against what is known of them from the mathematics: written out by hand here."""

import pytest
import torch
from tests.runtime.rule_calls import CallArg, f32, i64, one_call, texts

from shardwright.ir import Graph, Node, Ref, Replicate, RuleError, Shard, TensorType, Token
from shardwright.runtime.compat import FakeTensorMode
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.rules import DTensorRules

KNOWN: dict[str, tuple[str, tuple[CallArg, ...], list[str]]] = {
    "a product is split by rows, by columns, along the contraction, or has one partial factor": (
        "aten.mm.default",
        (f32(8, 12), f32(12, 4)),
        ["R, R -> R", "R, S(1) -> S(1)", "R, P(sum) -> P(sum)", "S(0), R -> S(0)", "S(1), S(0) -> P(sum)",
         "P(sum), R -> P(sum)"],
    ),
    "a bias is read whole where the product is partial": (
        "aten.addmm.default",
        (f32(4), f32(8, 12), f32(12, 4)),
        ["R, R, R -> R", "R, R, P(sum) -> P(sum)", "R, S(0), R -> S(0)", "R, S(1), S(0) -> P(sum)",
         "R, P(sum), R -> P(sum)", "S(0), R, S(1) -> S(1)"],
    ),
    "a sum takes partial terms only together": (
        "aten.add.Tensor",
        (f32(8, 4), f32(8, 4)),
        ["R, R -> R", "S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)"],
    ),
    "a constant is not added to every term": (
        "aten.add.Tensor",
        (f32(8), 2.0),
        ["R -> R", "S(0) -> S(0)"],
    ),
    "nothing that bends keeps a partial operand": (
        "aten.gelu.default",
        (f32(8, 4),),
        ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"],
    ),
    "a maximum over a split dim is a partial maximum": (
        "aten.amax.default",
        (f32(8, 4), (1,)),
        ["R -> R", "S(0) -> S(0)", "S(1) -> P(max)"],
    ),
    "a mean is not taken over a split dim, for the average is not a sum": (
        "aten.mean.dim",
        (f32(8, 4), (1,)),
        ["R -> R", "S(0) -> S(0)"],
    ),
    "a summed loss over split labels is partial, and so is the weight": (
        "aten.nll_loss_forward.default",
        (f32(8, 5), i64(8), None, 2, -100),
        ["R, R -> R, R", "S(0), S(0) -> P(sum), P(sum)"],
    ),
    "a mean loss is never split: labels are ignored unevenly": (
        "aten.nll_loss_forward.default",
        (f32(8, 5), i64(8), None, 1, -100),
        ["R, R -> R, R"],
    ),
    "a mean square error is never split: DTensor's gradients are too large": (
        "aten.mse_loss.default",
        (f32(8, 4), f32(8, 4), 1),
        ["R, R -> R"],
    ),
    "embedding gradients that are scaled by frequency need all indices": (
        "aten.embedding_dense_backward.default",
        (f32(8, 4), i64(8), 6, -1, True),
        ["R, R -> R", "S(1), R -> S(1)"],
    ),
    "grouped heads are split with whole groups": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (f32(3, 8, 6, 4), f32(3, 2, 6, 4), f32(3, 2, 6, 4), 0.0, True),
        ["R, R, R -> R, R", "S(1), S(1), S(1) -> S(1), S(1)"],
    ),
    "causal attention is not split along the sequence, other attention is, by queries": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (f32(3, 1, 6, 4), f32(3, 1, 5, 4), f32(3, 1, 5, 4), 0.0, False),
        ["R, R, R -> R, R", "S(2), R, R -> S(2), S(2)"],
    ),
    "a constant is made in parts": ("aten.full.default", ((8, 3), 1.0), [" -> R", " -> S(0)"]),
    "a range is made whole": ("aten.arange.default", (8,), [" -> R"]),
    "a repeated dim is cut for nothing": (
        "aten.expand.default",
        (f32(1, 4), (8, 4)),
        ["R -> R", "R -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"],
    ),
    "a view is asked for every split": (
        "aten.view.default",
        (f32(8, 4, 6), (32, 6)),
        ["R -> R", "S(0) -> S(0)", "S(1) -> T(0, 8)", "S(2) -> S(1)", "P(sum) -> P(sum)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", KNOWN)
def test_an_operator_offers_exactly_what_is_known_of_it(what: str) -> None:
    op, args, expected = KNOWN[what]
    assert texts(DTensorRules().strategies(*one_call(op, *args), 2)) == expected


def test_a_split_that_does_not_divide_is_not_offered() -> None:
    graph, node = one_call("aten.mm.default", f32(8, 6), f32(6, 3))
    assert "S(1), S(0) -> P(sum)" in texts(DTensorRules().strategies(graph, node, 3))
    assert texts(DTensorRules().strategies(graph, node, 4)) == [
        "R, R -> R",
        "R, P(sum) -> P(sum)",
        "S(0), R -> S(0)",
        "P(sum), R -> P(sum)",
    ]


def test_heads_are_not_split_finer_than_the_key_heads() -> None:
    graph, node = one_call(
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        f32(1, 8, 6, 4), f32(1, 2, 6, 4), f32(1, 2, 6, 4), 0.0, True,
    )  # fmt: skip
    assert texts(DTensorRules().strategies(graph, node, 4)) == ["R, R, R -> R, R"]


def test_a_mask_follows_only_where_it_is_not_broadcast() -> None:
    head = f32(4, 2, 6, 8)
    graph, node = one_call(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", head, head, head, attn_mask=f32(4, 1, 6, 6)
    )
    assert texts(DTensorRules().strategies(graph, node, 2)) == [
        "R, R, R, R -> R, R",
        "S(0), S(0), S(0), S(0) -> S(0), S(0)",
        "S(1), S(1), S(1), R -> S(1), S(1)",
        "S(2), R, R, S(2) -> S(2), S(2)",
    ]


def test_equal_calls_of_other_layers_are_answered_once() -> None:
    first, node = one_call("aten.mm.default", f32(8, 6), f32(6, 4))
    rules = DTensorRules()
    types = {f"other.{name}": t for name, t in first.types.items()}
    again = Node(node.op, node.args, node.kwargs, ("other.y0",)).with_operands(("other.x0", "other.x1"))
    graph = Graph("other", (), (again,), types)
    assert rules.strategies(first, node, 2) is rules.strategies(graph, again, 2)


def test_the_process_group_of_the_process_is_left_alone() -> None:
    assert not torch.distributed.is_initialized()
    DTensorRules().strategies(*one_call("aten.view.default", f32(8, 4, 6), (32, 6)), 8)
    assert not torch.distributed.is_initialized()


def test_an_operator_of_aten_without_a_rule_runs_whole() -> None:
    graph, node = one_call("aten.trace.default", f32(4, 4))
    assert texts(DTensorRules().strategies(graph, node, 2)) == ["R -> R"]


def test_a_foreign_operator_without_a_rule_is_refused_with_its_place_and_the_way_out() -> None:
    types = {"x": f32(4), "act/y": f32(4)}
    with torch.library._scoped_library("rules_test", "DEF") as library:
        library.define("strange(Tensor x) -> Tensor")
        node = Node("rules_test.strange.default", one_call("aten.relu.default", f32(4))[1].args, (), ("act/y",))
        node = Node(node.op, node.args, (), ("act/y",), module="act", source="model.py:3").with_operands(("x",))
        with pytest.raises(RuleError, match="register_sharding") as caught:
            DTensorRules().strategies(Graph("g", (), (node,), types), node, 2)
    for part in ("rules_test.strange.default", "act/y", "model.py:3"):
        assert part in str(caught.value)


def test_results_that_were_not_asked_for_are_whole() -> None:
    graph, node = one_call(
        "aten.convolution_backward.default",
        f32(4, 4, 5, 5), f32(4, 2, 5, 5), f32(4, 2, 3, 3), (4,), (1, 1), (1, 1), (1, 1), False, (0, 0), 1,
        (False, True, True),
    )  # fmt: skip
    assert graph.types["y0"] == TensorType("u8", (0,))
    for strategy in DTensorRules().strategies(graph, node, 2):
        assert strategy.results[0] == Replicate()


def test_the_whole_strategy_is_first_and_none_is_offered_twice() -> None:
    for op, args, _ in KNOWN.values():
        strategies = DTensorRules().strategies(*one_call(op, *args), 2)
        assert not any(isinstance(p, Shard) for p in (*strategies[0].reads, *strategies[0].results))
        assert len(set(strategies)) == len(strategies)


def test_a_conversion_to_a_narrower_float_keeps_a_sum_and_one_to_integers_does_not() -> None:
    for dtype, kept in (("bf16", True), ("i64", False)):
        call = one_call("aten._to_copy.default", f32(8), dtype=Token(f"dtype.{dtype}"))
        assert ("P(sum) -> P(sum)" in texts(DTensorRules().strategies(*call, 2))) is kept


def test_a_dim_counted_from_the_back_is_the_same_dim() -> None:
    """DTensor's rule for cumsum takes -1 for a dim that no split touches."""
    for dim in (1, -1):
        assert texts(DTensorRules().strategies(*one_call("aten.cumsum.default", f32(8, 4), dim), 2)) == [
            "R -> R",
            "S(0) -> S(0)",
        ]


def test_a_view_moves_a_strided_split_only_to_the_same_elements() -> None:
    """[16, 4] flattened and seen as [4, 16]: cutting the 4 is no plain cut of the 16, as DTensor has it."""
    flat = Node("aten.view.default", (Ref("x"), (64, 3)), (), ("flat",))
    seen = Node("aten.view.default", (Ref("flat"), (4, 16, 3)), (), ("seen",))
    types = {"x": f32(16, 4, 3), "flat": f32(64, 3), "seen": f32(4, 16, 3)}
    graph = Graph("g", (), (flat, seen), types)
    assert "S(1) -> T(0, 16)" in texts(DTensorRules().strategies(graph, flat, 2))
    assert texts(DTensorRules().strategies(graph, seen, 2)) == [
        "R -> R",
        "S(0) -> S(0)",
        "T(0, 4) -> S(1)",
        "P(sum) -> P(sum)",
    ]


def offered(num_shards: int) -> list[str]:
    with FakeTensorMode():
        return texts(DTensorRules().strategies(*one_call("aten.view.default", f32(8, 8, 6), (64, 6)), num_shards))


def test_rules_are_the_same_under_a_fake_mode() -> None:
    plain = DTensorRules().strategies(*one_call("aten.view.default", f32(8, 8, 6), (64, 6)), 2)
    assert offered(2) == texts(plain)


def offered_in_a_rank() -> tuple[list[str], float]:
    found = offered(8)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return found, float(total)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_ranks_ask_for_meshes_of_any_size_and_their_group_still_works(two_ranks: RankPool) -> None:
    expected = ["R -> R", "S(0) -> S(0)", "S(1) -> T(0, 8)", "P(sum) -> P(sum)"]
    assert two_ranks.run(offered_in_a_rank) == [(expected, 2.0)] * 2
