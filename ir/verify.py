"""What every graph must be, captured or of a rank; written down once and run between passes.

Each check names the node, its module and source line. Checks of types hold for global and for local shapes.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from shardwright.ir.errors import GraphError
from shardwright.ir.graph import Graph, InputKind, Node, Phase
from shardwright.ir.names import closest
from shardwright.ir.ops import aliased_operand, is_async_start
from shardwright.ir.types import DTYPE_BYTES, TensorType

__all__ = ["verify_graph"]

_WAITS: Final = frozenset({"mesh.wait", "tier.wait"})

_SAME_SIZE: Final = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "t.default", "transpose.int", "permute.default", "unsqueeze.default",
        "squeeze.default", "squeeze.dim", "squeeze.dims", "detach.default", "alias.default",
    )
) | {"mesh.wait", "mesh.merge", "tier.wait", "mesh.all_reduce_"}  # fmt: skip
"""Views that show every element of their operand once."""


def verify_graph(graph: Graph) -> None:
    """Raises GraphError at the first rule that is broken."""
    _check_types(graph)
    _check_order(graph)
    for node in graph.nodes:
        _check_view(graph, node)
    _check_returned(graph)
    _check_waits(graph)
    _check_in_place(graph)


def _place(node: Node) -> str:
    module = f", module {node.module}" if node.module else ""
    source = f", {node.source}" if node.source else ""
    return f"at {node.name or '(no result)'!r} = {node.op}{module}{source}"


def _named(graph: Graph) -> Iterator[tuple[str, str]]:
    """Every value with where it is made."""
    for given in graph.inputs:
        yield given.name, f"at {given.kind} {given.name!r}"
    for node in graph.nodes:
        for result in node.results:
            yield result, _place(node)


def _check_types(graph: Graph) -> None:
    seen: dict[str, str] = {}
    for name, place in _named(graph):
        if not name:
            raise GraphError(f"expected every value to have a name, found an empty one {place}")
        if name in seen:
            raise GraphError(f"expected every value to be named once, found {name!r} {place} and {seen[name]}")
        seen[name] = place
        if name not in graph.types:
            raise GraphError(f"expected a type for every value, found none for {name!r} {place}")
        _check_type(graph.types[name], name, place)
    extra = next((name for name in graph.types if name not in seen), None)
    if extra is not None:
        raise GraphError(f"expected types of values only, found one for {extra!r}, which nothing makes")


def _check_type(found: TensorType, name: str, place: str) -> None:
    if found.dtype not in DTYPE_BYTES:
        raise GraphError(f"expected a dtype of {', '.join(DTYPE_BYTES)}, found {found.dtype!r} of {name!r} {place}")
    if any(size < 0 for size in found.shape):
        raise GraphError(f"expected sizes of 0 or more, found {found} of {name!r} {place}")
    if found.strides is not None and len(found.strides) != len(found.shape):
        raise GraphError(f"expected as many strides as dims, found {found} of {name!r} {place}")


def _check_order(graph: Graph) -> None:
    known = {given.name for given in graph.inputs}
    phase = Phase.FORWARD
    for node in graph.nodes:
        if phase is Phase.BACKWARD and node.phase is Phase.FORWARD:
            raise GraphError(
                f"expected all forward nodes before all backward nodes, found a forward node {_place(node)}"
            )
        phase = node.phase
        for operand in node.operands:
            if operand not in known:
                later = (
                    "which is made later" if operand in graph.types else f"which nothing makes{closest(operand, known)}"
                )
                raise GraphError(f"expected operands made before their use, found {operand!r}, {later}, {_place(node)}")
        known.update(node.results)


def _check_view(graph: Graph, node: Node) -> None:
    source = aliased_operand(node)
    if source is None:
        return
    expected = graph.types[source]
    for result in node.results:
        found = graph.types[result]
        if node.op != "aten.view.dtype" and found.dtype != expected.dtype:
            raise GraphError(
                f"expected a view to keep dtype {expected.dtype}, found {found} of {result!r} {_place(node)}"
            )
        if node.op in _SAME_SIZE and found.num_elements != expected.num_elements:
            raise GraphError(
                f"expected a view of {source!r} to keep its {expected.num_elements} elements ({expected}), "
                f"found {found} of {result!r} {_place(node)}"
            )


def _check_returned(graph: Graph) -> None:
    for name in graph.returned:
        if name not in graph.types:
            raise GraphError(
                f"expected returned values to exist, found {name!r}, which nothing makes{closest(name, graph.types)}"
            )
    _check_pairs(graph, "gradient", graph.gradients, InputKind.PARAM)
    _check_pairs(graph, "update", graph.updates, InputKind.BUFFER)


def _check_pairs(graph: Graph, what: str, pairs: Mapping[str, str], kind: InputKind) -> None:
    """A gradient or new value has the dtype and shape of what it is for; memory layout may differ."""
    targets = graph.inputs_of(kind)
    for name, value in pairs.items():
        if name not in targets:
            raise GraphError(f"expected a {what} for a {kind} only, found one for {name!r}{closest(name, targets)}")
        expected, found = graph.types[name], graph.types[value]
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            made = graph.producers.get(value)
            place = _place(made) if made else f"at input {value!r}"
            raise GraphError(f"expected the {what} of {name!r} to be {expected}, found {found} {place}")


def _check_waits(graph: Graph) -> None:
    """A started transfer is read by its own wait first, and is always waited for."""
    started: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op in _WAITS:
            _check_wait(graph, node)
            started.pop(node.operands[0], None)
        for operand in node.operands:
            if operand in started:
                raise GraphError(f"expected a wait for {operand!r} before its first use, found a use {_place(node)}")
        if is_async_start(node.op):
            started |= dict.fromkeys(node.results, node)
    for node in started.values():
        raise GraphError(f"expected a wait for every started transfer, found none for the one {_place(node)}")
    for name in graph.returned:
        made = graph.producers.get(name)
        if made is not None and is_async_start(made.op):
            raise GraphError(f"expected finished values to be returned, found the started transfer {_place(made)}")


def _check_wait(graph: Graph, wait: Node) -> None:
    start = graph.producers.get(wait.operands[0]) if wait.operands else None
    if start is None or not is_async_start(start.op):
        raise GraphError(f"expected a wait on the result of a started transfer, found another value {_place(wait)}")
    family = start.op.partition(".")[0]
    if wait.op != f"{family}.wait":
        raise GraphError(f"expected {family}.wait for a {start.op}, found {wait.op} {_place(wait)}")
    sent = start.operands[0] if start.operands else ""
    if len(wait.operands) > 1 and wait.operands[1] != sent:
        raise GraphError(
            f"expected the wait to name what was sent, {sent!r}, found {wait.operands[1]!r} {_place(wait)}"
        )


def _check_in_place(graph: Graph) -> None:
    """`mesh.all_reduce_` overwrites its operand: names of that storage made before it may not be read after it."""
    if all(node.op != "mesh.all_reduce_" for node in graph.nodes):
        return
    roots = {given.name: given.name for given in graph.inputs}
    members: dict[str, list[str]] = {name: [name] for name in roots}
    stale: dict[str, Node] = {}
    for node in graph.nodes:
        read = node.operands[:1] if node.op == "mesh.wait" else node.operands
        old = next((operand for operand in read if operand in stale), None)
        if old is not None:
            writer = stale[old].name
            raise GraphError(f"expected no use of {old!r} after {writer!r} overwrote it, found one {_place(node)}")
        source = aliased_operand(node)
        if node.op == "mesh.all_reduce_" and source is not None:
            stale |= dict.fromkeys(members[roots[source]], node)
        for result in node.results:
            root = roots[source] if source is not None else result
            roots[result] = root
            members.setdefault(root, []).append(result)
    for name in graph.returned:
        if name in stale:
            raise GraphError(
                f"expected no overwritten value to be returned, found {name!r}, overwritten {_place(stale[name])}"
            )
