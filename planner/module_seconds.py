"""Where a step's time goes, by module: operators, and what moves between ranks or tiers on a module's behalf.

Needs a rank graph and its timeline. Gives seconds of one rank, forward and backward together, recomputing included.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.ir import Graph
from shardwright.passes.timeline import COMPUTE, Timeline

__all__ = ["Spent", "module_seconds"]


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one module, or of all modules of a class."""

    compute_seconds: float = 0.0
    """Operators."""
    move_seconds: float = 0.0
    """Collectives and copies; may run beside compute, so it is not what the step loses to them."""

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.compute_seconds + other.compute_seconds, self.move_seconds + other.move_seconds)


def module_seconds(rank_graph: Graph, timeline: Timeline, accumulate: int = 1) -> Mapping[str, Spent]:
    """Module path to what it spends in a step of so many micro-batches; its own operators, not its children's."""
    spent: dict[str, Spent] = {}
    for event in timeline.events:
        module = rank_graph.producers[event.name].module
        seconds = accumulate * (event.end_seconds - event.start_seconds)
        more = Spent(seconds, 0.0) if event.stream == COMPUTE else Spent(0.0, seconds)
        spent[module] = spent.get(module, Spent()) + more
    return spent
