"""Strided splits: which (size, outer) occur in a graph, and what operators do with them.

A view that flattens [B, S, H] to [B*S, H] turns `S(1)` into `T(0, B)`. Without strided splits the operators of a
linear layer would accept nothing but splits of the batch, and sequence parallelism would vanish without a word.

Operators that treat all positions of a dim alike (or sum over them) do not care which positions a rank holds, as long
as all tensors are cut alike: every `S` strategy whose split dims have one size gives a `T` strategy.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final

from shardwright.ir import Graph, Placement, Shard, Strided, TensorType
from shardwright.passes.strategies import Strategy
from shardwright.runtime.op_call import OpCall

__all__ = ["FLATTENING", "same_run", "strided_cuts", "strided_variants"]

FLATTENING: Final = frozenset(f"aten.{name}.default" for name in ("view", "_unsafe_view", "reshape"))
"""Views that merge and divide dims: DTensor is asked about their strided splits."""

_ORDERED: Final = frozenset(
    f"aten.{name}.default"
    for name in ("native_group_norm", "native_group_norm_backward", "convolution", "convolution_backward", "arange")
)
"""Operators for which it matters which positions of a split dim are neighbours: groups of channels."""


def strided_cuts(graph: Graph) -> frozenset[tuple[int, int]]:
    """(size, outer) of dims that some view merges from, or divides into, the leading dims of a tensor.

    Only merges that start at dim 0 count: those of batch and sequence, or batch and heads.
    """
    found: set[tuple[int, int]] = set()
    for node in graph.nodes:
        if node.op in FLATTENING:
            source, result = graph.types[node.operands[0]].shape, graph.types[node.name].shape
            found.update(_merged(source, result))
            found.update(_merged(result, source))
    return frozenset(found)


def _merged(many: tuple[int, ...], one: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Where the first dim of `one` is the product of several leading dims of `many`: each inner dim's cut."""
    if not one:
        return
    for count in range(2, len(many) + 1):
        if math.prod(many[:count]) == one[0] and many[count - 1] > 1:
            for position in range(1, count):
                outer = math.prod(many[:position])
                if outer > 1 and many[position] > 1:
                    yield one[0], outer
            return


def same_run(call: OpCall, strategy: Strategy) -> bool:
    """Whether a flattening view's operand and result are cut at the same elements.

    Either split sees all elements in order as [outer, run] and cuts the run; a view keeps the order of elements, so
    the splits are the same exactly where the outers are. DTensor follows strided splits into wrong dims at times.
    """
    source, result = strategy.reads[0], strategy.results[0]
    if not isinstance(source, Shard | Strided) or not isinstance(result, Shard | Strided):
        return source == result
    return _outer(call.operands[0].shape, source) == _outer(call.results[0].shape, result)


def _outer(shape: tuple[int, ...], placement: Shard | Strided) -> int:
    return math.prod(shape[: placement.dim]) * (placement.outer if isinstance(placement, Strided) else 1)


def strided_variants(
    call: OpCall, strategies: Iterable[Strategy], cuts: frozenset[tuple[int, int]]
) -> Iterator[Strategy]:
    """`T` strategies that follow from `S` strategies."""
    if call.op in _ORDERED or call.op in FLATTENING:
        return
    for strategy in strategies:
        sizes = _split_sizes(call.operands, strategy.reads) | _split_sizes(call.results, strategy.results)
        if len(sizes) != 1:
            continue
        size = sizes.pop()
        for outer in sorted(outer for whole, outer in cuts if whole == size):
            reads = tuple(_strided(p, outer) for p in strategy.reads)
            yield Strategy(reads, tuple(_strided(p, outer) for p in strategy.results))


def _split_sizes(types: tuple[TensorType, ...], placements: tuple[Placement, ...]) -> set[int]:
    return {t.shape[p.dim] for t, p in zip(types, placements, strict=True) if isinstance(p, Shard)}


def _strided(placement: Placement, outer: int) -> Placement:
    return Strided(placement.dim, outer) if isinstance(placement, Shard) else placement
