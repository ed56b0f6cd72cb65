"""Lifetimes: which storages a rank graph has, how large they are, from which node to which they live.

Needs a rank graph (local types); a captured graph works as well. Gives one `Storage` per allocation, in bytes as the
allocator rounds them, and the storage of every value. Views own nothing: a storage lives from the node that makes it
to the last node that reads it or any view of it, as in generated code that drops a name behind its last use.

What the caller holds stays: inputs, parameters and buffers from before the first node, the loss, other outputs and
gradients until after the last. New values of buffers are written into the buffers when forward ends, and die there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardwright.ir import Graph, GraphError, Phase, Tier
from shardwright.ir.ops import aliased_operand
from shardwright.passes.copies import on_host, slot_bytes, tier_of

__all__ = ["Lifetimes", "Storage", "curve_bytes", "first_backward", "lifetimes", "rounded", "storage_roots"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation."""

    name: str
    """The value that made it; views of it have other names."""
    num_bytes: int
    """Rounded up to the allocator's block; a copy on the host is not rounded, one on disk to the file's block."""
    birth: int
    """Position of the node that makes it; -1 for what the graph is given."""
    death: int
    """Position of the last node that needs it; the number of nodes where it outlives them all."""
    tier: Tier
    """Where it lies; off the device are parameters on the host, the copies that `tier.offload` made, and of gradients
    `tier.step`."""


@dataclass(frozen=True)
class Lifetimes:
    """All storages of a graph."""

    storages: tuple[Storage, ...]
    """In order of birth: inputs, then as nodes make them."""
    roots: Mapping[str, str]
    """Every value to the name of its storage."""


def rounded(num_bytes: int, block_bytes: int) -> int:
    """What the allocator takes for a tensor of `num_bytes`.

    >>> rounded(513, 512)
    1024
    """
    return -(-num_bytes // block_bytes) * block_bytes


def storage_roots(graph: Graph) -> dict[str, str]:
    """Every value to the value that made its storage. Raises GraphError for a value that is read before it is made."""
    roots = {given.name: given.name for given in graph.inputs}
    for node in graph.nodes:
        base = aliased_operand(node)
        if base is not None and base not in roots:
            raise GraphError(
                f"expected {base} to be made before {node.op} {node.name} reads it, found it later or never"
            )
        for result in node.results:
            roots[result] = result if base is None else roots[base]
    return roots


def first_backward(graph: Graph) -> int:
    """Position of the first node of backward; the number of nodes where there is none."""
    return next((i for i, node in enumerate(graph.nodes) if node.phase is Phase.BACKWARD), len(graph.nodes))


def curve_bytes(storages: Iterable[Storage], end: int) -> tuple[int, ...]:
    """Bytes alive at each position from 0 to `end`."""
    change = [0] * (end + 2)
    for storage in storages:
        change[max(storage.birth, 0)] += storage.num_bytes
        change[storage.death + 1] -= storage.num_bytes
    return tuple(accumulate(change[: end + 1]))


def lifetimes(graph: Graph, block_bytes: int) -> Lifetimes:
    """The storages of `graph`; a result that nobody reads dies with the node that makes it."""
    roots = storage_roots(graph)
    births = {given.name: -1 for given in graph.inputs}
    deaths = {given.name: len(graph.nodes) for given in graph.inputs}
    tiers = dict.fromkeys(on_host(graph), Tier.HOST)
    for position, node in enumerate(graph.nodes):
        for result in node.results:
            root = roots[result]
            births.setdefault(root, position)
            deaths[root] = max(deaths.get(root, -1), position)
        for operand in node.operands:
            root = roots[operand]
            deaths[root] = max(deaths[root], position)
        if node.op == "tier.offload":
            tiers[node.name] = tier_of(graph, node)
        elif node.op == "tier.step":
            tiers[node.name] = Tier.HOST
    for name, position in _held(graph).items():
        root = roots[name]
        deaths[root] = max(deaths[root], position)
    return Lifetimes(tuple(_storage(graph, n, births[n], deaths[n], tiers.get(n), block_bytes) for n in births), roots)


def _held(graph: Graph) -> dict[str, int]:
    """Returned values to the position until which the caller holds them."""
    kept = (*((graph.loss,) if graph.loss else ()), *graph.outputs.values(), *graph.gradients.values())
    return dict.fromkeys(graph.updates.values(), first_backward(graph) - 1) | dict.fromkeys(kept, len(graph.nodes))


def _storage(graph: Graph, name: str, birth: int, death: int, tier: Tier | None, block_bytes: int) -> Storage:
    exact = graph.types[name].storage_bytes
    if tier is Tier.DISK:
        return Storage(name, slot_bytes(exact), birth, death, tier)
    return Storage(name, exact if tier else rounded(exact, block_bytes), birth, death, tier or Tier.DEVICE)
