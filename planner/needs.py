"""When backward needs a forward storage: for itself, and for recomputing others from it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.planner.space import Space
from shardwright.planner.storages import Life, Storages

__all__ = ["Needs", "find_needs"]

NEVER = 1 << 60


@dataclass(frozen=True)
class Needs:
    """Positions in backward; conservative where it depends on the fates of others."""

    first: Mapping[str, int]
    """Earliest position that may need the storage."""
    last: Mapping[str, int]
    """Latest such position, or -1 where backward never needs it."""
    wanted: frozenset[str]
    """Storages that recomputing another may read."""


def find_needs(space: Space, storages: Storages) -> Needs:
    """A storage is needed where backward reads it, and where a child that may be recomputed is first needed."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    wanted = set()
    for name, life in reversed(list(storages.forward.items())):
        children = [
            first[child] for child in life.children if _recomputable(storages.forward[child]) and first[child] < NEVER
        ]
        first[name] = min((*life.backward_uses, *children), default=NEVER)
        last[name] = max((*life.backward_uses, *children), default=-1)
        if children:
            wanted.add(name)
    return Needs(first, last, frozenset(wanted))


def _recomputable(life: Life) -> bool:
    return not life.crosses and not life.random
