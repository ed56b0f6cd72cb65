"""What a plan means per module: placements at rest, how activations are split, fates, bytes of one rank, seconds.

Needs a plan and its graph, neither torch nor a solver. Modules that do the same on the same shapes fold into one
class: numbers in their paths become `*`. Bytes are local (one rank) and summed over the modules of the class;
seconds are forward and backward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardwright.ir import (
    DTYPE_BYTES,
    Decisions,
    Fate,
    Graph,
    InputKind,
    Layout,
    Phase,
    TensorType,
    format_layout,
    local_shape,
    replicated,
)
from shardwright.passes.lifetimes import storage_roots
from shardwright.planner.module_seconds import Spent

__all__ = ["FateLayers", "ModuleClass", "Weight", "fold_path", "layer_runs", "local_bytes", "module_classes",
           "saved_storages"]  # fmt: skip

Layers = tuple[tuple[int, ...], ...]
Signature = tuple[tuple[str, tuple[TensorType, ...]], ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a class, and where it is at rest."""

    name: str
    """Within the module: `weight`."""
    layouts: Mapping[str, Layers]
    """Layout text to the layers that have it: one entry where all layers agree."""


@dataclass(frozen=True, slots=True)
class FateLayers:
    """One fate within a class."""

    fate: Fate
    num_values: int
    """How many kinds of saved values of the class have it in some layer."""
    layers: Layers
    """In which layers."""


@dataclass(frozen=True, slots=True)
class ModuleClass:
    """Modules that do the same and differ only in the numbers of their path."""

    path: str
    """`model.layers.*.mlp.up_proj`; `layers.{0,2}` where other modules share the pattern; the plain path where there
    is one module; "" at the top."""
    pattern: str
    """The folded path, also where there is one module."""
    layers: Layers
    """The numbers of each module's path, one tuple a module."""
    weights: tuple[Weight, ...]
    activation: str
    """Layout of what the module makes last in forward; "" where it makes nothing."""
    num_saved: int
    """Kinds of values that backward needs."""
    fates: tuple[FateLayers, ...]
    weight_bytes: int
    kept_bytes: int
    """Saved activations that stay on the device."""
    offloaded_bytes: int
    recomputed_bytes: int
    """What recomputing avoids holding."""
    spent: Spent | None
    """Forward and backward, all modules together; None where no timeline was given."""

    @property
    def num_modules(self) -> int:
        return len(self.layers)


def fold_path(path: str) -> tuple[str, tuple[int, ...]]:
    """Pattern and numbers.

    >>> fold_path("model.layers.3.mlp")
    ('model.layers.*.mlp', (3,))
    """
    parts = path.split(".")
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return ".".join("*" if part.isdigit() else part for part in parts), numbers


def layer_runs(layers: Iterable[tuple[int, ...]]) -> str:
    """Layers as people write them; a count where a path has several numbers.

    >>> layer_runs([(0,), (1,), (2,), (7,)])
    '0..2, 7'
    """
    distinct = sorted(set(layers))
    if any(len(layer) != 1 for layer in distinct):
        return str(len(distinct))
    runs: list[list[int]] = []
    for (number,) in distinct:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)


def local_bytes(graph: Graph, decisions: Decisions, name: str) -> int:
    """Bytes one rank holds of a value, dense."""
    tensor = graph.types[name]
    size = DTYPE_BYTES[tensor.dtype]
    for extent in local_shape(tensor.shape, layout_of(decisions, name), decisions.mesh):
        size *= extent
    return size


def layout_of(decisions: Decisions, name: str) -> Layout:
    """A value the plan does not name is whole on every rank."""
    return decisions.layouts.get(name, replicated(decisions.mesh))


def saved_storages(graph: Graph) -> tuple[str, ...]:
    """Values made in forward whose storage backward reads, by the value that made the storage, in order."""
    roots = storage_roots(graph)
    read = {roots[name] for node in graph.nodes if node.phase is Phase.BACKWARD for name in node.operands}
    forward = (result for node in graph.nodes if node.phase is Phase.FORWARD for result in node.results)
    return tuple(result for result in forward if roots[result] == result and result in read)


@dataclass
class _Gathered:
    """What is known of one class while modules are added."""

    paths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    weights: dict[str, dict[str, list[tuple[int, ...]]]] = field(default_factory=dict)
    activation: str = ""
    saved: dict[str, dict[Fate, list[tuple[int, ...]]]] = field(default_factory=dict)
    weight_bytes: int = 0
    held: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    spent: Spent = Spent()


class _Classes(dict[tuple[str, Signature], _Gathered]):
    """Classes by pattern and signature; asking for a module enters it."""

    def __init__(self, graph: Graph, glob: str | None) -> None:
        super().__init__()
        self.glob = glob
        self.signatures = _signatures(graph)

    def of(self, module: str) -> tuple[_Gathered, tuple[int, ...]] | None:
        """The class of a module and its numbers; None where the glob leaves the module out."""
        if self.glob is not None and not _matches(module, self.glob):
            return None
        pattern, layer = fold_path(module)
        gathered = self.setdefault((pattern, self.signatures.get(module, ())), _Gathered())
        gathered.paths.setdefault(module, layer)
        return gathered, layer


