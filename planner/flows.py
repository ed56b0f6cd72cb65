"""Edges as flows: how much of each value goes from the layout it is made in to the layout it is read in.

Equations, for an edge from value v to operand i of unit c, with x the one-hot choices:
  sum_q f[p, q] = sum of x over choices that make v in p          (`_add_flow`)
  sum_p f[p, q] = sum of x over choices of c that read i in q     (`_add_flow`)
and for versions shared by several readers of one phase: y[p, q] >= f_e[p, q]  (`_version`).
The flow form is the convex hull for one edge; products x + x - 1 are much weaker.
"""

from dataclasses import dataclass, field

from shardwright.ir import InputKind, Layout, Phase
from shardwright.planner.linear import LinearModel
from shardwright.planner.space import AT_REST, Edge, Space
from shardwright.planner.transfers import reachable

__all__ = ["Flows", "Terms", "Version", "add_terms", "build_flows"]

Terms = dict[int, float]
NO_GROUP = -1
"""Of versions that only the caller reads."""


def add_terms(target: Terms, terms: Terms, scale: float = 1.0) -> Terms:
    """`target += scale * terms`, in place; returns target."""
    for variable, coefficient in terms.items():
        target[variable] = target.get(variable, 0.0) + scale * coefficient
    return target


@dataclass(frozen=True)
class Version:
    """A value redistributed from one layout to another in one phase, shared by its readers."""

    value: str
    source: Layout
    target: Layout
    phase: Phase
    terms: Terms
    """1 where it is made."""
    multiplicity: int
    readers: tuple[Edge, ...]
    group: int
    """Versions of one group have the same value and the same candidates for readers."""


@dataclass
class Flows:
    """Choice variables and everything derived from them."""

    space: Space
    model: LinearModel
    choices: list[list[int]] = field(default_factory=list)
    """Per unit, a variable per choice."""
    versions: list[Version] = field(default_factory=list)

    def made(self, value: str) -> dict[Layout, Terms]:
        """Layout to the sum of choices that make `value` so."""
        unit = self.space.units[self.space.unit_of[value]]
        found: dict[Layout, Terms] = {}
        for variable, layout in zip(self.choices[unit.index], unit.layouts_of(value), strict=True):
            found.setdefault(layout, {})[variable] = 1.0
        return found

    def read(self, edge: Edge) -> dict[Layout, Terms]:
        """Layout to the sum of the consumer's choices that read the operand so."""
        unit = self.space.units[edge.consumer]
        found: dict[Layout, Terms] = {}
        for variable, choice in zip(self.choices[unit.index], unit.choices, strict=True):
            layout = choice.layouts[0] if edge.slot == AT_REST else choice.reads[edge.slot]
            found.setdefault(layout, {})[variable] = 1.0
        return found


def build_flows(space: Space, model: LinearModel) -> Flows:
    """Add choices, flows and versions to the model; no costs."""
    flows = Flows(space, model)
    for unit in space.units:
        variables = [model.variable(integer=len(unit.choices) > 1) for _ in unit.choices]
        model.row(dict.fromkeys(variables, 1.0), 1.0, 1.0)
        flows.choices.append(variables)
    pairs = {}
    for edge in space.edges:
        key = (edge.value, edge.consumer, edge.slot)
        if key not in pairs:
            pairs[key] = _add_flow(flows, edge)
    _add_versions(flows, pairs)
    _add_targets(flows)
    return flows


Pairs = dict[tuple[Layout, Layout], Terms]


def _add_flow(flows: Flows, edge: Edge) -> Pairs:
    """Flow per pair of layouts, as terms; the pairs that cannot be are excluded by rows."""
    made, read, model = flows.made(edge.value), flows.read(edge), flows.model
    if len(made) == 1 or len(read) == 1:
        return _one_sided(flows, made, read)
    pairs: Pairs = {}
    for p in made:
        for q in read:
            if reachable(p, q):
                pairs[p, q] = {model.variable(): 1.0}
    for p, terms in made.items():
        row = add_terms({}, terms, -1.0)
        for q in read:
            add_terms(row, pairs.get((p, q), {}))
        model.row(row, 0.0, 0.0)
    for q, terms in read.items():
        row = add_terms({}, terms, -1.0)
        for p in made:
            add_terms(row, pairs.get((p, q), {}))
        model.row(row, 0.0, 0.0)
    return pairs


def _one_sided(flows: Flows, made: dict[Layout, Terms], read: dict[Layout, Terms]) -> Pairs:
    """One end has no choice: the flow is the other end's choice."""
    pairs: Pairs = {}
    for p, p_terms in made.items():
        for q, q_terms in read.items():
            terms = q_terms if len(made) == 1 else p_terms
            if reachable(p, q):
                pairs[p, q] = terms
            else:
                flows.model.row(terms, 0.0, 0.0)
    return pairs


def _add_versions(flows: Flows, pairs: dict[tuple[str, int, int], Pairs]) -> None:
    groups: dict[tuple[str, Phase, int, bool], list[Edge]] = {}
    for edge in flows.space.edges:
        phases = (Phase.FORWARD, Phase.BACKWARD) if edge.again else (edge.phase,)
        for phase in phases:
            groups.setdefault((edge.value, phase, edge.multiplicity, edge.cross), []).append(edge)
    for number, ((value, phase, multiplicity, _), edges) in enumerate(groups.items()):
        wanted: dict[tuple[Layout, Layout], list[Edge]] = {}
        for edge in edges:
            for pair in pairs[edge.value, edge.consumer, edge.slot]:
                if pair[0] != pair[1]:
                    wanted.setdefault(pair, []).append(edge)
        for (p, q), readers in wanted.items():
            terms = _version(flows, [pairs[e.value, e.consumer, e.slot][p, q] for e in readers])
            flows.versions.append(Version(value, p, q, phase, terms, multiplicity, tuple(readers), number))


def _version(flows: Flows, flow_terms: list[Terms]) -> Terms:
    if len(flow_terms) == 1:
        return flow_terms[0]
    shared = flows.model.variable()
    for terms in flow_terms:
        flows.model.row(add_terms({shared: 1.0}, terms, -1.0), 0.0)
    return {shared: 1.0}


def _add_targets(flows: Flows) -> None:
    """What the caller wants whole is one more version."""
    for value, target in flows.space.targets.items():
        unit = flows.space.units[flows.space.unit_of[value]]
        for p, terms in flows.made(value).items():
            if not reachable(p, target):
                flows.model.row(terms, 0.0, 0.0)
            elif p != target:
                flows.versions.append(Version(value, p, target, unit.phase, terms, unit.multiplicity, (), NO_GROUP))


def is_parameter(flows: Flows, value: str) -> bool:
    kind = flows.space.units[flows.space.unit_of[value]].kind
    return kind in (InputKind.PARAM, InputKind.FROZEN)
