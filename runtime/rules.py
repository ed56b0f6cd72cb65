"""The rules a plan is made with: for each operator call, every way to run it on local parts along one mesh axis.

Needs a captured graph. Gives `Strategy` tuples, all-whole first, in a fixed order. Sources, in this order: our own
declared rules where DTensor has none or a wrong one, then DTensor's; strided variants are derived from both. Only
even splits are offered, only sums (never averages) are partial operands. Pure ATen operators without any rule run
whole on every rank; other operators without one are refused.
"""

from dataclasses import dataclass, field

from shardwright.ir import Graph, Node, Partial, Placement, Ref, Replicate, RuleError, Strided
from shardwright.ir.ops import is_random
from shardwright.passes.strategies import Strategy
from shardwright.runtime.check_rules import Outcome, check
from shardwright.runtime.declared_rules import added, amended, declared
from shardwright.runtime.dtensor_rules import ask_dtensor, dtensor_knows
from shardwright.runtime.op_call import OpCall, even, op_call
from shardwright.runtime.strided_rules import FLATTENING, same_run, strided_cuts, strided_variants
from shardwright.runtime.torch_ops import TORCH_DTYPES

__all__ = ["DTensorRules", "Rejected"]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A strategy that gave wrong numbers: a wrong rule, to be reported."""

    op: str
    strategy: Strategy
    reason: str


@dataclass
class DTensorRules:
    """Implements `Rules`. Answers are cached by the call, not by its names: equal layers cost one."""

    check_below_elements: int = 0
    """Calls whose tensors are all smaller are run on data, and strategies that fail are not offered; 0: none."""
    strided: bool = True
    """Whether strided splits are offered: sequence parallelism needs them."""
    rejected: list[Rejected] = field(default_factory=list)
    """Strategies that the check on data found wrong."""
    _answers: dict[tuple[OpCall, frozenset[tuple[int, int]]], tuple[Strategy, ...]] = field(default_factory=dict)
    _cuts: tuple[Graph, frozenset[tuple[int, int]]] | None = None

    def strategies(self, graph: Graph, node: Node, num_shards: int) -> tuple[Strategy, ...]:
        """Every strategy on an axis of `num_shards` ranks, all-replicated first. Raises RuleError."""
        key = self._key(graph, node, num_shards)
        if key not in self._answers:
            found = self._find(*key, node)
            self._answers[key] = self._checked(graph, node, key[0], found)
        return self._answers[key]

    def knows(self, graph: Graph, node: Node, num_shards: int) -> bool:
        """Whether an equal call was answered before."""
        return self._key(graph, node, num_shards) in self._answers

    def _key(self, graph: Graph, node: Node, num_shards: int) -> tuple[OpCall, frozenset[tuple[int, int]]]:
        call = op_call(graph, node, num_shards)
        return call, _relevant(call, self._cuts_of(graph))

    def _cuts_of(self, graph: Graph) -> frozenset[tuple[int, int]]:
        if not self.strided:
            return frozenset()
        if self._cuts is None or self._cuts[0] is not graph:
            self._cuts = (graph, strided_cuts(graph))
        return self._cuts[1]

    def _find(self, call: OpCall, cuts: frozenset[tuple[int, int]], node: Node) -> tuple[Strategy, ...]:
        if not call.op.startswith(("aten.", "prims.")) and not dtensor_knows(call.op):
            raise RuleError(_unknown(node))
        whole = Strategy((Replicate(),) * len(call.operands), (Replicate(),) * len(call.results))
        ours = declared(call)
        known = ask_dtensor(call, cuts if call.op in FLATTENING else frozenset()) if ours is None else ours
        plain = [s for s in (*(amended(call, s) for s in known), *added(call)) if _sound(call, s)]
        every = {s for s in (*plain, *strided_variants(call, plain, cuts)) if even(call, s)} - {whole}
        return (whole, *sorted(every, key=_order))

    def _checked(
        self, graph: Graph, node: Node, call: OpCall, strategies: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        if any(t.num_elements >= self.check_below_elements for t in (*call.operands, *call.results)):
            return strategies
        kept = [strategies[0]]
        for strategy in strategies[1:]:
            verdict = check(graph, node, strategy, call.num_shards)
            if verdict.outcome in (Outcome.EQUAL, Outcome.UNTRIED):
                kept.append(strategy)
            elif verdict.outcome is Outcome.DIFFERS:
                self.rejected.append(Rejected(call.op, strategy, verdict.reason))
        return tuple(kept)


def _relevant(call: OpCall, cuts: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """The cuts that some dim of the call has the size of."""
    sizes = {size for t in (*call.operands, *call.results) for size in t.shape}
    return frozenset(cut for cut in cuts if cut[0] in sizes)


def _sound(call: OpCall, strategy: Strategy) -> bool:
    """Whether the placements are ones we plan with; what DTensor allows beyond is dropped."""
    if call.op in FLATTENING and not same_run(call, strategy):
        return False
    partial = [p for p in strategy.reads if isinstance(p, Partial)]
    if any(p != Partial("sum") for p in partial):
        return False
    if any(isinstance(p, Partial) and p.reduce == "avg" for p in strategy.results):
        return False
    if any(isinstance(p, Partial) for p in strategy.results) and is_random(call.op):
        return False
    if call.op == "aten.embedding_dense_backward.default" and call.argument("scale_grad_by_freq", False):
        # How often an index occurs is known of the whole batch only.
        return not any(isinstance(p, Partial) for p in strategy.results)
    return not (partial and _rounds(call))


def _rounds(call: OpCall) -> bool:
    """Whether floats become integers: the rounded sum is not the sum of rounded terms."""
    floats = any(TORCH_DTYPES[t.dtype].is_floating_point for t in call.operands)
    return floats and not all(TORCH_DTYPES[t.dtype].is_floating_point for t in call.results)


def _order(strategy: Strategy) -> tuple[tuple[int, int, int, str], ...]:
    return tuple(_rank(p) for p in (*strategy.reads, *strategy.results))


def _rank(placement: Placement) -> tuple[int, int, int, str]:
    """Whole, splits by dim, strided splits by dim and outer, partials."""
    if isinstance(placement, Partial):
        return (3, 0, 0, placement.reduce)
    if isinstance(placement, Replicate):
        return (0, 0, 0, "")
    return (2, placement.dim, placement.outer, "") if isinstance(placement, Strided) else (1, placement.dim, 0, "")


def _unknown(node: Node) -> str:
    place = f"{node.module or 'the top module'}, {node.source or 'source line unknown'}"
    return (
        f"expected an operator that DTensor or shardwright has a sharding rule for, found {node.op}"
        f" ({node.name}) in {place}. Write the layer with ATen operators, or say where the operator is imported how it"
        f" may be split; whole on every rank is always right:\n{_registration(node)}"
    )


def _registration(node: Node) -> str:
    """What to write for an operator without a rule."""
    tensors = ", ".join(["Replicate()"] * len(node.results))
    arguments = (*node.args, *(arg for _, arg in node.kwargs))
    reads = ", ".join("Replicate()" if isinstance(arg, Ref) else "None" for arg in arguments)
    return (
        "  from torch.distributed.tensor import Replicate\n"
        "  from torch.distributed.tensor.experimental import register_sharding\n"
        f"  @register_sharding(torch.ops.{node.op})\n"
        "  def rule(*args, **kwargs):\n"
        f"      return [([{tensors}], [{reads}])]  # results, arguments; add ([Shard(0)], [Shard(0), ...]) and so on"
    )
