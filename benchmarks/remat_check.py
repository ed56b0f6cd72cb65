"""What a schedule with recomputation takes, by simulating it: the judge of everything `remat_model` finds.

Shares no code with the formulation: it knows the graph, a budget and a list of steps, each of which computes one node
and then releases some values. Memory is the sum of the sizes of the values that exist; while a node runs, its inputs,
everything else not yet released and its own result exist together. Sizes and durations in the units of the graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from remat_graph import RematGraph

__all__ = ["Checked", "Step", "WrongScheduleError", "check"]


@dataclass(frozen=True)
class Step:
    node: int
    released: tuple[int, ...]
    """Values that cease to exist once the node has run."""


@dataclass(frozen=True)
class Checked:
    peak: int
    duration: int


class WrongScheduleError(Exception):
    """The steps cannot be run, do not compute everything in order, or take more than the budget."""


def check(graph: RematGraph, steps: Sequence[Step], budget: int) -> Checked:
    """Raises WrongScheduleError; returns the exact peak and duration."""
    existing: set[int] = set()
    held = peak = duration = following = 0
    for number, step in enumerate(steps):
        where = f"step {number} (node {step.node})"
        missing = set(graph.inputs[step.node]) - existing
        if missing:
            raise WrongScheduleError(f"{where}: expected its inputs to exist, found {sorted(missing)} missing")
        if step.node in existing:
            raise WrongScheduleError(f"{where}: expected a value that does not exist yet, found it held already")
        if step.node > following:
            raise WrongScheduleError(f"{where}: expected node {following} to be computed first, by the fixed order")
        following += step.node == following
        existing.add(step.node)
        held += graph.sizes[step.node]
        peak = max(peak, held)
        duration += graph.durations[step.node]
        if not existing.issuperset(step.released) or len(set(step.released)) != len(step.released):
            raise WrongScheduleError(f"{where}: expected to release what exists, found {step.released}")
        existing.difference_update(step.released)
        held -= sum(graph.sizes[value] for value in step.released)
    if following != len(graph.inputs):
        raise WrongScheduleError(f"expected {len(graph.inputs)} nodes to be computed, found {following}")
    if existing:
        raise WrongScheduleError(f"expected everything to be released at the end, found {sorted(existing)} held")
    if peak > budget:
        raise WrongScheduleError(f"expected a peak of at most {budget}, found {peak}")
    return Checked(peak, duration)
