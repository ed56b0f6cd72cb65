"""Recomputation under a memory budget in a fixed order, as a mixed-integer program of retention gaps.

Stage p recomputes what it needs of the nodes before p, in order, and then computes p. A value has *events*: the
stages of its consumers, and, up to a depth, the stages in which a consumer may itself be recomputed. Between two
events it is kept or not (one binary a gap); at an event it may be recomputed (one more). Memory follows from a
recurrence over stages, with two rows a stage: while p runs (exact), and while its recomputations run (they and all
that enters the stage at once, though in truth some of it goes before the last of them runs).

Pruning: a node is recomputed only where something reads it in the same stage, and only if the order as it is exceeds
the budget somewhere since its last consumer. Sizes are in multiples of the graph's size unit, the budget rounded down
to one, or in millionths of the peak if that is larger; cost in `Formulation.cost_unit`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from remat_check import Step
from remat_graph import RematGraph

from shardwright.planner.linear import LinearModel

__all__ = ["Formulation", "assignment", "formulate", "steps"]

MOST_UNITS = 10**6
"""Of durations, and of sizes in a peak: engines lose precision beyond."""
Gap = tuple[int, int]
"""Value and number of the event at which the gap ends; the gap's first event is the one before."""


@dataclass
class Formulation:
    graph: RematGraph
    events: list[list[int]]
    """Of value v: v itself, then every stage in which v may be needed, ascending."""
    kept: dict[Gap, int] = field(default_factory=dict)
    """Variable: the value exists through the gap."""
    recomputed: dict[Gap, int] = field(default_factory=dict)
    """Variable: the value is recomputed at the gap's last event. Missing where pruned."""
    through: list[int] = field(default_factory=list)
    """Variable of stage p: bytes kept through it, all events of their values being elsewhere."""
    balances: list[int] = field(default_factory=list)
    """Row of stage p that defines `through`, as others - through = 0."""
    model: LinearModel = field(default_factory=LinearModel)
    loose: LinearModel = field(default_factory=LinearModel)
    """`model` without the rows of `_purpose`: quicker to relax, slower to prove."""

    @property
    def decisions(self) -> int:
        return len(self.kept) + len(self.recomputed)

    @cached_property
    def cost_unit(self) -> float:
        exact = self.graph.duration_unit
        return exact if self.graph.duration <= MOST_UNITS * exact else self.graph.duration / MOST_UNITS


def allowed(graph: RematGraph, budget: int, depth: int) -> tuple[list[list[int]], list[set[int]]]:
    """Events of every value, and the stages in which it may be recomputed."""
    over = [0]
    for live in graph.live:
        over.append(over[-1] + (live > budget))
    found: list[dict[int, int]] = [dict.fromkeys((v, *consumers), 0) for v, consumers in enumerate(graph.consumers)]
    recomputed: list[set[int]] = [set() for _ in graph.inputs]
    fresh = [(v, p) for v, consumers in enumerate(graph.consumers) for p in consumers]
    for level in range(1, depth + 1):
        following: list[tuple[int, int]] = []
        for value, stage in fresh:
            used = max(use for use in (value, *graph.consumers[value]) if use < stage)
            if over[stage] == over[used + 1]:
                continue
            recomputed[value].add(stage)
            for read in graph.inputs[value]:
                if stage not in found[read]:
                    found[read][stage] = level
                    following.append((read, stage))
        fresh = following
    return [sorted(stages) for stages in found], recomputed


def formulate(graph: RematGraph, budget: int, depth: int) -> Formulation:
    events, recomputed = allowed(graph, budget, depth)
    formulation = Formulation(graph, events)
    model = formulation.model
    for value, stages in enumerate(events):
        for number, stage in enumerate(stages[1:], 1):
            formulation.kept[value, number] = model.variable(integer=True)
            if stage in recomputed[value]:
                cost = graph.durations[value] / formulation.cost_unit
                formulation.recomputed[value, number] = model.variable(integer=True, cost=cost)
    _continuity(formulation)
    _memory(formulation, budget)
    readers = _recomputation(formulation)
    formulation.loose = replace(model, rows=list(model.rows))
    _purpose(formulation, readers)
    return formulation


def _continuity(formulation: Formulation) -> None:
    graph, model = formulation.graph, formulation.model
    for (value, number), kept in formulation.kept.items():
        again = formulation.recomputed.get((value, number))
        there = {kept: 1.0} if again is None else {kept: 1.0, again: 1.0}
        if formulation.events[value][number] in graph.consumers[value]:
            if again is None:
                model.lower[kept] = 1.0
            else:
                model.row(there, 1.0, 1.0)
        elif again is not None:
            model.row(there, upper=1.0)
        after = formulation.kept.get((value, number + 1))
        if after is not None:
            model.row({after: 1.0} | {variable: -1.0 for variable in there}, upper=0.0)


