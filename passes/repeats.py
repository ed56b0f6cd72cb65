"""Repeated layers: which parts of a captured graph are the same layer over and over.

Needs a captured graph. Gives classes of structurally equal layers, so that whatever is decided for one can be decided
for all. A layer is what a module path with an integer segment holds (`model.layers.3.…`, `h.0.…`): the outermost
integer by which a class of at least two is found. Nothing else about a name counts.

Two layers are equal when they hold the same inputs and the same nodes in the same order: operator, constant arguments,
types, phase, and for every operand where in the layer it is made, or which of the values from outside it is (numbered
by first use). Where gradients and new buffers stand counts too. A layer that differs, as first and last ones may, is
outside the class.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from shardwright.ir import Graph, Input, InputKind, Node, Phase, substitute

__all__ = ["Member", "RepeatClass", "find_repeats", "members"]

Key = tuple[str, int]
"""A layer: the path before its integer, and the integer."""
Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class RepeatClass:
    """Structurally equal layers."""

    path: str
    """`model.layers.*`."""
    layers: tuple[int, ...]
    """Their integers, ascending."""
    values: tuple[tuple[str, ...], ...]
    """Per layer all its values, inputs first: what stands at one position in every layer is the same value of it."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a value stands."""

    class_number: int
    """Index into what `find_repeats` gives."""
    position: int
    """Index into each entry of `RepeatClass.values`."""
    layer: int


def members(classes: Sequence[RepeatClass]) -> dict[str, Member]:
    """Value name to its place; values outside all classes are missing."""
    return {
        name: Member(number, position, layer)
        for number, repeat in enumerate(classes)
        for layer, names in zip(repeat.layers, repeat.values, strict=True)
        for position, name in enumerate(names)
    }


def find_repeats(graph: Graph) -> tuple[RepeatClass, ...]:
    """The classes of a graph, those that begin first first."""
    paths = _paths(graph)
    roles = _roles(graph)
    found: list[RepeatClass] = []
    taken: set[str] = set()
    for depth in range(max((len(_keys(path)) for path in set(paths.values())), default=0)):
        classes = list(_classes(graph, _layers(graph, paths, depth, taken), roles))
        found += classes
        taken.update(name for one in classes for names in one.values for name in names)
    order = {name: number for number, name in enumerate(_all_values(graph))}
    return tuple(sorted(found, key=lambda one: order[one.values[0][0]]))


def _all_values(graph: Graph) -> Iterator[str]:
    yield from (given.name for given in graph.inputs)
    for node in graph.nodes:
        yield from node.results


def _roles(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Returned values to what they are handed back as: whose gradient, whose new value, or an output."""
    roles: dict[str, tuple[str, ...]] = dict.fromkeys(graph.outputs.values(), ("output",))
    for name, value in (*graph.gradients.items(), *graph.updates.items()):
        roles[value] = (*roles.get(value, ()), name)
    return roles


def _keys(path: str) -> list[Key]:
    """Every layer a path lies in, outermost first."""
    segments = path.split(".")
    return [(".".join(segments[:i]), int(s)) for i, s in enumerate(segments) if s.isdecimal()]


def _paths(graph: Graph) -> dict[str, str]:
    """Values to module paths. Nodes of backward without one (sums of gradients) follow their latest operand."""
    held = (InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER)
    paths = {name: name for name in graph.inputs_of(*held)}
    made = {result: position for position, node in enumerate(graph.nodes) for result in node.results}
    for node in graph.nodes:
        path = node.module
        if not path and node.phase is Phase.BACKWARD:
            latest = max((name for name in node.operands if name in made), key=made.__getitem__, default="")
            path = paths.get(latest, "")
        paths.update(dict.fromkeys(node.results, path))
    return paths


@dataclass
class _Layer:
    """What lies under one key, in order."""

    key: Key
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def values(self) -> tuple[str, ...]:
        return (*(i.name for i in self.inputs), *(result for node in self.nodes for result in node.results))


def _layers(graph: Graph, paths: Mapping[str, str], depth: int, taken: set[str]) -> dict[Key, _Layer]:
    """Layers by the integer at `depth` of their path, without what is already in a class."""
    keys = {path: _keys(path)[depth : depth + 1] for path in set(paths.values())}
    found: dict[Key, _Layer] = {}
    for given in graph.inputs:
        for key in keys[paths[given.name]] if given.name in paths and given.name not in taken else ():
            found.setdefault(key, _Layer(key)).inputs.append(given)
    for node in graph.nodes:
        for key in keys[paths[node.name]] if node.results and node.name not in taken else ():
            found.setdefault(key, _Layer(key)).nodes.append(node)
    return found


def _classes(graph: Graph, layers: Mapping[Key, _Layer], roles: Mapping[str, tuple[str, ...]]) -> Iterator[RepeatClass]:
    """Group layers of one path by what they hold; at least two make a class."""
    groups: dict[tuple[str, Signature], list[_Layer]] = {}
    for (prefix, _), layer in layers.items():
        groups.setdefault((prefix, _signature(graph, layer, roles)), []).append(layer)
    for (prefix, _), group in groups.items():
        if len(group) > 1:
            group.sort(key=lambda layer: layer.key[1])
            path = f"{prefix}.*" if prefix else "*"
            yield RepeatClass(path, tuple(layer.key[1] for layer in group), tuple(layer.values for layer in group))


def _signature(graph: Graph, layer: _Layer, roles: Mapping[str, tuple[str, ...]]) -> Signature:
    """Equal for equal layers. Values are numbered: inside by position, outside by first use from -1 down."""
    numbers = {name: number for number, name in enumerate(layer.values)}
    inside = len(numbers)
    records: list[object] = [(given.kind, graph.types[given.name]) for given in layer.inputs]
    for node in layer.nodes:
        operands = tuple(numbers.setdefault(name, inside - len(numbers) - 1) for name in node.operands)
        constants = (
            substitute(node.args, repeat("")),
            tuple((key, substitute(arg, repeat(""))) for key, arg in node.kwargs),
        )
        types = tuple(graph.types[name] for name in (*node.operands, *node.results))
        handed_back = tuple(tuple(numbers.get(r, r) for r in roles.get(name, ())) for name in node.results)
        records.append((node.op, constants, operands, types, len(node.results), node.phase, handed_back))
    return tuple(records)
