"""The space of plans as plain data: units with choices, edges with redistribution costs, folded over equal layers.

A *unit* is an operator with the operators that can only follow it (views, single-operand ops that accept whatever it
makes); a parameter is a unit too, whose choices are its layouts at rest. A *choice* is one legal combination of
layouts over all mesh axes: what the unit reads, what it makes, and the seconds of one rank. Equal layers share
their units: everything is keyed by the name in the class's first layer, with a multiplicity. An *edge* says that a
unit reads a value; where the layouts differ the value is redistributed, which costs what `transfers` says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from shardwright.ir import (
    Graph,
    InputKind,
    Layout,
    Mesh,
    Node,
    Phase,
    Placement,
    Replicate,
    Shard,
    TensorType,
    divides,
    local_shape,
    replicated,
)
from shardwright.ir.ops import is_view
from shardwright.passes.localize import localize
from shardwright.passes.prices import Prices
from shardwright.passes.strategies import Rules, Strategy
from shardwright.planner.batch_split import batch_strategies
from shardwright.planner.fold import Fold

__all__ = ["AT_REST", "Choice", "Edge", "Space", "Unit", "build_space"]

AT_REST = -1
"""Slot of the edge from a gradient to its parameter's layout at rest."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a unit."""

    reads: tuple[Layout, ...]
    """Per operand of the unit's first node."""
    layouts: tuple[Layout, ...]
    """Per value of the unit."""
    node_reads: tuple[tuple[Layout, ...], ...]
    """Per node of the unit, the layouts of its operands."""
    seconds: tuple[float, ...]
    """Per node of the unit, one instance on one rank."""


