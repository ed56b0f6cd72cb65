"""Fates as numbers of layers: of the L copies of a storage, how many are kept, recomputed, moved away or dropped.

Equations, per storage v with L copies and its classes c of equal (local bytes, seconds to make it):
  sum_k n[v, k] = L,  n integer                                    (`_counts`)
  sum_c phi[v, k, c] = n[v, k] / L                                 (`_shares`)
  sum_k phi[v, k, c] = sum of choices in c                         (`_shares`)
  n[v, recompute] / L + n[u, drop] / L' <= 1 + k / L for every parent u of v, which has L' copies and stands k layers
  before v                                                       (`chain`)
That is sound because recomputed layers are laid out first and dropped ones last, so that no layer is recomputed from
one that is dropped. So the last layer is made again, in class c, only where all are:
  z[v, c] >= sum of L phi[v, k, c] over such k - (L - 1) sum of choices in c     (`_last_again`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shardwright.ir import Fate, Layout, TensorType, Tier, local_shape
from shardwright.passes.copies import buffer_bytes
from shardwright.planner.flows import Flows, Terms, add_terms
from shardwright.planner.fold import NO_GROUP
from shardwright.planner.storages import Life, Storages

__all__ = ["AGAIN", "FATES", "MOVED", "FateChoice", "FateOptions", "State", "build_fates"]

GB = 1e9


class State(StrEnum):
    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    """Moved to the host."""
    SPILL = "spill"
    """Moved to disk: offloaded as well, in a plan's words."""
    DROP = "drop"
    """Freed in forward; only for what backward does not read itself."""


MOVED: Final = {State.OFFLOAD: Tier.HOST, State.SPILL: Tier.DISK}
"""States in which a copy waits for backward, and where."""
FATES: Final = {State.KEEP: Fate.KEEP, State.RECOMPUTE: Fate.RECOMPUTE, **dict.fromkeys(MOVED, Fate.OFFLOAD)}
"""States as a plan says them: what is moved is offloaded, wherever to; of what is dropped it says nothing."""
AGAIN: Final = (State.RECOMPUTE, *MOVED)
"""States in which backward makes or fetches the storage anew."""


@dataclass(frozen=True, slots=True)
class FateOptions:
    """What may be done at all."""

    recompute: bool = True
    offload: bool = False
    spill_host_bytes: int = 0
    """Host memory that buffers may take through which storages go to disk; 0: none goes there."""
    smallest_offload_bytes: int = 0
    """Of one local storage that is moved."""
    smallest_bytes: int = 0
    """Storages whose copies are smaller than this all together are kept."""


@dataclass(frozen=True)
class FateChoice:
    """Variables of one storage."""

    storage: str
    multiplicity: int
    counts: Mapping[State, int]
    """State to the integer variable."""
    shares: Mapping[State, tuple[Terms, ...]]
    """State to the share of each class that is in it."""
    class_bytes: tuple[int, ...]
    class_seconds: tuple[float, ...]
    last_again: tuple[Terms, ...]
    """Per class: 1 where even the last layer's copy is made again, of that class."""
    last_recomputed: Terms
    """1 where even the last layer's copy is recomputed."""

    def layer_terms(self, last: bool) -> tuple[Terms, Terms]:
        """GB kept and GB made again of one copy: of the last layer's, or of another's on average."""
        kept, again = self.bytes_terms(State.KEEP), self.bytes_terms(*AGAIN)
        if self.multiplicity == 1:
            return kept, again
        last_again = self._gigabytes(self.last_again)
        # What is dropped comes after what is kept: where there may be any, the last layer's copy is not known.
        last_kept = kept if State.DROP in self.counts else add_terms(add_terms(dict(kept), again), last_again, -1.0)
        if last:
            return last_kept, last_again
        return self._others(kept, last_kept), self._others(again, last_again)

    def _others(self, average: Terms, last: Terms) -> Terms:
        num_others = self.multiplicity - 1
        return add_terms(add_terms({}, average, self.multiplicity / num_others), last, -1.0 / num_others)

    def bytes_terms(self, *states: State) -> Terms:
        """GB of one copy, averaged over the layers, in these states."""
        terms: Terms = {}
        for state in states:
            add_terms(terms, self._gigabytes(self.shares.get(state, ())))
        return terms

    def _gigabytes(self, shares: tuple[Terms, ...]) -> Terms:
        """Of shares of the classes."""
        terms: Terms = {}
        for share, size in zip(shares, self.class_bytes, strict=False):
            add_terms(terms, share, size / GB)
        return terms

    def seconds_terms(self, state: State) -> Terms:
        terms: Terms = {}
        for share, seconds in zip(self.shares.get(state, ()), self.class_seconds, strict=False):
            add_terms(terms, share, seconds)
        return terms


