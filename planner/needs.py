"""When backward needs a forward storage: for itself, and for recomputing others from it.

Whether another is recomputed is known one by one for storages outside layers and of the last layer of a class
(`fates`). Of other layers whatever may be recomputed counts as recomputed; but where storages may leave the device, so
that the first layer may hold as much as the last, it counts as recomputed where the last is, but for what it is made
from outside its class.

Before a node runs, what it needs is made again, a storage after the other. So time goes on in steps: a step for every
node, and before it one for every storage that may have to be made again for it, in the order of forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.planner.fold import NO_GROUP
from shardwright.planner.space import Space
from shardwright.planner.storages import Life, Storages

__all__ = ["NEVER", "Need", "Needs", "find_needs"]

NEVER = 1 << 60
MOST_STARTS, FEWEST_STARTS = 6, 2
"""Nodes kept apart for which a storage may first be needed, in a small graph and in a large one."""
STARTS = 300
"""About how many of all storages: each is a step with a row of memory."""


@dataclass(frozen=True, slots=True)
class Need:
    """Steps of backward that need one storage."""

    first: int
    """The one at which it is made again in any case, if it is at all; NEVER where there is none."""
    last: int
    """The last that needs it in any case, or -1."""
    starts: tuple[int, ...]
    """At one of these it is made again, if at all; ascending, none after `first`."""
    asking: tuple[str, ...]
    """Storages that need it when they are recomputed, at the step at which they are made."""


@dataclass(frozen=True)
class Needs:
    of: Mapping[str, Need]
    """Only storages that backward may need; what is made from a storage stands before it."""
    wanted: frozenset[str]
    """Storages that recomputing another may read."""
    steps: tuple[int, ...]
    """Of every node, and of the optimizer."""

    def final(self, name: str) -> int:
        """The last step that may need the storage, or -1."""
        return max((self.of[name].last, *self.latest(name)[-1:])) if name in self.of else -1

    def latest(self, name: str) -> tuple[int, ...]:
        """Steps after `last` that may need the storage, ascending."""
        need = self.of[name]
        return tuple(sorted({step for child in need.asking for step in self.of[child].starts if step > need.last}))


def find_needs(space: Space, storages: Storages, moves: bool = False) -> Needs:
    """`moves`: whether storages may leave the device."""
    return _Finder(space, storages, moves).find()


@dataclass
class _Finder:
    space: Space
    storages: Storages
    moves: bool
    starts: dict[str, list[int]] = field(default_factory=dict)
    """Storage to the nodes for which it may first be needed, ascending."""
    certain: set[str] = field(default_factory=set)
    """Storages that are needed in any case, for the last of these nodes at the latest."""
    sure: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Storage to those made from it that count as recomputed."""
    asking: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fold, last_layers = self.space.fold, self.space.fold.last_layers()
        names = self.storages.forward
        self.known = {name for name in names if fold.group(name) == NO_GROUP or name in last_layers}
        self.most_starts = max(FEWEST_STARTS, min(MOST_STARTS, STARTS // max(len(self.known), 1)))
        first_layers = {name for name in names if fold.key(name) == name}
        self.known_in_layers = self.known | first_layers if self.moves else self.known

    def find(self) -> Needs:
        for name, life in reversed(list(self.storages.forward.items())):
            self._find_starts(name, life)
        steps, making = self._steps()
        found = {name: self._need(name, steps, making) for name in self.starts}
        wanted = frozenset(name for name in self.starts if self.sure[name] or self.asking[name])
        return Needs(found, wanted, steps)

    def _find_starts(self, name: str, life: Life) -> None:
        children = [c for c in life.children if c in self.starts and _recomputable(self.storages.forward[c])]
        asking = tuple(c for c in children if self._asks(name, c))
        sure = tuple(c for c in children if c not in asking)
        own = {*life.backward_uses, *(node for c in sure for node in self.starts[c])}
        if not own and not asking:
            return
        first = min(own, default=NEVER)
        sooner = {node for c in asking for node in self.starts[c] if node < first}
        self.starts[name] = _thinned(sorted(sooner | ({first} if own else set())), self.most_starts)
        self.certain.update([name] if own else [])
        self.sure[name], self.asking[name] = sure, asking

    def _asks(self, name: str, child: str) -> bool:
        """Whether the program knows if the child is recomputed from it. The first layer may be where the last is not:
        what it reads from outside is needed then, and dropped where it is not recomputed (`fates.chain`)."""
        is_inside = self.space.fold.group(name) == self.space.fold.group(child)
        return {name, child} <= (self.known_in_layers if is_inside else self.known)

    def _steps(self) -> tuple[tuple[int, ...], dict[tuple[str, int], int]]:
        """Of nodes; of making a storage for a node."""
        made: dict[int, list[str]] = {}
        for name in reversed(self.starts):
            for node in self.starts[name]:
                made.setdefault(node, []).append(name)
        steps: list[int] = []
        making: dict[tuple[str, int], int] = {}
        step = 0
        for node in range(self.storages.num_nodes + 1):
            for name in made.get(node, ()):
                making[name, node] = step
                step += 1
            steps.append(step)
            step += 1
        return tuple(steps), making

    def _need(self, name: str, steps: tuple[int, ...], making: Mapping[tuple[str, int], int]) -> Need:
        uses = [steps[node] for node in self.storages.forward[name].backward_uses]
        last = max((*uses, *(making[c, node] for c in self.sure[name] for node in self.starts[c])), default=-1)
        starts = tuple(making[name, node] for node in self.starts[name])
        return Need(starts[-1] if name in self.certain else NEVER, last, starts, self.asking[name])


def _thinned(starts: list[int], most: int) -> list[int]:
    """The first, and of the others those that come last: most storages are needed then."""
    return starts if len(starts) <= most else [starts[0], *starts[1 - most :]]


def _recomputable(life: Life) -> bool:
    return not life.crosses and not life.random
