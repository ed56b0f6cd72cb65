"""Nested inputs and outputs of a model: taken apart into leaves with readable paths, and put together again.

Containers are lists, tuples (named ones too), mappings (Hugging Face's ModelOutput too) and dataclasses; everything
else is a leaf. Paths read as in Python, shortened: `.logits`, `0`, `.hidden_states.1`; a bare leaf has the path "".
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeAlias

__all__ = ["Key", "KeyPath", "Leaf", "format_path", "leaves", "lookup", "map_leaves"]


@dataclass(frozen=True, slots=True)
class Key:
    """One step down."""

    kind: str
    """`index` of a sequence, `item` of a mapping, `attribute` of a dataclass or named tuple."""
    value: int | str

    def of(self, parent: object) -> object:
        """The child of `parent` under this key."""
        if self.kind == "attribute":
            return getattr(parent, str(self.value))
        return parent[self.value]  # type: ignore[index]


KeyPath: TypeAlias = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """Stands in a template for the tensor of that number."""

    number: int


def leaves(tree: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every leaf with the keys that lead to it, in the order in which containers hold them."""
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children:
        yield from leaves(child, (*path, key))


def map_leaves(tree: object, change: Callable[[KeyPath, object], object], path: KeyPath = ()) -> object:
    """The same containers with every leaf replaced."""
    children = _children(tree)
    if children is None:
        return change(path, tree)
    return _rebuilt(tree, [(key, map_leaves(child, change, (*path, key))) for key, child in children])


def lookup(tree: object, path: KeyPath) -> object:
    """The part of `tree` that `path` leads to."""
    for key in path:
        tree = key.of(tree)
    return tree


def format_path(path: KeyPath) -> str:
    """
    >>> format_path((Key("item", "hidden_states"), Key("index", 1)))
    '.hidden_states.1'
    """
    text = "".join(f".{key.value}" for key in path)
    return text.removeprefix(".") if path and path[0].kind == "index" else text


def _children(tree: object) -> list[tuple[Key, object]] | None:
    if isinstance(tree, Mapping):
        return [(Key("item", key), child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(Key("attribute", name), child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, list | tuple):
        return [(Key("index", position), child) for position, child in enumerate(tree)]
    if is_dataclass(tree) and not isinstance(tree, type | Leaf):
        return [(Key("attribute", field.name), getattr(tree, field.name)) for field in fields(tree) if field.init]
    return None


def _rebuilt(tree: object, children: list[tuple[Key, object]]) -> object:
    if type(tree) is dict:
        return {key.value: child for key, child in children}
    if isinstance(tree, Mapping):
        # A subclass may need more than its items (defaultdict's factory, ModelOutput's attributes): assign to a copy.
        result = copy.copy(tree)
        for key, child in children:
            result[key.value] = child  # type: ignore[index]
        return result
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        make: Callable[..., object] = type(tree)
        return make(*(child for _, child in children))
    if isinstance(tree, list):
        return [child for _, child in children]
    if isinstance(tree, tuple):
        return tuple(child for _, child in children)
    return replace(tree, **{str(key.value): child for key, child in children})  # type: ignore[type-var]
