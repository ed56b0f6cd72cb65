"""Names folded over equal layers: what is decided once for a class of layers."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.ir import Graph, InputKind
from shardwright.passes.repeats import RepeatClass, find_repeats, members

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
    """The fold over the classes of equal layers that the graph has, but for layers of a single matrix: of two such in a
    row the best is to split one by columns and the other by rows."""
    classes = [found for found in find_repeats(graph) if _num_matrices(graph, found) != 1]
    places = members(classes)
    keys = {name: classes[place.class_number].values[0][place.position] for name, place in places.items()}
    groups = {name: place.class_number for name, place in places.items()}
    return Fold(keys, groups, {name: place.layer for name, place in places.items()})


def _num_matrices(graph: Graph, found: RepeatClass) -> int:
    """Parameters of one layer with two dims or more."""
    params = set(graph.inputs_of(InputKind.PARAM, InputKind.FROZEN))
    return sum(name in params and len(graph.types[name].shape) > 1 for name in found.values[0])
