"""Storages of the captured graph: when each is alive, and what backward needs of it.

Positions are those of the captured graph. A storage is named by the value that made it; views extend its life. What
a redistribution makes is not here: that depends on the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir import Graph, Phase
from shardwright.ir.ops import aliased_operand, is_random

__all__ = ["Life", "Storages", "find_storages"]


@dataclass
class Life:
    """Positions at which a storage is made and read."""

    born: int
    forward_last: int
    """Last read in forward; `born` where there is none. For one made in backward: -1."""
    backward_uses: list[int] = field(default_factory=list)
    parents: tuple[str, ...] = ()
    """Storages made in forward that its operator reads."""
    children: list[str] = field(default_factory=list)
    """Storages made in forward by operators that read it."""
    crosses: bool = False
    """Whether another layer reads it in forward: recomputing it would cascade through the layers."""
    random: bool = False


@dataclass(frozen=True)
class Storages:
    roots: Mapping[str, str]
    """Value to the value that made its storage."""
    forward: Mapping[str, Life]
    backward: Mapping[str, Life]
    num_forward: int
    """Nodes of forward: the first position of backward."""
    num_nodes: int


def find_storages(graph: Graph, layers: Mapping[str, int]) -> Storages:
    """`layers`: value to layer, for values in a class of layers."""
    roots: dict[str, str] = {}
    forward: dict[str, Life] = {}
    backward: dict[str, Life] = {}
    for position, node in enumerate(graph.nodes):
        in_forward = node.phase is Phase.FORWARD
        read = dict.fromkeys(roots.get(name, name) for name in node.operands)
        base = aliased_operand(node)
        for root in read:
            _note_read(forward.get(root) or backward.get(root), position, in_forward)
        for result in node.results:
            roots[result] = result if base is None else roots.get(base, base)
            if base is None and in_forward:
                parents = tuple(root for root in read if root in forward)
                forward[result] = Life(position, position, parents=parents, random=is_random(node.op))
                for parent in parents:
                    forward[parent].children.append(result)
            elif base is None:
                backward[result] = Life(position, -1, [position])
        if in_forward:
            layer = layers.get(node.name, -1)
            for root in read:
                if root in forward and layers.get(root, -1) not in (layer, -1):
                    forward[root].crosses = True
    num_forward = sum(node.phase is Phase.FORWARD for node in graph.nodes)
    return Storages(roots, forward, backward, num_forward, len(graph.nodes))


def _note_read(life: Life | None, position: int, in_forward: bool) -> None:
    if life is None:
        return
    if in_forward:
        life.forward_last = position
    else:
        life.backward_uses.append(position)
