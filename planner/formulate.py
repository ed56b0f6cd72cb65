"""The one problem: layouts, fates and tiers under the peak of memory, as a mixed-integer linear program.

Objective (ms), added by:
  compute of every unit and every layer                               `_compute`
  redistributions of activations, in full                             `_transfers`
  gathers of parameters and reductions of gradients beyond what       `_windows`
    their region's compute hides; all of them also at 1e-3
  recomputed operators and their redistributions                      `_recompute`
  copies to and from host beyond what compute hides                   `_copies`
  the optimizer step, on the device or on the host                    `_states`
Rows: flows and one-hot choices (`flows`), fates (`fates`), memory per position (`_memory`), host capacity (`_copies`).
Figures of this objective are for choosing; what a plan predicts comes from replay.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir import Cluster, InputKind, Layout, Phase, TensorType, local_shape
from shardwright.ir.ops import is_view
from shardwright.passes.optimizers import OptimizerSpec
from shardwright.passes.prices import Prices
from shardwright.planner.fates import GB, FateChoice, FateOptions, State, build_fates
from shardwright.planner.flows import Flows, Terms, Version, add_terms, build_flows, is_parameter
from shardwright.planner.linear import LinearModel
from shardwright.planner.memory_rows import Items
from shardwright.planner.needs import Needs, find_needs
from shardwright.planner.space import AT_REST, Space, Unit
from shardwright.planner.storages import Storages, find_storages
from shardwright.planner.transfers import Transfers

__all__ = ["Formulation", "Machine", "formulate"]

MS = 1e3
HIDDEN_WEIGHT = 1e-3
"""What hidden traffic costs, so that no byte moves for nothing."""
PEAK_WEIGHT = 1e-5
"""ms per GB: of equal plans the smaller."""
GATHERS_IN_FLIGHT = 2
"""A layer's gathered parameters and those prefetched for the next."""


@dataclass(frozen=True)
class Machine:
    """What the formulation asks about the world."""

    cluster: Cluster
    prices: Prices
    optimizer: OptimizerSpec
    host_bytes: int
    """Budget of the host tier of one rank; 0: none."""


@dataclass
class Formulation:
    """The program and the meaning of its variables."""

    space: Space
    machine: Machine
    model: LinearModel
    flows: Flows
    storages: Storages
    fates: dict[str, FateChoice]
    peak: int
    """Variable: bytes of the fullest position, in `unit_bytes`."""
    unit_bytes: float
    """Of memory rows and of `peak`: the solver's tolerances are absolute, and small models must not vanish in them."""
    host: dict[str, int] = field(default_factory=dict)
    """Parameter to the integer variable: layers whose optimizer state lives on the host."""
    kept_gathers: dict[str, int] = field(default_factory=dict)
    """Parameter to the integer variable: layers whose gathered copy is kept for backward."""
    kept_shares: dict[tuple[str, Layout, Layout], int] = field(default_factory=dict)


def formulate(space: Space, machine: Machine, options: FateOptions) -> Formulation:
    """Build the program; the budget is the upper bound of `Formulation.peak`, set when it is solved."""
    model = LinearModel()
    flows = build_flows(space, model)
    storages = find_storages(space.graph, space.fold.layers)
    needs = find_needs(space, storages)
    fates = build_fates(flows, storages, needs.wanted, options)
    unit_bytes = min(GB, max((t.num_bytes for t in space.graph.types.values()), default=0) or GB)
    peak = model.variable(math.inf, cost=PEAK_WEIGHT * unit_bytes / GB)
    writer = _Writer(Formulation(space, machine, model, flows, storages, fates, peak, unit_bytes), needs)
    writer.write()
    return writer.result


