"""What is alive when, as items of the memory rows: storages, redistributed copies, gradients, what is returned.

Needs a formulation with its choices, flows, fates and kept gathers. Adds, per step s of the captured graph (`needs`),
  base + sum of the GB of the items alive at s <= peak                                  (`add_memory_rows`)
with base the parameters and optimizer state. Not in here: collective buffers and gathers in flight. Copies between
tiers have only the room that is left (`passes/copy_room`).
"""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from shardwright.ir import Phase
from shardwright.ir.ops import is_view
from shardwright.planner.fates import GB, FateChoice
from shardwright.planner.flows import Terms, add_terms, is_parameter
from shardwright.planner.formulation import Formulation
from shardwright.planner.memory_rows import Items
from shardwright.planner.need_rows import NeedRows
from shardwright.planner.needs import Needs
from shardwright.planner.space import AT_REST

__all__ = ["add_memory_rows"]

_Key = TypeVar("_Key", bound=Hashable)

GATHERS_IN_FLIGHT = 2
"""A layer's gathered parameters and those prefetched for the next."""


def add_memory_rows(formulation: Formulation, needs: Needs, static: Terms) -> None:
    """Bound `Formulation.peak` from below; `static`: GB that are always held."""
    writer = _ItemWriter(formulation, needs)
    model, peak = formulation.model, formulation.peak
    base, units = model.variable(math.inf), GB / formulation.unit_bytes
    model.row(add_terms({base: -1.0}, static, units), 0.0, 0.0)
    for row in writer.items().rows(writer.steps()):
        model.row(add_terms({base: 1.0, peak: -1.0}, row, units), upper=0.0)
    model.row({base: 1.0, peak: -1.0}, upper=0.0)


