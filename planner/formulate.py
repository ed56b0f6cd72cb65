"""The one problem: layouts, fates and tiers under the peak of memory, as a mixed-integer linear program.

Objective (ms), added by:
  compute of every unit and every layer                               `_compute`
  redistributions of activations, in full                             `_transfers`
  gathers of parameters and reductions of gradients beyond what       `_windows`
    their region's compute hides; all of them also at 1e-3
  recomputed operators and their redistributions                      `_recompute`
  copies to and from host, and disk, beyond what compute hides        `_copies`
  the optimizer step, on the device or on the host; on the host       `_states`
    beyond what backward hides, where the script leaves gradients alone
  copies of parameters that lie on the host, as those of activations  `_lie_on_host`
Rows: flows and one-hot choices (`flows`), fates (`fates`), memory per position (`memory_items`), capacity of host and
disk (`_capacities`).
Figures of this objective are for choosing; what a plan predicts comes from replay.
"""

import math
from dataclasses import dataclass, field

from shardwright.ir import DTYPE_BYTES, Clip, InputKind, Layout, Partial, Phase, Replicate, TensorType, Tier
from shardwright.passes.copies import buffer_bytes, lost_seconds, slot_bytes
from shardwright.passes.step_prices import StepPrices
from shardwright.planner.fates import GB, MOVED, FateChoice, FateOptions, State, build_fates
from shardwright.planner.flows import Terms, Version, add_terms, build_flows, is_parameter
from shardwright.planner.formulation import Formulation, Machine
from shardwright.planner.linear import LinearModel
from shardwright.planner.memory_items import add_memory_rows
from shardwright.planner.needs import Needs, find_needs
from shardwright.planner.space import AT_REST, Space, Unit
from shardwright.planner.storages import find_storages
from shardwright.planner.transfers import Transfers

__all__ = ["formulate"]

MS = 1e3
HIDDEN_WEIGHT = 1e-3
"""What hidden traffic costs, so that no byte moves for nothing."""
PEAK_WEIGHT = 1e-5
"""ms per GB: of equal plans the smaller."""


