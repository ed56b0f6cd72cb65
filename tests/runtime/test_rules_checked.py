"""Every strategy offered for whole models is run on data: the operator on the parts equals the parts of the whole."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.rule_calls import CallArg, f32, i64, one_call, texts
from torch import Tensor, nn

from shardwright.ir import Graph, Node, Partial, Placement, Replicate, Shard, Strided, TensorType
from shardwright.passes.strategies import Strategy
from shardwright.runtime import rules as rules_module
from shardwright.runtime.capture import capture
from shardwright.runtime.check_rules import Outcome, check, check_strategy
from shardwright.runtime.rules import DTensorRules


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(48, 32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 48, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, 8).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        x = x + self.down(F.silu(self.up(x)))
        return F.cross_entropy(self.head(x).view(-1, 48), labels.view(-1))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.groups = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GroupNorm(4, 8)
        self.plain, self.head = nn.Conv2d(8, 4, 3, bias=False), nn.Linear(4 * 4, 12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.groups(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2))
        h = F.adaptive_avg_pool2d(F.interpolate(self.plain(h), scale_factor=2.0), 2)
        return F.cross_entropy(self.head(h.flatten(1)), y)


MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "mlp": (MLP(), (torch.zeros(8, 16), torch.zeros(8, 8))),
    "transformer": (Transformer(), (torch.zeros(8, 12, dtype=torch.int64), torch.zeros(8, 12, dtype=torch.int64))),
    "conv": (ConvNet(), (torch.zeros(8, 4, 8, 8), torch.zeros(8, dtype=torch.int64))),
}


def graph_of(model: str) -> Graph:
    module, args = MODELS[model]
    return capture(module, args, {}).graph


@pytest.mark.parametrize("num_shards", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_strategy_of_a_model_gives_the_numbers_of_the_whole(model: str, num_shards: int) -> None:
    graph, rules = graph_of(model), DTensorRules()
    seen: set[int] = set()
    outcomes: Counter[Outcome] = Counter()
    for node in graph.nodes:
        strategies = rules.strategies(graph, node, num_shards)
        if id(strategies) in seen:
            continue
        seen.add(id(strategies))
        for strategy in strategies:
            verdict = check(graph, node, strategy, num_shards)
            assert verdict.outcome is Outcome.EQUAL, verdict.reason
            outcomes[verdict.outcome] += 1
    assert outcomes[Outcome.EQUAL] > 2 * len(seen), "most operators have more than the whole strategy"


def test_sequence_splits_pass_from_the_embedding_to_the_loss() -> None:
    """With batch 1 there is nothing to split but the sequence, and every operator outside attention can."""
    module = MODELS["transformer"][0]
    graph = capture(module, (torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64)), {}).graph
    for node in graph.nodes:
        tokens = [name for name in node.results if graph.types[name].num_elements >= 2 * 12 * 32]
        if not tokens or "dot_product" in node.op or len(graph.types[tokens[0]].shape) > 3:
            continue
        if graph.types[tokens[0]].shape[:1] not in ((2,), (24,)):
            continue
        wanted = Shard(1) if graph.types[tokens[0]].shape[0] == 2 else Strided(0, 2)
        offered = [s.results[0] for s in DTensorRules().strategies(graph, node, 4)]
        assert wanted in offered, f"{node.op} of {node.name} offers {offered}"


OPERATORS: list[tuple[str, tuple[CallArg, ...]]] = [
    ("aten.bmm.default", (f32(8, 6, 4), f32(8, 4, 2))),
    ("aten.cat.default", ((f32(8, 4), f32(8, 2)), 1)),
    ("aten.stack.default", ((f32(8, 4), f32(8, 4)),)),
    ("aten.unbind.int", (f32(8, 4), 1)),
    ("aten.split_with_sizes.default", (f32(8, 4), (1, 3), 1)),
    ("aten.slice_backward.default", (f32(8, 2), (8, 4), 1, 0, 2, 1)),
    ("aten.select_backward.default", (f32(8), (8, 4), 1, 0)),
    ("aten.squeeze.default", (f32(2, 1, 4),)),
    ("aten.squeeze.dim", (f32(2, 1, 4), 0)),
    ("aten.native_group_norm.default", (f32(8, 4, 6), f32(4), f32(4), 8, 4, 6, 2, 1e-5)),
    (
        "aten.native_group_norm_backward.default",
        (f32(8, 4, 6), f32(8, 4, 6), f32(8, 2), f32(8, 2), f32(4), 8, 4, 6, 2, (True, True, True)),
    ),
    ("aten.avg_pool2d_backward.default", (f32(8, 4, 3, 3), f32(8, 4, 6, 6), (2, 2), (2, 2), (0, 0), False, True, None)),
    ("aten.upsample_bilinear2d_backward.default", (f32(8, 4, 12, 12), (12, 12), (8, 4, 6, 6), False)),
    ("aten.index.Tensor", (f32(8, 4, 6), (None, i64(8)))),
    ("aten.index.Tensor", (f32(8, 4, 6), (i64(8), i64(8)))),
    ("aten.index_put.default", (f32(8, 4, 6), (i64(8),), f32(8, 4, 6), True)),
    ("aten.gather.default", (f32(8, 4, 6), 1, i64(8, 2, 6))),
    ("aten.scatter.src", (f32(8, 4, 6), 1, i64(8, 4, 6), f32(8, 4, 6))),
    ("aten.scatter_add.default", (f32(8, 4, 6), 1, i64(8, 4, 6), f32(8, 4, 6))),
    ("aten.topk.default", (f32(8, 4, 6), 2)),
    ("aten.sort.default", (f32(8, 4, 6),)),
    ("aten.cumsum.default", (f32(8, 4, 6), 1)),
    ("aten.constant_pad_nd.default", (f32(8, 4), (1, 1))),
    ("aten.new_zeros.default", (f32(8, 4), (8, 6))),
    ("aten.full_like.default", (f32(8, 4), 3.0)),
    ("aten.repeat.default", (f32(8, 4), (2, 1, 1))),
    ("aten.baddbmm.default", (f32(8, 6, 4), f32(8, 6, 4), f32(8, 4, 4))),
    ("aten.nll_loss2d_forward.default", (f32(8, 5, 2, 2), i64(8, 2, 2), None, 2, -100)),
    ("aten.smooth_l1_loss.default", (f32(8, 4), f32(8, 4), 2, 1.0)),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        (f32(4, 4, 6, 8), f32(4, 4, 6, 8), *[f32(4, 2, 6, 8)] * 2, f32(4, 4, 6, 8), f32(4, 4, 6), 0.0, False),
    ),
]


@pytest.mark.parametrize(("op", "args"), OPERATORS, ids=[f"{i}-{op}" for i, (op, _) in enumerate(OPERATORS)])
def test_every_strategy_of_an_operator_gives_the_numbers_of_the_whole(op: str, args: tuple[CallArg, ...]) -> None:
    graph, node = one_call(op, *args)
    strategies = DTensorRules().strategies(graph, node, 2)
    assert len(strategies) > 1
    for strategy in strategies:
        verdict = check(graph, node, strategy, 2)
        assert verdict.outcome is Outcome.EQUAL, verdict.reason


R, S0, SUM = Replicate(), Shard(0), Partial("sum")
WRONG: list[tuple[str, tuple[CallArg, ...], tuple[Placement, ...], tuple[Placement, ...]]] = [
    ("aten.relu.default", (f32(8, 4),), (SUM,), (SUM,)),
    ("aten.mm.default", (f32(8, 4), f32(4, 8)), (Shard(1), S0), (S0,)),
    ("aten.mean.dim", (f32(8, 4), (0,)), (S0,), (SUM,)),
    ("aten.nll_loss_forward.default", (f32(8, 5), i64(8), None, 1, -100), (S0, S0), (SUM, SUM)),
    ("aten.cumsum.default", (f32(8), 0), (S0,), (S0,)),
    ("aten.add.Tensor", (f32(8), f32(8)), (SUM, R), (SUM,)),
    ("aten.amax.default", (f32(8, 4), (0,)), (S0,), (Partial("min"),)),
    ("aten.softmax.int", (f32(8, 4), 0), (S0,), (S0,)),
]


@pytest.mark.parametrize(("op", "args", "reads", "results"), WRONG, ids=[op for op, *_ in WRONG])
def test_a_wrong_strategy_is_found_and_named(
    op: str, args: tuple[CallArg, ...], reads: tuple[Placement, ...], results: tuple[Placement, ...]
) -> None:
    graph, node = one_call(op, *args)
    reason = check_strategy(graph, node, Strategy(reads, results), 2)
    assert reason is not None and op in reason


def test_a_local_call_that_is_not_possible_is_an_outcome_of_its_own() -> None:
    graph, node = one_call("aten.mm.default", f32(8, 4), f32(4, 8))
    verdict = check(graph, node, Strategy((Shard(1), R), (SUM,)), 2)
    assert verdict.outcome is Outcome.RAISES


def test_random_operators_are_not_compared() -> None:
    graph, node = one_call("aten.bernoulli.p", f32(8), 0.5)
    assert check(graph, node, Strategy((S0,), (S0,)), 2).outcome is Outcome.UNTRIED


def test_wrong_numbers_are_not_offered_and_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that lies is replaced by what is true of the operator, and the lie is visible."""
    lie = Strategy((SUM,), (SUM,))
    truth = Strategy((S0,), (S0,))
    monkeypatch.setattr(rules_module, "ask_dtensor", lambda call, cuts: [lie, truth])
    graph, node = one_call("aten.relu.default", f32(8, 3))
    assert texts(DTensorRules().strategies(graph, node, 2)) == ["R -> R", "S(0) -> S(0)", "P(sum) -> P(sum)"]
    checking = DTensorRules(check_below_elements=100)
    assert texts(checking.strategies(graph, node, 2)) == ["R -> R", "S(0) -> S(0)"]
    assert [(r.op, r.strategy) for r in checking.rejected] == [("aten.relu.default", lie)]
    assert "off by" in checking.rejected[0].reason


def test_what_raises_is_not_offered_and_is_no_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = Strategy((Shard(1), R), (SUM,))
    monkeypatch.setattr(rules_module, "ask_dtensor", lambda call, cuts: [impossible])
    checking = DTensorRules(check_below_elements=100)
    assert texts(checking.strategies(*one_call("aten.mm.default", f32(8, 4), f32(4, 8)), 2)) == ["R, R -> R"]
    assert checking.rejected == []


def test_large_calls_are_not_run() -> None:
    """At 10^12 elements a check would not come back."""
    huge = TensorType("f32", (1_000_000, 1_000_000))
    node = Node("aten.relu.default", one_call("aten.relu.default", f32(8))[1].args, (), ("y",))
    graph = Graph("g", (), (node,), {"x0": huge, "y": huge})
    assert len(DTensorRules(check_below_elements=1000).strategies(graph, node, 2)) == 3