@dataclass
class _ItemWriter:
    result: Formulation
    needs: Needs

    def __post_init__(self) -> None:
        self.space, self.flows, self.fates = self.result.space, self.result.flows, self.result.fates
        self.need_rows = NeedRows(self.result, self.needs)
        self.last_layers = self.space.fold.last_layers()

    def items(self) -> Items:
        items = Items()
        self._storage_items(items)
        self._version_items(items)
        self._fetch_items(items)
        self._gradient_items(items)
        self._returned_items(items)
        return items

    def steps(self) -> list[int]:
        """Those of names outside classes and in a class's first and last layer, and the optimizer's."""
        fold, nodes, steps = self.space.fold, self.space.graph.nodes, self.needs.steps
        ends: dict[int, set[int]] = {}
        for name, group in fold.groups.items():
            ends.setdefault(group, set()).add(fold.layers[name])
        edges = {group: {min(layers), max(layers)} for group, layers in ends.items()}
        of_nodes = {step: node.name for step, node in zip(steps, nodes, strict=False)}
        of_making = {step: name for name, need in self.needs.of.items() for step in need.starts}
        chosen = [s for s, n in (of_nodes | of_making).items() if fold.layer(n) in edges.get(fold.group(n), {-1})]
        return [*sorted(chosen), steps[-1]]

    def _bytes_made(self, value: str) -> Terms:
        terms: Terms = {}
        for layout, indicator in self.flows.made(value).items():
            add_terms(terms, indicator, self.result.local(value, layout).num_bytes / GB)
        return terms

    def _storage_items(self, items: Items) -> None:
        whole = {key: self._bytes_made(key) for key in self._storage_keys()}
        storages, steps = self.result.storages, self.needs.steps
        for name, life in storages.forward.items():
            key = self.space.fold.key(name)
            items.add(("whole", key), whole[key], steps[life.born], steps[life.forward_last])
            if name not in self.needs.of:
                continue
            fate = self.fates.get(key)
            if fate is None:
                items.add(("whole", key), whole[key], steps[life.forward_last] + 1, self.needs.final(name))
            else:
                self._fate_items(items, name, fate, steps[life.forward_last] + 1)
        for name, life in storages.backward.items():
            key = self.space.fold.key(name)
            items.add(("whole", key), whole[key], steps[life.born], steps[max(life.backward_uses)])

    def _fate_items(self, items: Items, name: str, fate: FateChoice, start: int) -> None:
        """From `start` on: kept, as long as it is needed since; made again, where it also was needed by then."""
        key, is_last = fate.storage, name in self.last_layers
        kept, again = fate.layer_terms(is_last)
        for begin, end in self._segments(name, start):
            since, by = self.need_rows.since(name, end), self.need_rows.by(name, begin)
            if since is not None:
                self._where(items, ("kept", key, is_last), kept, (since,), begin, end)
            if since is not None and by is not None:
                self._where(items, ("again", key, is_last), again, (by, since), begin, end)

    def _segments(self, name: str, start: int) -> Iterator[tuple[int, int]]:
        """Runs of steps from `start` on, in which it does not matter which of them needs the storage."""
        need, latest = self.needs.of[name], self.needs.latest(name)
        ends = {need.last, *latest, *(p - 1 for p in need.starts)}
        for end in sorted(ends):
            if end >= start:
                yield start, end
                start = end + 1

    def _where(self, items: Items, key: Hashable, terms: Terms, needed: tuple[int, ...], start: int, end: int) -> None:
        """An item that is there where all that is needed is 1: g >= terms - largest * the number that is 0."""
        asked = tuple(dict.fromkeys(v for v in needed if v != self.need_rows.always))
        if asked and (key, asked) not in items.terms:
            units = GB / self.result.unit_bytes
            held, largest = self.result.model.variable(math.inf), max(terms.values(), default=0.0) * units
            row = add_terms(add_terms({held: 1.0}, terms, -units), dict.fromkeys(asked, -1.0), largest)
            self.result.model.row(row, -largest * len(asked))
            terms = {held: 1.0 / units}
        items.add((key, asked), items.terms.get((key, asked), terms), start, end)

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
                        _widen(spans, (group, operand), start, end)
        sizes, kept, phases = self._group_bytes()
        steps, forward_end = self.needs.steps, self.needs.steps[self.result.storages.num_forward]
        for (group, _), (first, last) in spans.items():
            start, end = steps[first], steps[last]
            items.add(("version", group), sizes[group], start, end)
            ahead = phases[group] is Phase.FORWARD
            waiting = (end + 1, forward_end) if ahead else (forward_end + 1, start - 1)
            items.add(("gathered", group), kept.get(group, {}), *waiting)

    def _fetch_items(self, items: Items) -> None:
        """A parameter that lies on the host is on the device from the first to the last reader of a phase."""
        fold, steps = self.space.fold, self.needs.steps
        spans: dict[tuple[str, Phase], tuple[int, int]] = {}
        for position, node in enumerate(self.space.graph.nodes):
            fetched = [name for name in node.operands if fold.key(name) in self.result.fetched]
            for phase, (start, end) in self._reader_spans(node.name, position).items() if fetched else ():
                for name in fetched:
                    _widen(spans, (name, phase), start, end)
        for (name, _), (first, last) in spans.items():
            key, in_flight = fold.key(name), GATHERS_IN_FLIGHT if fold.group(name) >= 0 else 1
            terms = add_terms({}, self.result.fetched[key], in_flight)
            items.add(("fetched", key), terms, steps[first], steps[last])

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
        steps = self.needs.steps
        for param, gradient in graph.gradients.items():
            born, key = positions[gradient], fold.key(param)
            last = max((positions[gradient], *graph.users.get(gradient, ())))
            start = last + 1 if storages.roots[gradient] in storages.backward else born
            at_rest, sent = self._bytes_made(key), self.result.sent_gradients.get(key, {})
            items.add(("gradient", key), add_terms(dict(at_rest), sent, -1.0), steps[start], steps[-1])
            gone = births[births.index(born) + 2 :][:1]
            items.add(("sent gradient", key), sent, steps[start], steps[gone[0]] if gone else steps[-1])
            if self.result.machine.accumulate > 1:
                items.add(("accumulated", key), at_rest, 0, steps[-1] - 1)

    def _returned_items(self, items: Items) -> None:
        """The caller holds the loss and the outputs, whole, until the step ends."""
        graph, storages, steps = self.space.graph, self.result.storages, self.needs.steps
        held = ((graph.loss,) if graph.loss else ()) + tuple(graph.outputs.values())
        for value in dict.fromkeys(name for name in held if storages.roots.get(name) in storages.forward):
            root = storages.roots[value]
            key = self.space.fold.key(value)
            made = self.flows.made(key)
            itself = made.pop(self.space.targets[key], {})
            last = max(steps[storages.forward[root].forward_last], self.needs.final(root))
            size = graph.types[root].num_bytes / GB
            items.add(("returned", value), add_terms({}, itself, size), last + 1, steps[-1])
            copied = add_terms(
                {}, {v: 1.0 for terms in made.values() for v in terms}, graph.types[value].num_bytes / GB
            )
            items.add(("returned copy", value), copied, steps[storages.forward[root].born], steps[-1])


def _widen(spans: dict[_Key, tuple[int, int]], key: _Key, start: int, end: int) -> None:
    """Let the span of that key cover these positions too."""
    first, last = spans.get(key, (start, end))
    spans[key] = (min(first, start), max(last, end))
