"""What a person would pick, as restrictions of the same space: bounds on variables, solved like any plan.

FSDP, tensor parallel and the like are not modes of the planner; here they are names for certain placements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardwright.ir import InputKind, Layout, Node, Replicate
from shardwright.ir.ops import aliased_operand
from shardwright.passes.work import work_of
from shardwright.planner.fates import FateChoice, State
from shardwright.planner.flows import is_parameter
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Bounds
from shardwright.planner.space import AT_REST, Choice, Unit

__all__ = ["BASELINES", "UNAVAILABLE", "Recipe", "restrict"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A baseline: how parameters rest, how they are read, what becomes of saved storages."""

    name: str
    split_at_rest: bool
    """Every parameter is cut as finely as it divides; else every rank holds it whole."""
    split_when_read: bool
    """Matmuls read their weights cut on the innermost axis where they can; else weights are read whole."""
    fates: Callable[[Formulation, str], tuple[State, ...]]
    """What a storage should become: the first of these that it can."""
    needs_host: bool = False


def _keep(formulation: Formulation, storage: str) -> tuple[State, ...]:
    return State.DROP, State.KEEP


def _recompute(formulation: Formulation, storage: str) -> tuple[State, ...]:
    return State.RECOMPUTE, State.KEEP


def _selective(formulation: Formulation, storage: str) -> tuple[State, ...]:
    """Matmuls, convolutions and attention are kept, everything cheap is recomputed."""
    if _has_flops(formulation, formulation.space.graph.producers[storage]):
        return (State.KEEP,)
    return State.RECOMPUTE, State.KEEP


def _has_flops(formulation: Formulation, node: Node) -> bool:
    """Matmuls, convolutions and attention: what is worth keeping, and whose weights are worth cutting."""
    types = formulation.space.graph.types
    operands, results = (tuple(types[name] for name in names) for names in (node.operands, node.results))
    return work_of(node, operands, results).flops > 0


def _offload(formulation: Formulation, storage: str) -> tuple[State, ...]:
    return State.OFFLOAD, State.DROP, State.KEEP


BASELINES: Final = (
    Recipe("ddp", False, False, _keep),
    Recipe("fsdp", True, False, _keep),
    Recipe("fsdp+selective", True, False, _selective),
    Recipe("fsdp+recompute", True, False, _recompute),
    Recipe("tp+sp", True, True, _keep),
    Recipe("offload-all", True, False, _offload, needs_host=True),
)
UNAVAILABLE: Final = (("zero-1", "optimizer state always lies where its parameter lies"),)
"""Baselines that cannot be expressed, with the reason."""


def restrict(formulation: Formulation, recipe: Recipe) -> Bounds:
    """Bounds that leave the recipe's plans only."""
    bounds: Bounds = {}
    _restrict_params(formulation, recipe, bounds)
    if recipe.split_when_read:
        _restrict_reads(formulation, bounds)
        _restrict_work(formulation, bounds)
    else:
        _split_batch(formulation, bounds)
    for storage, choice in formulation.fates.items():
        _restrict_fate(choice, recipe.fates(formulation, storage), bounds)
    gathered = [v for value, v in formulation.kept_copies.items() if is_parameter(formulation.flows, value)]
    bounds.update(dict.fromkeys((*formulation.hosted, *gathered), (0.0, 0.0)))
    return bounds


def _restrict_params(formulation: Formulation, recipe: Recipe, bounds: Bounds) -> None:
    for unit in formulation.space.units:
        if unit.kind not in (InputKind.PARAM, InputKind.FROZEN):
            continue
        splits = [_num_splits(choice.layouts[0]) for choice in unit.choices]
        wanted = max(splits) if recipe.split_at_rest else 0
        _forbid(formulation, unit, lambda c, wanted=wanted: _num_splits(c.layouts[0]) != wanted, bounds)  # type: ignore[misc]


def _num_splits(layout: Layout) -> int:
    return sum(placement != Replicate() for placement in layout)


def _split_batch(formulation: Formulation, bounds: Bounds) -> None:
    """Data parallelism: every operator is split as the batch is, on every axis, and reads weights whole."""
    for unit in formulation.space.units:
        if not unit.nodes:
            continue
        node = unit.nodes[0]
        strategies = [axis[node.name] for axis in formulation.space.batch]
        reads = tuple(tuple(s.reads[i] for s in strategies) for i in range(len(node.operands)))
        results = tuple(tuple(s.results[i] for s in strategies) for i in range(len(node.results)))
        wanted = (reads, results)
        _forbid(formulation, unit, lambda c, w=wanted: (c.reads, c.layouts[: len(w[1])]) != w, bounds)  # type: ignore[misc]


def _restrict_reads(formulation: Formulation, bounds: Bounds) -> None:
    weights = _weights(formulation)
    for edge in formulation.space.edges:
        if edge.slot != AT_REST and edge.value in weights:
            _read_split(formulation, formulation.space.units[edge.consumer], edge.slot, bounds)


def _read_split(formulation: Formulation, unit: Unit, slot: int, bounds: Bounds) -> None:
    """A matmul's weight is cut on the innermost axis; other axes and other operators read it whole."""
    if unit.nodes and _has_flops(formulation, unit.nodes[0]):
        if any(c.reads[slot][-1:] != (Replicate(),) for c in unit.choices):
            _forbid(formulation, unit, lambda c: c.reads[slot][-1:] == (Replicate(),), bounds)
    _forbid(formulation, unit, lambda c: _num_splits(c.reads[slot][:-1]) > 0, bounds)


def _forbid(formulation: Formulation, unit: Unit, unwanted: Callable[[Choice], bool], bounds: Bounds) -> None:
    """Fix unwanted choices to zero, unless nothing would remain."""
    variables = formulation.flows.choices[unit.index]
    open_choices = [
        (variable, choice)
        for variable, choice in zip(variables, unit.choices, strict=True)
        if bounds.get(variable, (0.0, 1.0))[1] > 0
    ]
    rest = [variable for variable, choice in open_choices if not unwanted(choice)]
    if rest:
        bounds.update({variable: (0.0, 0.0) for variable, _ in open_choices if variable not in rest})


def _weights(formulation: Formulation) -> set[str]:
    """Parameters and views of them, by representative."""
    graph, fold = formulation.space.graph, formulation.space.fold
    weights = {fold.key(n) for n in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN)}
    for node in graph.nodes:
        base = aliased_operand(node)
        if base is not None and fold.key(base) in weights:
            weights.update(fold.key(result) for result in node.results)
    return weights


def _restrict_fate(choice: FateChoice, wanted: tuple[State, ...], bounds: Bounds) -> None:
    """All layers in the first wanted state that the storage has."""
    state = next(state for state in wanted if state in choice.counts)
    bounds[choice.counts[state]] = (float(choice.multiplicity), float(choice.multiplicity))


def _restrict_work(formulation: Formulation, bounds: Bounds) -> None:
    """Nobody has all ranks do the same matmul where it can be split."""
    for unit in formulation.space.units:
        if unit.nodes and _has_flops(formulation, unit.nodes[0]):
            _forbid(formulation, unit, _repeats_work, bounds)


def _repeats_work(choice: Choice) -> bool:
    whole = Replicate()
    return any(all(read[axis] == whole for read in choice.reads) for axis in range(len(choice.layouts[0])))