def _signatures(graph: Graph) -> Mapping[str, Signature]:
    """What makes modules equal: their own forward operators and weights, with types."""
    found: dict[str, list[tuple[str, tuple[TensorType, ...]]]] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            types = tuple(graph.types[result] for result in node.results)
            found.setdefault(node.module, []).append((node.op, types))
    for name in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN):
        module, _, own_name = name.rpartition(".")
        found.setdefault(module, []).append((own_name, (graph.types[name],)))
    return {module: tuple(items) for module, items in found.items()}


def _matches(module: str, glob: str) -> bool:
    """A glob names modules by their own path or by their class's: both `*.3.mlp` and `model.layers.[*].mlp`."""
    return fnmatchcase(module, glob) or fold_path(module)[0] == glob


def module_classes(
    graph: Graph, decisions: Decisions, spent: Mapping[str, Spent] | None = None, glob: str | None = None
) -> tuple[ModuleClass, ...]:
    """Classes in the order in which forward reaches them; `glob` restricts to modules whose path matches.

    `spent` is by module path.
    """
    classes = _Classes(graph, glob)
    _add_nodes(classes, graph, decisions)
    _add_spent(classes, spent or {})
    _add_weights(classes, graph, decisions)
    _add_saved(classes, graph, decisions)
    num_classes = Counter(pattern for pattern, _ in classes)
    return tuple(
        _finish(pattern, found, _path(pattern, found, num_classes[pattern] == 1), spent is not None)
        for (pattern, _), found in classes.items()
    )


def _path(pattern: str, found: _Gathered, alone: bool) -> str:
    """The module's own path where it is one, else the pattern, with layers where others share the pattern."""
    if len(found.paths) == 1:
        return next(iter(found.paths))
    if alone or pattern.count("*") != 1:
        return pattern
    return pattern.replace("*", "{" + layer_runs(found.paths.values()).replace(" ", "") + "}")


def _add_nodes(classes: _Classes, graph: Graph, decisions: Decisions) -> None:
    for node in graph.nodes:
        entry = classes.of(node.module)
        if entry is not None and node.phase is Phase.FORWARD and node.results:
            entry[0].activation = format_layout(layout_of(decisions, node.name))


def _add_spent(classes: _Classes, spent: Mapping[str, Spent]) -> None:
    for module, seconds in spent.items():
        entry = classes.of(module)
        if entry is not None:
            entry[0].spent += seconds


def _add_weights(classes: _Classes, graph: Graph, decisions: Decisions) -> None:
    for name in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN):
        module, _, own_name = name.rpartition(".")
        entry = classes.of(module)
        if entry is None:
            continue
        gathered, layer = entry
        gathered.weight_bytes += local_bytes(graph, decisions, name)
        layout = format_layout(layout_of(decisions, name))
        gathered.weights.setdefault(own_name, {}).setdefault(layout, []).append(layer)


def _add_saved(classes: _Classes, graph: Graph, decisions: Decisions) -> None:
    for name in dict.fromkeys((*saved_storages(graph), *decisions.fates)):
        entry = classes.of(graph.producers[name].module)
        if entry is None:
            continue
        gathered, layer = entry
        fate = decisions.fates.get(name, Fate.KEEP)
        gathered.held[fate] += local_bytes(graph, decisions, name)
        gathered.saved.setdefault(fold_path(name)[0], {}).setdefault(fate, []).append(layer)


def _finish(pattern: str, found: _Gathered, path: str, priced: bool) -> ModuleClass:
    return ModuleClass(
        path=path,
        pattern=pattern,
        layers=tuple(found.paths.values()),
        weights=tuple(
            Weight(name, {layout: tuple(layers) for layout, layers in layouts.items()})
            for name, layouts in found.weights.items()
        ),
        activation=found.activation,
        num_saved=len(found.saved),
        fates=tuple(_fates(found.saved)),
        weight_bytes=found.weight_bytes,
        kept_bytes=found.held[Fate.KEEP],
        offloaded_bytes=found.held[Fate.OFFLOAD],
        recomputed_bytes=found.held[Fate.RECOMPUTE],
        spent=found.spent if priced else None,
    )


def _fates(saved: Mapping[str, Mapping[Fate, list[tuple[int, ...]]]]) -> Iterator[FateLayers]:
    for fate in (Fate.RECOMPUTE, Fate.OFFLOAD, Fate.KEEP):
        having = [by_fate[fate] for by_fate in saved.values() if fate in by_fate]
        if having:
            layers = dict.fromkeys(layer for layers in having for layer in layers)
            yield FateLayers(fate, len(having), tuple(layers))