def _recomputation(formulation: Formulation) -> dict[Gap, list[int]]:
    """Inputs of what is recomputed are there: they entered the stage, or are recomputed in it. Gives who may read."""
    numbers = [{stage: number for number, stage in enumerate(stages)} for stages in formulation.events]
    readers: dict[Gap, list[int]] = {}
    for (value, number), again in formulation.recomputed.items():
        stage = formulation.events[value][number]
        for read in formulation.graph.inputs[value]:
            gap = read, numbers[read][stage]
            readers.setdefault(gap, []).append(again)
            terms = {again: 1.0, formulation.kept[gap]: -1.0}
            if gap in formulation.recomputed:
                terms[formulation.recomputed[gap]] = -1.0
            formulation.model.row(terms, upper=0.0)
    return readers


def _purpose(formulation: Formulation, readers: Mapping[Gap, list[int]]) -> None:
    """Where only recomputations read: nothing is kept until then that is not read or kept on, nor recomputed unread."""
    for gap, kept in formulation.kept.items():
        value, number = gap
        if formulation.events[value][number] in formulation.graph.consumers[value]:
            continue
        reading = dict.fromkeys(readers.get(gap, ()), -1.0)
        after = formulation.kept.get((value, number + 1))
        formulation.model.row({kept: 1.0} | reading | ({} if after is None else {after: -1.0}), upper=0.0)
        if gap in formulation.recomputed:
            formulation.model.row({formulation.recomputed[gap]: 1.0} | reading, upper=0.0)


def _memory(formulation: Formulation, budget: int) -> None:
    graph, model, count = formulation.graph, formulation.model, len(formulation.graph.inputs)
    unit = max(graph.size_unit, graph.peak / MOST_UNITS)
    sizes = [size / unit for size in graph.sizes]
    limit = budget // graph.size_unit * graph.size_unit / unit
    ending: list[list[Gap]] = [[] for _ in range(count)]
    starting: list[list[Gap]] = [[] for _ in range(count)]
    for value, number in formulation.kept:
        ending[formulation.events[value][number]].append((value, number))
        starting[formulation.events[value][number - 1]].append((value, number))
    for stage, read in enumerate(map(set, graph.inputs)):
        change = {formulation.kept[gap]: sizes[gap[0]] for gap in (starting[stage - 1] if stage else ())}
        for gap in ending[stage]:
            if change.pop(formulation.kept[gap], None) is None:
                change[formulation.kept[gap]] = -sizes[gap[0]]
        before, through = formulation.through[-1:], model.variable(limit)
        formulation.through.append(through)
        formulation.balances.append(model.row({through: -1.0} | change | dict.fromkeys(before, 1.0), 0.0, 0.0))
        room = limit - sum(sizes[value] for value in read)
        surviving = {formulation.kept[gap]: sizes[gap[0]] for gap in starting[stage] if gap[0] not in read | {stage}}
        model.row({through: 1.0} | surviving, upper=room - sizes[stage])
        if any(gap in formulation.recomputed for gap in ending[stage]):
            others = [gap for gap in ending[stage] if gap[0] not in read]
            there = {formulation.kept[gap]: sizes[gap[0]] for gap in others}
            again = {formulation.recomputed[gap]: sizes[gap[0]] for gap in others if gap in formulation.recomputed}
            model.row({through: 1.0} | there | again, upper=room)


def steps(formulation: Formulation, values: Sequence[float]) -> list[Step]:
    """The schedule of a solution, without what nothing reads; every value is released after its last reader."""
    graph = formulation.graph
    again: list[list[int]] = [[] for _ in graph.inputs]
    for (value, number), variable in formulation.recomputed.items():
        if values[variable] > 0.5:
            again[formulation.events[value][number]].append(value)
    needed: set[int] = set()
    backward: list[Step] = []
    for stage in reversed(range(len(graph.inputs))):
        for node in (stage, *sorted(again[stage], reverse=True)):
            unread = {node} - needed
            if unread and node != stage:
                continue
            read = set(graph.inputs[node])
            backward.append(Step(node, tuple(sorted((read - needed) | unread))))
            needed = (needed - {node}) | read
    return backward[::-1]


def assignment(formulation: Formulation, schedule: Sequence[Step]) -> list[float]:
    """The inverse of `steps`: values of the variables, when the formulation is deep enough to say them."""
    values = [0.0] * len(formulation.model.cost)
    existing: set[int] = set()
    after: list[set[int]] = []
    again: set[tuple[int, int]] = set()
    for step in schedule:
        existing = (existing | {step.node}) - set(step.released)
        if step.node == len(after):
            after.append(existing)
        else:
            again.add((step.node, len(after)))
    for (value, number), variable in formulation.kept.items():
        values[variable] = float(value in after[formulation.events[value][number - 1]])
    for (value, number), variable in formulation.recomputed.items():
        values[variable] = float((value, formulation.events[value][number]) in again)
    for through, balance in zip(formulation.through, formulation.balances, strict=True):
        terms = formulation.model.rows[balance][0]
        values[through] = sum(size * values[variable] for variable, size in terms.items() if variable != through)
    return values
