"""Decisions for tests of the module: the batch split, parameters at rest as told, everything between by the rules.

Greedy and without prices: of what the rules offer, each operator takes what moves least. Good enough to train.
"""

from collections.abc import Mapping

from shardwright.ir import Decisions, Graph, InputKind, Layout, Mesh, Partial, Placement, Replicate, Shard, Tier
from shardwright.passes.strategies import Strategy
from shardwright.runtime.rules import DTensorRules

__all__ = ["batch_split"]

R: Placement = Replicate()


def batch_split(
    graph: Graph, mesh: Mesh, at_rest: Mapping[str, Layout] | None = None, tiers: Mapping[str, Tier] | None = None
) -> Decisions:
    """On a mesh of one axis: every input split on dim 0, parameters read whole."""
    (size,) = mesh.sizes
    rules = DTensorRules(strided=False)
    made: dict[str, Placement] = {i.name: Shard(0) if i.kind is InputKind.INPUT else R for i in graph.inputs}
    reads: dict[str, tuple[Layout, ...]] = {}
    for node in graph.nodes:
        found = [made[name] for name in node.operands]
        chosen = min(rules.strategies(graph, node, size), key=lambda strategy: _moves(found, strategy))
        reads[node.name] = tuple((placement,) for placement in chosen.reads)
        made.update(zip(node.results, chosen.results, strict=True))
    layouts: dict[str, Layout] = {name: (placement,) for name, placement in made.items()}
    return Decisions(mesh, {**layouts, **(at_rest or {})}, reads, tiers=tiers or {})


def _moves(found: list[Placement], strategy: Strategy) -> tuple[float, int, str]:
    cost = sum(_move(a, b) for a, b in zip(found, strategy.reads, strict=True))
    return cost, sum(placement == R for placement in strategy.results), str(strategy)


def _move(source: Placement, target: Placement) -> float:
    if source == target:
        return 0.0
    if isinstance(target, Partial):
        return 1e6
    return 0.5 if source == R else 1.0
