"""What is alive when, as items of the memory rows: storages, redistributed copies, gradients, what is returned.

Needs a formulation with its choices, flows, fates and kept gathers. Adds, per position p of the captured graph,
  base + sum of the GB of the items alive at p <= peak                                  (`add_memory_rows`)
with base the parameters and optimizer state. Not in here: collective buffers and gathers in flight. Copies between
tiers have only the room that is left (`passes/copy_room`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.ir import Phase
from shardwright.ir.ops import is_view
from shardwright.planner.fates import AGAIN, GB, State
from shardwright.planner.flows import Terms, add_terms, is_parameter
from shardwright.planner.formulation import Formulation
from shardwright.planner.memory_rows import Items
from shardwright.planner.needs import Early, Needs
from shardwright.planner.space import AT_REST

__all__ = ["add_memory_rows"]

GATHERS_IN_FLIGHT = 2
"""A layer's gathered parameters and those prefetched for the next."""


def add_memory_rows(formulation: Formulation, needs: Needs, static: Terms) -> None:
    """Bound `Formulation.peak` from below; `static`: GB that are always held."""
    writer = _ItemWriter(formulation, needs)
    model, peak = formulation.model, formulation.peak
    base, units = model.variable(math.inf), GB / formulation.unit_bytes
    model.row(add_terms({base: -1.0}, static, units), 0.0, 0.0)
    for row in writer.items().rows(writer.positions()):
        model.row(add_terms({base: 1.0, peak: -1.0}, row, units), upper=0.0)
    model.row({base: 1.0, peak: -1.0}, upper=0.0)


