"""What an operator allows on one mesh axis, and who knows it."""

from dataclasses import dataclass
from typing import Protocol

from shardwright.ir import Graph, Node, Placement

__all__ = ["Rules", "Strategy"]


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """One legal combination: with operands placed so, results come out so. Running the operator on the local
    parts, with shape arguments localised, gives the results; nothing is communicated."""

    reads: tuple[Placement, ...]
    """One per operand, in the order of `Node.operands` (repeated operands repeat)."""
    results: tuple[Placement, ...]
    """One per result."""


class Rules(Protocol):
    """Strategies of operators; `runtime.rules` learns them from DTensor."""

    def strategies(self, graph: Graph, node: Node, num_shards: int) -> tuple[Strategy, ...]:
        """Every strategy on an axis of `num_shards` ranks, all-replicated first. Splits divide evenly.

        Raises RuleError for an operator nobody knows.
        """
        ...
