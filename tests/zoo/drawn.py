"""Plans nobody would choose: legal layouts, fates and gathers drawn at random.

A solver only shows the plans that pay. What the rewriter must get right is every plan that the language can say, so
each operator draws one of its rules per axis, parameters rest anywhere, storages have any fate.
"""

import random
from collections.abc import Sequence

from shardwright.ir import (
    Decisions,
    Fate,
    Gather,
    Graph,
    InputKind,
    Layout,
    Mesh,
    Node,
    Partial,
    Placement,
    Replicate,
    Shard,
    divides,
    replicated,
)
from shardwright.passes.strategies import Rules, Strategy
from shardwright.planner.storages import find_storages

__all__ = ["drawn_decisions"]

STAY = 0.6
"""Chance that an operator takes its operands as they come, where it can: else everything would be redistributed."""
TRIES = 30


def drawn_decisions(graph: Graph, mesh: Mesh, rules: Rules, seed: int, *, offload: bool = False) -> Decisions:
    """The same for the same seed."""
    chance = random.Random(seed)
    layouts: dict[str, Layout] = {}
    for given in graph.inputs:
        held = given.kind in (InputKind.PARAM, InputKind.FROZEN)
        layouts[given.name] = _at_rest(graph.types[given.name].shape, mesh, chance) if held else replicated(mesh)
    reads: dict[str, tuple[Layout, ...]] = {}
    for node in graph.nodes:
        reads[node.name], results = _choice(graph, node, mesh, rules, layouts, chance)
        layouts.update(zip(node.results, results, strict=True))
    fates = (Fate.KEEP, Fate.RECOMPUTE, Fate.OFFLOAD) if offload else (Fate.KEEP, Fate.RECOMPUTE)
    lives = find_storages(graph, {}).forward
    again = {name: chance.choice(fates) for name, life in lives.items() if not life.random}
    gathers = {name: Gather.KEEP for name in graph.inputs_of(InputKind.PARAM) if chance.random() < 0.3}
    return Decisions(mesh, layouts, reads, {n: f for n, f in again.items() if f is not Fate.KEEP}, gathers)


def _at_rest(shape: tuple[int, ...], mesh: Mesh, chance: random.Random) -> Layout:
    open_to: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
    for _ in range(TRIES):
        layout = tuple(chance.choice(open_to) for _ in mesh.sizes)
        if divides(shape, layout, mesh):
            return layout
    return replicated(mesh)


Chosen = tuple[tuple[Layout, ...], tuple[Layout, ...]]


def _choice(
    graph: Graph, node: Node, mesh: Mesh, rules: Rules, layouts: dict[str, Layout], chance: random.Random
) -> Chosen:
    """Reads and results; whole where nothing else comes up."""
    given = [layouts[name] for name in node.operands]
    offered = [rules.strategies(graph, node, size) for size in mesh.sizes]
    reachable = [
        [s for s in found if _reachable([layout[axis] for layout in given], s)] for axis, found in enumerate(offered)
    ]
    for _ in range(TRIES):
        drawn = [_one([layout[axis] for layout in given], found, chance) for axis, found in enumerate(reachable)]
        reads, results = _transposed(drawn, len(node.operands), len(node.results))
        if _even(graph, node.operands, reads, mesh) and _even(graph, node.results, results, mesh):
            return reads, results
    return _transposed([found[0] for found in offered], len(node.operands), len(node.results))


def _reachable(given: Sequence[object], strategy: Strategy) -> bool:
    pairs = zip(given, strategy.reads, strict=True)
    return all(have == want or not isinstance(want, Partial) for have, want in pairs)


def _one(given: Sequence[object], found: list[Strategy], chance: random.Random) -> Strategy:
    fitting = [s for s in found if list(s.reads) == list(given)]
    return chance.choice(fitting if fitting and chance.random() < STAY else found)


def _transposed(strategies: list[Strategy], num_operands: int, num_results: int) -> Chosen:
    reads = tuple(tuple(s.reads[i] for s in strategies) for i in range(num_operands))
    return reads, tuple(tuple(s.results[i] for s in strategies) for i in range(num_results))


def _even(graph: Graph, names: tuple[str, ...], layouts: tuple[Layout, ...], mesh: Mesh) -> bool:
    shapes = (graph.types[name].shape for name in names)
    return all(divides(shape, layout, mesh) for shape, layout in zip(shapes, layouts, strict=True))
