"""Bytes and repeated operators of torch's forward and backward as they stand: an oracle for the translation to fates.

Needs a `Partition`. Knows nothing of our graph, its views or its lifetimes: a storage is what fake tensors share, it is
there from the node that first makes it to the last that reads any tensor on it; what the caller hands in, the tangent
of the loss as well, and what is returned stay.
Both graphs run in the order that torch gave them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch_fates import Partition

from shardwright.passes.lifetimes import rounded

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """Of one step, without what the caller hands in and optimizer state, which are there whatever is decided."""

    peak_bytes: int
    saved_bytes: int
    """Handed from forward to backward."""


def measure(found: Partition, block_bytes: int) -> Measured:
    """The larger of forward's and backward's peak."""
    returned = list(found.forward.graph.output_node().args[0])  # type: ignore[arg-type]
    held = returned[: found.num_forward_outputs]
    inputs = [
        *found.forward.graph.find_nodes(op="placeholder"),
        *(n for n in found.backward.graph.find_nodes(op="placeholder") if "tangents" in n.name),
    ]
    given = {key for node in inputs for key, _ in _storages(node)}
    forward = _peak(found.forward.graph, (), given, block_bytes)
    backward = _peak(found.backward.graph, held, given, block_bytes)
    saved = dict(item for node in returned[found.num_forward_outputs :] for item in _storages(node))
    return Measured(max(forward, backward), _total((s for k, s in saved.items() if k not in given), block_bytes))


def _peak(graph: fx.Graph, held: Iterable[fx.Node], given: set[int], block_bytes: int) -> int:
    """`held`: nodes of another graph that stay; `given`: storages that do not count."""
    nodes = list(graph.nodes)
    sizes: dict[int, int] = {}
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for key, size in _storages(node):
            sizes[key] = rounded(size, block_bytes)
            birth.setdefault(key, 0 if node.op == "placeholder" else position)
            death[key] = max(death.get(key, 0), position)
        for operand in node.all_input_nodes:
            for key, _ in _storages(operand):
                death[key] = position
    for node in held:
        for key, size in _storages(node):
            sizes[key], birth[key], death[key] = rounded(size, block_bytes), 0, len(nodes)
    changes = [0] * (len(nodes) + 2)
    for key in sizes.keys() - given:
        changes[birth[key]] += sizes[key]
        changes[death[key] + 1] -= sizes[key]
    largest = alive = 0
    for change in changes:
        alive += change
        largest = max(largest, alive)
    return largest


def _total(sizes: Iterable[int], block_bytes: int) -> int:
    return sum(rounded(size, block_bytes) for size in sizes)


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """(identity, bytes) of the storages of what a node makes."""
    value = node.meta.get("val")
    tensors = [t for t in (value if isinstance(value, tuple | list) else (value,)) if isinstance(t, torch.Tensor)]
    return [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors]
