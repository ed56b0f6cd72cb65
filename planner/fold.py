"""Names folded over equal layers: what is decided once for a class of layers."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NO_GROUP", "Fold"]

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

    def members(self) -> Mapping[str, tuple[str, ...]]:
        """Representative to all it stands for, by layer, ascending; only of classes."""
        found: dict[str, list[str]] = {}
        for name, key in self.keys.items():
            found.setdefault(key, []).append(name)
        return {key: tuple(sorted(names, key=lambda n: self.layers[n])) for key, names in found.items()}