@dataclass(frozen=True)
class Unit:
    """A decision: one of `choices`."""

    index: int
    nodes: tuple[Node, ...]
    """Of the representative layer; empty for inputs."""
    values: tuple[str, ...]
    """Everything its nodes make, in order; an input's own name."""
    choices: tuple[Choice, ...]
    multiplicity: int
    phase: Phase
    region: tuple[Phase, int]
    """(phase, class of layers or -1): traffic hides behind the compute of its region."""
    kind: InputKind | None = None

    def layouts_of(self, value: str) -> tuple[Layout, ...]:
        """Layout of a value under each choice."""
        position = self.values.index(value)
        return tuple(choice.layouts[position] for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Edge:
    """Unit `consumer` reads `value`."""

    value: str
    consumer: int
    slot: int
    """Operand of the consumer's first node, or AT_REST."""
    phase: Phase
    multiplicity: int
    """How many instances of the value are read so."""
    cross: bool
    """Whether the reader stands in another layer."""
    again: bool = False
    """Backward reads a view that the consumer makes in forward: what is redistributed here is so again there."""


@dataclass(frozen=True)
class Space:
    """Everything the formulation needs."""

    graph: Graph
    mesh: Mesh
    fold: Fold
    units: tuple[Unit, ...]
    unit_of: Mapping[str, int]
    """Representative value to unit."""
    edges: tuple[Edge, ...]
    targets: Mapping[str, Layout] = field(default_factory=dict)
    """Value to the layout the caller wants (loss, outputs, buffer updates)."""
    batch: tuple[Mapping[str, Strategy], ...] = ()
    """Per axis, what splitting the batch means for every node."""
    num_strategies: int = 0
    """Strategies offered by the rules, over axes."""


def build_space(graph: Graph, mesh: Mesh, fold: Fold, rules: Rules, prices: Prices) -> Space:
    """Ask the rules about every distinct operator on every axis and combine the answers.

    Raises RuleError for an operator nobody knows.
    """
    builder = _Builder(graph, mesh, fold, rules, prices)
    for given in graph.inputs:
        builder.add_input(given.name, given.kind)
    for node in graph.nodes:
        builder.add_node(node)
    for node in graph.nodes:
        builder.add_edges(node)
    return builder.finish()


@dataclass
class _Draft:
    nodes: list[Node]
    values: list[str]
    choices: list[Choice]
    phase: Phase
    kind: InputKind | None = None


@dataclass
class _Builder:
    graph: Graph
    mesh: Mesh
    fold: Fold
    rules: Rules
    prices: Prices
    drafts: list[_Draft] = field(default_factory=list)
    unit_of: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    batch: list[dict[str, Strategy]] = field(default_factory=list)
    """Per axis, what splitting the batch means for every node."""
    edges: dict[tuple[str, int, int, Phase, bool], int] = field(default_factory=dict)
    num_strategies: int = 0

    def __post_init__(self) -> None:
        self.batch = [batch_strategies(self.graph, self.rules, size) for size in self.mesh.sizes]

    def _strategies(self, node: Node, axis: int) -> tuple[Strategy, ...]:
        """On the innermost axis whatever the rules offer; outer axes split the batch and nothing else."""
        if axis < len(self.mesh.sizes) - 1:
            return (self.batch[axis][node.name],)
        offered = self.rules.strategies(self.graph, node, self.mesh.sizes[axis])
        self.num_strategies += len(offered)
        return offered

    def add_input(self, name: str, kind: InputKind) -> None:
        key = self.fold.key(name)
        self.counts[key] = self.counts.get(key, 0) + 1
        if key in self.unit_of:
            return
        layouts = self._at_rest(name) if kind in (InputKind.PARAM, InputKind.FROZEN) else [replicated(self.mesh)]
        choices = [Choice((), (layout,), (), ()) for layout in layouts]
        self.unit_of[key] = len(self.drafts)
        self.drafts.append(_Draft([], [key], choices, Phase.FORWARD, kind))

    def _at_rest(self, name: str) -> list[Layout]:
        shape = self.graph.types[name].shape
        per_axis: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        found = [
            layout for layout in product(per_axis, repeat=len(self.mesh.sizes)) if divides(shape, layout, self.mesh)
        ]
        return list(dict.fromkeys(found))

    def add_node(self, node: Node) -> None:
        key = self.fold.key(node.name)
        for result in map(self.fold.key, node.results):
            self.counts[result] = self.counts.get(result, 0) + 1
        if key == node.name:
            leader = self._leader(node)
            if leader is None or not self._follow(leader, node):
                self._found_unit(node)

    def add_edges(self, node: Node) -> None:
        """All units must be there: backward meets the last layer before the first, which stands for all."""
        key = self.fold.key(node.name)
        unit = self.unit_of[key]
        if self.drafts[unit].nodes[0].name != key:
            return  # a follower reads inside its unit
        for slot, operand in enumerate(node.operands):
            value = self.fold.key(operand)
            cross = self.fold.layer(operand) != self.fold.layer(node.name)
            edge = (value, unit, slot, node.phase, cross)
            self.edges[edge] = self.edges.get(edge, 0) + 1

    def _leader(self, node: Node) -> int | None:
        """The unit that `node` may join: its only operand's, made in the same layer and phase."""
        operands = set(node.operands)
        if len(operands) != 1:
            return None
        operand = next(iter(operands))
        producer = self.graph.producers.get(operand)
        if producer is None or producer.phase is not node.phase:
            return None
        if self.fold.layer(operand) != self.fold.layer(node.name) or self.fold.group(operand) != self.fold.group(
            node.name
        ):
            return None
        return self.unit_of[self.fold.key(operand)]

    def _follow(self, leader: int, node: Node) -> bool:
        """Let `node` join a unit, when it accepts what the unit makes in just one way."""
        draft = self.drafts[leader]
        operand = node.operands[0]
        position = draft.values.index(self.fold.key(operand))
        tables = [self._by_read(node, axis) for axis in range(len(self.mesh.sizes))]
        only_reader = len(self.graph.users.get(operand, ())) == 1 and is_view(node.op)
        extended = []
        for choice in draft.choices:
            layout = choice.layouts[position]
            rows = [table.get(p, []) for table, p in zip(tables, layout, strict=True)]
            if any(len(row) > 1 for row in rows):
                return False
            results = self._results(node, layout, [row[0] for row in rows if row])
            if results is None:
                if not only_reader:
                    return False
                continue
            reads = (layout,) * len(node.operands)
            seconds = self._seconds(node, reads, results)
            extended.append(
                Choice(
                    choice.reads,
                    (*choice.layouts, *results),
                    (*choice.node_reads, reads),
                    (*choice.seconds, seconds),
                )
            )
        if not extended:
            return False
        draft.choices = extended
        draft.nodes.append(node)
        draft.values.extend(node.results)
        for result in node.results:
            self.unit_of[result] = leader
        return True

    def _by_read(self, node: Node, axis: int) -> dict[Placement, list[Strategy]]:
        """Read placement to the strategies that read every operand so."""
        table: dict[Placement, list[Strategy]] = {}
        for strategy in self._strategies(node, axis):
            if len(set(strategy.reads)) == 1:
                table.setdefault(strategy.reads[0], []).append(strategy)
        return table

    def _results(self, node: Node, layout: Layout, rows: list[Strategy]) -> tuple[Layout, ...] | None:
        if len(rows) != len(layout):
            return None
        results = tuple(tuple(row.results[i] for row in rows) for i in range(len(node.results)))
        return results if self._even(node.results, results) else None

    def _even(self, names: tuple[str, ...], layouts: tuple[Layout, ...]) -> bool:
        shapes = (self.graph.types[name].shape for name in names)
        return all(divides(shape, layout, self.mesh) for shape, layout in zip(shapes, layouts, strict=True))

    def _found_unit(self, node: Node) -> None:
        per_axis = [self._strategies(node, axis) for axis in range(len(self.mesh.sizes))]
        choices: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Choice] = {}
        for combination in product(*per_axis):
            reads = tuple(tuple(s.reads[i] for s in combination) for i in range(len(node.operands)))
            results = tuple(tuple(s.results[i] for s in combination) for i in range(len(node.results)))
            if (
                (reads, results) in choices
                or not self._even(node.operands, reads)
                or not self._even(node.results, results)
            ):
                continue
            seconds = self._seconds(node, reads, results)
            choices[reads, results] = Choice(reads, results, (reads,), (seconds,))
        for result in node.results:
            self.unit_of[result] = len(self.drafts)
        self.drafts.append(_Draft([node], list(node.results), list(choices.values()), node.phase))

    def _seconds(self, node: Node, reads: tuple[Layout, ...], results: tuple[Layout, ...]) -> float:
        if is_view(node.op):
            return 0.0
        operands = tuple(
            self._local(self.graph.types[name], layout) for name, layout in zip(node.operands, reads, strict=True)
        )
        whole = tuple(self.graph.types[name] for name in node.results)
        local, types = localize(node, operands, whole, results, self.mesh)
        return self.prices.op_seconds(local, operands, types)

    def _local(self, whole: TensorType, layout: Layout) -> TensorType:
        return TensorType(whole.dtype, local_shape(whole.shape, layout, self.mesh))

    def finish(self) -> Space:
        for param, gradient in self.graph.gradients.items():
            edge = (self.fold.key(gradient), self.unit_of[self.fold.key(param)], AT_REST, Phase.BACKWARD, False)
            self.edges[edge] = self.edges.get(edge, 0) + 1
        units = tuple(
            Unit(
                index=index,
                nodes=tuple(draft.nodes),
                values=tuple(draft.values),
                choices=tuple(draft.choices),
                multiplicity=self.counts[draft.values[0]],
                phase=draft.phase,
                region=(draft.phase, self.fold.group(draft.values[0])),
                kind=draft.kind,
            )
            for index, draft in enumerate(self.drafts)
        )
        edges = [
            Edge(value, unit, slot, phase, min(count, self.counts[value]), cross, self._read_again(unit, slot, phase))
            for (value, unit, slot, phase, cross), count in self.edges.items()
        ]
        targets = {name: replicated(self.mesh) for name in self._wanted_whole()}
        return Space(
            self.graph,
            self.mesh,
            self.fold,
            units,
            self.unit_of,
            tuple(edges),
            targets,
            tuple(self.batch),
            self.num_strategies,
        )

    def _wanted_whole(self) -> tuple[str, ...]:
        loss = (self.graph.loss,) if self.graph.loss else ()
        wanted = (*loss, *self.graph.outputs.values(), *self.graph.updates.values())
        return tuple(dict.fromkeys(self.fold.key(name) for name in wanted))

    def _read_again(self, unit: int, slot: int, phase: Phase) -> bool:
        """Whether the unit starts with a view of this operand that backward reads: it is derived again there."""
        draft = self.drafts[unit]
        if phase is Phase.BACKWARD or slot != 0 or not is_view(draft.nodes[0].op):
            return False
        views = {draft.nodes[0].name}
        for node in draft.nodes[1:]:
            if is_view(node.op) and node.operands[0] in views:
                views.update(node.results)
        nodes = self.graph.nodes
        return any(nodes[i].phase is Phase.BACKWARD for view in views for i in self.graph.users.get(view, ()))