@dataclass
class _Builder:
    flows: Flows
    storages: Storages
    lives: Mapping[str, Life]
    options: FateOptions
    found: dict[str, FateChoice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The caller holds these until the step ends: there is nothing to free.
        self._returned = {self.storages.roots.get(value, value) for value in self.flows.space.targets}
        self._members = self.flows.space.fold.members()

    def add(self, storage: str, life: Life, wanted: bool) -> None:
        unit = self.flows.space.units[self.flows.space.unit_of[storage]]
        states = self._states(storage, life, wanted)
        if len(states) < 2:
            return
        model, copies = self.flows.model, unit.multiplicity
        counts = {state: model.variable(copies, integer=True) for state in states}
        model.row(dict.fromkeys(counts.values(), 1.0), copies, copies)
        classes = self._classes(storage)
        shares = {state: tuple({model.variable(): 1.0} for _ in classes) for state in states}
        for state, variable in counts.items():
            row: Terms = {variable: -1.0 / copies}
            for share in shares[state]:
                add_terms(row, share)
            model.row(row, 0.0, 0.0)
        for number, indicator in enumerate(classes.values()):
            row = add_terms({}, indicator, -1.0)
            for state in states:
                add_terms(row, shares[state][number])
            model.row(row, 0.0, 0.0)
        sizes, seconds = zip(*classes, strict=True)
        last = tuple(
            self._last_again(copies, [shares[s][i] for s in states if s in AGAIN], indicator)
            for i, indicator in enumerate(classes.values())
        )
        recomputed = self._last_recomputed(copies, counts, last)
        self.found[storage] = FateChoice(storage, copies, counts, shares, sizes, seconds, last, recomputed)

    def _last_again(self, copies: int, again: Sequence[Terms], indicator: Terms) -> Terms:
        if copies == 1:
            return {variable: 1.0 for share in again for variable in share}
        model = self.flows.model
        last = model.variable()
        row = add_terms({last: 1.0}, indicator, copies - 1.0)
        for share in again:
            add_terms(row, share, -copies)
        model.row(row, 0.0)
        return {last: 1.0}

    def _last_recomputed(self, copies: int, counts: Mapping[State, int], again: Sequence[Terms]) -> Terms:
        if State.RECOMPUTE not in counts:
            return {}
        if not any(state in counts for state in MOVED):
            return {variable: 1.0 for terms in again for variable in terms}
        if copies == 1:
            return {counts[State.RECOMPUTE]: 1.0}
        last = self.flows.model.variable()
        self.flows.model.row({last: 1.0, counts[State.RECOMPUTE]: -1.0}, 1.0 - copies)
        return {last: 1.0}

    def _states(self, storage: str, life: Life, wanted: bool) -> tuple[State, ...]:
        space = self.flows.space
        if not (life.backward_uses or wanted) or storage in self._returned:
            return ()
        unit = space.units[space.unit_of[storage]]
        smallest = min(self._local_bytes(storage, layout) for layout in unit.layouts_of(storage))
        largest = max(self._local_bytes(storage, layout) for layout in unit.layouts_of(storage))
        if largest * unit.multiplicity < self.options.smallest_bytes:
            return (State.KEEP,)
        states = [State.KEEP]
        if self.options.recompute and not life.crosses and not life.random:
            states.append(State.RECOMPUTE)
        if life.backward_uses and smallest >= self.options.smallest_offload_bytes:
            states.extend([State.OFFLOAD] if self.options.offload else [])
            states.extend([State.SPILL] if buffer_bytes([largest]) <= self.options.spill_host_bytes else [])
        if not life.backward_uses:
            states.append(State.DROP)
        return tuple(states)

    def _local_bytes(self, value: str, layout: Layout) -> int:
        space = self.flows.space
        whole = space.graph.types[value]
        return TensorType(whole.dtype, local_shape(whole.shape, layout, space.mesh)).num_bytes

    def _classes(self, storage: str) -> dict[tuple[int, float], Terms]:
        """(local bytes, seconds of its operator) to the choices that make it so."""
        space = self.flows.space
        unit = space.units[space.unit_of[storage]]
        node = next(i for i, n in enumerate(unit.nodes) if storage in n.results)
        found: dict[tuple[int, float], Terms] = {}
        for variable, choice, layout in zip(
            self.flows.choices[unit.index], unit.choices, unit.layouts_of(storage), strict=True
        ):
            key = (self._local_bytes(storage, layout), choice.seconds[node])
            found.setdefault(key, {})[variable] = 1.0
        return found

    def chain(self) -> None:
        """Nothing is recomputed from what was dropped; results of one operator are recomputed together."""
        model = self.flows.model
        siblings: dict[str, FateChoice] = {}
        for storage, choice in self.found.items():
            again = choice.counts.get(State.RECOMPUTE)
            if again is None:
                continue
            for parent, distance in self._parents(storage):
                dropped = self.found.get(parent)
                if dropped is not None and State.DROP in dropped.counts:
                    shares = {again: 1.0 / choice.multiplicity, dropped.counts[State.DROP]: 1.0 / dropped.multiplicity}
                    model.row(shares, upper=1.0 + distance / choice.multiplicity)
            first = siblings.setdefault(self.flows.space.graph.producers[storage].name, choice)
            if first is not choice:
                model.row({again: 1.0, first.counts[State.RECOMPUTE]: -1.0}, 0.0, 0.0)

    def _parents(self, storage: str) -> list[tuple[str, int]]:
        """Representatives of what the layers of `storage` are made from, and how many layers before it those stand: the
        first layer reads from outside what the others read from the one before."""
        fold, found = self.flows.space.fold, dict[tuple[str, int], None]()
        for member in self._members.get(storage, (storage,)):
            for parent in self.lives[member].parents:
                inside = fold.group(parent) != NO_GROUP and fold.group(parent) == fold.group(member)
                found[fold.key(parent), fold.layer(member) - fold.layer(parent) if inside else 0] = None
        return list(found)


def build_fates(
    flows: Flows, storages: Storages, wanted: frozenset[str], options: FateOptions
) -> dict[str, FateChoice]:
    """Fate variables of every storage that has a choice, by representative. `wanted`: what recomputation may read."""
    builder = _Builder(flows, storages, storages.forward, options)
    for storage, life in storages.forward.items():
        if flows.space.fold.key(storage) == storage:
            builder.add(storage, life, storage in wanted)
    builder.chain()
    return builder.found