@dataclass
class _ItemWriter:
    result: Formulation
    needs: Needs
    early: dict[str, int] = field(default_factory=dict)
    """Storage to the variable that says whether it is needed earlier than usual."""

    def __post_init__(self) -> None:
        self.space, self.flows, self.fates = self.result.space, self.result.flows, self.result.fates

    def items(self) -> Items:
        items = Items()
        self._find_early()
        self._storage_items(items)
        self._version_items(items)
        self._gradient_items(items)
        self._returned_items(items)
        return items

    def positions(self) -> list[int]:
        """Nodes outside classes, nodes of a class's first and last layer, and the optimizer step."""
        fold, nodes = self.space.fold, self.space.graph.nodes
        ends: dict[int, set[int]] = {}
        for name, group in fold.groups.items():
            ends.setdefault(group, set()).add(fold.layers[name])
        edges = {group: {min(layers), max(layers)} for group, layers in ends.items()}
        chosen = [i for i, n in enumerate(nodes) if fold.layer(n.name) in edges.get(fold.group(n.name), {-1})]
        return [*chosen, len(nodes)]

    def _bytes_made(self, value: str) -> Terms:
        terms: Terms = {}
        for layout, indicator in self.flows.made(value).items():
            add_terms(terms, indicator, self.result.local(value, layout).num_bytes / GB)
        return terms

    def _storage_items(self, items: Items) -> None:
        whole = {key: self._bytes_made(key) for key in self._storage_keys()}
        storages = self.result.storages
        for name, life in storages.forward.items():
            key = self.space.fold.key(name)
            items.add(("whole", key), whole[key], life.born, life.forward_last)
            end = self.needs.last[name]
            if end < 0:
                continue
            fate = self.fates.get(key)
            if fate is None:
                items.add(("whole", key), whole[key], life.forward_last + 1, end)
                continue
            items.add(("kept", key), fate.bytes_terms(State.KEEP), life.forward_last + 1, end)
            again = fate.bytes_terms(*AGAIN)
            items.add(("again", key), again, self.needs.first[name], end)
            early = self.needs.early.get(name)
            if early is not None and name in self.early:
                size = {self.early[name]: max(fate.class_bytes) / GB}
                items.add(("early", key), size, early.first, self.needs.first[name] - 1)
        for name, life in storages.backward.items():
            key = self.space.fold.key(name)
            items.add(("whole", key), whole[key], life.born, max(life.backward_uses))

    def _find_early(self) -> None:
        """A storage that is made again is needed early when a child is recomputed, or made again and needed early
        itself: e >= again + child - 1. Children first."""
        for name, early in self.needs.early.items():
            fate = self.fates.get(self.space.fold.key(name))
            again = [fate.counts[state] for state in AGAIN if state in fate.counts] if fate else []
            if not again or fate is None:
                continue
            self.early[name] = self.result.model.variable()
            for trigger in self._triggers(early):
                row = {self.early[name]: 1.0, **dict.fromkeys(again, -1.0 / fate.multiplicity)}
                self.result.model.row(add_terms(row, trigger, -1.0), -1.0)

    def _triggers(self, early: Early) -> Iterator[Terms]:
        for child in early.children:
            made = self.fates.get(self.space.fold.key(child))
            if made is not None and State.RECOMPUTE in made.counts and not self.result.storages.has_layers:
                yield {made.counts[State.RECOMPUTE]: 1.0 / made.multiplicity}
            if child in self.early:
                yield {self.early[child]: 1.0}

    def _storage_keys(self) -> list[str]:
        storages, fold = self.result.storages, self.space.fold
        return [name for lives in (storages.forward, storages.backward) for name in lives if fold.key(name) == name]

    def _version_items(self, items: Items) -> None:
        """Redistributed copies are alive from the first to the last reader of a phase, views of them included."""
        fold, graph = self.space.fold, self.space.graph
        groups = self._groups_by_edge()
        spans: dict[tuple[int, str], tuple[int, int]] = {}
        for position, node in enumerate(graph.nodes):
            unit = self.space.unit_of[fold.key(node.name)]
            if fold.key(node.name) != self.space.units[unit].nodes[0].name:
                continue
            ends = self._reader_spans(node.name, position)
            for operand in node.operands:
                cross = fold.layer(operand) != fold.layer(node.name)
                for phase, (start, end) in ends.items():
                    for group in groups.get((fold.key(operand), phase, unit, cross), ()):
                        old = spans.get((group, operand), (start, end))
                        spans[group, operand] = (min(old[0], start), max(old[1], end))
        sizes, kept, phases = self._group_bytes()
        forward_end = self.result.storages.num_forward
        for (group, _), (start, end) in spans.items():
            items.add(("version", group), sizes[group], start, end)
            ahead = phases[group] is Phase.FORWARD
            waiting = (end + 1, forward_end) if ahead else (forward_end + 1, start - 1)
            items.add(("gathered", group), kept.get(group, {}), *waiting)

    def _groups_by_edge(self) -> Mapping[tuple[str, Phase, int, bool], set[int]]:
        found: dict[tuple[str, Phase, int, bool], set[int]] = {}
        for version in self.flows.versions:
            for edge in version.readers:
                if edge.slot != AT_REST:
                    found.setdefault((version.value, version.phase, edge.consumer, edge.cross), set()).add(
                        version.group
                    )
        return found

    def _group_bytes(self) -> tuple[dict[int, Terms], dict[int, Terms], dict[int, Phase]]:
        """Per group of versions: GB of its copies, GB of those kept for backward, and its phase."""
        sizes: dict[int, Terms] = {}
        kept: dict[int, Terms] = {}
        phases: dict[int, Phase] = {}
        for version in self.flows.versions:
            size = self.result.local(version.value, version.target).num_bytes / GB
            share = self.result.kept_shares.get((version.value, version.source, version.target))
            if share is not None:
                add_terms(kept.setdefault(version.group, {}), {share: size})
            if is_parameter(self.flows, version.value) and self.space.fold.group(version.value) >= 0:
                size *= GATHERS_IN_FLIGHT
            add_terms(sizes.setdefault(version.group, {}), version.terms, size)
            phases[version.group] = version.phase
        return sizes, kept, phases

    def _reader_spans(self, name: str, position: int) -> dict[Phase, tuple[int, int]]:
        """Per phase, from when to when what this node reads is needed: longer where the node makes a view."""
        graph = self.space.graph
        node = graph.nodes[position]
        found = {node.phase: (position, position)}
        if not is_view(node.op):
            return found
        uses = [i for view in self._views(name) for i in graph.users.get(view, ())]
        for phase in Phase:
            positions = [i for i in uses if graph.nodes[i].phase is phase]
            if positions:
                start = position if phase is node.phase else min(positions)
                found[phase] = (start, max(positions))
        return found

    def _views(self, name: str) -> list[str]:
        graph = self.space.graph
        views = list(graph.producers[name].results)
        for view in views:
            for user in graph.users.get(view, ()):
                node = graph.nodes[user]
                if is_view(node.op) and node.operands[0] == view:
                    views.extend(node.results)
        return views

    def _gradient_items(self, items: Items) -> None:
        """A gradient at rest lives from when it is made until the optimizer has used it; where its step is on the host
        and within backward, until those after the next are made. Those of earlier micro-batches live until this one's
        are added to them."""
        graph, fold, storages = self.space.graph, self.space.fold, self.result.storages
        positions = {result: i for i, node in enumerate(graph.nodes) for result in node.results}
        births = sorted({positions[gradient] for gradient in graph.gradients.values()})
        for param, gradient in graph.gradients.items():
            born, key = positions[gradient], fold.key(param)
            last = max((positions[gradient], *graph.users.get(gradient, ())))
            start = last + 1 if storages.roots[gradient] in storages.backward else born
            at_rest, sent = self._bytes_made(key), self.result.sent_gradients.get(key, {})
            items.add(("gradient", key), add_terms(dict(at_rest), sent, -1.0), start, len(graph.nodes))
            gone = births[births.index(born) + 2 :][:1]
            items.add(("sent gradient", key), sent, start, gone[0] if gone else len(graph.nodes))
            if self.result.machine.accumulate > 1:
                items.add(("accumulated", key), at_rest, 0, len(graph.nodes) - 1)

    def _returned_items(self, items: Items) -> None:
        """The caller holds the loss and the outputs, whole, until the step ends."""
        graph, storages = self.space.graph, self.result.storages
        held = ((graph.loss,) if graph.loss else ()) + tuple(graph.outputs.values())
        for value in dict.fromkeys(name for name in held if storages.roots.get(name) in storages.forward):
            root = storages.roots[value]
            key = self.space.fold.key(value)
            made = self.flows.made(key)
            itself = made.pop(self.space.targets[key], {})
            last = max(storages.forward[root].forward_last, self.needs.last[root])
            size = graph.types[root].num_bytes / GB
            items.add(("returned", value), add_terms({}, itself, size), last + 1, len(graph.nodes))
            copied = add_terms(
                {}, {v: 1.0 for terms in made.values() for v in terms}, graph.types[value].num_bytes / GB
            )
            items.add(("returned copy", value), copied, storages.forward[root].born, len(graph.nodes))
