"""Names folded over equal layers: what is decided once for a class of layers."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.ir import Graph
from shardwright.passes.repeats import find_repeats, members

__all__ = ["NO_GROUP", "Fold", "fold_of"]

NO_GROUP = -1


@dataclass(frozen=True)
class Fold:
    """Representatives: the same value of the first layer of the class; values outside a class stand for themselves."""

    keys: Mapping[str, str]
    """Name to representative, for values in a class."""
    groups: Mapping[str, int]
    """Name to class number, for values in a class."""
    layers: Mapping[str, int]
    """Name to layer index, for values in a class."""

    def key(self, name: str) -> str:
        return self.keys.get(name, name)

    def group(self, name: str) -> int:
        return self.groups.get(name, NO_GROUP)

    def layer(self, name: str) -> int:
        return self.layers.get(name, NO_GROUP)

    def last_layers(self) -> frozenset[str]:
        """All names in the last layer of their class."""
        return frozenset(names[-1] for names in self.members().values())

    def members(self) -> Mapping[str, tuple[str, ...]]:
        """Representative to all it stands for, by layer, ascending; only of classes."""
        found: dict[str, list[str]] = {}
        for name, key in self.keys.items():
            found.setdefault(key, []).append(name)
        return {key: tuple(sorted(names, key=lambda n: self.layers[n])) for key, names in found.items()}


def fold_of(graph: Graph) -> Fold:
    """The fold over all classes of equal layers that the graph has."""
    classes = find_repeats(graph)
    places = members(classes)
    keys = {name: classes[place.class_number].values[0][place.position] for name, place in places.items()}
    groups = {name: place.class_number for name, place in places.items()}
    return Fold(keys, groups, {name: place.layer for name, place in places.items()})
