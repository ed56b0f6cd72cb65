"""Copy room: copies between tiers take the time that memory gives them.

Needs a rank graph in which the wait of a copy to the host stands right behind its start, and that of a copy back, or of
a parameter that lies on the host, right before its first use. Gives the same nodes in another order: copies out are
waited for as late, also in backward, and copies in start as early, as the program can hold what they hold without
exceeding `room_bytes`. Where there is no room they stay where they are, so this never makes a program hold more than
the room, or than it held before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from shardwright.ir import Graph, Node, Phase, Tier
from shardwright.passes.copies import tier_of
from shardwright.passes.lifetimes import curve_bytes, first_backward, lifetimes

__all__ = ["CopyRoom"]

_BLOCK_BYTES = 512
"""Sizes are rounded up to what CUDA's allocator takes, on every device: the plan of a device fits on all of them."""


@dataclass(frozen=True, slots=True)
class CopyRoom:
    """Spread starts and waits of copies."""

    name: ClassVar[str] = "copy-room"

    room_bytes: int
    """What the program may hold at once: parameters, buffers and the batch included, optimizer state not."""

    def run(self, graph: Graph) -> Graph:
        if not any(node.op.startswith("tier.") for node in graph.nodes):
            return graph
        return replace(graph, nodes=_Spreading(graph, self.room_bytes).run())


@dataclass
class _Spreading:
    graph: Graph
    room_bytes: int
    before: dict[int, list[Node]] = field(default_factory=dict)
    """Position to the nodes that move in front of it."""
    moved: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.border = first_backward(self.graph)
        found = lifetimes(self.graph, _BLOCK_BYTES)
        on_device = [storage for storage in found.storages if storage.tier is Tier.DEVICE]
        self.roots, self.sizes = found.roots, {storage.name: storage.num_bytes for storage in on_device}
        self.held_bytes = list(curve_bytes(on_device, len(self.graph.nodes)))
        """While each node runs."""

    def run(self) -> tuple[Node, ...]:
        self._hasten_starts(self._delay_waits())
        order: list[Node] = []
        for position, node in enumerate(self.graph.nodes):
            order.extend(self.before.get(position, ()))
            if position not in self.moved:
                order.append(node)
        order.extend(self.before.get(len(self.graph.nodes), ()))
        return tuple(order)

    def _move(self, position: int, target: int) -> None:
        """Put the node in front of the one at `target`, into its phase."""
        node = self.graph.nodes[position]
        phase = node.phase if target <= self.border else Phase.BACKWARD
        self.moved.add(position)
        self.before.setdefault(target, []).append(replace(node, phase=phase))

    def _num_bytes(self, name: str) -> int:
        """Of the storage on the device."""
        return self.sizes[self.roots[name]]

    def _delay_waits(self) -> dict[str, int]:
        """Copies to the host end, oldest first, where what they hold is wanted. Gives the position of each by the name
        of the finished copy."""
        latest = self._latest_ends()
        under_way: dict[int, int] = {}
        ends: dict[str, int] = {}
        copied_bytes = 0
        for position, node in enumerate(self.graph.nodes):
            due = [wait for wait in latest.get(position, ()) if wait in under_way]
            while due or (under_way and self.held_bytes[position] + copied_bytes > self.room_bytes):
                wait = due.pop() if due else self._soonest(under_way)
                copied_bytes -= under_way.pop(wait)
                self._move(wait, position)
                ends[self.graph.nodes[wait].name] = position
            self.held_bytes[position] += copied_bytes
            if self._ends_copy_out(node):
                ends[node.name] = position + 1
                under_way[position] = self._num_bytes(node.operands[1])
                copied_bytes += under_way[position]
        return ends

    def _soonest(self, under_way: Mapping[int, int]) -> int:
        """The oldest copy of the fastest tier."""
        return next((wait for wait in under_way if self._tier(wait) is Tier.HOST), next(iter(under_way)))

    def _tier(self, position: int) -> Tier:
        return tier_of(self.graph, self.graph.nodes[position])

    def _ends_copy_out(self, node: Node) -> bool:
        return node.op == "tier.wait" and self.graph.producers[node.operands[0]].op == "tier.offload"

    def _latest_ends(self) -> dict[int, list[int]]:
        """Position to the waits of copies out that have to stand there at the latest: half the way from the start of
        backward to the first use, so that the other half is left for the way back."""
        found: dict[int, list[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            if self._ends_copy_out(node):
                users = self.graph.users.get(node.name, ())
                first = min((user for user in users if self.graph.nodes[user].op == "tier.reload"), default=self.border)
                latest = max((self.border + first) // 2, position + 1)
                found.setdefault(latest, []).append(position)
        return found

    def _hasten_starts(self, ends: Mapping[str, int]) -> None:
        """Copies to the device, of each tier in the order of their use, start as early as there is room from then on:
        those of parameters in their phase."""
        earliest = dict.fromkeys(Tier, 0)
        for position, node in enumerate(self.graph.nodes):
            if position == self.border:
                earliest = dict.fromkeys(Tier, self.border)
            if node.op != "tier.reload":
                continue
            tier, num_bytes = self._tier(position), self._num_bytes(node.name)
            start, first = position, max(earliest[tier], ends.get(node.operands[0], 0))
            while start > first and self.held_bytes[start - 1] + num_bytes <= self.room_bytes:
                start -= 1
                self.held_bytes[start] += num_bytes
            self._move(position, start)
            earliest[tier] = start