def formulate(space: Space, machine: Machine, options: FateOptions) -> Formulation:
    """Build the program; the budget is the upper bound of `Formulation.peak`, set when it is solved."""
    model = LinearModel()
    flows = build_flows(space, model)
    storages = find_storages(space.graph, space.fold.layers)
    needs = find_needs(space, storages, options.offload)
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

    def __post_init__(self) -> None:
        self.space, self.model = self.result.space, self.result.model
        self.flows, self.fates = self.result.flows, self.result.fates
        self.machine = self.result.machine
        self.transfers = Transfers(self.space.mesh, self.machine.prices)
        self.cost: Terms = {}
        """Of one forward and backward."""
        self.step_cost: Terms = {}
        """Of the optimizer, once a step."""

    def write(self) -> None:
        self._compute()
        self._keep_copies()
        self._transfers()
        self._recompute()
        self._windows()
        static = self._states()
        self._copies()
        self._capacities()
        add_memory_rows(self.result, self.needs, static)
        for variable, coefficient in self.cost.items():
            self.model.cost[variable] += coefficient * MS * self.machine.accumulate
        for variable, coefficient in self.step_cost.items():
            self.model.cost[variable] += coefficient * MS

    def _compute(self) -> None:
        for unit in self.space.units:
            terms: Terms = {}
            for variable, choice in zip(self.flows.choices[unit.index], unit.choices, strict=True):
                terms[variable] = sum(choice.seconds) * unit.multiplicity
            add_terms(self.cost, terms)
            add_terms(self.region_compute.setdefault(unit.region, {}), terms)

    def _keep_copies(self) -> None:
        """A redistributed copy may be kept, in some layers, when forward and backward want the same one."""
        for key, (forward, backward) in self._wanted_twice().items():
            if forward.value not in self.result.kept_copies:
                self.result.kept_copies[forward.value] = self.model.variable(forward.multiplicity, integer=True)
            share = self.model.variable()
            for version in (forward, backward):
                self.model.row(add_terms({share: 1.0}, version.terms, -1.0), upper=0.0)
            self.result.kept_shares[key] = share
        for value, count in self.result.kept_copies.items():
            row: Terms = {count: -1.0 / self._unit(value).multiplicity}
            for (name, _, _), share in self.result.kept_shares.items():
                if name == value:
                    row[share] = 1.0
            self.model.row(row, 0.0, 0.0)

    def _wanted_twice(self) -> dict[tuple[str, Layout, Layout], tuple[Version, Version]]:
        """Copies that both phases may want, of every layer alike, and that ranks gather or sum for."""
        found: dict[tuple[str, Layout, Layout], dict[Phase, list[Version]]] = {}
        for version in self.flows.versions:
            by_phase = found.setdefault((version.value, version.source, version.target), {})
            by_phase.setdefault(version.phase, []).append(version)
        pairs = {}
        for key, by_phase in found.items():
            both = [version for versions in by_phase.values() for version in versions]
            if (
                len(by_phase) == len(both) == 2
                and _gathers_or_sums(*key[1:])
                and all(v.readers and v.multiplicity == self._unit(v.value).multiplicity for v in both)
            ):
                pairs[key] = (by_phase[Phase.FORWARD][0], by_phase[Phase.BACKWARD][0])
        return pairs

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
        self.host_seconds: Terms = {}
        self.fetch_seconds: dict[Phase, Terms] = {phase: {} for phase in Phase}
        self.staging = self.model.variable(math.inf)
        for unit in self.space.units:
            if unit.kind is None:
                continue
            name, copies = unit.values[0], unit.multiplicity
            on_host, lying = Terms(), Terms()
            for variable, (layout,) in zip(
                self.flows.choices[unit.index], (c.layouts for c in unit.choices), strict=True
            ):
                local = self.result.local(name, layout)
                add_terms(static, {variable: local.num_bytes * copies / GB})
                if unit.kind is InputKind.PARAM:
                    moved = self._state(unit, variable, local, static)
                    add_terms(on_host, moved)
                    if self.machine.clip is Clip.NONE:
                        add_terms(lying, self._lie_on_host(unit, moved, local, static))
                elif unit.kind is InputKind.FROZEN:
                    add_terms(lying, self._lie_on_host(unit, {variable: 1.0}, local, static))
            for shares, counts in ((on_host, self.result.host), (lying, self.result.host_parameters)):
                if shares:
                    counts[name] = self.model.variable(copies, integer=True)
                    self.model.row(shares | {counts[name]: -1.0 / copies}, 0.0, 0.0)
        self._pay_host_seconds()
        return static

    def _pay_host_seconds(self) -> None:
        """In full where the host steps after backward; else what backward does not hide."""
        if self.machine.clip is not Clip.NONE:
            add_terms(self.step_cost, self.host_seconds)
        elif self.host_seconds:
            lost = add_terms({}, self.host_seconds, 1.0 - self.machine.cluster.host.overlap)
            self._hide(self.host_seconds, lost, Phase.BACKWARD)

    def _hide(self, seconds: Terms, lost: Terms, phase: Phase) -> None:
        """What compute loses anyway is paid, and exposed >= seconds - lost - compute of the phase; hidden ones cost a
        little, so that nothing moves for nothing."""
        exposed = self.model.variable(math.inf)
        row = add_terms(add_terms({exposed: 1.0}, seconds, -MS), lost, MS)
        for region, compute in self.region_compute.items():
            if region[0] is phase:
                add_terms(row, compute, MS)
        self.model.row(row, 0.0)
        self.cost[exposed] = 1.0 / MS
        add_terms(self.cost, lost)
        add_terms(self.cost, seconds, HIDDEN_WEIGHT)

    def _state(self, unit: Unit, variable: int, local: TensorType, static: Terms) -> Terms:
        """The share of the layers whose optimizer state is on the host, where it can be: their layout is this one."""
        steps, copies = StepPrices(self.machine.prices, self.machine.optimizer), unit.multiplicity
        state_bytes = self.machine.optimizer.state_bytes(local.num_elements, DTYPE_BYTES[local.dtype])
        on_device = steps.device_seconds((local,))
        add_terms(static, {variable: state_bytes * copies / GB})
        add_terms(self.step_cost, {variable: on_device * copies})
        if not self.machine.host_bytes or state_bytes < self.machine.cluster.host.smallest_offload_bytes:
            return {}
        share = self.model.variable()
        self.model.row({share: 1.0, variable: -1.0}, upper=0.0)
        add_terms(static, {share: -state_bytes * copies / GB})
        add_terms(self.host_terms, {share: state_bytes * copies / GB})
        add_terms(self.step_cost, {share: -on_device * copies})
        add_terms(self.host_seconds, {share: steps.host_seconds(local).total * copies})
        self._stage(share, local)
        if self.machine.clip is Clip.NONE:
            self.result.sent_gradients.setdefault(unit.values[0], {})[share] = local.num_bytes / GB
        return {share: 1.0}

    def _lie_on_host(self, unit: Unit, moved: Terms, local: TensorType, static: Terms) -> Terms:
        """The share of the layers that lie on the host and are fetched by each phase that reads them; those that are
        trained are stepped there, so their state is there too (`moved`)."""
        name, copies = unit.values[0], unit.multiplicity
        smallest = self.machine.cluster.host.smallest_offload_bytes
        if not (moved and self.machine.host_bytes) or local.num_bytes < smallest:
            return {}
        phases = self._reading_phases(name)
        if not phases:
            return {}
        share, size = self.model.variable(), local.num_bytes / GB
        self.model.row(add_terms({share: 1.0}, moved, -1.0), upper=0.0)
        add_terms(static, {share: -size * copies})
        add_terms(self.host_terms, {share: size * copies})
        self.result.fetched.setdefault(name, {})[share] = size
        seconds = self.machine.prices.copy_seconds(local.num_bytes, Tier.HOST, True)
        for phase in phases:
            add_terms(self.fetch_seconds[phase], {share: seconds * copies})
        if unit.kind is InputKind.PARAM:
            staged = StepPrices(self.machine.prices, self.machine.optimizer).host_seconds(local)
            add_terms(self.host_seconds, {share: -(staged.value_out + staged.value_in) * copies})
        return {share: 1.0}

    def _reading_phases(self, parameter: str) -> list[Phase]:
        edges = self.space.edges
        reading = {edge.phase for edge in edges if edge.value == parameter and edge.slot != AT_REST}
        return [phase for phase in Phase if phase in reading]

    def _stage(self, share: int, local: TensorType) -> None:
        """A parameter with state on the host passes through there: one after the other, so the largest counts."""
        is_any = self.model.variable(1, integer=True)
        self.model.row({share: 1.0, is_any: -1.0}, upper=0.0)
        staged_bytes = self.machine.optimizer.host_staged_bytes(local.num_elements, DTYPE_BYTES[local.dtype])
        self.model.row({self.staging: 1.0, is_any: -staged_bytes / self.result.unit_bytes}, 0.0)

    def _copies(self) -> None:
        """Copies of activations hide behind compute of their phase, those of each tier by themselves: the host has a
        way out and one back, the disk either writes or reads, in forward or in backward. The rest stalls. Parameters
        come in on the way back, in both phases."""
        share = 1.0 - self.machine.cluster.host.overlap
        if fetches := self.fetch_seconds[Phase.FORWARD]:
            self._hide(fetches, add_terms({}, fetches, share), Phase.FORWARD)
        for state in MOVED:
            for phase in Phase:
                seconds, lost = self._copy_seconds(state, phase)
                if state is State.OFFLOAD and phase is Phase.BACKWARD:
                    add_terms(seconds, self.fetch_seconds[phase])
                    add_terms(lost, self.fetch_seconds[phase], share)
                if seconds:
                    self._hide(seconds, lost, phase)

    def _copy_seconds(self, state: State, phase: Phase) -> tuple[Terms, Terms]:
        """Of the copies, and of what compute loses to them."""
        prices, host = self.machine.prices, self.machine.cluster.host
        seconds, lost = Terms(), Terms()
        for fate in self.fates.values():
            for share, size in zip(fate.shares.get(state, ()), fate.class_bytes, strict=False):
                one = prices.copy_seconds(size, MOVED[state], phase is Phase.BACKWARD)
                add_terms(seconds, share, one * fate.multiplicity)
                add_terms(lost, share, lost_seconds(prices, host, size) * fate.multiplicity)
        return seconds, lost

    def _capacities(self) -> None:
        """What lies on the host, buffers of the disk included where something is spilled, while activations do and when
        the optimizer steps; and what lies on disk."""
        on_host, on_disk, at_step = add_terms({}, self.host_terms), Terms(), add_terms({}, self.host_terms)
        spilled: list[FateChoice] = []
        for fate in self.fates.values():
            add_terms(on_host, fate.bytes_terms(State.OFFLOAD), fate.multiplicity)
            for share, size in zip(fate.shares.get(State.SPILL, ()), fate.class_bytes, strict=False):
                add_terms(on_disk, share, slot_bytes(size) * fate.multiplicity / GB)
            spilled.extend([fate] if State.SPILL in fate.counts else [])
        if spilled:
            uses_disk = self.model.variable(1, integer=True)
            for fate in spilled:
                self.model.row({fate.counts[State.SPILL]: 1.0, uses_disk: -float(fate.multiplicity)}, upper=0.0)
            buffers = {uses_disk: buffer_bytes(size for fate in spilled for size in fate.class_bytes) / GB}
            add_terms(on_host, buffers)
            add_terms(at_step, buffers)
        if self.host_terms:
            add_terms(at_step, {self.staging: self.result.unit_bytes / GB})
        host_bytes, disk_bytes = self.machine.host_bytes, self.machine.disk_bytes
        for terms, limit in ((on_host, host_bytes), (at_step, host_bytes), (on_disk, disk_bytes)):
            if terms:
                units = GB / self.result.unit_bytes
                self.model.row(add_terms({}, terms, units), upper=limit / self.result.unit_bytes)


def _gathers_or_sums(source: Layout, target: Layout) -> bool:
    """Not so where a rank takes its part of what is whole, or ranks exchange parts."""
    moved = [(p, q) for p, q in zip(source, target, strict=True) if p != q]
    return any(q == Replicate() or isinstance(p, Partial) for p, q in moved)
