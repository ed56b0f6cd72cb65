"""When backward needs a forward storage: for itself, and for recomputing others from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.planner.space import Space
from shardwright.planner.storages import Life, Storages

__all__ = ["Early", "Needs", "find_needs"]

NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Early:
    """A storage is needed earlier than usual when one of these is recomputed."""

    first: int
    children: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """Positions in backward; conservative where it depends on the fates of others."""

    first: Mapping[str, int]
    """Earliest position that needs the storage: for itself, and in a graph with equal layers, where fates are numbers
    of layers, for whatever may be recomputed from it."""
    last: Mapping[str, int]
    """Latest such position, or -1 where backward never needs it."""
    wanted: frozenset[str]
    """Storages that recomputing another may read."""
    early: Mapping[str, Early]
    """What recomputing others asks for beyond that, in a graph without equal layers: there a chain of operators would
    seem to need everything at the start of backward."""


def find_needs(space: Space, storages: Storages) -> Needs:
    """A storage is needed where backward reads it, and where a child that may be recomputed is first needed."""
    first: dict[str, int] = {}
    sooner: dict[str, int] = {}
    last: dict[str, int] = {}
    wanted = set()
    early: dict[str, Early] = {}
    for name, life in reversed(list(storages.forward.items())):
        children = [c for c in life.children if _recomputable(storages.forward[c]) and sooner[c] < NEVER]
        always = [first[c] for c in children if storages.has_layers]
        first[name] = min((*life.backward_uses, *always), default=NEVER)
        sooner[name] = min((first[name], *(sooner[c] for c in children)))
        last[name] = max((*life.backward_uses, *(first[c] for c in children if first[c] < NEVER)), default=-1)
        if children:
            wanted.add(name)
        asking = tuple(c for c in children if sooner[c] < first[name])
        if asking:
            early[name] = Early(sooner[name], asking)
            first[name] = min(first[name], last[name]) if last[name] >= 0 else first[name]
    return Needs(first, last, frozenset(wanted), early)


def _recomputable(life: Life) -> bool:
    return not life.crosses and not life.random
