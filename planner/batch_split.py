"""What splitting the batch means for every operator: one strategy each, found by following the inputs' first dim.

Needs a captured graph, rules and an axis size. The outer axes of a mesh offer this and nothing else: any other split
there would put the traffic of every layer on the slow link, and doing all work on every rank of an axis is what the
mesh without that axis does. Parameters may still rest whole or cut on an outer axis.
"""

from collections.abc import Mapping

from shardwright.ir import Graph, InputKind, Node, Partial, Placement, Replicate, Shard
from shardwright.passes.strategies import Rules, Strategy

__all__ = ["batch_strategies"]

MOVES = 10.0
"""Bringing an operand to another layout by a collective."""
CUTS = 0.1
"""Taking a part of what a rank has anyway."""


def batch_strategies(graph: Graph, rules: Rules, num_shards: int) -> dict[str, Strategy]:
    """`Node.name` to its strategy when the batch is split over `num_shards` ranks."""
    placements: dict[str, Placement] = {given.name: Replicate() for given in graph.inputs}
    for name in graph.inputs_of(InputKind.INPUT):
        shape = graph.types[name].shape
        if shape and shape[0] % num_shards == 0 and shape[0] > 0:
            placements[name] = Shard(0)
    found: dict[str, Strategy] = {}
    for node in graph.nodes:
        found[node.name] = _closest(node, rules.strategies(graph, node, num_shards), placements)
        placements.update(zip(node.results, found[node.name].results, strict=True))
    return found


def _closest(node: Node, strategies: tuple[Strategy, ...], placements: Mapping[str, Placement]) -> Strategy:
    """The strategy that moves least; of equals one that splits."""
    given = [placements[name] for name in node.operands]

    def effort(strategy: Strategy) -> tuple[float, int]:
        moved = sum(_effort(have, want) for have, want in zip(given, strategy.reads, strict=True))
        return moved, sum(placement == Replicate() for placement in (*strategy.reads, *strategy.results))

    return min(strategies, key=effort)


def _effort(have: Placement, want: Placement) -> float:
    if have == want:
        return 0.0
    if isinstance(want, Partial):
        return 1e6  # cannot be
    return CUTS if have == Replicate() else MOVES