@dataclass
class _Writer:
    result: Formulation
    needs: Needs
    region_compute: dict[tuple[Phase, int], Terms] = field(default_factory=dict)
    region_traffic: dict[tuple[Phase, int], Terms] = field(default_factory=dict)
    local_types: dict[tuple[str, Layout], TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space, self.model = self.result.space, self.result.model
        self.flows, self.fates = self.result.flows, self.result.fates
        self.machine = self.result.machine
        self.transfers = Transfers(self.space.mesh, self.machine.prices)
        self.cost: Terms = {}

    def write(self) -> None:
        self._compute()
        self._keep_gathers()
        self._transfers()
        self._recompute()
        self._windows()
        static = self._states()
        self._copies()
        self._memory(static)
        for variable, coefficient in self.cost.items():
            self.model.cost[variable] += coefficient * MS

    def _local(self, value: str, layout: Layout) -> TensorType:
        if (value, layout) not in self.local_types:
            whole = self.space.graph.types[value]
            local = TensorType(whole.dtype, local_shape(whole.shape, layout, self.space.mesh))
            self.local_types[value, layout] = local
        return self.local_types[value, layout]

    def _compute(self) -> None:
        for unit in self.space.units:
            terms: Terms = {}
            for variable, choice in zip(self.flows.choices[unit.index], unit.choices, strict=True):
                terms[variable] = sum(choice.seconds) * unit.multiplicity
            add_terms(self.cost, terms)
            add_terms(self.region_compute.setdefault(unit.region, {}), terms)

    def _keep_gathers(self) -> None:
        """A parameter's gathered copy may be kept, in some layers, when forward and backward want the same one."""
        forward = {
            (v.value, v.source, v.target): v
            for v in self.flows.versions
            if v.phase is Phase.FORWARD and is_parameter(self.flows, v.value)
        }
        for version in self.flows.versions:
            key = (version.value, version.source, version.target)
            if version.phase is Phase.FORWARD or key not in forward or key in self.result.kept_shares:
                continue
            copies = self._unit(version.value).multiplicity
            if version.value not in self.result.kept_gathers:
                self.result.kept_gathers[version.value] = self.model.variable(copies, integer=True)
            count = self.result.kept_gathers[version.value]
            share = self.model.variable()
            self.model.row({share: 1.0, count: -1.0 / copies}, upper=0.0)
            for other in (forward[key], version):
                self.model.row(add_terms({share: 1.0}, other.terms, -1.0), upper=0.0)
            self.result.kept_shares[key] = share
        for value, count in self.result.kept_gathers.items():
            row: Terms = {count: -1.0 / self._unit(value).multiplicity}
            for (name, _, _), share in self.result.kept_shares.items():
                if name == value:
                    row[share] = 1.0
            self.model.row(row, 0.0, 0.0)

    def _unit(self, value: str) -> Unit:
        return self.space.units[self.space.unit_of[value]]

    def _version_seconds(self, version: Version) -> float:
        return self.transfers.seconds(self.space.graph.types[version.value], version.source, version.target)

    def _transfers(self) -> None:
        for version in self.flows.versions:
            seconds = self._version_seconds(version) * version.multiplicity
            terms = add_terms({}, version.terms, seconds)
            if version.phase is Phase.BACKWARD:
                share = self.result.kept_shares.get((version.value, version.source, version.target))
                if share is not None:
                    terms[share] = terms.get(share, 0.0) - seconds
            if self._hides(version):
                add_terms(self.region_traffic.setdefault(self._region(version), {}), terms)
            else:
                add_terms(self.cost, terms)

    def _hides(self, version: Version) -> bool:
        gradient = bool(version.readers) and all(e.slot == AT_REST for e in version.readers)
        return gradient or is_parameter(self.flows, version.value)

    def _region(self, version: Version) -> tuple[Phase, int]:
        return version.phase, self.space.fold.group(version.value)

    def _recompute(self) -> None:
        for storage, fate in self.fates.items():
            if State.RECOMPUTE not in fate.shares or self._is_later_sibling(storage):
                continue
            terms = add_terms({}, fate.seconds_terms(State.RECOMPUTE), fate.multiplicity)
            add_terms(self.cost, terms)
            add_terms(self.region_compute.setdefault((Phase.BACKWARD, self._unit(storage).region[1]), {}), terms)
            self._repeat_transfers(storage, fate)

    def _is_later_sibling(self, storage: str) -> bool:
        """The operator's seconds are charged once, on its first result that may be recomputed."""
        results = self.space.graph.producers[storage].results
        again = [r for r in results if r in self.fates and State.RECOMPUTE in self.fates[r].shares]
        return again[0] != storage

    def _repeat_transfers(self, storage: str, fate: FateChoice) -> None:
        """What the operator reads redistributed is redistributed again: h >= cost - largest (1 - share)."""
        unit = self._unit(storage)
        if not unit.nodes or storage not in unit.nodes[0].results:
            return
        terms: Terms = {}
        largest = 0.0
        for version in self.flows.versions:
            if version.phase is Phase.FORWARD and not self._hides(version) and self._read_by(version, unit.index):
                seconds = self._version_seconds(version)
                add_terms(terms, version.terms, seconds)
                largest += seconds
        if not terms:
            return
        repeated = self.model.variable(math.inf)
        self.cost[repeated] = fate.multiplicity / MS
        row = add_terms({repeated: 1.0}, terms, -MS)
        row[fate.counts[State.RECOMPUTE]] = -largest * MS / fate.multiplicity
        self.model.row(row, -largest * MS)

    @staticmethod
    def _read_by(version: Version, unit: int) -> bool:
        return any(edge.consumer == unit for edge in version.readers)

    def _windows(self) -> None:
        """exposed_r >= traffic_r - hideable share of compute_r; the share that cannot hide is always paid."""
        overlap = min(self.machine.cluster.intra.overlap, self.machine.cluster.inter.overlap)
        for region, traffic in sorted(self.region_traffic.items()):
            exposed = self.model.variable(math.inf)
            row = add_terms({exposed: 1.0}, traffic, -MS * overlap)
            add_terms(row, self.region_compute.get(region, {}), MS)
            self.model.row(row, 0.0)
            self.cost[exposed] = 1.0 / MS
            add_terms(self.cost, traffic, 1.0 - overlap + HIDDEN_WEIGHT)

    def _states(self) -> Terms:
        """Parameters, gradients' layout and optimizer state: GB always on the device. Adds the step's seconds."""
        static: Terms = {}
        self.host_terms: Terms = {}
        for unit in self.space.units:
            if unit.kind is None:
                continue
            name, copies = unit.values[0], unit.multiplicity
            for variable, (layout,) in zip(
                self.flows.choices[unit.index], (c.layouts for c in unit.choices), strict=True
            ):
                local = self._local(name, layout)
                add_terms(static, {variable: local.num_bytes * copies / GB})
                if unit.kind is InputKind.PARAM:
                    self._state(unit, variable, local, static)
        return static

    def _state(self, unit: Unit, variable: int, local: TensorType, static: Terms) -> None:
        optimizer, prices, copies = self.machine.optimizer, self.machine.prices, unit.multiplicity
        element_bytes = max(local.num_bytes // max(local.num_elements, 1), 1)
        state_bytes = optimizer.state_bytes(local.num_elements, element_bytes)
        on_device = prices.optimizer_seconds(local.num_elements, state_bytes, False)
        add_terms(static, {variable: state_bytes * copies / GB})
        add_terms(self.cost, {variable: on_device * copies})
        if not self.machine.host_bytes or state_bytes < self.machine.cluster.host.smallest_offload_bytes:
            return
        name = unit.values[0]
        if name not in self.result.host:
            self.result.host[name] = self.model.variable(copies, integer=True)
        count = self.result.host[name]
        share = self.model.variable()
        self.model.row({share: 1.0, variable: -1.0}, upper=0.0)
        self.model.row({share: 1.0, count: -1.0 / copies}, upper=0.0)
        on_host = prices.optimizer_seconds(local.num_elements, state_bytes, True) + 2 * prices.copy_seconds(
            local.num_bytes
        )
        add_terms(static, {share: -state_bytes * copies / GB})
        add_terms(self.host_terms, {share: state_bytes * copies / GB})
        add_terms(self.cost, {share: (on_host - on_device) * copies})

    def _copies(self) -> None:
        """Copies of activations hide behind compute of their direction's phase; the rest stalls."""
        seconds: Terms = {}
        for fate in self.fates.values():
            if State.OFFLOAD not in fate.shares:
                continue
            for share, size in zip(fate.shares[State.OFFLOAD], fate.class_bytes, strict=True):
                add_terms(seconds, share, self.machine.prices.copy_seconds(size) * fate.multiplicity)
            add_terms(self.host_terms, fate.bytes_terms(State.OFFLOAD), fate.multiplicity)
        if self.host_terms:
            units = GB / self.result.unit_bytes
            self.model.row(
                add_terms({}, self.host_terms, units), upper=self.machine.host_bytes / self.result.unit_bytes
            )
        if not seconds:
            return
        for phase in Phase:
            stall = self.model.variable(math.inf)
            row = add_terms({stall: 1.0}, seconds, -MS)
            for region, compute in self.region_compute.items():
                if region[0] is phase:
                    add_terms(row, compute, MS)
            self.model.row(row, 0.0)
            self.cost[stall] = 1.0 / MS
            add_terms(self.cost, seconds, HIDDEN_WEIGHT)

    def _memory(self, static: Terms) -> None:
        items = Items()
        self._storage_items(items)
        self._version_items(items)
        self._gradient_items(items)
        self._returned_items(items)
        base, units = self.model.variable(math.inf), GB / self.result.unit_bytes
        self.model.row(add_terms({base: -1.0}, static, units), 0.0, 0.0)
        for row in items.rows(self._positions()):
            self.model.row(add_terms({base: 1.0, self.result.peak: -1.0}, row, units), upper=0.0)
        self.model.row({base: 1.0, self.result.peak: -1.0}, upper=0.0)

    def _positions(self) -> list[int]:
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
            add_terms(terms, indicator, self._local(value, layout).num_bytes / GB)
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
            again = fate.bytes_terms(State.RECOMPUTE, State.OFFLOAD)
            items.add(("again", key), again, self.needs.first[name], end)
        for name, life in storages.backward.items():
            key = self.space.fold.key(name)
            items.add(("whole", key), whole[key], life.born, max(life.backward_uses))

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
            size = self._local(version.value, version.target).num_bytes / GB
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
        """A gradient at rest lives from when it is made until the optimizer has used it."""
        graph, fold, storages = self.space.graph, self.space.fold, self.result.storages
        positions = {result: i for i, node in enumerate(graph.nodes) for result in node.results}
        for param, gradient in graph.gradients.items():
            born = positions[gradient]
            last = max((positions[gradient], *graph.users.get(gradient, ())))
            start = last + 1 if storages.roots[gradient] in storages.backward else born
            items.add(("gradient", fold.key(param)), self._bytes_made(fold.key(param)), start, len(graph.nodes))

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
